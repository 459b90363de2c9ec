/* pair.c - how two endpoints find each other, what they share, and how they part. */

/*
 * A process-wide table lists the domains; a domain's address is 16 random bytes. Both ends call ep_connect in any
 * order. The second one to come finds the first waiting in its domain's list, makes the link and leaves a verdict on
 * both endpoints; each side's own progress() then reads its verdict and tells its sink, because a sink may only be
 * called from its own engine's progress().
 */

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "loop.h"

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static struct loop_domain *table;

void hr_loop_table_add(struct loop_domain *domain) {
    pthread_mutex_lock(&table_lock);
    domain->next_domain = table;
    table = domain;
    pthread_mutex_unlock(&table_lock);
}

void hr_loop_table_remove(struct loop_domain *domain) {
    struct loop_domain **at = &table;
    pthread_mutex_lock(&table_lock);
    while (*at != domain) at = &(*at)->next_domain;
    *at = domain->next_domain;
    pthread_mutex_unlock(&table_lock);
}

/* ---- shared parts, reference counted ---- */

struct loop_shared *hr_loop_shared_new(void) {
    struct loop_shared *shared = calloc(1, sizeof *shared);
    if (!shared) return NULL;
    shared->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (shared->fd < 0) {
        free(shared);
        return NULL;
    }
    atomic_init(&shared->refs, 1);
    pthread_mutex_init(&shared->lock, NULL);
    return shared;
}

void hr_loop_shared_put(struct loop_shared *shared) {
    if (atomic_fetch_sub(&shared->refs, 1) != 1) return;
    close(shared->fd);
    pthread_mutex_destroy(&shared->lock);
    free(shared->regions);
    free(shared);
}

/* Wakes the owner if it sleeps. The exchange lets one of many callers pay for the system call. */
void hr_loop_ring_bell(struct loop_shared *shared) {
    uint64_t one = 1;
    if (!atomic_load(&shared->armed) || !atomic_exchange(&shared->armed, 0)) return;
    /* Cannot fail: the counter is drained long before it could overflow. */
    if (write(shared->fd, &one, sizeof one) < 0) return;
}

static struct loop_link *link_new(struct loop_shared *active, struct loop_shared *passive) {
    struct loop_link *link = aligned_alloc(64, sizeof *link);
    if (!link) return NULL;
    memset(link, 0, sizeof *link);
    for (int i = 0; i < 2; i++) {
        link->ring[i].data = aligned_alloc(64, RING_BYTES);
        link->shared[i] = i ? passive : active;
    }
    if (!link->ring[0].data || !link->ring[1].data) {
        free(link->ring[0].data);
        free(link->ring[1].data);
        free(link);
        return NULL;
    }
    for (int i = 0; i < 2; i++) atomic_fetch_add(&link->shared[i]->refs, 1);
    atomic_init(&link->refs, 2);
    return link;
}

static void link_put(struct loop_link *link) {
    if (atomic_fetch_sub(&link->refs, 1) != 1) return;
    for (int i = 0; i < 2; i++) {
        free(link->ring[i].data);
        hr_loop_shared_put(link->shared[i]);
    }
    free(link);
}

/* ---- endpoints ---- */

hr_status hr_loop_ep_create(struct hr_domain *base, uint64_t peer_id, void *ctx, struct hr_ep **ep_p) {
    struct loop_domain *domain = (struct loop_domain *)base;
    struct loop_ep *ep = calloc(1, sizeof *ep);
    if (!ep) return HR_ERR_NOMEM;
    ep->base = (struct hr_ep){.domain = base, .ctx = ctx, .peer_id = peer_id};
    atomic_init(&ep->verdict, HR_INPROGRESS);

    pthread_mutex_lock(&table_lock);
    if (domain->neps == domain->cap) {
        int cap = domain->cap ? 2 * domain->cap : 8;
        struct loop_ep **eps = realloc(domain->eps, (size_t)cap * sizeof *eps);
        if (!eps) {
            pthread_mutex_unlock(&table_lock);
            free(ep);
            return HR_ERR_NOMEM;
        }
        domain->eps = eps;
        domain->cap = cap;
    }
    domain->eps[domain->neps++] = ep;
    pthread_mutex_unlock(&table_lock);
    *ep_p = &ep->base;
    return HR_OK;
}

/* The endpoint that waits for this one: the oldest of the other role, so that several between the same two domains
 * pair in order of creation. Called with the table locked. */
static struct loop_ep *find_partner(const struct loop_ep *ep, const struct loop_domain *domain,
                                    const struct loop_domain *other) {
    for (int i = 0; i < other->neps; i++) {
        struct loop_ep *at = other->eps[i];
        if (at->waiting && at->active != ep->active && at->base.peer_id == domain->self_id &&
            memcmp(at->target, domain->addr, LOOP_ADDR_BYTES) == 0)
            return at;
    }
    return NULL;
}

static void attach(struct loop_ep *ep, struct loop_link *link) {
    ep->link = link;
    ep->side = !ep->active;
    ep->waiting = 0;
    atomic_store(&ep->verdict, HR_OK);
    hr_loop_ring_bell(((struct loop_domain *)ep->base.domain)->shared);
}

static hr_status refuse(struct loop_ep *ep, hr_status status, const char *detail) {
    ep->detail = detail;
    atomic_store(&ep->verdict, status);
    hr_loop_ring_bell(((struct loop_domain *)ep->base.domain)->shared);
    return HR_OK; /* the call itself went well: the sink hears of it */
}

/* Called with the table locked. */
static hr_status connect_locked(struct loop_ep *ep) {
    struct loop_domain *domain = (struct loop_domain *)ep->base.domain, *other = table;
    struct loop_ep *partner;
    struct loop_link *link;

    while (other && memcmp(other->addr, ep->target, LOOP_ADDR_BYTES) != 0) other = other->next_domain;
    if (!other) return refuse(ep, HR_ERR_UNREACHABLE, "no domain with this address in the process");
    /* Inside one process a comparison is all the proof there can be. */
    if (memcmp(other->auth.key, domain->auth.key, sizeof domain->auth.key) != 0)
        return refuse(ep, HR_ERR_AUTH, "the peer has another job token");
    if (other->auth.epoch != domain->auth.epoch) return refuse(ep, HR_ERR_AUTH, "the peer belongs to another epoch");
    if (other->self_id != ep->base.peer_id) return refuse(ep, HR_ERR_AUTH, "another peer answers at this address");

    partner = find_partner(ep, domain, other);
    if (!partner) {
        ep->waiting = 1;
        return HR_OK;
    }
    link = link_new(ep->active ? domain->shared : other->shared, ep->active ? other->shared : domain->shared);
    if (!link) return HR_ERR_NOMEM;
    attach(partner, link);
    attach(ep, link);
    return HR_OK;
}

hr_status hr_loop_ep_connect(struct hr_ep *base, const void *addr, size_t addr_len, int active) {
    struct loop_ep *ep = (struct loop_ep *)base;
    hr_status status;
    if (addr_len != LOOP_ADDR_BYTES || ep->phase != LOOP_IDLE) return HR_ERR_INVALID;
    memcpy(ep->target, addr, LOOP_ADDR_BYTES);
    ep->active = active != 0;
    pthread_mutex_lock(&table_lock);
    status = connect_locked(ep);
    pthread_mutex_unlock(&table_lock);
    if (status == HR_OK) ep->phase = LOOP_CONNECTING;
    return status;
}

void hr_loop_ep_abort(struct hr_ep *base) {
    struct loop_ep *ep = (struct loop_ep *)base;
    struct loop_link *link;

    ep->phase = LOOP_DEAD; /* progress() passes it over from now on: no callback */
    pthread_mutex_lock(&table_lock);
    ep->waiting = 0;
    link = ep->link;
    pthread_mutex_unlock(&table_lock);
    if (!link) return;
    /* The peer writes here with our lock held and this flag down: after this no byte of ours changes. */
    pthread_mutex_lock(&link->shared[ep->side]->lock);
    atomic_store(&link->closed[ep->side], 1);
    pthread_mutex_unlock(&link->shared[ep->side]->lock);
    hr_loop_ring_bell(link->shared[!ep->side]); /* so that the peer finds out */
}

void hr_loop_ep_destroy(struct hr_ep *base) {
    struct loop_ep *ep = (struct loop_ep *)base;
    struct loop_domain *domain = (struct loop_domain *)base->domain;
    int i = 0;

    hr_loop_ep_abort(base);
    pthread_mutex_lock(&table_lock);
    while (domain->eps[i] != ep) i++;
    domain->neps--;
    memmove(&domain->eps[i], &domain->eps[i + 1], (size_t)(domain->neps - i) * sizeof domain->eps[0]);
    pthread_mutex_unlock(&table_lock);
    hr_loop_unmap_all(ep);
    if (ep->link) link_put(ep->link);
    free(ep);
}
