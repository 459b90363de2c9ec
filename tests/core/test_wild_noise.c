/* test_wild_noise.c - peers that keep to no rule, at random: WILD_ROUNDS is how long, HR_TEST_PROVIDER over what. */

#include "wild_rig.h"

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
    if (chance(90)) return WILD_SREQ + (uint32_t)below(20); /* nobody's */
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
                                  .sreq = WILD_SREQ + (uint32_t)below(20),
                                  .rreq = WILD_SREQ + (uint32_t)below(20)},
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
    if (m.h.kind == HR_MSG_LEDGER && below(50)) return;
    if ((m.h.kind == HR_MSG_HELP || m.h.kind == HR_MSG_HELPED) && below(20)) return; /* most are the end */
    if (m.h.kind == HR_MSG_HELP) m.h.sreq = some_id(w, HR_MSG_RTS);
    if (m.h.kind == HR_MSG_HELPED) m.h.rreq = some_id(w, HR_MSG_HELP);
    if (m.h.kind == HR_MSG_HELPED) m.h.aux = below(6);
    if (w->ledger && chance(2)) w->ledger[below(20)] = chance(50) ? rnd() : w->ledger[below(20)] ^ (1 + below(64));
    if (m.h.kind == HR_MSG_CANCEL) m.h.rreq = chance(50) ? 0 : some_id(w, HR_MSG_CTS);
    if (m.h.kind == HR_MSG_CTS) m.h.sreq = some_id(w, HR_MSG_RTS);
    if (m.h.kind == HR_MSG_FIN) m.h.rreq = some_id(w, HR_MSG_RTS);
    if (m.h.kind == HR_MSG_SKIP) m.h.aux = below(100);
    if (m.h.kind == HR_MSG_FIN) m.h.status = chance(50) ? HR_OK : (int8_t)-(1 + (int)below(12));
    if (m.h.kind == HR_MSG_BREAK) m.h.tag = below(3);
    if (m.h.kind == HR_MSG_RTS && chance(50)) m.h.flags = HR_HDR_DESC | (chance(50) ? HR_HDR_OPEN : 0);
    if (m.h.kind == HR_MSG_FIN && chance(20)) m.h.flags = HR_HDR_OPEN;
    if (m.h.kind == HR_MSG_CTS && below(50) == 0) m.h.flags = HR_HDR_DESC;
    if ((m.h.flags || m.h.kind == HR_MSG_HELP) && w->nheard) m.desc = w->heard[0].desc;
    if (m.h.tag & HR_COLL_TAG) m.size = ELEMENTS * 4;
    m.key = m.h.sreq;
    m.h.bucket = hr_match_bucket(m.h.comm, m.h.tag);
    m.h.order = w->order[m.h.bucket];
    if (chance(3)) m.h.order += (uint32_t)below(5);
    if (m.h.kind == HR_MSG_EAGER || m.h.kind == HR_MSG_RTS || m.h.kind == HR_MSG_SKIP)
        if (m.h.order == w->order[m.h.bucket]) w->order[m.h.bucket]++;
    if (m.h.kind == HR_MSG_FIN) { /* what work it was, and of what */
        m.h.bucket = (uint8_t)(chance(80) ? below(5) : below(256));
        m.h.aux = chance(50) ? below(1 << 20) : rnd();
    }
    if (chance(2)) m.h.ack = (uint32_t)rnd();
    if (below(2000) == 0) m.h.credit = (uint32_t)rnd();
    if (below(1000) == 0) ((uint8_t *)&m)[below(sizeof m)] = (uint8_t)rnd();
    int is_long = m.h.kind == HR_MSG_RTS || m.h.kind == HR_MSG_CTS || m.h.kind == HR_MSG_HELP;
    size_t hdr_len = is_long ? sizeof m : sizeof m.h;
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
        for (int k = 0; k < WILD_MAX; k += 2) show_ledger(&r, k, LEDGER_BYTES);
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
                if (d->buf) CHECK(is_done(&d->req));
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
