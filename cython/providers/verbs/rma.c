/* rma.c - reads, writes and atomics: straight from and to registered memory, through buffers otherwise. */

/*
 * Registered memory is one work request, however long. Other memory goes in pieces through the endpoint's buffers, and
 * what found no buffer waits in the endpoint's queue; meanwhile nothing else is posted, so the order of posting holds.
 * A write from other memory is done when its last piece was copied, a read into it when its last piece has been.
 *
 * A notification is the immediate data of the write where that is one work request and the upper half of the value is
 * that of the notice before it, which is 0 at first: both ends keep it. Then it costs no message of its own; otherwise
 * a message follows, with the whole value. Values of one use have one upper half, so that is said once.
 */

#include <arpa/inet.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "hr/memory.h"
#include "providers/verbs/verbs.h"

#define CANCEL_WAIT (500 * HR_VERBS_MS)
enum { COPIED = 1024 }; /* up to here a copy is cheaper than finding the key and waiting for the end */

static hr_status in_bounds(const struct hr_rmem *remote, uint64_t offset, uint64_t len, uint32_t access) {
    if (offset > remote->len || len > remote->len - offset) return HR_ERR_ACCESS;
    return ((uintptr_t)remote->priv & access) == access ? HR_OK : HR_ERR_ACCESS;
}

static uint32_t serial_of(const struct hr_rmem *remote) { return (uint32_t)(remote->rkey >> 32); }

static struct hr_verbs_op *op_new(struct hr_verbs_ep *ep) {
    for (int i = 0; i < HR_VERBS_OPS; i++) {
        struct hr_verbs_op *op = &ep->ops[i];
        if (op->in_use) continue;
        memset(op, 0, sizeof *op);
        hr_list_init(&op->link);
        op->in_use = 1;
        return op;
    }
    return NULL;
}

void hr_verbs_op_free(struct hr_verbs_ep *ep, struct hr_verbs_op *op) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    if (op->held && d->ctx && !--op->held->users && !hr_arena_alive(op->held->memory))
        d->forgotten--; /* so that it is dropped now; without a device it is */
    hr_list_remove(&op->link);
    free(op->copy);
    op->copy = NULL;
    op->in_use = 0;
}

static int op_over(const struct hr_verbs_op *op) { return op->posted_all && !op->open; }

int hr_verbs_op_done(struct hr_verbs_ep *ep, struct hr_verbs_op *op) {
    void *cookie = op->cookie;
    if (!op->in_use || !op_over(op)) return 0;
    int silent = op->copy != NULL;
    hr_verbs_op_free(ep, op);
    if (silent) return 0;
    ep->base.domain->sink->done(&ep->base, cookie, HR_OK);
    return 1;
}

void hr_verbs_ops_drop(struct hr_verbs_ep *ep) {
    for (int i = 0; i < HR_VERBS_OPS; i++)
        if (ep->ops[i].in_use) hr_verbs_op_free(ep, &ep->ops[i]);
}

/* ---- posting ---- */

/* A peer that is to hear of hunger gets a message. */
static int with_imm(const struct hr_verbs_ep *ep, const struct hr_verbs_op *op) {
    return op->notify && op->value >> 32 == ep->upper_out && op->len && !(ep->hungry && ep->room);
}

/* The whole of it in one work request, or as much as one may have. Returns 0 where there is no room. */
static int post_direct(struct hr_verbs_ep *ep, struct hr_verbs_op *op) {
    uint64_t len = op->len - op->posted;
    if (ep->longest && len > ep->longest) len = ep->longest;
    struct ibv_sge sge = {.addr = (uintptr_t)op->local + op->posted, .length = (uint32_t)len, .lkey = op->lkey};
    struct ibv_send_wr wr = {
        .sg_list = &sge, .num_sge = 1, .opcode = op->is_read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE};
    struct hr_verbs_wqe wqe = {.work = HR_VERBS_W_RMA, .op = op, .bytes = (uint32_t)len};
    int imm = with_imm(ep, op) && op->posted + len == op->len;
    ep->hungry |= imm && !ep->room;
    if (!hr_verbs_sends_left(ep) || (imm && !ep->room)) return 0;
    if (imm) {
        wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        wr.imm_data = htonl((uint32_t)op->value);
    }
    wr.wr.rdma.remote_addr = op->addr + op->posted;
    wr.wr.rdma.rkey = op->rkey;
    op->open++;
    if (hr_verbs_post(ep, &wr, &wqe, 1) < 1) {
        op->open--;
        return 0;
    }
    if (imm) ep->room--, op->notify = 0;
    op->posted += len;
    hr_verbs_domain_of(&ep->base)->counts.direct += len;
    return 1;
}

/* As many pieces as there are buffers for, with one ring of the door bell; a short write goes inline and needs none.
 * Returns how many were posted. */
static int post_pieces(struct hr_verbs_ep *ep, struct hr_verbs_op *op) {
    struct ibv_send_wr wrs[HR_VERBS_BATCH];
    struct ibv_sge sges[HR_VERBS_BATCH];
    struct hr_verbs_wqe wqes[HR_VERBS_BATCH];
    uint64_t at = op->posted, lens[HR_VERBS_BATCH];
    uint32_t most = hr_verbs_slots_left(ep), sends = hr_verbs_sends_left(ep);
    int n = 0, small = !op->is_read && op->len <= ep->inline_max;
    int imm = with_imm(ep, op) && op->len <= HR_VERBS_STRIDE, taken;
    int counted = op->is_read || ep->bond; /* a bond must know that it landed, not that it was copied */
    if (most > sends) most = sends;
    if (most > HR_VERBS_BATCH) most = HR_VERBS_BATCH;
    ep->hungry |= imm && !ep->room;
    if (imm && !ep->room) return 0;
    for (; n < (int)most && at < op->len; n++) {
        uint8_t *slot = hr_verbs_slot(ep, ep->slot_tail + (uint32_t)n);
        uint64_t len = op->len - at < HR_VERBS_STRIDE ? op->len - at : HR_VERBS_STRIDE;
        if (small) slot = op->local + at;
        if (!op->is_read && !small) memcpy(slot, op->local + at, len);
        sges[n] = (struct ibv_sge){.addr = (uintptr_t)slot, .length = (uint32_t)len, .lkey = ep->slab_mr->lkey};
        wrs[n] = (struct ibv_send_wr){.sg_list = &sges[n], .num_sge = 1, .send_flags = small ? IBV_SEND_INLINE : 0};
        wrs[n].opcode = op->is_read ? IBV_WR_RDMA_READ : imm ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
        if (imm) wrs[n].imm_data = htonl((uint32_t)op->value);
        wrs[n].wr.rdma.remote_addr = op->addr + at;
        wrs[n].wr.rdma.rkey = op->rkey;
        wqes[n] = (struct hr_verbs_wqe){.work = HR_VERBS_W_COPY, .slots = !small, .bytes = (uint32_t)len};
        if (counted) {
            wqes[n].work = HR_VERBS_W_RMA;
            wqes[n].op = op;
        }
        if (op->is_read) {
            wqes[n].to = op->local + at;
            wqes[n].from = slot;
        }
        lens[n] = len;
        at += len;
    }
    if (!n) return 0;
    taken = hr_verbs_post(ep, wrs, wqes, n);
    for (int i = 0; i < taken; i++) op->posted += lens[i];
    if (counted) op->open += (uint64_t)taken;
    if (imm && taken) ep->room--, op->notify = 0;
    return taken;
}

/* Posts what can be posted now. */
static void advance(struct hr_verbs_ep *ep, struct hr_verbs_op *op) {
    while (op->posted < op->len && ep->state == HR_VERBS_UP) {
        uint64_t before = op->posted;
        int more = op->lkey ? post_direct(ep, op) : post_pieces(ep, op);
        if (!op->lkey) hr_verbs_domain_of(&ep->base)->counts.staged += op->posted - before;
        if (!more) return;
    }
    if (ep->state != HR_VERBS_UP) return;
    if (op->notify && !hr_verbs_send_notice(ep, op->value, op->len)) return;
    op->notify = 0;
    op->posted_all = 1;
    hr_list_remove(&op->link);
}

int hr_verbs_pump(struct hr_verbs_ep *ep, int budget) {
    int n = 0;
    while (n < budget && !hr_list_empty(&ep->queue) && ep->state == HR_VERBS_UP) {
        struct hr_verbs_op *op = hr_container(ep->queue.next, struct hr_verbs_op, link);
        advance(ep, op);
        if (!op->posted_all) break;
        n += hr_verbs_op_done(ep, op);
        hr_verbs_room_again(ep);
    }
    return n;
}

static hr_status rma(struct hr_verbs_ep *ep, const struct hr_rma *rma, int is_read) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    hr_status status =
        in_bounds(rma->remote, rma->offset, rma->len, is_read ? HR_ACCESS_REMOTE_READ : HR_ACCESS_REMOTE_WRITE);
    if (status == HR_OK) status = hr_verbs_usable(ep);
    if (status != HR_OK) return status;
    if (rma->len > d->paths.max_message) return HR_ERR_INVALID;
    /* Who took the memory back has said why, or is about to: a write is passed over, as if it had come too late. */
    if (hr_verbs_is_revoked(ep, serial_of(rma->remote))) return is_read ? HR_ERR_ACCESS : HR_OK;
    if (!hr_list_empty(&ep->queue)) return hr_verbs_refuse(ep);
    struct hr_verbs_op *op = op_new(ep);
    if (!op) return hr_verbs_refuse(ep);
    op->is_read = is_read;
    op->notify = !is_read && rma->with_notify;
    op->local = rma->local;
    op->len = rma->len;
    op->lkey = rma->len > COPIED || (is_read && rma->mem)
                   ? hr_verbs_local_key(d, rma->local, rma->len, rma->mem, &op->held)
                   : 0;
    op->addr = rma->remote->addr + rma->offset;
    op->rkey = (uint32_t)rma->remote->rkey;
    op->serial = serial_of(rma->remote);
    op->value = rma->value;
    op->cookie = rma->cookie;
    hr_list_push(&ep->queue, &op->link);
    advance(ep, op);
    if (op_over(op)) {
        hr_verbs_op_free(ep, op);
        return HR_OK;
    }
    /* Nothing has left, and whether it is a matter of room or of the endpoint, it is for the engine to come again. */
    if (!op->posted && !op->posted_all) {
        hr_verbs_op_free(ep, op);
        return hr_verbs_refuse(ep);
    }
    return HR_INPROGRESS;
}

hr_status hr_verbs_post_write(struct hr_ep *ep, const struct hr_rma *args) {
    return rma((struct hr_verbs_ep *)ep, args, 0);
}

hr_status hr_verbs_post_read(struct hr_ep *ep, const struct hr_rma *args) {
    return rma((struct hr_verbs_ep *)ep, args, 1);
}

hr_status hr_verbs_post_atomic(struct hr_ep *base, const struct hr_atomic *atomic) {
    struct hr_verbs_ep *ep = (struct hr_verbs_ep *)base;
    struct hr_verbs_domain *d = hr_verbs_domain_of(base);
    hr_status status = in_bounds(atomic->remote, atomic->offset, 8, HR_ACCESS_REMOTE_ATOMIC);
    if (!(d->base.caps.flags & HR_CAP_ATOMIC)) return HR_ERR_UNSUPPORTED;
    if (status == HR_OK && hr_verbs_is_revoked(ep, serial_of(atomic->remote))) status = HR_ERR_ACCESS;
    if (status == HR_OK && (atomic->remote->addr + atomic->offset) % 8) status = HR_ERR_INVALID;
    if (status == HR_OK) status = hr_verbs_usable(ep);
    if (status != HR_OK) return status;
    if (!hr_list_empty(&ep->queue) || !hr_verbs_sends_left(ep) || !hr_verbs_slots_left(ep)) return hr_verbs_refuse(ep);
    uint8_t *slot = hr_verbs_slot(ep, ep->slot_tail);
    struct ibv_sge sge = {.addr = (uintptr_t)slot, .length = 8, .lkey = ep->slab_mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1};
    struct hr_verbs_wqe wqe = {.work = HR_VERBS_W_ATOMIC, .slots = 1, .bytes = 8, .cookie = atomic->cookie};
    wqe.to = atomic->result;
    wqe.from = slot;
    wr.opcode = atomic->op == HR_ATOMIC_FETCH_ADD ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP;
    wr.wr.atomic.remote_addr = atomic->remote->addr + atomic->offset;
    wr.wr.atomic.rkey = (uint32_t)atomic->remote->rkey;
    wr.wr.atomic.compare_add = atomic->op == HR_ATOMIC_FETCH_ADD ? atomic->operand : atomic->compare;
    wr.wr.atomic.swap = atomic->operand;
    return hr_verbs_post(ep, &wr, &wqe, 1) == 1 ? HR_INPROGRESS : hr_verbs_refuse(ep);
}

/* The rest of a write leaves from a copy, because part of it is at the peer and its notification is owed. */
static hr_status go_on_from_copy(struct hr_verbs_op *op) {
    uint64_t left = op->len - op->posted;
    op->copy = malloc(left + 1);
    if (!op->copy) return HR_ERR_UNSUPPORTED;
    memcpy(op->copy, op->local + op->posted, left);
    op->local = (uint8_t *)op->copy - op->posted;
    return HR_OK;
}

/* Whether the end of this work request, or of the queue pair, is among the completions at hand. */
static int end_is_here(struct hr_verbs_domain *d, const struct hr_verbs_ep *ep, uint32_t at) {
    for (int i = d->stash_at; i < d->stashed; i++) {
        const struct ibv_wc *wc = &d->stash[i];
        if (hr_verbs_ep_find(d, wc) != ep) continue;
        if (wc->status != IBV_WC_SUCCESS) return 1;
        if (!hr_verbs_is_recv(wc) && (((uint32_t)wc->wr_id - at) & 0x7fffffff) < HR_VERBS_SENDS) return 1;
    }
    return 0;
}

/* What the device has cannot be taken back from it, but ends soon: at most what the engine keeps in flight at a time;
 * if the peer is dead, when the queue pair is broken. What else ends meanwhile is kept for progress. */
static int wait_for_device(struct hr_verbs_ep *ep, const struct hr_verbs_op *op) {
    struct hr_verbs_domain *d = hr_verbs_domain_of(&ep->base);
    int64_t limit = hr_now() + CANCEL_WAIT;
    uint32_t last = ep->head;
    if (!op->open) return 1;
    for (uint32_t at = ep->head; at != ep->tail; at++)
        if (ep->wqes[at % HR_VERBS_ENTRIES].op == op) last = at;
    for (int over = 0; !end_is_here(d, ep, last); sched_yield()) {
        if (over || hr_now() > limit) return 0;
        over = hr_verbs_hung_up(ep);
        if (hr_verbs_fetch(d) < 0) return 0;
    }
    return 1;
}

hr_status hr_verbs_move(struct hr_verbs_ep *ep, void *cookie, void *copy) {
    for (int i = 0; i < HR_VERBS_OPS; i++) {
        struct hr_verbs_op *op = &ep->ops[i];
        if (!op->in_use || op->cookie != cookie) continue;
        if (op->lkey && ep->state != HR_VERBS_LOST && !wait_for_device(ep, op)) return HR_ERR_UNSUPPORTED;
        op->local = copy;
        op->lkey = 0; /* of what is not posted yet */
        return HR_OK;
    }
    return HR_OK; /* it has ended: that is about to be told */
}

hr_status hr_verbs_cancel(struct hr_ep *base, void *cookie) {
    struct hr_verbs_ep *ep = (struct hr_verbs_ep *)base;
    if (ep->state != HR_VERBS_UP) return HR_ERR_UNSUPPORTED;
    for (int i = 0; i < HR_VERBS_OPS; i++) {
        struct hr_verbs_op *op = &ep->ops[i];
        if (!op->in_use || op->copy || op->cookie != cookie) continue;
        if (!op->is_read && !op->lkey) return go_on_from_copy(op);
        if (op->lkey && !wait_for_device(ep, op)) return HR_ERR_UNSUPPORTED;
        for (uint32_t at = ep->head; at != ep->tail; at++) {
            struct hr_verbs_wqe *wqe = &ep->wqes[at % HR_VERBS_ENTRIES];
            if (wqe->op == op) wqe->op = NULL, wqe->to = NULL;
        }
        if (op->notify) /* it is owed, and has only been held up */
            return op->copy = malloc(1), op->copy ? HR_OK : HR_ERR_UNSUPPORTED;
        hr_verbs_op_free(ep, op);
        return HR_OK;
    }
    return HR_ERR_UNSUPPORTED;
}
