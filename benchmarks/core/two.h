/* two.h - two processes of a benchmark, connected by a provider below the engine, each polling on a core of its own. */
#ifndef HR_BENCH_TWO_H
#define HR_BENCH_TWO_H

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hr/auth.h"
#include "hr/provider.h"

enum { HDR = 48 /* bytes, the engine's */, LIMIT = 120 /* seconds for all */ };

static const struct hr_provider *ops;
static struct hr_domain *domain;
static struct hr_ep *ep;
static uint64_t received; /* messages; counted by whose sink it is */
static int up, me;        /* me: 0, or 1 in the child */

static struct meeting { /* of parent and child */
    _Atomic int have[2];
    uint8_t addr[2][HR_MAX_ADDR];
    size_t len[2];
} *meeting;

static inline void must(hr_status status, const char *what) {
    if (status == HR_OK) return;
    fprintf(stderr, "%s: %s\n", what, hr_status_text(status));
    exit(1);
}

static inline void on_done(struct hr_ep *e, void *cookie, hr_status status) { (void)e, (void)cookie, (void)status; }
static inline void on_state(struct hr_ep *e, hr_status status, const char *detail) {
    (void)e;
    must(status, detail ? detail : "connection");
    up = 1;
}

static inline void send_message(const void *payload, size_t len) {
    uint64_t hdr[HDR / 8] = {received};
    struct hr_msg msg = {.hdr = hdr, .hdr_len = HDR, .payload = payload, .len = len};
    hr_status status;
    while ((status = ops->post_send(ep, &msg)) == HR_AGAIN) ops->progress(domain, 16, ep);
    must(status, "post_send");
}

static inline void wait_for(const uint64_t *counter, uint64_t n) {
    while (*counter < n) ops->progress(domain, 16, ep);
}

static inline void *both_see(size_t size) {
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) must(HR_ERR_NOMEM, "mmap");
    return memory;
}

/* Starts the other process. Returns its pid, or 0 in it; neither outlives LIMIT, nor the child its parent. */
static inline pid_t two_start(void) {
    meeting = both_see(sizeof *meeting);
    pid_t parent = getpid(), child = fork();
    if (child < 0) must(HR_ERR_NOMEM, "fork");
    alarm(LIMIT);
    me = child == 0;
    if (me) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) exit(1);
    }
    return child;
}

static inline void two_connect(const struct hr_provider *provider, const char *device, const struct hr_sink *sink) {
    static struct hr_auth auth;
    struct hr_domain_params params = {
        .self_id = (uint64_t)me + 1, .device = device, .auth = &auth, .sink = sink, .local_peers = 1};
    char detail[256] = "";
    cpu_set_t cpus;

    CPU_ZERO(&cpus);
    CPU_SET(me, &cpus);
    sched_setaffinity(0, sizeof cpus, &cpus); /* where there is one core only, both stay on it */
    hr_auth_init(&auth, "bench", 5, 0, 0);
    ops = provider;
    must(ops->domain_open(ops, &params, &domain, detail), detail);
    meeting->len[me] = ops->domain_address(domain, meeting->addr[me]);
    atomic_store(&meeting->have[me], 1);
    while (!atomic_load(&meeting->have[!me])) sched_yield();
    must(ops->ep_create(domain, (uint64_t)!me + 1, NULL, &ep), "ep_create");
    must(ops->ep_connect(ep, meeting->addr[!me], meeting->len[!me], me == 0), "ep_connect");
    while (!up) ops->progress(domain, 16, NULL);
}

/* In the parent: waits for the end of the other one. */
static inline void two_end(pid_t child) {
    int status;
    if (waitpid(child, &status, 0) < 0 || status) must(HR_ERR_PEER_LOST, "the other process");
}

#endif
