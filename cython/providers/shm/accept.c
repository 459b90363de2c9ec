/* accept.c - the listening socket, and callers until an endpoint takes them. */

/*
 * Callers are stepped in the order in which they came, and none is taken before an earlier one of the same process has
 * proven itself or gone: so several endpoints between the same two peers pair up in the order of their calls.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "providers/shm/address.h"
#include "providers/shm/shm.h"

enum { BACKLOG = 1024, MAX_CALLS = 1024 };
#define PROOF_NS 5000000000

hr_status hr_shm_listen(struct shm_domain *dom, char detail[256]) {
    struct sockaddr_un sa;
    socklen_t sa_len = shm_sockaddr(&sa, dom->name);
    dom->listenfd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (dom->listenfd >= 0 && bind(dom->listenfd, (struct sockaddr *)&sa, sa_len) == 0 &&
        listen(dom->listenfd, BACKLOG) == 0 && hr_shm_watch(dom, dom->listenfd, &dom->on_listen, SHM_ON_LISTEN, dom))
        return HR_OK;
    snprintf(detail, 256, "cannot listen on a Unix socket: %s", strerror(errno));
    return HR_ERR_IO;
}

int hr_shm_peer_allowed(int fd, pid_t *pid_p) {
    struct ucred cred;
    socklen_t len = sizeof cred;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) < 0) return 0;
    *pid_p = cred.pid;
    return cred.uid == geteuid() || cred.uid == 0;
}

void hr_shm_accept(struct shm_domain *dom) {
    while (dom->ncalls < MAX_CALLS) {
        struct shm_call *call, **tail = &dom->calls;
        pid_t pid = 0;
        int fd = accept4(dom->listenfd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED)) continue;
        if (fd < 0) return; /* nobody more, or no descriptor left: the caller waits in the backlog */
        if (!hr_shm_peer_allowed(fd, &pid) || !(call = calloc(1, sizeof *call))) {
            close(fd);
            continue;
        }
        call->fd = fd;
        call->pid = pid;
        call->deadline = hr_now() + PROOF_NS;
        hr_handshake_start(&call->handshake, dom->auth, 0, dom->self_id, 0);
        while (*tail) tail = &(*tail)->next;
        *tail = call;
        dom->ncalls++;
        if (!hr_shm_watch(dom, fd, &call->watch, SHM_ON_CALL, call)) hr_shm_call_drop(dom, call);
    }
}

void hr_shm_call_drop(struct shm_domain *dom, struct shm_call *call) {
    struct shm_call **link = &dom->calls;
    while (*link != call) link = &(*link)->next;
    *link = call->next;
    dom->ncalls--;
    if (call->fd >= 0) {
        epoll_ctl(dom->epfd, EPOLL_CTL_DEL, call->fd, NULL);
        close(call->fd);
    }
    free(call);
}

/* 0: it is gone. */
static int call_step(struct shm_domain *dom, struct shm_call *call) {
    int want_write = 0;
    if (!call->proven) {
        hr_status status = hr_handshake_step(&call->handshake, call->fd, &want_write);
        if (hr_is_error(status) || (status == HR_AGAIN && hr_now() > call->deadline)) return 0;
        call->proven = status == HR_OK;
        if (call->proven) { /* what follows is for the endpoint that takes it; until then only its end matters */
            struct epoll_event event = {.events = EPOLLRDHUP, .data.ptr = &call->watch};
            epoll_ctl(dom->epfd, EPOLL_CTL_MOD, call->fd, &event);
        }
        return 1;
    }
    struct pollfd hang_up = {.fd = call->fd, .events = POLLRDHUP};
    return poll(&hang_up, 1, 0) == 0;
}

/* The first endpoint, in order of creation, that waits for this peer. */
static struct shm_ep *taker(struct shm_domain *dom, const struct shm_call *call) {
    for (struct shm_call *c = dom->calls; c != call; c = c->next)
        if (!c->proven && c->pid == call->pid) return NULL;
    for (struct shm_ep *e = dom->eps; e; e = e->next)
        if (e->state == SHM_WAITING && e->base.peer_id == call->handshake.peer_id) return e;
    return NULL;
}

void hr_shm_calls_step(struct shm_domain *dom) {
    struct shm_call *call, *next;
    for (call = dom->calls; call; call = next) {
        struct shm_ep *e;
        next = call->next;
        if (!call_step(dom, call)) {
            hr_shm_call_drop(dom, call);
        } else if (call->proven && (e = taker(dom, call))) {
            epoll_ctl(dom->epfd, EPOLL_CTL_DEL, call->fd, NULL);
            e->state = SHM_TAKEN;
            hr_shm_attach(e, call->fd, call->pid);
            call->fd = -1;
            hr_shm_call_drop(dom, call);
            hr_shm_on_socket(e);
        }
    }
}
