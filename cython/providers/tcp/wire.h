/* wire.h - what two tcp endpoints say to each other once the handshake is through. */
#ifndef HR_TCP_WIRE_H
#define HR_TCP_WIRE_H

/*
 *   caller -> acceptor   hr_tcp_open   which stream of this pair of peers the connection is
 *   acceptor -> caller   hr_tcp_open   the same, once an endpoint is there for it: both ends are connected
 *   both ways            frames, without gap or padding
 *
 * A frame is hr_tcp_frame, hdr_len bytes of header, len bytes of payload. The header of MSG is the user's; the others
 * have one structure each. `guard` is the same in every frame: a stream that lost its place is found out at the next
 * frame, not after it has changed memory. Numbers are little endian, as are all machines that this runs on.
 *
 * READ is answered by one or more READ_DATA frames of at most HR_TCP_CHUNK bytes that add up to nbytes, or that end
 * with one whose status is an error. ATOMIC is answered by ATOMIC_DATA. WRITE is not answered.
 */

#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#    error "the tcp frames are little endian"
#endif

enum hr_tcp_type {
    HR_TCP_MSG = 1,
    HR_TCP_WRITE,
    HR_TCP_READ,
    HR_TCP_READ_DATA,
    HR_TCP_ATOMIC,
    HR_TCP_ATOMIC_DATA,
    HR_TCP_TYPES
};

/* Flags of WRITE. ONE_WAY: more like it comes, and nothing else: one_way.c. Of any frame. SLEEPS: who sends it has
 * slept of late, so what comes for it may have to wake it: send.c. */
enum { HR_TCP_NOTIFY = 1, HR_TCP_ONE_WAY = 2, HR_TCP_SLEEPS = 4 };

#define HR_TCP_GUARD 0x7ac3591eu
#define HR_TCP_MAX_SEND (516u << 10) /* payload of one MSG */
#define HR_TCP_CHUNK (1u << 20)      /* payload of one READ_DATA */
#define HR_TCP_READS 64              /* reads and atomics that may be unanswered on an endpoint */

struct hr_tcp_open {
    uint64_t magic;
    uint32_t version;
    uint32_t stream;
};
#define HR_TCP_OPEN_MAGIC 0x6e65706f61647268u /* "hrdaopen" */
#define HR_TCP_OPEN_VERSION 2u

struct hr_tcp_frame {
    uint8_t type;
    uint8_t hdr_len;
    uint16_t flags;
    uint32_t guard;
    uint64_t len;
};

struct hr_tcp_write {
    uint64_t key;
    uint64_t offset; /* into the registered region */
    uint64_t value;  /* of the notification */
};

struct hr_tcp_read {
    uint64_t id; /* the asker's */
    uint64_t key;
    uint64_t offset;
    uint64_t nbytes;
};

struct hr_tcp_read_data {
    uint64_t id;
    int64_t status;
};

struct hr_tcp_atomic {
    uint64_t id;
    uint64_t key;
    uint64_t offset;
    uint64_t op; /* enum hr_atomic_op */
    uint64_t operand;
    uint64_t compare;
};

struct hr_tcp_atomic_data {
    uint64_t id;
    int64_t status;
    uint64_t value; /* before the operation */
};

#endif
