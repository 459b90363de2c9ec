/* test_stress.c - many threads, many engines, everything at once.
 *
 * What must hold: contents, order per tag, every request ended exactly once and before its deadline, nothing touched
 * after its end, and at the end all credit back and nothing left. HR_TEST_PROVIDER chooses the provider,
 * STRESS_SECONDS the length of each random part, STRESS_SEED another course of events.
 */

#include "stress_rig.h"
#include "watched.h"

/* --- everything at once
 * ------------------------------------------------------------------------------------------------------------------------
 */

enum { RANKS = 3, SLOTS = 6, SUM_ELEMENTS = 30000 };

struct stage {
    struct world w;
    int64_t until;
    int clean;               /* nothing may fail */
    struct hr_comm *pair[2]; /* of ranks 0 and 1 */
    _Atomic uint64_t received, ended_badly;
};

/* A slow machine gets more time until a fault has hit. */
static int over(const struct stage *stage) {
    int64_t now = hr_now();
    return now > stage->until && (stage->clean || stage->ended_badly || now > stage->until + SECONDS(20));
}

enum actor_kind { SENDER, RECEIVER, HASTY_SENDER, HASTY_RECEIVER, ANY_RECEIVER, SUMMER, OPENER };
struct actor {
    struct stage *stage;
    struct rank *r;
    struct hr_comm *comm;
    enum actor_kind kind;
    int peer, sources;
    int must; /* its communicator holds nobody who is lost: it may not fail */
    uint32_t tag;
    uint64_t random;
    pthread_t thread;
};

struct mark { /* begins each message */
    uint32_t src, tag, seq, len, last;
};

static size_t some_len(uint64_t *random) {
    static const uint32_t lens[] = {20, 24, 64, 65, 500, 4096, 8192, 16384, 17000, 70000, 300000, 1000000};
    uint64_t k = rnd(random) % 100;
    return lens[k < 90 ? k % 10 : k < 98 ? 10 : 11];
}
static void *some_memory(size_t n, uint64_t *random, int *arena_p) {
    *arena_p = rnd(random) % 2;
    return *arena_p ? hr_arena_alloc(n, 0) : malloc(n);
}
static void give_memory(void *p, int arena) {
    if (arena)
        hr_arena_free(p);
    else
        free(p);
}
/* What follows the mark. */
UNWATCHED static uint8_t body(const struct mark *m, size_t i) {
    return (uint8_t)(m->seq * 31 + m->tag + i * 7 + (i >> 9));
}
UNWATCHED static void write_bytes(uint8_t *buf, size_t len, struct mark m) {
    for (size_t i = sizeof m; i < len; i++) buf[i] = body(&m, i);
}
UNWATCHED static size_t wrong_bytes(const uint8_t *buf, size_t len, struct mark m) {
    size_t wrong = 0;
    for (size_t i = sizeof m; i < len; i++) wrong += buf[i] != body(&m, i);
    return wrong;
}

/* Waits as the binding does: a few polls, then for good; now and then somebody else is meant to drive. */
static hr_status wait_for(struct actor *a, struct hr_request *req, double seconds) {
    int64_t deadline = hr_now() + SECONDS(seconds);
    hr_status status = HR_INTERRUPTED;
    if (rnd(&a->random) % 2) status = hr_wait(a->r->engine, req, HR_FOREVER, 50);
    while (status == HR_INTERRUPTED) status = hr_wait(a->r->engine, req, deadline, 0);
    if (status == HR_ERR_TIMEOUT) hr_cancel(a->r->engine, req, HR_ERR_TIMEOUT);
    CHECK(is_done(req));
    return (hr_status)req->status;
}
/* Whether the actor goes on after this end of a request. */
static int goes_on(struct actor *a, hr_status status) {
    if (status == HR_OK) return 1;
    atomic_fetch_add(&a->stage->ended_badly, 1);
    if (a->stage->clean || a->must)
        CHECK_EQ(status, HR_OK);
    else if (status == HR_ERR_IO) /* this operation alone: the others must hear that this actor leaves */
        hr_comm_break(a->comm, HR_ERR_BROKEN, a->r->rank, HR_PHASE_NONE, NULL, 1);
    else if (!hr_is_peer_error(status))
        CHECK_EQ(status, HR_ERR_BROKEN);
    return 0;
}

struct slot {
    struct hr_request req;
    uint8_t *buf;
    size_t len;
    int arena;
};
static hr_status slot_send(struct actor *a, struct slot *s, uint32_t seq, int last) {
    s->len = last ? sizeof(struct mark) : some_len(&a->random);
    s->buf = some_memory(s->len, &a->random, &s->arena);
    memset(&s->req, 0, sizeof s->req);
    s->req.priority = (int)(rnd(&a->random) % HR_PRIORITIES);
    struct mark m = {(uint32_t)a->r->rank, a->tag, seq, (uint32_t)s->len, (uint32_t)last};
    *(struct mark *)s->buf = m;
    write_bytes(s->buf, s->len, m);
    watched_write(s->buf, s->len);
    return hr_isend(a->comm, s->buf, s->len, a->peer, a->tag, &s->req);
}
static void slot_end(struct slot *s) {
    if (s->buf) give_memory(s->buf, s->arena);
    s->buf = NULL;
}

/* Several at once; each of them arrives. */
static void send_all(struct actor *a) {
    struct slot slots[SLOTS] = {0};
    uint32_t seq = 0;
    int on = 1, last = 0;
    while (on && !last) {
        struct slot *s = &slots[seq % SLOTS];
        if (s->buf) on = goes_on(a, wait_for(a, &s->req, 30));
        slot_end(s);
        last = over(a->stage);
        if (on) CHECK_EQ(slot_send(a, s, seq++, last), HR_OK);
    }
    for (int i = 0; i < SLOTS; i++, seq++) {
        struct slot *s = &slots[seq % SLOTS];
        if (!s->buf) continue;
        hr_status status = wait_for(a, &s->req, 30);
        if (on) goes_on(a, status);
        slot_end(s);
    }
}
/* Each has a short deadline, so most are withdrawn at some point; what does arrive is whole and in order. */
static void send_hastily(struct actor *a) {
    uint32_t seq = 0;
    int on = 1;
    while (on && !over(a->stage)) {
        struct slot s = {0};
        CHECK_EQ(slot_send(a, &s, seq++, 0), HR_OK);
        hr_status status = wait_for(a, &s.req, 1e-6 * (double)(rnd(&a->random) % 3000));
        if (status != HR_ERR_TIMEOUT) on = goes_on(a, status);
        slot_end(&s);
    }
    struct slot s = {0};
    if (!on) return;
    CHECK_EQ(slot_send(a, &s, seq, 1), HR_OK);
    goes_on(a, wait_for(a, &s.req, 30));
    slot_end(&s);
}

/* What has come; 1 when it was the last. */
static int check_message(struct actor *a, const struct slot *s, uint32_t *next, int gaps) {
    const struct mark *m = (const struct mark *)s->buf;
    size_t len = m->len < s->len ? m->len : s->len;
    CHECK_EQ(m->src, s->req.peer);
    CHECK_EQ(m->tag, a->tag);
    CHECK_EQ(m->len, s->req.nbytes);
    if (gaps)
        CHECK(m->seq >= next[s->req.peer]);
    else if (a->stage->clean) /* where a transfer failed, its receive takes what comes next */
        CHECK_EQ(m->seq, next[s->req.peer]);
    next[s->req.peer] = m->seq + 1;
    watched_read(s->buf, len);
    CHECK_EQ(wrong_bytes(s->buf, len, *m), 0);
    atomic_fetch_add(&a->stage->received, 1);
    return m->last != 0;
}
static void slot_receive(struct actor *a, struct slot *s) {
    s->len = 1000000;
    s->buf = some_memory(s->len, &a->random, &s->arena);
    memset(&s->req, 0, sizeof s->req);
    s->req.priority = HR_PRIORITY_DEFAULT;
    CHECK_EQ(hr_irecv(a->comm, s->buf, s->len, a->kind == ANY_RECEIVER ? HR_ANY_SOURCE : a->peer, a->tag, &s->req),
             HR_OK);
}
static void receive_all(struct actor *a, int hasty) {
    struct slot slots[SLOTS] = {0};
    uint32_t next[RANKS] = {0}, turn = 0;
    int depth = hasty ? 1 : SLOTS, left = a->sources;
    while (left) {
        struct slot *s = &slots[turn++ % (uint32_t)depth];
        if (!s->buf) {
            slot_receive(a, s);
            if (turn < (uint32_t)depth) continue;
            if (!hasty) s = &slots[turn % (uint32_t)depth];
        }
        hr_status status = wait_for(a, &s->req, hasty ? 1e-6 * (double)(rnd(&a->random) % 3000) : 30);
        if (status == HR_OK)
            left -= check_message(a, s, next, hasty);
        else if (!(hasty && status == HR_ERR_TIMEOUT) && !goes_on(a, status))
            break;
        slot_end(s);
        if (hasty && hr_now() > a->stage->until + SECONDS(30)) {
            CHECK(!"the last message never came");
            break;
        }
    }
    for (int i = 0; i < SLOTS; i++) {
        if (!slots[i].buf) continue;
        hr_cancel(a->r->engine, &slots[i].req, HR_ERR_CANCELED);
        slot_end(&slots[i]);
    }
}

/* Everybody borrows everything and adds it up in the order of ranks. */
static struct hr_program *sum_program(int rank, uint64_t len) {
    struct hr_instr instrs[2 * RANKS] = {0};
    uint32_t unlocks[RANKS], n = 0, k = 0;
    struct hr_ref refs[RANKS];
    struct hr_program *p = NULL;
    char detail[256] = "";
    for (int peer = 0; peer < RANKS; peer++) {
        refs[peer] = (struct hr_ref){HR_BUF_IN, 0, 0};
        if (peer == rank) continue;
        instrs[n++] = (struct hr_instr){.op = HR_OP_SEND, .peer = peer, .src_buf = HR_BUF_IN, .len = len};
        refs[peer] = (struct hr_ref){HR_BUF_BORROWED, 0, n};
        instrs[n++] = (struct hr_instr){.op = HR_OP_BORROW,
                                        .peer = peer,
                                        .dst_buf = HR_BUF_TMP,
                                        .dst_off = len * (uint64_t)peer,
                                        .len = len,
                                        .unlock = k,
                                        .nunlock = 1};
        unlocks[k++] = 2 * (RANKS - 1);
    }
    instrs[n++] = (struct hr_instr){
        .op = HR_OP_REDUCE, .peer = -1, .after = RANKS - 1, .dst_buf = HR_BUF_OUT, .len = len, .nref = RANKS};
    hr_status status = hr_program_new(instrs, n, unlocks, k, refs, RANKS, len, len, len * RANKS, RANKS, &p, detail);
    if (status != HR_OK) fprintf(stderr, "%s\n", detail);
    REQUIRE(p);
    return p;
}
static void sum_up(struct actor *a) {
    static const uint64_t sizes[] = {1, 100, 3000, SUM_ELEMENTS};
    struct hr_program *programs[4];
    int on = 1, arena;
    uint64_t shared = stress_seed(); /* all ranks choose alike */
    int32_t *in = some_memory(SUM_ELEMENTS * 4, &a->random, &arena), *out = malloc(SUM_ELEMENTS * 4);
    for (int i = 0; i < 4; i++) programs[i] = sum_program(a->r->rank, sizes[i] * 4);
    for (int32_t round = 0, stop = 0; on && !stop; round++) {
        uint64_t pick = rnd(&shared) % 4, wrong = 0, n = sizes[pick];
        struct hr_request req = {.priority = (int)(rnd(&shared) % HR_PRIORITIES)};
        for (uint64_t i = 0; i < n; i++) in[i] = (int32_t)i * RANKS + a->r->rank + round;
        in[0] = over(a->stage); /* whether to stop is decided together */
        CHECK_EQ(hr_run(a->comm, programs[pick], in, out, HR_INT32, HR_SUM, pick + 1, &req), HR_OK);
        on = goes_on(a, wait_for(a, &req, 30));
        if (!on) break;
        stop = out[0] != 0;
        for (uint64_t i = 1; i < n; i++)
            wrong += out[i] != ((int32_t)i * RANKS + round) * RANKS + RANKS * (RANKS - 1) / 2;
        CHECK_EQ(wrong, 0);
    }
    for (int i = 0; i < 4; i++) hr_program_put(programs[i]);
    give_memory(in, arena);
    free(out);
}

/* Communicators come and go; each serves one exchange, in which they also agree whether there will be another. */
static void open_and_close(struct actor *a) {
    uint64_t peers[RANKS] = {0, 1, 2}, shared = stress_seed() + 5;
    struct hr_comm *comm;
    int on = 1, failed = 0;
    uint64_t id = 1000;
    for (; on; id++) {
        struct hr_request send[RANKS] = {0}, recv[RANKS] = {0};
        size_t n = some_len(&shared);
        uint8_t *out = malloc(n), *in[RANKS];
        CHECK_EQ(hr_comm_open(a->r->engine, id, peers, RANKS, a->r->rank, &comm), HR_OK);
        memset(out, (int)id, n);
        out[0] = over(a->stage);
        for (int p = 0; p < RANKS; p++) {
            in[p] = calloc(1, n);
            CHECK_EQ(hr_isend(comm, out, n, p, 1, &send[p]), HR_OK);
            CHECK_EQ(hr_irecv(comm, in[p], n, p, 1, &recv[p]), HR_OK);
        }
        for (int p = 0; p < RANKS; p++) {
            if (!goes_on(a, wait_for(a, &recv[p], 30))) {
                failed = 1;
                continue;
            }
            if (in[p][0]) on = 0;
            CHECK_MEM(in[p] + 1, out + 1, n - 1);
        }
        for (int p = 0; p < RANKS; p++) failed |= !goes_on(a, wait_for(a, &send[p], 30));
        if (failed) hr_comm_break(comm, HR_ERR_BROKEN, a->r->rank, HR_PHASE_NONE, NULL, 1);
        on &= !failed;
        hr_comm_close(comm);
        for (int p = 0; p < RANKS; p++) free(in[p]);
        free(out);
    }
    if (!failed) return;
    /* the others may have heard nothing of it, and wait in the next one */
    CHECK_EQ(hr_comm_open(a->r->engine, id, peers, RANKS, a->r->rank, &comm), HR_OK);
    hr_comm_break(comm, HR_ERR_BROKEN, a->r->rank, HR_PHASE_NONE, NULL, 1);
    hr_comm_close(comm);
}

static void *act(void *arg) {
    struct actor *a = arg;
    switch (a->kind) {
    case SENDER: send_all(a); break;
    case RECEIVER:
    case ANY_RECEIVER: receive_all(a, 0); break;
    case HASTY_SENDER: send_hastily(a); break;
    case HASTY_RECEIVER: receive_all(a, 1); break;
    case SUMMER: sum_up(a); break;
    case OPENER: open_and_close(a);
    }
    return NULL;
}

struct cast {
    struct actor actors[40];
    int n;
};
static void enter(struct cast *c, struct stage *stage, enum actor_kind kind, int rank, int peer, uint32_t tag,
                  struct hr_comm *comm) {
    struct actor *a = &c->actors[c->n++];
    *a = (struct actor){.stage = stage,
                        .r = &stage->w.ranks[rank],
                        .comm = comm ? comm : stage->w.ranks[rank].comm,
                        .kind = kind,
                        .peer = peer,
                        .sources = kind == ANY_RECEIVER ? RANKS - 1 : 1,
                        .must = comm != NULL,
                        .tag = tag,
                        .random = stress_seed() * 1000 + (uint64_t)c->n};
}
static void channel(struct cast *c, struct stage *stage, int from, int to, uint32_t tag, int hasty) {
    enter(c, stage, hasty ? HASTY_SENDER : SENDER, from, to, tag, NULL);
    enter(c, stage, hasty ? HASTY_RECEIVER : RECEIVER, to, from, tag, NULL);
}

/* lose: rank 0 is told in the middle that rank 2 is gone. Returns how many messages came. */
static uint64_t perform(const char *fault, int clean, int lose) {
    struct stage *stage = calloc(1, sizeof *stage);
    struct cast *c = calloc(1, sizeof *c);
    uint64_t pair[2] = {0, 1}, random = stress_seed();
    world_open(&stage->w, RANKS, fault);
    stage->clean = clean;
    stage->until = hr_now() + SECONDS(stress_seconds());
    for (int i = 0; i < 2; i++) CHECK_EQ(hr_comm_open(stage->w.ranks[i].engine, 2, pair, 2, i, &stage->pair[i]), HR_OK);
    channel(c, stage, 0, 1, 1, 0);
    channel(c, stage, 1, 2, 2, 0);
    channel(c, stage, 2, 0, 3, 0);
    channel(c, stage, 0, 0, 4, 0);
    channel(c, stage, 1, 0, 5, 1);
    channel(c, stage, 0, 2, 6, 1);
    channel(c, stage, 2, 2, 7, 1);
    enter(c, stage, SENDER, 1, 0, 8, NULL);
    enter(c, stage, SENDER, 2, 0, 8, NULL);
    enter(c, stage, ANY_RECEIVER, 0, HR_ANY_SOURCE, 8, NULL);
    for (int i = 0; i < RANKS; i++) enter(c, stage, SUMMER, i, 0, 0, NULL);
    for (int i = 0; i < RANKS; i++) enter(c, stage, OPENER, i, 0, 0, NULL);
    if (!fault) { /* two who are never lost */
        enter(c, stage, SENDER, 0, 1, 9, stage->pair[0]);
        enter(c, stage, RECEIVER, 1, 0, 9, stage->pair[1]);
        enter(c, stage, SENDER, 1, 0, 9, stage->pair[1]);
        enter(c, stage, RECEIVER, 0, 1, 9, stage->pair[0]);
    }
    for (int i = 0; i < c->n; i++) CHECK_EQ(pthread_create(&c->actors[i].thread, NULL, act, &c->actors[i]), 0);
    if (lose) {
        nap_ms((int)(rnd(&random) % (uint64_t)(700 * stress_seconds())));
        hr_peer_lost(stage->w.ranks[0].engine, 2, HR_ERR_PEER_LOST, "lost on purpose");
    }
    for (int i = 0; i < c->n; i++) pthread_join(c->actors[i].thread, NULL);
    uint64_t received = stage->received;
    if (clean) {
        CHECK_EQ(stage->ended_badly, 0);
        check_rest(&stage->w);
    } else {
        struct hr_comm_state state;
        hr_comm_state(stage->w.ranks[0].comm, &state);
        if (!hr_is_peer_error((hr_status)state.status) && state.status != HR_ERR_IO)
            CHECK_EQ(state.status, HR_ERR_BROKEN);
        CHECK(stage->ended_badly > 0);
    }
    for (int i = 0; i < 2; i++) hr_comm_close(stage->pair[i]);
    world_close(&stage->w);
    free(c);
    free(stage);
    return received;
}

TEST(everything_at_once) { CHECK(perform(NULL, 1, 0) > 0); }
TEST(everything_while_a_peer_is_lost) {
    uint64_t received = 0;
    for (int i = 0; i < 3; i++) received += perform(NULL, 0, 1);
    CHECK(received > 0);
}

/* A fault may hit before the first message has come: then it is tried again, with other faults. */
static void perform_with(const char *fault, int clean) {
    uint64_t seed = stress_seed(), received = 0;
    for (int i = 0; i < 5 && !received; i++) {
        char text[128];
        snprintf(text, sizeof text, "%s:%s,seed=%llu", world_provider(), fault, (unsigned long long)seed + (unsigned)i);
        received = perform(text, clean, 0);
    }
    CHECK(received > 0);
}
TEST(everything_late) { perform_with("delay=0.02:500us", 1); }
TEST(everything_until_an_operation_fails) { perform_with("error=0.005,delay=0.01:300us", 0); }
TEST(everything_until_an_endpoint_dies) { perform_with("kill=after:100", 0); }
