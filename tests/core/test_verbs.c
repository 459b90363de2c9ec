/* test_verbs.c - the verbs provider on the simulated device: copies, pinned memory, injected faults, taking back. */

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hr/fault.h"
#include "providers/verbs/sim.h"
#include "verbs_rig.h"

/* ---- copies ---- */

enum { LEN = 1 << 20 };

static void move(struct pair *p, void *local, const struct hr_rmem *rmem) {
    int notifies = p->cb.notifies;
    struct hr_rma write = {.local = local, .len = LEN, .remote = rmem, .with_notify = 1, .value = 7, .cookie = p};
    struct hr_rma read = {.local = local, .len = LEN, .remote = rmem, .cookie = p};
    p->ca.dones = 0;
    CHECK_EQ(verbs->post_write(p->ca.ep, &write), HR_INPROGRESS);
    RUN(p->a, p->b, p->ca.dones == 1 && p->cb.notifies == notifies + 1);
    CHECK_EQ(p->cb.nbytes, LEN);
    CHECK_EQ(verbs->post_read(p->ca.ep, &read), HR_INPROGRESS);
    RUN(p->a, p->b, p->ca.dones == 2);
    CHECK_EQ(p->ca.done_status, HR_OK);
}

TEST(arenas_are_registered_once_and_not_copied) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    uint8_t *here = hr_arena_alloc(LEN, 0), *there = hr_arena_alloc(LEN, HR_ARENA_WRITABLE_BY_PEERS);
    pair_open(&p, NULL);
    for (int round = 1; round <= 3; round++) {
        share(&p, there, LEN, &mem, &rmem);
        memset(here, round, LEN);
        move(&p, here, &rmem);
        CHECK_MEM(there, here, LEN);
        CHECK_EQ(inside(&p.a)->counts.registered, 1);
        CHECK_EQ(inside(&p.b)->counts.registered, 1);
        CHECK_EQ(inside(&p.a)->counts.direct, 2ull * LEN * (unsigned)round);
        CHECK_EQ(inside(&p.a)->counts.staged, 0);
        verbs->mem_deregister(p.b.domain, &mem);
    }
    pair_close(&p);
    hr_arena_free(here);
    hr_arena_free(there);
}

TEST(other_memory_goes_through_buffers) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    uint8_t *here = malloc(LEN), *there = hr_arena_alloc(LEN, HR_ARENA_WRITABLE_BY_PEERS);
    pair_open(&p, NULL);
    share(&p, there, LEN, &mem, &rmem);
    memset(here, 3, LEN);
    move(&p, here, &rmem);
    CHECK_MEM(there, here, LEN);
    CHECK_EQ(inside(&p.a)->counts.registered, 0);
    CHECK_EQ(inside(&p.a)->counts.direct, 0);
    CHECK_EQ(inside(&p.a)->counts.staged, 2 * LEN);
    verbs->mem_deregister(p.b.domain, &mem);
    pair_close(&p);
    hr_arena_free(there);
    free(here);
}

/* The first of a kind says the upper half of its value, in a message; the others are one work request each. */
TEST(notices_of_long_values_are_immediate_data) {
    static const uint64_t uppers[] = {0, 0, 0x8000000100000000, 0x8000000100000000, 0x8000000100000000, 0};
    static const int works[] = {1, 1, 2, 1, 1, 2};
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    uint8_t *here = malloc(LEN), *there = hr_arena_alloc(LEN, HR_ARENA_WRITABLE_BY_PEERS);
    pair_open(&p, NULL);
    share(&p, there, LEN, &mem, &rmem);
    const struct hr_verbs_ep *from = (const struct hr_verbs_ep *)p.ca.ep, *to = (const struct hr_verbs_ep *)p.cb.ep;
    for (int i = 0; i < 6; i++) {
        size_t len = i % 2 ? 8 : 4096; /* inline; by a buffer */
        struct hr_rma write = {
            .local = here, .len = len, .remote = &rmem, .offset = (size_t)i * 4096, .with_notify = 1};
        uint32_t before = from->tail;
        memset(here, i + 1, len);
        write.value = uppers[i] | 0xfffffff0u | (unsigned)i;
        CHECK_EQ(verbs->post_write(p.ca.ep, &write), HR_OK);
        memset(here, 0, len);
        CHECK_EQ(from->tail - before, works[i]);
        RUN(p.a, p.b, p.cb.notifies == i + 1);
        CHECK_EQ(p.cb.value, write.value);
        CHECK_EQ(p.cb.nbytes, len);
        CHECK_EQ(there[i * 4096], i + 1);
        CHECK_EQ(there[(size_t)i * 4096 + len - 1], i + 1);
    }
    CHECK_EQ(from->upper_out, to->upper_in);
    verbs->mem_deregister(p.b.domain, &mem);
    pair_close(&p);
    hr_arena_free(there);
    free(here);
}

TEST(pinned_memory_is_bounded) {
    struct node n;
    struct hr_mem first, second;
    char detail[256];
    uint8_t *plain = malloc(2 << 16), *arena = hr_arena_alloc(LEN, 0);
    REQUIRE(node_open(&n, 1, "sim", "pin=64K", detail) == HR_OK);
    CHECK_EQ(verbs->mem_register(n.domain, plain, 1 << 16, HR_ACCESS_REMOTE_READ, &first), HR_OK);
    CHECK_EQ(verbs->mem_register(n.domain, plain + (1 << 16), 64, HR_ACCESS_REMOTE_READ, &second), HR_ERR_NOMEM);
    CHECK_STR(n.domain->refused,
              "HRDMA_VERBS=pin=65536 is what may be pinned outside arenas, and 65536 bytes of it are taken");
    ((struct hr_verbs_domain *)n.domain)->inject.reg_error = 1;
    CHECK_EQ(verbs->mem_register(n.domain, arena, LEN, HR_ACCESS_REMOTE_READ, &second), HR_ERR_NOMEM);
    CHECK(strstr(n.domain->refused, "bytes cannot be pinned: Cannot allocate memory (the device has 16384 regions)"));
    ((struct hr_verbs_domain *)n.domain)->inject.reg_error = 0;
    CHECK_EQ(verbs->mem_register(n.domain, arena, LEN, HR_ACCESS_REMOTE_READ, &second), HR_OK);
    verbs->mem_deregister(n.domain, &first);
    CHECK_EQ(verbs->mem_register(n.domain, plain, 1 << 16, HR_ACCESS_REMOTE_READ, &first), HR_OK);
    CHECK_EQ(inside(&n)->pinned, 1 << 16);
    verbs->domain_close(n.domain);
    hr_arena_free(arena);
    free(plain);
}

/* ---- devices and options ---- */

TEST(what_is_asked_for_and_cannot_be_had) {
    static const char *const options[] = {"wc_error=2", "wc_status=odd", "errno=x",      "fault_budget=-1",
                                          "gid=256",    "pin=much",      "reg_errno=-1", "deaf=some",
                                          "narrow=-2",  "receives=few"};
    struct node n;
    char detail[256];
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        CHECK_EQ(node_open(&n, 1, "sim", options[i], detail), HR_ERR_INVALID);
        CHECK(strstr(detail, strchr(options[i], '=') + 1));
    }
    CHECK_EQ(node_open(&n, 1, "sim", "gid=3", detail), HR_ERR_INVALID); /* it has one */
    CHECK_EQ(node_open(&n, 1, "carrier_pigeon", NULL, detail), HR_ERR_NO_DEVICE);
    CHECK(strstr(detail, "carrier_pigeon") || strstr(detail, "libibverbs"));
}

/* ---- faults ---- */

TEST(a_rewritten_completion_ends_one_connection_alone) {
    struct pair p;
    struct conn other_a = {0}, other_b = {0};
    uint64_t before = hr_faults_fired();
    pair_open(&p, "wc_error=1,wc_status=rnr,fault_budget=1");
    connect_pair(&p, &other_a, &other_b);
    for (int i = 0; i < 40 && !p.ca.losses; i++) {
        CHECK(!hr_is_error(send_some(&p.ca, 100)) || p.ca.losses);
        for (int k = 0; k < 20; k++) pump(&p.a), pump(&p.b);
    }
    RUN(p.a, p.b, p.ca.losses);
    CHECK_EQ(p.ca.loss, HR_ERR_PEER_LOST);
    CHECK(strstr(p.ca.detail, "receiver-not-ready"));
    CHECK_EQ(inside(&p.a)->inject.completions, 1);
    CHECK_EQ(hr_faults_fired(), before + 1);
    CHECK(hr_is_peer_error(send_some(&p.ca, 8)));
    CHECK_EQ(send_some(&other_a, 100), HR_OK);
    RUN(p.a, p.b, other_b.messages == 1);
    CHECK(!other_a.losses);
    verbs->ep_abort(p.ca.ep); /* as the engine does */
    RUN(p.a, p.b, p.cb.losses);
    verbs->ep_destroy(other_a.ep);
    verbs->ep_destroy(other_b.ep);
    pair_close(&p);
}

TEST(a_full_device_is_tried_again) {
    struct pair p;
    enum { N = 2000 };
    pair_open(&p, "errno=0.2,fault_seed=5");
    for (int sent = 0; sent < N;) {
        hr_status status = send_some(&p.ca, sent % 3 ? 64 : 3000);
        CHECK(!hr_is_error(status));
        if (status == HR_OK) sent++;
        pump(&p.a);
        pump(&p.b);
    }
    RUN(p.a, p.b, p.cb.messages == N);
    CHECK(inside(&p.a)->inject.posts > N / 10);
    CHECK_EQ(inside(&p.a)->counts.rnr + inside(&p.b)->counts.rnr, 0);
    CHECK(!p.ca.losses && !p.cb.losses);
    pair_close(&p);
}

/* ---- room ---- */

#define QUIET (40 * HR_VERBS_MS)      /* after which no more room comes */
#define PATIENCE (5000 * HR_VERBS_MS) /* for what there has to be, on a busy machine */

/* Sends while the peer's device is alone, until as many as expected are gone, and a little longer: how many. */
static int fill(struct pair *p, int expected, int most) {
    int sent = 0;
    for (int64_t until = hr_now() + PATIENCE; hr_now() < until && sent <= most;) {
        if (send_some(&p->ca, 8) == HR_OK && ++sent >= expected) until = hr_now() + QUIET;
        pump(&p->a);
    }
    return sent;
}

/* Whatever was said of room before, the peer may use all of it while nobody here makes progress: of a queue pair's own
 * receives it is all of them, of shared ones what was promised. */
static void room_is_there(const char *receives, int all, int few) {
    for (int k = 0; k <= 9; k++) {
        struct pair p;
        pair_open_with(&p, NULL, receives);
        for (int i = 0; i < k; i++) CHECK_EQ(send_some(&p.ca, 8), HR_OK);
        RUN(p.a, p.b, p.cb.messages == k);
        CHECK_EQ(send_some(&p.cb, 8), HR_OK); /* tells of room */
        RUN(p.a, p.a, p.ca.messages == 1);
        int room = (int)((struct hr_verbs_ep *)p.ca.ep)->room, sent = fill(&p, room, all);
        CHECK(sent >= few);
        CHECK(sent <= all);
        CHECK_EQ(sent, room);
        CHECK_EQ(inside(&p.a)->counts.rnr, 0);
        CHECK(!p.ca.losses);
        RUN(p.a, p.b, p.cb.messages == k + sent);
        for (int more = 0; more < 3 * HR_VERBS_RECVS;) { /* none was lost on the way */
            more += send_some(&p.ca, 8) == HR_OK;
            pump(&p.a), pump(&p.b);
        }
        RUN(p.a, p.b, p.cb.messages == k + sent + 3 * HR_VERBS_RECVS);
        pair_close(&p);
    }
}

TEST(room_that_was_told_of_is_there) {
    room_is_there("receives=own", HR_VERBS_RECVS, HR_VERBS_RECVS / 2);
    room_is_there("receives=shared", 16, 8);
}

/* Control messages have receives of their own, however many came. */
static void nobodys_room_is_taken(const char *receives, int all) {
    for (int k = 0; k <= 9; k++) {
        struct pair p;
        pair_open_with(&p, NULL, receives);
        struct hr_verbs_ep *from = (struct hr_verbs_ep *)p.ca.ep, *to = (struct hr_verbs_ep *)p.cb.ep;
        for (uint32_t i = 1; i <= (uint32_t)k; i++) {
            CHECK_EQ(hr_verbs_send_control(from, HR_VERBS_REVOKED, i), 1);
            RUN(p.a, p.b, to->answered == i);
        }
        CHECK_EQ(fill(&p, all, all), all);
        CHECK_EQ(inside(&p.a)->counts.rnr, 0);
        CHECK(!p.ca.losses);
        RUN(p.a, p.b, p.cb.messages == all);
        pair_close(&p);
    }
}

TEST(control_messages_take_nobodys_room) {
    nobodys_room_is_taken("receives=own", HR_VERBS_RECVS);
    nobodys_room_is_taken("receives=shared", 16);
}

/* ---- ends ---- */

TEST(a_forked_child_does_not_keep_a_connection_alive) {
    struct pair p;
    pair_open(&p, NULL);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) pause();
    }
    REQUIRE(child > 0);
    verbs->ep_abort(p.ca.ep);
    RUN(p.b, p.b, p.cb.losses);
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    pair_close(&p);
}

/* ---- taking back ---- */

static void *drive(void *arg) {
    struct node *n = arg;
    while (!__atomic_load_n(&n->stop, __ATOMIC_RELAXED)) {
        pump(n);
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    return NULL;
}

/* The peer writes for ever; its memory is taken back from under it, and the connection goes on. */
TEST(memory_is_taken_back_from_a_writer) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    pthread_t thread;
    uint8_t *here = hr_arena_alloc(LEN, 0), *there = hr_arena_alloc(LEN, HR_ARENA_WRITABLE_BY_PEERS),
            *seen = malloc(LEN);
    pair_open(&p, NULL);
    share(&p, there, LEN, &mem, &rmem);
    struct hr_rma write = {.local = here, .len = LEN, .remote = &rmem, .cookie = &p};
    memset(here, 1, LEN);
    for (int i = 0; i < 8; i++) CHECK_EQ(verbs->post_write(p.ca.ep, &write), HR_INPROGRESS);
    REQUIRE(pthread_create(&thread, NULL, drive, &p.a) == 0);
    pthread_mutex_lock(&p.b.lock);
    CHECK_EQ(verbs->mem_quiet(p.cb.ep, &mem), HR_OK);
    memcpy(seen, there, LEN);
    for (int i = 0; i < 40; i++) { /* more than fit beside messages, and no progress here in between */
        struct hr_mem other;
        CHECK_EQ(verbs->mem_register(p.b.domain, there, 64, HR_ACCESS_REMOTE_WRITE, &other), HR_OK);
        CHECK_EQ(verbs->mem_quiet(p.cb.ep, &other), HR_OK);
        verbs->mem_deregister(p.b.domain, &other);
    }
    pthread_mutex_unlock(&p.b.lock);
    pthread_mutex_lock(&p.a.lock);
    memset(here, 2, LEN);
    CHECK_EQ(verbs->post_write(p.ca.ep, &write), HR_OK); /* passed over */
    CHECK_EQ(send_some(&p.ca, 8), HR_OK);
    pthread_mutex_unlock(&p.a.lock);
    RUN(p.b, p.b, p.cb.messages == 1);
    CHECK_MEM(there, seen, LEN);
    __atomic_store_n(&p.a.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    CHECK(!p.ca.losses && !p.cb.losses);
    verbs->mem_deregister(p.b.domain, &mem);
    pair_close(&p);
    hr_arena_free(here);
    hr_arena_free(there);
    free(seen);
}

/* 24 bits of number would have come round. */
TEST(a_new_registration_is_not_taken_for_one_that_was_taken_back) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    pthread_t thread;
    uint8_t *here = hr_arena_alloc(LEN, 0), *there = hr_arena_alloc(LEN, HR_ARENA_WRITABLE_BY_PEERS);
    pair_open(&p, NULL);
    share(&p, there, LEN, &mem, &rmem);
    REQUIRE(pthread_create(&thread, NULL, drive, &p.a) == 0);
    CHECK_EQ(verbs->mem_quiet(p.cb.ep, &mem), HR_OK);
    __atomic_store_n(&p.a.stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, NULL);
    verbs->mem_deregister(p.b.domain, &mem);
    ((struct hr_verbs_domain *)p.b.domain)->registrations += 0xfffffe;
    share(&p, there, LEN, &mem, &rmem);
    memset(here, 4, LEN);
    move(&p, here, &rmem);
    CHECK_MEM(there, here, LEN);
    verbs->mem_deregister(p.b.domain, &mem);
    pair_close(&p);
    hr_arena_free(here);
    hr_arena_free(there);
}

TEST(a_peer_that_does_not_answer_keeps_nobody_for_long) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    uint8_t *there = hr_arena_alloc(LEN, HR_ARENA_WRITABLE_BY_PEERS);
    pair_open(&p, NULL);
    share(&p, there, LEN, &mem, &rmem);
    int64_t start = hr_now();
    CHECK_EQ(verbs->mem_quiet(p.cb.ep, &mem), HR_ERR_UNSUPPORTED);
    CHECK(hr_now() - start < 8000 * HR_VERBS_MS);
    verbs->mem_deregister(p.b.domain, &mem);
    pair_close(&p);
    hr_arena_free(there);
}

/* Another may tell of its death before the connection ends here. The least of three: a machine can stand still. */
TEST(a_peer_that_is_dead_keeps_nobody) {
    int64_t least = INT64_MAX;
    for (int i = 0; i < 3; i++) {
        struct pair p;
        struct hr_mem mem;
        struct hr_rmem rmem;
        uint8_t *there = hr_arena_alloc(LEN, HR_ARENA_WRITABLE_BY_PEERS);
        pair_open(&p, NULL);
        share(&p, there, LEN, &mem, &rmem);
        verbs->ep_abort(p.ca.ep);
        int64_t start = hr_now();
        CHECK_EQ(verbs->mem_quiet(p.cb.ep, &mem), HR_ERR_UNSUPPORTED);
        if (hr_now() - start < least) least = hr_now() - start;
        verbs->mem_deregister(p.b.domain, &mem);
        pair_close(&p);
        hr_arena_free(there);
    }
    CHECK(least < 300 * HR_VERBS_MS);
}

/* ---- a device that is taken away ---- */

/* Who takes it away waits until it is closed: as soon as its connections have ended, though the domain lives on. */
TEST(a_device_that_is_gone_is_closed) {
    struct pair p;
    struct hr_mem mem, local, other;
    struct hr_rmem rmem;
    struct conn late = {0};
    char text[256];
    uint8_t addr[HR_MAX_ADDR], *plain = malloc(LEN);
    uint8_t *here = hr_arena_alloc(LEN, 0), *there = hr_arena_alloc(LEN, HR_ARENA_WRITABLE_BY_PEERS);
    pair_open(&p, NULL);
    share(&p, there, LEN, &mem, &rmem);
    CHECK_EQ(verbs->mem_register(p.a.domain, plain, LEN, HR_ACCESS_REMOTE_READ, &local), HR_OK);
    struct hr_rma write = {.local = here, .len = LEN, .remote = &rmem, .cookie = &p};
    CHECK_EQ(verbs->post_write(p.ca.ep, &write), HR_INPROGRESS);
    hr_verbs_sim_remove(inside(&p.a)->ctx);
    RUN(p.a, p.b, p.ca.losses && p.cb.losses);
    CHECK(strstr(p.ca.detail, "device is gone"));
    for (int i = 0; i < 300; i++) pump(&p.a);
    CHECK(inside(&p.a)->ctx != NULL); /* it is still the endpoint's */
    verbs->ep_abort(p.ca.ep);
    CHECK_EQ(verbs->event_arm(p.a.domain), HR_AGAIN); /* or it would be closed after the next sleep */
    RUN(p.a, p.b, !inside(&p.a)->ctx);
    CHECK_EQ(verbs->event_arm(p.a.domain), HR_OK);
    verbs->event_disarm(p.a.domain);
    verbs->domain_describe(p.a.domain, text, sizeof text);
    CHECK_STR(text, "sim is gone");
    verbs->mem_deregister(p.a.domain, &local);
    CHECK_EQ(verbs->mem_register(p.a.domain, here, LEN, HR_ACCESS_REMOTE_READ, &other), HR_ERR_DEVICE);
    CHECK_EQ(verbs->ep_create(p.a.domain, 2, &late, &late.ep), HR_OK);
    CHECK_EQ(verbs->ep_connect(late.ep, addr, verbs->domain_address(p.b.domain, addr), 1), HR_OK);
    RUN(p.a, p.b, late.losses);
    CHECK(late.loss == HR_ERR_UNREACHABLE && strstr(late.detail, "device is gone"));
    verbs->ep_destroy(late.ep);
    verbs->mem_deregister(p.b.domain, &mem);
    pair_close(&p);
    hr_arena_free(here);
    hr_arena_free(there);
    free(plain);
}
