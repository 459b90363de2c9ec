/* bond_rma.c - reads, writes and atomics of a bonded endpoint: cut into stripes, posted, and posted again. */

/*
 * A write must be there before what is posted after it. On the lane of messages it is, by the order of the queue pair;
 * what is on another lane has to end first. So messages and atomics are refused, and notices wait, while some of an
 * earlier write is neither on that lane nor ended.
 *
 * A stripe ends when its bytes have landed, which is told by its lane, also where they went through buffers; until then
 * the memory is held, as they may have to leave again by another lane. Where the peer has heard a message that was
 * posted after a write, the write has landed, though its lane died before it told: it is not written again, as the
 * memory is the peer's again. Whether an atomic was executed on a lane that was lost cannot be known: it fails. Nor
 * could be known what was seen of a write before it, so an atomic waits until writes have ended.
 */

#include <stdlib.h>
#include <string.h>

#include "providers/verbs/bond.h"

void hr_bond_ops_init(struct hr_bond_ep *ep) {
    hr_list_init(&ep->ops);
    hr_list_init(&ep->spare);
    for (int i = 0; i < HR_BOND_OPS; i++) hr_list_push(&ep->spare, &ep->ops_room[i].link);
}

static void op_free(struct hr_bond_ep *ep, struct hr_bond_op *op) {
    free(op->copy);
    op->copy = NULL;
    hr_list_remove(&op->link);
    hr_list_push(&ep->spare, &op->link);
}

void hr_bond_ops_drop(struct hr_bond_ep *ep) {
    while (!hr_list_empty(&ep->ops)) op_free(ep, hr_container(ep->ops.next, struct hr_bond_op, link));
}

static int all_ended(const struct hr_bond_op *op) {
    for (int i = 0; i < op->n; i++)
        if (op->stripes[i].part != HR_BOND_ENDED) return 0;
    return 1;
}

/* Tells its end if that has come. */
static int finish(struct hr_bond_ep *ep, struct hr_bond_op *op) {
    void *cookie = op->cookie;
    hr_status status = op->status;
    if (!all_ended(op) || op->notify) return 0;
    int silent = op->copy != NULL;
    op_free(ep, op);
    hr_bond_room_again(ep); /* it may be that nothing else tells of the room */
    if (silent) return 0;
    ep->base.domain->sink->done(&ep->base, cookie, status);
    return 1;
}

static struct hr_bond_op *op_after(const struct hr_bond_ep *ep, const struct hr_link *link) {
    return link->next == &ep->ops ? NULL : hr_container(link->next, struct hr_bond_op, link);
}
#define EACH_OP(ep, op) for (struct hr_bond_op *op = op_after(ep, &(ep)->ops); op; op = op_after(ep, &op->link))

/* ---- order ---- */

static int written(const struct hr_bond_ep *ep, const struct hr_bond_op *op) {
    for (int i = 0; i < op->n && op->work == HR_BOND_WRITE; i++) {
        const struct hr_bond_stripe *s = &op->stripes[i];
        if (s->part != HR_BOND_ENDED && !(s->part == HR_BOND_POSTED && s->lane == ep->first)) return 0;
    }
    return 1;
}

int hr_bond_written(const struct hr_bond_ep *ep) {
    EACH_OP(ep, op) if (!written(ep, op)) return 0;
    return 1;
}

static int no_writes(const struct hr_bond_ep *ep) {
    EACH_OP(ep, op) if (op->work == HR_BOND_WRITE && !all_ended(op)) return 0;
    return 1;
}

/* The message that has just left tells of operations up to this one; NULL: of all. */
static void told(struct hr_bond_ep *ep, const struct hr_bond_op *last) {
    EACH_OP(ep, op) {
        if (!op->told) op->told = ep->logged;
        if (op == last) break;
    }
}

void hr_bond_told(struct hr_bond_ep *ep) { told(ep, NULL); }

int hr_bond_in_order(struct hr_bond_ep *ep) {
    EACH_OP(ep, op) {
        if (!written(ep, op)) return 0;
        if (!op->notify) continue;
        if (op->status == HR_OK) {
            if (!hr_bond_send_notice(ep, op->value, op->len)) return 0;
            told(ep, op);
        }
        op->notify = 0;
        if (all_ended(op)) hr_bond_pending(ep); /* its end is told from progress */
    }
    return 1;
}

/* ---- posting ---- */

static int is_revoked(const struct hr_bond_ep *ep, const struct hr_rmem *remote) {
    uint32_t n = ep->nrevoked < HR_VERBS_REVOCATIONS ? ep->nrevoked : HR_VERBS_REVOCATIONS;
    for (uint32_t i = 0; i < n; i++)
        if (ep->revoked[i] == (uint32_t)(remote->rkey >> 32)) return 1;
    return 0;
}

/* A lane that is not up any more leaves it to that of messages. Memory that was taken back is passed over. */
static void post(struct hr_bond_ep *ep, struct hr_bond_stripe *s) {
    struct hr_bond_op *op = s->op;
    if (op->work == HR_BOND_WRITE && is_revoked(ep, &op->remote)) {
        s->part = HR_BOND_ENDED;
        return;
    }
    if (!hr_bond_lane_up(ep, s->lane)) s->lane = ep->first;
    if (!hr_bond_lane_up(ep, s->lane)) return;
    struct hr_bond_lane *lane = &ep->lanes[s->lane];
    struct hr_rmem remote = hr_bond_rmem(&op->remote, s->lane);
    const struct hr_mem *mem = op->reg && !op->copy ? &op->reg->mems[s->lane] : NULL;
    struct hr_rma rma = {.local = op->local + s->offset,
                         .len = s->len,
                         .mem = mem,
                         .remote = &remote,
                         .offset = op->offset + s->offset,
                         .cookie = s};
    hr_status status = op->work == HR_BOND_READ ? hr_verbs_post_read(&lane->ep->base, &rma)
                                                : hr_verbs_post_write(&lane->ep->base, &rma);
    if (status == HR_AGAIN || hr_is_peer_error(status)) return; /* its end is about to be told */
    if (status == HR_INPROGRESS) {
        s->part = HR_BOND_POSTED;
        hr_bond_lane_busy(lane, s->len);
        return;
    }
    if (status != HR_OK) op->status = status;
    s->part = HR_BOND_ENDED;
}

/* Whether something has been done about it, or is to be done about the rest. */
static int begun(const struct hr_bond_op *op) {
    for (int i = 0; i < op->n; i++)
        if (op->stripes[i].part != HR_BOND_WAITS) return 1;
    return 0;
}

static hr_status in_bounds(const struct hr_rmem *remote, uint64_t offset, uint64_t len, uint32_t access) {
    if (offset > remote->len || len > remote->len - offset) return HR_ERR_ACCESS;
    return (hr_bond_access(remote) & access) == access ? HR_OK : HR_ERR_ACCESS;
}

static hr_status refuse(struct hr_bond_ep *ep) {
    ep->refused = 1;
    return HR_AGAIN;
}

/* Where nothing can be posted now, or messages wait to be sent again and new work would keep them waiting. */
static int held_up(const struct hr_bond_ep *ep) {
    return !hr_bond_lane_up(ep, ep->first) || ep->sent != ep->logged || hr_list_empty(&ep->spare) ||
           hr_bond_leaving(ep);
}

static struct hr_bond_op *op_new(struct hr_bond_ep *ep, enum hr_bond_work work, const struct hr_rmem *remote,
                                 uint64_t offset, void *cookie) {
    struct hr_bond_op *op = hr_container(hr_list_pop(&ep->spare), struct hr_bond_op, link);
    *op = (struct hr_bond_op){.work = work, .remote = *remote, .offset = offset, .cookie = cookie};
    hr_list_init(&op->link);
    hr_list_push(&ep->ops, &op->link);
    return op;
}

static hr_status rma(struct hr_bond_ep *ep, const struct hr_rma *rma, int is_read) {
    hr_status status =
        in_bounds(rma->remote, rma->offset, rma->len, is_read ? HR_ACCESS_REMOTE_READ : HR_ACCESS_REMOTE_WRITE);
    if (status == HR_OK) status = hr_bond_usable(ep);
    if (status != HR_OK) return status;
    if (is_revoked(ep, rma->remote)) return is_read ? HR_ERR_ACCESS : HR_OK; /* as if it had come too late */
    if (held_up(ep)) return refuse(ep);
    struct hr_bond_op *op = op_new(ep, is_read ? HR_BOND_READ : HR_BOND_WRITE, rma->remote, rma->offset, rma->cookie);
    op->notify = !is_read && rma->with_notify;
    op->value = rma->value;
    op->local = rma->local;
    op->len = rma->len;
    op->reg = rma->mem ? rma->mem->priv : NULL;
    hr_bond_cut(ep, op);
    for (int i = 0; i < op->n; i++) post(ep, &op->stripes[i]);
    status = op->status;
    if (!begun(op) || (status != HR_OK && all_ended(op))) {
        op_free(ep, op);
        return status != HR_OK ? status : refuse(ep);
    }
    hr_bond_in_order(ep);
    if (all_ended(op) && !op->notify) {
        op_free(ep, op);
        return HR_OK;
    }
    if (op->notify || !hr_bond_ops_idle(ep)) hr_bond_pending(ep);
    return HR_INPROGRESS;
}

hr_status hr_bond_post_write(struct hr_ep *base, const struct hr_rma *args) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    struct hr_rma one = *args;
    if (!ep->plain) return rma(ep, args, 0);
    if (args->mem) one.mem = &((const struct hr_bond_reg *)args->mem->priv)->mems[ep->first];
    return hr_verbs_post_write(&ep->lanes[ep->first].ep->base, &one);
}

hr_status hr_bond_post_read(struct hr_ep *base, const struct hr_rma *args) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    struct hr_rma one = *args;
    if (!ep->plain) return rma(ep, args, 1);
    if (args->mem) one.mem = &((const struct hr_bond_reg *)args->mem->priv)->mems[ep->first];
    return hr_verbs_post_read(&ep->lanes[ep->first].ep->base, &one);
}

hr_status hr_bond_post_atomic(struct hr_ep *base, const struct hr_atomic *args) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    struct hr_atomic one = *args;
    one.mem = NULL;
    if (ep->plain) return hr_verbs_post_atomic(&ep->lanes[ep->first].ep->base, &one);
    hr_status status = in_bounds(args->remote, args->offset, 8, HR_ACCESS_REMOTE_ATOMIC);
    if (status == HR_OK) status = hr_bond_usable(ep);
    if (status == HR_OK && is_revoked(ep, args->remote)) status = HR_ERR_ACCESS;
    if (status != HR_OK) return status;
    if (held_up(ep) || !hr_bond_in_order(ep) || !no_writes(ep)) return refuse(ep);
    struct hr_rmem remote = hr_bond_rmem(args->remote, ep->first);
    struct hr_bond_op *op = op_new(ep, HR_BOND_ATOMIC, args->remote, args->offset, args->cookie);
    op->len = 8;
    hr_bond_cut(ep, op);
    one.remote = &remote;
    one.cookie = &op->stripes[0];
    status = hr_verbs_post_atomic(&ep->lanes[ep->first].ep->base, &one);
    if (status == HR_INPROGRESS) {
        op->stripes[0].part = HR_BOND_POSTED;
        hr_bond_lane_busy(&ep->lanes[ep->first], op->len);
        return status;
    }
    op_free(ep, op);
    return status == HR_AGAIN || hr_is_peer_error(status) ? refuse(ep) : status;
}

/* ---- ends ---- */

void hr_bond_on_done(struct hr_bond_lane *lane, struct hr_bond_stripe *stripe, hr_status status) {
    struct hr_bond_ep *ep = lane->bond;
    struct hr_bond_op *op = stripe->op;
    hr_bond_lane_moved(lane, stripe->len);
    hr_bond_leave_goes_on(lane);
    stripe->part = HR_BOND_ENDED;
    if (status != HR_OK) op->status = status;
    hr_bond_room_again(ep);
    finish(ep, op);
    if (!hr_bond_ops_idle(ep)) hr_bond_pending(ep);
}

void hr_bond_ops_stick(struct hr_bond_ep *ep, int lane) {
    EACH_OP(ep, op) for (int i = 0; i < op->n; i++) {
        struct hr_bond_stripe *s = &op->stripes[i];
        if (s->part == HR_BOND_POSTED && s->lane == lane) s->part = HR_BOND_STUCK;
    }
}

void hr_bond_ops_free(struct hr_bond_ep *ep, int lane) {
    EACH_OP(ep, op) for (int i = 0; i < op->n; i++) {
        struct hr_bond_stripe *s = &op->stripes[i];
        int landed = op->work == HR_BOND_WRITE && op->told && ep->landed >= op->told;
        if (s->part != HR_BOND_STUCK || s->lane != lane) continue;
        s->part = landed || op->work == HR_BOND_ATOMIC ? HR_BOND_ENDED : HR_BOND_WAITS;
        if (op->work == HR_BOND_ATOMIC) op->status = HR_ERR_IO;
        hr_bond_of(&ep->base)->counts.redone += s->part == HR_BOND_WAITS;
    }
}

static struct hr_bond_op *first_ended(const struct hr_bond_ep *ep) {
    EACH_OP(ep, op) if (all_ended(op) && !op->notify) return op;
    return NULL;
}

int hr_bond_ops_run(struct hr_bond_ep *ep, int budget) {
    int n = 0;
    EACH_OP(ep, op) {
        for (int i = 0; i < op->n; i++)
            if (op->stripes[i].part == HR_BOND_WAITS) post(ep, &op->stripes[i]);
    }
    hr_bond_in_order(ep);
    while (n < budget) { /* whom it is told may take back others */
        struct hr_bond_op *op = first_ended(ep);
        if (!op) break;
        n += finish(ep, op);
    }
    return n;
}

int hr_bond_ops_idle(const struct hr_bond_ep *ep) {
    EACH_OP(ep, op) {
        if (op->notify || all_ended(op)) return 0;
        for (int i = 0; i < op->n; i++)
            if (op->stripes[i].part == HR_BOND_WAITS) return 0;
    }
    return 1;
}

uint64_t hr_bond_ops_waiting(const struct hr_bond_ep *ep) {
    uint64_t n = 0;
    EACH_OP(ep, op) {
        n += (uint64_t)op->notify;
        for (int i = 0; i < op->n; i++)
            if (op->stripes[i].part == HR_BOND_WAITS || op->stripes[i].part == HR_BOND_STUCK) n += op->stripes[i].len;
    }
    return n;
}

/* ---- taking back ---- */

/* What was not posted, or has to be posted again, is passed over; what is on its way is for the lanes to see to. */
void hr_bond_on_revoke(struct hr_bond_ep *ep, uint32_t serial) {
    if (is_revoked(ep, &(struct hr_rmem){.rkey = (uint64_t)serial << 32})) return; /* by another lane */
    ep->revoked[ep->nrevoked++ % HR_VERBS_REVOCATIONS] = serial;
    EACH_OP(ep, op) {
        if (op->work != HR_BOND_WRITE || (uint32_t)(op->remote.rkey >> 32) != serial) continue;
        op->notify = 0;
        hr_bond_pending(ep);
    }
}

/* The rest of a write leaves from a copy, because part of it is at the peer and its notice is owed. */
static hr_status copy_write(struct hr_bond_ep *ep, struct hr_bond_op *op) {
    uint8_t *copy = malloc(op->len + 1);
    if (!copy) return HR_ERR_UNSUPPORTED;
    memcpy(copy, op->local, op->len);
    for (int i = 0; i < op->n; i++) {
        struct hr_bond_stripe *s = &op->stripes[i];
        struct hr_verbs_ep *lane = s->part == HR_BOND_POSTED ? ep->lanes[s->lane].ep : NULL;
        if (lane && hr_verbs_move(lane, s, copy + s->offset) != HR_OK)
            hr_verbs_ep_fail(lane, HR_ERR_PEER_LOST, "it did not let go of memory that was taken back", 0);
    }
    op->local = op->copy = copy;
    return HR_OK;
}

static hr_status drop_read(struct hr_bond_ep *ep, struct hr_bond_op *op) {
    for (int i = 0; i < op->n; i++) {
        struct hr_bond_stripe *s = &op->stripes[i];
        struct hr_bond_lane *lane = s->part == HR_BOND_POSTED ? &ep->lanes[s->lane] : NULL;
        if (!lane) continue;
        lane->out -= s->len;
        if (hr_verbs_cancel(&lane->ep->base, s) != HR_OK)
            hr_verbs_ep_fail(lane->ep, HR_ERR_PEER_LOST, "it did not let go of memory that was taken back", 0);
    }
    op_free(ep, op);
    return HR_OK;
}

hr_status hr_bond_cancel(struct hr_ep *base, void *cookie) {
    struct hr_bond_ep *ep = (struct hr_bond_ep *)base;
    if (ep->plain) return hr_verbs_cancel(&ep->lanes[ep->first].ep->base, cookie);
    if (ep->state != HR_BOND_OPEN) return HR_ERR_UNSUPPORTED;
    EACH_OP(ep, op) {
        if (op->cookie != cookie || op->copy || op->work == HR_BOND_ATOMIC) continue;
        return op->work == HR_BOND_WRITE ? copy_write(ep, op) : drop_read(ep, op);
    }
    return HR_ERR_UNSUPPORTED;
}
