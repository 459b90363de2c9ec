/* accept.c - the acceptor's side of a connection: where it listens; callers that proved themselves meet endpoints. */

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "providers/tcp/tcp.h"

static struct hr_tcp_domain *domain_of(struct hr_door *door) { return hr_container(door, struct hr_tcp_domain, door); }

static int prepare(struct hr_door *door, int fd, int local) {
    return hr_tcp_socket_prepare(domain_of(door), fd, local);
}

static int good(const void *bytes, uint32_t *stream_p) {
    const struct hr_tcp_open *open = bytes;
    *stream_p = open->stream;
    return open->magic == HR_TCP_OPEN_MAGIC && open->version == HR_TCP_OPEN_VERSION;
}

static void give(struct hr_tcp_domain *d, struct hr_caller *caller, struct hr_tcp_ep *ep) {
    struct hr_tcp_open open;
    union hr_sockaddr from = caller->from;
    memcpy(&open, caller->open, sizeof open);
    int fd = hr_door_take(&d->door, caller);
    /* A few bytes into an empty socket: if they are not taken the connection is gone, and the peer calls again, or the
     * engine's deadline passes. */
    if (send(fd, &open, sizeof open, MSG_NOSIGNAL) == sizeof open)
        hr_tcp_ep_up(ep, fd, &from);
    else
        close(fd);
}

int hr_tcp_pair(struct hr_tcp_domain *d, struct hr_tcp_ep *ep) {
    struct hr_caller *caller = hr_door_find(&d->door, ep->base.peer_id, ep->stream);
    if (caller) give(d, caller, ep);
    return caller != NULL;
}

static void waits(struct hr_door *door, struct hr_caller *caller) {
    struct hr_tcp_domain *d = domain_of(door);
    for (struct hr_link *l = d->eps.next; l != &d->eps; l = l->next) {
        struct hr_tcp_ep *ep = hr_container(l, struct hr_tcp_ep, link);
        if (ep->state != HR_TCP_WAITING || ep->base.peer_id != caller->hs.peer_id || ep->stream != caller->stream)
            continue;
        give(d, caller, ep);
        return;
    }
}

static void changed(struct hr_door *door) { hr_tcp_timer_update(domain_of(door)); }

static void stranger(struct hr_door *door, const char *detail) {
    struct hr_domain *base = &domain_of(door)->base;
    if (base->sink->stranger) base->sink->stranger(base, detail);
}

hr_status hr_tcp_listen(struct hr_tcp_domain *d, char detail[256]) {
    struct hr_door *door = &d->door;
    char text[HR_SOCKADDR_TEXT];
    door->poll = &d->poll;
    door->auth = d->auth;
    door->self_id = d->self_id;
    door->ifaces = d->ifaces;
    door->nifaces = d->nifaces;
    door->listener_kind = HR_TCP_LISTENER;
    door->caller_kind = HR_TCP_CALLER;
    door->open_len = sizeof(struct hr_tcp_open);
    door->prepare = prepare;
    door->good = good;
    door->waits = waits;
    door->changed = changed;
    door->stranger = stranger;
    snprintf(detail, 256, "no address to listen on");
    for (int i = 0; i < d->nifaces && door->nlisteners < HR_TCP_ADDRESSES; i++) {
        const struct hr_iface *iface = &d->ifaces[i];
        if (iface->chosen && hr_door_listen(door, &iface->at, iface->name, HR_TCP_ADDRESSES))
            snprintf(detail, 256, "cannot listen on %s %s: %s", iface->name, hr_sockaddr_text(&iface->at, text),
                     strerror(errno));
    }
    return door->nlisteners ? HR_OK : HR_ERR_NO_DEVICE;
}
