/* test_verbs_bond.c - several rails for an endpoint: stripes, lanes lost in mid-transfer, handed over and used again.
 */

#include "bond_rig.h"

static const char two[] = "sim2,sim2", three[] = "sim2,sim2,sim2";

/* One of what a user may do, where there is room for it. */
static void do_something(struct bond_rig *rig) {
    static const size_t sizes[] = {1, 8, 200, 1024, 1025, 8192, 65536, 262144, 300001, SLOT};
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

/* Messages and stripes were under way on lanes that died. */
static int exercised(const struct bond_rig *rig) {
    const struct hr_bond *a = bond_of(&rig->side[0]), *b = bond_of(&rig->side[1]);
    return a->counts.resent + b->counts.resent > 0 && a->counts.redone > 0;
}

static void storm(const char *devices, const char *options, uint64_t seed, int strikes) {
    struct bond_rig rig;
    uint64_t before = 0;
    int left = 0;
    bond_open(&rig, devices, options);
    rig.random = seed;
    hurry(&rig);
    for (int64_t until = hr_now() + 40000 * HR_VERBS_MS;
         (strikes > 0 || !exercised(&rig)) && hr_now() < until && !check_failures();) {
        do_something(&rig);
        if (draw(&rig, 3) == 0) turn(&rig);
        if (!all_up(&rig)) {
            hurry(&rig);
            left = (int)draw(&rig, 200);
        } else if (left-- <= 0) {
            int n = bond_ep_of(&rig.side[0])->n;
            before = bond_of(&rig.side[0])->counts.back;
            strike(&rig, (int)draw(&rig, 2), (int)draw(&rig, (uint64_t)n), (enum fault)draw(&rig, FAULTS));
            strikes--;
            for (int64_t end = hr_now() + 10000 * HR_VERBS_MS;
                 bond_of(&rig.side[0])->counts.back == before && hr_now() < end && !check_failures();) {
                do_something(&rig);
                if (draw(&rig, 3) == 0) turn(&rig);
                hurry(&rig);
            }
            CHECK(bond_of(&rig.side[0])->counts.back > before);
        }
    }
    CHECK(strikes <= 0 && exercised(&rig));
    settle(&rig);
    for (int i = 0; i < bond_of(&rig.side[0])->n; i++) CHECK(bond_of(&rig.side[0])->rails[i]->counts.direct > SLOT);
    CHECK(bond_of(&rig.side[0])->counts.lost >= bond_of(&rig.side[0])->counts.back);
    CHECK_EQ(bond_of(&rig.side[0])->rails[0]->counts.rnr, 0);
    bond_close(&rig);
}

TEST(a_storm_on_two_rails) {
    for (uint64_t seed = 1; seed <= 3; seed++) storm(two, NULL, seed, 8);
}

TEST(a_storm_on_three_rails) { storm(three, NULL, 11, 10); }

/* As jobs have them: a port that is down is found out by what does not come back. */
TEST(a_storm_on_rails_that_are_watched) { storm(two, "silence=5", 21, 8); }

/* ---- rails ---- */

TEST(devices_that_are_named_are_rails) {
    static const struct {
        const char *device;
        int rails;
    } cases[] = {{"sim2,sim2", 2}, {"sim2:1,sim2:2", 2}, {"sim,sim2,sim2,sim", 3}, {"no_such_*,sim,sim2", 2}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct bond_rig rig = {0};
        char text[256];
        uint8_t addr[HR_MAX_ADDR];
        REQUIRE(bond_side_open(&rig, 0, cases[i].device, NULL, text) == HR_OK);
        CHECK_EQ(bond_of(&rig.side[0])->n, cases[i].rails);
        CHECK(rig.side[0].domain->ops->domain_address(rig.side[0].domain, addr) <= HR_MAX_ADDR);
        rig.side[0].domain->ops->domain_describe(rig.side[0].domain, text, sizeof text);
        CHECK_EQ(strtol(text, NULL, 10), cases[i].rails);
        CHECK(strstr(text, "rails: sim"));
        rig.side[0].domain->ops->domain_close(rig.side[0].domain);
    }
}

TEST(a_peer_with_one_rail) {
    for (int one = 0; one < 2; one++) {
        struct bond_rig rig = {0};
        char detail[256];
        REQUIRE(bond_side_open(&rig, one, "sim2", NULL, detail) == HR_OK);
        REQUIRE(bond_side_open(&rig, !one, two, NULL, detail) == HR_OK);
        bond_connect(&rig);
        for (int i = 0; i < 300; i++) UNTIL(&rig, send_told(&rig.side[i % 2], (size_t)i, -1) == HR_OK);
        UNTIL(&rig, quiet(&rig));
        for (int i = 0; i < 2; i++) rig.side[i].domain->ops->ep_destroy(rig.side[i].ep);
        for (int i = 0; i < 2; i++) rig.side[i].domain->ops->domain_close(rig.side[i].domain);
    }
}

TEST(stripes_follow_the_rates) {
    struct bond_rig rig;
    uint64_t was[2], now[2];
    bond_open(&rig, two, NULL);
    for (int i = 0; i < 2; i++) {
        bond_ep_of(&rig.side[0])->lanes[i].rate = i ? 1 : 3;
        bond_ep_of(&rig.side[0])->lanes[i].last = hr_now() + 60000 * HR_VERBS_MS; /* not stale, however slow this is */
        was[i] = bond_of(&rig.side[0])->rails[i]->counts.direct;
    }
    CHECK_EQ(start_job(&rig, 0, SLOT, 0, 1), HR_INPROGRESS);
    for (int i = 0; i < 2; i++) now[i] = bond_of(&rig.side[0])->rails[i]->counts.direct - was[i];
    CHECK_EQ(now[0] + now[1], SLOT);
    CHECK(now[0] > 2 * now[1] && now[1] > SLOT / 8);
    settle(&rig);
    for (int i = 0; i < 2; i++) CHECK(bond_ep_of(&rig.side[0])->lanes[i].rate > 0);
    bond_close(&rig);
}

/* What the engine posts on a slow link is short, as it takes long: all lanes have some of it. On a fast one it goes by
 * one lane, until that has much under way. */
TEST(short_writes_go_by_all_lanes_of_a_slow_link) {
    enum { LEN = 16 << 10, N = 6 };
    for (int fast = 0; fast < 2; fast++) {
        struct bond_rig rig;
        uint64_t bytes[3];
        bond_open(&rig, three, NULL);
        struct bond_side *side = &rig.side[0];
        struct hr_rma write = {.local = side->memory, .len = LEN, .remote = &rig.rmem};
        for (int i = 0; i < 3; i++) {
            struct hr_bond_lane *lane = &bond_ep_of(side)->lanes[i];
            lane->rate = fast ? 10 : 0.1;
            lane->last = hr_now();
            bytes[i] = bond_of(side)->rails[i]->counts.direct;
        }
        for (int i = 0; i < N; i++) {
            rig.jobs[i] = (struct job){.open = 1, .slot = -1};
            write.cookie = &rig.jobs[i];
            CHECK_EQ(side->domain->ops->post_write(side->ep, &write), HR_INPROGRESS);
        }
        for (int i = 0; i < 3; i++) {
            bytes[i] = bond_of(side)->rails[i]->counts.direct - bytes[i];
            CHECK_EQ(bytes[i], (uint64_t)LEN * (!fast ? N / 3 : i == bond_ep_of(side)->first ? N : 0));
        }
        UNTIL(&rig, rig.dones == N);
        bond_close(&rig);
    }
}

/* ---- lanes ---- */

/* A cable that stays out is called in vain, and used again when it is plugged in. */
TEST(a_port_that_is_mended_is_used_again) {
    struct bond_rig rig;
    bond_open(&rig, "sim2:1,sim2:2", NULL);
    struct ibv_context *ctx = bond_of(&rig.side[1])->rails[0]->ctx;
    hr_verbs_sim_port(ctx, 1, 0);
    UNTIL(&rig, (send_told(&rig.side[0], 10, -1), lanes_up(&rig.side[0]) == 1 && lanes_up(&rig.side[1]) == 1));
    CHECK(carried(&rig));
    for (int64_t until = hr_now() + 300 * HR_VERBS_MS; hr_now() < until; hurry(&rig)) turn(&rig);
    CHECK_EQ(lanes_up(&rig.side[0]), 1);
    for (int i = 0; i < 2; i++) CHECK_EQ(bond_of(&rig.side[i])->counts.lost, 1); /* calls in vain do not count */
    hr_verbs_sim_port(ctx, 1, 1);
    UNTIL(&rig, (hurry(&rig), all_up(&rig)));
    CHECK(carried(&rig));
    settle(&rig);
    bond_close(&rig);
}

/* Nothing else would end a call on which the peer falls silent. */
TEST(a_call_has_its_time_once_another_lane_is_up) {
    struct bond_rig rig = {0};
    char detail[256];
    for (int i = 0; i < 2; i++) REQUIRE(bond_side_open(&rig, i, "sim2:1,sim2:2", NULL, detail) == HR_OK);
    bond_call(&rig);
    struct hr_verbs_domain **rail = &bond_of(&rig.side[1])->rails[1], *silent = *rail;
    *rail = NULL;
    UNTIL(&rig, rig.side[0].ups && rig.side[1].ups);
    struct hr_bond_lane *lane = &bond_ep_of(&rig.side[0])->lanes[1];
    CHECK(lane->stage == HR_BOND_CALLING && lane->due < hr_now() + 60000 * HR_VERBS_MS);
    CHECK(bond_of(&rig.side[0])->tick);
    lane->due = hr_now();
    hr_bond_tick_start(bond_of(&rig.side[0]));
    UNTIL(&rig, lane->life == 2);
    *rail = silent;
    UNTIL(&rig, (hurry(&rig), all_up(&rig)));
    CHECK(carried(&rig));
    for (int i = 0; i < 2; i++) rig.side[i].domain->ops->ep_destroy(rig.side[i].ep);
    for (int i = 0; i < 2; i++) rig.side[i].domain->ops->domain_close(rig.side[i].domain);
}

/* A bond that is over, or a lane of another one, moves and tells nothing more. */
TEST(what_is_over_is_over_at_once) {
    struct bond_rig rig;
    struct ibv_qp_init_attr init;
    bond_open(&rig, two, NULL);
    struct hr_bond_ep *ep = bond_ep_of(&rig.side[1]);
    struct told told = {.number = 0};
    uint64_t hdr[1 + sizeof told / 8] = {HR_BOND_MSG};
    ep->lanes[1].stage = HR_BOND_LOST;
    memcpy(&hdr[1], &told, sizeof told);
    hr_bond_on_recv(&ep->lanes[1], (const uint8_t *)hdr, sizeof hdr, NULL, 0);
    CHECK_EQ(rig.side[1].heard, 0);
    hr_bond_fail(ep, HR_ERR_PROTOCOL, "a test");
    for (int i = 0; i < 2; i++) {
        struct ibv_qp_attr attr = {0};
        hr_verbs_sim.query_qp(ep->lanes[i].ep->qp, &attr, IBV_QP_STATE, &init);
        CHECK_EQ(attr.qp_state, IBV_QPS_ERR);
    }
    CHECK_EQ(rig.side[1].domain->ops->mem_quiet(rig.side[1].ep, &rig.mem), HR_OK);
    UNTIL(&rig, rig.side[0].losses && rig.side[1].losses);
    bond_close(&rig);
}

/* The least of three: a machine can stand still. */
TEST(a_peer_that_is_dead_keeps_nobody) {
    int64_t least = INT64_MAX;
    for (int i = 0; i < 3; i++) {
        struct bond_rig rig;
        bond_open(&rig, two, NULL);
        rig.side[0].domain->ops->ep_abort(rig.side[0].ep);
        int64_t start = hr_now();
        CHECK_EQ(rig.side[1].domain->ops->mem_quiet(rig.side[1].ep, &rig.mem), HR_ERR_UNSUPPORTED);
        if (hr_now() - start < least) least = hr_now() - start;
        bond_close(&rig);
    }
    CHECK(least < 300 * HR_VERBS_MS);
}

TEST(without_lanes_the_peer_is_lost) {
    struct bond_rig rig;
    bond_open(&rig, two, NULL);
    for (int i = 0; i < 2; i++) hr_verbs_qp_break(bond_ep_of(&rig.side[0])->lanes[i].ep);
    UNTIL(&rig, rig.side[0].losses && rig.side[1].losses);
    CHECK(hr_is_peer_error(rig.side[0].loss) && hr_is_peer_error(rig.side[1].loss));
    bond_close(&rig);
}

TEST(a_peer_that_leaves_is_told_at_once) {
    struct bond_rig rig;
    bond_open(&rig, two, NULL);
    CHECK_EQ(send_told(&rig.side[0], 5000, -1), HR_OK);
    UNTIL(&rig, !rig.side[0].domain->ops->ep_unsent(rig.side[0].ep));
    int64_t start = hr_now();
    rig.side[0].domain->ops->ep_abort(rig.side[0].ep);
    UNTIL(&rig, rig.side[1].losses);
    CHECK(hr_now() - start < 5000 * HR_VERBS_MS);
    CHECK_EQ(rig.side[1].heard, 1); /* what it had sent came first */
    CHECK_EQ(rig.side[1].losses, 1);
    bond_close(&rig);
}

/* The others go on, and it is not called again. */
TEST(a_device_that_is_taken_away_is_closed) {
    struct bond_rig rig;
    struct hr_mem before, mem;
    char text[512];
    bond_open(&rig, two, NULL);
    struct hr_domain *domain = rig.side[1].domain;
    struct hr_bond *bond = bond_of(&rig.side[1]);
    CHECK_EQ(domain->ops->mem_register(domain, rig.side[1].memory, 100, 0, &before), HR_OK);
    hr_verbs_sim_remove(bond->rails[0]->ctx);
    UNTIL(&rig, !bond->rails[0]->ctx);
    domain->ops->mem_deregister(domain, &before);
    CHECK_EQ(domain->ops->mem_register(domain, rig.side[1].memory, 100, 0, &mem), HR_OK);
    CHECK(!((struct hr_bond_reg *)mem.priv)->mems[0].priv && ((struct hr_bond_reg *)mem.priv)->mems[1].priv);
    domain->ops->mem_deregister(domain, &mem);
    CHECK(carried(&rig));
    CHECK_EQ(start_job(&rig, 0, SLOT, 0, 1), HR_INPROGRESS);
    settle(&rig);
    for (int64_t until = hr_now() + 300 * HR_VERBS_MS; hr_now() < until; hurry(&rig)) turn(&rig);
    CHECK(lanes_up(&rig.side[0]) == 1 && lanes_up(&rig.side[1]) == 1);
    CHECK_EQ(bond->rails[0]->door.parked, 0); /* who called it again was sent away */
    domain->ops->domain_describe(domain, text, sizeof text);
    CHECK(strstr(text, "2 rails") && strstr(text, ": sim2 is gone; sim2, "));
    bond_close(&rig);
}
