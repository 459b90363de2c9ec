/* test_verbs_spare.c - the rail over tcp: used while no other is left, left when one is back. */

#include <linux/filter.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "bond_rig.h"

static const char allowed[] = "fallback=tcp";

static struct hr_verbs_domain *spare_of(const struct bond_side *side) { return bond_of(side)->rails[HR_BOND_SPARE]; }
static int on_spare(const struct bond_rig *rig) {
    return bond_ep_of(&rig->side[0])->first == HR_BOND_SPARE && bond_ep_of(&rig->side[1])->first == HR_BOND_SPARE;
}
static int off_spare(const struct bond_rig *rig) {
    for (int i = 0; i < 2; i++) {
        int first = bond_ep_of(&rig->side[i])->first;
        if (first < 0 || first == HR_BOND_SPARE) return 0;
    }
    return 1;
}

static void ports(struct bond_rig *rig, int side, int up) {
    for (int i = 0; i < HR_VERBS_RAILS; i++)
        for (int port = 1; port <= 2 && i < bond_of(&rig->side[side])->n; port++)
            if (bond_of(&rig->side[side])->rails[i])
                hr_verbs_sim_port(bond_of(&rig->side[side])->rails[i]->ctx, port, up);
}

/* One of what a user may do, where there is room for it. */
static void do_something(struct bond_rig *rig) {
    static const size_t sizes[] = {1, 8, 200, 1025, 8192, 65536, 300001, SLOT};
    size_t len = sizes[draw(rig, sizeof sizes / sizeof sizes[0])];
    uint64_t what = draw(rig, 8);
    if (what < 3)
        start_job(rig, 0, len, draw(rig, SLOT - len + 1), what == 0);
    else if (what == 3)
        start_job(rig, 1, len, 0, 0);
    else if (what < 7)
        send_told(&rig->side[0], draw(rig, draw(rig, 2) ? 200 : HR_VERBS_MESSAGE), (int)draw(rig, SLOTS));
    else
        send_told(&rig->side[1], draw(rig, 3000), -1);
}

static void work_until(struct bond_rig *rig, int (*cond)(const struct bond_rig *), int at_least) {
    int64_t until = hr_now() + 20000 * HR_VERBS_MS;
    for (int i = 0; (i < at_least || !cond(rig)) && hr_now() < until && !check_failures(); i++) {
        do_something(rig);
        if (draw(rig, 3) == 0) turn(rig);
        hurry(rig);
    }
    CHECK(cond(rig));
}

static void storm(const char *devices, uint64_t seed, int strikes) {
    struct bond_rig rig;
    bond_open(&rig, devices, allowed);
    rig.random = seed;
    uint64_t staged = spare_of(&rig.side[0])->counts.direct;
    for (int i = 0; i < strikes && !check_failures(); i++) {
        int side = (int)draw(&rig, 2);
        work_until(&rig, all_up, 20);
        CHECK(off_spare(&rig));
        ports(&rig, side, 0);
        work_until(&rig, on_spare, 0);
        work_until(&rig, on_spare, 500);
        ports(&rig, side, 1);
        work_until(&rig, off_spare, 0);
    }
    settle(&rig);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(rig.side[i].falls, strikes);
        CHECK_EQ(rig.side[i].backs, strikes);
        CHECK_EQ(bond_of(&rig.side[i])->counts.fell, strikes);
        CHECK_EQ(bond_of(&rig.side[i])->on_spare, 0);
    }
    CHECK(spare_of(&rig.side[0])->counts.direct > staged + SLOT);
    CHECK(bond_of(&rig.side[0])->counts.resent + bond_of(&rig.side[1])->counts.resent > 0);
    CHECK(bond_of(&rig.side[0])->counts.redone > 0);
    bond_close(&rig);
}

/* Every byte is where it belongs, once, whichever rails are there. */
TEST(all_rails_are_lost_and_come_back) {
    for (uint64_t seed = 1; seed <= 2; seed++) storm("sim2", seed, 4);
}

TEST(two_rails_are_lost_and_come_back) { storm("sim2,sim2", 5, 3); }

TEST(three_rails_and_the_spare_one) { storm("sim2,sim2,sim2", 6, 2); }

TEST(it_is_said_which_rail_was_lost_and_why) {
    struct bond_rig rig = {0};
    char text[256];
    REQUIRE(bond_side_open(&rig, 0, "sim2", allowed, text) == HR_OK);
    rig.side[0].domain->ops->domain_describe(rig.side[0].domain, text, sizeof text);
    CHECK(strstr(text, "1 rail, tcp allowed (0 times): sim2"));
    rig.side[0].domain->ops->domain_close(rig.side[0].domain);
    bond_open(&rig, "sim2", allowed);
    const struct hr_provider *ops = rig.side[0].domain->ops;
    ops->domain_describe(rig.side[0].domain, text, sizeof text);
    CHECK(strstr(text, "1 rail, tcp stands by (0 times): sim2"));
    ports(&rig, 0, 0);
    UNTIL(&rig, (send_told(&rig.side[0], 10, -1), rig.side[0].falls && rig.side[1].falls));
    CHECK(strstr(rig.side[0].carrier, "sim2: "));
    CHECK(strlen(rig.side[0].carrier) > strlen("sim2: "));
    ops->domain_describe(rig.side[0].domain, text, sizeof text);
    CHECK(strstr(text, "tcp instead (1 times)"));
    ports(&rig, 0, 1);
    UNTIL(&rig, (hurry(&rig), rig.side[0].backs && rig.side[1].backs));
    CHECK(!strcmp(rig.side[0].carrier, "sim2"));
    settle(&rig);
    bond_close(&rig);
}

/* Nothing goes by it while it stands by. */
TEST(it_has_no_stripes_while_a_rail_is_up) {
    struct bond_rig rig;
    bond_open(&rig, "sim2", allowed);
    UNTIL(&rig, all_up(&rig));
    uint64_t direct = spare_of(&rig.side[0])->counts.direct;
    for (int i = 0; i < 300; i++) do_something(&rig), turn(&rig);
    settle(&rig);
    CHECK_EQ(spare_of(&rig.side[0])->counts.direct, direct);
    CHECK_EQ(rig.side[0].falls + rig.side[1].falls, 0);
    bond_close(&rig);
}

/* A rail that is mended does no harm: atomics that are on their way over tcp end there. */
TEST(no_atomic_fails_as_a_rail_comes_back) {
    struct bond_rig rig;
    uint64_t before[2], *counter, done = 0;
    bond_open(&rig, "sim2", allowed);
    counter = (uint64_t *)(void *)rig.side[1].memory;
    for (int i = 0; i < 6 && !check_failures(); i++) {
        ports(&rig, i % 2, 0);
        UNTIL(&rig, (send_told(&rig.side[0], 10, -1), on_spare(&rig)));
        UNTIL(&rig, rig.side[0].falls == i + 1 && rig.side[1].falls == i + 1);
        ports(&rig, i % 2, 1);
        for (int64_t until = hr_now() + 20000 * HR_VERBS_MS; !off_spare(&rig) && hr_now() < until;) {
            hurry(&rig);
            for (int k = 0; k < 2; k++) { /* there is always one on its way */
                struct job *job = &rig.jobs[k];
                struct hr_atomic add = {
                    .op = HR_ATOMIC_FETCH_ADD, .result = &before[k], .remote = &rig.rmem, .operand = 1, .cookie = job};
                if (job->open) continue;
                CHECK_EQ(job->status, HR_OK);
                *job = (struct job){.slot = -1};
                if (rig.side[0].domain->ops->post_atomic(rig.side[0].ep, &add) == HR_INPROGRESS) job->open = 1, done++;
            }
            turn(&rig);
        }
        CHECK(off_spare(&rig));
        UNTIL(&rig, !rig.jobs[0].open && !rig.jobs[1].open);
        UNTIL(&rig, (hurry(&rig), all_up(&rig)));
    }
    for (int k = 0; k < 2; k++) CHECK_EQ(rig.jobs[k].status, HR_OK);
    CHECK(done > 0);
    CHECK_EQ(*counter, done);
    CHECK_EQ(rig.side[0].losses, 0);
    bond_close(&rig);
}

/* Both ends have to allow it. */
TEST(where_it_is_not_allowed_the_peer_is_lost) {
    for (int who = -1; who < 2; who++) { /* which end allows it */
        struct bond_rig rig = {0};
        char detail[256];
        for (int i = 0; i < 2; i++)
            REQUIRE(bond_side_open(&rig, i, "sim2,sim2", i == who ? allowed : "fallback=none", detail) == HR_OK);
        bond_connect(&rig);
        UNTIL(&rig, all_up(&rig));
        for (int i = 0; i < 2; i++) hr_verbs_qp_break(bond_ep_of(&rig.side[0])->lanes[i].ep);
        UNTIL(&rig, rig.side[0].losses && rig.side[1].losses);
        CHECK(hr_is_peer_error(rig.side[0].loss) && hr_is_peer_error(rig.side[1].loss));
        CHECK_EQ(rig.side[0].falls + rig.side[1].falls, 0);
        for (int i = 0; i < 2; i++) rig.side[i].domain->ops->ep_destroy(rig.side[i].ep);
        for (int i = 0; i < 2; i++) rig.side[i].domain->ops->domain_close(rig.side[i].domain);
    }
}

/* An error each, and no crash. */
static void use_after_abort(struct bond_side *side) {
    static uint8_t memory[64];
    const struct hr_provider *ops = side->domain->ops;
    uint64_t hdr = 0, before;
    struct hr_rmem remote = {.addr = (uintptr_t)memory, .len = sizeof memory};
    struct hr_msg msg = {.hdr = &hdr, .hdr_len = sizeof hdr};
    struct hr_rma rma = {.local = memory, .len = 8, .remote = &remote};
    struct hr_atomic add = {.op = HR_ATOMIC_FETCH_ADD, .result = &before, .remote = &remote};
    struct hr_mem mem;
    struct hr_desc desc = {0};
    REQUIRE(ops->mem_register(side->domain, memory, sizeof memory, HR_ACCESS_REMOTE_WRITE, &mem) == HR_OK);
    for (int aborted = side->ups ? 1 : 0; aborted < 2; aborted++) {
        if (aborted) ops->ep_abort(side->ep);
        CHECK(hr_is_error(ops->post_send(side->ep, &msg)));
        CHECK(hr_is_error(ops->post_write(side->ep, &rma)));
        CHECK(hr_is_error(ops->post_read(side->ep, &rma)));
        CHECK(hr_is_error(ops->post_atomic(side->ep, &add)));
        ops->cancel(side->ep, &rma);
        ops->mem_quiet(side->ep, &mem);
        ops->mem_export(side->ep, &mem, memory, sizeof memory, &desc);
    }
    ops->mem_deregister(side->domain, &mem);
}

TEST(a_peer_that_is_no_bond) {
    for (int who = 0; who < 2; who++) {
        struct bond_rig rig = {0};
        char detail[256];
        for (int i = 0; i < 2; i++)
            REQUIRE(bond_side_open(&rig, i, "sim2", i == who ? allowed : NULL, detail) == HR_OK);
        bond_connect(&rig);
        for (int i = 0; i < 100; i++) UNTIL(&rig, send_told(&rig.side[i % 2], (size_t)i, -1) == HR_OK);
        UNTIL(&rig, quiet(&rig));
        for (int i = 0; i < 2; i++) use_after_abort(&rig.side[i]);
        for (int i = 0; i < 2; i++) rig.side[i].domain->ops->ep_destroy(rig.side[i].ep);
        for (int i = 0; i < 2; i++) rig.side[i].domain->ops->domain_close(rig.side[i].domain);
    }
}

/* Nor one that can be reached. */
TEST(a_peer_with_no_rail_of_ours) {
    struct bond_rig rig = {0};
    uint8_t addr[HR_MAX_ADDR];
    char detail[256];
    REQUIRE(bond_side_open(&rig, 0, "sim2", allowed, detail) == HR_OK);
    REQUIRE(bond_side_open(&rig, 1, "sim2", NULL, detail) == HR_OK);
    struct bond_side *a = &rig.side[0];
    struct hr_verbs_domain *rail = bond_of(a)->rails[0];
    size_t len = rig.side[1].domain->ops->domain_address(rig.side[1].domain, addr);
    REQUIRE(a->domain->ops->ep_create(a->domain, 2, a, &a->ep) == HR_OK);
    rail->gone = 1;
    CHECK_EQ(a->domain->ops->ep_connect(a->ep, addr, len, 1), HR_ERR_UNREACHABLE);
    use_after_abort(a);
    rail->gone = 0;
    a->domain->ops->ep_destroy(a->ep);
    for (int i = 0; i < 2; i++) rig.side[i].domain->ops->domain_close(rig.side[i].domain);
}

/* No pair of GIDs carries anything: the connection begins over tcp. */
TEST(a_connection_that_no_rail_will_carry) {
    struct bond_rig rig = {0};
    char detail[256];
    for (int i = 0; i < 2; i++) REQUIRE(bond_side_open(&rig, i, "sim2", "fallback=tcp,deaf=16", detail) == HR_OK);
    bond_connect(&rig);
    CHECK(carried(&rig));
    CHECK(on_spare(&rig));
    CHECK(rig.side[0].falls == 1 && rig.side[1].falls == 1);
    for (int i = 0; i < 2; i++) rig.side[i].domain->ops->ep_destroy(rig.side[i].ep);
    for (int i = 0; i < 2; i++) rig.side[i].domain->ops->domain_close(rig.side[i].domain);
}

static int rail_is_up(const struct bond_rig *rig) {
    return hr_bond_lane_up(bond_ep_of(&rig->side[0]), 0) && hr_bond_lane_up(bond_ep_of(&rig->side[1]), 0);
}

/* Whoever hears that the connection is open has the spare lane. */
TEST(a_rail_that_is_lost_before_the_spare_one_stands_by) {
    for (int side = 0; side < 2; side++) {
        struct bond_rig rig = {0};
        char detail[256];
        for (int i = 0; i < 2; i++) REQUIRE(bond_side_open(&rig, i, "sim2", allowed, detail) == HR_OK);
        bond_call(&rig);
        UNTIL(&rig, rail_is_up(&rig));
        CHECK(!rig.side[0].ups && !rig.side[1].ups);
        hr_verbs_qp_break(bond_ep_of(&rig.side[side])->lanes[0].ep);
        UNTIL(&rig, rig.side[0].ups && rig.side[1].ups);
        CHECK(carried(&rig));
        CHECK_EQ(rig.side[0].losses + rig.side[1].losses, 0);
        for (int i = 0; i < 2; i++) rig.side[i].domain->ops->ep_destroy(rig.side[i].ep);
        for (int i = 0; i < 2; i++) rig.side[i].domain->ops->domain_close(rig.side[i].domain);
    }
}

TEST(a_spare_lane_that_never_comes_is_not_waited_for_long) {
    struct bond_rig rig = {0};
    char detail[256];
    for (int i = 0; i < 2; i++) REQUIRE(bond_side_open(&rig, i, "sim2", allowed, detail) == HR_OK);
    struct hr_bond *bond = bond_of(&rig.side[1]);
    struct hr_verbs_domain *deaf = bond->rails[HR_BOND_SPARE];
    bond->rails[HR_BOND_SPARE] = NULL; /* it takes calls, and does not answer them */
    int64_t start = hr_now();
    bond_call(&rig);
    UNTIL(&rig, rig.side[0].ups && rig.side[1].ups);
    CHECK(hr_now() - start < 10000 * HR_VERBS_MS);
    CHECK(carried(&rig));
    hr_verbs_qp_break(bond_ep_of(&rig.side[0])->lanes[0].ep);
    UNTIL(&rig, rig.side[0].losses && rig.side[1].losses);
    bond->rails[HR_BOND_SPARE] = deaf;
    for (int i = 0; i < 2; i++) rig.side[i].domain->ops->ep_destroy(rig.side[i].ep);
    for (int i = 0; i < 2; i++) rig.side[i].domain->ops->domain_close(rig.side[i].domain);
}

TEST(a_peer_that_leaves_while_tcp_carries) {
    struct bond_rig rig;
    bond_open(&rig, "sim2", allowed);
    ports(&rig, 1, 0);
    UNTIL(&rig, (send_told(&rig.side[0], 10, -1), on_spare(&rig) && rig.side[1].falls));
    UNTIL(&rig, quiet(&rig));
    int heard = (int)rig.side[1].heard;
    UNTIL(&rig, send_told(&rig.side[0], 5000, -1) == HR_OK);
    UNTIL(&rig, !rig.side[0].domain->ops->ep_unsent(rig.side[0].ep));
    int64_t start = hr_now();
    rig.side[0].domain->ops->ep_abort(rig.side[0].ep);
    UNTIL(&rig, rig.side[1].losses);
    CHECK(hr_now() - start < 5000 * HR_VERBS_MS);
    CHECK_EQ(rig.side[1].heard, (uint32_t)heard + 1);
    bond_close(&rig);
}

/* The connection that stands by is lost as well, and made again. */
TEST(the_lane_that_stands_by_is_called_again) {
    struct bond_rig rig;
    bond_open(&rig, "sim2", allowed);
    for (int side = 0; side < 2; side++) {
        UNTIL(&rig, (hurry(&rig), all_up(&rig)));
        uint32_t life = bond_ep_of(&rig.side[0])->lanes[HR_BOND_SPARE].life;
        hr_verbs_qp_break(bond_ep_of(&rig.side[side])->lanes[HR_BOND_SPARE].ep);
        UNTIL(&rig, (hurry(&rig), all_up(&rig) && bond_ep_of(&rig.side[0])->lanes[HR_BOND_SPARE].life > life));
        CHECK(carried(&rig));
    }
    for (int i = 0; i < 2; i++) CHECK_EQ(bond_of(&rig.side[i])->counts.lost, 0);
    CHECK_EQ(rig.side[0].falls, 0);
    bond_close(&rig);
}

TEST(memory_is_taken_back_while_tcp_carries) {
    struct bond_rig rig;
    bond_open(&rig, "sim2", allowed);
    ports(&rig, 0, 0);
    UNTIL(&rig, (send_told(&rig.side[0], 10, -1), on_spare(&rig) && rig.side[0].falls && rig.side[1].falls));
    UNTIL(&rig, quiet(&rig));
    struct bond_side *a = &rig.side[0], *b = &rig.side[1];
    struct hr_domain *d = b->domain;
    struct hr_rma write = {.local = a->memory, .len = 1000, .remote = &rig.rmem, .cookie = &rig.jobs[0]};
    hr_bond_on_revoke(bond_ep_of(a), (uint32_t)(rig.mem.rkey >> 32));
    memset(b->memory, 3, 1000);
    CHECK_EQ(a->domain->ops->post_write(a->ep, &write), HR_OK); /* passed over */
    d->ops->mem_deregister(d, &rig.mem);
    struct hr_desc desc;
    REQUIRE(d->ops->mem_register(d, b->memory, SLOT, HR_ACCESS_REMOTE_WRITE, &rig.mem) == HR_OK);
    REQUIRE(d->ops->mem_export(b->ep, &rig.mem, b->memory, SLOT, &desc) == HR_OK);
    REQUIRE(a->domain->ops->mem_import(a->ep, &desc, &rig.rmem) == HR_OK);
    memset(a->memory, 4, 1000);
    rig.jobs[0] = (struct job){.open = 1, .slot = -1};
    CHECK_EQ(a->domain->ops->post_write(a->ep, &write), HR_INPROGRESS); /* a number of its own */
    UNTIL(&rig, !rig.jobs[0].open);
    CHECK_EQ(b->memory[999], 4);
    bond_close(&rig);
}

TEST(pages_that_are_gone_are_no_crash) {
    uint8_t here[8192];
    uint8_t *gone = mmap(NULL, sizeof here, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(gone != MAP_FAILED);
    memset(gone, 1, sizeof here);
    CHECK_EQ(sim_touch(here, gone, sizeof here), 1);
    CHECK_EQ(here[8191], 1);
    munmap(gone + 4096, 4096);
    CHECK_EQ(sim_touch(here, gone, sizeof here), 0);
    CHECK_EQ(sim_touch(gone, here, sizeof here), 0);
    munmap(gone, 4096);
}

/* Nothing gets through any more, in either direction, and nobody is told. The kernel gives such a connection up after
 * 5 s, here sooner. */
static void silence(struct bond_rig *rig) {
    struct sock_filter drop = {.code = BPF_RET | BPF_K};
    struct sock_fprog all = {1, &drop};
    int silent, soon = 1000;
    socklen_t len = sizeof silent;
    for (int i = 0; i < 2; i++) {
        int fd = bond_ep_of(&rig->side[i])->lanes[HR_BOND_SPARE].ep->source.fd;
        REQUIRE(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &all, sizeof all) == 0);
        REQUIRE(getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silent, &len) == 0);
        CHECK_EQ(silent, 5000);
        REQUIRE(setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &soon, sizeof soon) == 0);
    }
}

static void onto_tcp(struct bond_rig *rig) {
    bond_open(rig, "sim2", allowed);
    ports(rig, 0, 0);
    UNTIL(rig, (send_told(&rig->side[0], 10, -1), on_spare(rig) && rig->side[0].falls && rig->side[1].falls));
    UNTIL(rig, quiet(rig));
}

/* Messages are on their way over tcp as that falls silent: they arrive by the rail, once. */
TEST(a_path_that_falls_silent_is_left) {
    struct bond_rig rig;
    onto_tcp(&rig);
    silence(&rig);
    for (int i = 0; i < 20; i++)
        for (int side = 0; side < 2; side++) UNTIL(&rig, send_told(&rig.side[side], 3000, -1) == HR_OK);
    start_job(&rig, 0, SLOT, 0, 1);
    CHECK(!quiet(&rig));
    ports(&rig, 0, 1);
    UNTIL(&rig, (hurry(&rig), rail_is_up(&rig)));
    CHECK(!quiet(&rig));
    UNTIL(&rig, (hurry(&rig), off_spare(&rig)));
    settle(&rig);
    CHECK(carried(&rig));
    UNTIL(&rig, (hurry(&rig), all_up(&rig))); /* tcp as well, by another connection */
    bond_close(&rig);
}

/* With no rail to go to, the peer is lost, whichever end has something under way. */
TEST(a_path_that_falls_silent_is_the_end_without_a_rail) {
    struct bond_rig rig;
    onto_tcp(&rig);
    silence(&rig);
    UNTIL(&rig, send_told(&rig.side[0], 3000, -1) == HR_OK);
    UNTIL(&rig, rig.side[0].losses && rig.side[1].losses);
    CHECK(hr_is_peer_error(rig.side[0].loss) && hr_is_peer_error(rig.side[1].loss));
    bond_close(&rig);
}

/* The peer's device takes what comes over tcp, and nobody looks at it there. */
TEST(a_peer_that_does_not_answer_over_tcp_is_left) {
    struct bond_rig rig;
    onto_tcp(&rig);
    struct hr_verbs_domain **rail = &bond_of(&rig.side[1])->rails[HR_BOND_SPARE], *deaf = *rail;
    *rail = NULL;
    for (int i = 0; i < 20; i++) UNTIL(&rig, send_told(&rig.side[0], 3000, -1) == HR_OK);
    ports(&rig, 0, 1);
    UNTIL(&rig, (hurry(&rig), bond_ep_of(&rig.side[0])->first == 0));
    *rail = deaf;
    UNTIL(&rig, (hurry(&rig), off_spare(&rig)));
    settle(&rig);
    UNTIL(&rig, (hurry(&rig), all_up(&rig)));
    CHECK(carried(&rig));
    bond_close(&rig);
}

TEST(an_atomic_on_a_page_that_is_gone_is_no_crash) {
    struct bond_rig rig;
    onto_tcp(&rig);
    struct bond_side *a = &rig.side[0], *b = &rig.side[1];
    const struct hr_provider *ops = b->domain->ops;
    uint8_t *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(page != MAP_FAILED);
    struct hr_mem mem;
    struct hr_desc desc;
    struct hr_rmem remote;
    REQUIRE(ops->mem_register(b->domain, page, 4096, HR_ACCESS_REMOTE_ATOMIC, &mem) == HR_OK);
    REQUIRE(ops->mem_export(b->ep, &mem, page, 4096, &desc) == HR_OK);
    REQUIRE(ops->mem_import(a->ep, &desc, &remote) == HR_OK);
    munmap(page, 4096);
    uint64_t before;
    struct hr_atomic add = {
        .op = HR_ATOMIC_FETCH_ADD, .result = &before, .remote = &remote, .operand = 1, .cookie = &rig.jobs[0]};
    rig.jobs[0] = (struct job){.open = 1, .slot = -1};
    CHECK_EQ(a->domain->ops->post_atomic(a->ep, &add), HR_INPROGRESS);
    UNTIL(&rig, a->losses && b->losses);
    ops->mem_deregister(b->domain, &mem);
    bond_close(&rig);
}
