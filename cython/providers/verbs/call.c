/* call.c - how two endpoints learn of each other's queue pairs: an exchange over TCP, from either side. */

/*
 * A queue pair must know its peer's number and GID before a byte can flow, and the passive side learns them only from
 * the active one: something other than the queue pair has to carry them, both ways, after the job key was proved. A
 * domain's address is fixed before any queue pair exists, so it cannot. Hence a socket per connection:
 *
 *   active -> passive   handshake of hr/auth.h, then hr_verbs_open: its ports, GIDs, what goes into descriptors
 *   passive -> active   hr_verbs_open, once an endpoint is there for it
 *   both                words about queue pairs, until two of them work: try.c
 *
 * Then the socket stays open and silent. Its end is the end of the peer: a queue pair whose process was killed falls
 * silent without a word, and only who sends would find out, after seconds of retries.
 */

#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "providers/verbs/verbs.h"

#define FIRST_TRY (1500 * HR_VERBS_MS)             /* for an address, when there are others */
static const uint64_t magic = 0x6e65706f62767268u; /* "hrvbopen" */
enum { VERSION = 6 };

/* ---- both sides ---- */

void hr_verbs_call_free(struct hr_verbs_domain *d, struct hr_verbs_call *call) {
    d->calling--;
    call->ep->call = NULL;
    hr_list_remove(&call->link);
    hr_verbs_unwatch(d, &call->source);
    free(call);
    hr_verbs_timer_update(d);
}

static struct hr_verbs_call *call_new(struct hr_verbs_domain *d, struct hr_verbs_ep *ep, int fd) {
    struct hr_verbs_call *call = calloc(1, sizeof *call);
    if (!call) return NULL;
    call->source = (struct hr_source){.kind = HR_VERBS_CALL, .fd = fd};
    call->active = ep->active;
    call->ep = ep;
    ep->call = call;
    ep->state = HR_VERBS_CALLING;
    hr_list_push(&d->calls, &call->link);
    d->calling++;
    hr_verbs_timer_update(d);
    return call;
}

/* A few bytes into an empty socket: taken whole, or the connection is gone. */
static int tell_open(struct hr_verbs_domain *d, struct hr_verbs_call *call) {
    struct hr_verbs_open *own = &call->own;
    struct hr_verbs_ep *ep = call->ep;
    if (getrandom(&ep->nonce, sizeof ep->nonce, 0) != sizeof ep->nonce) ep->nonce = (uint64_t)hr_now();
    *own =
        (struct hr_verbs_open){.magic = magic, .version = VERSION, .stream = ep->stream, .message = HR_VERBS_MESSAGE};
    own->nonce = ep->nonce;
    own->session = ep->session;
    own->life = ep->life;
    own->rd_atomic = (uint8_t)hr_verbs_rd_atomic(d);
    own->fixed = d->wish.gid >= 0;
    own->npaths = (uint8_t)d->paths.n;
    call->paths = d->paths;
    for (int i = 0; i < d->paths.n; i++) {
        const struct hr_verbs_path *path = &d->paths.list[i];
        own->paths[i] = (struct hr_verbs_end){.gid = path->gid, .lid = path->lid, .mtu = path->mtu, .kind = path->kind};
    }
    return send(call->source.fd, own, sizeof *own, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof *own;
}

/* 1: it is whole; 0: not yet; -1: closed. */
static int hear_open(struct hr_verbs_call *call) {
    ssize_t n =
        recv(call->source.fd, (uint8_t *)&call->open + call->have, sizeof call->open - call->have, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (n <= 0) return -1;
    call->have += (uint32_t)n;
    return call->have == sizeof call->open;
}

static int good_open(const struct hr_verbs_open *open) {
    if (open->magic != magic || open->version != VERSION || open->message != HR_VERBS_MESSAGE || !open->rd_atomic ||
        open->npaths > HR_VERBS_PATHS)
        return 0;
    for (int i = 0; i < open->npaths; i++)
        if (!open->paths[i].mtu || open->paths[i].mtu > IBV_MTU_4096) return 0;
    return 1;
}

/* Both have told of themselves. */
static void go_on(struct hr_verbs_call *call) {
    if (!call->own.npaths || !call->open.npaths) {
        hr_verbs_ep_fail(call->ep, HR_ERR_UNREACHABLE,
                         call->own.npaths ? "the peer's RDMA device has no active port"
                                          : "the RDMA device has no active port any more: rdma link",
                         0);
        return;
    }
    call->step = HR_VERBS_TRYING;
    hr_verbs_try(call);
}

/* ---- the active side ---- */

static void note(struct hr_verbs_call *call, hr_status status, const char *what, int error) {
    char text[HR_SOCKADDR_TEXT];
    if (call->worst == HR_ERR_AUTH) return;
    call->worst = status;
    snprintf(call->why, sizeof call->why, "%s: %s%s%s", hr_sockaddr_text(&call->list[call->current], text), what,
             error ? ": " : "", error ? strerror(error) : "");
}

static int start(struct hr_verbs_domain *d, struct hr_verbs_call *call) {
    const union hr_sockaddr *at = &call->list[call->current];
    int one = 1;
    call->source.fd = hr_socket_open(at->sa.sa_family);
    if (call->source.fd < 0) return -1;
    setsockopt(call->source.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (hr_socket_call(call->source.fd, at)) return -1;
    return hr_poll_watch(&d->poll, &call->source, EPOLLOUT);
}

/* Tries the addresses in turn; ends the endpoint after the last. */
static void try_from(struct hr_verbs_domain *d, struct hr_verbs_call *call, int first) {
    for (call->current = first; call->current < call->n; call->current++) {
        hr_verbs_unwatch(d, &call->source);
        call->step = HR_VERBS_CONNECTING;
        call->deadline = call->current + 1 < call->n ? hr_now() + FIRST_TRY : 0;
        if (start(d, call) == 0) return;
        note(call, HR_ERR_UNREACHABLE, "cannot connect", errno);
    }
    hr_verbs_ep_fail(call->ep, call->worst, call->why, 0);
}

static void try_next(struct hr_verbs_domain *d, struct hr_verbs_call *call, hr_status status, const char *what,
                     int error) {
    note(call, status, what, error);
    try_from(d, call, call->current + 1);
}

static int connected(struct hr_verbs_domain *d, struct hr_verbs_call *call) {
    int error = hr_socket_called(call->source.fd);
    if (error) {
        try_next(d, call, HR_ERR_UNREACHABLE, "cannot connect", error);
        return 0;
    }
    call->step = HR_VERBS_PROVING;
    hr_handshake_start(&call->hs, d->auth, 1, d->self_id, call->ep->base.peer_id);
    return 1;
}

static int proving(struct hr_verbs_domain *d, struct hr_verbs_call *call) {
    int want_write = 0;
    hr_status status = hr_handshake_step(&call->hs, call->source.fd, &want_write);
    if (status == HR_AGAIN) {
        hr_poll_watch(&d->poll, &call->source, want_write ? EPOLLOUT : EPOLLIN);
        return 0;
    }
    if (status != HR_OK) {
        const char *what = hr_prove_text(status, &status);
        try_next(d, call, status, what, 0);
        return 0;
    }
    call->step = HR_VERBS_OPENING;
    call->deadline = 0;
    if (tell_open(d, call)) {
        hr_poll_watch(&d->poll, &call->source, EPOLLIN);
        return 1;
    }
    hr_verbs_ep_fail(call->ep, HR_ERR_UNREACHABLE, "closed before the connection was open", 0);
    return 0;
}

static void opening(struct hr_verbs_call *call) {
    struct hr_verbs_ep *ep = call->ep;
    int heard = hear_open(call);
    if (heard < 0)
        hr_verbs_ep_fail(ep, HR_ERR_UNREACHABLE, "closed before the connection was open", 0);
    else if (heard && (!good_open(&call->open) || call->open.stream != ep->stream))
        hr_verbs_ep_fail(ep, HR_ERR_PROTOCOL, "the peer opened another stream or speaks another version", 0);
    else if (heard)
        go_on(call);
}

/* ---- the passive side ---- */

static struct hr_verbs_domain *domain_of(struct hr_door *door) {
    return hr_container(door, struct hr_verbs_domain, door);
}

static int prepare(struct hr_door *door, int fd, int local) {
    int one = 1;
    (void)door, (void)local;
    return setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static int good(const void *open, uint32_t *stream_p) {
    *stream_p = ((const struct hr_verbs_open *)open)->stream;
    return good_open(open);
}

/* Whether this endpoint waits for that caller. A lane is called by the same bond as ever, and after both ends have
 * given up what it was before. */
static int meant(const struct hr_verbs_ep *ep, const struct hr_caller *caller) {
    const struct hr_verbs_open *open = (const void *)caller->open;
    return ep->state == HR_VERBS_WAITING && ep->base.peer_id == caller->hs.peer_id && ep->stream == caller->stream &&
           (!ep->session || ep->session == open->session) && ep->life == open->life;
}

/* A caller and the endpoint that it calls have met. */
static void give(struct hr_verbs_domain *d, struct hr_caller *caller, struct hr_verbs_ep *ep) {
    struct hr_verbs_open open;
    memcpy(&open, caller->open, sizeof open);
    int fd = hr_door_take(&d->door, caller);
    struct hr_verbs_call *call = call_new(d, ep, fd);
    if (!call) {
        close(fd);
        hr_verbs_ep_fail(ep, HR_ERR_UNREACHABLE, "no memory for the connection", 0);
        return;
    }
    call->open = open;
    ep->session = open.session;
    if (hr_poll_watch(&d->poll, &call->source, EPOLLIN) == 0 && tell_open(d, call))
        go_on(call);
    else
        hr_verbs_ep_fail(ep, HR_ERR_UNREACHABLE, "the caller left before the connection was open", 0);
}

static void refuse(struct hr_door *door, struct hr_caller *caller) {
    int fd = hr_door_take(door, caller);
    shutdown(fd, SHUT_RDWR);
    close(fd);
}

void hr_verbs_calls_refuse(struct hr_verbs_domain *d) {
    for (struct hr_link *l = d->door.callers.next, *next; l != &d->door.callers; l = next) {
        struct hr_caller *caller = hr_container(l, struct hr_caller, link);
        next = l->next;
        if (caller->step == HR_CALLER_PARKED) refuse(&d->door, caller);
    }
}

static void waits(struct hr_door *door, struct hr_caller *caller) {
    struct hr_verbs_domain *d = domain_of(door);
    if (d->gone) {
        refuse(door, caller);
        return;
    }
    for (struct hr_link *l = d->eps.next; l != &d->eps; l = l->next) {
        struct hr_verbs_ep *ep = hr_container(l, struct hr_verbs_ep, link);
        if (!meant(ep, caller)) continue;
        give(d, caller, ep);
        return;
    }
}

static void changed(struct hr_door *door) { hr_verbs_timer_update(domain_of(door)); }

static void stranger(struct hr_door *door, const char *detail) {
    struct hr_domain *base = &domain_of(door)->base;
    if (base->sink->stranger) base->sink->stranger(base, detail);
}

hr_status hr_verbs_listen(struct hr_verbs_domain *d, char detail[256]) {
    struct hr_door *door = &d->door;
    union hr_sockaddr list[HR_VERBS_ADDRESSES];
    int n = hr_verbs_call_addresses(d, list, d->addresses);
    char text[HR_SOCKADDR_TEXT];
    _Static_assert(sizeof(struct hr_verbs_open) <= HR_OPEN_BYTES, "fits into a caller");
    door->poll = &d->poll;
    door->auth = d->auth;
    door->self_id = d->self_id;
    door->ifaces = d->ifaces;
    door->nifaces = d->nifaces;
    door->listener_kind = HR_VERBS_LISTENER;
    door->caller_kind = HR_VERBS_CALLER;
    door->open_len = sizeof(struct hr_verbs_open);
    door->prepare = prepare;
    door->good = good;
    door->waits = waits;
    door->changed = changed;
    door->stranger = stranger;
    snprintf(detail, 256,
             "verbs: the device's network has no address of this host: ip address add ... to its interface");
    if (d->is_tcp && !n) hr_ifaces_choose(d->ifaces, d->nifaces, d->wish.ifname, detail);
    for (int i = 0; i < n; i++)
        if (hr_door_listen(door, &list[i], "", n))
            snprintf(detail, 256, "verbs: cannot listen on %s: %s", hr_sockaddr_text(&list[i], text), strerror(errno));
    return door->nlisteners ? HR_OK : HR_ERR_NO_DEVICE;
}

/* ---- events, deadlines, the vtable's slot ---- */

void hr_verbs_call_event(struct hr_verbs_domain *d, struct hr_verbs_call *call) {
    if (call->step == HR_VERBS_TRYING) {
        hr_verbs_try_event(call);
        return;
    }
    if (call->step == HR_VERBS_CONNECTING && !connected(d, call)) return;
    if (call->step == HR_VERBS_PROVING && !proving(d, call)) return;
    if (call->step == HR_VERBS_OPENING) opening(call);
}

void hr_verbs_calls_tick(struct hr_verbs_domain *d, int64_t now) {
    for (struct hr_link *l = d->calls.next, *next; l != &d->calls; l = next) {
        struct hr_verbs_call *call = hr_container(l, struct hr_verbs_call, link);
        next = l->next;
        if (!call->deadline || now < call->deadline) continue;
        if (call->step == HR_VERBS_TRYING)
            hr_verbs_try_late(call);
        else
            try_next(d, call, HR_ERR_UNREACHABLE, "no answer", 0);
    }
    hr_door_tick(&d->door, now);
}

/* As many endpoints as one likes may reach one peer: they are told apart by a number, the lowest that no other endpoint
 * to that peer, of the same role, has. Both sides count alike when they connect their endpoints in one order. */
static uint32_t free_stream(struct hr_verbs_domain *d, const struct hr_verbs_ep *self, int active) {
    for (uint32_t stream = self->base.channel << 16;; stream++) {
        int used = 0;
        for (struct hr_link *l = d->eps.next; l != &d->eps && !used; l = l->next) {
            struct hr_verbs_ep *ep = hr_container(l, struct hr_verbs_ep, link);
            int lives = ep->state != HR_VERBS_NEW && ep->state != HR_VERBS_LOST && ep->state != HR_VERBS_CLOSED;
            used = lives && ep->base.peer_id == self->base.peer_id && ep->active == active && ep->stream == stream;
        }
        if (!used) return stream;
    }
}

static void dial(struct hr_verbs_domain *d, struct hr_verbs_call *call, const union hr_sockaddr *list, int n) {
    int any = d->auth->have_token || d->auth->insecure;
    call->worst = HR_ERR_UNREACHABLE;
    for (int i = 0; i < n; i++)
        if (any || hr_ifaces_own(d->ifaces, d->nifaces, &list[i])) call->list[call->n++] = list[i];
    if (!call->n) {
        call->worst = HR_ERR_AUTH;
        snprintf(call->why, sizeof call->why,
                 "the peer is on another host and there is no job token: set HRDMA_TOKEN, or HRDMA_INSECURE=1");
    }
    try_from(d, call, 0);
}

hr_status hr_verbs_ep_call(struct hr_verbs_ep *ep, const void *addr, size_t addr_len, int active, uint32_t stream) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    union hr_sockaddr list[HR_VERBS_ADDRESSES];
    if (ep->state != HR_VERBS_NEW) return HR_ERR_INVALID;
    int n = hr_verbs_address_read(addr, addr_len, list);
    if (n < 0) return HR_ERR_INVALID;
    if (d->gone) {
        hr_verbs_ep_fail(ep, HR_ERR_UNREACHABLE, hr_verbs_gone, 0);
        return HR_OK;
    }
    ep->active = active;
    ep->stream = stream;
    hr_verbs_inject_start(&d->inject, &ep->inject, d->self_id, ep->base.peer_id, stream);
    if (active) {
        struct hr_verbs_call *call = call_new(d, ep, -1);
        if (!call) return HR_ERR_NOMEM;
        dial(d, call, list, n);
        return HR_OK;
    }
    ep->state = HR_VERBS_WAITING;
    struct hr_caller *caller = hr_door_find(&d->door, ep->base.peer_id, stream);
    if (caller && meant(ep, caller)) give(d, caller, ep);
    return HR_OK;
}

hr_status hr_verbs_ep_connect(struct hr_ep *base, const void *addr, size_t addr_len, int active) {
    struct hr_verbs_ep *ep = (struct hr_verbs_ep *)base;
    return hr_verbs_ep_call(ep, addr, addr_len, active, free_stream(hr_verbs_domain_of(base), ep, active));
}
