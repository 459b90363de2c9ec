/* test_channels.c - traffic classes of communicators: connections of their own beside the usual ones, which stand and
 * fall with their peer, and concern nobody else where they cannot be had. */

#include "core/engine.h"
#include "world.h"

enum { URGENT = 46, BULK = 10 };
#define BYTES (600u << 10)

/* Others do not leave the host. */
static int carries(void) { return strcmp(world_provider(), "loop") && strcmp(world_provider(), "shm"); }

struct card {
    uint8_t addr[HR_MAX_ADDR];
    size_t len;
};

static struct card card_of(struct rank *r) {
    struct card card;
    const char *name;
    struct hr_caps caps;
    char about[HR_ABOUT];
    int d = 0;
    while (hr_engine_domain(r->engine, d++, &name, card.addr, &card.len, &caps, about))
        if (!strcmp(name, world_provider())) return card;
    REQUIRE(!"the provider has a domain");
    return card;
}

static hr_status begin(struct world *w, int from, int to, int dscp) {
    struct card card = card_of(&w->ranks[to]);
    return hr_connect_classed(w->ranks[from].engine, (uint64_t)to, world_provider(), card.addr, card.len, from < to,
                              dscp);
}

static hr_status await(struct world *w, int rank, int dscp, double seconds, uint64_t *bad_p) {
    char detail[256] = "";
    return hr_connect_wait_classed(w->ranks[rank].engine, dscp, hr_now() + SECONDS(seconds), bad_p, detail);
}

/* All pairs; comms[i] is of rank i. */
static void open_class(struct world *w, int dscp, uint64_t id, struct hr_comm **comms) {
    uint64_t peers[WORLD_MAX], bad;
    for (int i = 0; i < w->n; i++) {
        peers[i] = (uint64_t)i;
        for (int j = 0; j < w->n; j++)
            if (i != j) CHECK_EQ(begin(w, i, j, dscp), HR_OK);
    }
    for (int i = 0; i < w->n; i++) {
        CHECK_EQ(await(w, i, dscp, 5, &bad), HR_OK);
        hr_class_settle(w->ranks[i].engine, dscp);
        CHECK_EQ(hr_comm_open_classed(w->ranks[i].engine, id, peers, w->n, i, dscp, &comms[i]), HR_OK);
    }
}

/* Payload that has gone to or come from a peer by the connections of a class. */
static uint64_t moved(struct rank *r, int peer, uint32_t channel) {
    hr_lock(r->engine);
    struct hr_conn *conn = hr_conn_find(r->engine, (uint64_t)peer, channel);
    uint64_t n = conn ? conn->tx_bytes + conn->rx_bytes : 0;
    hr_unlock(r->engine);
    return n;
}

static hr_status send_on(struct rank *r, struct hr_comm *comm, const void *buf, size_t len, int dst) {
    struct rank as = *r;
    as.comm = comm;
    return send_to(&as, buf, len, dst, 5);
}

static hr_status recv_on(struct rank *r, struct hr_comm *comm, void *buf, size_t len, int src) {
    struct rank as = *r;
    as.comm = comm;
    return recv_from(&as, buf, len, src, 5, NULL);
}

struct both {
    struct hr_comm **comms;
    hr_status status[WORLD_MAX];
};
static char sent[BYTES], got[BYTES];

static void *one_way(void *arg) {
    struct rank *r = arg;
    struct both *both = r->arg;
    both->status[r->rank] = r->rank == 0   ? send_on(r, both->comms[0], sent, BYTES, 1)
                            : r->rank == 1 ? recv_on(r, both->comms[1], got, BYTES, HR_ANY_SOURCE)
                                           : HR_OK;
    return NULL;
}

TEST(what_a_communicator_sends_goes_by_its_class) {
    if (!carries()) return;
    struct world w;
    struct hr_comm *urgent[2], *bulk[2], *none[2];
    world_open(&w, 2, NULL);
    open_class(&w, URGENT, 7, urgent);
    open_class(&w, BULK, 8, bulk);
    for (int i = 0; i < 2; i++) none[i] = w.ranks[i].comm;
    struct {
        struct hr_comm **comms;
        uint32_t channel;
    } each[] = {{urgent, HR_CHANNEL(URGENT)}, {bulk, HR_CHANNEL(BULK)}, {none, 0}};
    for (int k = 0; k < 3; k++) {
        struct both both = {.comms = each[k].comms};
        uint64_t before[3];
        for (int c = 0; c < 3; c++) before[c] = moved(&w.ranks[1], 0, each[c].channel);
        memset(sent, k + 1, BYTES);
        world_run(&w, one_way, &both);
        CHECK(both.status[0] == HR_OK && both.status[1] == HR_OK);
        CHECK_EQ(memcmp(sent, got, BYTES), 0);
        for (int c = 0; c < 3; c++) CHECK_EQ(moved(&w.ranks[1], 0, each[c].channel) - before[c], c == k ? BYTES : 0);
    }
    struct hr_peer_stats stats; /* of all ways to it */
    CHECK(hr_peer_stats(w.ranks[1].engine, 0, &stats) && stats.connected && stats.rails == 1);
    CHECK_EQ(stats.rx_bytes, 3 * BYTES);
    CHECK_EQ(hr_class_taken(w.ranks[0].engine, world_provider(), URGENT), HR_OK);
    CHECK_EQ(hr_class_taken(w.ranks[0].engine, world_provider(), 11), HR_ERR_UNSUPPORTED);
    CHECK_EQ(hr_class_taken(w.ranks[0].engine, world_provider(), 64), HR_ERR_INVALID);
    for (int i = 0; i < 2; i++) hr_comm_close(urgent[i]), hr_comm_close(bulk[i]);
    world_close(&w);
}

TEST(ends_meet_by_class_and_not_by_the_order_of_connecting) {
    if (!carries()) return;
    struct world w;
    uint64_t bad, peers[2] = {0, 1};
    struct hr_comm *comms[2];
    world_open(&w, 2, NULL);
    CHECK_EQ(begin(&w, 0, 1, URGENT), HR_OK);
    CHECK_EQ(begin(&w, 0, 1, BULK), HR_OK);
    CHECK_EQ(begin(&w, 1, 0, BULK), HR_OK);
    CHECK_EQ(begin(&w, 1, 0, URGENT), HR_OK);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(await(&w, i, URGENT, 5, &bad), HR_OK);
        CHECK_EQ(await(&w, i, BULK, 5, &bad), HR_OK);
        CHECK_EQ(hr_comm_open_classed(w.ranks[i].engine, 9, peers, 2, i, BULK, &comms[i]), HR_OK);
    }
    struct both both = {.comms = comms};
    memset(sent, 9, BYTES);
    world_run(&w, one_way, &both);
    CHECK(both.status[0] == HR_OK && both.status[1] == HR_OK);
    CHECK_EQ(memcmp(sent, got, BYTES), 0);
    for (int i = 0; i < 2; i++) hr_comm_close(comms[i]);
    world_close(&w);
}

TEST(a_class_that_cannot_be_had_concerns_nobody_else) {
    if (!carries()) return;
    struct world w;
    uint64_t bad = 0;
    struct hr_peer_stats stats;
    struct hr_comm *urgent[2], *bulk[2];
    world_open(&w, 2, NULL);
    CHECK_EQ(begin(&w, 0, 1, URGENT), HR_OK); /* the peer does not want it */
    CHECK_EQ(await(&w, 0, URGENT, 0.3, &bad), HR_ERR_TIMEOUT);
    CHECK_EQ(bad, 1);
    CHECK_EQ(hr_class_taken(w.ranks[0].engine, world_provider(), URGENT), HR_ERR_UNSUPPORTED);
    hr_lock(w.ranks[0].engine);
    hr_conn_lost(hr_conn_find(w.ranks[0].engine, 1, HR_CHANNEL(URGENT)), HR_ERR_UNREACHABLE, "no queue pair is left");
    hr_settle(w.ranks[0].engine);
    hr_unlock(w.ranks[0].engine);
    CHECK_EQ(await(&w, 0, URGENT, 0.3, &bad), HR_ERR_UNREACHABLE);
    CHECK_EQ(hr_class_taken(w.ranks[0].engine, world_provider(), URGENT), HR_ERR_UNSUPPORTED);
    CHECK(hr_peer_stats(w.ranks[0].engine, 1, &stats) && stats.connected);
    struct hr_comm *comms[2] = {w.ranks[0].comm, w.ranks[1].comm};
    struct both both = {.comms = comms};
    memset(sent, 3, BYTES);
    world_run(&w, one_way, &both);
    CHECK(both.status[0] == HR_OK && both.status[1] == HR_OK);
    open_class(&w, BULK, 8, bulk); /* nor does another class wait for it */
    hr_class_forget(w.ranks[0].engine, URGENT);
    CHECK(!hr_conn_find(w.ranks[0].engine, 1, HR_CHANNEL(URGENT)));
    open_class(&w, URGENT, 9, urgent);          /* and it may be had later */
    hr_class_forget(w.ranks[0].engine, URGENT); /* what was settled stays */
    CHECK(hr_conn_find(w.ranks[0].engine, 1, HR_CHANNEL(URGENT)));
    both.comms = urgent;
    memset(sent, 4, BYTES);
    world_run(&w, one_way, &both);
    CHECK(both.status[0] == HR_OK && both.status[1] == HR_OK);
    CHECK_EQ(memcmp(sent, got, BYTES), 0);
    for (int i = 0; i < 2; i++) hr_comm_close(urgent[i]), hr_comm_close(bulk[i]);
    world_close(&w);
}

TEST(all_ways_to_a_peer_are_lost_together) {
    if (!carries()) return;
    struct world w;
    struct hr_comm *urgent[3];
    struct hr_comm_state state;
    world_open(&w, 3, NULL);
    open_class(&w, URGENT, 7, urgent);
    for (int lose = 0; lose < 2; lose++) { /* the class is lost, and then the usual way */
        int peer = lose + 1;
        uint64_t pair[2] = {0, (uint64_t)peer};
        struct hr_comm *comm;
        CHECK_EQ(hr_comm_open_classed(w.ranks[0].engine, 20 + (uint64_t)lose, pair, 2, 0, lose ? URGENT : HR_NO_CLASS,
                                      &comm),
                 HR_OK);
        hr_lock(w.ranks[0].engine);
        hr_conn_lost(hr_conn_find(w.ranks[0].engine, (uint64_t)peer, lose ? 0 : HR_CHANNEL(URGENT)), HR_ERR_PEER_LOST,
                     "cut");
        hr_settle(w.ranks[0].engine);
        hr_unlock(w.ranks[0].engine);
        hr_comm_state(comm, &state);
        CHECK_EQ(state.status, HR_ERR_PEER_LOST);
        CHECK_EQ(state.peer, 1);
        hr_comm_close(comm);
    }
    for (int i = 0; i < 3; i++) hr_comm_close(urgent[i]);
    world_close(&w);
}

TEST(what_makes_no_class_is_refused) {
    struct world w;
    struct hr_comm *comm;
    uint64_t pair[2] = {0, 1};
    world_open(&w, 2, NULL);
    if (!carries()) CHECK_EQ(begin(&w, 0, 1, URGENT), HR_ERR_UNSUPPORTED);
    CHECK_EQ(begin(&w, 0, 1, 64), HR_ERR_INVALID);
    CHECK_EQ(begin(&w, 0, 1, -2), HR_ERR_INVALID);
    CHECK_EQ(hr_comm_open_classed(w.ranks[0].engine, 9, pair, 2, 0, 64, &comm), HR_ERR_INVALID);
    struct card card = card_of(&w.ranks[1]); /* there is no usual way to it */
    CHECK_EQ(hr_connect_classed(w.ranks[0].engine, 77, world_provider(), card.addr, card.len, 1, URGENT),
             HR_ERR_INVALID);
    CHECK(!hr_conn_find(w.ranks[0].engine, 77, HR_CHANNEL(URGENT)));
    world_close(&w);
}
