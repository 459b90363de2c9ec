/* wild_rig.h - one engine, a decent peer, and wild ones that drive a provider themselves and say what no engine would
 * say. */
#ifndef HR_TESTS_WILD_RIG_H
#define HR_TESTS_WILD_RIG_H

#include <time.h>

#include "core/engine.h"
#include "world.h"

/* --- one engine, a decent peer, and wild ones
 * ------------------------------------------------------------------------------------------- */

enum {
    DECENT_COMM = 5,
    WILD_COMM = 100,
    WILD_ID = 10,
    WILD_MAX = 8,
    HEARD = 64,
    PAYLOAD = 1 << 16,
    WILD_SREQ = 5 << 20,
    LEDGER_BYTES = 1 << 15
};

struct wild { /* a domain and an endpoint without an engine */
    const struct hr_provider *ops;
    struct hr_domain *domain;
    struct hr_ep *ep;
    struct hr_auth auth;
    int up, lost, nheard, echoes, deaf;
    struct hr_hdr_long heard[HEARD], last; /* what the engine said: RTS, CTS and FIN; any */
    uint32_t order[HR_BUCKETS];
    uint64_t comm, runs, at[HEARD]; /* at: of the segments for each transfer */
    uint8_t *into;                  /* where what the engine sends of a transfer is put together, */
    size_t got;                     /* so many bytes by now */
    uint64_t *ledger;
    struct hr_mem ledger_mem;
    uint8_t payload[PAYLOAD];
};
struct rig {
    struct rank e, decent; /* the engine under test is rank 0 of both communicators */
    struct hr_comm *comms[WILD_MAX];
    struct wild *wild[WILD_MAX];
    int n;
};

static inline void wild_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct wild *w = ep->domain->owner;
    memset(&w->last, 0, sizeof w->last);
    memcpy(&w->last, hdr, hdr_len < sizeof w->last ? hdr_len : sizeof w->last);
    if (w->into && (w->last.h.kind == HR_MSG_RTS || w->last.h.kind == HR_MSG_SEG)) {
        memcpy(w->into + (w->last.h.kind == HR_MSG_SEG ? w->last.h.aux : 0), payload, len);
        w->got += len;
    }
    w->echoes += w->last.h.kind == HR_MSG_ECHO;
    if (w->last.h.kind == HR_MSG_CTS) w->at[w->last.h.rreq % HEARD] = 0;
    if (w->last.h.kind == HR_MSG_RTS || w->last.h.kind == HR_MSG_CTS || w->last.h.kind == HR_MSG_FIN)
        w->heard[w->nheard++ % HEARD] = w->last;
}
static inline void wild_done(struct hr_ep *ep, void *cookie, hr_status status) { (void)ep, (void)cookie, (void)status; }
static inline void wild_notify(struct hr_ep *ep, uint64_t value, size_t nbytes) { (void)ep, (void)value, (void)nbytes; }
static inline void wild_state(struct hr_ep *ep, hr_status status, const char *detail) {
    struct wild *w = ep->domain->owner;
    (void)detail;
    if (status == HR_OK)
        w->up = 1;
    else
        w->lost = 1;
}
static const struct hr_sink wild_sink = {wild_recv, wild_done, wild_notify, wild_state, NULL, NULL};

static inline void turn(struct rig *r) {
    for (int k = 0; k < r->n; k++)
        if (!r->wild[k]->deaf) r->wild[k]->ops->progress(r->wild[k]->domain, 16, NULL);
    hr_progress(r->e.engine);
}
/* cond may do something, and is not asked again once it holds. */
#define UNTIL(r, cond)                                                   \
    do {                                                                 \
        int64_t until_ = hr_now() + SECONDS(5);                          \
        int holds_;                                                      \
        while (!(holds_ = (cond) ? 1 : 0) && hr_now() < until_) turn(r); \
        if (!holds_) fprintf(stderr, "in vain: %s\n", #cond);            \
        CHECK(holds_);                                                   \
    } while (0)

static inline struct hr_engine *open_engine(uint64_t id, uint8_t *addr, size_t *len_p) {
    struct hr_engine *engine = NULL;
    char detail[256] = "", text[HR_ABOUT];
    struct hr_config config = {
        .self_id = id, .providers = world_provider(), .devices = world_devices(), .local_peers = 3, .spin_us = -1};
    struct hr_caps caps;
    const char *name;
    hr_auth_init(&config.auth, "secret", 6, 0, 1);
    if (hr_engine_open(&config, &engine, detail) != HR_OK) fprintf(stderr, "%s\n", detail);
    REQUIRE(engine);
    for (int d = 0; hr_engine_domain(engine, d, &name, addr, len_p, &caps, text); d++)
        if (!strcmp(name, world_provider())) break;
    return engine;
}

static inline struct wild *wild_open(uint64_t id, const uint8_t *addr, size_t len) {
    struct wild *w = calloc(1, sizeof *w);
    char detail[256] = "";
    struct hr_domain_params params = {
        .self_id = id, .auth = &w->auth, .sink = &wild_sink, .owner = w, .local_peers = 3};
    w->ops = hr_provider_find(world_provider());
    if (!strcmp(world_provider(), "verbs")) params.device = strchr(world_devices(), ':') + 1;
    hr_auth_init(&w->auth, "secret", 6, 0, 1);
    if (w->ops->domain_open(w->ops, &params, &w->domain, detail) != HR_OK) fprintf(stderr, "%s\n", detail);
    REQUIRE(w->domain);
    CHECK_EQ(w->ops->ep_create(w->domain, 1, NULL, &w->ep), HR_OK);
    CHECK_EQ(w->ops->ep_connect(w->ep, addr, len, 1), HR_OK);
    return w;
}

static inline void rig_open(struct rig *r, int n) {
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
        char text[HR_ABOUT];
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
static inline void decent_goes_on(struct rig *r) {
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

static inline void take_back(struct rig *r, int k, void *mine, struct hr_mem *mem) {
    r->wild[k]->ops->mem_deregister(r->wild[k]->domain, mem);
    hr_arena_free(mine);
}

static inline void rig_close(struct rig *r) {
    decent_goes_on(r);
    for (int k = 0; k < r->n; k++) hr_comm_close(r->comms[k]);
    hr_comm_close(r->e.comm);
    hr_comm_close(r->decent.comm);
    hr_engine_close(r->decent.engine, hr_now() + SECONDS(2));
    hr_engine_close(r->e.engine, hr_now() + 50000000); /* the wild ones do not answer */
    for (int k = 0; k < r->n; k++) {
        if (r->wild[k]->ledger) take_back(r, k, r->wild[k]->ledger, &r->wild[k]->ledger_mem);
        r->wild[k]->ops->ep_destroy(r->wild[k]->ep);
        r->wild[k]->ops->domain_close(r->wild[k]->domain);
        free(r->wild[k]);
    }
}

static inline struct hr_conn *conn_of(struct rig *r, int k) {
    hr_lock(r->e.engine);
    struct hr_conn *conn = hr_conn_find(r->e.engine, (uint64_t)(WILD_ID + k), 0);
    hr_unlock(r->e.engine);
    return conn;
}
static inline hr_status state_of(struct rig *r, int k) {
    struct hr_comm_state state;
    hr_comm_state(r->comms[k], &state);
    return (hr_status)state.status;
}

/* --- saying something
 * --------------------------------------------------------------------------------------------------------------- */

static inline int wild_say(struct rig *r, int k, const void *hdr, size_t hdr_len, size_t len) {
    struct wild *w = r->wild[k];
    struct hr_msg msg = {.hdr = hdr, .hdr_len = hdr_len, .payload = w->payload, .len = len};
    int64_t until = hr_now() + SECONDS(5);
    while (!w->lost && hr_now() < until) {
        hr_status status = w->ops->post_send(w->ep, &msg);
        if (status != HR_AGAIN) return !hr_is_error(status);
        if (w->deaf) w->ops->progress(w->domain, 1, NULL); /* what it says leaves in its turns only */
        turn(r);
    }
    return 0;
}
/* In its turn. */
static inline int say_in_order(struct rig *r, int k, struct hr_hdr_long *m, size_t len) {
    m->h.bucket = hr_match_bucket(m->h.comm, m->h.tag);
    m->h.order = r->wild[k]->order[m->h.bucket]++;
    m->key = m->h.sreq;
    return wild_say(r, k, m, m->h.kind == HR_MSG_RTS ? sizeof *m : sizeof m->h, len);
}
static inline int is_done(struct hr_request *req) { return __atomic_load_n(&req->done, __ATOMIC_ACQUIRE); }

/* Memory that the engine may read, or write as well, with its descriptor. */
static inline void *lend_for(struct rig *r, int k, size_t len, uint32_t access, struct hr_mem *mem_p,
                             struct hr_desc *desc_p) {
    struct wild *w = r->wild[k];
    void *mine = hr_arena_alloc(len, access & HR_ACCESS_REMOTE_MAP ? HR_ARENA_WRITABLE_BY_PEERS : 0);
    hr_status status = HR_AGAIN;
    memset(mine, 0, len);
    CHECK_EQ(w->ops->mem_register(w->domain, mine, len, access, mem_p), HR_OK);
    UNTIL(r, (status = w->ops->mem_export(w->ep, mem_p, mine, len, desc_p)) != HR_AGAIN);
    CHECK_EQ(status, HR_OK);
    return mine;
}
static inline void *lend(struct rig *r, int k, size_t len, struct hr_mem *mem_p, struct hr_desc *desc_p) {
    return lend_for(r, k, len, HR_ACCESS_REMOTE_READ, mem_p, desc_p);
}
/* Without it the engine pulls nothing. All offers with small ids of the first generations stand. */
static inline void show_ledger(struct rig *r, int k, size_t len) {
    struct wild *w = r->wild[k];
    struct hr_hdr_long m = {.h = {.kind = HR_MSG_LEDGER}, .size = len};
    w->ledger = lend_for(r, k, len, HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_MAP, &w->ledger_mem, &m.desc);
    for (uint32_t i = 0; i < 20; i++) w->ledger[i] = (uint64_t)(WILD_SREQ + i) << 16; /* the keys are the ids */
    CHECK(wild_say(r, k, &m, sizeof m, 0));
}
static inline int say_eager(struct rig *r, uint64_t tag, size_t len) {
    struct hr_hdr_long m = {.h = {.kind = HR_MSG_EAGER, .comm = r->wild[0]->comm, .tag = tag}};
    return say_in_order(r, 0, &m, len);
}
static inline int say_rts(struct rig *r, uint64_t tag, uint64_t size, uint32_t sreq) {
    struct hr_hdr_long m = {.h = {.kind = HR_MSG_RTS, .comm = r->wild[0]->comm, .tag = tag, .sreq = sreq},
                            .size = size};
    return say_in_order(r, 0, &m, 0);
}
/* As much of it as goes into one message. */
static inline size_t at_most(const struct rig *r, size_t len) {
    size_t max = r->wild[0]->domain->caps.max_send;
    return len < max ? len : max;
}
static inline int say(struct rig *r, struct hr_hdr h, size_t len) { return wild_say(r, 0, &h, sizeof h, len); }

/* All that was said before has been heard: it is passed over, and the connection stands. */
static inline void passed_over(struct rig *r) {
    int before = r->wild[0]->echoes;
    CHECK(say(r, (struct hr_hdr){.kind = HR_MSG_PROBE}, 0));
    UNTIL(r, r->wild[0]->echoes > before);
    CHECK_EQ(state_of(r, 0), HR_OK);
}
static inline void cut_off(struct rig *r) {
    UNTIL(r, state_of(r, 0) != HR_OK);
    CHECK_EQ(state_of(r, 0), HR_ERR_PROTOCOL);
    UNTIL(r, r->wild[0]->lost);
}
#define HDR(k, ...) ((struct hr_hdr){.kind = HR_MSG_##k, .comm = WILD_COMM, __VA_ARGS__})

static inline hr_status receive(struct rig *r, void *buf, size_t len, int src, uint32_t tag, struct hr_request *req) {
    memset(req, 0, sizeof *req);
    req->priority = HR_PRIORITY_DEFAULT;
    return hr_irecv(r->comms[0], buf, len, src, tag, req);
}
static inline hr_status send_big(struct rig *r, const void *buf, size_t len, struct hr_request *req) {
    memset(req, 0, sizeof *req);
    req->priority = HR_PRIORITY_DEFAULT;
    return hr_isend(r->comms[0], buf, len, 1, 3, req);
}
static inline struct hr_hdr_long *heard(struct rig *r, int kind) {
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

enum { ELEMENTS = 20000, SIG = 99 };

static inline uint64_t coll_tag(uint64_t run, uint64_t tag) { return HR_COLL_TAG | run << 24 | tag; }

/* Rank 0's part of: borrow from rank 1, add, and also receive-and-add. */
static inline struct hr_program *program_of_rank_0(void) {
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

#endif
