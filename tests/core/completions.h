/* completions.h - two queue pairs of one device, and all that they complete, as text. */
#ifndef COMPLETIONS_H
#define COMPLETIONS_H

/*
 * A case is what two connected ends do, and what each must have said when all is over:
 *
 *     CASE(a_send, "1 send 100 | | rts", "| 101 recv 100 | rts") {
 *         recv_into(b, 101, 100);
 *         send_of(a, 1, 100);
 *     }
 *
 * First what completed on the queue of sends, then on that of receives, then the state of the queue pair. Of a success
 * that is the number of the work request, the operation, the bytes, and its immediate data; of a failure the number and
 * the status, since the rest has no meaning then. "refused" is a work request that could not be posted. Options of the
 * queue pairs come last: CASE(..., .rnr_retry = 1).
 *
 * One text holds on every device. Where soft-RoCE's driver is wrong, deviations say what it says instead, and why that
 * is wrong: on it, and on "sim_rxe", the simulated device that is as it is. With HR_TEST_SAY each case prints what was
 * said, which is the same on these two.
 */

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "hr/clock.h"
#include "providers/verbs/backend.h"

enum {
    MEMORY = 1 << 16,
    OTHER_HALF = MEMORY / 2, /* where peers read and write */
    PSN = 0xfffffe,          /* numbers wrap soon */
    ALL_RIGHTS = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC,
    LATEST_MS = 5000, /* until what must come has come */
    SETTLE_MS = 20,   /* in which nothing more may come */
    RECORD = 512,     /* bytes of text */
    SAID = 2 * RECORD + 64
};

struct how { /* 0: what suits most cases */
    int rnr_retry, retry_cnt, timeout, rnr_timer;
    int rq_psn, rights, srq, reads;
    int a_stays, b_stays; /* in this state; else they get ready to send */
};
static const int64_t MS = 1000000;
enum { IN_RESET = 1 + IBV_QPS_RESET, IN_INIT = 1 + IBV_QPS_INIT, IN_RTR = 1 + IBV_QPS_RTR, IN_ERR = 1 + IBV_QPS_ERR };

struct end {
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_cq *send_cq, *recv_cq;
    struct ibv_srq *srq;
    struct ibv_qp *qp;
    struct ibv_mr *mr, *closed; /* the same memory with all rights, and with none */
    uint8_t *memory;
    union ibv_gid gid;
    int gid_index;
    struct ibv_port_attr port;
    char sends[RECORD], recvs[RECORD];
};

/* Reasons that both programs have. */
#define WHERE "one error for all that goes wrong where a message is put; the specification tells them apart"
#define TAKEN "the receive is taken before the key is looked at, and ends with a status that is for requesters only"

struct deviation {
    const char *name; /* of the case */
    char end;
    const char *says, *why;
};

/* Ends with an entry without a name. */
extern const struct deviation deviations_of_soft_roce[];

static const struct hr_verbs_backend *v;
static const char *device = "sim";
static struct ibv_device_attr limits;

static inline struct ibv_context *open_device(void) {
    int n;
    struct ibv_context *ctx = NULL;
    struct ibv_device **list = v->get_device_list(&n);
    for (int i = 0; list && i < n && !ctx; i++)
        if (strcmp(list[i]->name, device) == 0) ctx = v->open_device(list[i]);
    if (list) v->free_device_list(list);
    return ctx;
}

/* In each test, as any may run alone. */
static inline void choose_device(void) {
    const char *name = getenv("HR_TEST_DEVICE"), *why = NULL;
    struct ibv_context *ctx;
    if (v) return;
    if (name && *name) device = name;
    v = hr_verbs_sim_named(device) ? &hr_verbs_sim : hr_verbs_lib(&why);
    if (!v) fprintf(stderr, "%s: %s\n", device, why);
    REQUIRE(v && (ctx = open_device()));
    CHECK_EQ(v->query_device(ctx, &limits), 0);
    v->close_device(ctx);
}

static inline int is_soft_roce(void) { return limits.vendor_id == 0xffffff; }

/* ---- ends ---- */

static inline void end_open(struct end *e, int srq) {
    *e = (struct end){.ctx = open_device()};
    REQUIRE(e->ctx);
    REQUIRE(v->query_port(e->ctx, 1, &e->port) == 0);
    e->gid_index = hr_verbs_gid_choose(v, e->ctx, 1, e->port.gid_tbl_len, -1, &e->gid);
    REQUIRE(e->gid_index >= 0);
    REQUIRE((e->memory = aligned_alloc(4096, MEMORY)));
    memset(e->memory, 0, MEMORY);
    REQUIRE((e->pd = v->alloc_pd(e->ctx)));
    REQUIRE((e->send_cq = v->create_cq(e->ctx, 64, NULL, NULL, 0)));
    REQUIRE((e->recv_cq = v->create_cq(e->ctx, 64, NULL, NULL, 0)));
    REQUIRE((e->mr = v->reg_mr(e->pd, e->memory, MEMORY, IBV_ACCESS_LOCAL_WRITE | ALL_RIGHTS)));
    REQUIRE((e->closed = v->reg_mr(e->pd, e->memory, MEMORY, 0)));
    struct ibv_srq_init_attr shared = {.attr = {.max_wr = 8, .max_sge = 2}};
    if (srq) REQUIRE((e->srq = v->create_srq(e->pd, &shared)));
    struct ibv_qp_init_attr init = {.send_cq = e->send_cq, .recv_cq = e->recv_cq, .srq = e->srq, .qp_type = IBV_QPT_RC};
    init.cap = (struct ibv_qp_cap){.max_send_wr = 16, .max_send_sge = 2, .max_inline_data = 64};
    if (!srq) init.cap.max_recv_wr = 8, init.cap.max_recv_sge = 2;
    REQUIRE((e->qp = v->create_qp(e->pd, &init)));
}

static inline void end_close(struct end *e) {
    if (e->qp) CHECK_EQ(v->destroy_qp(e->qp), 0);
    if (e->srq) CHECK_EQ(v->destroy_srq(e->srq), 0);
    CHECK_EQ(v->dereg_mr(e->mr), 0);
    CHECK_EQ(v->dereg_mr(e->closed), 0);
    CHECK_EQ(v->destroy_cq(e->send_cq), 0);
    CHECK_EQ(v->destroy_cq(e->recv_cq), 0);
    CHECK_EQ(v->dealloc_pd(e->pd), 0);
    v->close_device(e->ctx);
    free(e->memory);
}

/* ---- states ---- */

enum {
    TO_INIT = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
    TO_RTR = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
        IBV_QP_MIN_RNR_TIMER,
    TO_RTS = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
        IBV_QP_MAX_QP_RD_ATOMIC
};

/* All attributes that any step takes. */
static inline struct ibv_qp_attr attributes(const struct end *e, const struct end *peer, const struct how *how) {
    struct ibv_qp_attr attr = {.port_num = 1, .sq_psn = PSN, .path_mtu = e->port.active_mtu};
    attr.qp_access_flags = (unsigned)(how->rights ? how->rights : ALL_RIGHTS);
    attr.dest_qp_num = peer->qp->qp_num;
    attr.rq_psn = (uint32_t)(how->rq_psn ? how->rq_psn : PSN);
    attr.max_rd_atomic = attr.max_dest_rd_atomic = (uint8_t)(how->reads ? how->reads : 4);
    attr.min_rnr_timer = (uint8_t)(how->rnr_timer ? how->rnr_timer : 1);
    attr.timeout = (uint8_t)(how->timeout ? how->timeout : 14);
    attr.retry_cnt = (uint8_t)(how->retry_cnt ? how->retry_cnt : 6);
    attr.rnr_retry = (uint8_t)(how->rnr_retry ? how->rnr_retry : 7);
    attr.ah_attr = (struct ibv_ah_attr){.is_global = 1, .port_num = 1};
    attr.ah_attr.grh = (struct ibv_global_route){.dgid = peer->gid, .hop_limit = 64};
    attr.ah_attr.grh.sgid_index = (uint8_t)e->gid_index;
    return attr;
}

static inline int step(struct end *e, const struct end *peer, enum ibv_qp_state to, int mask, const struct how *how) {
    struct ibv_qp_attr attr = attributes(e, peer, how);
    attr.qp_state = to;
    return v->modify_qp(e->qp, &attr, mask);
}

/* Up to that state, by all steps before it. */
static inline void bring(struct end *e, const struct end *peer, enum ibv_qp_state to, const struct how *how) {
    if (to >= IBV_QPS_INIT) CHECK_EQ(step(e, peer, IBV_QPS_INIT, TO_INIT, how), 0);
    if (to >= IBV_QPS_RTR) CHECK_EQ(step(e, peer, IBV_QPS_RTR, TO_RTR, how), 0);
    if (to >= IBV_QPS_RTS) CHECK_EQ(step(e, peer, IBV_QPS_RTS, TO_RTS, how), 0);
    if (to == IBV_QPS_ERR) CHECK_EQ(step(e, peer, IBV_QPS_ERR, IBV_QP_STATE, how), 0);
}

static inline int turn(struct end *e, enum ibv_qp_state to) {
    struct ibv_qp_attr attr = {.qp_state = to};
    return v->modify_qp(e->qp, &attr, IBV_QP_STATE);
}

static inline const char *state_of(const struct end *e) {
    static const char *const names[] = {"reset", "init", "rtr", "rts", "sqd", "sqe", "err"};
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (!e->qp) return "gone";
    if (v->query_qp(e->qp, &attr, IBV_QP_STATE, &init)) return "unknown";
    return names[attr.qp_state];
}

/* ---- the record ---- */

__attribute__((format(printf, 2, 3))) static inline void note(char record[RECORD], const char *format, ...) {
    size_t len = strlen(record);
    va_list args;
    len += (size_t)snprintf(record + len, RECORD - len, "%s", len ? ", " : "");
    va_start(args, format);
    vsnprintf(record + len, len < RECORD ? RECORD - len : 0, format, args);
    va_end(args);
}

static inline const char *status_text(enum ibv_wc_status status) {
    switch (status) {
    case IBV_WC_LOC_LEN_ERR: return "local length";
    case IBV_WC_LOC_QP_OP_ERR: return "local operation";
    case IBV_WC_LOC_PROT_ERR: return "local protection";
    case IBV_WC_WR_FLUSH_ERR: return "flushed";
    case IBV_WC_LOC_ACCESS_ERR: return "local access";
    case IBV_WC_REM_INV_REQ_ERR: return "remote invalid request";
    case IBV_WC_REM_ACCESS_ERR: return "remote access";
    case IBV_WC_REM_OP_ERR: return "remote operation";
    case IBV_WC_RETRY_EXC_ERR: return "retries";
    case IBV_WC_RNR_RETRY_EXC_ERR: return "rnr retries";
    default: return hr_verbs_wc_text(status);
    }
}

static inline const char *opcode_text(enum ibv_wc_opcode opcode) {
    switch (opcode) {
    case IBV_WC_SEND: return "send";
    case IBV_WC_RDMA_WRITE: return "write";
    case IBV_WC_RDMA_READ: return "read";
    case IBV_WC_COMP_SWAP: return "swap";
    case IBV_WC_FETCH_ADD: return "add";
    case IBV_WC_RECV: return "recv";
    case IBV_WC_RECV_RDMA_WITH_IMM: return "recv of write";
    default: return "unknown";
    }
}

static inline void record(struct end *e, struct ibv_cq *cq, char text[RECORD]) {
    struct ibv_wc wc;
    int n;
    while ((n = ibv_poll_cq(cq, 1, &wc)) == 1) {
        char imm[24] = "", flags[24] = "";
        if (wc.status != IBV_WC_SUCCESS) {
            note(text, "%d %s", (int)wc.wr_id, status_text(wc.status));
            continue;
        }
        /* What was sent has the flag alone: the word is for the receiver. */
        if (wc.wc_flags & IBV_WC_WITH_IMM && wc.opcode & IBV_WC_RECV)
            snprintf(imm, sizeof imm, " imm %x", wc.imm_data);
        else if (wc.wc_flags & IBV_WC_WITH_IMM)
            snprintf(imm, sizeof imm, " imm");
        unsigned rest = wc.wc_flags & ~IBV_WC_WITH_IMM, usual = wc.opcode & IBV_WC_RECV ? IBV_WC_GRH : 0;
        if (rest != usual) snprintf(flags, sizeof flags, " flags %#x", rest);
        note(text, "%d %s %u%s%s", (int)wc.wr_id, opcode_text(wc.opcode), wc.byte_len, imm, flags);
        if (e->qp) CHECK_EQ(wc.qp_num, e->qp->qp_num);
    }
    CHECK_EQ(n, 0);
}

static inline void say(struct end *e, char text[SAID]) {
    record(e, e->send_cq, e->sends);
    record(e, e->recv_cq, e->recvs);
    snprintf(text, SAID, "%s%s| %s%s| %s", e->sends, *e->sends ? " " : "", e->recvs, *e->recvs ? " " : "", state_of(e));
}

/* ---- work requests; those of receives have numbers from 101 ---- */

static inline struct ibv_sge piece(const struct end *e, uint32_t len) {
    return (struct ibv_sge){(uintptr_t)e->memory, len, e->mr->lkey};
}

static inline void post(struct end *e, struct ibv_send_wr *wr) {
    struct ibv_send_wr *bad;
    if (ibv_post_send(e->qp, wr, &bad)) note(e->sends, "%d refused", (int)wr->wr_id);
}

static inline void post_receive(struct end *e, int id, struct ibv_sge *sge, int n) {
    struct ibv_recv_wr wr = {.wr_id = (uint64_t)id, .sg_list = sge, .num_sge = n}, *bad;
    if (e->srq ? ibv_post_srq_recv(e->srq, &wr, &bad) : ibv_post_recv(e->qp, &wr, &bad))
        note(e->recvs, "%d refused", id);
}

static inline void recv_into(struct end *e, int id, uint32_t len) {
    struct ibv_sge sge = piece(e, len);
    post_receive(e, id, &sge, len != 0);
}

static inline void send_from(struct end *e, int id, struct ibv_sge sge, unsigned flags) {
    struct ibv_send_wr wr = {.wr_id = (uint64_t)id, .opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = sge.length != 0};
    wr.send_flags = flags;
    post(e, &wr);
}

static inline void send_of(struct end *e, int id, uint32_t len) { send_from(e, id, piece(e, len), IBV_SEND_SIGNALED); }

/* A read or write of the peer's memory; with immediate data where the operation has some. */
static inline void reach(struct end *e, int id, enum ibv_wr_opcode opcode, struct ibv_sge sge, uint64_t remote,
                         uint32_t rkey) {
    struct ibv_send_wr wr = {.wr_id = (uint64_t)id, .opcode = opcode, .sg_list = &sge, .num_sge = sge.length != 0};
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.imm_data = 0x1234;
    wr.wr.rdma.remote_addr = remote;
    wr.wr.rdma.rkey = rkey;
    post(e, &wr);
}

static inline uint64_t place(const struct end *peer) { return (uintptr_t)peer->memory + OTHER_HALF; }

static inline void write_to(struct end *e, int id, uint32_t len, const struct end *peer) {
    reach(e, id, IBV_WR_RDMA_WRITE, piece(e, len), place(peer), peer->mr->rkey);
}

static inline void read_from(struct end *e, int id, uint32_t len, const struct end *peer) {
    reach(e, id, IBV_WR_RDMA_READ, piece(e, len), place(peer), peer->mr->rkey);
}

static inline void add_at(struct end *e, int id, uint64_t remote, uint32_t rkey) {
    struct ibv_sge sge = piece(e, 8);
    struct ibv_send_wr wr = {
        .wr_id = (uint64_t)id, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .sg_list = &sge, .num_sge = 1};
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.atomic.remote_addr = remote;
    wr.wr.atomic.compare_add = 5;
    wr.wr.atomic.rkey = rkey;
    post(e, &wr);
}

/* ---- cases ---- */

static inline const struct deviation *deviation(const char *name, char end) {
    const struct deviation *d = deviations_of_soft_roce;
    while (d->name && !(strcmp(d->name, name) == 0 && d->end == end)) d++;
    return d->name ? d : NULL;
}

/* What that end must say on this device. A deviation that says what all say is none. */
static inline const char *expected(const char *name, char end, const char *text) {
    const struct deviation *d = deviation(name, end);
    if (d) CHECK(strcmp(d->says, text) != 0 && "a deviation that is none");
    return d && is_soft_roce() ? d->says : text;
}

/* Plays a case on two fresh ends; what both said at last is in said[]. 1: it is what was wanted, within so long. */
static inline int plays(void (*play)(struct end *, struct end *), const char *const wanted[2], struct how how,
                        int latest_ms, char said[2][SAID]) {
    struct end a, b;
    int settled = 0;
    end_open(&a, 0);
    end_open(&b, how.srq);
    bring(&b, &a, how.b_stays ? (enum ibv_qp_state)(how.b_stays - 1) : IBV_QPS_RTS, &how);
    bring(&a, &b, how.a_stays ? (enum ibv_qp_state)(how.a_stays - 1) : IBV_QPS_RTS, &how);
    play(&a, &b);
    /* Then for a while, as something may still come that must not. */
    for (int64_t until = hr_now() + latest_ms * MS; hr_now() < until && settled < SETTLE_MS; usleep(1000)) {
        say(&a, said[0]);
        say(&b, said[1]);
        settled = strcmp(said[0], wanted[0]) == 0 && strcmp(said[1], wanted[1]) == 0 ? settled + 1 : 0;
    }
    end_close(&a);
    end_close(&b);
    return settled == SETTLE_MS;
}

static inline void run_case(const char *name, void (*play)(struct end *, struct end *), const char *a_text,
                            const char *b_text, struct how how) {
    char said[2][SAID] = {"", ""};
    choose_device();
    if (how.srq && !limits.max_srq) SKIP("the device has no shared receive queues");
    const char *const wanted[2] = {expected(name, 'a', a_text), expected(name, 'b', b_text)};
    int as_wanted = plays(play, wanted, how, LATEST_MS, said);
    if (getenv("HR_TEST_SAY")) printf("%s: a says %s, b says %s\n", name, said[0], said[1]);
    if (as_wanted) return;
    CHECK_STR(said[0], wanted[0]);
    CHECK_STR(said[1], wanted[1]);
    for (const char *end = "ab"; is_soft_roce() && *end; end++)
        if (deviation(name, *end)) fprintf(stderr, "%s: %c deviates: %s\n", name, *end, deviation(name, *end)->why);
    CHECK(!"it was said in time, and nothing after it");
}

#define CASE(name, a_text, b_text, ...)                                                     \
    static void play_##name(struct end *a, struct end *b);                                  \
    TEST(name) { run_case(#name, play_##name, a_text, b_text, (struct how){__VA_ARGS__}); } \
    static void play_##name(__attribute__((unused)) struct end *a, __attribute__((unused)) struct end *b)

/* In every program with cases: the check of what checks. */

TEST(a_deviation_names_a_case) {
    for (const struct deviation *d = deviations_of_soft_roce; d->name; d++) {
        struct check_test *t = check_first;
        while (t && strcmp(t->name, d->name) != 0) t = t->next;
        CHECK(t && "there is such a case");
        CHECK_EQ(deviation(d->name, d->end) - d, 0); /* once */
    }
}

static inline void play_nothing(struct end *a, struct end *b) { (void)a, (void)b; }

/* So does a deviation that the device no longer has, whose text is the one that is wanted. */
TEST(what_was_not_said_is_noticed) {
    static const char *const wanted[][2] = {{"| | rts", "| | rts"},
                                            {"1 send 1 | | rts", "| | rts"},
                                            {"| | rts", "| | err"},
                                            {"| | rts", "| 101 flushed | rts"}};
    choose_device();
    for (int i = 0; i < 4; i++) {
        char said[2][SAID];
        CHECK_EQ(plays(play_nothing, wanted[i], (struct how){0}, i ? 200 : LATEST_MS, said), i == 0);
    }
}

#endif
