/* programs.h - programs written by hand: a builder, allreduces, and a reduce. */
#ifndef HR_TESTS_PROGRAMS_H
#define HR_TESTS_PROGRAMS_H

#include "core/program.h"
#include "world.h"

struct builder {
    struct hr_instr instrs[512];
    uint32_t unlocks[512], edges[512][2];
    struct hr_ref refs[512];
    uint32_t n, nedge, nref;
};
static inline uint32_t add(struct builder *b, struct hr_instr in) {
    b->instrs[b->n] = in;
    return b->n++;
}
static inline void after(struct builder *b, uint32_t first, uint32_t then) {
    b->edges[b->nedge][0] = first;
    b->edges[b->nedge++][1] = then;
    b->instrs[then].after++;
}
static inline struct hr_program *build(struct builder *b, uint64_t bytes, uint64_t tmp, int size) {
    uint32_t k = 0;
    for (uint32_t i = 0; i < b->n; i++) {
        b->instrs[i].unlock = k;
        for (uint32_t e = 0; e < b->nedge; e++)
            if (b->edges[e][0] == i) b->unlocks[k++] = b->edges[e][1];
        b->instrs[i].nunlock = k - b->instrs[i].unlock;
    }
    struct hr_program *p = NULL;
    char detail[256];
    hr_status status =
        hr_program_new(b->instrs, b->n, b->unlocks, k, b->refs, b->nref, bytes, bytes, tmp, size, &p, detail);
    if (status != HR_OK) fprintf(stderr, "%s\n", detail);
    REQUIRE(status == HR_OK);
    return p;
}

/* The same on a copy in scratch, of which so many bytes are in use otherwise: all that is OUT. */
static inline void on_copy(struct builder *b, uint64_t bytes, uint64_t tmp) {
    struct hr_instr copy = {.op = HR_OP_COPY, .peer = -1, .src_buf = HR_BUF_OUT, .dst_buf = HR_BUF_TMP, .len = bytes};
    struct hr_instr back = copy;
    copy.dst_off = back.src_off = tmp;
    back.src_buf = HR_BUF_TMP;
    back.dst_buf = HR_BUF_OUT;
    uint32_t n = b->n, first = add(b, copy), last = add(b, back);
    for (uint32_t i = 0; i < n; i++) {
        struct hr_instr *in = &b->instrs[i];
        if (!in->after) after(b, first, i);
        after(b, i, last);
        if (in->src_buf == HR_BUF_OUT) in->src_off += tmp;
        if (in->dst_buf == HR_BUF_OUT) in->dst_off += tmp;
        in->src_buf = in->dst_buf = HR_BUF_TMP;
    }
    for (uint32_t k = 0; k < b->nref; k++)
        if (b->refs[k].buf == HR_BUF_OUT) b->refs[k] = (struct hr_ref){HR_BUF_TMP, 0, b->refs[k].off + tmp};
}

/* Rank r borrows its chunk from everybody, reduces in rank order, and sends the result to all. In place. returns: or
 * puts it back where it may. within: on a copy in scratch. */
static inline struct hr_program *direct_on(int rank, int size, uint64_t elements, int returns, int within) {
    struct builder *b = calloc(1, sizeof *b);
    uint64_t chunk = elements / (uint64_t)size * 4, mine = chunk * (uint64_t)rank;
    uint32_t lend[WORLD_MAX], borrow[WORLD_MAX];
    struct hr_instr send = {.op = HR_OP_SEND, .src_buf = HR_BUF_OUT, .len = chunk},
                    come = {.op = HR_OP_BORROW, .dst_buf = HR_BUF_TMP, .len = chunk};
    for (send.peer = 0; send.peer < size; send.peer++) {
        send.src_off = chunk * (uint64_t)send.peer;
        if (send.peer != rank) lend[send.peer] = add(b, send);
    }
    for (come.peer = 0; come.peer < size; come.peer++) {
        come.dst_off = chunk * (uint64_t)come.peer;
        if (come.peer != rank) borrow[come.peer] = add(b, come);
    }
    struct hr_instr sum = {.op = HR_OP_REDUCE, .peer = -1, .dst_buf = HR_BUF_OUT, .dst_off = mine, .len = chunk};
    sum.nref = (uint32_t)size;
    uint32_t reduce = add(b, sum);
    for (int p = 0; p < size; p++) {
        b->refs[b->nref++] =
            p == rank ? (struct hr_ref){HR_BUF_OUT, 0, mine} : (struct hr_ref){HR_BUF_BORROWED, 0, borrow[p]};
        if (p != rank) after(b, borrow[p], reduce);
    }
    send.tag = come.tag = 1;
    send.src_off = mine;
    come.op = HR_OP_RECV;
    come.dst_buf = HR_BUF_OUT;
    for (int p = 0; p < size; p++) {
        if (p == rank) continue;
        send.peer = come.peer = p;
        come.dst_off = chunk * (uint64_t)p;
        send.flags = come.flags = returns ? HR_INSTR_RETURNS : 0;
        send.ref = borrow[p];
        come.ref = lend[p];
        after(b, reduce, add(b, send));
        after(b, lend[p], add(b, come)); /* what is lent may not be overwritten */
    }
    uint64_t tmp = chunk * (uint64_t)size;
    if (within) on_copy(b, elements * 4, tmp);
    struct hr_program *program = build(b, elements * 4, within ? tmp + elements * 4 : tmp, size);
    free(b);
    if (within) hr_program_set_aside(program, HR_ASIDE_WITHIN);
    return program;
}

static inline struct hr_program *direct(int rank, int size, uint64_t elements, int returns) {
    return direct_on(rank, size, elements, returns, 0);
}

/* The same of two ranks, reduced as it arrives. */
static inline struct hr_program *halves(int rank, uint64_t elements, int returns) {
    struct builder *b = calloc(1, sizeof *b);
    uint64_t chunk = elements / 2 * 4, mine = chunk * (uint64_t)rank, other = chunk * (uint64_t)(1 - rank);
    struct hr_instr send = {.op = HR_OP_SEND, .peer = 1 - rank, .src_buf = HR_BUF_OUT, .len = chunk}, recv = send;
    recv.op = HR_OP_RECV_REDUCE;
    recv.dst_buf = HR_BUF_OUT;
    for (uint64_t tag = 0; tag < 2; tag++) {
        send.tag = recv.tag = tag;
        send.src_off = tag ? mine : other;
        recv.dst_off = tag ? other : mine;
        if (tag && returns) send.flags = recv.flags = HR_INSTR_RETURNS;
        send.ref = tag; /* the one that is received first, and the one that is sent first */
        uint32_t sent = add(b, send), came = add(b, recv);
        if (tag) { /* what is sent first is received last, and the other way round */
            after(b, 1, sent);
            after(b, 0, came);
        }
        recv.op = HR_OP_RECV;
    }
    struct hr_program *program = build(b, elements * 4, 0, 2);
    free(b);
    return program;
}

/* Of two ranks: the other reduces what the root lends with its own, in scratch, and sends the result back, or puts it
 * where that lies. */
static inline struct hr_program *for_root(int rank, int root, uint64_t elements, int returns) {
    struct builder *b = calloc(1, sizeof *b);
    uint16_t flags = returns ? HR_INSTR_RETURNS : 0;
    struct hr_instr lend = {.op = HR_OP_SEND, .peer = !root, .src_buf = HR_BUF_OUT, .len = elements * 4},
                    borrow = {.op = HR_OP_BORROW, .peer = root, .dst_buf = HR_BUF_TMP, .len = elements * 4},
                    sum = {.op = HR_OP_REDUCE, .peer = -1, .dst_buf = HR_BUF_TMP, .len = elements * 4, .nref = 2},
                    give = {.op = HR_OP_SEND, .peer = root, .tag = 1, .src_buf = HR_BUF_TMP, .len = elements * 4},
                    take = {.op = HR_OP_RECV, .peer = !root, .tag = 1, .dst_buf = HR_BUF_OUT, .len = elements * 4};
    give.flags = take.flags = flags;
    uint32_t first = add(b, rank == root ? lend : borrow), then = add(b, rank == root ? take : sum);
    after(b, first, then);
    if (rank != root) {
        after(b, then, add(b, give));
        b->refs[b->nref++] = (struct hr_ref){HR_BUF_BORROWED, 0, first};
        b->refs[b->nref++] = (struct hr_ref){HR_BUF_IN, 0, 0};
    }
    struct hr_program *program = build(b, elements * 4, rank == root ? 0 : elements * 4, 2);
    free(b);
    return program;
}

#endif
