/* test_verbs_sim.c - the simulated device alone: states, order, missing receives, flushing, faults of access. */

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "providers/verbs/sim.h"

static const struct hr_verbs_backend *const v = &hr_verbs_sim;

struct end {
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint8_t memory[1 << 16];
};

static void end_open(struct end *e) {
    int n;
    struct ibv_device **list = v->get_device_list(&n);
    memset(e, 0, sizeof *e);
    REQUIRE(list && (e->ctx = v->open_device(list[0])));
    v->free_device_list(list);
    REQUIRE((e->pd = v->alloc_pd(e->ctx)));
    REQUIRE((e->cq = v->create_cq(e->ctx, 64, e, NULL, 0)));
    REQUIRE((e->mr = v->reg_mr(e->pd, e->memory, sizeof e->memory,
                               IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE)));
    struct ibv_qp_init_attr init = {.send_cq = e->cq, .recv_cq = e->cq, .qp_type = IBV_QPT_RC};
    init.cap = (struct ibv_qp_cap){.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 2, .max_recv_sge = 1};
    REQUIRE((e->qp = v->create_qp(e->pd, &init)));
}

static void end_close(struct end *e) {
    if (e->qp) v->destroy_qp(e->qp);
    v->dereg_mr(e->mr);
    CHECK_EQ(v->destroy_cq(e->cq), 0);
    CHECK_EQ(v->dealloc_pd(e->pd), 0);
    v->close_device(e->ctx);
}

static int to_init(struct end *e) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    attr.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
    return v->modify_qp(e->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static int to_rtr(struct end *e, const struct end *peer) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .max_dest_rd_atomic = 4};
    attr.dest_qp_num = peer->qp->qp_num;
    attr.rq_psn = 0xfffffe; /* numbers wrap soon */
    attr.ah_attr.is_global = 1;
    v->query_gid(peer->ctx, 1, 0, &attr.ah_attr.grh.dgid);
    return v->modify_qp(e->qp, &attr,
                        IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static int to_rts(struct end *e, int rnr_retry) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS, .sq_psn = 0xfffffe, .max_rd_atomic = 4, .timeout = 14};
    attr.retry_cnt = 6;
    attr.rnr_retry = (uint8_t)rnr_retry;
    return v->modify_qp(e->qp, &attr,
                        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                            IBV_QP_MAX_QP_RD_ATOMIC);
}

static void up(struct end *a, struct end *b, int rnr_retry) {
    end_open(a);
    end_open(b);
    CHECK_EQ(to_init(a) | to_init(b), 0);
    CHECK_EQ(to_rtr(a, b) | to_rtr(b, a), 0);
    CHECK_EQ(to_rts(a, rnr_retry) | to_rts(b, rnr_retry), 0);
}

static int post(struct end *e, enum ibv_wr_opcode opcode, uint32_t len, const struct end *peer, uint64_t offset) {
    struct ibv_sge sge = {(uintptr_t)e->memory, len, e->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 1, .opcode = opcode, .sg_list = &sge, .num_sge = 1}, *bad;
    wr.send_flags = IBV_SEND_SIGNALED;
    if (peer) wr.wr.rdma.remote_addr = (uintptr_t)peer->memory + offset, wr.wr.rdma.rkey = peer->mr->rkey;
    return ibv_post_send(e->qp, &wr, &bad);
}

static int post_recv(struct end *e, uint32_t len) {
    struct ibv_sge sge = {(uintptr_t)e->memory, len, e->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = 2, .sg_list = &sge, .num_sge = 1}, *bad;
    return ibv_post_recv(e->qp, &wr, &bad);
}

/* The next completion within two seconds; the other side is polled by nobody: its device works by itself. */
static struct ibv_wc next(struct end *e) {
    struct ibv_wc wc = {.status = IBV_WC_GENERAL_ERR};
    for (int i = 0; i < 2000; i++) {
        if (ibv_poll_cq(e->cq, 1, &wc) == 1) return wc;
        usleep(1000);
    }
    CHECK(!"a completion came");
    return wc;
}

static enum ibv_qp_state state(struct end *e) {
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    CHECK_EQ(v->query_qp(e->qp, &attr, IBV_QP_STATE, &init), 0);
    return attr.qp_state;
}

TEST(states_in_order_only) {
    struct end a, b;
    end_open(&a);
    end_open(&b);
    CHECK(post_recv(&a, 8) != 0); /* not in RESET */
    CHECK(to_rtr(&a, &b) != 0);
    CHECK(to_rts(&a, 7) != 0);
    CHECK_EQ(to_init(&a), 0);
    CHECK(to_rts(&a, 7) != 0);
    CHECK_EQ(post_recv(&a, 8), 0);
    CHECK(post(&a, IBV_WR_SEND, 8, NULL, 0) != 0); /* not before RTS */
    CHECK_EQ(to_rtr(&a, &b), 0);
    CHECK_EQ(to_rts(&a, 7), 0);
    CHECK_EQ(state(&a), IBV_QPS_RTS);
    CHECK(v->dealloc_pd(a.pd) != 0); /* in use */
    CHECK(v->destroy_cq(a.cq) != 0);
    end_close(&a);
    end_close(&b);
}

TEST(data_goes_where_it_is_sent) {
    struct end a, b;
    up(&a, &b, 7);
    for (size_t i = 0; i < sizeof a.memory; i++) a.memory[i] = (uint8_t)(i * 7);
    CHECK_EQ(post_recv(&b, 30000), 0);
    CHECK_EQ(post(&a, IBV_WR_SEND, 30000, NULL, 0), 0);
    CHECK_EQ(next(&a).status, IBV_WC_SUCCESS);
    struct ibv_wc wc = next(&b);
    CHECK_EQ(wc.opcode, IBV_WC_RECV);
    CHECK_EQ(wc.byte_len, 30000);
    CHECK_MEM(b.memory, a.memory, 30000);
    CHECK_EQ(post(&a, IBV_WR_RDMA_WRITE, 20000, &b, 40000), 0);
    CHECK_EQ(next(&a).opcode, IBV_WC_RDMA_WRITE);
    CHECK_MEM(b.memory + 40000, a.memory, 20000);
    memset(a.memory, 0, sizeof a.memory);
    CHECK_EQ(post(&a, IBV_WR_RDMA_READ, 60000, &b, 0), 0);
    CHECK_EQ(next(&a).status, IBV_WC_SUCCESS);
    CHECK_MEM(a.memory, b.memory, 60000);
    end_close(&a);
    end_close(&b);
}

TEST(a_receive_that_comes_late) {
    struct end a, b;
    struct ibv_wc wc;
    up(&a, &b, 7);
    CHECK_EQ(post(&a, IBV_WR_SEND, 100, NULL, 0), 0);
    CHECK_EQ(post(&a, IBV_WR_SEND, 200, NULL, 0), 0); /* arrives out of order and is asked for again */
    for (int i = 0; i < 20; i++) {
        CHECK_EQ(ibv_poll_cq(a.cq, 1, &wc), 0);
        usleep(1000);
    }
    CHECK_EQ(post_recv(&b, 1000) | post_recv(&b, 1000), 0);
    CHECK_EQ(next(&b).byte_len, 100);
    CHECK_EQ(next(&b).byte_len, 200);
    CHECK_EQ(next(&a).status | next(&a).status, IBV_WC_SUCCESS);
    end_close(&a);
    end_close(&b);
}

TEST(a_receive_that_never_comes) {
    struct end a, b;
    up(&a, &b, 2);
    CHECK_EQ(post(&a, IBV_WR_SEND, 100, NULL, 0), 0);
    CHECK_EQ(post(&a, IBV_WR_SEND, 100, NULL, 0), 0);
    CHECK_EQ(next(&a).status, IBV_WC_RNR_RETRY_EXC_ERR);
    CHECK_EQ(next(&a).status, IBV_WC_WR_FLUSH_ERR);
    CHECK_EQ(a.qp->state, IBV_QPS_ERR);
    CHECK_EQ(post(&a, IBV_WR_SEND, 100, NULL, 0), 0); /* is flushed at once */
    CHECK_EQ(next(&a).status, IBV_WC_WR_FLUSH_ERR);
    end_close(&a);
    end_close(&b);
}

TEST(access_outside_a_region_breaks_both) {
    struct end a, b;
    up(&a, &b, 7);
    CHECK_EQ(post_recv(&b, 100), 0);
    CHECK_EQ(post(&a, IBV_WR_RDMA_WRITE, 100, &b, sizeof b.memory - 99), 0);
    CHECK_EQ(next(&a).status, IBV_WC_REM_ACCESS_ERR);
    CHECK_EQ(next(&b).status, IBV_WC_WR_FLUSH_ERR);
    CHECK_EQ(b.memory[sizeof b.memory - 1], 0);
    end_close(&a);
    end_close(&b);
}

/* The peer has broken and hung up, and its word waits in the socket while more is posted, which finds that out first.
 */
TEST(a_refusal_is_heard_before_the_end_of_the_socket) {
    struct end a, b;
    up(&a, &b, 7);
    pthread_mutex_lock(&sim_of(a.ctx)->lock);
    sim_of(a.ctx)->polled = hr_now() + 1000000000; /* its thread keeps away, as if somebody polled */
    pthread_mutex_unlock(&sim_of(a.ctx)->lock);
    CHECK_EQ(post(&a, IBV_WR_RDMA_WRITE, 100, &b, sizeof b.memory), 0);
    for (int i = 0; i < 1000 && state(&b) != IBV_QPS_ERR; i++) usleep(1000);
    CHECK_EQ(post(&a, IBV_WR_RDMA_WRITE, 100, &b, 0), 0);
    CHECK_EQ(next(&a).status, IBV_WC_REM_ACCESS_ERR);
    CHECK_EQ(next(&a).status, IBV_WC_WR_FLUSH_ERR);
    end_close(&a);
    end_close(&b);
}

TEST(a_message_larger_than_its_receive) {
    struct end a, b;
    up(&a, &b, 7);
    CHECK_EQ(post_recv(&b, 100), 0);
    CHECK_EQ(post(&a, IBV_WR_SEND, 101, NULL, 0), 0);
    CHECK_EQ(next(&b).status, IBV_WC_LOC_LEN_ERR);
    CHECK_EQ(next(&a).status, IBV_WC_REM_INV_REQ_ERR);
    end_close(&a);
    end_close(&b);
}

TEST(a_peer_that_is_gone_is_found_by_who_sends) {
    struct end a, b;
    struct ibv_wc wc;
    up(&a, &b, 7);
    v->destroy_qp(b.qp);
    b.qp = NULL;
    usleep(20000);
    CHECK_EQ(ibv_poll_cq(a.cq, 1, &wc), 0); /* nothing is said to who is silent */
    CHECK_EQ(post(&a, IBV_WR_SEND, 100, NULL, 0), 0);
    CHECK_EQ(next(&a).status, IBV_WC_RETRY_EXC_ERR);
    end_close(&a);
    end_close(&b);
}

/* All of it had left, and the peer's device has not looked yet. A port that is mended brings nothing back. */
TEST(what_was_under_way_when_the_port_goes_down_is_lost) {
    static const struct {
        enum ibv_wr_opcode opcode;
        int mended;
    } cases[] = {{IBV_WR_RDMA_WRITE, 0}, {IBV_WR_RDMA_WRITE, 1}, {IBV_WR_RDMA_READ, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct end a, b;
        up(&a, &b, 7);
        CHECK_EQ(post(&a, IBV_WR_RDMA_WRITE, 100, &b, 0), 0);
        CHECK_EQ(next(&a).status, IBV_WC_SUCCESS);
        pthread_mutex_lock(&sim_of(b.ctx)->lock);
        CHECK_EQ(post(&a, cases[i].opcode, 100, &b, 0), 0);
        hr_verbs_sim_port(a.ctx, 1, 0);
        pthread_mutex_unlock(&sim_of(b.ctx)->lock);
        if (cases[i].mended) hr_verbs_sim_port(a.ctx, 1, 1);
        CHECK_EQ(next(&a).status, IBV_WC_RETRY_EXC_ERR);
        end_close(&a);
        end_close(&b);
    }
}

TEST(a_port_is_mended_before_anything_leaves) {
    struct end a, b;
    up(&a, &b, 7);
    CHECK_EQ(post_recv(&a, 100), 0); /* b's way to a is there: else it would call once the port is mended */
    CHECK_EQ(post(&b, IBV_WR_SEND, 100, NULL, 0), 0);
    CHECK_EQ(next(&b).status, IBV_WC_SUCCESS);
    CHECK_EQ(next(&a).status, IBV_WC_SUCCESS);
    hr_verbs_sim_port(a.ctx, 1, 0);
    CHECK_EQ(post(&a, IBV_WR_RDMA_WRITE, 100, &b, 0), 0);
    usleep(20000);
    hr_verbs_sim_port(a.ctx, 1, 1);
    CHECK_EQ(next(&a).status, IBV_WC_SUCCESS);
    CHECK_EQ(post_recv(&a, 100), 0); /* b's way to it ended with the port */
    CHECK_EQ(post(&b, IBV_WR_SEND, 100, NULL, 0), 0);
    CHECK_EQ(next(&b).status, IBV_WC_RETRY_EXC_ERR);
    end_close(&a);
    end_close(&b);
}

TEST(more_work_than_the_queue_holds) {
    struct end a, b;
    int rc = 0, n = 0;
    up(&a, &b, 7);
    while (!rc && n < 100) rc = post(&a, IBV_WR_SEND, 8, NULL, 0), n += !rc;
    CHECK_EQ(rc, ENOMEM);
    CHECK_EQ(n, 8);
    end_close(&a);
    end_close(&b);
}

/* ---- where the system gives less ---- */

/* Milliseconds that this process computed while nobody here did for a fifth of a second. */
static double busy_ms(void) {
    struct timespec from, to;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
    usleep(200000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
    return (double)(to.tv_sec - from.tv_sec) * 1e3 + (double)(to.tv_nsec - from.tv_nsec) / 1e6;
}

TEST(the_thread_rests_although_a_forked_child_holds_copies) {
    struct end a, b;
    up(&a, &b, 7);
    CHECK_EQ(post_recv(&b, 100), 0);
    CHECK_EQ(post(&a, IBV_WR_SEND, 100, NULL, 0), 0);
    CHECK_EQ(next(&a).status, IBV_WC_SUCCESS);
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) pause();
    }
    REQUIRE(child > 0);
    v->destroy_qp(a.qp);
    v->destroy_qp(b.qp);
    a.qp = b.qp = NULL;
    CHECK(busy_ms() < 100);
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, NULL, 0), child);
    end_close(&a);
    end_close(&b);
}

/* Only so many descriptors more. */
static struct rlimit leave(rlim_t descriptors) {
    struct rlimit before, now;
    int lowest = dup(STDERR_FILENO);
    REQUIRE(lowest >= 0 && getrlimit(RLIMIT_NOFILE, &before) == 0);
    close(lowest);
    now = before;
    now.rlim_cur = (rlim_t)lowest + descriptors;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &now), 0);
    return before;
}

TEST(without_descriptors_a_queue_pair_gives_up_like_one_whose_peer_is_silent) {
    struct end a, b;
    end_open(&a);
    end_open(&b);
    struct rlimit before = leave(0);
    CHECK_EQ(to_init(&a) | to_init(&b), 0);
    CHECK_EQ(to_rtr(&a, &b) | to_rtr(&b, &a), 0);
    CHECK_EQ(to_rts(&a, 7) | to_rts(&b, 7), 0);
    CHECK(busy_ms() < 100); /* nothing is to be sent: there is time */
    CHECK_EQ(post(&a, IBV_WR_SEND, 100, NULL, 0), 0);
    CHECK(busy_ms() < 100);
    CHECK_EQ(next(&a).status, IBV_WC_RETRY_EXC_ERR);
    setrlimit(RLIMIT_NOFILE, &before);
    CHECK_EQ(post_recv(&a, 100), 0); /* the other one still finds its way, to a peer that is broken */
    CHECK_EQ(post(&b, IBV_WR_SEND, 100, NULL, 0), 0);
    CHECK(next(&b).status != IBV_WC_SUCCESS);
    end_close(&a);
    end_close(&b);
}

TEST(callers_are_taken_when_there_are_descriptors_again) {
    struct end a, b;
    end_open(&a);
    end_open(&b);
    struct rlimit before = leave(2);
    CHECK_EQ(to_init(&a) | to_init(&b), 0);
    CHECK_EQ(to_rtr(&a, &b) | to_rtr(&b, &a), 0);
    CHECK_EQ(to_rts(&a, 7) | to_rts(&b, 7), 0);
    CHECK_EQ(post_recv(&b, 100), 0);
    CHECK_EQ(post(&a, IBV_WR_SEND, 100, NULL, 0), 0);
    CHECK(busy_ms() < 100);
    setrlimit(RLIMIT_NOFILE, &before);
    CHECK_EQ(next(&b).status, IBV_WC_SUCCESS);
    CHECK_EQ(next(&a).status, IBV_WC_SUCCESS);
    end_close(&a);
    end_close(&b);
}

TEST(opening_says_what_was_missing) {
    int n;
    struct ibv_device **list = v->get_device_list(&n);
    for (rlim_t descriptors = 0; descriptors < 4; descriptors++) {
        struct rlimit before = leave(descriptors);
        errno = 0;
        CHECK(!v->open_device(list[0]));
        CHECK_EQ(errno, EMFILE);
        setrlimit(RLIMIT_NOFILE, &before);
    }
    v->free_device_list(list);
}
