/* test_rails.c - several rails between two ranks: what goes by which, and that they are lost and closed together. */

#define WORLD_RAILS 2
#include "core/engine.h"
#include "world.h"

#define BYTES (600u << 10) /* of a transfer: more than goes along with a header */

static struct hr_conn *rail_of(struct rank *r, int peer, int rail) {
    struct hr_conn *first = hr_conn_find(r->engine, (uint64_t)peer, 0);
    REQUIRE(first && first->nrails == WORLD_RAILS);
    return first->rails[rail];
}

/* Payload that has ever gone to or come from a peer by a rail. */
static uint64_t moved(struct rank *r, int peer, int rail) {
    hr_lock(r->engine);
    struct hr_conn *conn = rail_of(r, peer, rail);
    uint64_t n = conn->tx_bytes + conn->rx_bytes;
    hr_unlock(r->engine);
    return n;
}

/* Two ranks exchange a block by each of these lanes; with sum they add what comes. */
struct plan {
    int nlanes, sum;
    uint8_t lanes[4];
    uint64_t bytes;
};
static struct hr_program *exchange(struct rank *r, const struct plan *plan) {
    struct hr_instr instrs[8];
    uint32_t n = 0;
    char detail[256] = "";
    struct hr_program *p = NULL;
    for (int k = 0; k < plan->nlanes; k++) {
        uint64_t off = (uint64_t)k * plan->bytes;
        instrs[n++] = (struct hr_instr){.op = HR_OP_SEND,
                                        .lane = plan->lanes[k],
                                        .peer = !r->rank,
                                        .tag = (uint32_t)k,
                                        .len = plan->bytes,
                                        .src_buf = HR_BUF_IN,
                                        .src_off = off};
        instrs[n++] = (struct hr_instr){.op = plan->sum ? HR_OP_RECV_REDUCE : HR_OP_RECV,
                                        .lane = plan->lanes[k],
                                        .peer = !r->rank,
                                        .tag = (uint32_t)k,
                                        .len = plan->bytes,
                                        .dst_buf = HR_BUF_OUT,
                                        .dst_off = off};
    }
    uint64_t all = (uint64_t)plan->nlanes * plan->bytes;
    hr_status status = hr_program_new(instrs, n, NULL, 0, NULL, 0, all, all, 0, r->size, &p, detail);
    if (status) fprintf(stderr, "%s\n", detail);
    REQUIRE(status == HR_OK);
    return p;
}

static hr_status run(struct rank *r, struct hr_program *p, const void *in, void *out, double seconds) {
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    CHECK_EQ(hr_run(r->comm, p, in, out, HR_UINT32, HR_SUM, 7, &req), HR_OK);
    return finish(r, &req, seconds);
}

static void *exchanged(void *arg) {
    struct rank *r = arg;
    struct plan *plan = r->arg;
    uint64_t n = (uint64_t)plan->nlanes * plan->bytes / 4, wrong = 0;
    uint32_t *in = hr_arena_alloc(n * 4, 0), *out = hr_arena_alloc(n * 4, 0);
    struct hr_program *p = exchange(r, plan);
    for (uint64_t i = 0; i < n; i++) {
        in[i] = (uint32_t)(i * 2 + (uint64_t)r->rank);
        out[i] = 5;
    }
    CHECK_EQ(run(r, p, in, out, 20), HR_OK);
    for (uint64_t i = 0; i < n; i++) wrong += out[i] != (uint32_t)(i * 2 + !r->rank) + (plan->sum ? 5 : 0);
    CHECK_EQ(wrong, 0);
    uint8_t token = 0;
    CHECK_EQ(send_to(r, &token, 1, !r->rank, 9), HR_OK);
    CHECK_EQ(recv_from(r, &token, 1, !r->rank, 9, NULL), HR_OK);
    for (int rail = 0; rail < WORLD_RAILS; rail++) {
        uint64_t expected = rail ? 0 : 2; /* the two messages take the first rail */
        for (int k = 0; k < plan->nlanes; k++)
            if (plan->lanes[k] % WORLD_RAILS == rail) expected += 2 * plan->bytes;
        CHECK_EQ(moved(r, !r->rank, rail), expected);
    }
    hr_program_put(p);
    hr_arena_free(in);
    hr_arena_free(out);
    return NULL;
}

static void exchange_by(struct plan plan) {
    struct world w;
    world_open(&w, 2, NULL);
    world_run(&w, exchanged, &plan);
    world_close(&w);
}
TEST(a_lane_is_a_rail) { exchange_by((struct plan){.nlanes = 2, .lanes = {0, 1}, .bytes = BYTES}); }
TEST(all_by_the_second_rail) { exchange_by((struct plan){.nlanes = 2, .lanes = {1, 1}, .bytes = BYTES}); }
TEST(lanes_beyond_the_rails_begin_anew) { exchange_by((struct plan){.nlanes = 3, .lanes = {2, 3, 5}, .bytes = BYTES}); }
TEST(small_ones_too) { exchange_by((struct plan){.nlanes = 3, .lanes = {1, 0, 1}, .bytes = 256}); }
TEST(added_as_they_come) { exchange_by((struct plan){.nlanes = 2, .lanes = {0, 1}, .bytes = BYTES, .sum = 1}); }

/* --- failures
 * ------------------------------------------------------------------------------------------------------------------ */

static hr_status until_broken(struct rank *r, double seconds) {
    struct hr_comm_state state = {0};
    struct timespec nap = {0, 1000000};
    for (int64_t end = hr_now() + SECONDS(seconds); state.status == HR_OK && hr_now() < end; nanosleep(&nap, NULL))
        hr_comm_state(r->comm, &state);
    return state.status;
}

/* Rank 0 loses one rail: what waits on the other is ended too, on both sides, and its memory is left alone. */
static void *one_rail_lost(void *arg) {
    struct rank *r = arg;
    int lost = *(int *)r->arg;
    struct plan plan = {.nlanes = 1, .lanes = {(uint8_t)!lost}, .bytes = BYTES};
    uint8_t *in = hr_arena_alloc(BYTES, 0), *out = hr_arena_alloc(BYTES, 0);
    struct hr_program *p = exchange(r, &plan);
    memset(out, 3, BYTES);
    if (r->rank == 0) {
        struct timespec nap = {0, 20000000};
        nanosleep(&nap, NULL);
        hr_lock(r->engine);
        hr_conn_lost(rail_of(r, 1, lost), HR_ERR_PEER_LOST, "pulled");
        hr_settle(r->engine);
        hr_unlock(r->engine);
        CHECK_EQ(until_broken(r, 5), HR_ERR_PEER_LOST);
    } else {
        CHECK_EQ(run(r, p, in, out, 10), HR_ERR_PEER_LOST);
        int64_t untouched = 0;
        for (uint64_t i = 0; i < BYTES; i++) untouched += out[i] == 3;
        CHECK_EQ(untouched, BYTES);
    }
    CHECK_EQ(run(r, p, in, out, 10), HR_ERR_PEER_LOST);
    struct hr_peer_stats stats = {0};
    CHECK(hr_peer_stats(r->engine, (uint64_t)!r->rank, &stats) && stats.rails == WORLD_RAILS && !stats.connected);
    hr_program_put(p);
    hr_arena_free(in);
    hr_arena_free(out);
    return NULL;
}
TEST(rails_are_lost_together) {
    for (int lost = 0; lost < WORLD_RAILS; lost++) {
        struct world w;
        world_open(&w, 2, NULL);
        world_run(&w, one_rail_lost, &lost);
        world_close(&w);
    }
}

/* Burying the first rail breaks the communicator, which ends what waits on the others: their endpoints are gone by
 * then, as a peer could write to the memory otherwise. */
static struct hr_request *waiting;
static const struct hr_provider *aborting;
static int aborted, unfinished;
static void ep_abort_watched(struct hr_ep *ep) {
    aborted++;
    unfinished += !waiting->done;
    aborting->ep_abort(ep);
}
TEST(endpoints_go_before_requests) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *r = &w.ranks[0];
    struct plan plan = {.nlanes = 1, .lanes = {1}, .bytes = BYTES};
    struct hr_program *p = exchange(r, &plan);
    uint8_t *in = hr_arena_alloc(BYTES, 0), *out = hr_arena_alloc(BYTES, 0);
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    CHECK_EQ(hr_run(r->comm, p, in, out, HR_UINT32, HR_SUM, 7, &req), HR_OK);
    hr_lock(r->engine);
    struct hr_domain *domain = rail_of(r, 1, 1)->lanes[0].ep->domain;
    struct hr_provider watched = *domain->ops;
    aborting = domain->ops;
    waiting = &req;
    watched.ep_abort = ep_abort_watched;
    domain->ops = &watched;
    hr_conn_lost(rail_of(r, 1, 0), HR_ERR_PEER_LOST, "pulled");
    hr_settle(r->engine);
    domain->ops = aborting;
    hr_unlock(r->engine);
    CHECK_EQ(aborted, 1);
    CHECK_EQ(unfinished, aborted);
    CHECK_EQ(finish(r, &req, 5), HR_ERR_PEER_LOST);
    hr_program_put(p);
    hr_arena_free(in);
    hr_arena_free(out);
    world_close(&w);
}

TEST(the_control_plane_loses_all_rails) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *r = &w.ranks[0];
    hr_peer_lost(r->engine, 1, HR_ERR_PEER_LOST, "says the control plane");
    for (int rail = 0; rail < WORLD_RAILS; rail++) CHECK_EQ(rail_of(r, 1, rail)->state, HR_CONN_LOST);
    CHECK_EQ(until_broken(&w.ranks[1], 5), HR_ERR_PEER_LOST);
    world_close(&w);
}

/* A rank that leaves says goodbye on each rail: whichever is heard first, its leaving is no loss. */
static void *leave_or_stay(void *arg) {
    struct rank *r = arg;
    if (r->rank == 0) {
        hr_comm_close(r->comm);
        hr_engine_close(r->engine, hr_now() + SECONDS(2));
        r->comm = NULL;
        r->engine = NULL;
        return NULL;
    }
    int closed = 0;
    for (int64_t end = hr_now() + SECONDS(5); !closed && hr_now() < end;) {
        hr_progress(r->engine);
        hr_lock(r->engine);
        closed = 1;
        for (int rail = 0; rail < WORLD_RAILS; rail++) {
            struct hr_conn *conn = rail_of(r, 0, rail);
            if (conn->state == HR_CONN_LOST) CHECK(conn->was_closed);
            closed &= conn->state == HR_CONN_CLOSED || conn->state == HR_CONN_LOST;
        }
        hr_unlock(r->engine);
    }
    struct hr_comm_state state;
    hr_comm_state(r->comm, &state);
    CHECK(closed);
    CHECK_EQ(state.status, HR_OK);
    CHECK_EQ(r->comm->nclosed, 1);
    return NULL;
}
TEST(leaving_is_no_loss) {
    for (int i = 0; i < 20; i++) {
        struct world w;
        world_open(&w, 2, NULL);
        world_run(&w, leave_or_stay, NULL);
        world_close(&w);
    }
}

/* --- names
 * ---------------------------------------------------------------------------------------------------------------------
 */

static hr_status open_named(const char *providers, const char *rails, char detail[256]) {
    struct hr_engine *engine = NULL;
    struct hr_config config = {.providers = providers, .rails = rails, .spin_us = -1};
    hr_auth_init(&config.auth, "secret", 6, 0, 1);
    hr_status status = hr_engine_open(&config, &engine, detail);
    if (status == HR_OK) hr_engine_close(engine, hr_now());
    return status;
}
TEST(names_of_rails) {
    char detail[256];
    CHECK_EQ(open_named("tcp,tcp:1,tcp:7", NULL, detail), HR_OK);
    CHECK_EQ(open_named("tcp,tcp:1", "tcp:127.0.0.1,lo", detail), HR_OK);
    CHECK_EQ(open_named("tcp:0", NULL, detail), HR_ERR_NO_DEVICE);
    CHECK_EQ(open_named("tcp:8", NULL, detail), HR_ERR_NO_DEVICE);
    CHECK_EQ(open_named("tcp:1x", NULL, detail), HR_ERR_NO_DEVICE);
    CHECK(strstr(detail, "'tcp:1x'"));
    CHECK_EQ(open_named("tcp,tcp:1,tcp:2", "tcp:lo,lo", detail), HR_ERR_INVALID);
    CHECK(strstr(detail, "'tcp:2'"));
    CHECK_EQ(open_named("tcp,tcp:1", "tcp:lo,nosuch", detail), HR_ERR_NO_DEVICE);
    CHECK(strstr(detail, "nosuch"));
}

TEST(rails_are_connected_in_turn) {
    struct world w;
    char text[32];
    uint8_t addr[HR_MAX_ADDR];
    size_t len;
    const char *name;
    struct hr_caps caps;
    char about[HR_ABOUT];
    world_open(&w, 2, NULL);
    for (int d = 0; hr_engine_domain(w.ranks[0].engine, d, &name, addr, &len, &caps, about); d++)
        if (!strcmp(name, world_rail(1, text))) break;
    CHECK_EQ(hr_connect(w.ranks[0].engine, 77, world_rail(1, text), addr, len, 1), HR_ERR_INVALID);
    CHECK_EQ(hr_connect(w.ranks[0].engine, 1, world_rail(2, text), addr, len, 1), HR_ERR_INVALID);
    CHECK(!hr_conn_find(w.ranks[0].engine, 77, 0));
    world_close(&w);
}
