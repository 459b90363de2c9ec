/* verbs_rig.h - two domains of the verbs provider in one process, and endpoints that count what they are told. */
#ifndef VERBS_RIG_H
#define VERBS_RIG_H

#include <pthread.h>
#include <string.h>

#include "check.h"
#include "hr/memory.h"
#include "providers/verbs/verbs.h"

extern const struct hr_provider hr_provider_verbs;
static const struct hr_provider *const verbs = &hr_provider_verbs;

struct conn { /* an endpoint, as its context */
    struct hr_ep *ep;
    int ups, losses, messages, dones, notifies;
    hr_status loss, done_status;
    char detail[256];
    uint64_t nbytes, value;
};
struct node {
    struct hr_domain *domain;
    struct hr_auth auth;
    uint64_t id;
    pthread_mutex_t lock;
    int stop;
};

static inline void on_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    (void)hdr, (void)hdr_len, (void)payload, (void)len;
    ((struct conn *)ep->ctx)->messages++;
}
static inline void on_done(struct hr_ep *ep, void *cookie, hr_status status) {
    struct conn *c = ep->ctx;
    (void)cookie;
    c->done_status = status;
    c->dones++;
}
static inline void on_notify(struct hr_ep *ep, uint64_t value, size_t nbytes) {
    struct conn *c = ep->ctx;
    c->value = value;
    c->nbytes = nbytes;
    c->notifies++;
}
static inline void on_state(struct hr_ep *ep, hr_status status, const char *detail) {
    struct conn *c = ep->ctx;
    if (status == HR_OK) {
        c->ups++;
        return;
    }
    c->losses++;
    c->loss = status;
    snprintf(c->detail, sizeof c->detail, "%s", detail ? detail : "");
}
static const struct hr_sink sink = {on_recv, on_done, on_notify, on_state, NULL, NULL};

static inline hr_status node_open_on(struct node *n, uint64_t id, const char *device, const char *ifname,
                                     const char *options, char detail[256]) {
    *n = (struct node){.id = id};
    pthread_mutex_init(&n->lock, NULL);
    hr_auth_init(&n->auth, "secret", 6, 0, 0);
    struct hr_domain_params params = {
        .self_id = id, .ifname = ifname, .device = device, .auth = &n->auth, .sink = &sink, .options = options};
    return verbs->domain_open(verbs, &params, &n->domain, detail);
}

static inline hr_status node_open(struct node *n, uint64_t id, const char *device, const char *options,
                                  char detail[256]) {
    return node_open_on(n, id, device, NULL, options, detail);
}

static inline const struct hr_verbs_domain *inside(const struct node *n) {
    return (const struct hr_verbs_domain *)n->domain;
}

static inline void pump(struct node *n) {
    pthread_mutex_lock(&n->lock);
    verbs->progress(n->domain, 32, NULL);
    pthread_mutex_unlock(&n->lock);
}

#define RUN(a, b, cond)                                              \
    do {                                                             \
        int64_t until_ = hr_now() + 10000 * HR_VERBS_MS;             \
        while (!(cond) && hr_now() < until_) pump(&(a)), pump(&(b)); \
        CHECK(cond);                                                 \
    } while (0)

struct pair {
    struct node a, b;
    struct conn ca, cb;
};

/* Until both ends know how it ended. */
static inline void connect_pair(struct pair *p, struct conn *ca, struct conn *cb) {
    uint8_t addr[2][HR_MAX_ADDR];
    size_t len[2] = {verbs->domain_address(p->a.domain, addr[0]), verbs->domain_address(p->b.domain, addr[1])};
    CHECK_EQ(verbs->ep_create(p->a.domain, 2, ca, &ca->ep), HR_OK);
    CHECK_EQ(verbs->ep_create(p->b.domain, 1, cb, &cb->ep), HR_OK);
    CHECK_EQ(verbs->ep_connect(cb->ep, addr[0], len[0], 0), HR_OK);
    CHECK_EQ(verbs->ep_connect(ca->ep, addr[1], len[1], 1), HR_OK);
    RUN(p->a, p->b, ca->ups + ca->losses && cb->ups + cb->losses);
}

static inline void pair_open_with(struct pair *p, const char *options, const char *options_b) {
    char detail[256];
    memset(p, 0, sizeof *p);
    REQUIRE(node_open(&p->a, 1, "sim", options, detail) == HR_OK);
    REQUIRE(node_open(&p->b, 2, "sim", options_b, detail) == HR_OK);
    connect_pair(p, &p->ca, &p->cb);
    REQUIRE(p->ca.ups && p->cb.ups);
}

static inline void pair_open(struct pair *p, const char *options) { pair_open_with(p, options, NULL); }

static inline void pair_close(struct pair *p) {
    verbs->ep_destroy(p->ca.ep);
    verbs->ep_destroy(p->cb.ep);
    verbs->domain_close(p->a.domain);
    verbs->domain_close(p->b.domain);
}

static inline void share(struct pair *p, void *addr, size_t len, struct hr_mem *mem, struct hr_rmem *rmem) {
    struct hr_desc desc;
    uint32_t access = HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_WRITE;
    CHECK_EQ(verbs->mem_register(p->b.domain, addr, len, access, mem), HR_OK);
    CHECK_EQ(verbs->mem_export(p->cb.ep, mem, addr, len, &desc), HR_OK);
    CHECK_EQ(verbs->mem_import(p->ca.ep, &desc, rmem), HR_OK);
}

static inline hr_status send_some(struct conn *c, size_t len) {
    static uint8_t payload[HR_VERBS_MESSAGE];
    uint64_t hdr = 1;
    struct hr_msg msg = {.hdr = &hdr, .hdr_len = 8, .payload = payload, .len = len};
    return verbs->post_send(c->ep, &msg);
}

#endif
