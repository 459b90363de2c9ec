/* accept.c - the acceptor's side of a connection: listeners, callers that prove themselves, pairing with endpoints. */

/*
 * A caller costs one small structure and a descriptor until it has proved the job key; it has PROVE_TIME for that, and
 * there are at most MAX_HALF_OPEN of them: beyond that nobody is accepted and the kernel's queue holds the rest. So a
 * port scanner delays nothing for longer than that and never gets to see more than its socket closing.
 *
 * A caller that proved itself names its stream. If the endpoint does not wait for it yet it is parked; the answer,
 * which tells the caller that it is connected, is sent when the two meet.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "providers/tcp/tcp.h"

#define PROVE_TIME (5000 * HR_TCP_MS)
#define MAX_HALF_OPEN 256
#define MAX_PARKED 4096
#define ACCEPTS 16 /* in one go */

static int listen_at(struct hr_tcp_domain *d, const struct hr_iface *addr, struct hr_listener *listener) {
    *listener = (struct hr_listener){.source = {.kind = HR_TCP_LISTENER, .fd = -1}, .at = addr->at};
    memcpy(listener->name, addr->name, sizeof listener->name);
    int fd = hr_socket_open(addr->at.sa.sa_family);
    if (fd < 0) return -1;
    listener->source.fd = fd;
    /* The window that a connection may offer is fixed when it is accepted: buffers are set on the listener. */
    if (hr_tcp_socket_prepare(d, fd, 0) || hr_socket_listen(fd, &listener->at)) return -1;
    return hr_poll_watch(&d->poll, &listener->source, EPOLLIN);
}

hr_status hr_tcp_listen(struct hr_tcp_domain *d, char detail[256]) {
    char text[HR_SOCKADDR_TEXT];
    d->listeners = calloc((size_t)d->nifaces, sizeof *d->listeners);
    if (!d->listeners) return HR_ERR_NOMEM;
    snprintf(detail, 256, "no address to listen on");
    for (int i = 0; i < d->nifaces && d->nlisteners < HR_TCP_ADDRESSES; i++) {
        struct hr_listener *listener = &d->listeners[d->nlisteners];
        if (!d->ifaces[i].chosen) continue;
        if (listen_at(d, &d->ifaces[i], listener) == 0) {
            d->nlisteners++;
            continue;
        }
        /* An address may be there and not usable yet or any more (tentative, deprecated): the others will do. */
        snprintf(detail, 256, "cannot listen on %s %s: %s", d->ifaces[i].name, hr_sockaddr_text(&d->ifaces[i].at, text),
                 strerror(errno));
        hr_tcp_unwatch(d, &listener->source);
    }
    return d->nlisteners ? HR_OK : HR_ERR_NO_DEVICE;
}

static void pause_accepting(struct hr_tcp_domain *d, int pause) {
    if (d->accept_paused == pause) return;
    d->accept_paused = pause;
    for (int i = 0; i < d->nlisteners; i++) hr_poll_watch(&d->poll, &d->listeners[i].source, pause ? 0 : EPOLLIN);
    hr_tcp_timer_update(d);
}

static void caller_free(struct hr_tcp_domain *d, struct hr_tcp_caller *caller) {
    if (caller->step == HR_TCP_PARKED)
        d->parked--;
    else
        d->half_open--;
    hr_list_remove(&caller->link);
    hr_tcp_unwatch(d, &caller->source);
    free(caller);
    if (d->half_open < MAX_HALF_OPEN) pause_accepting(d, 0);
    hr_tcp_timer_update(d);
}

void hr_tcp_callers_close(struct hr_tcp_domain *d) {
    while (!hr_list_empty(&d->callers)) caller_free(d, hr_container(d->callers.next, struct hr_tcp_caller, link));
}

void hr_tcp_callers_tick(struct hr_tcp_domain *d, int64_t now) {
    for (struct hr_link *l = d->callers.next, *next; l != &d->callers; l = next) {
        struct hr_tcp_caller *caller = hr_container(l, struct hr_tcp_caller, link);
        next = l->next;
        if (caller->step != HR_TCP_PARKED && now >= caller->deadline) caller_free(d, caller);
    }
    /* After a shortage of descriptors or memory. */
    if (d->half_open < MAX_HALF_OPEN) pause_accepting(d, 0);
}

void hr_tcp_accept(struct hr_tcp_domain *d, struct hr_listener *listener) {
    for (int i = 0; i < ACCEPTS; i++) {
        union hr_sockaddr from;
        int fd = hr_socket_accept(listener->source.fd, &from);
        if (fd < 0) {
            /* Out of descriptors: look again at the next tick, or the listener would keep progress spinning. */
            if (fd == -2) pause_accepting(d, 1);
            return;
        }
        int local = hr_ifaces_own(d->ifaces, d->nifaces, &from);
        struct hr_tcp_caller *caller = NULL;
        if ((!local && !d->auth->have_token && !d->auth->insecure) || hr_tcp_socket_prepare(d, fd, local) ||
            !(caller = calloc(1, sizeof *caller))) {
            close(fd);
            continue;
        }
        caller->source = (struct hr_source){.kind = HR_TCP_CALLER, .fd = fd};
        caller->from = from;
        caller->deadline = hr_now() + PROVE_TIME;
        hr_handshake_start(&caller->hs, d->auth, 0, d->self_id, 0);
        hr_list_push(&d->callers, &caller->link);
        d->half_open++;
        hr_tcp_timer_update(d);
        if (hr_poll_watch(&d->poll, &caller->source, EPOLLIN)) caller_free(d, caller);
        if (d->half_open >= MAX_HALF_OPEN) {
            pause_accepting(d, 1);
            return;
        }
    }
}

static void give(struct hr_tcp_domain *d, struct hr_tcp_caller *caller, struct hr_tcp_ep *ep) {
    int fd = caller->source.fd;
    /* A few bytes into an empty socket: if they are not taken the connection is gone, and receiving will say so. */
    ssize_t n = send(fd, &caller->open, sizeof caller->open, MSG_NOSIGNAL);
    if (n != sizeof caller->open) {
        caller_free(d, caller); /* the peer calls again, or the engine's deadline passes */
        return;
    }
    hr_poll_forget(&d->poll, &caller->source);
    caller->source.fd = -1;
    hr_tcp_ep_up(ep, fd, &caller->from);
    caller_free(d, caller);
}

int hr_tcp_pair(struct hr_tcp_domain *d, struct hr_tcp_ep *ep) {
    for (struct hr_link *l = d->callers.next; l != &d->callers; l = l->next) {
        struct hr_tcp_caller *caller = hr_container(l, struct hr_tcp_caller, link);
        if (caller->step != HR_TCP_PARKED || caller->hs.peer_id != ep->base.peer_id ||
            caller->open.stream != ep->stream)
            continue;
        give(d, caller, ep);
        return 1;
    }
    return 0;
}

/* An endpoint that waits for this caller takes it now. An older caller for the same stream was given up by the peer. */
static void park(struct hr_tcp_domain *d, struct hr_tcp_caller *caller) {
    for (struct hr_link *l = d->callers.next; l != &d->callers; l = l->next) {
        struct hr_tcp_caller *old = hr_container(l, struct hr_tcp_caller, link);
        if (old == caller || old->step != HR_TCP_PARKED || old->hs.peer_id != caller->hs.peer_id ||
            old->open.stream != caller->open.stream)
            continue;
        caller_free(d, old);
        break;
    }
    if (d->parked >= MAX_PARKED) {
        caller_free(d, caller);
        return;
    }
    caller->step = HR_TCP_PARKED;
    d->half_open--;
    d->parked++;
    if (d->half_open < MAX_HALF_OPEN) pause_accepting(d, 0);
    hr_tcp_timer_update(d);
    for (struct hr_link *l = d->eps.next; l != &d->eps; l = l->next) {
        struct hr_tcp_ep *ep = hr_container(l, struct hr_tcp_ep, link);
        if (ep->state != HR_TCP_WAITING || ep->base.peer_id != caller->hs.peer_id || ep->stream != caller->open.stream)
            continue;
        give(d, caller, ep);
        return;
    }
}

void hr_tcp_caller_event(struct hr_tcp_domain *d, struct hr_tcp_caller *caller) {
    if (caller->step == HR_TCP_PROVING) {
        int want_write = 0;
        hr_status status = hr_handshake_step(&caller->hs, caller->source.fd, &want_write);
        if (status == HR_AGAIN)
            hr_poll_watch(&d->poll, &caller->source, want_write ? EPOLLOUT : EPOLLIN);
        else if (status != HR_OK)
            caller_free(d, caller);
        else
            caller->step = HR_TCP_OPENING;
        if (status != HR_OK) return;
        hr_poll_watch(&d->poll, &caller->source, EPOLLIN);
    }
    if (caller->step == HR_TCP_PARKED) {
        /* It says nothing until it is answered: whatever comes is its end. */
        uint8_t byte;
        if (recv(caller->source.fd, &byte, 1, MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EINTR))
            caller_free(d, caller);
        return;
    }
    ssize_t n = recv(caller->source.fd, (uint8_t *)&caller->open + caller->have, sizeof caller->open - caller->have,
                     MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        caller_free(d, caller);
        return;
    }
    caller->have += (uint32_t)n;
    if (caller->have < sizeof caller->open) return;
    if (caller->open.magic != HR_TCP_OPEN_MAGIC || caller->open.version != HR_TCP_OPEN_VERSION)
        caller_free(d, caller);
    else
        park(d, caller);
}
