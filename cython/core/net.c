/* net.c - sockets as providers between hosts use them: watching, listening, calling, addresses as bytes. */

#define _GNU_SOURCE
#include "hr/net.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define BACKLOG 4096

int hr_poll_watch(struct hr_poll *poll, struct hr_source *source, uint32_t interest) {
    struct epoll_event event = {.events = interest, .data.ptr = source};
    if (source->watched && source->interest == interest) return 0;
    if (epoll_ctl(poll->fd, source->watched ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, source->fd, &event)) return -1;
    poll->writers += !!(interest & EPOLLOUT) - !!(source->interest & EPOLLOUT);
    source->watched = 1;
    source->interest = interest;
    return 0;
}

void hr_poll_forget(struct hr_poll *poll, struct hr_source *source) {
    if (!source->watched) return;
    epoll_ctl(poll->fd, EPOLL_CTL_DEL, source->fd, NULL);
    poll->writers -= !!(source->interest & EPOLLOUT);
    source->watched = 0;
    source->interest = 0;
    for (int i = poll->next; i < poll->count; i++)
        if (poll->events[i].data.ptr == source) poll->events[i].data.ptr = NULL;
}

void hr_poll_fetch(struct hr_poll *poll) {
    if (poll->next < poll->count) return;
    poll->next = 0;
    poll->count = epoll_wait(poll->fd, poll->events, HR_POLL_EVENTS, 0);
    if (poll->count < 0) poll->count = 0;
}

struct hr_source *hr_poll_next(struct hr_poll *poll, uint32_t *bits_p) {
    while (poll->next < poll->count) {
        struct epoll_event *event = &poll->events[poll->next++];
        *bits_p = event->events;
        if (event->data.ptr) return event->data.ptr;
    }
    return NULL;
}

/* ---- sockets ---- */

int hr_socket_open(int family) {
    int one = 1, fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || family != AF_INET6 || !setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one)) return fd;
    close(fd);
    return -1;
}

int hr_socket_listen(int fd, union hr_sockaddr *at) {
    socklen_t len = sizeof *at;
    return bind(fd, &at->sa, hr_sockaddr_len(at)) || listen(fd, BACKLOG) || getsockname(fd, &at->sa, &len) ? -1 : 0;
}

int hr_socket_accept(int listener, union hr_sockaddr *from_p) {
    socklen_t len = sizeof *from_p;
    memset(from_p, 0, sizeof *from_p);
    int fd = accept4(listener, &from_p->sa, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) return fd;
    return errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS ? -2 : -1;
}

int hr_socket_call(int fd, const union hr_sockaddr *to) {
    return connect(fd, &to->sa, hr_sockaddr_len(to)) && errno != EINPROGRESS ? -1 : 0;
}

/* A connect to a free port of this host may get that very port as its own: it is then connected to itself. */
static int is_itself(int fd) {
    union hr_sockaddr a, b;
    socklen_t la = sizeof a, lb = sizeof b;
    return getsockname(fd, &a.sa, &la) == 0 && getpeername(fd, &b.sa, &lb) == 0 && la == lb && memcmp(&a, &b, la) == 0;
}

int hr_socket_called(int fd) {
    int error = 0;
    socklen_t len = sizeof error;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &len)) return errno;
    return !error && is_itself(fd) ? ECONNREFUSED : error;
}

const char *hr_prove_text(hr_status status, hr_status *how_p) {
    *how_p = status == HR_ERR_AUTH ? HR_ERR_AUTH : HR_ERR_UNREACHABLE;
    switch (status) {
    case HR_ERR_AUTH: return "the peer does not know the job token, or is not of this job";
    case HR_ERR_PROTOCOL: return "what listens there does not speak this protocol";
    default: return "closed during the handshake (another job, or one without a token?)";
    }
}

/* ---- addresses as bytes: family (4 or 6), port (2, network order), address (4 or 16) ---- */

size_t hr_sockaddr_size(const union hr_sockaddr *a) { return a->sa.sa_family == AF_INET ? 3 + 4 : 3 + 16; }

uint8_t *hr_sockaddr_write(const union hr_sockaddr *a, uint8_t *to) {
    int v4 = a->sa.sa_family == AF_INET;
    to[0] = v4 ? 4 : 6;
    memcpy(to + 1, v4 ? &a->v4.sin_port : &a->v6.sin6_port, 2);
    memcpy(to + 3, v4 ? (const void *)&a->v4.sin_addr : (const void *)&a->v6.sin6_addr, v4 ? 4 : 16);
    return to + hr_sockaddr_size(a);
}

const uint8_t *hr_sockaddr_read(union hr_sockaddr *a, const uint8_t *from, const uint8_t *end) {
    memset(a, 0, sizeof *a);
    if (from >= end || (*from != 4 && *from != 6)) return NULL;
    int v4 = *from == 4;
    a->sa.sa_family = v4 ? AF_INET : AF_INET6;
    if ((size_t)(end - from) < hr_sockaddr_size(a)) return NULL;
    memcpy(v4 ? &a->v4.sin_port : &a->v6.sin6_port, from + 1, 2);
    memcpy(v4 ? (void *)&a->v4.sin_addr : (void *)&a->v6.sin6_addr, from + 3, v4 ? 4 : 16);
    return from + hr_sockaddr_size(a);
}
