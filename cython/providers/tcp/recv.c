/* recv.c - frames in: messages in place from the buffer, payload of writes and reads straight to where it belongs. */

/*
 * One buffer per endpoint. It starts small and grows, twice at most, to what a message needs, so that a message lies
 * in it whole and is shown there. Payload of WRITE and READ_DATA does not pass through it, but for what came in the
 * same read as its frame: one readv fills the target, and the buffer with what follows. The target is looked up before
 * each such read and forgotten after it; payload without a target (revoked, canceled) goes to a scratch.
 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "hr/reduce.h"
#include "providers/tcp/tcp.h"

#define ROUNDS 8         /* reads of one socket in a row */
#define BATCH (2u << 20) /* bytes; then others may have the engine, who wait to send something urgent */
#define DRIBBLE 4096     /* bytes of payload in one call, below which it comes slowly */
#define LOWAT (32 << 10)
#define COMMON (130u << 10) /* pieces of transfers and shorter messages */
#define LARGEST (sizeof(struct hr_tcp_frame) + HR_MAX_HDR + HR_TCP_MAX_SEND)

static uint32_t buffered(const struct hr_tcp_ep *ep) { return ep->rx_end - ep->rx_off; }

static void protocol_error(struct hr_tcp_ep *ep, const char *what) { hr_tcp_ep_fail(ep, HR_ERR_PROTOCOL, what, 0); }

static struct hr_tcp_pending *pending_of(struct hr_tcp_ep *ep, uint64_t id) {
    struct hr_tcp_pending *pending = ep->pending ? &ep->pending[id % HR_TCP_READS] : NULL;
    return pending && id && pending->id == id ? pending : NULL;
}

/* Where the next byte of the payload goes; NULL: nowhere. */
static uint8_t *target(struct hr_tcp_ep *ep) {
    struct hr_tcp_body *body = &ep->body;
    uint8_t *at = NULL;
    if (body->type == HR_TCP_WRITE) {
        struct hr_tcp_region *region =
            hr_tcp_region_at(hr_tcp_domain_of(&ep->base), body->key, HR_ACCESS_REMOTE_WRITE, body->offset, body->left);
        if (region) at = region->addr + body->offset;
    } else {
        struct hr_tcp_pending *pending = pending_of(ep, body->id);
        if (pending && !pending->canceled) at = pending->local + pending->have;
    }
    if (!at) body->dropped = 1;
    return body->dropped ? NULL : at;
}

static void advance(struct hr_tcp_ep *ep, uint64_t n) {
    struct hr_tcp_pending *pending = ep->body.type == HR_TCP_READ_DATA ? pending_of(ep, ep->body.id) : NULL;
    ep->body.left -= n;
    ep->body.offset += n;
    if (pending) pending->have += n;
}

static int finish(struct hr_tcp_ep *ep, struct hr_tcp_pending *pending, hr_status status) {
    void *cookie = pending->cookie;
    int tell = !pending->canceled;
    pending->id = 0;
    if (tell) ep->base.domain->sink->done(&ep->base, cookie, status);
    return tell;
}

/* The payload is complete. */
static int body_end(struct hr_tcp_ep *ep) {
    struct hr_tcp_body body = ep->body;
    memset(&ep->body, 0, sizeof ep->body);
    if (body.type == HR_TCP_WRITE) {
        if (!body.notify || body.dropped) return 0;
        ep->base.domain->sink->notify(&ep->base, body.value, body.nbytes);
        return 1;
    }
    struct hr_tcp_pending *pending = pending_of(ep, body.id);
    if (!pending || pending->have < pending->len) return 0;
    return finish(ep, pending, HR_OK);
}

static void start_write(struct hr_tcp_ep *ep, const struct hr_tcp_frame *frame, const struct hr_tcp_write *write) {
    ep->body = (struct hr_tcp_body){.type = HR_TCP_WRITE,
                                    .notify = frame->flags & HR_TCP_NOTIFY,
                                    .left = frame->len,
                                    .nbytes = frame->len,
                                    .key = write->key,
                                    .offset = write->offset,
                                    .value = write->value};
    target(ep); /* a write of nothing to nowhere is not notified either */
}

static int start_read_data(struct hr_tcp_ep *ep, const struct hr_tcp_frame *frame,
                           const struct hr_tcp_read_data *data) {
    struct hr_tcp_pending *pending = pending_of(ep, data->id);
    if (!pending || pending->atomic || frame->len > pending->len - pending->have ||
        (data->status && (frame->len || !hr_is_error((hr_status)data->status)))) {
        protocol_error(ep, "answered a read that was not asked");
        return 0;
    }
    if (data->status) return finish(ep, pending, (hr_status)data->status);
    ep->body = (struct hr_tcp_body){.type = HR_TCP_READ_DATA, .left = frame->len, .id = data->id};
    return 0;
}

static int take_atomic_data(struct hr_tcp_ep *ep, const struct hr_tcp_atomic_data *data) {
    struct hr_tcp_pending *pending = pending_of(ep, data->id);
    if (!pending || !pending->atomic || data->status > 0) {
        protocol_error(ep, "answered an atomic operation that was not asked");
        return 0;
    }
    if (!data->status && !pending->canceled) memcpy(pending->local, &data->value, sizeof data->value);
    return finish(ep, pending, (hr_status)data->status);
}

/* What hdr_len and len of a frame may be. */
static int plausible(const struct hr_tcp_frame *f) {
    static const uint8_t hdr_len[HR_TCP_TYPES] = {[HR_TCP_WRITE] = sizeof(struct hr_tcp_write),
                                                  [HR_TCP_READ] = sizeof(struct hr_tcp_read),
                                                  [HR_TCP_READ_DATA] = sizeof(struct hr_tcp_read_data),
                                                  [HR_TCP_ATOMIC] = sizeof(struct hr_tcp_atomic),
                                                  [HR_TCP_ATOMIC_DATA] = sizeof(struct hr_tcp_atomic_data)};
    if (f->guard != HR_TCP_GUARD || f->type < HR_TCP_MSG || f->type >= HR_TCP_TYPES) return 0;
    if (f->type == HR_TCP_MSG)
        return f->hdr_len >= 8 && f->hdr_len <= HR_MAX_HDR && f->hdr_len % 8 == 0 && f->len <= HR_TCP_MAX_SEND;
    if (f->hdr_len != hdr_len[f->type]) return 0;
    return f->type == HR_TCP_WRITE || f->len == 0 || (f->type == HR_TCP_READ_DATA && f->len <= HR_TCP_CHUNK);
}

static int take_message(struct hr_tcp_ep *ep, const struct hr_tcp_frame *frame, const uint8_t *hdr) {
    uint64_t aligned[HR_MAX_HDR / 8];
    const uint8_t *payload = hdr + frame->hdr_len;
    const void *shown = hdr;
    if ((uintptr_t)hdr % 8) shown = memcpy(aligned, hdr, frame->hdr_len);
    ep->base.domain->sink->recv(&ep->base, shown, frame->hdr_len, payload, frame->len);
    return 1;
}

static int take_frame(struct hr_tcp_ep *ep, const struct hr_tcp_frame *frame, const uint8_t *at) {
    union {
        struct hr_tcp_write write;
        struct hr_tcp_read read;
        struct hr_tcp_read_data read_data;
        struct hr_tcp_atomic atomic;
        struct hr_tcp_atomic_data atomic_data;
    } hdr;
    hr_status status = HR_OK;
    ep->peer_sleeps = frame->flags & HR_TCP_SLEEPS;
    if (frame->len >= HR_TCP_BULK) hr_tcp_one_way_told(ep, frame->flags & HR_TCP_ONE_WAY);
    if (frame->type == HR_TCP_MSG) return take_message(ep, frame, at);
    memcpy(&hdr, at, frame->hdr_len);
    switch (frame->type) {
    case HR_TCP_WRITE: start_write(ep, frame, &hdr.write); return 0;
    case HR_TCP_READ: status = hr_tcp_serve_read(ep, &hdr.read); break;
    case HR_TCP_READ_DATA: return start_read_data(ep, frame, &hdr.read_data);
    case HR_TCP_ATOMIC: status = hr_tcp_serve_atomic(ep, &hdr.atomic); break;
    default: return take_atomic_data(ep, &hdr.atomic_data);
    }
    if (status == HR_ERR_PROTOCOL) protocol_error(ep, "asked for more reads at a time than it may");
    if (status == HR_ERR_NOMEM) hr_tcp_ep_fail(ep, HR_ERR_PEER_LOST, "no memory to answer a read", 0);
    return 0;
}

/* Takes payload that is in the buffer; 1 when the payload is complete. */
static int body_from_buffer(struct hr_tcp_ep *ep) {
    uint64_t n = buffered(ep) < ep->body.left ? buffered(ep) : ep->body.left;
    uint8_t *to = n ? target(ep) : NULL;
    if (to) hr_copy(to, ep->rx + ep->rx_off, n, HR_STORE_CACHED);
    ep->rx_off += (uint32_t)n;
    advance(ep, n);
    return ep->body.left == 0;
}

/* Takes what is complete in the buffer. Leaves rx_need, the bytes from rx_off on that the next frame needs. */
static int parse(struct hr_tcp_ep *ep, int budget) {
    struct hr_tcp_frame frame;
    int n = 0;
    while (ep->state == HR_TCP_UP) {
        if (n >= budget) {
            if (buffered(ep) || ep->body.type) hr_tcp_ep_ready(ep);
            return n;
        }
        if (ep->body.type) {
            if (!body_from_buffer(ep)) return n;
            n += body_end(ep);
            continue;
        }
        ep->rx_need = sizeof frame;
        if (buffered(ep) < sizeof frame) return n;
        memcpy(&frame, ep->rx + ep->rx_off, sizeof frame);
        if (!plausible(&frame)) {
            protocol_error(ep, "sent bytes that are no frame");
            return n;
        }
        ep->rx_need += frame.hdr_len + (frame.type == HR_TCP_MSG ? (uint32_t)frame.len : 0);
        if (buffered(ep) < ep->rx_need) return n;
        const uint8_t *at = ep->rx + ep->rx_off + sizeof frame;
        ep->rx_off += ep->rx_need;
        n += take_frame(ep, &frame, at);
    }
    return n;
}

/* Makes room for the frame at rx_off. */
static int make_room(struct hr_tcp_ep *ep) {
    if (ep->rx_off == ep->rx_end) ep->rx_off = ep->rx_end = 0;
    if (ep->body.type || ep->rx_off + ep->rx_need <= ep->rx_cap) return 0;
    memmove(ep->rx, ep->rx + ep->rx_off, buffered(ep));
    ep->rx_end -= ep->rx_off;
    ep->rx_off = 0;
    if (ep->rx_need <= ep->rx_cap) return 0;
    uint32_t cap = ep->rx_need <= COMMON ? COMMON : LARGEST;
    uint8_t *rx = realloc(ep->rx, cap);
    if (!rx) return -1;
    ep->rx = rx;
    ep->rx_cap = cap;
    return 0;
}

/* How much is read into the buffer: what the frame still needs, and else no more than was usual before a longer one
 * came, as payload that is read behind a frame is copied once more. */
static size_t room_ahead(const struct hr_tcp_ep *ep) {
    size_t room = ep->rx_cap - ep->rx_end, have = buffered(ep);
    size_t most = !ep->body.type && ep->rx_need > have + COMMON ? ep->rx_need - have : COMMON;
    return room < most ? room : most;
}

/* One read: its result as recv has it. *asked_p: what would have fitted. */
static ssize_t fill(struct hr_tcp_ep *ep, size_t *asked_p) {
    struct iovec iov[2];
    struct msghdr msg = {.msg_iov = iov};
    uint64_t left = ep->body.type ? ep->body.left : 0, direct = 0;
    if (left) {
        uint8_t *to = target(ep);
        uint64_t most = to ? BATCH : HR_TCP_SCRATCH;
        direct = left < most ? left : most;
        iov[msg.msg_iovlen++] = (struct iovec){to ? to : hr_tcp_domain_of(&ep->base)->scratch, direct};
    }
    size_t room = direct == left ? room_ahead(ep) : 0;
    if (room) iov[msg.msg_iovlen++] = (struct iovec){ep->rx + ep->rx_end, room};
    *asked_p = direct + room;
    ssize_t n;
    do {
        n = direct ? recvmsg(ep->source.fd, &msg, MSG_DONTWAIT)
                   : recv(ep->source.fd, iov[0].iov_base, iov[0].iov_len, MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n <= 0) return n;
    hr_tcp_one_way_came(ep, (size_t)n);
    uint64_t got = (uint64_t)n < direct ? (uint64_t)n : direct;
    if (got) advance(ep, got);
    ep->rx_end += (uint32_t)((uint64_t)n - got);
    return n;
}

/* Nothing more comes for now, or ever. */
static void dry(struct hr_tcp_ep *ep, ssize_t n, int error) {
    if (n < 0 && error == EAGAIN) {
        if (ep->tx_errno) hr_tcp_ep_fail(ep, HR_ERR_PEER_LOST, "connection lost", ep->tx_errno);
    } else if (n < 0) {
        hr_tcp_ep_fail(ep, HR_ERR_PEER_LOST, "connection lost", error);
    } else {
        hr_tcp_ep_fail(ep, HR_ERR_PEER_LOST, ep->tx_errno ? "connection lost" : "closed by the peer", ep->tx_errno);
    }
}

static void choose_events(struct hr_tcp_ep *ep, size_t bytes) {
    uint64_t left = ep->body.type ? ep->body.left : 0;
    int lowat = 1;
    if (left && (ep->lowat > 1 || bytes < DRIBBLE)) lowat = left < LOWAT ? (int)left : LOWAT;
    if (lowat == ep->lowat || setsockopt(ep->source.fd, SOL_SOCKET, SO_RCVLOWAT, &lowat, sizeof lowat)) return;
    ep->lowat = lowat;
}

int hr_tcp_receive(struct hr_tcp_ep *ep, int budget) {
    size_t asked = 0, bytes = 0;
    int n = buffered(ep) || ep->body.type ? parse(ep, budget) : 0;
    for (int round = 0; round < ROUNDS && n < budget && bytes < BATCH && ep->state == HR_TCP_UP; round++) {
        if (make_room(ep)) {
            hr_tcp_ep_fail(ep, HR_ERR_PEER_LOST, "no memory for its message", ENOMEM);
            break;
        }
        ssize_t got = fill(ep, &asked);
        if (got <= 0) {
            dry(ep, got, errno);
            break;
        }
        n += parse(ep, budget - n);
        bytes += (size_t)got;
        if ((size_t)got < asked && !ep->tx_errno) break;
    }
    if (ep->tx_errno) hr_tcp_ep_ready(ep); /* until all is received */
    if (ep->state == HR_TCP_UP) choose_events(ep, bytes);
    return n || bytes < BATCH ? n : 1; /* part of something large: look again at once */
}
