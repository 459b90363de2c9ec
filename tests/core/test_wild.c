/* test_wild.c - a peer that keeps to no rule: it drives a provider itself and sends what no engine would send.
 *
 * The engine must not crash, nor touch memory that was not posted, nor grow without bound; it ends the connection with
 * HR_ERR_PROTOCOL or passes the nonsense over, and its other connections go on. Run it under the sanitizers:
 * HR_TEST_PROVIDER chooses the provider, WILD_ROUNDS the length of the random part.
 */

#include <time.h>

#include "core/engine.h"
#include "world.h"

/* --- one engine, a decent peer, and wild ones
 * ------------------------------------------------------------------------------------------- */

enum { DECENT_COMM = 5, WILD_COMM = 100, WILD_ID = 10, WILD_MAX = 8, HEARD = 64, PAYLOAD = 1 << 16 };

struct wild { /* a domain and an endpoint without an engine */
    const struct hr_provider *ops;
    struct hr_domain *domain;
    struct hr_ep *ep;
    struct hr_auth auth;
    int up, lost, nheard, echoes, deaf;
    struct hr_hdr_long heard[HEARD], last; /* what the engine said: RTS, CTS and FIN; any */
    uint32_t order[HR_BUCKETS];
    uint64_t comm, runs, at[HEARD]; /* at: of the segments for each transfer */
    uint8_t payload[PAYLOAD];
};
struct rig {
    struct rank e, decent; /* the engine under test is rank 0 of both communicators */
    struct hr_comm *comms[WILD_MAX];
    struct wild *wild[WILD_MAX];
    int n;
};

static void wild_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct wild *w = ep->domain->owner;
    (void)payload, (void)len;
    memset(&w->last, 0, sizeof w->last);
    memcpy(&w->last, hdr, hdr_len < sizeof w->last ? hdr_len : sizeof w->last);
    w->echoes += w->last.h.kind == HR_MSG_ECHO;
    if (w->last.h.kind == HR_MSG_CTS) w->at[w->last.h.rreq % HEARD] = 0;
    if (w->last.h.kind == HR_MSG_RTS || w->last.h.kind == HR_MSG_CTS || w->last.h.kind == HR_MSG_FIN)
        w->heard[w->nheard++ % HEARD] = w->last;
}
static void wild_done(struct hr_ep *ep, void *cookie, hr_status status) { (void)ep, (void)cookie, (void)status; }
static void wild_notify(struct hr_ep *ep, uint64_t value, size_t nbytes) { (void)ep, (void)value, (void)nbytes; }
static void wild_state(struct hr_ep *ep, hr_status status, const char *detail) {
    struct wild *w = ep->domain->owner;
    (void)detail;
    if (status == HR_OK)
        w->up = 1;
    else
        w->lost = 1;
}
static const struct hr_sink wild_sink = {wild_recv, wild_done, wild_notify, wild_state};

static void turn(struct rig *r) {
    for (int k = 0; k < r->n; k++)
        if (!r->wild[k]->deaf) r->wild[k]->ops->progress(r->wild[k]->domain, 16, NULL);
    hr_progress(r->e.engine);
}
#define UNTIL(r, cond)                                \
    do {                                              \
        int64_t until_ = hr_now() + SECONDS(5);       \
        while (!(cond) && hr_now() < until_) turn(r); \
        CHECK(cond);                                  \
    } while (0)

static struct hr_engine *open_engine(uint64_t id, uint8_t *addr, size_t *len_p) {
    struct hr_engine *engine = NULL;
    char detail[256] = "", text[256];
    struct hr_config config = {.self_id = id, .providers = world_provider(), .local_peers = 3, .spin_us = -1};
    struct hr_caps caps;
    const char *name;
    hr_auth_init(&config.auth, "secret", 6, 0, 1);
    if (hr_engine_open(&config, &engine, detail) != HR_OK) fprintf(stderr, "%s\n", detail);
    REQUIRE(engine);
    for (int d = 0; hr_engine_domain(engine, d, &name, addr, len_p, &caps, text); d++)
        if (!strcmp(name, world_provider())) break;
    return engine;
}

static struct wild *wild_open(uint64_t id, const uint8_t *addr, size_t len) {
    struct wild *w = calloc(1, sizeof *w);
    char detail[256] = "";
    struct hr_domain_params params = {
        .self_id = id, .auth = &w->auth, .sink = &wild_sink, .owner = w, .local_peers = 3};
    w->ops = hr_provider_find(world_provider());
    hr_auth_init(&w->auth, "secret", 6, 0, 1);
    if (w->ops->domain_open(w->ops, &params, &w->domain, detail) != HR_OK) fprintf(stderr, "%s\n", detail);
    REQUIRE(w->domain);
    CHECK_EQ(w->ops->ep_create(w->domain, 1, NULL, &w->ep), HR_OK);
    CHECK_EQ(w->ops->ep_connect(w->ep, addr, len, 1), HR_OK);
    return w;
}

static void rig_open(struct rig *r, int n) {
    uint8_t addr[2][HR_MAX_ADDR], at[HR_MAX_ADDR];
    size_t len[2];
    uint64_t pair[2] = {1, 2}, bad;
    char detail[256] = "";
    memset(r, 0, sizeof *r);
    r->e = (struct rank){.engine = open_engine(1, addr[0], &len[0]), .rank = 0, .size = 2};
    r->decent = (struct rank){.engine = open_engine(2, addr[1], &len[1]), .rank = 1, .size = 2};
    for (int i = 0; i < 2; i++) {
        struct rank *rank = i ? &r->decent : &r->e;
        uint8_t self[HR_MAX_ADDR];
        size_t self_len;
        const char *name;
        struct hr_caps caps;
        char text[256];
        hr_engine_domain(rank->engine, 0, &name, self, &self_len, &caps, text);
        CHECK_EQ(hr_connect(rank->engine, pair[i], "loop", self, self_len, 0), HR_OK);
        CHECK_EQ(hr_connect(rank->engine, pair[!i], world_provider(), addr[!i], len[!i], i), HR_OK);
    }
    for (int k = 0; k < n; k++) {
        struct wild *w = r->wild[k] = wild_open((uint64_t)(WILD_ID + k), addr[0], len[0]);
        w->comm = (uint64_t)(WILD_COMM + k);
        r->n++;
        CHECK_EQ(hr_connect(r->e.engine, (uint64_t)(WILD_ID + k), world_provider(), at,
                            w->ops->domain_address(w->domain, at), 0),
                 HR_OK);
        UNTIL(r, w->up);
    }
    CHECK_EQ(hr_connect_wait(r->e.engine, hr_now() + SECONDS(5), &bad, detail), HR_OK);
    CHECK_EQ(hr_connect_wait(r->decent.engine, hr_now() + SECONDS(5), &bad, detail), HR_OK);
    CHECK_EQ(hr_comm_open(r->e.engine, DECENT_COMM, pair, 2, 0, &r->e.comm), HR_OK);
    CHECK_EQ(hr_comm_open(r->decent.engine, DECENT_COMM, pair, 2, 1, &r->decent.comm), HR_OK);
    for (int k = 0; k < n; k++) {
        uint64_t peers[2] = {1, (uint64_t)(WILD_ID + k)};
        CHECK_EQ(hr_comm_open(r->e.engine, (uint64_t)(WILD_COMM + k), peers, 2, 0, &r->comms[k]), HR_OK);
    }
}

/* Small and large, both ways, as if nothing had happened. */
static void decent_goes_on(struct rig *r) {
    static const size_t lens[] = {8, 300000};
    for (int i = 0; i < 4; i++) {
        struct rank *from = i & 1 ? &r->decent : &r->e, *to = i & 1 ? &r->e : &r->decent;
        size_t n = lens[i / 2];
        uint8_t *out = malloc(n), *in = calloc(1, n);
        struct hr_request send = {.priority = HR_PRIORITY_DEFAULT};
        memset(out, 0x40 + i, n);
        CHECK_EQ(hr_isend(from->comm, out, n, to->rank, 77, &send), HR_OK);
        CHECK_EQ(recv_from(to, in, n, from->rank, 77, NULL), HR_OK);
        CHECK_EQ(finish(from, &send, 10), HR_OK);
        CHECK_MEM(in, out, n);
        free(out);
        free(in);
    }
}

static void rig_close(struct rig *r) {
    decent_goes_on(r);
    for (int k = 0; k < r->n; k++) hr_comm_close(r->comms[k]);
    hr_comm_close(r->e.comm);
    hr_comm_close(r->decent.comm);
    hr_engine_close(r->decent.engine, hr_now() + SECONDS(2));
    hr_engine_close(r->e.engine, hr_now() + 50000000); /* the wild ones do not answer */
    for (int k = 0; k < r->n; k++) {
        r->wild[k]->ops->ep_destroy(r->wild[k]->ep);
        r->wild[k]->ops->domain_close(r->wild[k]->domain);
        free(r->wild[k]);
    }
}

static struct hr_conn *conn_of(struct rig *r, int k) {
    hr_lock(r->e.engine);
    struct hr_conn *conn = hr_conn_find(r->e.engine, (uint64_t)(WILD_ID + k));
    hr_unlock(r->e.engine);
    return conn;
}
static hr_status state_of(struct rig *r, int k) {
    struct hr_comm_state state;
    hr_comm_state(r->comms[k], &state);
    return (hr_status)state.status;
}

/* --- saying something
 * --------------------------------------------------------------------------------------------------------------- */

static int wild_say(struct rig *r, int k, const void *hdr, size_t hdr_len, size_t len) {
    struct wild *w = r->wild[k];
    struct hr_msg msg = {.hdr = hdr, .hdr_len = hdr_len, .payload = w->payload, .len = len};
    int64_t until = hr_now() + SECONDS(5);
    while (!w->lost && hr_now() < until) {
        hr_status status = w->ops->post_send(w->ep, &msg);
        if (status != HR_AGAIN) return !hr_is_error(status);
        turn(r);
    }
    return 0;
}
/* In its turn. */
static int say_in_order(struct rig *r, int k, struct hr_hdr_long *m, size_t len) {
    m->h.bucket = hr_match_bucket(m->h.comm, m->h.tag);
    m->h.order = r->wild[k]->order[m->h.bucket]++;
    return wild_say(r, k, m, m->h.kind == HR_MSG_RTS ? sizeof *m : sizeof m->h, len);
}
static int say_eager(struct rig *r, uint64_t tag, size_t len) {
    struct hr_hdr_long m = {.h = {.kind = HR_MSG_EAGER, .comm = r->wild[0]->comm, .tag = tag}};
    return say_in_order(r, 0, &m, len);
}
static int say_rts(struct rig *r, uint64_t tag, uint64_t size, uint32_t sreq) {
    struct hr_hdr_long m = {.h = {.kind = HR_MSG_RTS, .comm = r->wild[0]->comm, .tag = tag, .sreq = sreq},
                            .size = size};
    return say_in_order(r, 0, &m, 0);
}
static int say(struct rig *r, struct hr_hdr h, size_t len) { return wild_say(r, 0, &h, sizeof h, len); }

/* All that was said before has been heard: it is passed over, and the connection stands. */
static void passed_over(struct rig *r) {
    int before = r->wild[0]->echoes;
    CHECK(say(r, (struct hr_hdr){.kind = HR_MSG_PROBE}, 0));
    UNTIL(r, r->wild[0]->echoes > before);
    CHECK_EQ(state_of(r, 0), HR_OK);
}
static void cut_off(struct rig *r) {
    UNTIL(r, state_of(r, 0) != HR_OK);
    CHECK_EQ(state_of(r, 0), HR_ERR_PROTOCOL);
    UNTIL(r, r->wild[0]->lost);
}
#define HDR(k, ...) ((struct hr_hdr){.kind = HR_MSG_##k, .comm = WILD_COMM, __VA_ARGS__})

static hr_status receive(struct rig *r, void *buf, size_t len, int src, uint32_t tag, struct hr_request *req) {
    memset(req, 0, sizeof *req);
    req->priority = HR_PRIORITY_DEFAULT;
    return hr_irecv(r->comms[0], buf, len, src, tag, req);
}
static hr_status send_big(struct rig *r, const void *buf, size_t len, struct hr_request *req) {
    memset(req, 0, sizeof *req);
    req->priority = HR_PRIORITY_DEFAULT;
    return hr_isend(r->comms[0], buf, len, 1, 3, req);
}
static struct hr_hdr_long *heard(struct rig *r, int kind) {
    struct wild *w = r->wild[0];
    for (int i = 0; i < w->nheard && i < HEARD; i++)
        if (w->heard[i].h.kind == kind) return &w->heard[i];
    return NULL;
}

#define ATTACK(name)                         \
    static void attack_##name(struct rig *); \
    TEST(name) {                             \
        struct rig rig;                      \
        rig_open(&rig, 1);                   \
        attack_##name(&rig);                 \
        rig_close(&rig);                     \
    }                                        \
    static void attack_##name(struct rig *r)

/* --- headers
 * ------------------------------------------------------------------------------------------------------------------------
 */

ATTACK(a_header_that_is_too_short) {
    uint64_t word = HR_MSG_EAGER;
    CHECK(wild_say(r, 0, &word, sizeof word, 100));
    cut_off(r);
}
ATTACK(a_kind_that_is_none) {
    CHECK(say(r, (struct hr_hdr){.kind = 200}, 0));
    cut_off(r);
}
ATTACK(a_rendezvous_without_its_second_half) {
    CHECK(say(r, HDR(RTS, .sreq = 1), 0));
    cut_off(r);
}
ATTACK(a_bucket_beyond_the_last) {
    CHECK(say(r, HDR(EAGER, .bucket = HR_BUCKETS), 8));
    cut_off(r);
}
ATTACK(the_same_place_in_the_order_twice) {
    CHECK(say(r, HDR(EAGER, .bucket = 3, .order = 1), 8));
    CHECK(say(r, HDR(EAGER, .bucket = 3, .order = 1), 8));
    passed_over(r); /* nothing is known yet: their turn has not come */
    CHECK(say(r, HDR(EAGER, .bucket = 3, .order = 0), 8));
    cut_off(r);
}
ATTACK(a_place_that_is_past) {
    CHECK(say_eager(r, 1, 8));
    CHECK(say(r, HDR(EAGER, .tag = 1, .bucket = hr_match_bucket(WILD_COMM, 1), .order = 0), 8));
    cut_off(r);
}
ATTACK(credit_that_nobody_owes) {
    CHECK(say(r, HDR(CREDIT, .credit = UINT32_MAX), 0));
    cut_off(r);
}
ATTACK(acknowledgements_of_nothing) {
    for (int i = 0; i < 100; i++) CHECK(say(r, HDR(CREDIT, .ack = UINT32_MAX), 0));
    for (int i = 0; i < 100; i++) CHECK(say(r, HDR(ECHO, .aux = UINT64_MAX - (uint64_t)i * i), 0));
    passed_over(r);
}
ATTACK(a_farewell_twice) {
    struct hr_request any, one;
    char a[8] = {0}, b[8] = {0};
    CHECK_EQ(receive(r, a, sizeof a, HR_ANY_SOURCE, 1, &any), HR_OK);
    CHECK_EQ(receive(r, b, sizeof b, 1, 1, &one), HR_OK);
    for (int i = 0; i < 3; i++) say(r, HDR(BYE), 0);
    say_eager(r, 1, 8); /* nothing counts any more */
    UNTIL(r, __atomic_load_n(&one.done, __ATOMIC_ACQUIRE) && __atomic_load_n(&any.done, __ATOMIC_ACQUIRE));
    CHECK_EQ(one.status, HR_ERR_CLOSED);
    CHECK_EQ(any.status, HR_ERR_CLOSED);
    hr_lock(r->e.engine);
    CHECK_EQ(r->comms[0]->nclosed, 1);
    hr_unlock(r->e.engine);
}

/* --- memory
 * -------------------------------------------------------------------------------------------------------------------------
 */

/* What nobody asked for lies here up to the credit and not a message further. */
ATTACK(more_than_the_credit) {
    uint64_t said = 0;
    memset(r->wild[0]->payload, 7, PAYLOAD);
    while (said < 64u << 20 && !r->wild[0]->lost && say_eager(r, said / 1000 % 50, 1000)) said += 1000;
    cut_off(r);
    CHECK(said < 8u << 20); /* what was on its way when the line was crossed */
}
ATTACK(headers_beyond_the_credit) {
    int said = 0;
    while (said < 1000000 && !r->wild[0]->lost && say_rts(r, 1, 1u << 20, (uint32_t)said)) said++;
    cut_off(r);
    CHECK(said < 200000);
}
ATTACK(places_far_in_the_future) {
    int said = 0;
    while (said < 1000000 && !r->wild[0]->lost &&
           say(r, HDR(EAGER, .bucket = (uint8_t)(said % HR_BUCKETS), .order = 1000000u + (uint32_t)said * 3), 100))
        said++;
    cut_off(r);
    CHECK(said < 200000);
}
ATTACK(a_storm_of_skips) {
    int said = 0;
    while (said < 1000000 && !r->wild[0]->lost &&
           say(r, HDR(SKIP, .bucket = (uint8_t)(said % HR_BUCKETS), .order = 1u + (uint32_t)said * 3), 0))
        said++;
    cut_off(r);
    CHECK(said < 200000);
}
ATTACK(a_skip_of_an_absurd_length) {
    CHECK(say(r, HDR(SKIP, .aux = 1ull << 63), 0));
    cut_off(r);
}
ATTACK(withdrawals_that_keep_their_place) { /* RTS before its turn, then CANCEL: a place stays, and costs */
    int said = 0;
    uint8_t bucket = hr_match_bucket(WILD_COMM, 1);
    for (; said < 1000000 && !r->wild[0]->lost; said++) {
        struct hr_hdr_long m = {
            .h = HDR(RTS, .tag = 1, .bucket = bucket, .order = 1u + (uint32_t)said, .sreq = (uint32_t)said)};
        if (!wild_say(r, 0, &m, sizeof m, 0) || !say(r, HDR(CANCEL, .tag = 1, .sreq = (uint32_t)said), 0)) break;
    }
    cut_off(r);
    CHECK(said < 200000);
}
ATTACK(breaks_of_what_is_not_there) {
    for (uint64_t i = 0; i < 20000; i++)
        CHECK(say(r, (struct hr_hdr){.kind = HR_MSG_BREAK, .comm = 1000000 + i, .status = HR_ERR_BROKEN}, 0));
    passed_over(r);
    CHECK(conn_of(r, 0)->nbreaks <= 1024);
}
ATTACK(questions_without_listening) {
    int said = 0;
    r->wild[0]->deaf = 1;
    while (said < 1000000 && state_of(r, 0) == HR_OK && say(r, HDR(PROBE), 0))
        if (++said % 16 == 0) turn(r); /* what it sends is read at once */
    r->wild[0]->deaf = 0;
    cut_off(r);
    CHECK(said < 1000000);
}

/* --- communicators
 * ------------------------------------------------------------------------------------------------------------------------
 */

ATTACK(a_break_that_blames_nobody) {
    CHECK(say(r, HDR(BREAK, .tag = 12345, .status = HR_ERR_PEER_LOST, .flags = 255), 0));
    cut_off(r);
}
ATTACK(a_break_of_a_status_and_phase_that_are_none) {
    struct hr_comm_state state;
    CHECK(say(r, HDR(BREAK, .tag = 1, .status = -120, .flags = 255), 0));
    UNTIL(r, state_of(r, 0) != HR_OK);
    hr_comm_state(r->comms[0], &state);
    CHECK_EQ(state.status, -120);
    CHECK(hr_status_text((hr_status)state.status) && hr_phase_name((enum hr_phase)state.phase));
}
ATTACK(a_break_of_others) {
    CHECK(say(r, (struct hr_hdr){.kind = HR_MSG_BREAK, .comm = DECENT_COMM, .status = HR_ERR_PEER_LOST}, 0));
    cut_off(r);
}
ATTACK(a_message_into_the_communicator_of_others) {
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    uint32_t x = 0, y = 4711;
    struct hr_hdr_long m = {.h = {.kind = HR_MSG_EAGER, .comm = DECENT_COMM, .tag = 9}};
    CHECK_EQ(hr_irecv(r->e.comm, &x, sizeof x, HR_ANY_SOURCE, 9, &req), HR_OK);
    CHECK(say_in_order(r, 0, &m, 4));
    passed_over(r);
    CHECK(!req.done);
    CHECK_EQ(send_to(&r->decent, &y, sizeof y, 0, 9), HR_OK);
    CHECK_EQ(finish(&r->e, &req, 5), HR_OK);
    CHECK_EQ(req.peer, 1);
    CHECK_EQ(x, 4711);
    CHECK_EQ(hr_irecv(r->e.comm, &x, sizeof x, HR_ANY_SOURCE, 9, &req), HR_OK); /* nor from where it lies */
    CHECK(!req.done);
    hr_cancel(r->e.engine, &req, HR_ERR_CANCELED);
}

/* Nor can it spoil their collectives, past or to come. */
ATTACK(a_collective_of_others) {
    struct hr_hdr_long m = {.h = {.kind = HR_MSG_EAGER, .comm = DECENT_COMM, .tag = HR_COLL_TAG}};
    hr_lock(r->e.engine);
    r->e.comm->run_seq = 3; /* as if some had been run */
    hr_unlock(r->e.engine);
    CHECK(say_in_order(r, 0, &m, 4));
    cut_off(r);
}

/* --- transfers
 * ------------------------------------------------------------------------------------------------------------------------
 */

ATTACK(answers_to_what_was_never_asked) {
    static const uint32_t ids[] = {0, 1, 63, 64, 1u << 20, (1u << 20) + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        struct hr_hdr_long cts = {.h = HDR(CTS, .sreq = ids[i], .rreq = 7), .size = 0};
        CHECK(wild_say(r, 0, &cts, sizeof cts, 0));
        CHECK(say(r, HDR(SEG, .rreq = ids[i]), 5000));
        CHECK(say(r, HDR(FIN, .rreq = ids[i]), 0));
        CHECK(say(r, HDR(FIN, .rreq = ids[i], .status = HR_ERR_CANCELED), 0));
        CHECK(say(r, HDR(CANCEL, .rreq = ids[i]), 0));
        CHECK(say(r, HDR(CANCEL, .sreq = ids[i]), 0));
    }
    passed_over(r);
}

/* The transfers of two others have ids that can be guessed. */
ATTACK(answers_in_the_name_of_others) {
    size_t n = 2000000;
    uint8_t *out = malloc(n), *in = calloc(1, n), *there = malloc(n), *back = calloc(1, n);
    struct hr_request send = {.priority = HR_PRIORITY_DEFAULT}, recv = send, give = send, take = send;
    memset(out, 0x5a, n);
    memset(there, 0x3c, n);
    CHECK_EQ(hr_isend(r->e.comm, out, n, 1, 4, &send), HR_OK);
    CHECK_EQ(hr_irecv(r->e.comm, in, n, 1, 5, &recv), HR_OK);
    CHECK_EQ(hr_isend(r->decent.comm, there, n, 0, 5, &give), HR_OK);
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t id = (1u << 20) + i;
        struct hr_hdr_long cts = {.h = HDR(CTS, .sreq = id, .rreq = 7)};
        CHECK(wild_say(r, 0, &cts, sizeof cts, 0));
        CHECK(say(r, HDR(SEG, .rreq = id), 100));
        CHECK(say(r, HDR(FIN, .rreq = id), 0));
        CHECK(say(r, HDR(CANCEL, .rreq = id), 0));
        CHECK(say(r, HDR(CANCEL, .sreq = id, .tag = 5), 0));
    }
    passed_over(r);
    CHECK_EQ(hr_irecv(r->decent.comm, back, n, 0, 4, &take), HR_OK);
    CHECK_EQ(finish(&r->e, &recv, 10), HR_OK);
    CHECK_EQ(finish(&r->decent, &take, 10), HR_OK);
    CHECK_EQ(finish(&r->e, &send, 10), HR_OK);
    CHECK_EQ(finish(&r->decent, &give, 10), HR_OK);
    CHECK_MEM(back, out, n);
    CHECK_MEM(in, there, n);
    free(out);
    free(in);
    free(there);
    free(back);
}

ATTACK(a_size_that_cannot_be) {
    struct hr_request req;
    char *buf = calloc(1, 100);
    for (int i = 0; i < 3; i++) {
        uint64_t size = i == 0 ? 1ull << 63 : i == 1 ? UINT64_MAX : 101;
        CHECK_EQ(receive(r, buf, 100, 1, 2, &req), HR_OK);
        CHECK(say_rts(r, 2, size, 17));
        UNTIL(r, __atomic_load_n(&req.done, __ATOMIC_ACQUIRE));
        CHECK_EQ(req.status, HR_ERR_TRUNCATED);
        CHECK_EQ(req.nbytes, size);
    }
    passed_over(r);
    free(buf);
}

/* The engine's receive of 100000 bytes in segments or by writes; the CTS. */
static struct hr_hdr_long *start_transfer(struct rig *r, uint8_t *buf, struct hr_request *req) {
    CHECK_EQ(receive(r, buf, 100000, 1, 2, req), HR_OK);
    CHECK(say_rts(r, 2, 100000, 17));
    UNTIL(r, heard(r, HR_MSG_CTS));
    REQUIRE(heard(r, HR_MSG_CTS));
    return heard(r, HR_MSG_CTS);
}

ATTACK(segments_that_do_not_fit) {
    struct hr_request req;
    uint8_t *buf = calloc(1, 100000);
    uint32_t id = start_transfer(r, buf, &req)->h.rreq;
    memset(r->wild[0]->payload, 0xff, PAYLOAD);
    say(r, HDR(SEG, .rreq = id, .aux = 60000), 50000);
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    for (int i = 0; i < 100000; i++)
        if (buf[i]) {
            CHECK_EQ(buf[i], 0);
            break;
        }
    free(buf);
}
ATTACK(segments_that_are_too_many) {
    struct hr_request req;
    uint8_t *buf = calloc(1, 100000);
    struct hr_hdr_long *cts = start_transfer(r, buf, &req);
    for (uint64_t at = 0; at < 200000; at += 50000)
        if (!say(r, HDR(SEG, .rreq = cts->h.rreq, .aux = at), 50000)) break;
    if (cts->h.flags & HR_HDR_DESC) { /* it was to be written */
        cut_off(r);
        CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    } else { /* those after the last are for nobody */
        passed_over(r);
        CHECK_EQ(req.status, HR_OK);
    }
    free(buf);
}
ATTACK(writes_that_do_not_fit) {
    struct hr_request req;
    uint8_t *buf = calloc(1, 100000);
    struct wild *w = r->wild[0];
    struct hr_hdr_long *cts = start_transfer(r, buf, &req);
    struct hr_rmem rmem;
    if (cts->h.flags & HR_HDR_DESC) {
        CHECK_EQ(w->ops->mem_import(w->ep, &cts->desc, &rmem), HR_OK);
        rmem.len = 1u << 30; /* the provider here believes it, the one there must not */
        static const struct {
            uint64_t offset, len, id;
        } writes[] = {{100000, 10, 1}, {99990, 20, 1}, {1 << 20, 50000, 0}};
        for (size_t i = 0; i < sizeof writes / sizeof *writes; i++) {
            struct hr_rma rma = {.local = w->payload,
                                 .len = writes[i].len,
                                 .remote = &rmem,
                                 .offset = writes[i].offset,
                                 .with_notify = 1,
                                 .value = writes[i].id ? cts->h.rreq : 999};
            UNTIL(r, w->lost || w->ops->post_write(w->ep, &rma) != HR_AGAIN);
        }
        /* right in memory, wrong in number: the whole of it twice */
        struct hr_rma rma = {
            .local = w->payload, .len = 60000, .remote = &rmem, .with_notify = 1, .value = cts->h.rreq};
        for (int i = 0; i < 2; i++) UNTIL(r, w->lost || w->ops->post_write(w->ep, &rma) != HR_AGAIN);
        cut_off(r);
        CHECK(req.status == HR_ERR_PROTOCOL);
    } else {
        hr_cancel(r->e.engine, &req, HR_ERR_CANCELED);
    }
    free(buf);
}
ATTACK(memory_that_is_shorter_than_promised) {
    struct hr_request req;
    struct wild *w = r->wild[0];
    uint8_t *buf = calloc(1, 100000), *mine = hr_arena_alloc(4096, 0);
    struct hr_mem mem;
    struct hr_hdr_long m = {.h = HDR(RTS, .flags = HR_HDR_DESC, .tag = 2, .sreq = 17), .size = 100000};
    CHECK_EQ(w->ops->mem_register(w->domain, mine, 4096, HR_ACCESS_REMOTE_READ, &mem), HR_OK);
    hr_status status = HR_AGAIN;
    UNTIL(r, (status = w->ops->mem_export(w->ep, &mem, mine, 4096, &m.desc)) != HR_AGAIN);
    CHECK_EQ(status, HR_OK);
    CHECK_EQ(receive(r, buf, 100000, 1, 2, &req), HR_OK);
    CHECK(say_in_order(r, 0, &m, 0));
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    w->ops->mem_deregister(w->domain, &mem);
    hr_arena_free(mine);
    free(buf);
}
ATTACK(descriptors_of_noise) {
    for (int i = 0; i < 200; i++) {
        struct hr_request req;
        uint8_t *buf = calloc(1, 50000);
        struct hr_hdr_long m = {.h = HDR(RTS, .flags = HR_HDR_DESC, .tag = 2, .sreq = 17), .size = 50000};
        uint64_t words[4];
        for (int j = 0; j < 4; j++)
            words[j] = (uint64_t)i * 0x9e3779b97f4a7c15ull >> (i % 5 * 13) ^ (uint64_t)j << (i % 60);
        memcpy(&m.desc, words, sizeof words);
        CHECK_EQ(receive(r, buf, 50000, 1, 2, &req), HR_OK);
        if (!say_in_order(r, 0, &m, 0)) i = 200;
        for (int j = 0; j < 4; j++) turn(r);
        hr_cancel(r->e.engine, &req, HR_ERR_CANCELED);
        free(buf);
    }
}

ATTACK(the_end_said_twice) {
    struct hr_request req;
    uint8_t *buf = calloc(1, 400000);
    CHECK_EQ(send_big(r, buf, 400000, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    uint32_t id = heard(r, HR_MSG_RTS)->h.sreq;
    for (int i = 0; i < 3; i++) CHECK(say(r, HDR(FIN, .rreq = id), 0));
    passed_over(r);
    CHECK_EQ(req.status, HR_OK);
    free(buf);
}
/* While segments or writes of it are with the provider, nobody else can say that the transfer has ended. */
ATTACK(the_end_said_in_the_middle) {
    struct hr_request req;
    size_t n = 64u << 20;
    uint8_t *buf = calloc(1, n);
    CHECK_EQ(send_big(r, buf, n, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    struct hr_hdr_long cts = {.h = HDR(CTS, .sreq = heard(r, HR_MSG_RTS)->h.sreq, .rreq = 9)};
    r->wild[0]->deaf = 1;
    CHECK(wild_say(r, 0, &cts, sizeof cts, 0));
    for (int i = 0; i < 200; i++) turn(r);
    CHECK(say(r, HDR(FIN, .rreq = cts.h.sreq), 0));
    UNTIL(r, state_of(r, 0) == HR_ERR_PROTOCOL);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    free(buf);
    r->wild[0]->deaf = 0;
}
ATTACK(asked_to_write_where_nothing_is) {
    struct hr_request req;
    uint8_t *buf = calloc(1, 400000);
    CHECK_EQ(send_big(r, buf, 400000, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    struct hr_hdr_long cts = {.h = HDR(CTS, .flags = HR_HDR_DESC, .sreq = heard(r, HR_MSG_RTS)->h.sreq, .rreq = 9)};
    memset(&cts.desc, 0x77, sizeof cts.desc);
    CHECK(wild_say(r, 0, &cts, sizeof cts, 0));
    for (int i = 0; i < 1000; i++) turn(r); /* refused here, or there */
    free(buf);
}
/* A send that is withdrawn by its receiver would be posted as a receive: into memory that is only read. */
ATTACK(a_withdrawal_of_the_engines_own_send) {
    struct hr_request req;
    static const uint8_t constant[400000];
    CHECK_EQ(send_big(r, constant, sizeof constant, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    CHECK(say(r, HDR(CANCEL, .rreq = heard(r, HR_MSG_RTS)->h.sreq), 0));
    say_eager(r, 3, 100);
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
}

/* --- collectives
 * -----------------------------------------------------------------------------------------------------------------------
 */

enum { ELEMENTS = 20000, SIG = 99 };

/* Rank 0's part of: borrow from rank 1, add, and also receive-and-add. */
static struct hr_program *program_of_rank_0(void) {
    struct hr_program *p = NULL;
    char detail[256] = "";
    uint32_t unlocks[] = {1, 2}, n = ELEMENTS * 4;
    struct hr_ref refs[] = {{HR_BUF_OUT, 0, 0}, {HR_BUF_BORROWED, 0, 0}};
    struct hr_instr instrs[] = {
        {.op = HR_OP_BORROW, .peer = 1, .tag = 0, .unlock = 0, .nunlock = 1, .len = n, .dst_buf = HR_BUF_TMP},
        {.op = HR_OP_REDUCE,
         .peer = -1,
         .after = 1,
         .unlock = 1,
         .nunlock = 1,
         .nref = 2,
         .len = n,
         .dst_buf = HR_BUF_OUT},
        {.op = HR_OP_RECV_REDUCE, .peer = 1, .tag = 1, .after = 1, .len = n, .dst_buf = HR_BUF_OUT},
        {.op = HR_OP_SEND, .peer = 1, .tag = 2, .len = n, .src_buf = HR_BUF_OUT},
    };
    hr_status status = hr_program_new(instrs, 4, unlocks, 2, refs, 2, n, n, n, 2, &p, detail);
    if (status != HR_OK) fprintf(stderr, "%s\n", detail);
    REQUIRE(p);
    return p;
}
static uint64_t coll_tag(uint64_t run, uint64_t tag) { return HR_COLL_TAG | run << 24 | tag; }

/* Mapped and read in place over the length that the program has: it must be there. */
ATTACK(a_loan_that_is_too_short) {
    struct hr_program *p = program_of_rank_0();
    struct wild *w = r->wild[0];
    float *x = calloc(ELEMENTS, 4);
    uint8_t *mine = hr_arena_alloc(4096, 0);
    struct hr_mem mem;
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    struct hr_hdr_long m = {.h = HDR(RTS, .flags = HR_HDR_DESC, .tag = coll_tag(0, 0), .aux = SIG, .sreq = 17),
                            .size = 4096};
    CHECK_EQ(w->ops->mem_register(w->domain, mine, 4096, HR_ACCESS_REMOTE_READ, &mem), HR_OK);
    hr_status status = HR_AGAIN;
    UNTIL(r, (status = w->ops->mem_export(w->ep, &mem, mine, 4096, &m.desc)) != HR_AGAIN);
    CHECK_EQ(hr_run(r->comms[0], p, x, x, HR_FLOAT32, HR_SUM, SIG, &req), HR_OK);
    CHECK(say_in_order(r, 0, &m, 0));
    UNTIL(r, __atomic_load_n(&req.done, __ATOMIC_ACQUIRE));
    CHECK_EQ(req.status, HR_ERR_MISMATCH);
    w->ops->mem_deregister(w->domain, &mem);
    hr_arena_free(mine);
    hr_program_put(p);
    free(x);
}
ATTACK(an_operand_in_ragged_pieces) {
    struct hr_program *p = program_of_rank_0();
    float *x = calloc(ELEMENTS, 4);
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    uint64_t n = ELEMENTS * 4;
    CHECK_EQ(hr_run(r->comms[0], p, x, x, HR_FLOAT32, HR_SUM, SIG, &req), HR_OK);
    for (uint64_t tag = 0; tag < 2; tag++) {
        struct hr_hdr_long m = {.h = HDR(RTS, .tag = coll_tag(0, tag), .aux = SIG, .sreq = 17 + (uint32_t)tag),
                                .size = n};
        struct wild *w = r->wild[0];
        w->nheard = 0;
        memset(w->heard, 0, sizeof w->heard);
        CHECK(say_in_order(r, 0, &m, 0));
        UNTIL(r, heard(r, HR_MSG_CTS));
        struct hr_hdr_long *cts = heard(r, HR_MSG_CTS);
        if (tag == 0 && cts->h.flags & HR_HDR_DESC) { /* the loan is copied into scratch by writes */
            struct hr_rmem rmem;
            CHECK_EQ(w->ops->mem_import(w->ep, &cts->desc, &rmem), HR_OK);
            for (uint64_t at = 0; at < n; at += 40000) {
                struct hr_rma rma = {.local = w->payload,
                                     .len = 40000,
                                     .remote = &rmem,
                                     .offset = at,
                                     .with_notify = 1,
                                     .value = cts->h.rreq};
                UNTIL(r, w->ops->post_write(w->ep, &rma) != HR_AGAIN);
            }
        } else {
            uint64_t piece = tag ? 33333 : 40000;
            for (uint64_t at = 0; at < n; at += piece)
                if (!say(r, HDR(SEG, .rreq = cts->h.rreq, .aux = at), n - at < piece ? n - at : piece)) break;
        }
    }
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    hr_program_put(p);
    free(x);
}

/* --- at random
 * --------------------------------------------------------------------------------------------------------------------------
 */

static uint64_t random_state;
static uint64_t rnd(void) {
    uint64_t z = (random_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
static uint64_t below(uint64_t n) { return rnd() % n; }
static int chance(int percent) { return below(100) < (uint64_t)percent; }

/* What the engine does meanwhile. Buffers are of exact size, and once done they must stay as they are. */
struct deed {
    struct hr_request req;
    uint8_t *buf;
    size_t len;
    int kind, over;
    uint64_t sum;
};
enum { DEEDS = 48 };

static uint64_t sum_of(const uint8_t *p, size_t n) {
    uint64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum = sum * 31 + p[i];
    return sum;
}
static void deed_watch(struct deed *d) {
    if (!d->buf || !__atomic_load_n(&d->req.done, __ATOMIC_ACQUIRE)) return;
    if (!d->over) d->sum = sum_of(d->buf, d->len);
    d->over = 1;
}
static void deed_end(struct deed *d) {
    deed_watch(d);
    if (d->buf && d->over) CHECK_EQ(sum_of(d->buf, d->len), d->sum);
    free(d->buf);
    d->buf = NULL;
}
static void deed_start(struct rig *r, int k, struct deed *d, struct hr_program *p) {
    static const size_t lens[] = {0, 4, 100, 5000, 9000, 20000, 70000, 200000};
    if (d->buf && !__atomic_load_n(&d->req.done, __ATOMIC_ACQUIRE)) {
        if (chance(70)) return;
        hr_cancel(r->e.engine, &d->req, HR_ERR_CANCELED);
    }
    deed_end(d);
    memset(d, 0, sizeof *d);
    d->kind = (int)below(8);
    d->len = d->kind ? lens[below(8)] : ELEMENTS * 4;
    d->buf = malloc(d->len + !d->len);
    memset(d->buf, 1, d->len);
    d->req.priority = (int)below(HR_PRIORITIES);
    if (d->kind == 0) r->wild[k]->runs++;
    if (d->kind == 0)
        hr_run(r->comms[k], p, d->buf, d->buf, HR_FLOAT32, HR_SUM, SIG, &d->req);
    else if (d->kind < 5)
        hr_irecv(r->comms[k], d->buf, d->len, chance(30) ? HR_ANY_SOURCE : 1, (uint32_t)below(4), &d->req);
    else
        hr_isend(r->comms[k], d->buf, d->len, 1, (uint32_t)below(4), &d->req);
}

/* Something that the engine said, of this kind most of the time. */
static const struct hr_hdr_long *some_heard(struct wild *w, int kind) {
    uint64_t n = (uint64_t)(w->nheard < HEARD ? w->nheard : HEARD);
    const struct hr_hdr_long *m = n ? &w->heard[below(n)] : NULL;
    for (uint64_t i = 0; n && i < n && m->h.kind != kind && kind; i++) m = &w->heard[(below(n) + i) % n];
    return m && (m->h.kind == kind || !kind || below(500) == 0) ? m : NULL;
}
static uint32_t some_id(struct wild *w, int kind) {
    const struct hr_hdr_long *m = chance(90) ? some_heard(w, kind) : NULL;
    if (m) return m->h.kind == HR_MSG_RTS ? m->h.sreq : m->h.rreq;
    if (chance(90)) return (uint32_t)(5u << 20 | below(20)); /* nobody's */
    return chance(80) ? (uint32_t)((1 + below(3)) << 20 | below(20)) : (uint32_t)rnd();
}
static uint64_t some_size(void) {
    static const uint64_t sizes[] = {0,     1,          100,        5000,      ELEMENTS * 4, ELEMENTS * 4,
                                     70000, 1ull << 32, 1ull << 63, UINT64_MAX};
    return sizes[below(10)];
}

static void wild_write(struct rig *r, struct wild *w) {
    struct hr_rmem rmem;
    const struct hr_hdr_long *m = some_heard(w, chance(70) ? HR_MSG_CTS : 0);
    if (!m || !(m->h.flags & HR_HDR_DESC) || w->ops->mem_import(w->ep, &m->desc, &rmem) != HR_OK) return;
    if (chance(20)) rmem.len = 1u << 30;
    struct hr_rma rma = {.local = w->payload,
                         .len = chance(50)           ? below(PAYLOAD)
                                : rmem.len < PAYLOAD ? rmem.len
                                                     : PAYLOAD,
                         .remote = &rmem,
                         .offset = chance(70) ? 0 : below(200000),
                         .with_notify = chance(80),
                         .value = chance(90) ? m->h.rreq : rnd()};
    if (m->h.kind == HR_MSG_CTS || chance(50)) w->ops->post_write(w->ep, &rma);
    w->ops->mem_release(w->ep, &rmem);
    turn(r);
}

/* Half of it nearly right, so that it gets far. */
static void wild_deed(struct rig *r, int k) {
    struct wild *w = r->wild[k];
    struct hr_hdr_long m = {.h = {.kind = (uint8_t)(1 + below(HR_MSG_KINDS - 1)),
                                  .comm = chance(96)   ? w->comm
                                          : chance(50) ? DECENT_COMM
                                                       : rnd(),
                                  .tag = chance(60) || below(4) ? below(4) : coll_tag(w->runs + below(4), below(3)),
                                  .sreq = (uint32_t)(5u << 20 | below(20)),
                                  .rreq = (uint32_t)(5u << 20 | below(20))},
                            .size = some_size()};
    size_t len = m.h.kind == HR_MSG_EAGER ? (chance(90) ? below(9000) : below(PAYLOAD)) : 0;
    if (m.h.kind == HR_MSG_BREAK || m.h.kind == HR_MSG_BYE)
        if (chance(97)) return;
    if (chance(15)) {
        wild_write(r, w);
        return;
    }
    m.h.aux = m.h.tag & HR_COLL_TAG ? SIG : 0;
    if (m.h.kind == HR_MSG_SEG) {
        m.h.rreq = some_id(w, HR_MSG_CTS);
        uint64_t *at = &w->at[m.h.rreq % HEARD];
        len = chance(95) ? 4000 : below(PAYLOAD);
        m.h.aux = below(200) ? *at : below(3) * 5000;
        *at += len;
    }
    if (m.h.kind == HR_MSG_CANCEL) m.h.rreq = chance(50) ? 0 : some_id(w, HR_MSG_CTS);
    if (m.h.kind == HR_MSG_CTS) m.h.sreq = some_id(w, HR_MSG_RTS);
    if (m.h.kind == HR_MSG_FIN) m.h.rreq = some_id(w, HR_MSG_RTS);
    if (m.h.kind == HR_MSG_SKIP) m.h.aux = below(100);
    if (m.h.kind == HR_MSG_FIN) m.h.status = chance(50) ? HR_OK : (int8_t)-(1 + (int)below(12));
    if (m.h.kind == HR_MSG_BREAK) m.h.tag = below(3);
    if (m.h.kind == HR_MSG_RTS && chance(50)) m.h.flags = HR_HDR_DESC;
    if (m.h.kind == HR_MSG_CTS && below(50) == 0) m.h.flags = HR_HDR_DESC;
    if (m.h.flags && w->nheard) m.desc = w->heard[0].desc;
    if (m.h.tag & HR_COLL_TAG) m.size = ELEMENTS * 4;
    m.h.bucket = hr_match_bucket(m.h.comm, m.h.tag);
    m.h.order = w->order[m.h.bucket];
    if (chance(3)) m.h.order += (uint32_t)below(5);
    if (m.h.kind == HR_MSG_EAGER || m.h.kind == HR_MSG_RTS || m.h.kind == HR_MSG_SKIP)
        if (m.h.order == w->order[m.h.bucket]) w->order[m.h.bucket]++;
    if (chance(2)) m.h.ack = (uint32_t)rnd();
    if (below(2000) == 0) m.h.credit = (uint32_t)rnd();
    if (below(1000) == 0) ((uint8_t *)&m)[below(sizeof m)] = (uint8_t)rnd();
    size_t hdr_len = m.h.kind == HR_MSG_RTS || m.h.kind == HR_MSG_CTS ? sizeof m : sizeof m.h;
    if (below(1000) == 0) hdr_len = 8 + 8 * below(11);
    wild_say(r, k, &m, hdr_len, len);
}

TEST(noise) {
    int rounds = getenv("WILD_ROUNDS") ? atoi(getenv("WILD_ROUNDS")) : 12, cut = 0, said = 0;
    const char *seed = getenv("WILD_SEED");
    struct hr_program *p = program_of_rank_0();
    for (int round = 0; round < rounds; round++) {
        struct rig r;
        static struct deed deeds[WILD_MAX][DEEDS];
        random_state = (seed ? strtoull(seed, NULL, 0) : 1) * 1000003 + (uint64_t)round;
        rig_open(&r, WILD_MAX);
        for (int step = 0; step < 6000; step++) {
            int k = (int)below(WILD_MAX);
            struct wild *w = r.wild[k];
            if (w->lost) continue;
            said++;
            if (chance(25)) deed_start(&r, k, &deeds[k][below(DEEDS)], p);
            wild_deed(&r, k);
            if (chance(50)) turn(&r);
            if (chance(10))
                for (int i = 0; i < DEEDS; i++) deed_watch(&deeds[k][i]);
        }
        for (int k = 0; k < WILD_MAX; k++) {
            cut += r.wild[k]->lost;
            for (int i = 0; i < DEEDS; i++) {
                struct deed *d = &deeds[k][i];
                if (d->buf && !__atomic_load_n(&d->req.done, __ATOMIC_ACQUIRE))
                    hr_cancel(r.e.engine, &d->req, HR_ERR_TIMEOUT);
                if (d->buf) CHECK(d->req.done);
                deed_watch(d);
            }
        }
        for (int i = 0; i < 100; i++) turn(&r); /* what comes late changes nothing */
        for (int k = 0; k < WILD_MAX; k++)
            for (int i = 0; i < DEEDS; i++) deed_end(&deeds[k][i]);
        rig_close(&r);
        if (check_failures()) fprintf(stderr, "round %d\n", round);
    }
    if (getenv("WILD_SEED")) printf("noise: %d said, %d of %d cut off\n", said, cut, rounds * WILD_MAX);
    CHECK(said > rounds * 500);
    hr_program_put(p);
}
