/* test_far.c - what peers read is stored through the cache or past it: how that is learned, and that it is the same. */

#include "core/far.h"
#include "programs.h"
#include "world.h"

#define LEN ((uint64_t)512 << 10)
#define MS ((int64_t)1000000)

/* Copies of LEN bytes, each of so many ns for a kilobyte, while they go through the cache; how many did. */
static int copies(struct hr_far *far, int64_t *now, int n, int64_t cost) {
    int through = 0;
    for (int i = 0; i < n; i++) {
        int64_t start = *now, past = start < far->until;
        *now += (past ? 80 : cost) * (int64_t)(LEN >> 10);
        if (!past) hr_far_copied(far, start, *now, LEN);
        through += !past;
    }
    return through;
}

TEST(slow_copies_in_a_row_are_far) {
    struct hr_far far = {0};
    int64_t now = 1;
    CHECK_EQ(copies(&far, &now, 1000, 55), 1000);
    CHECK_EQ(copies(&far, &now, 2, 220), 2);
    CHECK_EQ(copies(&far, &now, 1, 55), 1);
    CHECK_EQ(far.until, 0); /* two are not enough */
    CHECK_EQ(copies(&far, &now, 3, 220), 3);
    CHECK_EQ(far.until, now + HR_FAR_NS);
    CHECK_EQ(copies(&far, &now, 100, 220), 0);
    now = far.until;
    CHECK_EQ(copies(&far, &now, 100, 220), 1); /* one that is tried again, and it is far as before */
    now = far.until;
    CHECK_EQ(copies(&far, &now, 100, 55), 100); /* or not any more */
    copies(&far, &now, 3, 220);
    now = far.until + 2 * HR_FAR_NS; /* after a pause all begins anew: copies may have to come from memory */
    CHECK_EQ(copies(&far, &now, 100, 220), 3);
}

TEST(interrupted_and_short_copies_say_nothing) {
    struct hr_far far = {0};
    int64_t now = 1;
    copies(&far, &now, 2, 220);
    for (int i = 0; i < 10; i++) {
        hr_far_copied(&far, now, now + 3 * MS, LEN);
        hr_far_copied(&far, now, now + MS / 100, HR_FAR_MIN - 64);
    }
    CHECK_EQ(far.until, 0);
    copies(&far, &now, 1, 220);
    CHECK(far.until > now);
}

/* Two ranks: what is sent is copied to scratch first, and so is the sum. */
static struct hr_program *bounced(int rank, uint64_t elements) {
    struct builder *b = calloc(1, sizeof *b);
    uint64_t half = elements / 2 * 4, mine = half * (uint64_t)rank, other = half - mine;
    struct hr_instr send = {.op = HR_OP_SEND, .peer = !rank, .src_buf = HR_BUF_TMP, .len = half},
                    copy = {.op = HR_OP_COPY, .peer = -1, .src_buf = HR_BUF_OUT, .dst_buf = HR_BUF_TMP, .len = half};
    copy.src_off = other;
    uint32_t copied = add(b, copy), sent = add(b, send);
    after(b, copied, sent);
    uint32_t lent = add(
        b,
        (struct hr_instr){.op = HR_OP_BORROW, .peer = !rank, .dst_buf = HR_BUF_TMP, .dst_off = 2 * half, .len = half});
    uint32_t sum =
        add(b, (struct hr_instr){
                   .op = HR_OP_REDUCE, .peer = -1, .dst_buf = HR_BUF_TMP, .dst_off = half, .nref = 2, .len = half});
    b->refs[b->nref++] = (struct hr_ref){HR_BUF_OUT, 0, mine};
    b->refs[b->nref++] = (struct hr_ref){HR_BUF_BORROWED, 0, lent};
    after(b, lent, sum);
    send.tag = 1;
    send.src_off = half;
    after(b, sum, add(b, send));
    uint32_t back = add(b, (struct hr_instr){.op = HR_OP_COPY,
                                             .peer = -1,
                                             .src_buf = HR_BUF_TMP,
                                             .src_off = half,
                                             .dst_buf = HR_BUF_OUT,
                                             .dst_off = mine,
                                             .len = half});
    after(b, sum, back);
    uint32_t come =
        add(b, (struct hr_instr){
                   .op = HR_OP_RECV, .peer = !rank, .tag = 1, .dst_buf = HR_BUF_OUT, .dst_off = other, .len = half});
    after(b, copied, come);
    struct hr_program *program = build(b, elements * 4, 3 * half, 2);
    free(b);
    hr_program_set_aside(program, HR_ASIDE_WITHIN);
    return program;
}

static void *sums(void *arg) {
    struct rank *r = arg;
    uint64_t elements = 300000, wrong = 0;
    struct hr_program *p = bounced(r->rank, elements);
    float *x = malloc(elements * 4);
    for (int round = 0; round < 6; round++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        p->far = (struct hr_far){.until = (round + r->rank) % 3 ? INT64_MAX : 0};
        for (uint64_t i = 0; i < elements; i++) x[i] = (float)(i % 1000) + (float)(r->rank * 7 + round);
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_FLOAT32, HR_SUM, 99, &req), HR_OK);
        CHECK_EQ(finish(r, &req, 30), HR_OK);
        for (uint64_t i = 0; i < elements; i++) wrong += x[i] != (float)(i % 1000 * 2) + (float)(7 + 2 * round);
    }
    CHECK_EQ(wrong, 0);
    hr_program_put(p);
    free(x);
    return NULL;
}
TEST(results_are_the_same) {
    struct world w;
    world_open(&w, 2, NULL);
    world_run(&w, sums, NULL);
    world_close(&w);
}
