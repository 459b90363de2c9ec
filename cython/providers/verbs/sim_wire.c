/* sim_wire.c - the sockets of the simulated device, and the thread that stands for its hardware. */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include "providers/verbs/sim.h"

static const int64_t polled_lately = 1000000; /* so long the thread leaves the work to who polls */
enum { TICK_MS = 1, PACKETS = 64, MAX_CALLERS = 4096 };

/* What an epoll event names: never a pointer, since what it pointed to may be gone when the event is looked at. */
enum { AT_LISTENER, AT_OUT, AT_IN, AT_CALLER };
static uint64_t event_name(int kind, uint32_t id) { return (uint64_t)kind << 32 | id; }

static int watch(struct sim_context *ctx, int op, int fd, uint32_t events, uint64_t name) {
    struct epoll_event event = {.events = events, .data.u64 = name};
    return epoll_ctl(ctx->epfd, op, fd, &event);
}

/* GIDs of "sim" are random and name their socket in full; those of "sim2" are of networks, and end with its number. */
static socklen_t port_name(const union ibv_gid *gid, struct sockaddr_un *name) {
    static const char digits[] = "0123456789abcdef";
    char *at;
    memset(name, 0, sizeof *name);
    name->sun_family = AF_UNIX;
    at = name->sun_path + 1 + snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "hrdma-sim-");
    for (int i = gid->raw[0] == 0xfd ? 0 : 14; i < 16; i++) {
        *at++ = digits[gid->raw[i] >> 4];
        *at++ = digits[gid->raw[i] & 15];
    }
    return (socklen_t)(at - (char *)name);
}

/* ---- sockets of queue pairs ---- */

/* A forked child may hold a copy: with it the peer would not see the end, and the epoll would tell of it for ever. */
static void drop(struct sim_context *ctx, int *fd) {
    if (*fd >= 0) {
        epoll_ctl(ctx->epfd, EPOLL_CTL_DEL, *fd, NULL);
        shutdown(*fd, SHUT_RDWR);
        close(*fd);
    }
    *fd = -1;
}

void sim_hang_up(struct sim_qp *qp) {
    struct sim_context *ctx = sim_of(qp->base.context);
    drop(ctx, &qp->out);
    if (qp->stream) qp->in = -1; /* it was the same */
    sim_stream_free(qp);
    drop(ctx, &qp->in);
    qp->out_waits = qp->in_waits = 0;
    qp->resume = 0;
    qp->answer_head = qp->answer_tail;
}

int sim_wire_send(struct sim_qp *qp, int out, const struct sim_packet *packet, const void *payload, size_t len) {
    struct sim_context *ctx = sim_of(qp->base.context);
    struct iovec iov[2] = {{(void *)(uintptr_t)packet, sizeof *packet}, {(void *)(uintptr_t)payload, len}};
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = len ? 2 : 1};
    int fd = out ? qp->out : qp->in, *waits = out ? &qp->out_waits : &qp->in_waits;
    ssize_t n;
    if (qp->stream) return sim_stream_send(qp, packet, payload, len);
    do n = sendmsg(fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n >= 0) return 1;
    if (errno != EAGAIN && errno != ENOBUFS) return -1;
    *waits = 1;
    watch(ctx, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLOUT, event_name(out ? AT_OUT : AT_IN, qp->base.qp_num));
    return 0;
}

void sim_wire_end(struct sim_qp *qp) { shutdown(qp->out, SHUT_RDWR); }

int sim_watch_stream(struct sim_qp *qp, int for_room) {
    struct sim_context *ctx = sim_of(qp->base.context);
    uint64_t name = event_name(AT_OUT, qp->base.qp_num);
    if (watch(ctx, EPOLL_CTL_MOD, qp->out, EPOLLIN | (for_room ? EPOLLOUT : 0), name) == 0) return 0;
    return watch(ctx, EPOLL_CTL_ADD, qp->out, EPOLLIN | (for_room ? EPOLLOUT : 0), name);
}

void sim_look_again(struct sim_context *ctx) {
    ctx->waiting = 1;
    if (!pthread_equal(pthread_self(), ctx->thread)) eventfd_write(ctx->kick, 1); /* which would not let itself sleep */
}

/* As long as silence is borne. */
static int64_t patience(const struct sim_qp *qp) {
    return qp->attr.timeout ? (4096LL << qp->attr.timeout) * (qp->attr.retry_cnt + 1) : INT64_MAX;
}

/* Without a descriptor, or with a full queue of callers, it is tried again with the tick, while there is nothing to be
 * sent or patience lasts. */
static void not_yet(struct sim_qp *qp) {
    int64_t now = hr_now();
    if (qp->sq_head == qp->sq_tail)
        qp->silent = 0;
    else if (!qp->silent)
        qp->silent = now;
    else if (now - qp->silent > patience(qp))
        sim_on_gone(qp);
    sim_look_again(sim_of(qp->base.context));
}

/* What has no answer when its port goes down is lost: it is not said again, and waited for in vain. */
static int lost(const struct sim_qp *qp) { return qp->sq_head != qp->sq_at || qp->at_off; }

/* The port of the peer takes the connection at once or is not there. */
void sim_dial(struct sim_qp *qp) {
    struct sim_context *ctx = sim_of(qp->base.context);
    struct sim_packet hello = {.op = SIM_CONNECT, .rkey = qp->base.qp_num, .addr = qp->attr.dest_qp_num};
    hello.len = (uint64_t)patience(qp);
    hello.gid = ctx->gids[qp->attr.port_num - 1][qp->attr.ah_attr.grh.sgid_index];
    struct sockaddr_un name;
    socklen_t len = port_name(&qp->attr.ah_attr.grh.dgid, &name);
    if (ctx->tcp) return; /* it is given a socket */
    if (ctx->down >> qp->attr.port_num & 1 || lost(qp)) {
        not_yet(qp);
        return;
    }
    qp->out = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (qp->out < 0 || connect(qp->out, (struct sockaddr *)&name, len)) {
        if (qp->out >= 0 && errno != EAGAIN) qp->gone = 1;
        drop(ctx, &qp->out);
        if (!qp->gone) not_yet(qp);
    } else if (watch(ctx, EPOLL_CTL_ADD, qp->out, EPOLLIN, event_name(AT_OUT, qp->base.qp_num)) ||
               sim_wire_send(qp, 1, &hello, NULL, 0) < 0) {
        drop(ctx, &qp->out);
        qp->gone = 1;
    } else {
        qp->silent = 0;
    }
}

/* ---- callers ---- */

static void caller_free(struct sim_context *ctx, struct sim_caller *caller) {
    struct sim_caller **at = &ctx->callers;
    while (*at != caller) at = &(*at)->next;
    *at = caller->next;
    drop(ctx, &caller->fd);
    free(caller);
}

void sim_pair(struct sim_qp *qp) {
    struct sim_context *ctx = sim_of(qp->base.context);
    for (struct sim_caller *c = ctx->callers; c; c = c->next) {
        if (!c->named || c->to != qp->base.qp_num || c->from != qp->attr.dest_qp_num ||
            memcmp(&c->gid, &qp->attr.ah_attr.grh.dgid, sizeof c->gid) != 0)
            continue;
        drop(ctx, &qp->in);
        qp->in = c->fd;
        c->fd = -1;
        caller_free(ctx, c);
        watch(ctx, EPOLL_CTL_MOD, qp->in, EPOLLIN, event_name(AT_IN, qp->base.qp_num));
        return;
    }
}

/* Who cannot be accepted stays in the queue, and the epoll would tell of it without end. */
static void listen_later(struct sim_context *ctx) {
    watch(ctx, EPOLL_CTL_MOD, ctx->listener, 0, event_name(AT_LISTENER, 0));
    ctx->deaf = 1;
    sim_look_again(ctx);
}

/* Only processes of the same user reach this port. */
static void take_callers(struct sim_context *ctx) {
    struct ucred who;
    socklen_t len = sizeof who;
    for (int i = 0; i < PACKETS; i++) {
        int fd = accept4(ctx->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) listen_later(ctx);
            return;
        }
        struct sim_caller *caller = calloc(1, sizeof *caller);
        if (!caller || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &len) || who.uid != geteuid()) {
            free(caller);
            close(fd);
            continue;
        }
        caller->fd = fd;
        caller->id = ctx->next_caller++;
        caller->next = ctx->callers;
        ctx->callers = caller;
        if (watch(ctx, EPOLL_CTL_ADD, fd, EPOLLIN, event_name(AT_CALLER, caller->id))) caller_free(ctx, caller);
    }
}

/* Its first packet says whom it calls. One whose queue pair is not there is not for us; one whose queue pair cannot
 * receive yet is kept, and its packets wait in the socket, as long as it would send them again. */
static void on_caller(struct sim_context *ctx, uint32_t id, uint32_t events) {
    struct sim_packet hello;
    struct sim_caller *c = ctx->callers;
    while (c && c->id != id) c = c->next;
    if (!c) return;
    if (c->named) {
        if (events & EPOLLHUP)
            caller_free(ctx, c);
        else if (!c->since)
            c->since = hr_now(), sim_look_again(ctx);
        return;
    }
    ssize_t n = recv(c->fd, &hello, sizeof hello, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    struct sim_qp *qp = n == sizeof hello && hello.op == SIM_CONNECT ? sim_qp_find(ctx, (uint32_t)hello.addr) : NULL;
    if (!qp || qp->base.state == IBV_QPS_ERR || ctx->down >> qp->attr.port_num & 1) {
        caller_free(ctx, c);
        return;
    }
    c->named = 1;
    c->from = hello.rkey;
    c->to = qp->base.qp_num;
    c->gid = hello.gid;
    c->patience = (int64_t)hello.len;
    watch(ctx, EPOLL_CTL_MOD, c->fd, EPOLLIN | EPOLLET, event_name(AT_CALLER, id)); /* told of what waits once */
    if (qp->base.state == IBV_QPS_RTR || qp->base.state == IBV_QPS_RTS) sim_pair(qp);
}

/* ---- work ---- */

/* -1: the socket has ended. A reset is told before what is still in the socket, and only once. */
static ssize_t next_packet(struct sim_context *ctx, int fd, int *resets) {
    ssize_t n;
    do n = recv(fd, ctx->packet, sizeof ctx->packet, MSG_DONTWAIT);
    while (n < 0 && (errno == EINTR || (errno == ECONNRESET && !(*resets)++)));
    if (n < 0 && errno == EAGAIN) return 0;
    return n < (ssize_t)sizeof(struct sim_packet) ? -1 : n;
}

static void receive(struct sim_context *ctx, uint32_t qpn, int out) {
    const struct sim_packet *packet = (const void *)ctx->packet;
    int resets = 0;
    for (int i = 0; i < PACKETS; i++) {
        struct sim_qp *qp = sim_qp_find(ctx, qpn);
        int fd = !qp ? -1 : out ? qp->out : qp->in;
        if (fd < 0) return;
        if (qp->stream) {
            sim_stream_receive(qp);
            return;
        }
        ssize_t n = next_packet(ctx, fd, &resets);
        if (n == 0) return;
        if (n < 0) {
            drop(ctx, out ? &qp->out : &qp->in);
            if (out) sim_on_gone(qp);
            return;
        }
        size_t len = (size_t)n - sizeof *packet;
        if (out)
            sim_on_answer(qp, packet, ctx->packet + sizeof *packet, len);
        else
            sim_on_request(qp, packet, ctx->packet + sizeof *packet, len);
    }
}

static void writable(struct sim_context *ctx, uint32_t qpn, int out) {
    struct sim_qp *qp = sim_qp_find(ctx, qpn);
    int fd = !qp ? -1 : out ? qp->out : qp->in;
    if (fd < 0) return;
    if (qp->stream) {
        sim_stream_writable(qp);
        return;
    }
    *(out ? &qp->out_waits : &qp->in_waits) = 0;
    watch(ctx, EPOLL_CTL_MOD, fd, EPOLLIN, event_name(out ? AT_OUT : AT_IN, qpn));
    if (out)
        sim_transmit(qp);
    else
        sim_answer_pump(qp);
}

/* Callers whose packets have waited for too long are left to find out. */
static void tire(struct sim_context *ctx, int64_t now) {
    for (struct sim_caller *c = ctx->callers, *next; c; c = next) {
        next = c->next;
        if (!c->since) continue;
        if (now - c->since > c->patience)
            caller_free(ctx, c);
        else
            ctx->waiting = 1;
    }
}

/* Queue pairs that pause after an RNR NAK, and those that could not be connected; callers that could not be taken. */
static void tick(struct sim_context *ctx) {
    int64_t now = hr_now();
    ctx->waiting = 0;
    tire(ctx, now);
    if (ctx->deaf) watch(ctx, EPOLL_CTL_MOD, ctx->listener, EPOLLIN, event_name(AT_LISTENER, 0));
    ctx->deaf = 0;
    for (int i = 0; i < SIM_MAX_QP; i++) {
        struct sim_qp *qp = ctx->qps[i];
        if (!qp || qp->base.state != IBV_QPS_RTS) continue;
        if (qp->out < 0 && !qp->gone) sim_dial(qp);
        if (qp->resume && now >= qp->resume) qp->resume = 0;
        if (qp->resume)
            ctx->waiting = 1;
        else
            sim_transmit(qp);
    }
}

void sim_run(struct sim_context *ctx) {
    struct epoll_event events[16];
    if (ctx->mute) return;
    if (ctx->waiting) tick(ctx); /* first: what is found to wait from here on waits for the next */
    int n = epoll_wait(ctx->epfd, events, 16, 0);
    for (int i = 0; i < n; i++) {
        uint32_t id = (uint32_t)events[i].data.u64;
        switch (events[i].data.u64 >> 32) {
        case AT_LISTENER: take_callers(ctx); break;
        case AT_CALLER: on_caller(ctx, id, events[i].events); break;
        case AT_OUT:
        case AT_IN: {
            int out = events[i].data.u64 >> 32 == AT_OUT;
            if (events[i].events & EPOLLOUT) writable(ctx, id, out);
            if (events[i].events & ~(uint32_t)EPOLLOUT) receive(ctx, id, out);
            break;
        }
        default: break;
        }
    }
}

void hr_verbs_sim_mute(struct ibv_context *base, int mute) {
    struct sim_context *ctx = sim_of(base);
    pthread_mutex_lock(&ctx->lock);
    ctx->mute = mute;
    sim_look_again(ctx);
    pthread_mutex_unlock(&ctx->lock);
}

/* ---- the thread ---- */

static void *run(void *arg) {
    struct sim_context *ctx = arg;
    struct pollfd fds[2] = {{.fd = ctx->kick, .events = POLLIN}, {.fd = ctx->epfd, .events = POLLIN}};
    int timeout = -1, both = 1;
    eventfd_t count;
    for (;;) {
        poll(fds, both ? 2 : 1, timeout);
        pthread_mutex_lock(&ctx->lock);
        if (fds[0].revents) eventfd_read(ctx->kick, &count);
        if (ctx->stop) break;
        /* Somebody polls and does the work: look again in a while, and at nothing but the kick until then. */
        int keep_away = ctx->mute || (!ctx->armed && hr_now() - ctx->polled < polled_lately);
        if (!keep_away) sim_run(ctx);
        both = !keep_away;
        timeout = keep_away || ctx->waiting ? TICK_MS : -1;
        pthread_mutex_unlock(&ctx->lock);
    }
    pthread_mutex_unlock(&ctx->lock);
    return NULL;
}

static void port_drop(struct sim_context *ctx) {
    drop(ctx, &ctx->listener);
    if (ctx->epfd >= 0) close(ctx->epfd);
    if (ctx->kick >= 0) close(ctx->kick);
    ctx->epfd = ctx->kick = -1;
}

/* A unique local address, as far as GIDs go; or addresses as the ports of several networks have them. */
static int make_gids(struct sim_context *ctx) {
    uint8_t random[16];
    if (getrandom(random, sizeof random, 0) != sizeof random) return -1;
    memcpy(ctx->gids[0][0].raw, random, sizeof random);
    ctx->gids[0][0].raw[0] = 0xfd;
    for (int i = 0; i < SIM_PORTS && ctx->ngids == SIM_GIDS; i++) {
        uint8_t port = (uint8_t)(i + 1), r = random[0], q = random[1];
        ctx->gids[i][0] = (union ibv_gid){.raw = {0xfe, 0x80, [8] = port, [14] = r, q}};
        ctx->gids[i][1] = (union ibv_gid){.raw = {[10] = 0xff, 0xff, 198, (uint8_t)(17 + port), r, q}};
        ctx->gids[i][2] = (union ibv_gid){.raw = {0x20, 0x01, 0x0d, 0xb8, [7] = port, [14] = r, q}};
    }
    return 0;
}

/* The numbers of "sim2" are few: another node may have the same. */
static int bind_node(struct sim_context *ctx) {
    struct sockaddr_un name;
    for (int i = 0; i < 100; i++) {
        if (make_gids(ctx)) return -1;
        socklen_t len = port_name(&ctx->gids[0][0], &name);
        if (bind(ctx->listener, (struct sockaddr *)&name, len) == 0) return 0;
        if (errno != EADDRINUSE) return -1;
    }
    return -1;
}

static int listens(struct sim_context *ctx) {
    return ctx->listener >= 0 && bind_node(ctx) == 0 && listen(ctx->listener, MAX_CALLERS) == 0 &&
           watch(ctx, EPOLL_CTL_ADD, ctx->listener, EPOLLIN, event_name(AT_LISTENER, 0)) == 0;
}

int sim_port_open(struct sim_context *ctx) {
    sigset_t all, old;
    int error;
    ctx->listener = ctx->tcp ? -1 : socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    ctx->epfd = epoll_create1(EPOLL_CLOEXEC);
    ctx->kick = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (ctx->epfd >= 0 && ctx->kick >= 0 && (ctx->tcp ? make_gids(ctx) == 0 : listens(ctx))) {
        sigfillset(&all); /* signals are for the threads of the program */
        pthread_sigmask(SIG_SETMASK, &all, &old);
        error = pthread_create(&ctx->thread, NULL, run, ctx);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        if (!error) return 0;
    } else {
        error = errno;
    }
    port_drop(ctx);
    errno = error;
    return -1;
}

void sim_port_close(struct sim_context *ctx) {
    pthread_mutex_lock(&ctx->lock);
    ctx->stop = 1;
    eventfd_write(ctx->kick, 1);
    pthread_mutex_unlock(&ctx->lock);
    pthread_join(ctx->thread, NULL);
    while (ctx->callers) caller_free(ctx, ctx->callers);
    port_drop(ctx);
}
