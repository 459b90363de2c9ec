/* dial.c - the caller's side of a connection: which address to try, and how far it got. */

/*
 * The peer's addresses are sorted: on one host loopback first; otherwise those in a network that this side is in too,
 * then routed ones. An address that refuses is crossed out. One that does not answer is left after a while, which
 * doubles from round to round, and tried again after the others; when a single one remains it has all the time that the
 * engine gives. An address counts as reached when its owner has proved the job key (challenge read): private networks
 * such as a container bridge exist on many hosts, and what answers there may be somebody else. From then on the choice
 * stands, because the peer may already have taken the connection for its endpoint.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "providers/tcp/tcp.h"

#define FIRST_TRY (1500 * HR_TCP_MS)

enum step { CONNECTING, PROVING, OPENING };

struct candidate {
    union hr_sockaddr at;
    int rank; /* smaller first */
};

struct hr_tcp_dial {
    struct candidate list[HR_TCP_ADDRESSES];
    int n, current;
    enum step step;
    int64_t try_ns, deadline; /* of the current candidate; 0: none */
    struct hr_handshake hs;
    struct hr_tcp_open open;
    uint32_t have; /* bytes of the answer to open */
    hr_status worst;
    char why[160]; /* of the candidate crossed out last, or of the one that failed the proof */
};

void hr_tcp_dial_end(struct hr_tcp_ep *ep) {
    struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    if (!ep->dial) return;
    free(ep->dial);
    ep->dial = NULL;
    d->dialing--;
    hr_tcp_timer_update(d);
}

static void note(struct hr_tcp_dial *dial, hr_status status, const char *what, int error) {
    char text[HR_SOCKADDR_TEXT];
    if (dial->worst == HR_ERR_AUTH) return;
    dial->worst = status;
    snprintf(dial->why, sizeof dial->why, "%s: %s%s%s", hr_sockaddr_text(&dial->list[dial->current].at, text), what,
             error ? ": " : "", error ? strerror(error) : "");
}

/* The own address in the candidate's network; that of the domain's only interface, whose traffic stays on it however
 * far the peer is (a rail); or none: the kernel's choice. */
static const struct hr_iface *source_for(const struct hr_tcp_domain *d, const union hr_sockaddr *to) {
    const struct hr_iface *only = NULL;
    int several = 0;
    for (int i = 0; i < d->nifaces; i++) {
        const struct hr_iface *own = &d->ifaces[i];
        if (!own->chosen || own->loopback) continue;
        if (hr_sockaddr_within(&own->at, to, own->prefix)) return own;
        if (only && strcmp(only->name, own->name)) several = 1;
        if (!only || (only->at.sa.sa_family != to->sa.sa_family && own->at.sa.sa_family == to->sa.sa_family))
            only = own;
    }
    return several || !only || only->at.sa.sa_family != to->sa.sa_family ? NULL : only;
}

/* So that a choice of interfaces holds for both directions. */
static int bind_source(struct hr_tcp_domain *d, int fd, const union hr_sockaddr *to) {
    const struct hr_iface *own = source_for(d, to);
    int one = 1;
    if (!own) return 0;
    setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
    return bind(fd, &own->at.sa, hr_sockaddr_len(&own->at));
}

static int start(struct hr_tcp_ep *ep, const union hr_sockaddr *at, const char **what_p) {
    struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    int fd = hr_socket_open(at->sa.sa_family);
    *what_p = "cannot make a socket";
    if (fd < 0) return -1;
    ep->source.fd = fd;
    *what_p = "cannot set up the socket";
    if (hr_tcp_socket_prepare(d, fd, hr_ifaces_own(d->ifaces, d->nifaces, at))) return -1;
    *what_p = "cannot bind to the interface's address";
    if (!hr_sockaddr_loopback(at) && bind_source(d, fd, at)) return -1;
    *what_p = "cannot connect";
    if (hr_socket_call(fd, at)) return -1;
    return hr_poll_watch(&d->poll, &ep->source, EPOLLOUT);
}

static void cross_out(struct hr_tcp_dial *dial) {
    dial->n--;
    memmove(&dial->list[dial->current], &dial->list[dial->current + 1],
            (size_t)(dial->n - dial->current) * sizeof dial->list[0]);
}

/* Tries from the current candidate on. Ends the endpoint when none is left. */
static void try_next(struct hr_tcp_ep *ep) {
    struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    struct hr_tcp_dial *dial = ep->dial;
    const char *what;
    for (;;) {
        hr_tcp_unwatch(d, &ep->source);
        if (dial->n == 0) {
            hr_tcp_ep_fail(ep, dial->worst, dial->why, 0);
            return;
        }
        if (dial->current >= dial->n) {
            dial->current = 0;
            dial->try_ns *= 2;
        }
        dial->step = CONNECTING;
        dial->deadline = dial->n > 1 ? hr_now() + dial->try_ns : 0;
        if (start(ep, &dial->list[dial->current].at, &what) == 0) return;
        note(dial, HR_ERR_UNREACHABLE, what, errno);
        cross_out(dial);
    }
}

static void give_up_candidate(struct hr_tcp_ep *ep, hr_status status, const char *what, int error) {
    note(ep->dial, status, what, error);
    cross_out(ep->dial);
    try_next(ep);
}

static void connected(struct hr_tcp_ep *ep) {
    struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    int error = hr_socket_called(ep->source.fd);
    if (error) {
        give_up_candidate(ep, HR_ERR_UNREACHABLE, "cannot connect", error);
        return;
    }
    ep->dial->step = PROVING;
    hr_handshake_start(&ep->dial->hs, d->auth, 1, d->self_id, ep->base.peer_id);
}

static void proving(struct hr_tcp_ep *ep) {
    struct hr_tcp_domain *d = hr_tcp_domain_of(&ep->base);
    struct hr_tcp_dial *dial = ep->dial;
    int want_write = 0;
    hr_status status = hr_handshake_step(&dial->hs, ep->source.fd, &want_write);
    if (status == HR_AGAIN) {
        hr_poll_watch(&d->poll, &ep->source, want_write ? EPOLLOUT : EPOLLIN);
    } else if (status != HR_OK) {
        const char *what = hr_prove_text(status, &status);
        give_up_candidate(ep, status, what, 0);
    } else {
        dial->open = (struct hr_tcp_open){HR_TCP_OPEN_MAGIC, HR_TCP_OPEN_VERSION, ep->stream};
        dial->step = OPENING;
        dial->deadline = 0;
        ep->peer = dial->list[dial->current].at;
        /* A few bytes into an empty socket: taken whole, or the connection is gone. */
        if (send(ep->source.fd, &dial->open, sizeof dial->open, MSG_NOSIGNAL) != sizeof dial->open)
            hr_tcp_ep_fail(ep, HR_ERR_UNREACHABLE, "closed before the connection was open", errno);
        else
            hr_poll_watch(&d->poll, &ep->source, EPOLLIN);
    }
}

static void opening(struct hr_tcp_ep *ep) {
    struct hr_tcp_dial *dial = ep->dial;
    struct hr_tcp_open want = {HR_TCP_OPEN_MAGIC, HR_TCP_OPEN_VERSION, ep->stream};
    ssize_t n = recv(ep->source.fd, (uint8_t *)&dial->open + dial->have, sizeof dial->open - dial->have, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) {
        hr_tcp_ep_fail(ep, HR_ERR_UNREACHABLE, "closed before the connection was open", n ? errno : 0);
        return;
    }
    dial->have += (uint32_t)n;
    if (dial->have < sizeof dial->open) return;
    if (memcmp(&dial->open, &want, sizeof want)) {
        hr_tcp_ep_fail(ep, HR_ERR_PROTOCOL, "the peer opened another stream or speaks another version", 0);
        return;
    }
    union hr_sockaddr peer = ep->peer;
    hr_tcp_ep_up(ep, ep->source.fd, &peer);
}

void hr_tcp_dial_event(struct hr_tcp_ep *ep) {
    if (ep->dial->step == CONNECTING) connected(ep);
    if (ep->dial && ep->dial->step == PROVING) proving(ep);
    if (ep->dial && ep->dial->step == OPENING) opening(ep);
}

void hr_tcp_dial_tick(struct hr_tcp_ep *ep, int64_t now) {
    struct hr_tcp_dial *dial = ep->dial;
    if (!dial || !dial->deadline || now < dial->deadline) return;
    note(dial, HR_ERR_UNREACHABLE, "no answer", 0);
    dial->current++;
    try_next(ep);
}

static int rank_of(const struct hr_tcp_domain *d, const union hr_sockaddr *at, int same_host) {
    if (hr_sockaddr_loopback(at)) return same_host ? 0 : 4;
    if (same_host) return 1;
    if (hr_ifaces_own(d->ifaces, d->nifaces, at)) return 3;
    for (int i = 0; i < d->nifaces; i++)
        if (d->ifaces[i].chosen && hr_sockaddr_within(&d->ifaces[i].at, at, d->ifaces[i].prefix)) return 1;
    return 2;
}

/* Insertion by rank; equals stay in the peer's order. Without a token only this host may be called. */
static void sort_candidates(struct hr_tcp_domain *d, struct hr_tcp_dial *dial, const union hr_sockaddr *list, int n,
                            int same_host) {
    int any = d->auth->have_token || d->auth->insecure;
    for (int i = 0; i < n; i++) {
        struct candidate c = {.at = list[i], .rank = rank_of(d, &list[i], same_host)};
        int k = dial->n;
        if (!any && !hr_ifaces_own(d->ifaces, d->nifaces, &list[i])) continue;
        for (; k > 0 && dial->list[k - 1].rank > c.rank; k--) dial->list[k] = dial->list[k - 1];
        dial->list[k] = c;
        dial->n++;
    }
    /* Loopback of another host would lead back here. */
    while (dial->n > 1 && dial->list[dial->n - 1].rank == 4 && dial->list[0].rank != 4) dial->n--;
}

/*
 * Several endpoints may reach one peer, each over its own socket. They are told apart by a stream number: the lowest
 * of its channel that no other endpoint to that peer, calling like this one or waiting like this one, has. Both sides
 * count alike when they connect a channel's endpoints in one order; and an endpoint of a domain to itself does not meet
 * its own number.
 */
static uint32_t free_stream(struct hr_tcp_domain *d, const struct hr_tcp_ep *self, int active) {
    for (uint32_t stream = self->base.channel << 16;; stream++) {
        int used = 0;
        for (struct hr_link *l = d->eps.next; l != &d->eps && !used; l = l->next) {
            struct hr_tcp_ep *ep = hr_container(l, struct hr_tcp_ep, link);
            int lives = ep->state == HR_TCP_WAITING || ep->state == HR_TCP_DIALING || ep->state == HR_TCP_UP;
            used = lives && ep->base.peer_id == self->base.peer_id && ep->active == active && ep->stream == stream;
        }
        if (!used) return stream;
    }
}

hr_status hr_tcp_ep_connect(struct hr_ep *base, const void *addr, size_t addr_len, int active) {
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)base;
    struct hr_tcp_domain *d = hr_tcp_domain_of(base);
    union hr_sockaddr list[HR_TCP_ADDRESSES];
    uint64_t host_id;
    if (ep->state != HR_TCP_NEW) return HR_ERR_INVALID;
    int n = hr_tcp_address_read(addr, addr_len, &host_id, list);
    if (n < 0) return HR_ERR_INVALID;
    ep->active = active;
    ep->same_machine = hr_tcp_same_machine(host_id, d->host_id);
    ep->stream = free_stream(d, ep, active);
    if (!active) {
        ep->state = HR_TCP_WAITING;
        hr_tcp_pair(d, ep);
        return HR_OK;
    }
    struct hr_tcp_dial *dial = calloc(1, sizeof *dial);
    if (!dial) return HR_ERR_NOMEM;
    dial->try_ns = FIRST_TRY;
    dial->worst = HR_ERR_UNREACHABLE;
    snprintf(dial->why, sizeof dial->why, "the peer has no address");
    sort_candidates(d, dial, list, n, host_id && host_id == d->host_id);
    if (n && !dial->n) {
        dial->worst = HR_ERR_AUTH;
        snprintf(dial->why, sizeof dial->why,
                 "the peer is on another host and there is no job token: set HRDMA_TOKEN, or HRDMA_INSECURE=1");
    }
    ep->dial = dial;
    ep->state = HR_TCP_DIALING;
    d->dialing++;
    hr_tcp_timer_update(d);
    try_next(ep);
    return HR_OK;
}
