/* status.h - the result of every core call, grouped by what it takes down with it. */
#ifndef HR_STATUS_H
#define HR_STATUS_H

/*
 * Positive values are no errors. Negative ones are grouped by blast radius:
 *   -1 .. -31   request: this operation failed, its connection goes on
 *  -32 .. -63   peer:    the connection is gone, and every communicator that holds the peer
 *  -64 .. -95   device:  the domain is gone, and every connection on it
 */
typedef enum hr_status {
    HR_OK = 0,
    HR_INPROGRESS = 1,  /* accepted; a completion callback will follow */
    HR_AGAIN = 2,       /* no room now; nothing was taken, try after progress */
    HR_INTERRUPTED = 3, /* a wait came back early (signal or slice); the request goes on */

    HR_ERR_INVALID = -1,     /* an argument is wrong */
    HR_ERR_TRUNCATED = -2,   /* the message is larger than the buffer posted for it */
    HR_ERR_CANCELED = -3,    /* withdrawn, here or by the peer */
    HR_ERR_TIMEOUT = -4,     /* the deadline passed */
    HR_ERR_MISMATCH = -5,    /* ranks disagree about which collective this is */
    HR_ERR_NOMEM = -6,       /* no memory, or over a limit (the errno is kept beside) */
    HR_ERR_UNSUPPORTED = -7, /* the provider cannot do this */
    HR_ERR_ACCESS = -8,      /* outside a region, or the region was revoked */
    HR_ERR_IO = -9,          /* this operation failed in the device or kernel */
    HR_ERR_BROKEN = -10,     /* the communicator is broken or closed */

    HR_ERR_PEER_LOST = -32,   /* the peer's process or link is gone */
    HR_ERR_PROTOCOL = -33,    /* the peer sent something that cannot be */
    HR_ERR_UNREACHABLE = -34, /* could not be connected */
    HR_ERR_AUTH = -35,        /* the peer could not prove the job token */
    HR_ERR_CLOSED = -36,      /* the peer closed the connection in good order */

    HR_ERR_DEVICE = -64,    /* the device failed */
    HR_ERR_NO_DEVICE = -65, /* there is no such device */
} hr_status;

static inline int hr_is_error(hr_status s) { return s < 0; }
static inline int hr_is_peer_error(hr_status s) { return s <= -32 && s > -64; }
static inline int hr_is_device_error(hr_status s) { return s <= -64; }

/* A lower-case phrase for messages; never NULL. */
const char *hr_status_text(hr_status s);

#endif
