/* tcp_rig.h - what the tests of the tcp provider share: domains in this process, a record of what they report. */
#ifndef HR_TESTS_TCP_RIG_H
#define HR_TESTS_TCP_RIG_H

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include "check.h"
#include "hr/auth.h"
#include "hr/provider.h"
#include "providers/tcp/tcp.h"

extern const struct hr_provider hr_provider_tcp;
static const struct hr_provider *const tcp = &hr_provider_tcp;

/* An endpoint, as its context. */
struct conn {
    struct hr_ep *ep;
    int ups, losses;
    hr_status loss;
    char detail[256];
    int messages, dones, notifies;
    hr_status done_status;
    uint64_t value, nbytes, hdr[HR_MAX_HDR / 8];
    size_t hdr_len, len;
    uint8_t *data; /* where the payloads of messages are kept, one behind the other; NULL: not */
    size_t filled;
};

struct node {
    struct hr_domain *domain;
    struct hr_auth auth;
    uint64_t id;
    uint8_t addr[HR_MAX_ADDR];
    size_t addr_len;
};

static inline void rig_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct conn *c = ep->ctx;
    CHECK(c->ups == 1 && !c->losses);
    CHECK_EQ((uintptr_t)hdr % 8, 0);
    memcpy(c->hdr, hdr, hdr_len);
    c->hdr_len = hdr_len;
    c->len = len;
    if (c->data && len) memcpy(c->data + c->filled, payload, len);
    c->filled += len;
    c->messages++;
}
static inline void rig_done(struct hr_ep *ep, void *cookie, hr_status status) {
    struct conn *c = ep->ctx;
    (void)cookie;
    c->done_status = status;
    c->dones++;
}
static inline void rig_notify(struct hr_ep *ep, uint64_t value, size_t nbytes) {
    struct conn *c = ep->ctx;
    c->value = value;
    c->nbytes = nbytes;
    c->notifies++;
}
static inline void rig_state(struct hr_ep *ep, hr_status status, const char *detail) {
    struct conn *c = ep->ctx;
    if (status == HR_OK) {
        c->ups++;
        return;
    }
    c->losses++;
    c->loss = status;
    snprintf(c->detail, sizeof c->detail, "%s", detail ? detail : "");
}
static struct {
    int n;
    char text[256]; /* of the last one */
} rig_strangers;
static inline void rig_stranger(struct hr_domain *domain, const char *detail) {
    (void)domain;
    rig_strangers.n++;
    snprintf(rig_strangers.text, sizeof rig_strangers.text, "%s", detail);
}
static const struct hr_sink rig_sink = {rig_recv, rig_done, rig_notify, rig_state, NULL, rig_stranger};

static inline double rig_seconds(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static int rig_local_peers; /* of domains that are opened from now on */

static inline hr_status node_try(struct node *n, uint64_t id, const char *ifname, const char *options,
                                 char detail[256]) {
    struct hr_domain_params params = {.self_id = id,
                                      .ifname = ifname,
                                      .options = options,
                                      .auth = &n->auth,
                                      .sink = &rig_sink,
                                      .local_peers = rig_local_peers};
    n->id = id;
    hr_status status = tcp->domain_open(tcp, &params, &n->domain, detail);
    if (status == HR_OK) n->addr_len = tcp->domain_address(n->domain, n->addr);
    return status;
}

static inline void node_open(struct node *n, uint64_t id, const char *ifname, const char *options) {
    char detail[256] = "";
    memset(n, 0, sizeof *n);
    hr_auth_init(&n->auth, "rig", 3, 0, 1);
    hr_status status = node_try(n, id, ifname, options, detail);
    if (status) fprintf(stderr, "domain_open: %d %s\n", status, detail);
    REQUIRE(status == HR_OK);
}

static inline void conn_start(struct conn *c, struct node *n, uint64_t peer, const void *addr, size_t len, int active) {
    memset(c, 0, sizeof *c);
    REQUIRE(tcp->ep_create(n->domain, peer, c, &c->ep) == HR_OK);
    CHECK_EQ(tcp->ep_connect(c->ep, addr, len, active), HR_OK);
}

/* Polls both (b may be NULL) until cond; a failed check after some seconds. */
#define RUN_FOR(seconds, a, b, cond)                                                                  \
    do {                                                                                              \
        double run_start = rig_seconds(), run_end = run_start + (seconds);                            \
        struct node *run_a = (a), *run_b = (b);                                                       \
        while (!(cond) && rig_seconds() < run_end) {                                                  \
            tcp->progress(run_a->domain, 8, NULL);                                                    \
            if (run_b) tcp->progress(run_b->domain, 8, NULL);                                         \
            if (rig_seconds() - run_start > 0.05) usleep(200); /* it comes by the clock, if at all */ \
        }                                                                                             \
        if (!(cond) && check_note())                                                                  \
            fprintf(stderr, "%s:%d: %s: in vain: %s\n", __FILE__, __LINE__, check_current, #cond);    \
    } while (0)
#define RUN(a, b, cond) RUN_FOR(10, a, b, cond)

static inline void rig_pump(struct node *a, struct node *b, int ms) {
    double end = rig_seconds() + ms * 1e-3;
    do {
        if (a) tcp->progress(a->domain, 8, NULL);
        if (b) tcp->progress(b->domain, 8, NULL);
    } while (rig_seconds() < end);
}

static inline void rig_connect(struct node *a, struct node *b, struct conn *ca, struct conn *cb) {
    conn_start(cb, b, a->id, a->addr, a->addr_len, 0);
    conn_start(ca, a, b->id, b->addr, b->addr_len, 1);
    RUN(a, b, ca->ups && cb->ups);
    if (ca->losses) fprintf(stderr, "%s\n", ca->detail);
    REQUIRE(ca->ups == 1 && cb->ups == 1);
}

static inline void rig_fill(uint8_t *p, size_t len, uint32_t seed) {
    for (size_t i = 0; i < len; i++) p[i] = (uint8_t)((i + seed) * 2654435761u >> 21);
}

static inline int rig_fds(void) {
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

/* Registers, and imports on the other side. */
static inline void rig_share(struct conn *owner, struct conn *user, void *at, size_t len, uint32_t access,
                             struct hr_mem *mem_p, struct hr_rmem *rmem_p) {
    struct hr_desc desc;
    REQUIRE(tcp->mem_register(owner->ep->domain, at, len, access, mem_p) == HR_OK);
    REQUIRE(tcp->mem_export(owner->ep, mem_p, at, len, &desc) == HR_OK);
    REQUIRE(tcp->mem_import(user->ep, &desc, rmem_p) == HR_OK);
}

static inline hr_status rig_send(struct conn *c, uint64_t value, const void *payload, size_t len) {
    struct hr_msg msg = {.hdr = &value, .hdr_len = 8, .payload = payload, .len = len, .cookie = c};
    return tcp->post_send(c->ep, &msg);
}

#endif
