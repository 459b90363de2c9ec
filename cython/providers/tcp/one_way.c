/* one_way.c - what goes one way for long between two processes of one host: how much of it their sockets hold. */

/*
 * The kernel lets a receiver there have several MiB before it, and one who reads and one who writes meet in the same
 * socket's lock all the time. Where less than 16 segments of 64 KiB fit, and more than may be sent may be given to the
 * kernel, they take turns instead: a dozen segments are read in one call while the next are copied in. 16 and 256 MiB
 * one way go 1.1 to 1.2 times as fast (benchmarks/learned_tcp.md). What is on its way to the peer's engine is bounded
 * as ever, but for half a window in longer pieces. And the sender tries to write at each look (run_hint).
 *
 * It takes a sender that comes back at once when the kernel has room: where a background thread sends, where ranks
 * share cores, where the peer sends as well, and where a congestion control paces, both would wait. And urgent messages
 * would stand behind more. So the engine says of a write that it is of this kind, and the sender tells the receiver, in
 * each frame, once some MiB have gone like that.
 *
 * What was offered may come, and what has no room is dropped, which costs 200 ms. So the receiver first offers less,
 * and narrows its buffer when all that was offered before has come and is read.
 */

#include <netinet/tcp.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "providers/tcp/tcp.h"

#ifndef SO_BUF_LOCK
#    define SO_BUF_LOCK 72 /* Linux 5.14 */
#endif
#define RCVBUF_LOCK 2

enum { LONG = 4 << 20, UNSENT = 2 << 20, OFFER = 400000, READ = 64 << 10, NARROW = 450000, WIDE = 4 << 20 };

static int get(int fd, int level, int option, int *value) {
    socklen_t len = sizeof *value;
    return getsockopt(fd, level, option, value, &len);
}

static int set(int fd, int level, int option, int value) { return setsockopt(fd, level, option, &value, sizeof value); }

/* --- the sender
 * -------------------------------------------------------------------------------------------------------------------
 */

static int paces(int fd) {
    char control[16] = "";
    socklen_t len = sizeof control - 1;
    return getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, control, &len) ||
           (strcmp(control, "cubic") != 0 && strcmp(control, "reno") != 0);
}

void hr_tcp_one_way_begin(struct hr_tcp_ep *ep) {
    struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    int local = hr_ifaces_own(d->ifaces, d->nifaces, &ep->peer);
    ep->base.one_way = 0;
    ep->one_way = (struct hr_tcp_one_way){.may_send = local && d->may_narrow && !d->crowded && !paces(ep->source.fd)};
}

int hr_tcp_one_way_sends(struct hr_tcp_ep *ep, uint64_t nbytes, int one_way) {
    struct hr_tcp_one_way *way = &ep->one_way;
    way->went = one_way && way->may_send ? way->went + nbytes : 0;
    int sending = way->went >= LONG;
    if (sending != way->sending) hr_tcp_socket_unsent(ep->source.fd, sending ? UNSENT : 0);
    return way->sending = ep->base.one_way = sending;
}

/* --- the receiver
 * ----------------------------------------------------------------------------------------------------------------- */

/* Whether the kernel would have a buffer back, and permits one that is wide. */
int hr_tcp_one_way_able(int fd) {
    int lock, is;
    return !get(fd, SOL_SOCKET, SO_BUF_LOCK, &lock) && !set(fd, SOL_SOCKET, SO_RCVBUF, WIDE) &&
           !get(fd, SOL_SOCKET, SO_RCVBUF, &is) && is >= 2 * WIDE;
}

static void offer(struct hr_tcp_ep *ep, int most) { set(ep->source.fd, IPPROTO_TCP, TCP_WINDOW_CLAMP, most); }

/* The kernel, which tunes the buffer, forgets what may be offered when it makes that larger. One that somebody has set
 * stays as it is: then what may be offered is as before. */
static void narrow(struct hr_tcp_ep *ep) {
    struct hr_tcp_one_way *way = &ep->one_way;
    int fd = ep->source.fd, most = 0, unread;
    if (way->window && way->came <= way->offered + (uint64_t)way->window) return;
    if (get(fd, IPPROTO_TCP, TCP_WINDOW_CLAMP, &most) || ioctl(fd, FIONREAD, &unread)) return;
    if (!way->window || most != OFFER) {
        if (most > way->window) way->window = most;
        way->offered = way->came + (uint64_t)unread;
        offer(ep, OFFER);
    } else if (unread <= READ && !get(fd, SOL_SOCKET, SO_RCVBUF, &way->buffer)) {
        set(fd, SOL_SOCKET, SO_RCVBUF, NARROW);
        offer(ep, way->window);
    }
}

/* As it was, as far as the kernel permits, which tunes it again. */
static void widen(struct hr_tcp_ep *ep) {
    struct hr_tcp_one_way *way = &ep->one_way;
    int fd = ep->source.fd, lock, most;
    if (!get(fd, IPPROTO_TCP, TCP_WINDOW_CLAMP, &most) && most < way->window) offer(ep, way->window);
    if (way->buffer) {
        set(fd, SOL_SOCKET, SO_RCVBUF, way->buffer / 2); /* the kernel doubles what it is told */
        if (!get(fd, SOL_SOCKET, SO_BUF_LOCK, &lock)) set(fd, SOL_SOCKET, SO_BUF_LOCK, lock & ~RCVBUF_LOCK);
    }
    way->window = way->buffer = 0;
    way->offered = 0;
}

void hr_tcp_one_way_told(struct hr_tcp_ep *ep, int one_way) {
    struct hr_tcp_one_way *way = &ep->one_way;
    int receiving = one_way && hr_tcp_domain_of(&ep->base)->may_narrow;
    if (way->receiving == receiving) return;
    way->receiving = receiving;
    way->came = 0;
    if (way->window) widen(ep);
}

void hr_tcp_one_way_came(struct hr_tcp_ep *ep, size_t nbytes) {
    struct hr_tcp_one_way *way = &ep->one_way;
    if (!way->receiving || way->buffer) return;
    way->came += nbytes;
    narrow(ep);
}
