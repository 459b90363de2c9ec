/* test_streams.c - two streams between two ranks: what leaves by which, and what is said by the first alone. */

#define WORLD_STREAMS 2
#include "core/engine.h"
#include "world.h"

#define BYTES (600u << 10) /* of a transfer: more than goes along with a header */

static struct hr_conn *conn_of(struct rank *r, int peer) {
    struct hr_conn *conn = hr_conn_find(r->engine, (uint64_t)peer, 0);
    REQUIRE(conn && conn->nlanes == WORLD_STREAMS);
    return conn;
}

/* --- a provider that counts what is posted by which stream, or refuses it
 * ------------------------------------------------------------------------------------------ */

static struct hr_provider watching;
static const struct hr_provider *watched;
static atomic_int others[WORLD_STREAMS], segments[WORLD_STREAMS], writes[WORLD_STREAMS];
static atomic_int refuses;            /* by the second stream */
static atomic_uint_least64_t longest; /* segment */

static int stream_of(struct hr_ep *ep) {
    struct hr_lane *lane = ep->ctx;
    return (int)(lane - lane->conn->lanes);
}
static hr_status post_send_watched(struct hr_ep *ep, const struct hr_msg *msg) {
    int stream = stream_of(ep);
    if (stream && refuses) return HR_ERR_PEER_LOST;
    hr_status status = watched->post_send(ep, msg);
    if (status == HR_OK || status == HR_INPROGRESS) {
        int segment = ((const struct hr_hdr *)msg->hdr)->kind == HR_MSG_SEG;
        atomic_fetch_add(segment ? &segments[stream] : &others[stream], 1);
        uint64_t most = longest;
        while (segment && msg->len > most && !atomic_compare_exchange_weak(&longest, &most, msg->len)) continue;
    }
    return status;
}
static hr_status post_write_watched(struct hr_ep *ep, const struct hr_rma *rma) {
    int stream = stream_of(ep);
    if (stream && refuses) return HR_ERR_PEER_LOST;
    hr_status status = watched->post_write(ep, rma);
    if (status == HR_OK || status == HR_INPROGRESS) atomic_fetch_add(&writes[stream], 1);
    return status;
}
static int dscps[WORLD_STREAMS];
static hr_status ep_set_class_watched(struct hr_ep *ep, int dscp, int priority) {
    CHECK_EQ(priority, 2);
    dscps[stream_of(ep)] = dscp;
    return HR_OK;
}
static void watch(struct world *w) {
    for (int i = 0; i < WORLD_STREAMS; i++) others[i] = segments[i] = writes[i] = 0;
    longest = 0;
    for (int i = 0; i < w->n; i++) {
        hr_lock(w->ranks[i].engine);
        struct hr_domain *domain = conn_of(&w->ranks[i], !i)->lanes[0].ep->domain;
        if (!watched) {
            watched = domain->ops;
            watching = *watched;
            watching.post_send = post_send_watched;
            watching.post_write = post_write_watched;
            watching.ep_set_class = ep_set_class_watched;
        }
        domain->ops = &watching;
        hr_unlock(w->ranks[i].engine);
    }
}

/* --- what leaves by which
 * -------------------------------------------------------------------------------------------------------- */

/* Two ranks exchange a vector and add what comes: that goes by segments where memory is not mapped. */
static void summed(struct rank *r) {
    struct hr_instr instrs[] = {
        {.op = HR_OP_SEND, .peer = !r->rank, .len = BYTES, .src_buf = HR_BUF_IN},
        {.op = HR_OP_RECV_REDUCE, .peer = !r->rank, .len = BYTES, .dst_buf = HR_BUF_OUT},
    };
    uint32_t *in = hr_arena_alloc(BYTES, 0), *out = hr_arena_alloc(BYTES, 0), wrong = 0;
    char detail[256] = "";
    struct hr_program *p = NULL;
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    REQUIRE(hr_program_new(instrs, 2, NULL, 0, NULL, 0, BYTES, BYTES, 0, r->size, &p, detail) == HR_OK);
    for (uint32_t i = 0; i < BYTES / 4; i++) {
        in[i] = i * 2 + (uint32_t)r->rank;
        out[i] = 5;
    }
    CHECK_EQ(hr_run(r->comm, p, in, out, HR_UINT32, HR_SUM, 7, &req), HR_OK);
    CHECK_EQ(finish(r, &req, 20), HR_OK);
    for (uint32_t i = 0; i < BYTES / 4; i++) wrong += out[i] != i * 2 + !r->rank + 5;
    CHECK_EQ(wrong, 0);
    hr_program_put(p);
    hr_arena_free(in);
    hr_arena_free(out);
}

static void *everything(void *arg) {
    struct rank *r = arg;
    uint8_t *buf = malloc(BYTES);
    size_t sizes[] = {10, 6000, BYTES};
    for (int i = 0; i < 3; i++) {
        memset(buf, i + 1, sizes[i]);
        if (r->rank == 0) CHECK_EQ(send_to(r, buf, sizes[i], 1, 3), HR_OK);
        if (r->rank == 1) CHECK_EQ(recv_from(r, memset(buf, 9, sizes[i]), sizes[i], 0, 3, NULL), HR_OK);
        CHECK(buf[0] == i + 1 && buf[sizes[i] - 1] == i + 1);
    }
    free(buf);
    summed(r);
    return NULL;
}
TEST(segments_and_writes_keep_off_the_first) {
    struct world w;
    world_open(&w, 2, NULL);
    watch(&w);
    world_run(&w, everything, NULL);
    int mapped = conn_of(&w.ranks[0], 1)->caps->flags & HR_CAP_MAP;
    CHECK_EQ(segments[0], 0);
    CHECK_EQ(writes[0], 0);
    CHECK_EQ(others[1], 0);
    CHECK(others[0] >= 3);
    CHECK(mapped || (segments[1] >= 2 && writes[1] >= 1)); /* else nothing is sent but messages */
    world_close(&w);
}

static void *only_summed(void *arg) {
    summed(arg);
    return NULL;
}
/* Each costs this side a system call, where memory is not mapped. */
TEST(what_is_summed_comes_in_pieces_as_long_as_may_be) {
    struct world w;
    world_open(&w, 2, NULL);
    for (int i = 0; i < 2; i++) {
        hr_lock(w.ranks[i].engine);
        conn_of(&w.ranks[i], !i)->window = 4 << 20; /* is not what bounds them */
        hr_unlock(w.ranks[i].engine);
    }
    watch(&w);
    const struct hr_caps *caps = conn_of(&w.ranks[0], 1)->caps;
    uint64_t most = caps->piece ? caps->piece : caps->segment;
    if (most > caps->max_send) most = caps->max_send;
    world_run(&w, only_summed, NULL);
    CHECK_EQ(longest, caps->flags & HR_CAP_MAP ? 0 : (most < BYTES ? most : BYTES) & ~63ull);
    world_close(&w);
}

TEST(the_first_has_the_class_of_answers) {
    struct world w;
    world_open(&w, 2, NULL);
    watch(&w);
    const char *name = conn_of(&w.ranks[0], 1)->provider->name;
    CHECK_EQ(hr_set_class(w.ranks[0].engine, name, 32, 3, 2), HR_OK);
    CHECK_EQ(dscps[0], 3);
    CHECK_EQ(dscps[1], 32);
    world_close(&w);
}

/* --- what is said by the first
 * --------------------------------------------------------------------------------------------------- */

/* The sums in another stream's headers are of another time. */
TEST(sums_count_by_the_first_stream_alone) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *r = &w.ranks[0];
    hr_lock(r->engine);
    struct hr_conn *conn = conn_of(r, 1);
    uint64_t acked = conn->tx_bulk_acked;
    int64_t credit = conn->credit -= 100; /* as though as much had been sent */
    struct hr_hdr h = {.kind = HR_MSG_CREDIT, .credit = conn->heard_credit + 100, .ack = conn->heard_ack + 1000};
    hr_engine_sink.recv(conn->lanes[1].ep, &h, sizeof h, NULL, 0);
    CHECK_EQ(conn->tx_bulk_acked, acked);
    CHECK_EQ(conn->credit, credit);
    hr_engine_sink.recv(conn->lanes[0].ep, &h, sizeof h, NULL, 0);
    CHECK_EQ(conn->tx_bulk_acked, acked + 1000);
    CHECK_EQ(conn->credit, credit + 100);
    CHECK_EQ(conn->state, HR_CONN_UP);
    hr_unlock(r->engine);
    world_close(&w);
}

/* --- how often bulk is acknowledged
 * ------------------------------------------------------------------------------------------ */

static void hears(struct hr_conn *conn, uint32_t every) {
    struct hr_hdr h = {.kind = HR_MSG_CREDIT, .rreq = every, .credit = conn->heard_credit, .ack = conn->heard_ack};
    hr_engine_sink.recv(conn->lanes[0].ep, &h, sizeof h, NULL, 0);
}

/* As much at a time as the sender asks for; the rest before this side sleeps. */
TEST(bulk_is_acknowledged_as_its_sender_asks) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *r = &w.ranks[0];
    hr_lock(r->engine); /* no pass of the background thread */
    struct hr_conn *conn = conn_of(r, 1);
    int counts = conn->caps->window != 0; /* else nothing is ever under way, and nothing is acknowledged */
    uint64_t said = conn->tx_msgs;
    hr_conn_owe(conn, 0, 20 << 10);
    CHECK_EQ(conn->tx_msgs, said + counts); /* as long as nothing has been asked */
    hears(conn, 100 << 10);
    said = conn->tx_msgs;
    for (int i = 0; i < 3; i++) hr_conn_owe(conn, 0, 30 << 10);
    CHECK_EQ(conn->tx_msgs, said);
    CHECK_EQ(conn->owed_ack, counts ? 90 << 10 : 0);
    hr_conn_owe(conn, 0, 30 << 10);
    CHECK_EQ(conn->tx_msgs, said + counts);
    CHECK_EQ(conn->owed_ack, 0);
    hr_conn_owe(conn, 0, 90 << 10);
    hears(conn, 50 << 10); /* the peer's window has become smaller: it may be waiting already */
    CHECK_EQ(conn->tx_msgs, said + 2 * counts);
    hr_conn_owe(conn, 0, 40 << 10);
    CHECK_EQ(conn->tx_msgs, said + 2 * counts);
    hr_conns_acknowledge(r->engine);
    CHECK_EQ(conn->tx_msgs, said + 3 * counts);
    CHECK_EQ(conn->owed_ack, 0);
    hr_conns_acknowledge(r->engine);
    CHECK_EQ(conn->tx_msgs, said + 3 * counts);
    hears(conn, UINT32_MAX); /* whatever it says, it hears of each MiB */
    CHECK_EQ(conn->ack_every, 1 << 20);
    hears(conn, 1);
    CHECK_EQ(conn->ack_every, 16 << 10);
    conn->told_ack -= 230 << 10; /* nothing of it had come: the peer would count it as never sent */
    hr_unlock(r->engine);
    world_close(&w);
}

/* A sender whose window becomes smaller than what it has asked for would wait for what the peer does not say. */
TEST(a_smaller_window_asks_for_more_acknowledgements) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *r = &w.ranks[0];
    hr_lock(r->engine);
    struct hr_conn *conn = conn_of(r, 1);
    uint64_t window = conn->window;
    uint32_t every = conn->asked_every;
    uint64_t said = conn->tx_msgs, counts = conn->caps->window != 0;
    int yield = r->engine->yield;
    r->engine->yield = 0;
    conn->window = 4 << 20;
    conn->asked_every = 1 << 20;
    hr_conn_ask_sooner(conn);
    CHECK_EQ(conn->tx_msgs, said);
    conn->window = 256 << 10;
    hr_conn_ask_sooner(conn);
    CHECK_EQ(conn->tx_msgs, said + counts);
    CHECK_EQ(conn->asked_every, counts ? 64 << 10 : 1 << 20);
    hr_conn_ask_sooner(conn);
    CHECK_EQ(conn->tx_msgs, said + counts);
    r->engine->yield = 1; /* ranks share cores: what comes in a turn is answered in one */
    conn->asked_every = 1 << 20;
    hr_conn_ask_sooner(conn);
    CHECK_EQ(conn->tx_msgs, said + 2 * counts);
    CHECK_EQ(conn->asked_every, counts ? 192 << 10 : 1 << 20);
    r->engine->yield = yield;
    conn->window = window;
    conn->asked_every = every;
    hr_unlock(r->engine);
    world_close(&w);
}

static void nap_us(long us) {
    struct timespec nap = {0, us * 1000};
    nanosleep(&nap, NULL);
}

/* Bytes that one has sent and that the other knows of: of those that are read or written only one of them does. */
static uint64_t moved(struct rank *from, struct rank *to) {
    hr_lock(from->engine);
    uint64_t nbytes = conn_of(from, to->rank)->tx_bytes;
    hr_unlock(from->engine);
    hr_lock(to->engine);
    nbytes += conn_of(to, from->rank)->rx_bytes;
    hr_unlock(to->engine);
    return nbytes;
}

/* Its message has come, and bytes are moved: of it, perhaps, or late ones of the message before. */
static int in_the_middle(struct rank *from, struct rank *to, struct hr_request *recv, uint64_t before) {
    hr_lock(to->engine);
    int matched = recv->done || recv->xfer;
    hr_unlock(to->engine);
    return matched && moved(from, to) != before;
}

/* Receives that are given up in the middle: the probe goes by the first stream and overtakes what lies in the second.
 * In the end each byte has been acknowledged or is lost, and none is both. */
TEST(what_is_given_up_is_counted_once) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *from = &w.ranks[0], *to = &w.ranks[1];
    size_t nbytes = 8u << 20;
    uint8_t *buf = calloc(1, nbytes), *out = calloc(1, nbytes), token = 0;
    int cut = 0;
    for (int i = 0; i < 20; i++) {
        struct hr_request send = {.priority = HR_PRIORITY_DEFAULT}, recv = send;
        uint64_t before = moved(from, to);
        CHECK_EQ(hr_irecv(to->comm, out, nbytes, 0, 3, &recv), HR_OK);
        CHECK_EQ(hr_isend(from->comm, buf, nbytes, 1, 3, &send), HR_OK);
        for (int64_t end = hr_now() + SECONDS(5); !in_the_middle(from, to, &recv, before) && hr_now() < end;)
            nap_us(50);
        hr_cancel(to->engine, &recv, HR_ERR_CANCELED);
        cut += recv.status == HR_ERR_CANCELED;
        CHECK_EQ(finish(from, &send, 5), HR_OK); /* given up there is delivered, as far as this side is concerned */
    }
    CHECK(cut);
    struct hr_conn *conn = conn_of(from, 1);
    uint64_t sent = 1, ended = 0, inflight = 1;
    for (int64_t end = hr_now() + SECONDS(5); sent != ended && hr_now() < end; nap_us(1000)) {
        CHECK_EQ(send_to(to, &token, 1, 0, 4), HR_OK); /* carries what is not told yet */
        CHECK_EQ(recv_from(from, &token, 1, 1, 4, NULL), HR_OK);
        hr_lock(from->engine);
        sent = conn->tx_bulk;
        ended = conn->tx_bulk_acked + conn->tx_bulk_lost;
        inflight = conn->inflight;
        hr_unlock(from->engine);
    }
    CHECK_EQ(ended, sent);
    CHECK_EQ(inflight, 0);
    free(buf);
    free(out);
    world_close(&w);
}

/* --- the end
 * ---------------------------------------------------------------------------------------------------------------------
 */

/* The second stream has said goodbye and ended, the first not yet: nothing is lost by that. */
TEST(the_end_of_a_stream_that_said_goodbye_is_no_loss) {
    struct world w;
    world_open(&w, 2, NULL);
    watch(&w);
    struct rank *from = &w.ranks[0], *to = &w.ranks[1];
    struct hr_conn *conn = conn_of(from, 1);
    int mapped = conn->caps->flags & HR_CAP_MAP; /* nothing goes by the second stream, and all arrives */
    uint8_t *buf = calloc(1, BYTES), *out = calloc(1, BYTES);
    struct hr_request send = {.priority = HR_PRIORITY_DEFAULT}, recv = send;
    struct hr_hdr h = {.kind = HR_MSG_SEG};
    hr_lock(from->engine);
    conn->lanes[1].bye = 1;
    refuses = 1;
    CHECK_EQ(hr_conn_post_segment(conn, &h, 0, buf, 64, NULL), HR_AGAIN);
    CHECK_EQ(conn->state, HR_CONN_UP);
    hr_unlock(from->engine);
    CHECK_EQ(hr_irecv(to->comm, out, BYTES, 0, 3, &recv), HR_OK);
    CHECK_EQ(hr_isend(from->comm, buf, BYTES, 1, 3, &send), HR_OK);
    int64_t end = hr_now() + (mapped ? SECONDS(5) : SECONDS(1) / 20);
    while (!__atomic_load_n(&send.done, __ATOMIC_ACQUIRE) && hr_now() < end) nap_us(1000);
    CHECK_EQ(__atomic_load_n(&send.done, __ATOMIC_ACQUIRE), mapped != 0);
    hr_engine_close(to->engine, hr_now() + SECONDS(2));
    to->comm = NULL;
    to->engine = NULL;
    CHECK_EQ(finish(from, &send, 5), HR_OK); /* what is withdrawn there is delivered as far as this side is concerned */
    int up = 1, closed = 0;
    for (end = hr_now() + SECONDS(5); up && hr_now() < end;) {
        hr_progress(from->engine);
        hr_lock(from->engine);
        up = conn->state == HR_CONN_UP;
        closed = conn->state == HR_CONN_CLOSED || conn->was_closed;
        hr_unlock(from->engine);
    }
    CHECK(closed);
    struct hr_comm_state state;
    hr_comm_state(from->comm, &state);
    CHECK_EQ(state.status, HR_OK);
    refuses = 0;
    free(buf);
    free(out);
    world_close(&w);
}

TEST(the_end_of_a_stream_without_goodbye_is_a_loss) {
    struct world w;
    world_open(&w, 2, NULL);
    watch(&w);
    struct rank *r = &w.ranks[0];
    struct hr_hdr h = {.kind = HR_MSG_SEG};
    hr_lock(r->engine);
    struct hr_conn *conn = conn_of(r, 1);
    refuses = 1;
    CHECK_EQ(hr_conn_post_segment(conn, &h, 0, &w, 64, NULL), HR_ERR_PEER_LOST);
    CHECK_EQ(conn->state, HR_CONN_LOST);
    refuses = 0;
    hr_settle(r->engine);
    hr_unlock(r->engine);
    world_close(&w);
}
