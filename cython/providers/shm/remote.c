/* remote.c - writes and atomics: they travel through the ring and the target applies them. */

/*
 * Peers could map each other's memory writable and store into it, at one copy less. They do not: a mapping cannot be
 * taken away, and after ep_abort no byte here may be changed by the peer, a stopped one that wakes up later included.
 * Applied by the target, a write fits registered memory of any kind, stops with the registration or the endpoint, and
 * an atomic is atomic with those that arrive by other providers. Bulk between engines on one host is pulled, not
 * written.
 *
 * A write is done when all of it is in the ring: what is posted later arrives later. One that the target refuses
 * changes nothing and is not answered. An atomic is answered. The answer needs room in the other ring: SHM_RESERVE is
 * kept for it, and no more than SHM_OPS may be unanswered, so that it always has some and two full rings cannot wait
 * for each other.
 */

#include <stdlib.h>

#include "hr/reduce.h"
#include "providers/shm/shm.h"

struct write_hdr {
    uint64_t key, addr;
    uint64_t notify; /* 1: this is the last piece, tell the engine */
    uint64_t value, total;
};
struct atomic_hdr {
    uint64_t key, addr;
    uint32_t op, what;
    uint64_t operand, compare;
};
struct reply_hdr {
    uint32_t op;
    int32_t status;
    uint64_t value;
};

static void send_record(struct shm_ep *e, enum ring_kind kind, const void *hdr, size_t hdr_len, const void *payload,
                        size_t len) {
    uint8_t *at = ring_tx_at(&e->tx);
    memcpy(at, hdr, hdr_len);
    if (len) hr_copy(at + ring_payload(hdr_len, len), payload, len, HR_STORE_SHARED);
    if (ring_tx_publish(&e->tx, ring_word(kind, hdr_len, len), ring_record(hdr_len, len))) hr_shm_wake(e);
}

static hr_status reserve(struct shm_ep *e, uint64_t n) {
    return ring_tx_fits(&e->tx, n + SHM_RESERVE) ? HR_OK : hr_shm_room(e, n + SHM_RESERVE);
}

/* Checks that hold for both. */
static hr_status begin(struct shm_ep *e, const struct hr_rmem *remote, uint64_t offset, uint64_t len, uint32_t access) {
    if (e->state == SHM_LOST || e->state == SHM_ABORTED) return e->lost ? e->lost : HR_ERR_PEER_LOST;
    if (e->state != SHM_UP) return HR_ERR_INVALID;
    if (e->lost) return HR_AGAIN;
    if (!(shm_key_access(remote->rkey) & access)) return HR_ERR_ACCESS;
    if (offset > remote->len || len > remote->len - offset) return HR_ERR_ACCESS;
    return e->pushing == SHM_PUSHING ? hr_shm_push(e) : HR_OK;
}

hr_status hr_shm_push(struct shm_ep *e) {
    struct shm_push *p = &e->push;
    int last;
    do {
        size_t n = p->left < SHM_WRITE_PIECE ? p->left : SHM_WRITE_PIECE;
        struct write_hdr hdr = {.key = p->key, .addr = p->addr};
        hr_status status = reserve(e, ring_record(sizeof hdr, n));
        if (status != HR_OK) return status;
        last = n == p->left;
        if (last && p->with_notify) {
            hdr.notify = 1;
            hdr.value = p->value;
            hdr.total = p->total;
        }
        send_record(e, RING_WRITE, &hdr, sizeof hdr, p->local, n);
        p->local += n;
        p->addr += n;
        p->left -= n;
    } while (!last);
    free(p->copy);
    p->copy = NULL;
    if (e->pushing) {
        e->pushing = SHM_PUSHED;
        hr_shm_kick(shm_ep_domain(e));
    }
    return HR_OK;
}

hr_status hr_shm_post_write(struct hr_ep *ep, const struct hr_rma *rma) {
    struct shm_ep *e = shm_ep(ep);
    hr_status status = begin(e, rma->remote, rma->offset, rma->len, HR_ACCESS_REMOTE_WRITE);
    if (status != HR_OK) return status;
    if (e->pushing) return HR_AGAIN; /* the one before has yet to be called done */
    e->push = (struct shm_push){
        .local = rma->local,
        .key = rma->remote->rkey,
        .addr = rma->remote->addr + rma->offset,
        .left = rma->len,
        .total = rma->len,
        .value = rma->value,
        .with_notify = rma->with_notify,
        .cookie = rma->cookie,
    };
    status = hr_shm_push(e);
    if (status != HR_AGAIN || e->push.left == rma->len) return status; /* all of it was taken, or nothing */
    e->pushing = SHM_PUSHING;
    e->special = 1;
    return HR_INPROGRESS;
}

int hr_shm_poll_push(struct shm_ep *e) {
    if (e->pushing == SHM_PUSHING) hr_shm_push(e);
    if (e->pushing != SHM_PUSHED) return 0;
    e->pushing = SHM_NO_PUSH;
    e->special = e->lost != HR_OK;
    if (e->push.forgotten) return 0;
    shm_ep_domain(e)->base.sink->done(&e->base, e->push.cookie, HR_OK);
    return 1;
}

hr_status hr_shm_post_atomic(struct hr_ep *ep, const struct hr_atomic *atomic) {
    struct shm_ep *e = shm_ep(ep);
    struct atomic_hdr hdr = {.what = atomic->op, .operand = atomic->operand, .compare = atomic->compare};
    hr_status status;

    if (atomic->op != HR_ATOMIC_FETCH_ADD && atomic->op != HR_ATOMIC_CMP_SWAP) return HR_ERR_INVALID;
    status = begin(e, atomic->remote, atomic->offset, sizeof(uint64_t), HR_ACCESS_REMOTE_ATOMIC);
    if (status != HR_OK) return status;
    hdr.key = atomic->remote->rkey;
    hdr.addr = atomic->remote->addr + atomic->offset;
    if (hdr.addr % sizeof(uint64_t)) return HR_ERR_INVALID;
    while (hdr.op < SHM_OPS && e->ops[hdr.op].busy) hdr.op++;
    if (hdr.op == SHM_OPS) return HR_AGAIN;
    status = reserve(e, ring_record(sizeof hdr, 0));
    if (status != HR_OK) return status;
    send_record(e, RING_ATOMIC, &hdr, sizeof hdr, NULL, 0);
    e->ops[hdr.op] = (struct shm_op){.cookie = atomic->cookie, .result = atomic->result, .busy = 1};
    return HR_INPROGRESS;
}

static hr_status forget_push(struct shm_ep *e) {
    if (e->push.left) {
        uint8_t *copy = malloc(e->push.left);
        if (!copy) return HR_ERR_UNSUPPORTED;
        memcpy(copy, e->push.local, e->push.left);
        e->push.local = e->push.copy = copy;
    }
    e->push.forgotten = 1;
    return HR_OK;
}

hr_status hr_shm_cancel(struct hr_ep *ep, void *cookie) {
    struct shm_ep *e = shm_ep(ep);
    if (e->pushing && !e->push.forgotten && e->push.cookie == cookie) return forget_push(e);
    for (uint32_t i = 0; i < SHM_OPS; i++) {
        if (!e->ops[i].busy || e->ops[i].forgotten || e->ops[i].cookie != cookie) continue;
        e->ops[i].forgotten = 1;
        return HR_OK;
    }
    return HR_ERR_INVALID;
}

static int answer(struct shm_ep *e, uint32_t op, hr_status status, uint64_t value) {
    struct reply_hdr hdr = {.op = op, .status = status, .value = value};
    uint64_t n = ring_record(sizeof hdr, 0);
    if (!ring_tx_fits(&e->tx, n) && hr_shm_room(e, n) != HR_OK) return 0; /* more unanswered than it may have */
    send_record(e, RING_REPLY, &hdr, sizeof hdr, NULL, 0);
    return 1;
}

static int on_write(struct shm_ep *e, const uint8_t *at, const uint8_t *payload, size_t len) {
    struct shm_domain *dom = shm_ep_domain(e);
    struct write_hdr hdr;
    memcpy(&hdr, at, sizeof hdr);
    if (!hr_shm_region_find(dom, hdr.key, HR_ACCESS_REMOTE_WRITE, hdr.addr, len)) return 1;
    if (len) hr_copy((void *)(uintptr_t)hdr.addr, payload, len, HR_STORE_CACHED);
    if (hdr.notify) dom->base.sink->notify(&e->base, hdr.value, hdr.total);
    return 1;
}

static int on_atomic(struct shm_ep *e, const uint8_t *at) {
    struct atomic_hdr hdr;
    uint64_t before = 0;
    memcpy(&hdr, at, sizeof hdr);
    int allowed = hdr.addr % sizeof before == 0 && hdr.what <= HR_ATOMIC_CMP_SWAP &&
                  hr_shm_region_find(shm_ep_domain(e), hdr.key, HR_ACCESS_REMOTE_ATOMIC, hdr.addr, sizeof before);
    if (allowed) {
        uint64_t *word = (uint64_t *)(uintptr_t)hdr.addr;
        if (hdr.what == HR_ATOMIC_FETCH_ADD) {
            before = __atomic_fetch_add(word, hdr.operand, __ATOMIC_SEQ_CST);
        } else {
            before = hdr.compare;
            __atomic_compare_exchange_n(word, &before, hdr.operand, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        }
    }
    return answer(e, hdr.op, allowed ? HR_OK : HR_ERR_ACCESS, before);
}

static int on_reply(struct shm_ep *e, const uint8_t *at) {
    struct reply_hdr hdr;
    memcpy(&hdr, at, sizeof hdr);
    if (hdr.op >= SHM_OPS || !e->ops[hdr.op].busy || hdr.status > 0 || hr_is_peer_error(hdr.status)) return 0;
    struct shm_op op = e->ops[hdr.op];
    e->ops[hdr.op].busy = 0;
    if (op.forgotten) return 1;
    if (op.result && hdr.status == HR_OK) *op.result = hdr.value;
    shm_ep_domain(e)->base.sink->done(&e->base, op.cookie, hdr.status);
    return 1;
}

int hr_shm_on_remote(struct shm_ep *e, unsigned kind, const uint8_t *hdr, size_t hdr_len, const uint8_t *payload,
                     size_t len) {
    switch (kind) {
    case RING_WRITE: return hdr_len == sizeof(struct write_hdr) && on_write(e, hdr, payload, len);
    case RING_ATOMIC: return hdr_len == sizeof(struct atomic_hdr) && len == 0 && on_atomic(e, hdr);
    case RING_REPLY: return hdr_len == sizeof(struct reply_hdr) && len == 0 && on_reply(e, hdr);
    default: return 0;
    }
}
