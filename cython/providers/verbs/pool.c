/* pool.c - receives: buffers made, posted, given back, promised to peers. */

/*
 * Which receives a device still has cannot be asked. A queue pair that breaks in the middle of a message, or whose
 * completions are cleaned away with it, keeps what it had taken. But receives of a shared queue are taken in the order
 * of posting: when one comes back, those before it that have not are being filled for other queue pairs, or are kept.
 * So a queue pair that broke is a doubt, and one receive less is counted, until all that was posted by then has been
 * passed: if none was passed over, none was kept. No more than one message per member is being filled at a time: what
 * is passed over beyond that is kept in any case. What is kept is never used again while the queue lives, as a doubt
 * about memory that a device may write to cannot be settled by waiting; it goes with the last member.
 *
 * Why a connection never stands still for lack of promises. A member whose peer holds TOGETHER less than it may hold is
 * promised more as its messages come. The pool has room for all bases, and at most TOGETHER - 1 receives wait to be
 * posted at a time, so its peer holds TOGETHER at least. If it has used all that it was told of, all those are owed to
 * be told: enough for a message that does.
 */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "providers/verbs/verbs.h"

enum {
    BASE = 16,
    BUSY = 2, /* so many members may hold all they can while the others hold their bases */
    BLOCK = 64,
    QUEUE = 4096, /* receives of one shared queue: some 200 members */
    EACH = HR_VERBS_RECVS + HR_VERBS_SPARE
};
_Static_assert(BASE >= 2 * HR_VERBS_TOGETHER, "no peer is left without room");

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
#    define ENSURE(held) ((held) ? (void)0 : abort())
#else
#    define ENSURE(held) ((void)sizeof(held))
#endif

/* Buffers that are not kept by the device. */
static int32_t usable(const struct hr_verbs_pool *pool) { return (int32_t)(pool->total - pool->lost - pool->doubts); }

static int32_t needed(const struct hr_verbs_pool *pool) {
    return (int32_t)(pool->members * (pool->base + HR_VERBS_SPARE));
}

static int32_t surplus(const struct hr_verbs_pool *pool) { return usable(pool) - needed(pool) - (int32_t)pool->beyond; }

/* With the device, and neither promised nor for control messages. */
static int32_t unpromised(const struct hr_verbs_pool *pool) {
    return hr_verbs_pool_posted(pool) - (int32_t)(pool->promised + pool->members * HR_VERBS_SPARE);
}

/* ---- buffers ---- */

static int block_new(struct hr_verbs_pool *pool, uint32_t n) {
    struct hr_verbs_domain *d = pool->domain;
    struct hr_verbs_block *block = calloc(1, sizeof *block);
    errno = block ? hr_verbs_inject_register(&d->inject) : ENOMEM;
    if (!errno && (block->bytes = hr_verbs_pages((size_t)n * HR_VERBS_STRIDE)))
        block->mr = hr_verbs_pin(d, block->bytes, (size_t)n * HR_VERBS_STRIDE, IBV_ACCESS_LOCAL_WRITE);
    if (!block || !block->mr) {
        int error = errno;
        if (block && block->bytes) munmap(block->bytes, (size_t)n * HR_VERBS_STRIDE);
        free(block);
        errno = error;
        return 0;
    }
    block->len = (size_t)n * HR_VERBS_STRIDE;
    block->next = pool->blocks;
    pool->blocks = block;
    d->counts.receives += block->len;
    hr_verbs_mem_held(d, (int64_t)block->len);
    return 1;
}

/* So many more, or as many as the queue takes. */
static int grow(struct hr_verbs_pool *pool, uint32_t n) {
    uint32_t have = pool->total - pool->lost, size;
    if (have + n > pool->most) n = pool->most > have ? pool->most - have : 0;
    errno = ENOSPC;
    if (!n || !hr_verbs_completions_reserve(pool->domain, n)) return 0;
    size = pool->total + n;
    struct hr_verbs_buffer *buffers = realloc(pool->buffers, size * sizeof *buffers);
    if (buffers) pool->buffers = buffers;
    uint32_t *unposted = realloc(pool->unposted, size * sizeof *unposted);
    if (unposted) pool->unposted = unposted;
    if (!buffers || !unposted || !block_new(pool, n)) {
        pool->domain->cq_stale += n;
        return 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        buffers[pool->total] = (struct hr_verbs_buffer){.bytes = pool->blocks->bytes + (size_t)i * HR_VERBS_STRIDE,
                                                        .lkey = pool->blocks->mr->lkey};
        unposted[pool->nunposted++] = pool->total++;
    }
    return 1;
}

int hr_verbs_pool_post(struct hr_verbs_pool *pool) {
    struct ibv_recv_wr wrs[BLOCK], *bad = NULL;
    struct ibv_sge sges[BLOCK];
    while (pool->nunposted) {
        uint32_t n = pool->nunposted < BLOCK ? pool->nunposted : BLOCK;
        const uint32_t *which = pool->unposted + pool->nunposted - n;
        for (uint32_t i = 0; i < n; i++) {
            const struct hr_verbs_buffer *buffer = &pool->buffers[which[i]];
            sges[i] = (struct ibv_sge){(uintptr_t)buffer->bytes, HR_VERBS_STRIDE, buffer->lkey};
            wrs[i] = (struct ibv_recv_wr){.wr_id = 1u << 31 | which[i],
                                          .next = i + 1 < n ? &wrs[i + 1] : NULL,
                                          .sg_list = &sges[i],
                                          .num_sge = 1};
        }
        int rc = pool->srq ? ibv_post_srq_recv(pool->srq, wrs, &bad) : ibv_post_recv(pool->qp, wrs, &bad);
        uint32_t posted = rc ? (uint32_t)(bad - wrs) : n;
        for (uint32_t i = 0; i < posted; i++) pool->buffers[which[i]].at = pool->next++;
        pool->out += posted;
        pool->nunposted -= n;
        for (uint32_t i = posted; i < n; i++) pool->unposted[pool->nunposted++] = which[i];
        if (rc) return rc;
    }
    return 0;
}

/* What is doubted is settled where all that had been posted then is passed. */
static void pass(struct hr_verbs_pool *pool, uint32_t upto) {
    for (; pool->taken != upto; pool->taken++) {
        uint16_t *doubt = &pool->doubt[pool->taken & pool->mask];
        if (!*doubt) continue;
        pool->doubts -= *doubt;
        pool->lost += *doubt;
        *doubt = 0;
    }
}

static void back(struct hr_verbs_pool *pool, uint32_t i) {
    uint32_t at = pool->buffers[i].at, over = at - pool->taken;
    pool->out--;
    pool->unposted[pool->nunposted++] = i;
    if (!(over | pool->passed | pool->doubts)) { /* as nearly always */
        pool->taken++;
        return;
    }
    if ((int32_t)over >= 0) {
        pool->passed += over;
        pass(pool, at + 1);
    } else {
        pool->passed--;
    }
    if (pool->lost > pool->passed) pool->lost = pool->passed;
    if (pool->passed > pool->lost + pool->members) pool->lost = pool->passed - pool->members;
}

void hr_verbs_pool_back(struct hr_verbs_ep *ep, const struct ibv_wc *wc, int failed) {
    ep->doubted = !failed;
    back(ep->pool, hr_verbs_buffer_of(wc));
}

/* ---- promises ---- */

void hr_verbs_pool_used(struct hr_verbs_ep *ep) {
    struct hr_verbs_pool *pool = ep->pool;
    if (!ep->promised) return; /* it sent more than it was told of: that is found where messages are read */
    pool->beyond -= ep->promised > pool->base;
    pool->promised--;
    ep->promised--;
}

void hr_verbs_pool_hungry(struct hr_verbs_ep *ep) {
    struct hr_verbs_pool *pool = ep->pool;
    if (ep->promised <= pool->base && surplus(pool) <= 0) pool->turn++;
    ep->turn = pool->turn;
}

static void promise(struct hr_verbs_ep *ep, uint32_t most) {
    struct hr_verbs_pool *pool = ep->pool;
    int32_t below = ep->promised < pool->base ? (int32_t)(pool->base - ep->promised) : 0;
    int32_t n = (int32_t)(most - ep->promised), more = surplus(pool), left = unpromised(pool);
    if (n > below + (more > 0 ? more : 0)) n = below + (more > 0 ? more : 0);
    if (n > left) n = left;
    if (n <= 0) return;
    if (n > below) pool->beyond += (uint32_t)(n - below);
    pool->promised += (uint32_t)n;
    ep->promised += (uint32_t)n;
    ep->owed += (uint32_t)n;
    ENSURE(ep->promised <= HR_VERBS_RECVS && unpromised(pool) >= 0);
}

int hr_verbs_pool_promise(struct hr_verbs_ep *ep, int more) {
    struct hr_verbs_pool *pool = ep->pool;
    uint32_t most = more && ep->turn == pool->turn ? HR_VERBS_RECVS : pool->base;
    if (ep->promised + HR_VERBS_TOGETHER > most) return 0;
    promise(ep, most);
    if (ep->promised >= pool->base / 2) return 0;
    int rc = hr_verbs_pool_post(pool);
    if (!rc && unpromised(pool) <= 0) { /* more was kept than had been thought */
        if (!grow(pool, BLOCK)) return ep->promised ? 0 : ENOSPC;
        rc = hr_verbs_pool_post(pool);
    }
    promise(ep, most);
    return rc;
}

/* ---- members ---- */

static void pool_free(struct hr_verbs_pool *pool) {
    struct hr_verbs_domain *d = pool->domain;
    if (pool->srq) d->verbs->destroy_srq(pool->srq);
    for (struct hr_verbs_block *block; (block = pool->blocks);) {
        pool->blocks = block->next;
        d->counts.receives -= block->len;
        hr_verbs_mem_held(d, -(int64_t)block->len);
        d->verbs->dereg_mr(block->mr);
        munmap(block->bytes, block->len);
        free(block);
    }
    d->cq_stale += pool->total;
    d->alone -= !pool->srq;
    hr_list_remove(&pool->link);
    free(pool->buffers);
    free(pool->unposted);
    free(pool->doubt);
    free(pool);
}

static struct hr_verbs_pool *pool_new(struct hr_verbs_domain *d) {
    struct hr_verbs_pool *pool = calloc(1, sizeof *pool);
    uint32_t size = 1;
    if (!pool) return NULL;
    pool->domain = d;
    pool->most = pool->base = EACH;
    hr_list_init(&pool->link);
    if (d->shares && d->alone >= d->alone_most) {
        struct ibv_srq_init_attr init = {.attr = {.max_wr = QUEUE, .max_sge = 1}};
        if (d->attr.max_srq_wr < QUEUE) init.attr.max_wr = (uint32_t)d->attr.max_srq_wr;
        pool->srq = d->verbs->create_srq(d->pd, &init);
        pool->most = init.attr.max_wr;
        d->shares = pool->srq != NULL;
    }
    if (pool->srq) hr_list_push(&d->pools, &pool->link);
    pool->base = pool->srq ? BASE : HR_VERBS_RECVS;
    if (!pool->srq) pool->most = EACH;
    d->alone += !pool->srq;
    while (size < pool->most) size *= 2;
    pool->mask = size - 1;
    if ((pool->doubt = calloc(size, sizeof *pool->doubt))) return pool;
    pool_free(pool);
    return NULL;
}

/* What a pool of so many members should have, if it can. */
static uint32_t wanted(const struct hr_verbs_pool *pool, uint32_t members) {
    uint32_t busy = members < BUSY ? members : BUSY;
    return members * (pool->base + HR_VERBS_SPARE) + busy * (HR_VERBS_RECVS - pool->base);
}

hr_status hr_verbs_pool_join(struct hr_verbs_ep *ep, char why[160]) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    if (ep->pool) return HR_OK;
    int shares = d->shares && d->alone >= d->alone_most;
    for (struct hr_link *l = d->pools.next; shares && l != &d->pools && !ep->pool; l = l->next) {
        struct hr_verbs_pool *pool = hr_container(l, struct hr_verbs_pool, link);
        if (wanted(pool, pool->members + 1) + pool->lost + pool->doubts <= pool->most) ep->pool = pool;
    }
    if (!ep->pool) ep->pool = pool_new(d);
    if (!ep->pool) {
        snprintf(why, 160, "no memory for the receives of a connection");
        return HR_ERR_NOMEM;
    }
    ep->pool->members++;
    return HR_OK;
}

void hr_verbs_pool_leave(struct hr_verbs_ep *ep) {
    if (ep->pool && !--ep->pool->members && !ep->pool->held) pool_free(ep->pool);
    ep->pool = NULL;
}

struct hr_verbs_pool *hr_verbs_pool_hold(struct hr_verbs_ep *ep) {
    ep->doubted = 1;
    ep->pool->held++;
    return ep->pool;
}

int hr_verbs_pool_release(struct hr_verbs_ep *ep, struct hr_verbs_pool *pool, const struct ibv_wc *wc) {
    pool->held--;
    if (ep->pool == pool) return 1;
    if (pool->members)
        back(pool, hr_verbs_buffer_of(wc));
    else if (!pool->held)
        pool_free(pool);
    return 0;
}

hr_status hr_verbs_pool_start(struct hr_verbs_ep *ep, char why[160]) {
    struct hr_verbs_pool *pool = ep->pool;
    char limit[120];
    int error = 0;
    pool->qp = ep->qp;
    int rc = hr_verbs_pool_post(pool);
    int32_t lacks = (int32_t)wanted(pool, pool->members) - usable(pool);
    if (lacks < (int32_t)pool->base - unpromised(pool)) lacks = (int32_t)pool->base - unpromised(pool);
    if (!rc && lacks > 0) {
        error = grow(pool, pool->total && lacks < BLOCK ? BLOCK : (uint32_t)lacks) ? 0 : errno;
        rc = hr_verbs_pool_post(pool);
    }
    if (unpromised(pool) < (int32_t)pool->base) {
        if (rc)
            snprintf(why, 160, "the %s takes %u of %u receives: %s", pool->srq ? "shared queue" : "queue pair",
                     pool->out, pool->total, strerror(rc));
        else if (error == ENOSPC)
            snprintf(why, 160, "the shared queue has no room for the receives of another connection: it takes %u",
                     pool->most);
        else
            snprintf(why, 160, "cannot register receives for a connection: %s%s", strerror(error),
                     hr_verbs_memlock_text(error, limit));
        return HR_ERR_NOMEM;
    }
    ep->promised = pool->base;
    pool->promised += pool->base;
    ep->owed = 0;
    ep->doubted = 0;
    ep->turn = pool->turn - 1;
    return HR_OK;
}

void hr_verbs_pool_stop(struct hr_verbs_ep *ep) {
    struct hr_verbs_pool *pool = ep->pool;
    pool->promised -= ep->promised;
    if (ep->promised > pool->base) pool->beyond -= ep->promised - pool->base;
    ep->promised = 0;
    if (!pool->srq) { /* they went with it */
        pool->nunposted = pool->out = pool->passed = pool->lost = 0;
        while (pool->nunposted < pool->total) pool->unposted[pool->nunposted] = pool->nunposted, pool->nunposted++;
        pool->taken = pool->next;
    } else if (ep->doubted && pool->next != pool->taken) {
        pool->doubt[(pool->next - 1) & pool->mask]++;
        pool->doubts++;
    }
    ep->doubted = 0;
}
