/* test_engine.c - messages between engines: sizes, order, matching, credit, cancellation, loss. HR_TEST_PROVIDER
 * chooses the provider. */

#include "core/engine.h"
#include "watched.h"
#include "world.h"

UNWATCHED static void fill_bytes(uint8_t *p, size_t n, int seed) {
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)(i * 7 + (size_t)seed * 13 + (i >> 8));
}
UNWATCHED static int same_bytes(const uint8_t *p, size_t n, int seed) {
    for (size_t i = 0; i < n; i++)
        if (p[i] != (uint8_t)(i * 7 + (size_t)seed * 13 + (i >> 8))) return 0;
    return 1;
}
static void fill(uint8_t *p, size_t n, int seed) {
    watched_write(p, n);
    fill_bytes(p, n, seed);
}
static int same(const uint8_t *p, size_t n, int seed) {
    watched_read(p, n);
    return same_bytes(p, n, seed);
}

static const size_t sizes[] = {0, 1, 8, 63, 64, 1000, 4096, 16384, 16385, 65536, 65537, 300001, 4u << 20};
#define NSIZES (sizeof sizes / sizeof *sizes)

struct memory {
    int arena;
};
static void *get_memory(struct memory *m, size_t n) { return m->arena ? hr_arena_alloc(n, 0) : malloc(n ? n : 1); }
static void put_memory(struct memory *m, void *p) {
    if (m->arena)
        hr_arena_free(p);
    else
        free(p);
}

/* Everybody sends to everybody, itself included, every size; receives are posted first and last in turn. */
static void *all_to_all(void *arg) {
    struct rank *r = arg;
    struct memory *m = r->arg;
    for (size_t s = 0; s < NSIZES; s++) {
        size_t n = sizes[s];
        if (r->size > 2 && n > 1u << 20) continue; /* the kernel would clear pages for most of the time */
        struct hr_request sends[WORLD_MAX], recvs[WORLD_MAX];
        uint8_t *out[WORLD_MAX], *in[WORLD_MAX];
        memset(sends, 0, sizeof sends);
        memset(recvs, 0, sizeof recvs);
        for (int pass = 0; pass < 2; pass++)
            for (int p = 0; p < r->size; p++)
                if ((pass ^ r->rank ^ (int)s) & 1) {
                    in[p] = get_memory(m, n);
                    recvs[p].priority = HR_PRIORITY_DEFAULT;
                    CHECK_EQ(hr_irecv(r->comm, in[p], n, p, 7, &recvs[p]), HR_OK);
                } else {
                    out[p] = get_memory(m, n);
                    fill(out[p], n, r->rank * 8 + p);
                    sends[p].priority = HR_PRIORITY_DEFAULT;
                    CHECK_EQ(hr_isend(r->comm, out[p], n, p, 7, &sends[p]), HR_OK);
                }
        for (int p = 0; p < r->size; p++) {
            CHECK_EQ(finish(r, &recvs[p], 20), HR_OK);
            CHECK_EQ(finish(r, &sends[p], 20), HR_OK);
            CHECK_EQ(recvs[p].nbytes, n);
            CHECK_EQ(recvs[p].peer, p);
            CHECK(same(in[p], n, p * 8 + r->rank));
            put_memory(m, in[p]);
            put_memory(m, out[p]);
        }
    }
    return NULL;
}

TEST(all_sizes_from_plain_memory) {
    struct world w;
    struct memory m = {0};
    world_open(&w, 2, NULL);
    world_run(&w, all_to_all, &m);
    world_close(&w);
}
TEST(all_sizes_from_arenas) {
    struct world w;
    struct memory m = {1};
    world_open(&w, 2, NULL);
    world_run(&w, all_to_all, &m);
    world_close(&w);
}
TEST(five_ranks) {
    struct world w;
    struct memory m = {1};
    world_open(&w, 5, NULL);
    world_run(&w, all_to_all, &m);
    world_close(&w);
}

/* Same tag: posting order, whatever the priority. Different tags overtake. Any source takes what comes. */
static void *ordered(void *arg) {
    struct rank *r = arg;
    enum { N = 200 };
    static const size_t len[] = {8, 100000, 64, 3000};
    uint8_t *bufs[N];
    struct hr_request reqs[N];
    memset(reqs, 0, sizeof reqs);
    for (int i = 0; i < N; i++) {
        bufs[i] = malloc(100000);
        if (r->rank == 0) {
            fill(bufs[i], len[i % 4], i);
            reqs[i].priority = i % HR_PRIORITIES;
            CHECK_EQ(hr_isend(r->comm, bufs[i], len[i % 4], 1, 3, &reqs[i]), HR_OK);
        }
    }
    if (r->rank == 1) { /* a later message with another tag first */
        uint32_t last = 0;
        CHECK_EQ(recv_from(r, &last, sizeof last, 0, 9, NULL), HR_OK);
        CHECK_EQ(last, 4711);
        for (int i = 0; i < N; i++) {
            reqs[i].priority = HR_PRIORITY_DEFAULT;
            CHECK_EQ(hr_irecv(r->comm, bufs[i], 100000, i & 1 ? HR_ANY_SOURCE : 0, 3, &reqs[i]), HR_OK);
        }
    } else {
        uint32_t last = 4711;
        struct hr_request urgent = {.priority = 0};
        CHECK_EQ(hr_isend(r->comm, &last, sizeof last, 1, 9, &urgent), HR_OK);
        CHECK_EQ(finish(r, &urgent, 20), HR_OK);
    }
    for (int i = 0; i < N; i++) {
        CHECK_EQ(finish(r, &reqs[i], 20), HR_OK);
        if (r->rank == 1) {
            CHECK_EQ(reqs[i].nbytes, len[i % 4]);
            CHECK_EQ(reqs[i].peer, 0);
            CHECK(same(bufs[i], len[i % 4], i));
        }
        free(bufs[i]);
    }
    return NULL;
}
TEST(order_within_a_tag) {
    struct world w;
    world_open(&w, 2, NULL);
    world_run(&w, ordered, NULL);
    world_close(&w);
}

/* A flood without receives stops at the credit and loses nothing. */
static void *flood(void *arg) {
    struct rank *r = arg;
    enum { N = 3000 };
    static struct hr_request reqs[N];
    static uint32_t values[N];
    static atomic_int counted;
    if (r->rank == 0) {
        memset(reqs, 0, sizeof reqs);
        int stuck = 0;
        static uint8_t big[4000];
        for (int i = 0; i < N; i++) {
            values[i] = (uint32_t)i;
            reqs[i].priority = HR_PRIORITY_DEFAULT;
            CHECK_EQ(i % 2 ? hr_isend(r->comm, &values[i], 4, 1, 1, &reqs[i])
                           : hr_isend(r->comm, big, sizeof big, 1, 2, &reqs[i]),
                     HR_OK);
        }
        for (int i = 0; i < N; i++) stuck += !__atomic_load_n(&reqs[i].done, __ATOMIC_ACQUIRE);
        CHECK(stuck > 0); /* credit is finite */
        atomic_store(&counted, 1);
        for (int i = 0; i < N; i++) CHECK_EQ(finish(r, &reqs[i], 20), HR_OK);
    } else {
        while (!atomic_load(&counted)) usleep(1000);
        for (int i = 0; i < N; i++) {
            uint8_t buf[4000];
            uint32_t value = 0;
            if (i % 2) {
                CHECK_EQ(recv_from(r, &value, 4, 0, 1, NULL), HR_OK);
                CHECK_EQ(value, i);
            } else {
                CHECK_EQ(recv_from(r, buf, sizeof buf, 0, 2, NULL), HR_OK);
            }
        }
    }
    return NULL;
}
TEST(flood_is_bounded_by_credit) {
    struct world w;
    world_open(&w, 2, NULL);
    world_run(&w, flood, NULL);
    world_close(&w);
}

/* A receive that is too small says so, harms nothing, and the connection goes on. */
static void *truncated(void *arg) {
    struct rank *r = arg;
    for (int i = 0; i < 2; i++) {
        size_t n = i ? 1000000 : 1000;
        uint8_t *buf = malloc(n);
        memset(buf, 0xee, n);
        if (r->rank == 0) {
            CHECK_EQ(send_to(r, buf, n, 1, 5), HR_OK);
        } else {
            struct hr_request req = {0};
            memset(buf, 0x11, n);
            CHECK_EQ(recv_from(r, buf, n / 2, 0, 5, &req), HR_ERR_TRUNCATED);
            CHECK_EQ(req.nbytes, n);
            CHECK_EQ(buf[n / 2 - 1], 0x11);
            CHECK_EQ(buf[n / 2], 0x11);
        }
        free(buf);
        int x = 42;
        if (r->rank == 0)
            CHECK_EQ(send_to(r, &x, 4, 1, 6), HR_OK);
        else
            CHECK_EQ(recv_from(r, &x, 4, 0, 6, NULL), HR_OK);
    }
    return NULL;
}
TEST(truncation_hurts_only_itself) {
    struct world w;
    world_open(&w, 2, NULL);
    world_run(&w, truncated, NULL);
    world_close(&w);
}

/* A receive that timed out leaves its buffer alone for ever; what was sent goes to the next receive. */
TEST(timed_out_receive) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *a = &w.ranks[0], *b = &w.ranks[1];
    for (int i = 0; i < 2; i++) {
        size_t n = i ? 3000000 : 100;
        uint8_t *buf = malloc(n), *late = malloc(n);
        memset(buf, 1, n);
        memset(late, 2, n);
        struct hr_request req = {.priority = HR_PRIORITY_DEFAULT}, send = {.priority = HR_PRIORITY_DEFAULT};
        CHECK_EQ(hr_irecv(b->comm, late, n, 0, 4, &req), HR_OK);
        CHECK_EQ(finish(b, &req, 0.02), HR_ERR_TIMEOUT);
        CHECK_EQ(hr_isend(a->comm, buf, n, 1, 4, &send), HR_OK);
        uint8_t *second = calloc(1, n);
        CHECK_EQ(recv_from(b, second, n, 0, 4, NULL), HR_OK);
        CHECK_EQ(finish(a, &send, 5), HR_OK);
        CHECK_EQ(late[0], 2);
        CHECK_EQ(late[n - 1], 2);
        CHECK_EQ(second[n - 1], 1);
        free(buf);
        free(late);
        free(second);
    }
    world_close(&w);
}

/* A send that was withdrawn before it was matched is not received, and does not hold up the order. */
TEST(withdrawn_send) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *a = &w.ranks[0], *b = &w.ranks[1];
    size_t n = 2000000;
    uint8_t *buf = calloc(1, n), *in = calloc(1, n);
    struct hr_request first = {.priority = HR_PRIORITY_DEFAULT}, second = first;
    CHECK_EQ(hr_isend(a->comm, buf, n, 1, 4, &first), HR_OK);
    CHECK_EQ(finish(a, &first, 0.02), HR_ERR_TIMEOUT);
    buf[0] = 9;
    CHECK_EQ(hr_isend(a->comm, buf, n, 1, 4, &second), HR_OK);
    CHECK_EQ(recv_from(b, in, n, 0, 4, NULL), HR_OK);
    CHECK_EQ(in[0], 9);
    CHECK_EQ(finish(a, &second, 5), HR_OK);
    free(buf);
    free(in);
    world_close(&w);
}

/* --- loss
 * ------------------------------------------------------------------------------------------------------------- */

TEST(lost_peer_breaks_exactly_its_communicators) {
    struct world w;
    world_open(&w, 3, NULL);
    struct rank *r = w.ranks;
    uint64_t pair[] = {0, 1};
    struct hr_comm *sub[2];
    CHECK_EQ(hr_comm_open(r[0].engine, 77, pair, 2, 0, &sub[0]), HR_OK);
    CHECK_EQ(hr_comm_open(r[0].engine, 77 + (1ull << 31), pair, 2, 0, &sub[1]),
             HR_ERR_INVALID); /* same notifications */
    CHECK_EQ(hr_comm_open(r[1].engine, 77, pair, 2, 1, &sub[1]), HR_OK);
    uint8_t in[64] = {0}, *big = calloc(1, 1000000);
    struct hr_request recv = {.priority = HR_PRIORITY_DEFAULT}, send = recv, any = recv;
    CHECK_EQ(hr_irecv(r[0].comm, in, sizeof in, 2, 1, &recv), HR_OK);
    CHECK_EQ(hr_irecv(r[0].comm, in, sizeof in, HR_ANY_SOURCE, 2, &any), HR_OK);
    CHECK_EQ(hr_isend(r[0].comm, big, 1000000, 2, 3, &send), HR_OK);
    hr_peer_lost(r[0].engine, 2, HR_ERR_PEER_LOST, "told so");
    CHECK_EQ(recv.done && send.done && any.done, 1);
    CHECK_EQ(recv.status, HR_ERR_PEER_LOST);
    CHECK_EQ(send.status, HR_ERR_PEER_LOST);
    CHECK_EQ(any.status, HR_ERR_PEER_LOST);
    CHECK_EQ(recv.peer, 2);
    struct hr_comm_state state;
    hr_comm_state(r[0].comm, &state);
    CHECK_EQ(state.peer, 2);
    CHECK_STR(state.detail, "told so");
    CHECK_EQ(send_to(&r[0], in, 4, 1, 1), HR_ERR_PEER_LOST); /* later calls fail the same way */
    /* rank 1 hears of it from rank 0, over the communicator that broke */
    CHECK_EQ(recv_from(&r[1], in, 4, 0, 1, NULL), HR_ERR_PEER_LOST);
    /* and the pair goes on */
    struct rank a = r[0], b = r[1];
    a.comm = sub[0];
    b.comm = sub[1];
    uint32_t x = 5, y = 0;
    CHECK_EQ(send_to(&a, &x, 4, 1, 1), HR_OK);
    CHECK_EQ(recv_from(&b, &y, 4, 0, 1, NULL), HR_OK);
    CHECK_EQ(y, 5);
    hr_comm_close(sub[0]);
    hr_comm_close(sub[1]);
    free(big);
    world_close(&w);
}

/* What a peer described before it ended the connection cannot be imported any more: it is lost, not accused. */
TEST(lost_before_its_memory_was_imported) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *r = w.ranks;
    uint8_t in[8], *big = hr_arena_alloc(1000000, 0);
    struct hr_request send = {.priority = HR_PRIORITY_DEFAULT};
    hr_lock(r[1].engine); /* it reads what was sent when the sender is gone */
    CHECK_EQ(hr_isend(r[0].comm, big, 1000000, 1, 3, &send), HR_OK);
    hr_peer_lost(r[0].engine, 1, HR_ERR_PEER_LOST, "told so");
    hr_unlock(r[1].engine);
    CHECK_EQ(send.status, HR_ERR_PEER_LOST);
    CHECK_EQ(recv_from(&r[1], in, sizeof in, 0, 1, NULL), HR_ERR_PEER_LOST);
    hr_arena_free(big);
    world_close(&w);
}

/* A peer that ended in good order: what it had sent is received, what waits for it fails, the others go on. */
TEST(peer_that_leaves) {
    struct world w;
    world_open(&w, 3, NULL);
    struct rank *r = w.ranks;
    uint32_t x = 1, y = 0;
    CHECK_EQ(send_to(&r[2], &x, 4, 0, 1), HR_OK);
    hr_comm_close(r[2].comm);
    hr_engine_close(r[2].engine, hr_now() + SECONDS(2));
    r[2].comm = NULL;
    r[2].engine = NULL;
    CHECK_EQ(recv_from(&r[0], &y, 4, 2, 1, NULL), HR_OK);
    CHECK_EQ(y, 1);
    hr_status status = recv_from(&r[0], &y, 4, 2, 1, NULL);
    CHECK(status == HR_ERR_CLOSED);
    CHECK_EQ(send_to(&r[0], &x, 4, 1, 1), HR_OK);
    CHECK_EQ(recv_from(&r[1], &y, 4, 0, 1, NULL), HR_OK);
    world_close(&w);
}

/* With its provider: an eager message, or all of a transfer. */
static int has_left(struct rank *r, struct hr_request *send) {
    hr_lock(r->engine);
    int yes = send->done || (send->xfer ? send->xfer->posted == send->len : send->queued == HR_QUEUED_PROVIDER);
    hr_unlock(r->engine);
    return yes;
}

/* A peer may have all that it wanted, and leave, before the provider here says that it has. */
TEST(a_farewell_that_overtakes_what_it_answers) {
    static const size_t lens[] = {100, 300000};
    struct hr_hdr bye = {.kind = HR_MSG_BYE};
    uint8_t *big = calloc(1, lens[1]), *in = malloc(lens[1]);
    for (int turn = 0; turn < 3; turn++) {
        struct world w;
        char late[80];
        snprintf(late, sizeof late, "%s:delay=1:%s,ops=write+send", world_provider(), turn < 2 ? "200ms" : "60s");
        world_open(&w, 2, late);
        struct rank *r = w.ranks;
        struct hr_request send = {.priority = HR_PRIORITY_DEFAULT}, recv = send;
        size_t len = lens[turn % 2];
        CHECK_EQ(hr_irecv(r[1].comm, in, len, 0, 1, &recv), HR_OK);
        CHECK_EQ(hr_isend(r[0].comm, big, len, 1, 1, &send), HR_OK);
        for (int64_t end = hr_now() + SECONDS(5); !has_left(&r[0], &send) && hr_now() < end;)
            nanosleep(&(struct timespec){0, 1000000}, NULL);
        hr_lock(r[0].engine);
        struct hr_conn *conn = hr_conn_find(r[0].engine, 1, 0);
        bye.credit = conn->heard_credit;
        bye.ack = conn->heard_ack;
        hr_engine_sink.recv(conn->lanes[0].ep, &bye, sizeof bye, NULL, 0);
        CHECK_EQ(conn->state, HR_CONN_CLOSED);
        hr_unlock(r[0].engine);
        if (turn == 2) { /* it does not get there, or nobody will know */
            hr_peer_lost(r[0].engine, 1, HR_ERR_PEER_LOST, "told so");
            CHECK_EQ(finish(&r[0], &send, 10), HR_ERR_CLOSED);
            CHECK_EQ(finish(&r[1], &recv, 10), HR_ERR_PEER_LOST);
        } else {
            CHECK_EQ(finish(&r[0], &send, 10), HR_OK);
            CHECK_EQ(finish(&r[1], &recv, 10), HR_OK);
        }
        world_close(&w);
    }
    free(big);
    free(in);
}

/* Frames of a communicator that is over are dropped, and their senders are told. */
TEST(late_frames_of_a_closed_communicator) {
    struct world w;
    world_open(&w, 2, NULL);
    struct rank *r = w.ranks;
    uint64_t both[] = {0, 1};
    struct hr_comm *old[2];
    for (int i = 0; i < 2; i++) CHECK_EQ(hr_comm_open(r[i].engine, 50, both, 2, i, &old[i]), HR_OK);
    hr_comm_close(old[1]);
    struct rank a = r[0];
    a.comm = old[0];
    uint8_t *big = calloc(1, 500000);
    uint32_t x = 3, y = 0;
    CHECK_EQ(send_to(&a, &x, 4, 1, 1), HR_OK); /* eager: gone before anybody knew */
    CHECK_EQ(send_to(&a, big, 500000, 1, 1), HR_ERR_CLOSED);
    struct hr_comm *again;
    CHECK_EQ(hr_comm_open(r[1].engine, 50, both, 2, 1, &again), HR_ERR_INVALID); /* an id is never used again */
    CHECK_EQ(send_to(&r[0], &x, 4, 1, 1), HR_OK);
    CHECK_EQ(recv_from(&r[1], &y, 4, 0, 1, NULL), HR_OK);
    hr_comm_close(old[0]);
    free(big);
    world_close(&w);
}

/* --- several threads of one rank
 * ------------------------------------------------------------------------------------------ */

struct worker {
    struct rank *rank;
    uint32_t tag;
};
static void *ping(void *arg) {
    struct worker *k = arg;
    struct rank *r = k->rank;
    for (uint32_t i = 0; i < 300; i++) {
        uint32_t x = i, y = 0;
        size_t n = i % 10 == 0 ? 200000 : 4;
        uint8_t *buf = malloc(n);
        memcpy(buf, &x, 4);
        if (r->rank == 0) CHECK_EQ(send_to(r, buf, n, 1, k->tag), HR_OK);
        CHECK_EQ(recv_from(r, buf, n, 1 - r->rank, k->tag, NULL), HR_OK);
        memcpy(&y, buf, 4);
        CHECK_EQ(y, i);
        if (r->rank == 1) CHECK_EQ(send_to(r, buf, n, 0, k->tag), HR_OK);
        free(buf);
    }
    return NULL;
}
TEST(threads_share_an_engine) {
    struct world w;
    world_open(&w, 2, NULL);
    pthread_t threads[6];
    struct worker workers[6];
    for (int i = 0; i < 6; i++) {
        workers[i] = (struct worker){&w.ranks[i & 1], (uint32_t)(i / 2)};
        CHECK_EQ(pthread_create(&threads[i], NULL, ping, &workers[i]), 0);
    }
    for (int i = 0; i < 6; i++) pthread_join(threads[i], NULL);
    world_close(&w);
}

/* Nobody waits: the background thread moves it, and the done list has it. */
TEST(asynchronous_requests_are_served) {
    struct world w;
    world_open(&w, 2, NULL);
    size_t n = 5000000;
    uint8_t *out = malloc(n), *in = calloc(1, n);
    fill(out, n, 3);
    struct hr_request send = {.flags = HR_REQ_ASYNC, .priority = HR_PRIORITY_DEFAULT}, recv = send;
    hr_engine_done_fd(w.ranks[1].engine);
    CHECK_EQ(hr_isend(w.ranks[0].comm, out, n, 1, 1, &send), HR_OK);
    CHECK_EQ(hr_irecv(w.ranks[1].comm, in, n, 0, 1, &recv), HR_OK);
    int64_t until = hr_now() + SECONDS(5);
    struct timespec nap = {0, 1000000};
    while (!(__atomic_load_n(&send.done, __ATOMIC_ACQUIRE) && __atomic_load_n(&recv.done, __ATOMIC_ACQUIRE)) &&
           hr_now() < until)
        nanosleep(&nap, NULL);
    CHECK_EQ(send.status, HR_OK);
    CHECK_EQ(recv.status, HR_OK);
    CHECK(same(in, n, 3));
    CHECK(hr_engine_reap(w.ranks[0].engine) == &send);
    CHECK(hr_engine_reap(w.ranks[1].engine) == &recv);
    CHECK(hr_engine_reap(w.ranks[1].engine) == NULL);
    free(out);
    free(in);
    world_close(&w);
}
