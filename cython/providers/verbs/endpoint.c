/* endpoint.c - the life of an endpoint: made, connected, failed, aborted, freed. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "providers/verbs/sim.h"
#include "providers/verbs/verbs.h"

/* A serial number is index and generation, so that a completion that was late does not reach a successor. */
void hr_verbs_ep_renew(struct hr_verbs_ep *ep) {
    uint32_t i = ep->serial % HR_VERBS_EPS;
    ep->serial = ++hr_verbs_domain_of(&ep->base)->generation[i] << 12 | i;
}

hr_status hr_verbs_ep_create(struct hr_domain *domain, uint64_t peer_id, void *ctx, struct hr_ep **ep_p) {
    struct hr_verbs_domain *d = (struct hr_verbs_domain *)domain;
    struct hr_verbs_ep *ep;
    uint32_t i = 0;
    while (i < HR_VERBS_EPS && d->table[i]) i++;
    if (i == HR_VERBS_EPS || !(ep = calloc(1, sizeof *ep))) return HR_ERR_NOMEM;
    ep->base = (struct hr_ep){.domain = domain, .ctx = ctx, .peer_id = peer_id};
    ep->source = (struct hr_source){.kind = HR_VERBS_EP, .fd = -1};
    ep->dscp = ep->priority = -1;
    ep->serial = i;
    d->table[i] = ep;
    hr_verbs_ep_renew(ep);
    hr_list_init(&ep->ready);
    hr_list_init(&ep->end);
    hr_list_init(&ep->queue);
    hr_list_push(&d->eps, &ep->link);
    *ep_p = &ep->base;
    return HR_OK;
}

/* A receive may be anybody's until it is filled: then the number of the queue pair tells. */
struct hr_verbs_ep *hr_verbs_ep_find(struct hr_verbs_domain *d, const struct ibv_wc *wc) {
    uint32_t serial = (uint32_t)(wc->wr_id >> 32);
    struct hr_verbs_ep *ep;
    if (wc->wr_id == HR_VERBS_NOBODY) return NULL;
    if (hr_verbs_is_recv(wc)) {
        for (ep = d->numbers[wc->qp_num % HR_VERBS_NUMBERS]; ep && ep->qp->qp_num != wc->qp_num;) ep = ep->next;
        return ep;
    }
    ep = d->table[serial % HR_VERBS_EPS];
    return ep && ep->serial == serial ? ep : NULL;
}

hr_status hr_verbs_usable(const struct hr_verbs_ep *ep) {
    switch (ep->state) {
    case HR_VERBS_UP: return ep->told ? HR_AGAIN : HR_OK;
    case HR_VERBS_WAITING:
    case HR_VERBS_CALLING:
    case HR_VERBS_ENDING: return HR_AGAIN;
    case HR_VERBS_LOST: return ep->told ? HR_AGAIN : HR_ERR_PEER_LOST;
    case HR_VERBS_CLOSED: return HR_ERR_PEER_LOST;
    default: return HR_ERR_INVALID;
    }
}

void hr_verbs_ep_tell(struct hr_verbs_ep *ep, hr_status status) {
    ep->told = 1;
    ep->tell = status;
    hr_verbs_ep_ready(ep);
}

/* Lets go of the connection; the queue pair, which may be what is being looked at, stays. */
static void hang_up(struct hr_verbs_ep *ep) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    if (ep->call) hr_verbs_call_free(d, ep->call);
    hr_verbs_unwatch(d, &ep->source);
    hr_list_remove(&ep->end);
    hr_verbs_qp_break(ep);
    hr_verbs_timer_update(d);
}

void hr_verbs_ep_up(struct hr_verbs_ep *ep) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    struct hr_verbs_call *call = ep->call;
    hr_poll_forget(&d->poll, &call->source);
    ep->source.fd = call->source.fd;
    call->source.fd = -1;
    hr_verbs_call_free(d, call);
    ep->state = HR_VERBS_UP;
    if (d->is_tcp)
        errno = hr_verbs_sim_attach(ep->qp, ep->source.fd); /* which reads; here its end alone is looked for */
    if ((d->is_tcp && errno) || hr_poll_watch(&d->poll, &ep->source, EPOLLRDHUP | (d->is_tcp ? 0 : EPOLLIN)))
        hr_verbs_ep_fail(ep, HR_ERR_UNREACHABLE, "cannot watch the connection", errno);
    else
        hr_verbs_ep_tell(ep, HR_OK);
}

void hr_verbs_ep_fail(struct hr_verbs_ep *ep, hr_status status, const char *what, int error) {
    if (ep->state == HR_VERBS_LOST || ep->state == HR_VERBS_CLOSED) return;
    snprintf(ep->detail, sizeof ep->detail, "%s%s%s", what, error ? ": " : "", error ? strerror(error) : "");
    hang_up(ep);
    ep->state = HR_VERBS_LOST;
    hr_verbs_ep_tell(ep, status);
}

void hr_verbs_ep_end(struct hr_verbs_ep *ep, const char *why) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    if (ep->state != HR_VERBS_UP) return;
    ep->state = HR_VERBS_ENDING;
    ep->ended = hr_now();
    ep->end_why = why;
    hr_list_push(&d->ending, &ep->end);
    hr_verbs_timer_update(d);
}

void hr_verbs_ep_abort(struct hr_ep *base) {
    struct hr_verbs_ep *ep = (struct hr_verbs_ep *)base;
    if (ep->state == HR_VERBS_CLOSED) return;
    hang_up(ep);
    hr_verbs_qp_close(ep);
    hr_verbs_ops_drop(ep);
    hr_list_remove(&ep->ready);
    ep->told = 0;
    ep->state = HR_VERBS_CLOSED;
}

void hr_verbs_ep_destroy(struct hr_ep *base) {
    struct hr_verbs_ep *ep = (struct hr_verbs_ep *)base;
    hr_verbs_ep_abort(base);
    hr_list_remove(&ep->link);
    hr_verbs_domain_of(base)->table[ep->serial % HR_VERBS_EPS] = NULL;
    free(ep);
}

/* The path of a queue pair is set when it is brought up and cannot be changed afterwards on most devices. Said once
 * more of one that is up, it is answered by what was read back. */
hr_status hr_verbs_ep_set_class(struct hr_ep *base, int dscp, int priority) {
    struct hr_verbs_ep *ep = (struct hr_verbs_ep *)base;
    if (dscp < 0 || dscp > 63 || priority < 0 || priority > 7) return HR_ERR_INVALID;
    if (ep->qp && (ep->classless || ep->dscp != dscp || ep->priority != priority)) return HR_ERR_UNSUPPORTED;
    ep->dscp = dscp;
    ep->priority = priority;
    return HR_OK;
}

uint64_t hr_verbs_ep_unsent(struct hr_ep *base) {
    struct hr_verbs_ep *ep = (struct hr_verbs_ep *)base;
    if (ep->state != HR_VERBS_UP) return 0;
    if (ep->unsent) hr_verbs_flush(ep);
    return ep->unsent;
}
