/* remote.c - writes and atomics: they travel through the ring and the target applies them. */

/*
 * Peers could map each other's memory writable and store into it, at one copy less. They do not: a mapping cannot be
 * taken away, and after ep_abort no byte here may be changed by the peer, a stopped one that wakes up later included.
 * Applied by the target, a write fits registered memory of any kind, stops with the registration or the endpoint, and
 * an atomic is atomic with those that arrive by other providers. Bulk between engines on one host does not come this
 * way, it is pulled.
 *
 * The last piece of a write, and every atomic, is answered. The answer needs room in the other ring: SHM_RESERVE is
 * kept for it, and no more than SHM_OPS may be unanswered, so that it always has some and two full rings cannot wait
 * for each other.
 */

#include <stdlib.h>

#include "providers/shm/shm.h"

struct write_hdr {
    uint64_t key, addr;
    uint32_t op; /* NO_ANSWER: more pieces follow */
    uint32_t with_notify;
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
#define NO_ANSWER UINT32_MAX

static void send_record(struct shm_ep *e, enum ring_kind kind, const void *hdr, size_t hdr_len, const void *payload,
                        size_t len) {
    uint8_t *at = ring_tx_at(&e->tx);
    memcpy(at, hdr, hdr_len);
    if (len) memcpy(at + hdr_len, payload, len);
    if (ring_tx_publish(&e->tx, ring_word(kind, hdr_len, len), ring_record(hdr_len, len))) hr_shm_wake(e);
}

static hr_status reserve(struct shm_ep *e, uint64_t n) {
    hr_status status = ring_tx_fits(&e->tx, n + SHM_RESERVE) ? HR_OK : hr_shm_room(e, n + SHM_RESERVE);
    e->blocked = status == HR_AGAIN ? n + SHM_RESERVE : 0;
    return status;
}

/* Checks that hold for both, and takes a place for the answer. */
static hr_status begin(struct shm_ep *e, const struct hr_rmem *remote, uint64_t offset, uint64_t len, uint32_t access,
                       uint32_t *op_p) {
    hr_status status;
    if (e->state != SHM_UP || e->lost)
        return e->lost ? e->lost : e->state == SHM_LOST || e->state == SHM_ABORTED ? HR_ERR_PEER_LOST : HR_ERR_INVALID;
    if (!(shm_key_access(remote->rkey) & access) || offset > remote->len || len > remote->len - offset)
        return HR_ERR_ACCESS;
    if (e->pushing && (status = hr_shm_push(e)) != HR_OK) return status;
    for (uint32_t i = 0; i < SHM_OPS; i++) {
        if (e->ops[i].busy) continue;
        *op_p = i;
        return HR_OK;
    }
    return HR_AGAIN;
}

hr_status hr_shm_push(struct shm_ep *e) {
    struct shm_push *p = &e->push;
    int last;
    do {
        size_t n = p->left < SHM_WRITE_PIECE ? p->left : SHM_WRITE_PIECE;
        struct write_hdr hdr = {.key = p->key, .addr = p->addr, .op = NO_ANSWER};
        hr_status status = reserve(e, ring_record(sizeof hdr, n));
        if (status != HR_OK) return status;
        last = n == p->left;
        if (last) {
            hdr.op = p->op;
            hdr.with_notify = (uint32_t)p->with_notify;
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
    e->pushing = 0;
    e->special = e->lost != HR_OK;
    return HR_OK;
}

hr_status hr_shm_post_write(struct hr_ep *ep, const struct hr_rma *rma) {
    struct shm_ep *e = shm_ep(ep);
    uint32_t op = 0;
    hr_status status = begin(e, rma->remote, rma->offset, rma->len, HR_ACCESS_REMOTE_WRITE, &op);
    if (status != HR_OK) return status;
    e->push = (struct shm_push){
        .local = rma->local,
        .key = rma->remote->rkey,
        .addr = rma->remote->addr + rma->offset,
        .left = rma->len,
        .total = rma->len,
        .value = rma->value,
        .op = op,
        .with_notify = rma->with_notify,
    };
    status = hr_shm_push(e);
    if (hr_is_error(status) || (status == HR_AGAIN && e->push.left == rma->len)) return status; /* nothing was taken */
    if (status == HR_AGAIN) e->pushing = e->special = 1;
    e->ops[op] = (struct shm_op){.cookie = rma->cookie, .busy = 1};
    return HR_INPROGRESS;
}

hr_status hr_shm_post_atomic(struct hr_ep *ep, const struct hr_atomic *atomic) {
    struct shm_ep *e = shm_ep(ep);
    struct atomic_hdr hdr = {.what = atomic->op, .operand = atomic->operand, .compare = atomic->compare};
    hr_status status;
    if (atomic->op != HR_ATOMIC_FETCH_ADD && atomic->op != HR_ATOMIC_CMP_SWAP) return HR_ERR_INVALID;
    if ((atomic->remote->addr + atomic->offset) % sizeof(uint64_t)) return HR_ERR_INVALID;
    status = begin(e, atomic->remote, atomic->offset, sizeof(uint64_t), HR_ACCESS_REMOTE_ATOMIC, &hdr.op);
    if (status == HR_OK) status = reserve(e, ring_record(sizeof hdr, 0));
    if (status != HR_OK) return status;
    hdr.key = atomic->remote->rkey;
    hdr.addr = atomic->remote->addr + atomic->offset;
    send_record(e, RING_ATOMIC, &hdr, sizeof hdr, NULL, 0);
    e->ops[hdr.op] = (struct shm_op){.cookie = atomic->cookie, .result = atomic->result, .busy = 1};
    return HR_INPROGRESS;
}

hr_status hr_shm_cancel(struct hr_ep *ep, void *cookie) {
    struct shm_ep *e = shm_ep(ep);
    for (uint32_t i = 0; i < SHM_OPS; i++) {
        struct shm_op *op = &e->ops[i];
        if (!op->busy || op->forgotten || op->cookie != cookie) continue;
        if (e->pushing && e->push.op == i && e->push.left) {
            uint8_t *copy = malloc(e->push.left);
            if (!copy) return HR_ERR_UNSUPPORTED;
            memcpy(copy, e->push.local, e->push.left);
            e->push.local = e->push.copy = copy;
        }
        op->forgotten = 1;
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
    struct shm_region *region = hr_shm_region_find(dom, hdr.key, HR_ACCESS_REMOTE_WRITE, hdr.addr, len);
    if (region && len) memcpy((void *)(uintptr_t)hdr.addr, payload, len);
    if (hdr.op == NO_ANSWER) return 1;
    if (!answer(e, hdr.op, region ? HR_OK : HR_ERR_ACCESS, 0)) return 0;
    if (region && hdr.with_notify) dom->base.sink->notify(&e->base, hdr.value, hdr.total);
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
    if (e->pushing && e->push.op == hdr.op) return 0; /* not all of it was sent */
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
