/* sim_stream.c - the simulated device whose packets go over a stream socket that each queue pair is given. */

/*
 * The same queue pairs as those of "sim": states, order, access. But nobody is dialled: the socket over which two ends
 * learned of each other's queue pairs, a TCP connection on which the job key was proved, is given to the queue pair
 * when that is ready to send, and carries its packets from then on, requests and answers in either direction. Reading
 * waits for nothing, so two ends that are full of requests do not wait for each other's answers.
 *
 * Memory is touched by system calls, which a page that is gone makes fail where a copy would crash: such a device
 * serves users, and a real one holds pages that were freed too early.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "providers/verbs/sim.h"

enum {
    IN_BYTES = 64 << 10, /* read at a time: many packets */
    ROUNDS = 4,          /* of reading for one queue pair before others have their turn */
    KEEP_IDLE = 2,       /* seconds: a connection that stands by must not be found dead when it is needed */
    KEEP_COUNT = 2,
    SILENT_MS = 5000 /* as long as what was sent may stay without an answer; probes end then as well */
};

struct sim_stream {
    int fd;
    size_t out_at, out_len; /* the rest of a packet that did not leave whole */
    size_t in_len;
    uint8_t out[sizeof(struct sim_packet) + SIM_MTU];
    uint8_t in[IN_BYTES];
};

static void room(struct sim_qp *qp, int there) {
    qp->out_waits = qp->in_waits = !there;
    sim_watch_stream(qp, !there);
}

/* 1: the rest of the last packet is gone, or there was none. */
static int flush_rest(struct sim_stream *s) {
    while (s->out_at < s->out_len) {
        ssize_t n = send(s->fd, s->out + s->out_at, s->out_len - s->out_at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno == EAGAIN || errno == ENOBUFS ? 0 : -1;
        s->out_at += (size_t)n;
    }
    return 1;
}

int sim_stream_send(struct sim_qp *qp, const struct sim_packet *packet, const void *payload, size_t len) {
    struct sim_stream *s = qp->stream;
    struct sim_packet head = *packet;
    struct iovec iov[2] = {{&head, sizeof head}, {(void *)(uintptr_t)payload, len}};
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = len ? 2 : 1};
    ssize_t n;
    if (s->out_at < s->out_len) return 0;
    head.bytes = (uint32_t)len;
    do n = sendmsg(s->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno != EAGAIN && errno != ENOBUFS) return -1;
    if (n == (ssize_t)(sizeof head + len)) return 1;
    room(qp, 0);
    if (n < 0) return 0;
    memcpy(s->out, &head, sizeof head);
    if (len) memcpy(s->out + sizeof head, payload, len);
    s->out_at = (size_t)n;
    s->out_len = sizeof head + len;
    return 1;
}

void sim_stream_writable(struct sim_qp *qp) {
    struct sim_context *ctx = sim_of(qp->base.context);
    uint32_t qpn = qp->base.qp_num;
    int done = flush_rest(qp->stream);
    if (done == 0) return;
    if (done < 0) {
        sim_hang_up(qp);
        sim_on_gone(qp);
        return;
    }
    room(qp, 1);
    sim_answer_pump(qp); /* the peer waits for these */
    if (sim_qp_find(ctx, qpn) && qp->stream) sim_transmit(qp);
}

/* Hands on the packets that are whole; 0: the stream has ended meanwhile, or makes no sense. */
static int packets(struct sim_qp *qp) {
    struct sim_stream *s = qp->stream;
    struct sim_packet packet;
    size_t at = 0;
    while (s->in_len - at >= sizeof packet) {
        memcpy(&packet, s->in + at, sizeof packet);
        if (packet.bytes > SIM_MTU) return 0;
        if (s->in_len - at < sizeof packet + packet.bytes) break;
        const uint8_t *payload = s->in + at + sizeof packet;
        at += sizeof packet + packet.bytes;
        if (packet.op >= SIM_ACK)
            sim_on_answer(qp, &packet, payload, packet.bytes);
        else
            sim_on_request(qp, &packet, payload, packet.bytes);
        if (qp->stream != s) return 0; /* it broke the queue pair */
    }
    memmove(s->in, s->in + at, s->in_len - at);
    s->in_len -= at;
    return 1;
}

void sim_stream_receive(struct sim_qp *qp) {
    for (int i = 0; i < ROUNDS && qp->stream; i++) {
        struct sim_stream *s = qp->stream;
        ssize_t n = recv(s->fd, s->in + s->in_len, IN_BYTES - s->in_len, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return;
        if (n > 0) {
            s->in_len += (size_t)n;
            if (packets(qp)) continue;
        }
        if (qp->stream) sim_hang_up(qp);
        sim_on_gone(qp);
    }
}

void sim_stream_free(struct sim_qp *qp) {
    free(qp->stream);
    qp->stream = NULL;
}

/* The thread sanitizer follows what is known through a socket by no other call. */
static int copy_of(int fd) {
#ifdef __SANITIZE_THREAD__
    return dup(fd);
#else
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
#endif
}

/* Those that are not of the socket's family change nothing. */
static void classify(int fd, const struct ibv_ah_attr *ah) {
    int class = ah->grh.traffic_class;
    if (!class) return;
    setsockopt(fd, IPPROTO_IP, IP_TOS, &class, sizeof class);
    setsockopt(fd, IPPROTO_IPV6, IPV6_TCLASS, &class, sizeof class);
}

int hr_verbs_sim_attach(struct ibv_qp *base, int fd) {
    struct sim_context *ctx = sim_of(base->context);
    struct sim_qp *qp = (struct sim_qp *)base;
    struct sim_stream *s = calloc(1, sizeof *s);
    int one = 1, idle = KEEP_IDLE, every = 1, count = KEEP_COUNT, silent = SILENT_MS, rc = 0;
    if (!s) return ENOMEM;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silent, sizeof silent);
    pthread_mutex_lock(&ctx->lock);
    classify(fd, &qp->attr.ah_attr);
    s->fd = base->state == IBV_QPS_RTS && !qp->stream ? copy_of(fd) : -1;
    if (s->fd < 0) {
        rc = base->state != IBV_QPS_RTS ? EINVAL : qp->stream ? EBUSY : errno;
        free(s);
    } else {
        qp->stream = s;
        qp->out = qp->in = s->fd;
        if (sim_watch_stream(qp, 0)) {
            rc = errno;
            sim_hang_up(qp);
        }
    }
    if (!rc) sim_transmit(qp);
    pthread_mutex_unlock(&ctx->lock);
    return rc;
}

int sim_touch(void *to, const void *from, size_t len) {
    struct iovec here = {to, len}, there = {(void *)(uintptr_t)from, len};
    ssize_t n = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
    if (n == (ssize_t)len) return 1;
    if (n >= 0 || errno == EFAULT) return 0;
    memcpy(to, from, len); /* a sandbox that forbids the call */
    return 1;
}
