/* endpoint.c - the life of an endpoint: made, connected, failed, aborted, freed. */

#include <errno.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "providers/tcp/tcp.h"

#define RX_FIRST (16u << 10) /* receive buffer of an endpoint that sees small frames only */

hr_status hr_tcp_ep_create(struct hr_domain *domain, uint64_t peer_id, void *ctx, struct hr_ep **ep_p) {
    struct hr_tcp_domain *d = (struct hr_tcp_domain *)domain;
    struct hr_tcp_ep *ep = calloc(1, sizeof *ep);
    if (!ep) return HR_ERR_NOMEM;
    ep->base = (struct hr_ep){.domain = domain, .ctx = ctx, .peer_id = peer_id};
    ep->source = (struct hr_source){.kind = HR_TCP_EP, .fd = -1};
    ep->dscp = ep->priority = -1;
    hr_list_init(&ep->ready);
    hr_list_push(&d->eps, &ep->link);
    *ep_p = &ep->base;
    return HR_OK;
}

void hr_tcp_ep_tell(struct hr_tcp_ep *ep, hr_status status) {
    ep->told = 1;
    ep->tell = status;
    hr_tcp_ep_ready(ep);
}

/* Lets go of everything but the endpoint itself. */
static void drop(struct hr_tcp_ep *ep) {
    struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    hr_tcp_dial_end(ep);
    hr_tcp_unwatch(d, &ep->source);
    hr_tcp_tx_clear(ep);
    free(ep->rx);
    free(ep->pending);
    free(ep->serve);
    ep->rx = NULL;
    ep->pending = NULL;
    ep->serve = NULL;
    ep->serve_count = ep->serve_head = 0;
    ep->rx_cap = ep->rx_off = ep->rx_end = 0;
    memset(&ep->body, 0, sizeof ep->body);
}

hr_status hr_tcp_ep_up(struct hr_tcp_ep *ep, int fd, const union hr_sockaddr *peer) {
    struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    ep->source.fd = fd;
    ep->peer = *peer;
    ep->rx = malloc(RX_FIRST);
    ep->rx_cap = RX_FIRST;
    ep->lowat = 1;
    if (!ep->rx || hr_poll_watch(&d->poll, &ep->source, EPOLLIN)) {
        hr_tcp_ep_fail(ep, HR_ERR_UNREACHABLE, "out of memory for the connection", errno);
        return HR_ERR_NOMEM;
    }
    if (ep->dscp >= 0) hr_tcp_socket_class(fd, peer->sa.sa_family, ep->dscp, ep->priority);
    if (hr_tcp_near(ep)) hr_tcp_socket_control(fd, d->cc_local);
    hr_tcp_tx_ready(ep);
    hr_tcp_one_way_begin(ep);
    hr_tcp_dial_end(ep);
    ep->state = HR_TCP_UP;
    hr_tcp_ep_tell(ep, HR_OK);
    return HR_OK;
}

void hr_tcp_ep_fail(struct hr_tcp_ep *ep, hr_status status, const char *what, int error) {
    char text[HR_SOCKADDR_TEXT] = "";
    if (ep->peer.sa.sa_family) hr_sockaddr_text(&ep->peer, text);
    snprintf(ep->detail, sizeof ep->detail, "%s%s%s%s%s", text, *text ? ": " : "", what, error ? ": " : "",
             error ? strerror(error) : "");
    drop(ep);
    ep->state = HR_TCP_LOST;
    hr_tcp_ep_tell(ep, status);
}

void hr_tcp_ep_abort(struct hr_ep *base) {
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)base;
    drop(ep);
    hr_list_remove(&ep->ready);
    ep->told = 0;
    ep->state = HR_TCP_CLOSED;
}

void hr_tcp_ep_destroy(struct hr_ep *base) {
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)base;
    hr_tcp_ep_abort(base);
    hr_list_remove(&ep->link);
    free(ep->ring);
    free(ep);
}

hr_status hr_tcp_ep_set_class(struct hr_ep *base, int dscp, int priority) {
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)base;
    if (dscp < 0 || dscp > 63 || priority < 0 || priority > 7) return HR_ERR_INVALID;
    hr_status status;
    if (ep->state == HR_TCP_UP) {
        status = hr_tcp_socket_class(ep->source.fd, ep->peer.sa.sa_family, dscp, priority);
    } else {
        /* Tried on a socket of its own, so that the answer is as good as that of a connected one. */
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0) return HR_ERR_UNSUPPORTED;
        status = hr_tcp_socket_class(fd, AF_INET, dscp, priority);
        close(fd);
    }
    if (status == HR_OK) {
        ep->dscp = dscp;
        ep->priority = priority;
    }
    return status;
}

/* On one host, too, a byte that was sent may be overtaken by the reset that a closed socket answers with: the packets
 * may lie in the queues of different cores. */
uint64_t hr_tcp_ep_unsent(struct hr_ep *base) {
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)base;
    int queued = 0;
    if (ep->state != HR_TCP_UP) return 0;
    if (ioctl(ep->source.fd, SIOCOUTQ, &queued) || queued < 0) queued = 0;
    return ep->tx_bytes + (uint64_t)queued;
}
