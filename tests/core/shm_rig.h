/* shm_rig.h - two sides of the shm provider for its own tests, and the provider's structures to look into. */
#ifndef HR_TESTS_SHM_RIG_H
#define HR_TESTS_SHM_RIG_H

#include <time.h>

#include "check.h"
#include "providers/shm/shm.h"
#include "watched.h"

extern const struct hr_provider hr_provider_shm;
static const struct hr_provider *const ops = &hr_provider_shm;

struct side {
    struct hr_domain *domain;
    struct hr_ep *ep;
    struct hr_auth auth;
    uint8_t addr[HR_MAX_ADDR];
    size_t addr_len;
    int up, done;
    hr_status lost;
    char detail[SHM_TEXT];
    uint64_t received, bad, notified, touched;
    int check_pattern;
};

static uint64_t rnd_state = 88172645463325252u;
static inline uint64_t rnd(void) {
    rnd_state ^= rnd_state << 13;
    rnd_state ^= rnd_state >> 7;
    return rnd_state ^= rnd_state << 17;
}

UNWATCHED static void fill_bytes(uint8_t *p, size_t len, uint64_t seed) {
    for (size_t i = 0; i < len; i++) p[i] = (uint8_t)(seed * 31 + i * 7 + (i >> 8));
}
UNWATCHED static int same_bytes(const uint8_t *p, size_t len, uint64_t seed) {
    for (size_t i = 0; i < len; i++)
        if (p[i] != (uint8_t)(seed * 31 + i * 7 + (i >> 8))) return 0;
    return 1;
}
static void fill(uint8_t *p, size_t len, uint64_t seed) {
    watched_write(p, len);
    fill_bytes(p, len, seed);
}

static void on_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct side *s = ep->domain->owner;
    uint64_t seq = *(const uint64_t *)hdr;
    if (s->check_pattern) {
        if (seq != s->received || (uintptr_t)hdr % 8 || hdr_len != 8 + 8 * (seq % 8)) s->bad++;
        watched_read(payload, len);
        s->bad += !same_bytes(payload, len, seq);
    }
    if (len) s->touched += ((const uint8_t *)payload)[len - 1]; /* faults where it is not mapped */
    s->received++;
}
static void on_done(struct hr_ep *ep, void *cookie, hr_status status) {
    (void)cookie;
    ((struct side *)ep->domain->owner)->done += status == HR_OK;
}
static void on_notify(struct hr_ep *ep, uint64_t value, size_t nbytes) {
    (void)nbytes;
    ((struct side *)ep->domain->owner)->notified = value;
}
static void on_state(struct hr_ep *ep, hr_status status, const char *detail) {
    struct side *s = ep->domain->owner;
    if (status == HR_OK)
        s->up = 1;
    else
        s->lost = status;
    snprintf(s->detail, sizeof s->detail, "%s", detail ? detail : "");
}
static const struct hr_sink sink = {on_recv, on_done, on_notify, on_state, NULL, NULL};

static hr_status side_try(struct side *s, uint64_t id, const char *options, char detail[256]) {
    struct hr_domain_params params = {.self_id = id, .auth = &s->auth, .sink = &sink, .owner = s, .options = options};
    memset(s, 0, sizeof *s);
    hr_auth_init(&s->auth, "shm", 3, 0, 1);
    return ops->domain_open(ops, &params, &s->domain, detail);
}
static void side_open(struct side *s, uint64_t id, uint64_t peer, const char *options) {
    char detail[256] = "";
    if (side_try(s, id, options, detail) != HR_OK) fprintf(stderr, "%s\n", detail);
    REQUIRE(s->domain);
    s->addr_len = ops->domain_address(s->domain, s->addr);
    REQUIRE(ops->ep_create(s->domain, peer, NULL, &s->ep) == HR_OK);
}
static void side_close(struct side *s) {
    if (s->ep) ops->ep_destroy(s->ep);
    if (s->domain) ops->domain_close(s->domain);
    s->ep = NULL;
    s->domain = NULL;
}
static void turn(struct side *s) { ops->progress(s->domain, 16, s->ep); }

static double now(void) { return 1e-9 * (double)hr_now(); }
#define UNTIL(seconds, cond, step)                 \
    do {                                           \
        double until_end = now() + (seconds);      \
        while (!(cond) && now() < until_end) step; \
        CHECK(cond);                               \
    } while (0)
#define BOTH(a, b) (turn(a), turn(b))

static inline void pair_open(struct side *a, struct side *b, const char *options) {
    side_open(a, 1, 2, options);
    side_open(b, 2, 1, options);
    CHECK_EQ(ops->ep_connect(a->ep, b->addr, b->addr_len, 1), HR_OK);
    CHECK_EQ(ops->ep_connect(b->ep, a->addr, a->addr_len, 0), HR_OK);
    UNTIL(5, a->up && b->up, BOTH(a, b));
    REQUIRE(a->up && b->up);
}

static hr_status send_pattern(struct side *s, uint64_t seq, size_t len) {
    static __thread uint8_t payload[SHM_LONG];
    uint64_t hdr[8] = {seq};
    struct hr_msg msg = {.hdr = hdr, .hdr_len = 8 + 8 * (seq % 8), .payload = payload, .len = len};
    fill(payload, len, seq);
    return ops->post_send(s->ep, &msg);
}
/* The same, made by the provider's call: how often, and how often into the ring, too. */
struct made {
    uint8_t *payload;
    uint64_t seq;
    size_t len;
    int calls, elsewhere;
};
static inline void make_pattern(void *cookie, void *to) {
    struct made *m = cookie;
    m->calls++;
    m->elsewhere += to != NULL;
    fill(m->payload, m->len, m->seq);
    if (to) fill(to, m->len, m->seq);
}
static inline hr_status send_made(struct side *s, uint64_t seq, size_t len, struct made *m) {
    static __thread uint8_t payload[SHM_LONG];
    uint64_t hdr[8] = {seq};
    struct hr_msg msg = {.hdr = hdr, .hdr_len = 8 + 8 * (seq % 8), .payload = payload, .len = len, .cookie = m};
    *m = (struct made){.payload = payload, .seq = seq, .len = len};
    msg.fill = make_pattern;
    return ops->post_send(s->ep, &msg);
}
static inline hr_status send_small(struct side *s) { return send_pattern(s, 0, 8); }

#endif
