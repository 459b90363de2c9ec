/* conformance_memory.c - reads, writes, notifications, atomics, bounds, revoking, and memory that peers map. */

#include "conformance.h"

#include <errno.h>
#include <fcntl.h>

enum { WINDOW_BYTES = 1 << 20 };
static const uint32_t all_access = HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_ATOMIC;

/* Sizes and offsets around what hardware and software like. */
static const size_t spots[][2] = {
    {0, 1},           {1, 7},       {8, 8},         {63, 2},         {100, 0},
    {4095, 2},        {4096, 4096}, {12345, 54321}, {65536, 300000}, {WINDOW_BYTES - 1, 1},
    {0, WINDOW_BYTES}};
enum { SPOTS = sizeof spots / sizeof spots[0] };

TEST(read) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_READ);
    WINDOW(window);
    char *local = malloc(WINDOW_BYTES + 1);
    REQUIRE(window_open(&rig, &window, b, a, WINDOW_BYTES, HR_ACCESS_REMOTE_READ) == HR_OK);
    for (size_t i = 0; i < SPOTS; i++) {
        size_t off = spots[i][0], len = spots[i][1];
        struct hr_rma rma = {.local = local, .len = len, .remote = &window.rmem, .offset = off};
        fill(window.mem, WINDOW_BYTES, i);
        memset(local, 0x55, WINDOW_BYTES + 1);
        CHECK_EQ(rma_run(&rig, a, RMA_READ, &rma), HR_OK);
        CHECK_MEM(local, window.mem + off, len);
        CHECK_EQ(local[len], 0x55); /* and not a byte more */
    }
    free(local);
}

TEST(write) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_WRITE);
    WINDOW(window);
    char *local = malloc(WINDOW_BYTES), *expected = calloc(1, WINDOW_BYTES);
    REQUIRE(window_open(&rig, &window, b, a, WINDOW_BYTES, HR_ACCESS_REMOTE_WRITE) == HR_OK);
    memset(window.mem, 0, WINDOW_BYTES);
    for (size_t i = 0; i < SPOTS; i++) {
        size_t off = spots[i][0], len = spots[i][1];
        struct hr_rma rma = {.local = local, .len = len, .remote = &window.rmem, .offset = off};
        rma.with_notify = 1;
        rma.value = 0xabcdef0100 + i;
        fill(local, len, i + 77);
        memcpy(expected + off, local, len);
        CHECK_EQ(rma_run(&rig, a, RMA_WRITE, &rma), HR_OK);
        WAIT(rig, b->notifies == i + 1);
        CHECK_EQ(b->notify_value, rma.value);
        CHECK_EQ(b->notify_bytes, len);
        CHECK_MEM(window.mem, expected, WINDOW_BYTES);
    }
    free(local);
    free(expected);
}

/* ---- order ---- */

enum { ROUNDS = 500, BLOCK = 3000 };
enum then { THEN_MESSAGE, THEN_NOTIFY, THEN_ATOMIC };

static void look_at_block(struct end *end, uint64_t round) {
    struct window *window = end->arg;
    filled(window->mem + round % 16 * BLOCK, BLOCK, round);
}
static void block_message(struct end *end, uint64_t seq) { look_at_block(end, seq); }
static void block_notify(struct end *end, uint64_t value, size_t nbytes) {
    CHECK_EQ(value, end->notifies - 1); /* in the order of posting */
    CHECK_EQ(nbytes, BLOCK);
    look_at_block(end, value);
}

static void write_then(enum then then) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, then == THEN_ATOMIC ? HR_CAP_ATOMIC : HR_CAP_WRITE);
    WINDOW(window);
    struct op *writes[ROUNDS], *send = op_new(64);
    REQUIRE(window_open(&rig, &window, b, a, 16 * BLOCK + 8,
                        then == THEN_ATOMIC ? all_access : HR_ACCESS_REMOTE_WRITE) == HR_OK);
    b->arg = &window;
    b->on_recv = block_message;
    b->on_notify = block_notify;
    for (uint64_t i = 0; i < ROUNDS; i++) {
        struct hr_rma rma = {
            .len = BLOCK, .remote = &window.rmem, .offset = i % 16 * BLOCK, .with_notify = then == THEN_NOTIFY};
        struct hr_mem reg;
        hr_status status;
        writes[i] = op_new(BLOCK);
        fill(writes[i]->buf, BLOCK, i);
        rma.local = writes[i]->buf;
        rma.value = i;
        rma.cookie = writes[i];
        if (!(rig_caps(&rig) & HR_CAP_ANYMEM)) {
            REQUIRE(a->side->domain->ops->mem_register(a->side->domain, rma.local, BLOCK, 0, &reg) == HR_OK);
            rma.mem = &reg;
        }
        writes[i]->state = OP_OPEN;
        WAIT(rig, (status = a->side->domain->ops->post_write(a->ep, &rma)) != HR_AGAIN);
        CHECK(status == HR_OK || status == HR_INPROGRESS);
        if (status == HR_OK) {
            writes[i]->state = OP_FREE;
            memset(writes[i]->buf, 0xee, BLOCK);
        }
        if (then == THEN_ATOMIC) {
            uint64_t before;
            struct hr_atomic add = {.op = HR_ATOMIC_FETCH_ADD, .result = &before, .remote = &window.rmem};
            add.offset = 16 * BLOCK;
            CHECK_EQ(atomic_run(&rig, a, &add), HR_OK);
            look_at_block(b, i);
        } else if (then == THEN_MESSAGE) {
            WAIT(rig, send->state != OP_OPEN);
            WAIT(rig, (status = end_send(a, 64, send)) != HR_AGAIN);
            CHECK(!hr_is_error(status));
        }
        /* A block is written again only when it was looked at. */
        WAIT(rig, then == THEN_ATOMIC || i < 12 || b->notifies + b->next_rx >= i - 12);
        if (rma.mem) {
            WAIT(rig, writes[i]->state != OP_OPEN);
            a->side->domain->ops->mem_deregister(a->side->domain, &reg);
        }
    }
    WAIT(rig, then == THEN_ATOMIC || (then == THEN_NOTIFY ? b->notifies : b->next_rx) == ROUNDS);
    for (int i = 0; i < ROUNDS; i++) WAIT(rig, writes[i]->state != OP_OPEN);
    b->arg = NULL;
    b->on_recv = NULL;
    b->on_notify = NULL;
}

TEST(write_is_visible_before_a_later_message) { write_then(THEN_MESSAGE); }
TEST(write_is_visible_before_its_notification) { write_then(THEN_NOTIFY); }
TEST(write_is_visible_before_a_later_atomic) { write_then(THEN_ATOMIC); }

/* ---- atomics ---- */

TEST(atomics_add_up) {
    enum { N = 300 };
    RIG(rig);
    PAIR(rig, a, b);
    PAIR(rig, a2, b2);
    NEED_CAP(rig, HR_CAP_ATOMIC);
    WINDOW(window);
    uint8_t seen[2 * N + 1] = {0};
    struct hr_rmem second;
    struct hr_desc desc;
    uint64_t *counter;
    REQUIRE(window_open(&rig, &window, b, a, 4096, all_access) == HR_OK);
    REQUIRE(share(&rig, b2, a2, &window.reg, window.mem, 4096, &desc, &second) == HR_OK);
    counter = (uint64_t *)(window.mem + 64);
    __atomic_store_n(counter, 0, __ATOMIC_SEQ_CST);
    for (int i = 0; i < 2 * N; i++) {
        uint64_t before = UINT64_MAX;
        struct hr_atomic add = {.op = HR_ATOMIC_FETCH_ADD, .result = &before, .offset = 64, .operand = 1};
        add.remote = i & 1 ? &second : &window.rmem;
        CHECK_EQ(atomic_run(&rig, i & 1 ? a2 : a, &add), HR_OK);
        if (i % 3 == 0 && i < N) __atomic_fetch_add(counter, 0, __ATOMIC_SEQ_CST); /* the owner touches it as well */
        CHECK(before < 2 * N && !seen[before]);                                    /* every value is handed out once */
        if (before < 2 * N) seen[before] = 1;
    }
    CHECK_EQ(__atomic_load_n(counter, __ATOMIC_SEQ_CST), 2 * N);
    a2->side->domain->ops->mem_release(a2->ep, &second);
}

TEST(atomic_compare_and_swap) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_ATOMIC);
    WINDOW(window);
    uint64_t before = 0, *at;
    struct hr_atomic swap = {.op = HR_ATOMIC_CMP_SWAP, .result = &before, .offset = 8, .operand = 5, .compare = 3};
    REQUIRE(window_open(&rig, &window, b, a, 4096, all_access) == HR_OK);
    swap.remote = &window.rmem;
    at = (uint64_t *)(window.mem + 8);
    *at = 4;
    CHECK_EQ(atomic_run(&rig, a, &swap), HR_OK);
    CHECK_EQ(before, 4);
    CHECK_EQ(*at, 4);
    *at = 3;
    CHECK_EQ(atomic_run(&rig, a, &swap), HR_OK);
    CHECK_EQ(before, 3);
    CHECK_EQ(*at, 5);
    swap.offset = 12; /* not aligned */
    CHECK(hr_is_error(atomic_run(&rig, a, &swap)));
    swap.offset = 4096 - 4;
    CHECK(hr_is_error(atomic_run(&rig, a, &swap)));
    CHECK_EQ(*at, 5);
}

/* ---- bounds ---- */

static void message_passes(struct rig *rig, struct end *a, struct end *b) {
    struct op *op = op_new(32);
    WAIT(*rig, end_send(a, 32, op) != HR_AGAIN);
    WAIT(*rig, b->next_rx == a->next_tx && op->state != OP_OPEN);
    CHECK(!a->losses && !b->losses);
}

/* The window is the middle of a registration, so that nothing but its own bounds keeps an access out. */
TEST(access_outside_a_window_fails_alone) {
    enum { LEN = 4096 };
    static const uint64_t wrong[][2] = {{LEN, 1},     {LEN - 1, 2}, {0, LEN + 1},
                                        {-16ull, 32}, {-16ull, 8},  {1ull << 63, 8}};
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_READ);
    WINDOW(window);
    char local[2 * LEN];
    struct hr_desc desc;
    struct hr_rmem part;
    uint32_t access = HR_ACCESS_REMOTE_READ | (rig_caps(&rig) & HR_CAP_WRITE ? HR_ACCESS_REMOTE_WRITE : 0);
    REQUIRE(window_open(&rig, &window, b, a, 3 * LEN, access) == HR_OK);
    REQUIRE(share(&rig, b, a, &window.reg, window.mem + LEN, LEN, &desc, &part) == HR_OK);
    fill(window.mem, 3 * LEN, 1);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct hr_rma rma = {.local = local, .len = wrong[i][1], .remote = &part, .offset = wrong[i][0]};
        memset(local, 0x66, sizeof local);
        CHECK_EQ(rma_run(&rig, a, RMA_READ, &rma), HR_ERR_ACCESS);
        for (size_t n = 0; n < sizeof local; n++)
            if (local[n] != 0x66) CHECK(!"nothing was read");
        if (access & HR_ACCESS_REMOTE_WRITE) CHECK_EQ(rma_run(&rig, a, RMA_WRITE, &rma), HR_ERR_ACCESS);
    }
    filled(window.mem, 3 * LEN, 1);
    a->side->domain->ops->mem_release(a->ep, &part);
    message_passes(&rig, a, b);
}

/* The right that was not given cannot be had: export or import refuses, or the operation fails. */
TEST(access_that_was_not_granted) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_WRITE);
    WINDOW(readable);
    WINDOW(writable);
    char local[64] = {0};
    struct hr_rma rma = {.local = local, .len = sizeof local};
    hr_status status;
    if (window_open(&rig, &readable, b, a, 4096, HR_ACCESS_REMOTE_READ) == HR_OK) {
        fill(readable.mem, 4096, 5);
        rma.remote = &readable.rmem;
        status = rma_run(&rig, a, RMA_WRITE, &rma);
        CHECK(status == HR_OK || status == HR_ERR_ACCESS || status == HR_ERR_UNSUPPORTED);
        message_passes(&rig, a, b);
        filled(readable.mem, 4096, 5);
    }
    if (rig_caps(&rig) & HR_CAP_READ && window_open(&rig, &writable, b, a, 4096, HR_ACCESS_REMOTE_WRITE) == HR_OK) {
        rma.remote = &writable.rmem;
        CHECK_EQ(rma_run(&rig, a, RMA_READ, &rma), HR_ERR_ACCESS);
        message_passes(&rig, a, b);
    }
}

TEST(a_descriptor_that_was_made_up) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_READ);
    for (uint64_t seed = 0; seed < 50; seed++) {
        char local[64];
        struct hr_desc desc;
        struct hr_rmem rmem;
        struct hr_rma rma = {.local = local, .len = sizeof local, .remote = &rmem};
        fill(&desc, sizeof desc, seed);
        if (a->side->domain->ops->mem_import(a->ep, &desc, &rmem) != HR_OK) continue;
        CHECK(hr_is_error(rma_run(&rig, a, RMA_READ, &rma)));
        a->side->domain->ops->mem_release(a->ep, &rmem);
    }
    message_passes(&rig, a, b);
}

TEST(export_outside_a_registration) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_READ);
    WINDOW(window);
    struct hr_desc desc;
    const struct hr_provider *ops = b->side->domain->ops;
    REQUIRE(window_open(&rig, &window, b, a, 8192, HR_ACCESS_REMOTE_READ) == HR_OK);
    CHECK(hr_is_error(ops->mem_export(b->ep, &window.reg, window.mem + 1, 8192, &desc)));
    CHECK(hr_is_error(ops->mem_export(b->ep, &window.reg, window.mem - 64, 64, &desc)));
    CHECK(hr_is_error(ops->mem_export(b->ep, &window.reg, window.mem + 8192, 1, &desc)));
    CHECK(hr_is_error(ops->mem_export(b->ep, &window.reg, window.mem + 64, SIZE_MAX - 32, &desc)));
}

/* ---- revoking ---- */

static int write_without_end(struct side *side) {
    struct window *window = side->arg;
    struct op *op = window->peer->arg;
    struct hr_rma rma = {.local = op->buf, .len = op->cap, .remote = &window->rmem, .cookie = op};
    hr_status status;
    if (op->state == OP_OPEN) return 0;
    op->buf[0]++; /* so that a late write shows */
    op->state = OP_OPEN;
    status = side->domain->ops->post_write(window->peer->ep, &rma);
    if (status != HR_INPROGRESS) op->state = OP_FREE;
    return status == HR_OK;
}

static void late_writes(struct rig *rig, struct end *a, struct end *b, void (*cut)(struct window *window)) {
    char *before = malloc(65536);
    WINDOW(window);
    REQUIRE(window_open(rig, &window, b, a, 65536, HR_ACCESS_REMOTE_WRITE) == HR_OK);
    a->arg = op_new(65536);
    memset(window.mem, 0, 65536);
    rig->side[0].arg = &window;
    rig->side[0].work = write_without_end;
    side_kick(&rig->side[0]);
    WAIT(*rig, window.mem[0] != 0);
    for (int i = 0; i < 20; i++) rig_pump(rig);
    cut(&window);
    memcpy(before, window.mem, 65536);
    rig_pump_for(rig, 50);
    CHECK_MEM(window.mem, before, 65536);
    rig->side[0].work = NULL;
    rig_pump_for(rig, 20);
    CHECK_MEM(window.mem, before, 65536);
    free(before);
}

static void cut_by_deregister(struct window *window) {
    window->owner->side->domain->ops->mem_deregister(window->owner->side->domain, &window->reg);
    window->reg.addr = NULL;
}
static void cut_by_abort(struct window *window) { end_abort(window->owner); }
/* The peer must be free to answer; where it is not driven meanwhile, the provider may say that it does not know. */
static void cut_by_quiet(struct window *window) {
    struct end *owner = window->owner;
    if (settings.threads) pthread_mutex_unlock(&window->peer->side->lock);
    hr_status status = owner->side->domain->ops->mem_quiet(owner->ep, &window->reg);
    if (settings.threads) { /* always side 0 first */
        pthread_mutex_unlock(&owner->side->lock);
        side_take(window->peer->side);
        side_take(owner->side);
    }
    CHECK(status == HR_OK || (status == HR_ERR_UNSUPPORTED && !settings.threads));
    if (status != HR_OK) end_abort(owner);
    cut_by_deregister(window);
}

TEST(nothing_is_written_after_deregister) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_WRITE);
    NEED_CAP(rig, HR_CAP_REVOKE);
    NEED_CAP(rig, HR_CAP_ANYMEM);
    late_writes(&rig, a, b, cut_by_deregister);
    WAIT(rig, ((struct op *)a->arg)->state != OP_OPEN);
    message_passes(&rig, a, b);
}

TEST(nothing_is_written_after_quiet) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_WRITE);
    NEED_CAP(rig, HR_CAP_ANYMEM);
    late_writes(&rig, a, b, cut_by_quiet);
    if (b->aborted) {
        WAIT(rig, a->losses);
        return;
    }
    WAIT(rig, ((struct op *)a->arg)->state != OP_OPEN);
    message_passes(&rig, a, b);
}

TEST(nothing_is_written_after_abort) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_WRITE);
    NEED_CAP(rig, HR_CAP_ANYMEM);
    late_writes(&rig, a, b, cut_by_abort);
    WAIT(rig, a->losses);
}

TEST(an_old_key_opens_nothing) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_READ);
    NEED_CAP(rig, HR_CAP_REVOKE);
    WINDOW(window);
    char local[128];
    struct hr_rma rma = {.local = local, .len = sizeof local, .remote = &window.rmem};
    struct hr_domain *domain = b->side->domain;
    REQUIRE(window_open(&rig, &window, b, a, 4096, HR_ACCESS_REMOTE_READ) == HR_OK);
    CHECK_EQ(rma_run(&rig, a, RMA_READ, &rma), HR_OK);
    domain->ops->mem_deregister(domain, &window.reg);
    /* The same memory, registered anew: the old descriptor must not come to life again. */
    CHECK_EQ(domain->ops->mem_register(domain, window.mem, 4096, HR_ACCESS_REMOTE_READ, &window.reg), HR_OK);
    CHECK_EQ(rma_run(&rig, a, RMA_READ, &rma), HR_ERR_ACCESS);
    message_passes(&rig, a, b);
}

/* ---- mapped and plain memory ---- */

TEST(mapped_memory_is_shared_and_read_only) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_MAP);
    WINDOW(window);
    int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    REQUIRE(window_open(&rig, &window, b, a, 100000, HR_ACCESS_REMOTE_READ) == HR_OK);
    REQUIRE(window.rmem.ptr);
    for (uint64_t i = 0; i < 20; i++) { /* the owner's later stores are seen: no copy */
        fill(window.mem, 100000, i);
        CHECK_MEM(window.rmem.ptr, window.mem, 100000);
    }
    /* The kernel tells whether a store would fault, without a fault. */
    CHECK_EQ(read(zero, (void *)window.rmem.ptr, 1), -1);
    CHECK_EQ(errno, EFAULT);
    filled(window.mem, 100000, 19);
    close(zero);
}

TEST(mapped_memory_is_written_to_until_the_owner_is_left_alone) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_MAP_WRITE);
    WINDOW(read);
    WINDOW(window);
    REQUIRE(window_open(&rig, &read, b, a, 100000, HR_ACCESS_REMOTE_READ) == HR_OK);
    REQUIRE(window_open(&rig, &window, b, a, 100000, HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_MAP) == HR_OK);
    CHECK(!read.rmem.out); /* that was not said of it */
    REQUIRE(window.rmem.out && window.rmem.out == window.rmem.ptr);
    fill(window.rmem.out, 100000, 7);
    CHECK(filled(window.mem, 100000, 7));
    CHECK_EQ(b->side->domain->ops->mem_quiet(b->ep, &window.reg), HR_OK);
    b->side->domain->ops->mem_deregister(b->side->domain, &window.reg);
    window.reg.addr = NULL;
    fill(window.mem, 100000, 8);
    fill(window.rmem.out, 100000, 9); /* too late: a process that goes on where it was stopped */
    CHECK(filled(window.mem, 100000, 8));
}

TEST(importing_again_is_cheap_and_arenas_come_and_go) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_READ);
    WINDOW(window);
    struct hr_rmem rmem;
    int64_t start;
    REQUIRE(window_open(&rig, &window, b, a, WINDOW_BYTES, HR_ACCESS_REMOTE_READ) == HR_OK);
    start = rig_now();
    for (int i = 0; i < 2000; i++) {
        CHECK_EQ(a->side->domain->ops->mem_import(a->ep, &window.desc, &rmem), HR_OK);
        CHECK(rmem.ptr == window.rmem.ptr);
        a->side->domain->ops->mem_release(a->ep, &rmem);
    }
    CHECK(rig_now() - start < 1000000000);
    window_close(&window);
    for (uint64_t i = 0; i < 8; i++) {
        char local[256];
        struct hr_rma rma = {.local = local, .len = sizeof local, .remote = &window.rmem, .offset = 3000 * i};
        REQUIRE(window_open(&rig, &window, b, a, (i + 1) << 20, HR_ACCESS_REMOTE_READ) == HR_OK);
        fill(window.mem, window.len, i);
        CHECK_EQ(rma_run(&rig, a, RMA_READ, &rma), HR_OK);
        CHECK_MEM(local, window.mem + rma.offset, sizeof local);
        window_close(&window);
    }
}

TEST(plain_memory) {
    RIG(rig);
    PAIR(rig, a, b);
    NEED_CAP(rig, HR_CAP_READ);
    enum { N = 300000 };
    char *memory = malloc(N), *local = malloc(N);
    struct hr_domain *domain = b->side->domain;
    struct hr_mem reg;
    struct hr_desc desc;
    struct hr_rmem rmem;
    hr_status status;
    fill(memory, N, 3);
    REQUIRE(domain->ops->mem_register(domain, memory, N, HR_ACCESS_REMOTE_READ, &reg) == HR_OK);
    status = share(&rig, b, a, &reg, memory + 5, N - 5, &desc, &rmem);
    if (status == HR_OK) {
        struct hr_rma rma = {.local = local, .len = N - 10, .remote = &rmem, .offset = 3};
        CHECK_EQ(rma_run(&rig, a, RMA_READ, &rma), HR_OK);
        CHECK_MEM(local, memory + 8, N - 10);
        a->side->domain->ops->mem_release(a->ep, &rmem);
    }
    CHECK(status == HR_OK || status == HR_ERR_UNSUPPORTED);
    domain->ops->mem_deregister(domain, &reg);
    free(memory);
    free(local);
    if (status != HR_OK) SKIP("this peer's plain memory cannot be reached");
}
