/* loop.c - the in-process transport: every slot of a provider in its simplest honest form. Start here to write one. */

/*
 * Two domains of one process, or one domain and itself, reach each other through ordinary memory. There is no device,
 * no handshake and no failure but the peer's going away; what is left is the contract of hr/provider.h, and this file
 * says at each slot how the contract is met. How endpoints find each other is in pair.c, registered memory in memory.c,
 * the message queue in ring.h.
 *
 * Threads. The two domains belong to different engines with different locks, so all that both touch is either atomic
 * (ring, armed, closed, verdict) or under one of two mutexes: the table's, or the lock of the memory's owner. They are
 * never held during a callback and never nested. Sending takes neither.
 *
 * Sleeping. Who is about to sleep stores `armed`, then looks at its queues; who publishes stores `tail`, then looks at
 * `armed`. All four are sequentially consistent, so at least one of them sees the other: either the sleeper stays
 * awake or the bell is rung. A producer that found its ring full does the same with `hungry` and `head`, in reverse.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "loop.h"

/* Endpoints looked at in one progress() beside the hint: bounds its cost however many there are. */
enum { LOOP_POLLED = 16 };

/* ---- device and domain ---- */

static int loop_device_count(const char **why_p) {
    (void)why_p; /* only read where the count is 0 */
    return 1;
}

static hr_status loop_domain_open(const struct hr_provider *self, const struct hr_domain_params *params,
                                  struct hr_domain **domain_p, char detail[256]) {
    struct loop_domain *domain;

    /* A provider refuses every option it does not know: a misspelt one must not go unnoticed. */
    if (params->options && params->options[0]) {
        snprintf(detail, 256, "loop takes no options, got \"%.200s\"", params->options);
        return HR_ERR_INVALID;
    }
    domain = calloc(1, sizeof *domain);
    if (domain) domain->shared = hr_loop_shared_new();
    if (!domain || !domain->shared) {
        snprintf(detail, 256, "loop: no memory or no descriptor for a domain: %s", strerror(errno));
        free(domain);
        return HR_ERR_NOMEM;
    }
    if (getrandom(domain->addr, sizeof domain->addr, 0) != sizeof domain->addr) {
        snprintf(detail, 256, "loop: getrandom: %s", strerror(errno));
        hr_loop_shared_put(domain->shared);
        free(domain);
        return HR_ERR_DEVICE;
    }
    domain->base.ops = self;
    domain->base.sink = params->sink;
    domain->base.owner = params->owner;
    domain->base.caps = (struct hr_caps){
        .flags = HR_CAP_READ | HR_CAP_WRITE | HR_CAP_ATOMIC | HR_CAP_MAP | HR_CAP_ANYMEM | HR_CAP_REVOKE | HR_CAP_LOCAL,
        .max_send = LOOP_MAX_SEND,
        .eager_max = 8192,
        .eager_mapped = 8192,
        .eager_same = 8192,
        .segment = 1 << 19,
        .window = 0, /* nothing is ever under way: every copy is made inside post_* */
    };
    domain->self_id = params->self_id;
    if (params->auth) domain->auth = *params->auth;

    hr_loop_table_add(domain);
    *domain_p = &domain->base;
    return HR_OK;
}

static void loop_domain_close(struct hr_domain *base) {
    struct loop_domain *domain = (struct loop_domain *)base;
    hr_loop_table_remove(domain);
    hr_loop_shared_put(domain->shared); /* a peer that has not yet destroyed its endpoints keeps it a little longer */
    free(domain->eps);
    free(domain);
}

static size_t loop_domain_address(struct hr_domain *base, void *addr) {
    memcpy(addr, ((struct loop_domain *)base)->addr, LOOP_ADDR_BYTES);
    return LOOP_ADDR_BYTES;
}

static void loop_domain_describe(struct hr_domain *base, char *text, size_t size) {
    const struct loop_domain *domain = (const struct loop_domain *)base;
    snprintf(text, size, "in process, domain %02x%02x%02x%02x", domain->addr[0], domain->addr[1], domain->addr[2],
             domain->addr[3]);
}

static hr_status loop_ep_set_class(struct hr_ep *ep, int dscp, int priority) {
    (void)ep, (void)dscp, (void)priority;
    return HR_ERR_UNSUPPORTED; /* no wire, no classes */
}

static uint64_t loop_ep_unsent(struct hr_ep *ep) {
    (void)ep;
    return 0; /* what was accepted is with the peer already */
}

/* ---- posting ---- */

/* Asks for a wake-up when the peer has made room, and looks again. The peer does it the other way round: it makes room,
 * then looks whether somebody is hungry. */
static int still_full(struct loop_ep *ep, size_t n) {
    struct ring *ring = &ep->link->ring[!ep->side];
    atomic_store(&ring->hungry, 1);
    if (!ring_fits(ring, n)) return 1;
    atomic_store(&ring->hungry, 0);
    return 0;
}

/* Whether a record of n bytes can be posted now. */
static hr_status room_for(struct loop_ep *ep, size_t n) {
    if (ep->phase == LOOP_IDLE || ep->phase == LOOP_CONNECTING) return HR_AGAIN;
    if (ep->phase == LOOP_DEAD) return HR_ERR_PEER_LOST;
    if (atomic_load_explicit(&ep->link->closed[!ep->side], memory_order_relaxed)) return HR_AGAIN;
    if (!ring_fits(&ep->link->ring[!ep->side], n) && still_full(ep, n)) {
        ep->starved = n;
        return HR_AGAIN;
    }
    return HR_OK;
}

static void publish(struct loop_ep *ep, size_t n) {
    ring_publish(&ep->link->ring[!ep->side], n);
    hr_loop_ring_bell(ep->link->shared[!ep->side]);
}

/* Copies and is done: no operation here is ever in progress, so sink->done is never called. */
static hr_status loop_post_send(struct hr_ep *base, const struct hr_msg *msg) {
    struct loop_ep *ep = (struct loop_ep *)base;
    size_t n = record_bytes(msg->hdr_len, msg->len);
    struct record *record;
    hr_status status;

    if (msg->hdr_len < 8 || msg->hdr_len > HR_MAX_HDR || msg->hdr_len % 8 || msg->len > LOOP_MAX_SEND)
        return HR_ERR_INVALID;
    status = room_for(ep, n);
    if (status != HR_OK) return status;
    record = ring_reserve(&ep->link->ring[!ep->side], n);
    record->kind = RECORD_MESSAGE;
    record->hdr_len = (uint16_t)msg->hdr_len;
    record->len = (uint32_t)msg->len;
    memcpy(record + 1, msg->hdr, msg->hdr_len);
    if (msg->len) memcpy((char *)(record + 1) + msg->hdr_len, msg->payload, msg->len);
    publish(ep, n);
    return HR_OK;
}

static hr_status remote_range(struct loop_ep *ep, const struct hr_rmem *remote, uint64_t offset, uint64_t len,
                              uint32_t access, char **ptr_p) {
    if (offset > remote->len || len > remote->len - offset) return HR_ERR_ACCESS;
    return hr_loop_lock_remote(ep, remote->rkey, remote->addr + offset, len, access, ptr_p);
}

static hr_status loop_post_write(struct hr_ep *base, const struct hr_rma *rma) {
    struct loop_ep *ep = (struct loop_ep *)base;
    size_t n = record_bytes(sizeof(uint64_t), 0);
    struct record *record;
    char *to;
    /* Room for the notification first: after the copy there would be no way back. */
    hr_status status = room_for(ep, n);
    if (status == HR_OK) status = remote_range(ep, rma->remote, rma->offset, rma->len, HR_ACCESS_REMOTE_WRITE, &to);
    if (status != HR_OK) return status;
    if (rma->len) memmove(to, rma->local, rma->len);
    hr_loop_unlock_remote(ep);
    if (rma->with_notify) {
        record = ring_reserve(&ep->link->ring[!ep->side], n);
        *record = (struct record){.kind = RECORD_NOTIFY, .hdr_len = sizeof(uint64_t), .value = rma->value};
        memcpy(record + 1, &(uint64_t){rma->len}, sizeof(uint64_t));
        publish(ep, n);
    }
    return HR_OK;
}

static hr_status loop_post_read(struct hr_ep *base, const struct hr_rma *rma) {
    struct loop_ep *ep = (struct loop_ep *)base;
    char *from;
    hr_status status = room_for(ep, 0);
    if (status == HR_OK) status = remote_range(ep, rma->remote, rma->offset, rma->len, HR_ACCESS_REMOTE_READ, &from);
    if (status != HR_OK) return status;
    if (rma->len) memmove(rma->local, from, rma->len);
    hr_loop_unlock_remote(ep);
    return HR_OK;
}

static hr_status loop_post_atomic(struct hr_ep *base, const struct hr_atomic *atomic) {
    struct loop_ep *ep = (struct loop_ep *)base;
    uint64_t before;
    char *at;
    hr_status status = room_for(ep, 0);
    if (status == HR_OK)
        status = remote_range(ep, atomic->remote, atomic->offset, sizeof before, HR_ACCESS_REMOTE_ATOMIC, &at);
    if (status != HR_OK) return status;
    if ((uintptr_t)at % sizeof before) {
        hr_loop_unlock_remote(ep);
        return HR_ERR_INVALID;
    }
    /* Atomic against the owner's own loads and stores as well, hence not just under the lock. */
    before = atomic->compare;
    if (atomic->op == HR_ATOMIC_FETCH_ADD)
        before = __atomic_fetch_add((uint64_t *)at, atomic->operand, __ATOMIC_SEQ_CST);
    else /* leaves in `before` what it found */
        __atomic_compare_exchange_n((uint64_t *)at, &before, atomic->operand, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    hr_loop_unlock_remote(ep);
    *atomic->result = before;
    return HR_OK;
}

static hr_status loop_cancel(struct hr_ep *ep, void *cookie) {
    (void)ep, (void)cookie;
    return HR_ERR_UNSUPPORTED; /* whatever was posted has ended already */
}

/* ---- progress ---- */

static int report(struct loop_ep *ep, hr_status status, const char *detail) {
    ep->phase = status == HR_OK ? LOOP_OPEN : LOOP_DEAD;
    ep->base.domain->sink->state(&ep->base, status, detail);
    return 1;
}

static void deliver(struct loop_ep *ep, const struct record *record) {
    const struct hr_sink *sink = ep->base.domain->sink;
    const char *hdr = (const char *)(record + 1);
    uint64_t nbytes;
    if (record->kind == RECORD_MESSAGE) {
        sink->recv(&ep->base, hdr, record->hdr_len, hdr + record->hdr_len, record->len);
        return;
    }
    memcpy(&nbytes, hdr, sizeof nbytes);
    sink->notify(&ep->base, record->value, nbytes);
}

static int poll_ep(struct loop_ep *ep, int budget) {
    struct ring *ring;
    struct record *record;
    int n = 0;

    if (budget <= 0 || ep->phase == LOOP_IDLE || ep->phase == LOOP_DEAD) return 0;
    if (ep->phase == LOOP_CONNECTING) {
        hr_status verdict = (hr_status)atomic_load(&ep->verdict);
        return verdict == HR_INPROGRESS ? 0 : report(ep, verdict, ep->detail);
    }
    ring = &ep->link->ring[ep->side];
    while (n < budget && (record = ring_peek(ring))) {
        deliver(ep, record);
        ring_pop(ring); /* only now: the message was shown in place */
        n++;
    }
    if (n) {
        /* A store that is ordered before the load of hungry, which ring_pop's is not. */
        atomic_fetch_add(&ring->head, 0);
        if (atomic_load(&ring->hungry) && atomic_exchange(&ring->hungry, 0))
            hr_loop_ring_bell(ep->link->shared[!ep->side]);
    } else if (atomic_load(&ep->link->closed[!ep->side]) && !ring_peek(ring)) {
        /* closed was read before the ring, so nothing that was sent is lost. */
        n = report(ep, HR_ERR_PEER_LOST, "the peer closed the endpoint");
    }
    return n;
}

static int loop_progress(struct hr_domain *base, int budget, struct hr_ep *hint) {
    struct loop_domain *domain = (struct loop_domain *)base;
    int n = 0, looks = domain->neps < LOOP_POLLED ? domain->neps : LOOP_POLLED;

    /* The hint has half the budget; the odd event of it goes to either side in turn, so that nobody starves. */
    if (hint) n = poll_ep((struct loop_ep *)hint, (budget + (int)(domain->turns++ & 1)) / 2);
    for (; looks > 0 && n < budget; looks--) {
        if (domain->next >= domain->neps) domain->next = 0;
        n += poll_ep(domain->eps[domain->next++], budget - n);
    }
    return n;
}

/* ---- sleeping ---- */

static int loop_event_fd(struct hr_domain *domain) { return ((struct loop_domain *)domain)->shared->fd; }

static int has_work(struct loop_ep *ep) {
    if (ep->phase == LOOP_CONNECTING) return atomic_load(&ep->verdict) != HR_INPROGRESS;
    if (ep->phase != LOOP_OPEN) return 0;
    if (ring_peek(&ep->link->ring[ep->side]) || atomic_load(&ep->link->closed[!ep->side])) return 1;
    if (!ep->starved || still_full(ep, ep->starved)) return 0;
    ep->starved = 0; /* said once: the engine may have dropped what waited */
    return 1;
}

/* Who rings takes `armed` first, so the bell is read when that was taken, and not at every sleep. */
static void loop_event_disarm(struct hr_domain *base) {
    struct loop_domain *domain = (struct loop_domain *)base;
    uint64_t count;
    if (domain->armed && !atomic_exchange(&domain->shared->armed, 0)) domain->rung++;
    domain->armed = 0;
    if (domain->rung && read(domain->shared->fd, &count, sizeof count) == sizeof count) domain->rung -= count;
}

static hr_status loop_event_arm(struct hr_domain *base) {
    struct loop_domain *domain = (struct loop_domain *)base;
    loop_event_disarm(base); /* an old ring of the bell must not end the next sleep at once */
    domain->armed = 1;
    atomic_store(&domain->shared->armed, 1);
    for (int i = 0; i < domain->neps; i++) {
        if (!has_work(domain->eps[i])) continue;
        loop_event_disarm(base);
        return HR_AGAIN;
    }
    return HR_OK;
}

const struct hr_provider hr_provider_loop = {
    .name = "loop",
    .device_count = loop_device_count,
    .domain_open = loop_domain_open,
    .domain_close = loop_domain_close,
    .domain_address = loop_domain_address,
    .domain_describe = loop_domain_describe,
    .mem_register = hr_loop_mem_register,
    .mem_deregister = hr_loop_mem_deregister,
    .mem_quiet = hr_loop_mem_quiet,
    .mem_export = hr_loop_mem_export,
    .mem_import = hr_loop_mem_import,
    .mem_release = hr_loop_mem_release,
    .ep_create = hr_loop_ep_create,
    .ep_connect = hr_loop_ep_connect,
    .ep_abort = hr_loop_ep_abort,
    .ep_destroy = hr_loop_ep_destroy,
    .ep_set_class = loop_ep_set_class,
    .ep_unsent = loop_ep_unsent,
    .post_send = loop_post_send,
    .post_write = loop_post_write,
    .post_read = loop_post_read,
    .post_atomic = loop_post_atomic,
    .post_put = hr_cannot_put,
    .cancel = loop_cancel,
    .progress = loop_progress,
    .event_fd = loop_event_fd,
    .event_arm = loop_event_arm,
    .event_disarm = loop_event_disarm,
};
