/* bond_rig.h - two domains of several rails in one process; every byte that they move is checked. */
#ifndef BOND_RIG_H
#define BOND_RIG_H

/*
 * Side 0 has writes, reads and messages under way to side 1, which sends messages back. Each operation's bytes follow
 * from its number. What a message finds at the peer was written before it was posted; memory is scribbled over as soon
 * as the provider has given it back, so that what is sent again from it too late shows.
 *
 * Beside the thread that drives both sides only devices touch that memory, and of them the thread sanitizer does not
 * hear (sim_dma): so it need not hear of the thread either.
 */

#include <string.h>

#include "check.h"
#include "hr/memory.h"
#include "hr/mix.h"
#include "providers/verbs/bond.h"
#include "providers/verbs/sim.h"
#include "watched.h"

enum { SLOTS = 12, SLOT = 1 << 20, JUNK = 0xee, JOBS = 64, PERIOD = 1 << 15 };

struct job { /* of side 0, in progress; its address is the cookie */
    int open, is_read, slot;
    size_t len;
    hr_status status;
};

struct bond_side {
    struct hr_auth auth;
    struct hr_domain *domain;
    struct hr_ep *ep;
    int ups, losses;
    hr_status loss;
    char detail[256];
    int falls, backs; /* onto the spare rail, off it */
    char carrier[256];
    uint32_t sent, heard; /* messages */
    uint64_t notices;
    uint8_t *memory; /* SLOTS of them */
    struct bond_rig *rig;
};

struct bond_rig {
    struct bond_side side[2];
    uint64_t random;
    uint8_t *expected; /* of the memory of side 1 */
    struct hr_mem mem;
    struct hr_rmem rmem;
    struct job jobs[JOBS];
    uint32_t told_by[SLOTS]; /* messages and notices up to which a slot is looked at */
    uint64_t noticed_by[SLOTS];
    int in_use[SLOTS];
    int dones;
};

struct told { /* header of a message */
    uint32_t number, len;
    uint32_t slot, some; /* some: the slot was written before */
};

static inline uint8_t byte_of(uint64_t seed, size_t i) { return (uint8_t)((seed * 2654435761u + i * 40503u) >> 7); }
/* Again and again what byte_of begins with: from PERIOD on it says the same as it did before. */
UNWATCHED static void fill_bytes(uint8_t *at, size_t len, uint64_t seed) {
    for (size_t i = 0; i < len && i < PERIOD; i++) at[i] = byte_of(seed, i);
    ours_begin();
    for (size_t i = PERIOD; i < len; i += PERIOD) memcpy(at + i, at, len - i < PERIOD ? len - i : PERIOD);
    ours_end();
}
UNWATCHED static int same_bytes(const uint8_t *at, size_t len, uint64_t seed) {
    for (size_t i = 0; i < len; i++)
        if (at[i] != byte_of(seed, i)) return 0;
    return 1;
}
/* Memory that only this thread and devices touch. */
static inline int same(const void *a, const void *b, size_t n) {
    ours_begin();
    int found = !memcmp(a, b, n);
    ours_end();
    return found;
}
static inline int all_junk(const uint8_t *at, size_t n) { return at[0] == JUNK && same(at, at + 1, n - 1); }
static inline uint64_t draw(struct bond_rig *rig, uint64_t below) { return hr_mix(&rig->random) % below; }

static inline struct hr_bond *bond_of(const struct bond_side *side) { return (struct hr_bond *)side->domain; }
static inline struct hr_bond_ep *bond_ep_of(const struct bond_side *side) { return (struct hr_bond_ep *)side->ep; }
static inline uint8_t *slot_at(uint8_t *memory, int slot) { return memory + (size_t)slot * SLOT; }

/* A slot at side 1 is as expected. */
static inline void check_slot(struct bond_rig *rig, int slot) {
    const uint8_t *memory = slot_at(rig->side[1].memory, slot), *expected = slot_at(rig->expected, slot);
    if (!same(memory, expected, SLOT)) CHECK_MEM(memory, expected, SLOT);
}

/* ---- events ---- */

static inline void bond_on_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    struct bond_side *side = ep->ctx;
    struct told told;
    CHECK_EQ(hdr_len, sizeof told);
    memcpy(&told, hdr, sizeof told);
    CHECK_EQ(told.number, side->heard);
    CHECK_EQ(told.len, len);
    side->heard++;
    watched_read(payload, len);
    CHECK(same_bytes(payload, len, told.number)); /* as it was sent */
    if (told.some) check_slot(side->rig, (int)told.slot);
}

static inline void bond_on_done(struct hr_ep *ep, void *cookie, hr_status status) {
    struct bond_rig *rig = ((struct bond_side *)ep->ctx)->rig;
    struct job *job = cookie;
    CHECK(job->open);
    job->open = 0;
    job->status = status;
    rig->dones++;
    if (job->slot < 0) return;
    uint8_t *local = slot_at(rig->side[0].memory, job->slot);
    CHECK_EQ(status, HR_OK);
    check_slot(rig, job->slot);
    ours_begin();
    if (job->is_read) CHECK_MEM(local, slot_at(rig->expected, job->slot), job->len);
    memset(local, JUNK, job->len); /* as it is beyond */
    ours_end();
    rig->in_use[job->slot] = 0;
}

static inline void bond_on_notify(struct hr_ep *ep, uint64_t value, size_t nbytes) {
    struct bond_side *side = ep->ctx;
    int slot = (int)(value & 0xff);
    CHECK_EQ(value >> 8, side->notices);
    side->notices++;
    CHECK(nbytes <= SLOT);
    if (slot < SLOTS) check_slot(side->rig, slot);
}

static inline void bond_on_state(struct hr_ep *ep, hr_status status, const char *detail) {
    struct bond_side *side = ep->ctx;
    if (status == HR_OK) {
        side->ups++;
        return;
    }
    side->losses++;
    side->loss = status;
    snprintf(side->detail, sizeof side->detail, "%s", detail ? detail : "");
}

static inline void bond_on_carrier(struct hr_ep *ep, const char *by, const char *detail) {
    struct bond_side *side = ep->ctx;
    CHECK(side->ups && side->falls - side->backs == !by);
    if (by) CHECK(!strcmp(by, "tcp"));
    side->falls += by != NULL;
    side->backs += !by;
    snprintf(side->carrier, sizeof side->carrier, "%s", detail);
}

static const struct hr_sink bond_sink = {bond_on_recv,  bond_on_done,    bond_on_notify,
                                         bond_on_state, bond_on_carrier, NULL};

/* ---- driving ---- */

static inline void turn(struct bond_rig *rig) {
    for (int i = 0; i < 2; i++) rig->side[i].domain->ops->progress(rig->side[i].domain, 32, NULL);
}

/* What has not come by now comes by the clock: others may have the processor. */
static inline void rest_since(int64_t start) {
    if (hr_now() - start > 50 * HR_VERBS_MS) usleep(1000);
}

/* cond may do something, and is not asked again once it holds. */
#define UNTIL(rig, cond)                                                                                          \
    do {                                                                                                          \
        int64_t start_ = hr_now(), until_ = start_ + 20000 * HR_VERBS_MS;                                         \
        int holds_;                                                                                               \
        while (!(holds_ = (cond)) && hr_now() < until_) turn(rig), rest_since(start_);                            \
        if (!holds_) fprintf(stderr, "in vain: %s; %s%s\n", #cond, (rig)->side[0].detail, (rig)->side[1].detail); \
        CHECK(holds_);                                                                                            \
    } while (0)

static inline hr_status bond_side_open(struct bond_rig *rig, int i, const char *device, const char *options,
                                       char detail[256]) {
    struct bond_side *side = &rig->side[i];
    side->rig = rig;
    hr_auth_init(&side->auth, "secret", 6, 0, 0);
    struct hr_domain_params params = {.self_id = (uint64_t)i + 1, .device = device, .auth = &side->auth};
    params.sink = &bond_sink;
    params.options = options;
    return hr_provider_verbs.domain_open(&hr_provider_verbs, &params, &side->domain, detail);
}

static inline int lanes_up(const struct bond_side *side) {
    int n = 0;
    for (int i = 0; i < bond_ep_of(side)->n; i++) n += hr_bond_lane_up(bond_ep_of(side), i);
    return n;
}

/* All lanes, at both ends. */
static inline int all_up(const struct bond_rig *rig) {
    int n = 0;
    for (int i = 0; i < bond_ep_of(&rig->side[0])->n; i++)
        n += bond_ep_of(&rig->side[0])->lanes[i].stage != HR_BOND_NONE;
    return lanes_up(&rig->side[0]) == n && lanes_up(&rig->side[1]) == n;
}

static inline void bond_call(struct bond_rig *rig) {
    uint8_t addr[2][HR_MAX_ADDR];
    size_t len[2];
    for (int i = 0; i < 2; i++) {
        struct bond_side *side = &rig->side[i];
        len[i] = side->domain->ops->domain_address(side->domain, addr[i]);
        REQUIRE(side->domain->ops->ep_create(side->domain, (uint64_t)(2 - i), side, &side->ep) == HR_OK);
    }
    for (int i = 1; i >= 0; i--)
        REQUIRE(rig->side[i].domain->ops->ep_connect(rig->side[i].ep, addr[!i], len[!i], !i) == HR_OK);
}

static inline void bond_connect(struct bond_rig *rig) {
    bond_call(rig);
    UNTIL(rig, rig->side[0].ups && rig->side[1].ups);
}

static inline void bond_open(struct bond_rig *rig, const char *device, const char *options) {
    char detail[256];
    memset(rig, 0, sizeof *rig);
    for (int i = 0; i < 2; i++) {
        struct bond_side *side = &rig->side[i];
        REQUIRE(bond_side_open(rig, i, device, options, detail) == HR_OK);
        side->memory = hr_arena_alloc((size_t)SLOTS * SLOT, i ? HR_ARENA_WRITABLE_BY_PEERS : 0);
        REQUIRE(side->memory);
        memset(side->memory, i ? 0 : JUNK, (size_t)SLOTS * SLOT);
    }
    rig->expected = calloc(SLOTS, SLOT);
    REQUIRE(rig->expected);
    bond_connect(rig);
    UNTIL(rig, all_up(rig));
    struct hr_domain *b = rig->side[1].domain;
    struct hr_desc desc;
    uint32_t access = HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_ATOMIC;
    REQUIRE(b->ops->mem_register(b, rig->side[1].memory, (size_t)SLOTS * SLOT, access, &rig->mem) == HR_OK);
    REQUIRE(b->ops->mem_export(rig->side[1].ep, &rig->mem, rig->side[1].memory, (size_t)SLOTS * SLOT, &desc) == HR_OK);
    REQUIRE(b->ops->mem_import(rig->side[0].ep, &desc, &rig->rmem) == HR_OK);
}

static inline void bond_close(struct bond_rig *rig) {
    struct hr_domain *b = rig->side[1].domain;
    if (rig->mem.priv) b->ops->mem_deregister(b, &rig->mem);
    for (int i = 0; i < 2; i++) rig->side[i].domain->ops->ep_destroy(rig->side[i].ep);
    for (int i = 0; i < 2; i++) rig->side[i].domain->ops->domain_close(rig->side[i].domain);
    for (int i = 0; i < 2; i++) hr_arena_free(rig->side[i].memory);
    free(rig->expected);
}

/* ---- work ---- */

static inline struct job *job_free(struct bond_rig *rig) {
    for (int i = 0; i < JOBS; i++)
        if (!rig->jobs[i].open) return &rig->jobs[i];
    return NULL;
}

/* One message; slot: that it tells of, or -1. */
static inline hr_status send_told(struct bond_side *side, size_t len, int slot) {
    static uint8_t payload[HR_VERBS_MESSAGE];
    struct told told = {.number = side->sent, .len = (uint32_t)len, .slot = (uint32_t)slot, .some = slot >= 0};
    struct hr_msg msg = {.hdr = &told, .hdr_len = sizeof told, .payload = payload, .len = len};
    fill_bytes(payload, len, side->sent);
    hr_status status = side->domain->ops->post_send(side->ep, &msg);
    memset(payload, JUNK, len);
    CHECK(!hr_is_error(status));
    if (status == HR_OK) side->sent++;
    if (status == HR_OK && slot >= 0) side->rig->told_by[slot] = side->sent;
    return status;
}

/* A write or read of a slot that nobody uses; HR_AGAIN where there is none. */
static inline hr_status start_job(struct bond_rig *rig, int is_read, size_t len, size_t offset, int notify) {
    struct bond_side *side = &rig->side[0];
    struct job *job = job_free(rig);
    int slot = (int)draw(rig, SLOTS);
    uint64_t seed = draw(rig, UINT32_MAX);
    if (!job || rig->in_use[slot] || (int32_t)(rig->told_by[slot] - rig->side[1].heard) > 0 ||
        rig->noticed_by[slot] > rig->side[1].notices)
        return HR_AGAIN;
    uint8_t *local = slot_at(side->memory, slot), *expected = slot_at(rig->expected, slot);
    if (is_read) offset = 0;
    struct hr_rma rma = {.local = local, .len = len, .remote = &rig->rmem, .cookie = job};
    rma.offset = (uint64_t)slot * SLOT + offset;
    rma.with_notify = notify;
    rma.value = rig->side[0].notices << 8 | (uint64_t)slot;
    uint8_t *old = NULL;
    if (!is_read) {
        old = malloc(len + 1);
        fill_bytes(local, len, seed);
        ours_begin();
        memcpy(old, expected + offset, len);
        memcpy(expected + offset, local, len);
        ours_end();
    }
    *job = (struct job){.open = 1, .is_read = is_read, .slot = slot, .len = len};
    rig->in_use[slot] = 1;
    hr_status status =
        is_read ? side->domain->ops->post_read(side->ep, &rma) : side->domain->ops->post_write(side->ep, &rma);
    CHECK(!hr_is_error(status));
    if (status == HR_AGAIN && old) memcpy(expected + offset, old, len), memset(local, JUNK, len);
    if (status != HR_INPROGRESS) job->open = rig->in_use[slot] = 0;
    if (status != HR_AGAIN && notify) rig->noticed_by[slot] = ++side->notices;
    free(old);
    return status;
}

/* ---- lanes ---- */

/* Lanes come back soon enough for a test. */
static inline void hurry(struct bond_rig *rig) {
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < bond_ep_of(&rig->side[i])->n; k++) {
            struct hr_bond_lane *lane = &bond_ep_of(&rig->side[i])->lanes[k];
            lane->pause = 10 * HR_VERBS_MS;
            if (lane->stage == HR_BOND_REST && lane->due > hr_now() + lane->pause) lane->due = hr_now() + lane->pause;
            hr_bond_tick_start(bond_of(&rig->side[i]));
        }
}

static inline int port_of(const struct hr_bond_lane *lane) {
    struct ibv_qp_attr attr = {0};
    struct ibv_qp_init_attr init;
    hr_verbs_sim.query_qp(lane->ep->qp, &attr, IBV_QP_PORT, &init);
    return attr.port_num;
}

/* How a lane is lost. */
enum fault { PORT_DOWN, QP_ERROR, FAULTS };

static inline void strike(struct bond_rig *rig, int side, int index, enum fault fault) {
    struct hr_bond_lane *lane = &bond_ep_of(&rig->side[side])->lanes[index];
    struct ibv_context *ctx = bond_of(&rig->side[side])->rails[index]->ctx;
    int port = port_of(lane);
    if (fault == QP_ERROR) {
        hr_verbs_qp_break(lane->ep);
        return;
    }
    for (int other = 1; other <= 2; other++)
        if (other != port) hr_verbs_sim_port(ctx, other, 1); /* what went down before is mended */
    hr_verbs_sim_port(ctx, port, 0);
}

static inline int quiet(const struct bond_rig *rig) {
    for (int i = 0; i < JOBS; i++)
        if (rig->jobs[i].open) return 0;
    return rig->side[0].sent == rig->side[1].heard && rig->side[1].sent == rig->side[0].heard &&
           rig->side[0].notices == rig->side[1].notices;
}

static inline void settle(struct bond_rig *rig) {
    UNTIL(rig, quiet(rig));
    CHECK_EQ(rig->side[0].losses + rig->side[1].losses, 0);
    for (int slot = 0; slot < SLOTS; slot++) check_slot(rig, slot);
    CHECK(all_junk(rig->side[0].memory, (size_t)SLOTS * SLOT)); /* memory that was given back is left alone */
}

static inline int carried(struct bond_rig *rig) {
    int heard = (int)rig->side[1].heard;
    UNTIL(rig, send_told(&rig->side[0], 100, -1) == HR_OK);
    UNTIL(rig, rig->side[1].heard == (uint32_t)heard + 1);
    return rig->side[1].heard == (uint32_t)heard + 1;
}

#endif
