/* conformance_connect.c - domains, connecting, and how endpoints end. */

#include "conformance.h"

#include <dirent.h>

#include "hr/auth.h"

static int count_descriptors(void) {
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(dir)) n++;
    closedir(dir);
    return n;
}

TEST(device) {
    const char *why = NULL;
    CHECK(settings.provider->name && settings.provider->name[0]);
    CHECK(hr_provider_find(settings.provider->name) == settings.provider);
    /* One that was named need not be one that is found. */
    CHECK(settings.inner || settings.device || settings.provider->device_count(&why) > 0);
}

TEST(unknown_option_is_refused) {
    struct side side = {.id = 1};
    char detail[256];
    CHECK_EQ(side_open(&side, "no_such_key=1", detail), HR_ERR_INVALID);
    CHECK(!side.domain);
    if (!strstr(detail, "no_such_key")) CHECK_STR(detail, "(text that names no_such_key)");
    if (side.domain) side.domain->ops->domain_close(side.domain);
}

TEST(domain_describes_itself) {
    RIG(rig);
    for (int i = 0; i < 2; i++) {
        struct hr_domain *domain = rig.side[i].domain;
        uint8_t again[HR_MAX_ADDR];
        char text[256] = {0}, little[16];

        CHECK(domain->caps.max_send >= 4096);
        CHECK(domain->caps.eager_max > 0 && domain->caps.eager_max <= domain->caps.max_send);
        CHECK(domain->caps.segment > 0);
        CHECK(domain->owner == &rig.side[i]);
        CHECK(rig.side[i].addr_len > 0 && rig.side[i].addr_len <= HR_MAX_ADDR);
        CHECK_EQ(domain->ops->domain_address(domain, again), rig.side[i].addr_len);
        CHECK_MEM(again, rig.side[i].addr, rig.side[i].addr_len);
        domain->ops->domain_describe(domain, text, sizeof text);
        CHECK(text[0]);
        memset(little, 'x', sizeof little);
        domain->ops->domain_describe(domain, little, 8);
        CHECK(memchr(little, 0, 8));
        CHECK_EQ(little[8], 'x');
    }
    CHECK(rig.side[0].addr_len != rig.side[1].addr_len ||
          memcmp(rig.side[0].addr, rig.side[1].addr, rig.side[0].addr_len));
}

/* ---- connecting ---- */

static void connect_after(int first_active, int pause_ms) {
    RIG(rig);
    struct end *a = end_new(&rig.side[0], rig.side[1].id), *b = end_new(&rig.side[1], rig.side[0].id);
    struct op *op = op_new(8);
    CHECK(!hr_is_error(end_connect(first_active ? a : b, &rig.side[first_active], first_active)));
    if (pause_ms) rig_pump_for(&rig, pause_ms);
    CHECK(!a->connected && !b->connected);
    CHECK(!hr_is_error(end_connect(first_active ? b : a, &rig.side[!first_active], !first_active)));
    WAIT(rig, a->connected && b->connected);
    CHECK_EQ(end_send(a, 8, op), HR_OK);
    WAIT(rig, b->next_rx == 1);
}

TEST(connect_active_first) { connect_after(1, 0); }
TEST(connect_passive_first) { connect_after(0, 0); }
TEST(connect_passive_first_by_far) { connect_after(0, 100); }

/* The passive end is created and called only when the caller has been waiting for a while. */
TEST(connect_active_first_by_far) {
    RIG(rig);
    struct end *a = end_new(&rig.side[0], rig.side[1].id), *b;
    CHECK(!hr_is_error(end_connect(a, &rig.side[1], 1)));
    rig_pump_for(&rig, 100);
    CHECK(!a->losses);
    b = end_new(&rig.side[1], rig.side[0].id);
    CHECK(!hr_is_error(end_connect(b, &rig.side[0], 0)));
    WAIT(rig, a->connected && b->connected);
}

static void connect_refused(struct rig *rig, uint64_t believed_id, hr_status expected) {
    struct end *a = end_new(&rig->side[0], believed_id), *b = end_new(&rig->side[1], rig->side[0].id);
    CHECK(!hr_is_error(end_connect(b, &rig->side[0], 0)));
    CHECK(!hr_is_error(end_connect(a, &rig->side[1], 1)));
    WAIT(*rig, a->losses);
    if (expected) CHECK_EQ(a->loss, expected);
    rig_pump_for(rig, 50);
    CHECK(!a->connected && !b->connected);
}

TEST(wrong_key_is_refused) {
    RIG_WITH(rig, .token = {"one", "another"});
    connect_refused(&rig, rig.side[1].id, HR_ERR_AUTH);
}

TEST(wrong_epoch_is_refused) {
    RIG_WITH(rig, .epoch = {1, 2});
    connect_refused(&rig, rig.side[1].id, 0);
}

TEST(wrong_id_is_refused) {
    RIG(rig);
    connect_refused(&rig, 4711, 0);
}

TEST(nobody_at_the_address) {
    struct side gone = {.id = 7};
    char detail[256];
    RIG(rig);
    struct end *a;
    hr_status status;
    hr_auth_init(&gone.auth, "conformance", 11, 0, 0);
    REQUIRE(side_open(&gone, settings.options, detail) == HR_OK);
    gone.domain->ops->domain_close(gone.domain);
    a = end_new(&rig.side[0], gone.id);
    status = end_connect(a, &gone, 1);
    if (hr_is_peer_error(status)) return;
    CHECK(!hr_is_error(status));
    WAIT(rig, a->losses);
    CHECK_EQ(a->loss, HR_ERR_UNREACHABLE);
}

TEST(address_that_is_none) {
    RIG(rig);
    struct end *a = end_new(&rig.side[0], rig.side[1].id);
    struct side garbage = {.addr_len = 3, .addr = "\xff\xfe\xfd"};
    hr_status status = end_connect(a, &garbage, 1);
    if (hr_is_error(status)) return;
    WAIT(rig, a->losses);
}

TEST(abort_before_connected) {
    RIG(rig);
    struct end *idle = end_new(&rig.side[0], rig.side[1].id), *calling = end_new(&rig.side[0], rig.side[1].id);
    struct end *waiting = end_new(&rig.side[1], rig.side[0].id);
    end_abort(idle);
    CHECK(!hr_is_error(end_connect(calling, &rig.side[1], 1)));
    end_abort(calling);
    CHECK(!hr_is_error(end_connect(waiting, &rig.side[0], 0)));
    end_destroy(waiting);
    rig_pump_for(&rig, 30); /* on_state notes what comes for an aborted endpoint */
    end_destroy(idle);
    end_destroy(calling);
    CHECK(!calling->connected && !waiting->connected);
}

TEST(several_endpoints_to_one_peer) {
    enum { N = 8 };
    RIG(rig);
    struct end *a[N], *b[N];
    struct op *op = op_new(N);
    for (int i = 0; i < N; i++) {
        a[i] = end_new(&rig.side[0], rig.side[1].id);
        b[i] = end_new(&rig.side[1], rig.side[0].id);
    }
    for (int i = 0; i < N; i++) CHECK(!hr_is_error(end_connect(a[i], &rig.side[1], 1)));
    for (int i = 0; i < N; i++) CHECK(!hr_is_error(end_connect(b[i], &rig.side[0], 0)));
    for (int i = 0; i < N; i++) WAIT(rig, a[i]->connected && b[i]->connected);
    /* Paired in order of creation: the i-th has i messages of its own. */
    for (int i = 0; i < N; i++)
        for (int n = 0; n < i; n++) CHECK_EQ(end_send(a[i], (size_t)i, op), HR_OK);
    for (int i = 0; i < N; i++) WAIT(rig, b[i]->next_rx == (uint64_t)i);
}

/* ---- the end ---- */

static int flood(struct side *side) {
    struct end *end = side->arg;
    struct op *op = end->arg;
    if (end->losses || end->aborted || op->state == OP_OPEN) return 0;
    return end_send(end, op->cap, op) == HR_OK;
}

static void abort_under_way(int64_t *took) {
    RIG(rig);
    PAIR(rig, a, b);
    struct op *ops[20];
    int64_t start;
    uint64_t seen;
    /* Both ends have traffic under way in both directions when it happens. */
    a->arg = op_new(4096);
    b->arg = op_new(4096);
    rig.side[0].arg = a;
    rig.side[1].arg = b;
    rig.side[0].work = rig.side[1].work = flood;
    side_kick(&rig.side[0]);
    side_kick(&rig.side[1]);
    WAIT(rig, a->next_rx > 100 && b->next_rx > 100);
    for (int i = 0; i < 20; i++) /* some are sure to be waiting for b at that moment */
        if (end_send(a, 64, ops[i] = op_new(64)) == HR_AGAIN) break;
    end_abort(b);
    seen = b->next_rx;
    start = rig_now();
    WAIT(rig, a->losses);
    CHECK_EQ(a->loss, HR_ERR_PEER_LOST);
    *took = rig_now() - start;
    rig.side[0].work = rig.side[1].work = NULL;
    rig_pump_for(&rig, 30);
    CHECK_EQ(b->next_rx, seen);
    CHECK_EQ(a->losses, 1);
    CHECK(hr_is_peer_error(end_send(a, 8, op_new(8)))); /* and so does every later call */
}

TEST(abort_is_silent_and_the_peer_learns) {
    int64_t took = INT64_MAX; /* a machine that others use too may keep both sides waiting, but not each time */
    for (int i = 0; i < 3 && took >= 1000000000; i++) abort_under_way(&took);
    CHECK(took < 1000000000);
}

TEST(messages_sent_before_destroy_do_not_crash_the_peer) {
    RIG(rig);
    PAIR(rig, a, b);
    struct op *op = op_new(512);
    for (int i = 0; i < 50 && end_send(a, 512, op) == HR_OK; i++) {}
    end_destroy(a);
    WAIT(rig, b->losses);
    CHECK(b->next_rx <= 50);
}

/* A peer that says what it has to say and goes: a sender who notices that first hears it all the same. Verbs takes no
 * more from it, while nobody hears it, than it was promised receives for. */
TEST(what_was_said_before_the_end_is_heard) {
    enum { N = 50, LEAST = 12 };
    RIG(rig);
    PAIR(rig, a, b);
    struct op *said = op_new(64), *late[20];
    uint64_t n = 0;
    rig.side[0].paused = 1;
    for (; n < N && end_send(b, 64, said) == HR_OK; n++) rig_pump(&rig);
    const struct hr_provider *provider = settings.inner ? settings.inner : settings.provider;
    CHECK(n == N || (n >= LEAST && !strcmp(provider->name, "verbs")));
    WAIT(rig, b->side->domain->ops->ep_unsent(b->ep) == 0);
    end_destroy(b);
    for (int i = 0; i < 20; i++) {
        CHECK(!hr_is_error(end_send(a, 64, late[i] = op_new(64))));
        rig_pump_for(&rig, 1);
    }
    CHECK_EQ(a->next_rx, 0);
    rig.side[0].paused = 0;
    side_kick(&rig.side[0]);
    WAIT(rig, a->losses);
    CHECK_EQ(a->next_rx, n);
    CHECK_EQ(a->loss, HR_ERR_PEER_LOST);
    CHECK(hr_is_peer_error(end_send(a, 64, said)));
}

TEST(destroying_one_endpoint_leaves_the_others) {
    enum { N = 4 };
    RIG(rig);
    struct end *a[N], *b[N];
    struct op *op = op_new(1000);
    for (int i = 0; i < N; i++)
        if (!rig_pair(&rig, &a[i], &b[i])) return;
    end_destroy(a[1]);
    WAIT(rig, b[1]->losses);
    end_destroy(b[1]);
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < N; i++) {
            if (i == 1) continue;
            CHECK_EQ(end_send(a[i], 1000, op), HR_OK);
            CHECK_EQ(end_send(b[i], 10, op), HR_OK);
        }
        for (int i = 0; i < N; i++)
            WAIT(rig, i == 1 || (a[i]->next_rx == (uint64_t)round + 1 && b[i]->next_rx == (uint64_t)round + 1));
    }
    for (int i = 0; i < N; i++) CHECK(i == 1 || (!a[i]->losses && !b[i]->losses));
}

TEST(a_pair_after_a_loss) {
    RIG(rig);
    for (int i = 0; i < 5; i++) {
        PAIR(rig, a, b);
        CHECK_EQ(end_send(i & 1 ? a : b, 64, op_new(64)), HR_OK);
        WAIT(rig, a->next_rx + b->next_rx == 1);
        end_destroy(i & 1 ? a : b);
        WAIT(rig, a->losses + b->losses == 1);
        end_destroy(a);
        end_destroy(b);
    }
}

static void open_and_close(void) {
    RIG(rig);
    PAIR(rig, a, b);
    CHECK_EQ(end_send(a, 64, op_new(64)), HR_OK);
    WAIT(rig, b->next_rx == 1);
}

TEST(closing_leaves_no_descriptor) {
    int before;
    open_and_close(); /* what is opened once for the process */
    before = count_descriptors();
    open_and_close();
    CHECK_EQ(count_descriptors(), before);
}

/* ---- what may be absent ---- */

TEST(class_of_traffic) {
    RIG(rig);
    PAIR(rig, a, b);
    for (int priority = 0; priority < 8; priority++) {
        hr_status status = a->side->domain->ops->ep_set_class(a->ep, 8 * priority, priority);
        CHECK(status == HR_OK || status == HR_ERR_UNSUPPORTED);
    }
    CHECK_EQ(end_send(a, 100, op_new(100)), HR_OK);
    WAIT(rig, b->next_rx == 1);
}

TEST(what_caps_exclude_is_unsupported) {
    RIG(rig);
    PAIR(rig, a, b);
    const struct hr_provider *ops = a->side->domain->ops;
    uint32_t caps = rig_caps(&rig);
    char memory[64];
    struct hr_mem reg;
    struct hr_rmem rmem = {.len = sizeof memory, .addr = (uintptr_t)memory};
    struct hr_rma rma = {.local = memory, .len = 8, .remote = &rmem, .mem = &reg};
    struct hr_atomic atomic = {.result = (uint64_t *)memory, .remote = &rmem, .mem = &reg};
    (void)b;
    REQUIRE(ops->mem_register(a->side->domain, memory, sizeof memory, HR_ACCESS_LOCAL, &reg) == HR_OK);
    if (!(caps & HR_CAP_READ)) CHECK_EQ(ops->post_read(a->ep, &rma), HR_ERR_UNSUPPORTED);
    if (!(caps & HR_CAP_WRITE)) CHECK_EQ(ops->post_write(a->ep, &rma), HR_ERR_UNSUPPORTED);
    if (!(caps & HR_CAP_ATOMIC)) CHECK_EQ(ops->post_atomic(a->ep, &atomic), HR_ERR_UNSUPPORTED);
    if (!(caps & HR_CAP_PUT)) CHECK_EQ(ops->post_put(a->ep, &rma, NULL, NULL), HR_ERR_UNSUPPORTED);
    if (!(caps & HR_CAP_PUT)) CHECK(!a->ep->puts);
    ops->mem_deregister(a->side->domain, &reg);
}

TEST(a_domain_that_talks_to_itself) {
    if (strcmp(settings.inner ? settings.inner->name : settings.provider->name, "loop") != 0)
        SKIP("only loop connects a domain to itself");
    RIG_WITH(rig, .self = 1);
    PAIR(rig, a, b);
    struct op *op = op_new(1000);
    WINDOW(window);
    for (int i = 0; i < 500; i++) {
        CHECK_EQ(end_send(i & 1 ? a : b, 1000, op), HR_OK);
        rig_pump(&rig);
    }
    WAIT(rig, a->next_rx == 250 && b->next_rx == 250);
    CHECK_EQ(window_open(&rig, &window, b, a, 5000, HR_ACCESS_REMOTE_READ), HR_OK);
    CHECK(window.rmem.ptr == window.mem);
}
