/* world.h - several engines in one process, one thread each: what tests of the engine run on. */
#ifndef HR_TESTS_WORLD_H
#define HR_TESTS_WORLD_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "hr/hr.h"
#include "hr/memory.h"

#define WORLD_MAX 8
#ifndef WORLD_RAILS
#    define WORLD_RAILS 1 /* connections between two ranks; define it before including this */
#endif
#ifndef WORLD_STREAMS
#    define WORLD_STREAMS 1 /* of each of these */
#endif
#define SECONDS(n) ((int64_t)((n) * 1e9))

struct rank {
    struct hr_engine *engine;
    struct hr_comm *comm;
    int rank, size;
    void *arg;
};
struct world {
    int n;
    struct rank ranks[WORLD_MAX];
};

static inline const char *world_provider(void) {
    const char *name = getenv("HR_TEST_PROVIDER");
    return name ? name : "loop";
}

/* What the domain of a rail is called: "tcp", "tcp:1". */
static inline const char *world_rail(int rail, char text[32]) {
    snprintf(text, 32, rail ? "%.15s:%d" : "%.15s", world_provider(), rail);
    return text;
}

/* Of the one provider that has devices: the simulated one where nothing else is said. */
static inline const char *world_devices(void) {
    static char text[80];
    const char *name = getenv("HR_TEST_DEVICE");
    snprintf(text, sizeof text, "verbs:%s", name ? name : "sim");
    return text;
}

static inline void world_open(struct world *w, int n, const char *fault) {
    uint8_t addr[WORLD_MAX][WORLD_RAILS][HR_MAX_ADDR];
    size_t len[WORLD_MAX][WORLD_RAILS];
    uint64_t peers[WORLD_MAX];
    char text[32], providers[34 * WORLD_RAILS] = "";
    for (int rail = 0; rail < WORLD_RAILS; rail++)
        snprintf(providers + strlen(providers), 34, "%s%s", rail ? "," : "", world_rail(rail, text));
    memset(w, 0, sizeof *w);
    w->n = n;
    for (int i = 0; i < n; i++) {
        char detail[256] = "";
        struct hr_config config = {.self_id = (uint64_t)i,
                                   .providers = providers,
                                   .devices = world_devices(),
                                   .fault = i == 0 ? fault : NULL,
                                   .local_peers = n,
                                   .spin_us = -1};
        hr_auth_init(&config.auth, "secret", 6, 0, 1);
        hr_status status = hr_engine_open(&config, &w->ranks[i].engine, detail);
        if (status != HR_OK) fprintf(stderr, "engine: %s\n", detail);
        CHECK_EQ(status, HR_OK);
        hr_engine_set_locality(w->ranks[i].engine, n, 2, 0);
        const char *name;
        struct hr_caps caps;
        char about[HR_ABOUT];
        for (int rail = 0; rail < WORLD_RAILS; rail++)
            for (int d = 0; hr_engine_domain(w->ranks[i].engine, d, &name, addr[i][rail], &len[i][rail], &caps, about);
                 d++)
                if (!strcmp(name, world_rail(rail, text))) break;
        peers[i] = (uint64_t)i;
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            struct hr_engine *engine = w->ranks[i].engine;
            for (int k = 0; i != j && k < WORLD_RAILS * WORLD_STREAMS; k++) {
                int rail = k / WORLD_STREAMS;
                CHECK_EQ(hr_connect(engine, (uint64_t)j, world_rail(rail, text), addr[j][rail], len[j][rail], i < j),
                         HR_OK);
            }
            if (i != j) continue;
            const char *name; /* the loop domain comes first */
            uint8_t self[HR_MAX_ADDR];
            size_t self_len;
            struct hr_caps caps;
            char about[HR_ABOUT];
            hr_engine_domain(engine, 0, &name, self, &self_len, &caps, about);
            CHECK_EQ(hr_connect(engine, (uint64_t)j, name, self, self_len, 0), HR_OK);
        }
    /* all of them must move for any of them to be connected: the background threads do */
    for (int i = 0; i < n; i++) {
        uint64_t bad = 0;
        char detail[256] = "";
        hr_status status = hr_connect_wait(w->ranks[i].engine, hr_now() + SECONDS(5), &bad, detail);
        if (status != HR_OK) fprintf(stderr, "rank %d, peer %d: %s\n", i, (int)bad, detail);
        CHECK_EQ(status, HR_OK);
        CHECK_EQ(hr_comm_open(w->ranks[i].engine, 1, peers, n, i, &w->ranks[i].comm), HR_OK);
        w->ranks[i].rank = i;
        w->ranks[i].size = n;
    }
}

static inline void world_close(struct world *w) {
    for (int i = 0; i < w->n; i++) {
        if (w->ranks[i].comm) hr_comm_close(w->ranks[i].comm);
        if (w->ranks[i].engine) hr_engine_close(w->ranks[i].engine, hr_now() + SECONDS(2));
    }
}

/* Runs body on every rank in a thread of its own. */
static inline void world_run(struct world *w, void *(*body)(void *), void *arg) {
    pthread_t threads[WORLD_MAX];
    for (int i = 0; i < w->n; i++) {
        w->ranks[i].arg = arg;
        CHECK_EQ(pthread_create(&threads[i], NULL, body, &w->ranks[i]), 0);
    }
    for (int i = 0; i < w->n; i++) pthread_join(threads[i], NULL);
}

/* The same in a world of its own. */
static inline void world_of(int n, void *(*body)(void *), void *arg) {
    struct world w;
    world_open(&w, n, NULL);
    world_run(&w, body, arg);
    world_close(&w);
}

/* A counter of the engine's, by its name. */
static inline uint64_t counted(struct hr_engine *engine, const char *name) {
    struct hr_counter found[64];
    int n = hr_engine_counters(engine, found, 64);
    for (int i = 0; i < n; i++)
        if (!strcmp(found[i].name, name)) return found[i].value;
    REQUIRE(!"a counter of that name");
    return 0;
}

/* What the provider between the ranks can do: HR_CAP_*. */
static inline uint32_t world_caps(struct rank *r) {
    const char *name;
    uint8_t addr[HR_MAX_ADDR];
    size_t len;
    struct hr_caps caps = {0};
    char about[HR_ABOUT];
    for (int d = 0; hr_engine_domain(r->engine, d, &name, addr, &len, &caps, about); d++)
        if (!strcmp(name, world_provider())) return caps.flags;
    return 0;
}

/* Until another rank has set it to so much. */
static inline void world_await(const _Atomic int *flag, int value) {
    for (int64_t until = hr_now() + SECONDS(20); *flag < value && hr_now() < until;) usleep(1000);
    CHECK(*flag >= value);
}

/* Blocking forms, as the binding has them. */
static inline hr_status finish(struct rank *r, struct hr_request *req, double seconds) {
    int64_t deadline = hr_now() + SECONDS(seconds);
    hr_status status;
    do status = hr_wait(r->engine, req, deadline, 0);
    while (status == HR_INTERRUPTED);
    if (status == HR_ERR_TIMEOUT) hr_cancel(r->engine, req, HR_ERR_TIMEOUT);
    return req->status;
}
static inline hr_status send_to(struct rank *r, const void *buf, size_t len, int dst, uint32_t tag) {
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    hr_status status = hr_isend(r->comm, buf, len, dst, tag, &req);
    return status == HR_OK ? finish(r, &req, 20) : status;
}
static inline hr_status recv_from(struct rank *r, void *buf, size_t len, int src, uint32_t tag,
                                  struct hr_request *req) {
    struct hr_request local = {0};
    if (!req) req = &local;
    req->priority = HR_PRIORITY_DEFAULT;
    hr_status status = hr_irecv(r->comm, buf, len, src, tag, req);
    return status == HR_OK ? finish(r, req, 20) : status;
}

#endif
