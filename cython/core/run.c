/* run.c - the interpreter: runs a program's instructions as their prerequisites end. */

/*
 * An instruction that talks becomes a request of its own with a continuation; one that computes becomes a piece of
 * work, or is done at once when it is small. What has ended unlocks others; they are queued on the run and started from
 * hr_runs_drain, never from inside a continuation, so the stack stays flat however long a program is.
 */

#include <stdlib.h>
#include <string.h>

#include "core/program.h"
#include "hr/memory.h"

#define TMP_KEEP (256u << 10) /* scratch up to this stays with the idle run; more, or open, goes back to the arenas */
#define TMP_HUGE (8u << 20)   /* scratch from here on is in huge pages: up to a twentieth of a call's time */
#define OPEN_MIN 2048u        /* shorter chunks are faster in messages */

static void free_tmp(struct hr_run *run) {
    run->tmp_plain ? free(run->bufs[HR_BUF_TMP]) : hr_arena_free(run->bufs[HR_BUF_TMP]);
    run->bufs[HR_BUF_TMP] = NULL;
    run->tmp_have = 0;
}

void hr_run_free(struct hr_run *run) {
    struct hr_program *p = run->program;
    free_tmp(run);
    free(run->after);
    free(run->queue);
    free(run->st);
    free(run);
    hr_program_drop(p);
}

static struct hr_run *run_new(struct hr_program *p) {
    struct hr_run *run = calloc(1, sizeof *run);
    size_t n = p->ninstr ? p->ninstr : 1;
    if (!run) return NULL;
    run->program = p;
    hr_program_get(p);
    run->after = malloc(n * sizeof *run->after);
    run->queue = malloc(n * sizeof *run->queue);
    run->st = calloc(n, sizeof *run->st);
    if (!run->after || !run->queue || !run->st) {
        hr_run_free(run);
        return NULL;
    }
    for (uint32_t i = 0; i < p->ninstr; i++) {
        run->st[i].run = run;
        hr_list_init(&run->st[i].work.link);
    }
    hr_list_init(&run->ready);
    hr_list_init(&run->bringing.link);
    return run;
}

/* Where there is no room for an arena copies lie where peers cannot map them, and are sent. */
static int run_tmp(struct hr_run *run, uint64_t need) {
    int copies = run->program->aside & HR_ASIDE_WITHIN;
    if (run->tmp_have >= need) return 1;
    free_tmp(run);
    run->bufs[HR_BUF_TMP] = hr_arena_alloc(need, copies ? HR_ASIDE_ROOM : (need < TMP_HUGE ? HR_ARENA_SMALL_PAGES : 0));
    run->tmp_plain = copies && !run->bufs[HR_BUF_TMP];
    if (run->tmp_plain) run->bufs[HR_BUF_TMP] = malloc(need);
    run->tmp_have = run->bufs[HR_BUF_TMP] ? need : 0;
    return run->bufs[HR_BUF_TMP] != NULL;
}

static void run_put(struct hr_run *run) {
    struct hr_program *p = run->program;
    struct hr_run *none = NULL;
    if (run->tmp_have > TMP_KEEP || p->aside & HR_ASIDE_WITHIN) free_tmp(run);
    if (!atomic_compare_exchange_strong(&p->idle, &none, run)) hr_run_free(run);
}

uint64_t hr_run_bytes(const struct hr_request *req) { return ((struct hr_run *)req->state)->program->out_bytes; }
int hr_run_waits(const struct hr_request *req) { return !(((struct hr_run *)req->state)->req->flags & HR_REQ_ASYNC); }
uint64_t hr_run_same(const struct hr_request *req) {
    const struct hr_run *run = req->state;
    return run->same + run->program->same[hr_container(req, const struct instr_state, req) - run->st];
}
double hr_run_scale(struct hr_request *req) { return 1.0 / ((struct hr_run *)req->state)->comm->size; }

/* --- ending
 * ---------------------------------------------------------------------------------------------------------------- */

static void run_finish(struct hr_run *run) {
    struct hr_engine *engine = run->comm->engine;
    struct hr_request *req = run->req;
    const struct hr_comm_state *state = &run->comm->state;
    hr_status status = run->failing ? state->status : HR_OK;
    if (run->failing) {
        for (uint32_t i = 0; i < run->program->ninstr; i++)
            if (run->st[i].req.xfer) hr_xfer_abort(engine, run->st[i].req.xfer, 1); /* lent and not returned */
        req->peer = state->peer;
        req->phase = state->phase;
        req->provider = state->provider;
    }
    hr_list_remove(&run->link);
    hr_list_remove(&run->ready);
    hr_aside_free(run);
    run_put(run);
    hr_finish(engine, req, status);
}

void hr_runs_fail(struct hr_comm *comm) {
    for (struct hr_link *l = comm->runs.next; l != &comm->runs; l = l->next) {
        struct hr_run *run = hr_container(l, struct hr_run, link);
        run->failing = 1;
        hr_list_remove(&run->ready);
        run->queue_head = run->queue_tail;
        hr_aside_fail(run);
        for (uint32_t i = 0; i < run->program->ninstr; i++) {
            struct hr_work *work = &run->st[i].work;
            if (hr_list_empty(&work->link)) continue;
            hr_work_remove(comm->engine, work);
            run->outstanding--;
        }
    }
}

void hr_runs_end(struct hr_comm *comm) {
    for (struct hr_link *l = comm->runs.next, *next; l != &comm->runs; l = next) {
        struct hr_run *run = hr_container(l, struct hr_run, link);
        next = l->next;
        if (!run->outstanding) run_finish(run);
    }
}

/* --- one instruction
 * -------------------------------------------------------------------------------------------------------- */

void hr_run_ready(struct hr_run *run) {
    if (hr_list_empty(&run->ready)) hr_list_push(&run->comm->engine->ready, &run->ready);
}

void hr_run_ended(struct hr_run *run, uint32_t i) {
    const struct hr_instr *in = &run->program->instrs[i];
    const uint32_t *unlock = run->program->unlocks + in->unlock;
    run->remaining--;
    for (uint32_t k = 0; k < in->nunlock; k++)
        if (!--run->after[unlock[k]]) run->queue[run->queue_tail++] = unlock[k];
    /* the last one also passes through the drain, which finishes the run */
    if (run->queue_head != run->queue_tail || !run->remaining) hr_run_ready(run);
}

static void child_done(struct hr_request *req) {
    struct hr_run *run = req->state;
    run->outstanding--;
    if (req->status != HR_OK && !run->failing) {
        hr_comm_break_locked(run->comm, req->status, req->peer, req->phase, req->provider, NULL, 1);
        return; /* breaking has set failing, and has finished the run unless more is outstanding */
    }
    if (run->failing) return; /* hr_runs_end finishes it */
    hr_run_ended(run, (uint32_t)(hr_container(req, struct instr_state, req) - run->st));
}

static uint32_t recv_flags(const struct hr_instr *in) {
    uint32_t flags = in->flags & HR_INSTR_NT ? HR_RECV_NT : 0;
    if (in->op == HR_OP_BORROW) return HR_RECV_BORROW;
    if (in->op != HR_OP_RECV_REDUCE) return flags;
    if (in->flags & HR_INSTR_SWAP) flags |= HR_RECV_SWAP;
    if (in->flags & HR_INSTR_SCALE) flags |= HR_RECV_SCALE;
    return flags | HR_RECV_REDUCE;
}

/* Whether what is sent may be written back to where it lies, and whether nothing else is on these pages. */
static uint32_t may_open(struct hr_run *run, uint32_t i, const struct hr_instr *in) {
    const struct hr_program *p = run->program;
    const uint64_t sizes[] = {p->in_bytes, p->out_bytes, p->tmp_bytes}, size = sizes[in->src_buf];
    uintptr_t begin = (uintptr_t)run->bufs[in->src_buf], at = begin + in->src_off;
    if (!p->returns[i] || in->len < OPEN_MIN) return 0;
    int alone =
        hr_page_down(at) >= begin && (hr_page_up(at + in->len) <= begin + size || hr_arena_ends((char *)begin + size));
    return HR_REQ_OPEN | (alone ? HR_REQ_ALONE : 0);
}

/* A message of a program has come whose sender does not say of itself what this rank does. */
void hr_run_unheard(struct hr_request *req) { ((struct hr_run *)req->state)->req->flags &= ~(uint32_t)HR_REQ_HEARD; }

struct hr_request *hr_run_request(struct hr_run *run, uint32_t i) {
    const struct hr_instr *in = &run->program->instrs[i];
    struct hr_request *req = &run->st[i].req;
    int send = in->op == HR_OP_SEND;
    req->flags = (run->req->flags & HR_REQ_WOULD) | (run->program->paced ? HR_REQ_PACED : 0) |
                 (in->flags & HR_INSTR_STAGED ? HR_REQ_STAGED : 0) |
                 (in->flags & HR_INSTR_CHANGED ? HR_REQ_CHANGED : 0) | (send ? may_open(run, i, in) : 0) |
                 (run->program->same[i] ? HR_REQ_SAME : 0);
    req->priority = run->priority;
    req->then = child_done;
    req->state = run;
    req->buf = send ? run->bufs[in->src_buf] + in->src_off : run->bufs[in->dst_buf] + in->dst_off;
    req->len = in->len;
    req->tag = HR_COLL_TAG | (run->seq << 24) | in->tag;
    req->sig = run->sig;
    req->dtype = (uint8_t)run->dtype;
    req->op = (uint8_t)run->op;
    if (!send)
        req->rflags = (uint8_t)(recv_flags(in) | (run->program->folds[i] ? HR_RECV_FOLD : 0) |
                                (run->program->returns[i] ? HR_RECV_RETURN : 0));
    return req;
}

static void start_talk(struct hr_run *run, uint32_t i, const struct hr_instr *in) {
    run->outstanding++;
    (in->op == HR_OP_SEND ? hr_send_start : hr_recv_start)(run->comm, hr_run_request(run, i), in->peer, in->lane);
}

static void start(struct hr_run *run, uint32_t i) {
    const struct hr_instr *in = &run->program->instrs[i];
    int returned = in->flags & HR_INSTR_RETURNS && run->st[in->ref].req.flags & HR_REQ_RETURNED;
    if (returned || (in->op == HR_OP_SEND && run->st[i].offset)) {
        hr_run_ended(run, i);
        return;
    }
    switch (in->op) {
    case HR_OP_NOP: hr_run_ended(run, i); break;
    case HR_OP_COPY:
    case HR_OP_REDUCE: hr_run_compute(run, i, in); break;
    default: start_talk(run, i, in);
    }
}

int hr_run_active(struct hr_comm *comm, uint64_t seq) {
    for (struct hr_link *l = comm->runs.next; l != &comm->runs; l = l->next)
        if (hr_container(l, struct hr_run, link)->seq == seq) return 1;
    return 0;
}

uint64_t hr_run_sequence(const struct hr_request *req) {
    for (struct hr_link *l = req->comm->runs.next; l != &req->comm->runs; l = l->next) {
        const struct hr_run *run = hr_container(l, struct hr_run, link);
        if (run->req == req) return run->seq;
    }
    return UINT64_MAX;
}

void hr_runs_drain(struct hr_engine *engine) {
    struct hr_link *l;
    while ((l = hr_list_pop(&engine->ready))) {
        struct hr_run *run = hr_container(l, struct hr_run, ready);
        struct hr_comm *comm = run->comm;
        /* starting one may break the communicator and end the run: then its queue is empty */
        while (comm->state.status == HR_OK && run->queue_head != run->queue_tail)
            start(run, run->queue[run->queue_head++]);
        if (comm->state.status != HR_OK || run->remaining) continue;
        struct hr_conn *stray = hr_list_empty(&comm->strays) ? NULL : hr_match_stray(comm, run->seq);
        if (stray)
            hr_match_strayed(comm, stray); /* finishes the run as well */
        else if (hr_aside_bring(run))
            run_finish(run);
    }
}

/* Whether peers may put results there, or where nothing comes out read what goes in, for all that is known before
 * anybody has asked: what they may do is decided for each transfer (hr_xfer_opens). Only where all say so, or not. */
static int could_open(struct hr_comm *comm, const struct hr_program *p, const void *in, void *out) {
    struct hr_arena_info arena;
    const void *buf = p->out_bytes ? out : in;
    size_t len = p->out_bytes ? p->out_bytes : p->in_bytes;
    uintptr_t begin = (uintptr_t)buf, end = begin + len;
    for (int r = 0; r < comm->size; r++)
        if (r != comm->rank && !(comm->conns[r]->caps->flags & HR_CAP_MAP_WRITE)) return 0;
    return !comm->engine->yield && hr_arena_find(buf, len, &arena) && arena.flags & HR_ARENA_WRITABLE_BY_PEERS &&
           hr_page_down(begin) == begin && (hr_page_up(end) == end || hr_arena_ends((void *)end)) &&
           !hr_exposes(comm->engine, buf, len);
}

static int is_plain(const struct hr_program *p, const void *in) {
    struct hr_arena_info arena;
    return p->in_bytes && !hr_arena_find(in, p->in_bytes, &arena);
}

/* What is said of a run, if it is true of it, and if this rank has something to say to and to hear from every other. */
static uint32_t said(struct hr_comm *comm, const struct hr_program *p, const void *in, void *out, uint32_t flags) {
    int true_here = flags & HR_REQ_PLAIN ? is_plain(p, in) : could_open(comm, p, in, out);
    return p->mutual && true_here ? flags | HR_REQ_HEARD : flags & ~(uint32_t)HR_REQ_WOULD;
}

/* --- starting
 * ------------------------------------------------------------------------------------------------------------------ */

hr_status hr_run(struct hr_comm *comm, struct hr_program *program, const void *in, void *out, hr_dtype dtype,
                 hr_redop op, uint64_t sig, struct hr_request *req) {
    struct hr_engine *engine = comm->engine;
    if (program->size != comm->size || dtype >= HR_DTYPES || op >= HR_REDOPS) return HR_ERR_INVALID;
    struct hr_run *run = atomic_exchange(&program->idle, NULL);
    if (!run) run = run_new(program);
    if (!run) return HR_ERR_NOMEM;
    run->bufs[HR_BUF_IN] = (char *)in;
    run->bufs[HR_BUF_OUT] = out;
    if (!run_tmp(run, program->tmp_bytes)) {
        hr_run_free(run);
        return HR_ERR_NOMEM;
    }
    hr_aside_take(run);
    req->then = NULL;
    req->state = NULL;
    run->comm = comm;
    run->req = req;
    run->dtype = dtype;
    run->op = op;
    run->sig = sig;
    run->remaining = program->ninstr;
    run->outstanding = 0;
    run->failing = 0;
    memcpy(run->queue, program->first, program->nfirst * sizeof *run->queue);
    run->queue_head = 0;
    run->queue_tail = program->nfirst;
    for (uint32_t i = 0; i < program->ninstr; i++) {
        run->after[i] = program->instrs[i].after;
        run->st[i].req.xfer = NULL;
        run->st[i].offset = 0;
    }
    hr_lock(engine);
    if (run->aside || program->aside & HR_ASIDE_WITHIN) HR_COUNT(engine, aside);
    hr_request_init(comm, req, HR_REQ_RUN);
    if (req->flags & HR_REQ_WOULD) req->flags = said(comm, program, in, out, req->flags);
    run->priority = req->priority;
    run->seq = comm->run_seq++;
    run->same = engine->same;
    engine->same += program->nsame;
    hr_list_push(&comm->runs, &run->link);
    if (comm->state.status != HR_OK) {
        run->failing = 1;
        run_finish(run);
    } else {
        hr_run_ready(run);
    }
    hr_settle(engine);
    hr_unlock(engine);
    return HR_OK;
}
