/* status.c - the words for each status; they end up in exceptions. */

#include "hr/status.h"

const char *hr_status_text(hr_status s) {
    /* No default: the compiler then names a status that was added to the enum and forgotten here. */
    switch (s) {
    case HR_OK: return "success";
    case HR_INPROGRESS: return "in progress";
    case HR_AGAIN: return "no room now, try again";
    case HR_INTERRUPTED: return "the wait was interrupted";
    case HR_ERR_INVALID: return "invalid argument";
    case HR_ERR_TRUNCATED: return "the message is larger than the buffer posted for it";
    case HR_ERR_CANCELED: return "canceled";
    case HR_ERR_TIMEOUT: return "timed out";
    case HR_ERR_MISMATCH: return "ranks called different collectives";
    case HR_ERR_NOMEM: return "out of memory or over a limit";
    case HR_ERR_UNSUPPORTED: return "not supported by the provider";
    case HR_ERR_ACCESS: return "outside a memory region, or the region was revoked";
    case HR_ERR_IO: return "input/output error";
    case HR_ERR_BROKEN: return "the communicator is broken or closed";
    case HR_ERR_PEER_LOST: return "the peer is gone";
    case HR_ERR_PROTOCOL: return "the peer sent something that cannot be";
    case HR_ERR_UNREACHABLE: return "the peer could not be reached";
    case HR_ERR_AUTH: return "the peer could not prove the job token";
    case HR_ERR_CLOSED: return "the peer closed the connection";
    case HR_ERR_DEVICE: return "the device failed";
    case HR_ERR_NO_DEVICE: return "no such device";
    }
    return "unknown status";
}
