/* program.c - takes a program in and proves that running it cannot leave its memory or get stuck by its own fault. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/program.h"

#define SAME_REACH 64 /* so far apart are sends of the same bytes found */

struct checker {
    struct hr_program *p;
    char *detail;
};

static int bad(struct checker *c, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(c->detail, 256, format, args);
    va_end(args);
    return 0;
}

static int range_ok(struct checker *c, uint32_t i, const char *what, uint32_t buf, uint64_t off, uint64_t len) {
    static const char *const names[] = {"in", "out", "scratch"};
    uint64_t sizes[] = {c->p->in_bytes, c->p->out_bytes, c->p->tmp_bytes};
    if (buf > HR_BUF_TMP) return bad(c, "instruction %u: %s names buffer %u", i, what, buf);
    if (off > sizes[buf] || len > sizes[buf] - off)
        return bad(c, "instruction %u: %s [%llu, +%llu) is outside the %s buffer of %llu bytes", i, what,
                   (unsigned long long)off, (unsigned long long)len, names[buf], (unsigned long long)sizes[buf]);
    return 1;
}

static int operands_ok(struct checker *c, uint32_t i) {
    const struct hr_instr *in = &c->p->instrs[i];
    int writes = in->op == HR_OP_RECV || in->op == HR_OP_RECV_REDUCE || in->op == HR_OP_BORROW ||
                 in->op == HR_OP_REDUCE || in->op == HR_OP_COPY;
    int reads = in->op == HR_OP_SEND || in->op == HR_OP_COPY;
    int talks = in->op == HR_OP_SEND || in->op == HR_OP_RECV || in->op == HR_OP_RECV_REDUCE || in->op == HR_OP_BORROW;
    if (in->op >= HR_OPCODES) return bad(c, "instruction %u: unknown operation %u", i, in->op);
    if (talks && (in->peer < 0 || in->peer >= c->p->size))
        return bad(c, "instruction %u: peer %d of %d ranks", i, in->peer, c->p->size);
    if (talks && in->tag >= 1u << 24) return bad(c, "instruction %u: tag %u is not below 2^24", i, in->tag);
    if (writes && !range_ok(c, i, "destination", in->dst_buf, in->dst_off, in->len)) return 0;
    if (reads && !range_ok(c, i, "source", in->src_buf, in->src_off, in->len)) return 0;
    if (in->op != HR_OP_REDUCE) return 1;
    if (in->nref < 1 || in->nref > HR_REDUCE_MAX_SRC)
        return bad(c, "instruction %u: a reduction of %u operands", i, in->nref);
    if (in->ref > c->p->nref || in->nref > c->p->nref - in->ref)
        return bad(c, "instruction %u: operands outside the list", i);
    for (uint32_t k = in->ref; k < in->ref + in->nref; k++) {
        const struct hr_ref *r = &c->p->refs_[k];
        if (r->buf != HR_BUF_BORROWED) {
            if (!range_ok(c, i, "operand", r->buf, r->off, in->len)) return 0;
        } else if (r->off >= c->p->ninstr || c->p->instrs[r->off].op != HR_OP_BORROW ||
                   c->p->instrs[r->off].len != in->len) {
            return bad(c, "instruction %u: operand %u is not a BORROW of the same length", i, k - in->ref);
        }
    }
    return 1;
}

/* Whether `then` waits for `first`, by whatever way. seen: room for a mark per instruction, used up to `mark`. */
static int comes_after(const struct hr_program *p, uint32_t first, uint32_t then, uint32_t *seen, uint32_t mark,
                       uint32_t *stack) {
    uint32_t n = 0;
    stack[n++] = first;
    while (n) {
        const struct hr_instr *in = &p->instrs[stack[--n]];
        for (uint32_t k = in->unlock; k < in->unlock + in->nunlock; k++) {
            uint32_t next = p->unlocks[k];
            if (next == then) return 1;
            if (seen[next] == mark) continue;
            seen[next] = mark;
            stack[n++] = next;
        }
    }
    return 0;
}

/* A borrowed chunk is read by one reduction, which gives it back, once it is there. */
static int borrows_ok(struct checker *c) {
    struct hr_program *p = c->p;
    uint32_t *reader = p->reader, *seen = calloc(p->ninstr + 1u, sizeof *seen),
             *stack = malloc((p->ninstr + 1u) * sizeof *stack);
    int ok = seen && stack;
    if (!ok) bad(c, "no memory");
    for (uint32_t i = 0; ok && i < p->ninstr; i++) {
        const struct hr_instr *in = &p->instrs[i];
        for (uint32_t k = in->ref; in->op == HR_OP_REDUCE && ok && k < in->ref + in->nref; k++) {
            uint64_t off = p->refs_[k].off;
            if (p->refs_[k].buf != HR_BUF_BORROWED) continue;
            if (reader[off]) ok = bad(c, "instruction %u: BORROW %u is read by another reduction", i, (uint32_t)off);
            reader[off] = i + 1;
        }
    }
    for (uint32_t i = 0; ok && i < p->ninstr; i++) {
        if (p->instrs[i].op != HR_OP_BORROW) continue;
        if (!reader[i])
            ok = bad(c, "instruction %u: what it borrows is never read, so never given back", i);
        else if (!comes_after(p, i, reader[i] - 1, seen, i + 1, stack))
            ok = bad(c, "instruction %u reads BORROW %u without waiting for it", reader[i] - 1, i);
    }
    free(seen);
    free(stack);
    return ok;
}

/* Counts agree and Kahn's algorithm reaches every instruction. */
static int order_ok(struct checker *c) {
    struct hr_program *p = c->p;
    uint32_t *count = calloc(p->ninstr ? p->ninstr : 1, sizeof *count),
             *queue = malloc((p->ninstr ? p->ninstr : 1) * sizeof *queue);
    uint32_t head = 0, tail = 0;
    int ok = 0;
    if (!count || !queue) {
        bad(c, "no memory");
        goto out;
    }
    for (uint32_t i = 0; i < p->ninstr; i++) {
        const struct hr_instr *in = &p->instrs[i];
        if (in->unlock > p->nunlock || in->nunlock > p->nunlock - in->unlock) {
            bad(c, "instruction %u: unlock list out of bounds", i);
            goto out;
        }
        for (uint32_t k = in->unlock; k < in->unlock + in->nunlock; k++) {
            if (p->unlocks[k] >= p->ninstr) {
                bad(c, "instruction %u unlocks %u of %u", i, p->unlocks[k], p->ninstr);
                goto out;
            }
            count[p->unlocks[k]]++;
        }
    }
    for (uint32_t i = 0; i < p->ninstr; i++) {
        if (count[i] != p->instrs[i].after) {
            bad(c, "instruction %u waits for %u others, %u unlock it", i, p->instrs[i].after, count[i]);
            goto out;
        }
        if (!count[i]) {
            p->first[p->nfirst++] = i;
            queue[tail++] = i;
        }
    }
    while (head < tail) {
        const struct hr_instr *in = &p->instrs[queue[head++]];
        for (uint32_t k = in->unlock; k < in->unlock + in->nunlock; k++)
            if (!--count[p->unlocks[k]]) queue[tail++] = p->unlocks[k];
    }
    if (tail != p->ninstr)
        bad(c, "%u instructions wait for one another in a circle", p->ninstr - tail);
    else
        ok = 1;
out:
    free(count);
    free(queue);
    return ok;
}

static int waits_for_peer(const struct hr_instr *in) {
    return in->op == HR_OP_RECV || in->op == HR_OP_RECV_REDUCE || in->op == HR_OP_BORROW;
}

/* This rank says something to every other and hears from it, whatever is written back instead of sent. */
static int is_mutual(const struct hr_program *p) {
    char *met = calloc((size_t)p->size, 1);
    int missing = 2 * (p->size - 1);
    for (uint32_t i = 0; met && i < p->ninstr; i++) {
        const struct hr_instr *in = &p->instrs[i];
        char bit = in->op == HR_OP_SEND ? 1 : waits_for_peer(in) ? 2 : 0;
        if (in->flags & HR_INSTR_RETURNS || !bit || met[in->peer] & bit) continue;
        met[in->peer] |= bit;
        missing--;
    }
    free(met);
    return !missing;
}

/* What is sent if nothing ever arrives goes to one peer. */
static int is_paced(const struct hr_program *p) {
    size_t n = p->ninstr ? p->ninstr : 1;
    uint32_t *left = malloc(n * sizeof *left), *queue = malloc(n * sizeof *queue), head = 0, tail = 0;
    int peer = -1, paced = left && queue;
    for (uint32_t i = 0; paced && i < p->ninstr; i++) {
        left[i] = p->instrs[i].after;
        if (!left[i] && !waits_for_peer(&p->instrs[i])) queue[tail++] = i;
    }
    while (paced && head < tail) {
        const struct hr_instr *in = &p->instrs[queue[head++]];
        if (in->op == HR_OP_SEND) {
            if (peer >= 0 && peer != in->peer) paced = 0;
            peer = in->peer;
        }
        for (uint32_t k = in->unlock; k < in->unlock + in->nunlock; k++)
            if (!--left[p->unlocks[k]] && !waits_for_peer(&p->instrs[p->unlocks[k]])) queue[tail++] = p->unlocks[k];
    }
    free(left);
    free(queue);
    return paced;
}

/* The instruction whose result goes back to whom `asks` received from: its own, or that of who reads what it borrows.
 */
static uint32_t result_of(const struct hr_program *p, uint32_t asks) {
    return p->instrs[asks].op == HR_OP_BORROW ? p->reader[asks] - 1 : asks;
}

/* Whether instruction i may answer `asks`: with the result that lies where it sends from, or over what was sent. */
static int answers(const struct hr_program *p, uint32_t i, uint32_t asks) {
    const struct hr_instr *in = &p->instrs[i], *other = &p->instrs[asks];
    if (other->peer != in->peer || other->len != in->len || other->flags & HR_INSTR_RETURNS) return 0;
    if (in->op == HR_OP_RECV) return other->op == HR_OP_SEND;
    const struct hr_instr *result = &p->instrs[result_of(p, asks)];
    return in->op == HR_OP_SEND && (other->op == HR_OP_BORROW || other->op == HR_OP_RECV_REDUCE) &&
           result->dst_buf == in->src_buf && result->dst_off == in->src_off;
}

/* Each answer waits for what it answers, and nothing is answered twice. */
static int returns_ok(struct checker *c) {
    struct hr_program *p = c->p;
    uint32_t *seen = calloc(p->ninstr + 1u, sizeof *seen), *stack = malloc((p->ninstr + 1u) * sizeof *stack);
    int ok = seen && stack;
    if (!ok) bad(c, "no memory");
    for (uint32_t i = 0; ok && i < p->ninstr; i++) {
        uint32_t asks = p->instrs[i].ref;
        if (!(p->instrs[i].flags & HR_INSTR_RETURNS)) continue;
        if (asks >= p->ninstr || !answers(p, i, asks))
            ok = bad(c, "instruction %u: %u has no such answer", i, asks);
        else if (p->returns[asks])
            ok = bad(c, "instruction %u: %u has another answer", i, asks);
        else if (!comes_after(p, result_of(p, asks), i, seen, i + 1, stack))
            ok = bad(c, "instruction %u does not wait for %u, which it answers", i, asks);
        else
            p->returns[asks] = 1;
    }
    free(seen);
    free(stack);
    return ok;
}

/* Whether `then` sends the whole sum of instruction i, and waits for nothing else. Of an answer that may be put back,
 * the sum is made of what it answers: that came in a message if this is asked. */
static int goes_on(const struct hr_program *p, uint32_t i, const struct hr_instr *then) {
    const struct hr_instr *in = &p->instrs[i];
    return then->op == HR_OP_SEND && then->after == 1 && then->len == in->len && then->src_buf == in->dst_buf &&
           then->src_off == in->dst_off && (!(then->flags & HR_INSTR_RETURNS) || then->ref == i);
}

/* The message in which a sum goes on as it is made: the answer, if there is one. */
static void find_onward(struct hr_program *p) {
    for (uint32_t i = 0; i < p->ninstr; i++) {
        const struct hr_instr *in = &p->instrs[i];
        int sums = in->op == HR_OP_RECV_REDUCE || in->op == HR_OP_REDUCE;
        for (uint32_t k = in->unlock; sums && k < in->unlock + in->nunlock; k++) {
            const struct hr_instr *then = &p->instrs[p->unlocks[k]];
            if (goes_on(p, i, then) && (!p->onward[i] || then->flags & HR_INSTR_RETURNS))
                p->onward[i] = p->unlocks[k] + 1;
        }
        if (in->op == HR_OP_RECV_REDUCE) p->folds[i] = p->onward[i];
    }
}

/* Scratch that is received for one REDUCE, or reduced for one answer, which waits for it: nobody else reads it, or they
 * would wait as well. */
static void find_folds(struct hr_program *p) {
    for (uint32_t i = 0; i < p->ninstr; i++) {
        const struct hr_instr *in = &p->instrs[i];
        if (in->dst_buf != HR_BUF_TMP || in->nunlock != 1) continue;
        uint32_t next = p->unlocks[in->unlock];
        const struct hr_instr *then = &p->instrs[next];
        if (in->op == HR_OP_REDUCE && then->flags & HR_INSTR_RETURNS && result_of(p, then->ref) == i)
            p->folds[i] = next + 1;
        if (in->op != HR_OP_RECV || then->op != HR_OP_REDUCE || then->len != in->len) continue;
        int reads = 0, borrows = 0;
        for (uint32_t k = then->ref; k < then->ref + then->nref; k++) {
            reads += p->refs_[k].buf == HR_BUF_TMP && p->refs_[k].off == in->dst_off;
            borrows += p->refs_[k].buf == HR_BUF_BORROWED;
        }
        if (reads == 1 && !borrows) p->folds[i] = next + 1;
    }
}

/* Sends of the same bytes that become ready at the same time: whatever writes there comes before all or after all. */
static void find_same(struct hr_program *p, const uint32_t *list, uint32_t n) {
    for (uint32_t k = 0; k < n; k++) {
        const struct hr_instr *in = &p->instrs[list[k]];
        if (in->op != HR_OP_SEND || in->after > 1 || p->same[list[k]]) continue;
        for (uint32_t m = k + 1; m < n && m < k + 1 + SAME_REACH; m++) {
            const struct hr_instr *other = &p->instrs[list[m]];
            if (other->op != HR_OP_SEND || other->after > 1 || other->src_buf != in->src_buf ||
                other->src_off != in->src_off || other->len != in->len || other->peer == in->peer)
                continue;
            if (!p->same[list[k]]) p->same[list[k]] = ++p->nsame;
            p->same[list[m]] = p->same[list[k]];
        }
    }
}

static void find_all_same(struct hr_program *p) {
    find_same(p, p->first, p->nfirst);
    for (uint32_t i = 0; i < p->ninstr; i++) find_same(p, p->unlocks + p->instrs[i].unlock, p->instrs[i].nunlock);
}

static void *copy_of(const void *data, size_t n) {
    void *copy = malloc(n ? n : 1);
    if (copy && n) memcpy(copy, data, n);
    return copy;
}

hr_status hr_program_new(const struct hr_instr *instrs, uint32_t ninstr, const uint32_t *unlocks, uint32_t nunlock,
                         const struct hr_ref *refs, uint32_t nref, uint64_t in_bytes, uint64_t out_bytes,
                         uint64_t tmp_bytes, int size, struct hr_program **program_p, char detail[256]) {
    struct hr_program *p = calloc(1, sizeof *p);
    struct checker c = {p, detail};
    snprintf(detail, 256, "no memory");
    if (!p) return HR_ERR_NOMEM;
    p->refs = 1;
    p->instrs = copy_of(instrs, ninstr * sizeof *instrs);
    p->unlocks = copy_of(unlocks, nunlock * sizeof *unlocks);
    p->refs_ = copy_of(refs, nref * sizeof *refs);
    p->first = malloc((ninstr ? ninstr : 1) * sizeof *p->first);
    p->folds = calloc(ninstr ? ninstr : 1, sizeof *p->folds);
    p->onward = calloc(ninstr ? ninstr : 1, sizeof *p->onward);
    p->reader = calloc(ninstr ? ninstr : 1, sizeof *p->reader);
    p->same = calloc(ninstr ? ninstr : 1, sizeof *p->same);
    p->returns = calloc(ninstr ? ninstr : 1, sizeof *p->returns);
    p->ninstr = ninstr;
    p->nunlock = nunlock;
    p->nref = nref;
    p->in_bytes = in_bytes;
    p->out_bytes = out_bytes;
    p->tmp_bytes = tmp_bytes;
    p->size = size;
    int all =
        p->instrs && p->unlocks && p->refs_ && p->first && p->folds && p->onward && p->reader && p->returns && p->same;
    hr_status status = all ? HR_OK : HR_ERR_NOMEM;
    for (uint32_t i = 0; status == HR_OK && i < ninstr; i++)
        if (!operands_ok(&c, i)) status = HR_ERR_INVALID;
    if (status == HR_OK && !(order_ok(&c) && borrows_ok(&c) && returns_ok(&c))) status = HR_ERR_INVALID;
    if (status != HR_OK) {
        hr_program_put(p);
        return status;
    }
    p->paced = is_paced(p);
    p->mutual = is_mutual(p);
    find_folds(p);
    find_onward(p);
    find_all_same(p);
    *program_p = p;
    return HR_OK;
}

void hr_program_set_aside(struct hr_program *program, uint32_t what) { program->aside = what; }

void hr_program_get(struct hr_program *program) { atomic_fetch_add(&program->refs, 1); }

void hr_program_drop(struct hr_program *program) {
    if (atomic_fetch_sub(&program->refs, 1) != 1) return;
    free(program->instrs);
    free(program->unlocks);
    free(program->refs_);
    free(program->first);
    free(program->folds);
    free(program->onward);
    free(program->reader);
    free(program->returns);
    free(program->same);
    free(program);
}

void hr_program_put(struct hr_program *program) {
    struct hr_run *run = atomic_exchange(&program->idle, HR_NO_RUN);
    if (run) hr_run_free(run);
    hr_program_drop(program);
}
