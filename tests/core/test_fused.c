/* test_fused.c - sums that are made where they are sent from and in the message that carries them on. HR_TEST_PROVIDER
 * chooses the provider. */

#include "programs.h"
#include "world.h"

enum { ROUNDS = 100, WAIT = 30, LEAST = 32 << 10 }; /* so much goes unasked, between ranks that have a processor each */

enum { ARRIVING, BY_SCRATCH, WAITS_FOR_MORE, OF_A_PART, KINDS };

/* From rank to rank, each adds its own: rank r has the sum of ranks 0 to r. By RECV_REDUCE, or in scratch and then by
 * REDUCE; the SEND also waits for a NOP; a half goes on once more, in a message of its own. */
static struct hr_program *chain(int rank, int size, uint64_t elements, int kind) {
    struct builder *b = calloc(1, sizeof *b);
    uint64_t bytes = elements * 4;
    uint32_t last = 0;
    struct hr_instr come = {.op = HR_OP_RECV_REDUCE, .peer = rank - 1, .dst_buf = HR_BUF_OUT, .len = bytes};
    if (kind == BY_SCRATCH) {
        come.op = HR_OP_RECV;
        come.dst_buf = HR_BUF_TMP;
    }
    if (rank) last = add(b, come);
    if (rank && kind == BY_SCRATCH) {
        uint32_t came = last;
        last =
            add(b, (struct hr_instr){.op = HR_OP_REDUCE, .peer = -1, .dst_buf = HR_BUF_OUT, .len = bytes, .nref = 2});
        b->refs[b->nref++] = (struct hr_ref){HR_BUF_TMP, 0, 0};
        b->refs[b->nref++] = (struct hr_ref){HR_BUF_OUT, 0, 0};
        after(b, came, last);
    }
    for (int part = 0; rank < size - 1 && part <= (kind == OF_A_PART); part++) {
        struct hr_instr go = {.op = HR_OP_SEND,
                              .peer = rank + 1,
                              .src_buf = HR_BUF_OUT,
                              .len = bytes,
                              .tag = (uint32_t)part,
                              .flags = HR_INSTR_CHANGED};
        uint32_t gone = add(b, go);
        if (part) b->instrs[gone].len = bytes / 2; /* the other is of the whole: both wait for the sum */
        if (rank) after(b, last, gone);
        if (kind == WAITS_FOR_MORE) after(b, add(b, (struct hr_instr){.op = HR_OP_NOP, .peer = -1}), gone);
    }
    if (rank && kind == OF_A_PART)
        add(b,
            (struct hr_instr){.op = HR_OP_RECV, .peer = rank - 1, .dst_buf = HR_BUF_TMP, .len = bytes / 2, .tag = 1});
    struct hr_program *program = build(b, bytes, bytes, size);
    free(b);
    return program;
}

TEST(what_goes_on_is_known) {
    for (int kind = 0; kind < KINDS; kind++) {
        struct hr_program *p = chain(1, 3, 1000, kind), *end = chain(2, 3, 1000, kind),
                          *begin = chain(0, 3, 1000, kind);
        uint32_t sum = kind == BY_SCRATCH, send = sum + 1;
        CHECK_EQ(p->onward[sum], kind == WAITS_FOR_MORE ? 0 : send + 1);
        CHECK_EQ(p->folds[0], kind == BY_SCRATCH ? sum + 1 : p->onward[0]);
        CHECK_EQ(end->onward[sum], 0);
        CHECK_EQ(begin->onward[0], 0);
        hr_program_put(p), hr_program_put(end), hr_program_put(begin);
    }
}

/* A sum of what rank 1 sent goes to rank 2 and is the answer to rank 1, to `asks`. */
static uint32_t goes_on(uint32_t asks) {
    struct builder *b = calloc(1, sizeof *b);
    struct hr_instr come = {.op = HR_OP_RECV_REDUCE, .peer = 1, .dst_buf = HR_BUF_OUT, .len = 64},
                    go = {.op = HR_OP_SEND, .peer = 2, .src_buf = HR_BUF_OUT, .len = 64};
    add(b, come);
    come.tag = 1;
    add(b, come);
    after(b, 0, 1);
    after(b, 1, add(b, go));
    go.peer = 1;
    go.flags = HR_INSTR_RETURNS;
    go.ref = asks;
    after(b, 1, add(b, go));
    struct hr_program *p = build(b, 64, 0, 3);
    uint32_t onward = p->onward[1];
    CHECK_EQ(p->onward[0], 0);
    hr_program_put(p);
    free(b);
    return onward;
}
TEST(an_answer_goes_first) {
    CHECK_EQ(goes_on(1), 3 + 1);
    CHECK_EQ(goes_on(0), 2 + 1); /* what it answers may have been put back */
}

struct job {
    uint64_t elements;
    int kind, shared, late; /* ranks share processors; the last rank comes when all has been sent */
};

static void *chains(void *arg) {
    struct rank *r = arg;
    struct job *j = r->arg;
    struct hr_program *p = chain(r->rank, r->size, j->elements, j->kind);
    float *x = malloc(j->elements * 4);
    uint64_t wrong = 0, n = (uint64_t)r->rank + 1, fused;
    hr_engine_set_locality(r->engine, r->size, j->shared ? 1 : r->size, 0);
    for (int round = 0; round < ROUNDS; round++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        for (uint64_t i = 0; i < j->elements; i++) x[i] = (float)(i % 1000 + (uint64_t)(r->rank + round));
        if (j->late && r->rank == r->size - 1) usleep(1000);
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_FLOAT32, HR_SUM, 7, &req), HR_OK);
        CHECK_EQ(finish(r, &req, WAIT), HR_OK);
        for (uint64_t i = 0; i < j->elements; i++)
            wrong += x[i] != (float)(n * (i % 1000 + (uint64_t)round) + n * (n - 1) / 2);
    }
    CHECK_EQ(wrong, 0);
    fused = counted(r->engine, "messages_fused");
    int may = world_caps(r) & HR_CAP_FILLS && !j->shared && j->kind != WAITS_FOR_MORE && j->elements < 100000 &&
              r->rank && r->rank < r->size - 1;
    if (may && j->elements * 4 <= LEAST) CHECK(fused > 0); /* all, unless one has to wait */
    CHECK(fused <= (may ? ROUNDS : 0));
    free(x);
    hr_program_put(p);
    return NULL;
}

TEST(sums_go_on_as_they_are_made) {
    static const uint64_t lengths[] = {1, 2, 700, 3333, 4096, 16384};
    for (int i = 0; i < 6; i++)
        for (int kind = 0; kind < KINDS; kind++)
            world_of(3 + i % 2, chains, &(struct job){.elements = lengths[i], .kind = kind, .late = i % 3 == 2});
}
TEST(where_ranks_share_processors_they_do_not) { world_of(3, chains, &(struct job){.elements = 700, .shared = 1}); }
TEST(what_is_announced_does_not) { world_of(3, chains, &(struct job){.elements = 500000}); }
