/* compute.c - instructions that compute: sums and copies, piece by piece, of what has come, is mapped, or is read. */

#include "core/program.h"
#include "hr/memory.h"

#define WORK_BYTES (512u << 10)
#define COPY_BYTES (256u << 10) /* of a program that works on copies: at once, as a pass costs as much as a copy */

/* The transfer of an operand that is borrowed and was not received after all; else NULL. */
static struct hr_xfer *lent(struct hr_run *run, const struct hr_ref *r) {
    return r->buf == HR_BUF_BORROWED ? run->st[r->off].req.xfer : NULL;
}

/* Where a result is made: what is in scratch for one answer alone, at once where that would go, if it is mapped. (A put
 * may fail, and then all of it is sent from scratch.) */
static char *made_at(struct hr_run *run, const struct hr_instr *in, uint64_t offset) {
    uint32_t answer = in->op == HR_OP_REDUCE ? run->program->folds[in - run->program->instrs] : 0;
    const struct hr_xfer *x = answer ? run->st[run->program->instrs[answer - 1].ref].req.xfer : NULL;
    return offset + (x && x->open && x->rmem.out ? (char *)x->rmem.out : run->bufs[in->dst_buf] + in->dst_off);
}

/* shown: what belongs at `place` in scratch, and lies there; NULL: everything is where it belongs. on: where the result
 * goes as well, for a peer to read it; NULL: nowhere. */
static void compute(struct hr_run *run, const struct hr_instr *in, uint64_t offset, uint64_t len, const void *shown,
                    uint64_t place, void *on) {
    char *dst = made_at(run, in, offset);
    if (in->op == HR_OP_COPY) {
        hr_copy(dst, run->bufs[in->src_buf] + in->src_off + offset, len,
                hr_store_into(dst, len, in->flags & HR_INSTR_NT));
        return;
    }
    const void *src[HR_REDUCE_MAX_SRC];
    void *also[HR_REDUCE_MAX_SRC + 1];
    int nalso = 0;
    for (uint32_t k = 0; k < in->nref; k++) {
        const struct hr_ref *r = &run->program->refs_[in->ref + k];
        if (r->buf == HR_BUF_BORROWED) {
            const struct hr_xfer *x = lent(run, r);
            src[k] =
                x && x->scratch ? x->scratch : (x ? (char *)x->rmem.ptr : (char *)run->st[r->off].req.buf) + offset;
            if (x && x->open && x->rmem.out) also[nalso] = (char *)x->rmem.out + offset;
            nalso += x && x->open && x->rmem.out && also[nalso] != dst;
        } else if (shown && r->buf == HR_BUF_TMP && r->off == place) {
            src[k] = shown;
        } else {
            src[k] = run->bufs[r->buf] + r->off + offset;
        }
    }
    double scale = in->flags & HR_INSTR_SCALE ? 1.0 / run->comm->size : 1.0;
    int away = dst != run->bufs[in->dst_buf] + in->dst_off + offset;
    int unread = in->flags & HR_INSTR_NT || (away && in->len >= HR_READ_LONG);
    hr_store store = nalso && !unread ? HR_STORE_CACHED : hr_store_into(dst, len, unread);
    if (on) {
        also[nalso++] = dst;
        dst = on;
        store = HR_STORE_SHARED;
    }
    hr_reduce_to_all(run->op, run->dtype, dst, also, nalso, src, (int)in->nref, len / hr_dtype_size(run->dtype), scale,
                     store);
}

/* Computes a piece, with a hold of the operands that are open: they get the result. After the last they are not let go
 * of: they are about to be returned. 0: one was taken back. */
static int compute_piece(struct hr_run *run, const struct hr_instr *in, uint64_t offset, uint64_t len) {
    struct hr_xfer *open[HR_REDUCE_MAX_SRC], *put[HR_REDUCE_MAX_SRC];
    uint32_t n = 0, held = 0, nput = 0, done = 0;
    for (uint32_t k = 0; in->op == HR_OP_REDUCE && k < in->nref; k++) {
        struct hr_xfer *x = lent(run, &run->program->refs_[in->ref + k]);
        if (x && x->open && x->rmem.out) open[n++] = x;
        if (x && x->open && !x->rmem.out) put[nput++] = x;
    }
    while (held < n && hr_ledger_hold(open[held])) held++;
    if (held == n) compute(run, in, offset, len, NULL, 0, NULL);
    const char *result = run->bufs[in->dst_buf] + in->dst_off + offset;
    while (held == n && done < nput && hr_read_put(put[done], result, offset, len)) done++;
    int all = held == n && done == nput;
    for (uint32_t k = 0; k < held && !(all && offset + len == in->len); k++) hr_ledger_let_go(open[k]);
    return all;
}

/* A sum of what has come, which may go on in a message as it is made. */
struct making {
    struct hr_request *req;
    const struct hr_instr *recv, *reduce; /* one RECV_REDUCE is both */
    const void *data;
};

static void make(void *arg, void *on) {
    const struct making *m = arg;
    if (m->reduce == m->recv)
        hr_consume_to(m->req, m->data, 0, m->recv->len, NULL, on);
    else
        compute(m->req->state, m->reduce, 0, m->reduce->len, m->data, m->recv->dst_off, on);
}

static int carry_on(struct hr_run *run, uint32_t send, struct making *m) {
    const struct hr_instr *in = &run->program->instrs[send];
    struct hr_request *req = hr_run_request(run, send);
    req->comm = run->comm;
    req->rflags = hr_match_bucket(run->comm->id, req->tag);
    if (!hr_conn_send_made(hr_conn_rail(run->comm->conns[in->peer], in->lane), req, make, m)) return 0;
    run->st[send].offset = in->len;
    HR_COUNT(run->comm->engine, fused);
    return 1;
}

int hr_run_fold(struct hr_request *req, const void *data, size_t len) {
    struct hr_run *run = req->state;
    const struct hr_program *p = run->program;
    uint32_t i = (uint32_t)(hr_container(req, struct instr_state, req) - run->st), reduce = i;
    if (p->instrs[i].op == HR_OP_RECV) reduce = p->folds[i] - 1;
    if (len != p->instrs[i].len || (reduce != i && run->after[reduce] != 1)) return 0; /* it waits for others, too */
    struct making m = {req, &p->instrs[i], &p->instrs[reduce], data};
    int may = p->onward[reduce] && !req->xfer && !run->comm->engine->yield; /* there a peer has to wait anyway */
    int fused = may && carry_on(run, p->onward[reduce] - 1, &m);
    if (!fused && reduce == i) return 0;
    if (!fused) make(&m, NULL);
    if (reduce != i) run->st[reduce].offset = len;
    return fused ? HR_FUSED : 1;
}

/* What it read may have been taken back by a lender that has broken the communicator: the run ends when we hear. */
static int borrowed_in_vain(struct hr_run *run, const struct hr_instr *in) {
    for (uint32_t k = in->ref; in->op == HR_OP_REDUCE && k < in->ref + in->nref; k++) {
        struct hr_xfer *x = lent(run, &run->program->refs_[k]);
        if (x && !hr_ledger_stands(x)) return 1;
    }
    return 0;
}

static void computed(struct hr_run *run, uint32_t i, const struct hr_instr *in) {
    int vain = borrowed_in_vain(run, in);
    for (uint32_t k = in->ref; in->op == HR_OP_REDUCE && k < in->ref + in->nref; k++) {
        struct hr_xfer *x = lent(run, &run->program->refs_[k]);
        if (x && !vain)
            hr_xfer_return(run->comm->engine, x);
        else if (x && x->open && x->rmem.out)
            hr_ledger_let_go(x);
    }
    if (!vain) hr_run_ended(run, i);
}

static uint64_t piece_size(const struct hr_instr *in) {
    uint64_t n = WORK_BYTES / (in->op == HR_OP_REDUCE ? in->nref : 1);
    return (n < HR_INLINE_WORK ? HR_INLINE_WORK : n) & ~63ull;
}

static int is_fetched(struct hr_run *run, const struct hr_instr *in) {
    for (uint32_t k = 0; in->op == HR_OP_REDUCE && k < in->nref; k++) {
        const struct hr_xfer *x = lent(run, &run->program->refs_[in->ref + k]);
        if (x && x->scratch) return 1;
    }
    return 0;
}

/* Reads a piece of what is not mapped. HR_OK: all of it is there. HR_AGAIN: not yet. After an error nothing more is to
 * be done, and the run may be gone. */
static hr_status fetch(struct instr_state *st, const struct hr_instr *in, uint64_t len) {
    struct hr_run *run = st->run;
    hr_status all = HR_OK;
    for (uint32_t k = 0; k < in->nref; k++) {
        const struct hr_ref *r = &run->program->refs_[in->ref + k];
        struct hr_xfer *x = lent(run, r);
        if (!x || !x->scratch) continue;
        hr_status status = hr_read_lent(x, st->offset, len);
        if (hr_is_error(status)) {
            if (!hr_ledger_stands(x)) { /* in vain */
                hr_work_remove(x->conn->engine, &st->work);
                run->outstanding--;
            } else {
                hr_read_lent_done(x, status);
            }
            return status;
        }
        if (status != HR_OK) all = status;
    }
    return all;
}

static int compute_step(struct hr_engine *engine, struct hr_work *work) {
    struct instr_state *st = hr_container(work, struct instr_state, work);
    struct hr_run *run = st->run;
    uint32_t i = (uint32_t)(st - run->st);
    const struct hr_instr *in = &run->program->instrs[i];
    uint64_t left = in->len - st->offset, n = piece_size(in);
    int fetched = is_fetched(run, in);
    if (fetched && n > hr_read_most(in->len)) n = hr_read_most(in->len);
    if (n > left) n = left;
    if (in->op == HR_OP_COPY && hr_share_turn(engine, work, run->bufs[in->src_buf] + in->src_off + st->offset, n))
        return 1;
    hr_status status = fetched ? fetch(st, in, n) : HR_OK;
    if (status != HR_OK) return status == HR_AGAIN;
    if (!compute_piece(run, in, st->offset, n)) { /* in vain */
        hr_work_remove(engine, work);
        run->outstanding--;
        return 0;
    }
    st->offset += n;
    if (st->offset < in->len) return 1;
    hr_work_remove(engine, work);
    run->outstanding--;
    computed(run, i, in);
    return 0;
}

void hr_run_compute(struct hr_run *run, uint32_t i, const struct hr_instr *in) {
    struct instr_state *st = &run->st[i];
    uint64_t cost = in->len * (in->op == HR_OP_REDUCE ? in->nref : 1);
    int copies = in->op == HR_OP_COPY && run->program->aside & HR_ASIDE_WITHIN;
    if (st->offset < in->len && cost <= (copies ? COPY_BYTES : HR_INLINE_WORK) && !is_fetched(run, in)) {
        if (!compute_piece(run, in, 0, in->len)) return;
        st->offset = in->len;
    }
    if (st->offset == in->len) {
        computed(run, i, in);
        return;
    }
    st->work.step = compute_step;
    run->outstanding++;
    hr_work_add(run->comm->engine, &st->work, run->priority);
}
