/* test_same.c - sends of a program whose payload goes to several peers: which those are, and that all get it as it was.
 * HR_TEST_PROVIDER chooses the provider. */

#include "programs.h"
#include "providers/shm/shm.h"
#include "world.h"

enum { ROUNDS = 60, WAIT = 30 };

static struct hr_instr to(int peer, uint64_t off, uint64_t len) {
    return (struct hr_instr){.op = HR_OP_SEND, .peer = peer, .src_buf = HR_BUF_OUT, .src_off = off, .len = len};
}

TEST(which_sends_are_the_same) {
    struct builder *b = calloc(1, sizeof *b);
    struct hr_instr nop = {.op = HR_OP_NOP, .peer = -1},
                    come = {.op = HR_OP_RECV, .peer = 1, .dst_buf = HR_BUF_OUT, .dst_off = 256, .len = 64};
    add(b, to(1, 0, 64)), add(b, to(2, 0, 64)), add(b, to(3, 0, 64));     /* 0 to 2: the same */
    add(b, to(1, 64, 64)), add(b, to(2, 64, 64)), add(b, to(1, 64, 64));  /* 3, 4: others; 5: to one that has it */
    add(b, to(2, 0, 32)), add(b, to(3, 32, 64));                          /* 6, 7: of other bytes */
    uint32_t came = add(b, come), none = add(b, nop);                     /* 8, 9 */
    add(b, to(2, 256, 64)), add(b, to(3, 256, 64));                       /* 10, 11: of what has come */
    add(b, to(1, 256, 64)), add(b, to(2, 0, 64)), add(b, to(3, 256, 64)); /* 12, 13: after another; 14: after both */
    for (uint32_t i = 10; i < 12; i++) after(b, came, i);
    for (uint32_t i = 12; i < 14; i++) after(b, none, i);
    after(b, came, 14), after(b, none, 14);
    struct hr_program *p = build(b, 512, 0, 4);
    static const uint32_t expected[] = {1, 1, 1, 2, 2, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0};
    for (uint32_t i = 0; i < 15; i++) CHECK_EQ(p->same[i], expected[i]);
    CHECK_EQ(p->nsame, 3);
    hr_program_put(p);
    free(b);
}

/* Each sends its vector to all, and sums what comes in the order of ranks; then the sum goes to all others once more,
 * from rank 0, over what they have. In place. */
static struct hr_program *exchange(int rank, int size, uint64_t bytes) {
    struct builder *b = calloc(1, sizeof *b);
    struct hr_instr sum = {.op = HR_OP_REDUCE, .peer = -1, .dst_buf = HR_BUF_OUT, .len = bytes, .nref = (uint32_t)size};
    for (int p = 0; p < size; p++) {
        struct hr_instr come = {.op = HR_OP_RECV, .peer = p, .dst_buf = HR_BUF_TMP, .len = bytes};
        come.dst_off = bytes * (uint64_t)p;
        if (p != rank) add(b, to(p, 0, bytes)), add(b, come);
        b->refs[b->nref++] = (struct hr_ref){p == rank ? HR_BUF_OUT : HR_BUF_TMP, 0, p == rank ? 0 : come.dst_off};
    }
    uint32_t n = b->n, reduce = add(b, sum);
    for (uint32_t i = 0; i < n; i++) after(b, i, reduce);
    for (int p = rank ? 0 : 1; p < (rank ? 1 : size); p++) {
        struct hr_instr again = {.op = HR_OP_RECV, .peer = 0, .dst_buf = HR_BUF_OUT, .len = bytes};
        if (!rank) again = to(p, 0, bytes);
        again.tag = 1;
        after(b, reduce, add(b, again));
    }
    struct hr_program *p = build(b, bytes, bytes * (uint64_t)size, size);
    free(b);
    return p;
}

struct job {
    uint64_t elements;
    int arena, shared, late; /* in registered memory; ranks share cores; one of them is late */
};

static uint64_t on_board(struct rank *r) {
    for (int d = 0; d < r->engine->ndomains; d++)
        if (!strcmp(r->engine->domains[d]->ops->name, "shm")) return shm_domain(r->engine->domains[d])->board.tail;
    return 0;
}

static void *exchanges(void *arg) {
    struct rank *r = arg;
    struct job *j = r->arg;
    uint64_t n = (uint64_t)r->size, bytes = j->elements * 4, wrong = 0;
    struct hr_program *p = exchange(r->rank, r->size, bytes);
    float *x = j->arena ? hr_arena_alloc(bytes, 0) : malloc(bytes);
    hr_engine_set_locality(r->engine, r->size, j->shared ? 1 : r->size, 0);
    for (uint64_t round = 0; round < ROUNDS; round++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        for (uint64_t i = 0; i < j->elements; i++) x[i] = (float)(i % 1000 + (uint64_t)r->rank + round);
        if (j->late && r->rank == (int)round % r->size) usleep(500);
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_FLOAT32, HR_SUM, 7, &req), HR_OK);
        CHECK_EQ(finish(r, &req, WAIT), HR_OK);
        for (uint64_t i = 0; i < j->elements; i++) wrong += x[i] != (float)(n * (i % 1000 + round) + n * (n - 1) / 2);
    }
    CHECK_EQ(wrong, 0);
    uint64_t shown = on_board(r);
    if (strcmp(world_provider(), "shm") || bytes < SHM_SHOWN)
        CHECK_EQ(shown, 0);
    else if (bytes <= 8192 || (!j->arena && bytes <= 32768)) /* what goes unasked */
        CHECK(shown >= ROUNDS * bytes / 2);                  /* but for what found others late */
    j->arena ? hr_arena_free(x) : free(x);
    hr_program_put(p);
    return NULL;
}

TEST(all_get_it_as_it_was) {
    static const uint64_t lengths[] = {1, 511, 512, 1024, 2048, 8192, 20000};
    for (int i = 0; i < 7; i++)
        for (int kind = 0; kind < 8; kind++)
            world_of(3 + (i + kind) % 2, exchanges,
                     &(struct job){lengths[i], .arena = kind & 1, .shared = kind >> 1 & 1, .late = kind >> 2});
}
