/* test_aside.c - runs that work on copies of plain memory. HR_TEST_PROVIDER chooses the provider. */

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "programs.h"
#include "world.h"

enum { PAGE = 4096, ROUNDS = 10, WAIT = 30 };

static int maps_for_writing(struct rank *r) { return (world_caps(r) & HR_CAP_MAP_WRITE) != 0; }

struct job {
    uint64_t elements; /* a multiple of the ranks */
    int apart;         /* input and output */
    int mixed;         /* odd ranks have registered memory */
    uint64_t before;   /* elements in the same block that are not part of it, as many as behind */
};

/* As `direct`, but out of place: all of IN is in OUT first. */
static struct hr_program *of_a_copy(int rank, int size, uint64_t elements) {
    struct builder *b = calloc(1, sizeof *b);
    uint64_t bytes = elements * 4;
    add(b, (struct hr_instr){.op = HR_OP_COPY, .peer = -1, .src_buf = HR_BUF_IN, .dst_buf = HR_BUF_OUT, .len = bytes});
    uint32_t last = 0;
    for (int p = 0; p < size; p++) {
        if (p == rank) continue;
        add(b, (struct hr_instr){.op = HR_OP_SEND, .peer = p, .src_buf = HR_BUF_IN, .len = bytes});
        uint32_t come =
            add(b, (struct hr_instr){.op = HR_OP_RECV_REDUCE, .peer = p, .dst_buf = HR_BUF_OUT, .len = bytes});
        after(b, last, come);
        last = come;
    }
    struct hr_program *program = build(b, bytes, 0, size);
    free(b);
    return program;
}

/* No descriptor is left, and so no room: the buffers themselves do. The first test, before empty arenas are kept, whose
 * descriptors would be used again. */
static void *without_room(void *arg) {
    struct rank *r = arg;
    uint64_t elements = 2 << 20, wrong = 0, n = (uint64_t)r->size; /* more than the arenas of engines have */
    struct hr_program *p = of_a_copy(r->rank, r->size, elements);
    float *in = malloc(elements * 4), *out = malloc(elements * 4);
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    hr_program_set_aside(p, HR_ASIDE_IN | HR_ASIDE_OUT);
    for (uint64_t i = 0; i < elements; i++) in[i] = (float)(i % 1000 + (uint64_t)r->rank);
    CHECK_EQ(hr_run(r->comm, p, in, out, HR_FLOAT32, HR_SUM, 99, &req), HR_OK);
    CHECK_EQ(finish(r, &req, WAIT), HR_OK);
    for (uint64_t i = 0; i < elements; i++) wrong += out[i] != (float)(i % 1000 * n + n * (n - 1) / 2);
    CHECK_EQ(wrong, 0);
    CHECK_EQ(counted(r->engine, "runs_aside"), 0);
    hr_program_put(p);
    p = direct_on(r->rank, r->size, elements - 2, 1, 1); /* copies all the same, where nobody can map them */
    for (int round = 0; round < 2; round++) {
        CHECK_EQ(hr_run(r->comm, p, in, in, HR_INT32, HR_MAX, 99, &req), HR_OK);
        CHECK_EQ(finish(r, &req, WAIT), HR_OK);
    }
    for (uint64_t i = 0; i < elements - 2; i++) wrong += in[i] != (float)(i % 1000 + n - 1);
    CHECK_EQ(wrong, 0);
    hr_program_put(p);
    free(in);
    free(out);
    return NULL;
}
TEST(where_there_is_no_room_nothing_is_copied) {
    struct world w;
    struct rlimit was;
    world_open(&w, 3, NULL);
    int next = open("/dev/null", O_RDONLY | O_CLOEXEC);
    REQUIRE(next >= 0 && getrlimit(RLIMIT_NOFILE, &was) == 0);
    struct rlimit none = {(rlim_t)next, was.rlim_max};
    close(next);
    REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
    world_run(&w, without_room, NULL);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &was), 0);
    world_close(&w);
}

static void *allreduce(void *arg) {
    struct rank *r = arg;
    struct job *j = r->arg;
    int plain = !j->mixed || r->rank % 2 == 0;
    uint64_t all = j->elements + 2 * j->before, n = (uint64_t)r->size, wrong = 0, spoilt = 0;
    struct hr_program *p =
        j->apart ? of_a_copy(r->rank, r->size, j->elements) : direct(r->rank, r->size, j->elements, 1);
    hr_program_set_aside(p, HR_ASIDE_IN | HR_ASIDE_OUT);
    float *blocks[2];
    for (int k = 0; k < 2; k++)
        blocks[k] = plain ? malloc(all * 4) : hr_arena_alloc(all * 4, HR_ARENA_WRITABLE_BY_PEERS);
    float *in = blocks[0] + j->before, *out = j->apart ? blocks[1] + j->before : in;
    for (uint64_t i = 0; i < all; i++) blocks[0][i] = blocks[1][i] = -1;
    for (int round = 0; round < ROUNDS; round++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        for (uint64_t i = 0; i < j->elements; i++) in[i] = (float)(i % 1000 * n + (uint64_t)(r->rank + round));
        uint64_t aside = counted(r->engine, "runs_aside");
        CHECK_EQ(hr_run(r->comm, p, in, out, HR_FLOAT32, HR_SUM, 99, &req), HR_OK);
        CHECK_EQ(finish(r, &req, WAIT), HR_OK);
        CHECK_EQ(counted(r->engine, "runs_aside") - aside, plain);
        for (uint64_t i = 0; i < j->elements; i++) {
            wrong += out[i] != (float)(i % 1000 * n * n + n * (n - 1) / 2 + n * (uint64_t)round);
            if (j->apart) spoilt += in[i] != (float)(i % 1000 * n + (uint64_t)(r->rank + round));
        }
        for (uint64_t i = 0; i < j->before; i++)
            for (int k = 0; k < 2; k++) spoilt += blocks[k][i] != -1 || blocks[k][j->before + j->elements + i] != -1;
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(spoilt, 0);
    for (int k = 0; k < 2; k++) plain ? free(blocks[k]) : hr_arena_free(blocks[k]);
    hr_program_put(p);
    return NULL;
}
TEST(sums_of_copies_are_right_and_touch_nothing_else) {
    static const uint64_t lengths[] = {12, 12000, 48000, 300000}; /* the last is longer than what is kept */
    for (int i = 0; i < 16; i++) {
        struct job job = {.elements = lengths[i / 4], .apart = i & 1, .mixed = i >> 1 & 1, .before = (uint64_t)i * 7};
        world_of(i % 3 + 2, allreduce, &job);
    }
}

/* Who has what all get: its memory is read, and not written to; the others' is not read. */
static void *broadcast(void *arg) {
    struct rank *r = arg;
    uint64_t bytes = 16 * PAGE, wrong = 0;
    struct builder *b = calloc(1, sizeof *b);
    for (int p = 1; p < r->size && !r->rank; p++)
        add(b, (struct hr_instr){.op = HR_OP_SEND, .peer = p, .src_buf = HR_BUF_OUT, .len = bytes});
    if (r->rank) add(b, (struct hr_instr){.op = HR_OP_RECV, .peer = 0, .dst_buf = HR_BUF_OUT, .len = bytes});
    struct hr_program *p = build(b, bytes, 0, r->size);
    free(b);
    hr_program_set_aside(p, r->rank ? HR_ASIDE_OUT : HR_ASIDE_IN);
    uint8_t *x = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(x != MAP_FAILED);
    for (uint64_t i = 0; i < bytes; i++) x[i] = (uint8_t)(r->rank ? 0 : i * 7);
    if (!r->rank) REQUIRE(mprotect(x, bytes, PROT_READ) == 0);
    for (int round = 0; round < ROUNDS; round++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        if (r->rank) memset(x, 1, bytes);
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_UINT8, HR_SUM, 99, &req), HR_OK);
        CHECK_EQ(finish(r, &req, WAIT), HR_OK);
        for (uint64_t i = 0; i < bytes; i++) wrong += x[i] != (uint8_t)(i * 7);
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(counted(r->engine, "runs_aside"), ROUNDS);
    munmap(x, bytes);
    hr_program_put(p);
    return NULL;
}
TEST(what_is_read_alone_is_not_written_to) { world_of(3, broadcast, NULL); }

/* Rank 1 does not come, and what rank 0 had stays what it was. With others the program is good again. */
static void *alone(void *arg) {
    struct rank *r = arg;
    uint64_t elements = 1 << 14, wrong = 0;
    struct hr_program *p = direct(r->rank, 2, elements, 1);
    float *x = malloc(elements * 4);
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    uint64_t pair[2] = {0, 1}; /* their ids: world_open */
    struct hr_comm *other = NULL;
    hr_program_set_aside(p, HR_ASIDE_IN | HR_ASIDE_OUT);
    CHECK_EQ(hr_comm_open(r->engine, 77, pair, 2, r->rank, &other), HR_OK);
    for (uint64_t i = 0; i < elements; i++) x[i] = 3;
    if (r->rank == 0) {
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_FLOAT32, HR_SUM, 99, &req), HR_OK);
        CHECK_EQ(hr_wait(r->engine, &req, hr_now() + SECONDS(0.05), 0), HR_ERR_TIMEOUT);
        hr_cancel(r->engine, &req, HR_ERR_TIMEOUT);
        CHECK_EQ(req.status, HR_ERR_TIMEOUT);
        for (uint64_t i = 0; i < elements; i++) wrong += x[i] != 3;
    }
    req = (struct hr_request){.priority = HR_PRIORITY_DEFAULT};
    CHECK_EQ(hr_run(other, p, x, x, HR_FLOAT32, HR_SUM, 99, &req), HR_OK);
    CHECK_EQ(finish(r, &req, WAIT), HR_OK);
    for (uint64_t i = 0; i < elements; i++) wrong += x[i] != 6;
    CHECK_EQ(wrong, 0);
    hr_comm_close(other);
    hr_program_put(p);
    free(x);
    return NULL;
}
TEST(what_does_not_end_well_changes_nothing) { world_of(2, alone, NULL); }

/* Peers map the copies. */
static void *mapped(void *arg) {
    struct rank *r = arg;
    uint64_t elements = 1 << 16;
    struct hr_program *p = direct(r->rank, r->size, elements, 1);
    float *x = calloc(elements, 4);
    hr_program_set_aside(p, HR_ASIDE_IN | HR_ASIDE_OUT);
    for (int round = 0; round < ROUNDS; round++) {
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
        uint64_t returned = counted(r->engine, "transfers_returned");
        CHECK_EQ(hr_run(r->comm, p, x, x, HR_FLOAT32, HR_SUM, 99, &req), HR_OK);
        CHECK_EQ(finish(r, &req, WAIT), HR_OK);
        if (maps_for_writing(r)) CHECK_EQ(counted(r->engine, "transfers_returned") - returned, (uint64_t)r->size - 1);
    }
    hr_program_put(p);
    free(x);
    return NULL;
}
TEST(peers_write_results_to_the_copies) { world_of(4, mapped, NULL); }
