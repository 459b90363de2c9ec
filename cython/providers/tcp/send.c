/* send.c - frames out: at once when the socket takes them, otherwise by a bounded ring; taking operations back. */

/*
 * A posted operation whose frame goes into the kernel whole is done: HR_OK, no callback, no copy kept. Otherwise the
 * rest waits in the ring, its payload by reference, and done is told when the kernel has the last byte. EPOLLOUT is
 * asked for while something waits; it is given back at the first such event that finds nothing, so a steady stream does
 * not change it twice per operation.
 */

#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "providers/tcp/tcp.h"

#define SMALL 1024 /* up to this payload copying behind the header beats a second iovec */
#define MAX_IOV 16
#define ROUNDS 8 /* writes to one socket in a row */
enum { CUT_MOST = 8 /* segments of a frame that is cut */, LONG_SEGMENT = 16 << 10, SLEPT = 50, SLEPT_MOST = 1000 };

static struct hr_tcp_op *ring_at(struct hr_tcp_ep *ep, uint32_t i) {
    return &ep->ring[(ep->tx_head + i) % HR_TCP_RING];
}

static size_t op_size(const struct hr_tcp_op *op) { return op->head_len + op->len; }

void hr_tcp_tx_fail(struct hr_tcp_ep *ep, int error) {
    if (!ep->tx_errno) ep->tx_errno = error;
    hr_tcp_ep_ready(ep);
}

static ssize_t send_once(struct hr_tcp_ep *ep, const uint8_t *head, size_t head_len, const void *payload, size_t len) {
    uint8_t small[sizeof(struct hr_tcp_frame) + HR_MAX_HDR + SMALL];
    struct iovec iov[2] = {{(void *)(uintptr_t)head, head_len}, {(void *)(uintptr_t)payload, len}};
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 2};
    ssize_t n;
    if (len <= SMALL) {
        if (head_len) memcpy(small, head, head_len);
        if (len) memcpy(small + head_len, payload, len);
    }
    do {
        n = len <= SMALL ? send(ep->source.fd, small, head_len + len, MSG_NOSIGNAL | MSG_DONTWAIT)
                         : sendmsg(ep->source.fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    return n;
}

/* Bytes that go to the receiver as one. Over loopback it grows with the window, up to 64 KiB. */
static size_t segment_of(const struct hr_tcp_ep *ep) {
    int mss = 0;
    socklen_t len = sizeof mss;
    return getsockopt(ep->source.fd, IPPROTO_TCP, TCP_MAXSEG, &mss, &len) == 0 && mss > 0 ? (size_t)mss : 0;
}

void hr_tcp_tx_ready(struct hr_tcp_ep *ep) {
    ep->tx_long = hr_tcp_domain_of(&ep->base)->crowded && segment_of(ep) >= LONG_SEGMENT;
    ep->peer_sleeps = 1;
}

/* Each sleep is said in 50 frames, many in up to a thousand: who sleeps oftener than once in 50 goes on saying it. */
void hr_tcp_tx_slept(struct hr_tcp_domain *d) {
    d->slept = d->slept < SLEPT_MOST - SLEPT ? d->slept + SLEPT : SLEPT_MOST;
}

/* The kernel sends a segment when it is full, and on a host that wakes the receiver at once. For a few bytes behind it
 * the receiver is woken again, and where ranks share cores it had the sender's until then. So there the last segment of
 * a frame that would be short has half of the one before it; unless the receiver does not sleep, which it says: then
 * that is only a call more. It says so by each stream for itself: what only goes one way by a stream of its own is cut.
 */
static ssize_t send_now(struct hr_tcp_ep *ep, const uint8_t *head, size_t head_len, const uint8_t *payload,
                        size_t len) {
    size_t total = head_len + len,
           segment = ep->tx_long && ep->peer_sleeps && total > LONG_SEGMENT ? segment_of(ep) : 0;
    size_t tail = segment ? total % segment : 0;
    if (total <= segment || !tail || tail > segment / 4 || total > CUT_MOST * segment)
        return send_once(ep, head, head_len, payload, len);
    size_t last = (segment + tail) / 2, want = len - last;
    ssize_t n = send_once(ep, head, head_len, payload, want), sent = n;
    if (n < (ssize_t)(head_len + want)) return sent;
    n = send_once(ep, NULL, 0, payload + want, last);
    if (n < 0 && errno != EAGAIN) hr_tcp_tx_fail(ep, errno); /* the kernel says why only once */
    return n > 0 ? sent + n : sent;
}

static struct hr_tcp_op *ring_add(struct hr_tcp_ep *ep) {
    if (!ep->ring && !(ep->ring = malloc(HR_TCP_RING * sizeof *ep->ring))) return NULL;
    return ring_at(ep, ep->tx_count);
}

hr_status hr_tcp_push(struct hr_tcp_ep *ep, enum hr_tcp_op_kind kind, const struct hr_tcp_frame *frame, const void *hdr,
                      const void *payload, void *cookie, uint64_t id) {
    int posted = kind == HR_TCP_OP_POSTED || kind == HR_TCP_OP_REQUEST;
    uint8_t head[sizeof *frame + HR_MAX_HDR];
    size_t head_len = sizeof *frame + frame->hdr_len;
    ssize_t sent = 0;
    if (ep->tx_errno) return HR_AGAIN; /* what the peer sent before is received first, then the end is told */
    if (ep->tx_count >= (posted ? HR_TCP_QUEUE : HR_TCP_RING)) return HR_AGAIN;
    struct hr_tcp_op *op = ring_add(ep);
    if (!op) return HR_ERR_NOMEM;
    struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    struct hr_tcp_frame said = *frame;
    if (d->slept) {
        said.flags |= HR_TCP_SLEEPS;
        d->slept--;
    }
    memcpy(head, &said, sizeof said);
    memcpy(head + sizeof *frame, hdr, frame->hdr_len);
    if (ep->tx_count == 0) {
        sent = send_now(ep, head, head_len, payload, frame->len);
        if (sent == (ssize_t)(head_len + frame->len)) return HR_OK;
        if (sent < 0 && errno == EFAULT) return HR_ERR_INVALID;
        if (sent < 0 && errno != EAGAIN) {
            hr_tcp_tx_fail(ep, errno);
            return HR_AGAIN;
        }
        if (sent < 0) sent = 0;
    }
    if (hr_poll_watch(&d->poll, &ep->source, EPOLLIN | EPOLLOUT)) {
        hr_tcp_tx_fail(ep, errno);
        return HR_AGAIN;
    }
    op->kind = kind;
    op->head_len = (uint32_t)head_len;
    op->payload = payload;
    op->len = frame->len;
    op->sent = (size_t)sent;
    op->cookie = cookie;
    op->id = id;
    op->copy = NULL;
    memcpy(op->head, head, head_len);
    ep->tx_count++;
    ep->tx_bytes += op_size(op) - op->sent;
    return HR_INPROGRESS;
}

static void op_end(struct hr_tcp_ep *ep, struct hr_tcp_op *op) {
    if (op->kind == HR_TCP_OP_CHUNK) {
        ep->tx_chunks--;
        if (!op->copy) hr_tcp_domain_of(&ep->base)->regions[(uint32_t)op->id].serving--;
    }
    free(op->copy);
}

/* From here on the payload is our own: the memory it lies in is about to go. Only what is not sent yet counts. */
static int op_detach(struct hr_tcp_op *op) {
    size_t from = op->sent > op->head_len ? op->sent - op->head_len : 0;
    if (!op->len || op->copy) return 0;
    op->copy = malloc(op->len);
    if (!op->copy) return -1;
    memcpy((uint8_t *)op->copy + from, op->payload + from, op->len - from);
    op->payload = op->copy;
    return 0;
}

void hr_tcp_tx_clear(struct hr_tcp_ep *ep) {
    for (uint32_t i = 0; i < ep->tx_count; i++) op_end(ep, ring_at(ep, i));
    ep->tx_count = ep->tx_head = 0;
    ep->tx_bytes = 0;
    ep->tx_errno = 0;
}

void hr_tcp_tx_detach(struct hr_tcp_ep *ep, uint64_t key) {
    for (uint32_t i = 0; i < ep->tx_count; i++) {
        struct hr_tcp_op *op = ring_at(ep, i);
        if (op->kind != HR_TCP_OP_CHUNK || op->copy || op->id != key) continue;
        hr_tcp_domain_of(&ep->base)->regions[(uint32_t)key].serving--;
        if (op_detach(op) == 0) continue;
        /* The frame cannot be finished from memory that goes away, so neither can the connection. */
        op->kind = HR_TCP_OP_ANSWER;
        ep->tx_chunks--;
        hr_tcp_tx_fail(ep, ENOMEM);
    }
}

static ssize_t send_ring(struct hr_tcp_ep *ep) {
    struct iovec iov[MAX_IOV];
    struct msghdr msg = {.msg_iov = iov};
    ssize_t n;
    for (uint32_t i = 0; i < ep->tx_count && msg.msg_iovlen + 2 <= MAX_IOV; i++) {
        struct hr_tcp_op *op = ring_at(ep, i);
        size_t from = op->sent > op->head_len ? op->sent - op->head_len : 0;
        if (op->sent < op->head_len)
            iov[msg.msg_iovlen++] = (struct iovec){op->head + op->sent, op->head_len - op->sent};
        if (from < op->len)
            iov[msg.msg_iovlen++] = (struct iovec){(void *)(uintptr_t)(op->payload + from), op->len - from};
    }
    do { n = sendmsg(ep->source.fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT); } while (n < 0 && errno == EINTR);
    /* All that was sent is noted before anybody is told: a callback may take other operations back. */
    for (size_t i = 0, left = n > 0 ? (size_t)n : 0; left; i++) {
        struct hr_tcp_op *op = ring_at(ep, (uint32_t)i);
        size_t part = op_size(op) - op->sent < left ? op_size(op) - op->sent : left;
        op->sent += part;
        ep->tx_bytes -= part;
        left -= part;
    }
    return n;
}

/* Removes frames that are through, telling at most budget of them; returns how many were told. */
static int pop_sent(struct hr_tcp_ep *ep, int budget) {
    int n = 0;
    while (ep->tx_count && n < budget) {
        struct hr_tcp_op *op = ring_at(ep, 0);
        void *cookie = op->cookie;
        int tell = op->kind == HR_TCP_OP_POSTED;
        if (op->sent < op_size(op)) break;
        op_end(ep, op);
        ep->tx_head = (ep->tx_head + 1) % HR_TCP_RING;
        ep->tx_count--;
        n += tell;
        if (tell) ep->base.domain->sink->done(&ep->base, cookie, HR_OK);
    }
    return n;
}

int hr_tcp_flush(struct hr_tcp_ep *ep, int budget) {
    int told = pop_sent(ep, budget);
    for (int round = 0; round < ROUNDS && told < budget && !ep->tx_errno; round++) {
        hr_tcp_serve_pump(ep);
        if (!ep->tx_count) {
            if (!ep->serve_count) hr_poll_watch(&hr_tcp_domain_of(&ep->base)->poll, &ep->source, EPOLLIN);
            break;
        }
        ssize_t n = send_ring(ep);
        if (n < 0) {
            if (errno != EAGAIN) hr_tcp_tx_fail(ep, errno);
            break;
        }
        told += pop_sent(ep, budget - told);
    }
    return told;
}

static hr_status usable(const struct hr_tcp_ep *ep) {
    switch (ep->state) {
    case HR_TCP_UP: return HR_OK;
    case HR_TCP_WAITING:
    case HR_TCP_DIALING: return HR_AGAIN;
    case HR_TCP_LOST: return ep->told ? HR_AGAIN : HR_ERR_PEER_LOST;
    case HR_TCP_CLOSED: return HR_ERR_PEER_LOST;
    default: return HR_ERR_INVALID;
    }
}

hr_status hr_tcp_post_send(struct hr_ep *base, const struct hr_msg *msg) {
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)base;
    struct hr_tcp_frame frame = {HR_TCP_MSG, (uint8_t)msg->hdr_len, 0, HR_TCP_GUARD, msg->len};
    hr_status status = usable(ep);
    if (msg->hdr_len < 8 || msg->hdr_len > HR_MAX_HDR || msg->hdr_len % 8 || msg->len > HR_TCP_MAX_SEND)
        return HR_ERR_INVALID;
    if (status) return status;
    if (msg->len >= HR_TCP_BULK) hr_tcp_one_way_sends(ep, msg->len, 0);
    return hr_tcp_push(ep, HR_TCP_OP_POSTED, &frame, msg->hdr, msg->payload, msg->cookie, 0);
}

static hr_status check_remote(const struct hr_rmem *remote, uint64_t offset, uint64_t len) {
    return offset > remote->len || len > remote->len - offset ? HR_ERR_ACCESS : HR_OK;
}

hr_status hr_tcp_post_write(struct hr_ep *base, const struct hr_rma *rma) {
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)base;
    struct hr_tcp_frame frame = {HR_TCP_WRITE, sizeof(struct hr_tcp_write), rma->with_notify ? HR_TCP_NOTIFY : 0,
                                 HR_TCP_GUARD, rma->len};
    struct hr_tcp_write write = {rma->remote->rkey, rma->remote->addr + rma->offset, rma->value};
    hr_status status = usable(ep);
    if (!status) status = check_remote(rma->remote, rma->offset, rma->len);
    /* Nothing overtakes what is in the ring. Answers to reads are no reason: they come as long as the peer asks. */
    if (!status && !ep->tx_chunks && ep->tx_bytes >= HR_TCP_QUEUE_BYTES) status = HR_AGAIN;
    if (status) return status;
    if (hr_tcp_one_way_sends(ep, rma->len, rma->one_way)) frame.flags |= HR_TCP_ONE_WAY;
    return hr_tcp_push(ep, HR_TCP_OP_POSTED, &frame, &write, rma->local, rma->cookie, 0);
}

/* A request frame and the place where its answer will be expected. */
static hr_status request(struct hr_tcp_ep *ep, enum hr_tcp_type type, void *hdr, size_t hdr_len,
                         const struct hr_tcp_pending *what) {
    struct hr_tcp_frame frame = {(uint8_t)type, (uint8_t)hdr_len, 0, HR_TCP_GUARD, 0};
    if (!ep->pending && !(ep->pending = calloc(HR_TCP_READS, sizeof *ep->pending))) return HR_ERR_NOMEM;
    uint64_t id = ep->next_id + 1;
    struct hr_tcp_pending *pending = &ep->pending[id % HR_TCP_READS];
    if (pending->id) return HR_AGAIN;
    memcpy(hdr, &id, sizeof id); /* the first member of every request */
    hr_status status = hr_tcp_push(ep, HR_TCP_OP_REQUEST, &frame, hdr, NULL, what->cookie, id);
    if (status != HR_OK && status != HR_INPROGRESS) return status;
    ep->next_id = id;
    *pending = *what;
    pending->id = id;
    return HR_INPROGRESS;
}

hr_status hr_tcp_post_read(struct hr_ep *base, const struct hr_rma *rma) {
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)base;
    struct hr_tcp_read read = {0, rma->remote->rkey, rma->remote->addr + rma->offset, rma->len};
    struct hr_tcp_pending what = {.local = rma->local, .len = rma->len, .cookie = rma->cookie};
    hr_status status = usable(ep);
    if (!status) status = check_remote(rma->remote, rma->offset, rma->len);
    return status ? status : request(ep, HR_TCP_READ, &read, sizeof read, &what);
}

hr_status hr_tcp_post_atomic(struct hr_ep *base, const struct hr_atomic *a) {
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)base;
    struct hr_tcp_atomic atomic = {0, a->remote->rkey, a->remote->addr + a->offset, a->op, a->operand, a->compare};
    struct hr_tcp_pending what = {.local = (uint8_t *)a->result, .len = 8, .atomic = 1, .cookie = a->cookie};
    hr_status status = usable(ep);
    if (a->op != HR_ATOMIC_FETCH_ADD && a->op != HR_ATOMIC_CMP_SWAP) return HR_ERR_INVALID;
    if (!status) status = check_remote(a->remote, a->offset, 8);
    return status ? status : request(ep, HR_TCP_ATOMIC, &atomic, sizeof atomic, &what);
}

static void ring_remove(struct hr_tcp_ep *ep, uint32_t i) {
    ep->tx_bytes -= op_size(ring_at(ep, i));
    for (; i + 1 < ep->tx_count; i++) *ring_at(ep, i) = *ring_at(ep, i + 1);
    ep->tx_count--;
}

/* A frame of which nothing is in the kernel is taken out; one that is half there goes on from a copy, and nobody is
 * told. The answer to a request is dropped when it comes. */
hr_status hr_tcp_cancel(struct hr_ep *base, void *cookie) {
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)base;
    for (uint32_t i = 0; i < ep->tx_count; i++) {
        struct hr_tcp_op *op = ring_at(ep, i);
        int request = op->kind == HR_TCP_OP_REQUEST;
        if ((op->kind != HR_TCP_OP_POSTED && !request) || op->cookie != cookie) continue;
        if (op->sent && request) break;
        if (op->sent) {
            if (op_detach(op)) return HR_ERR_UNSUPPORTED;
            op->kind = HR_TCP_OP_ANSWER;
            return HR_OK;
        }
        if (request) ep->pending[op->id % HR_TCP_READS].id = 0;
        ring_remove(ep, i);
        return HR_OK;
    }
    for (int i = 0; ep->pending && i < HR_TCP_READS; i++) {
        struct hr_tcp_pending *pending = &ep->pending[i];
        if (!pending->id || pending->canceled || pending->cookie != cookie) continue;
        pending->canceled = 1;
        return HR_OK;
    }
    return HR_ERR_INVALID;
}
