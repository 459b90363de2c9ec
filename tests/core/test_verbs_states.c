/* test_verbs_states.c - states of a queue pair, what may be posted in which, shared receives: the same on every device.
 */

/* As test_verbs_completions.c, of which this is the rest. */

#include "completions.h"

/* Linux 6.1, rdma-core 44. */
#define STAYS "the library has put it into the queue before the kernel refuses it"
const struct deviation deviations_of_soft_roce[] = {
    {"what_was_refused_is_not_sent", 'a', "1 refused, 1 send 10, 2 send 20 | | rts", STAYS},
    {"what_was_refused_is_not_sent", 'b', "| 101 recv 10, 102 recv 20 | rts", STAYS},
    {"what_was_refused_in_reset_is_not_sent", 'a', "1 refused, 1 send 10, 2 send 20 | | rts", STAYS},
    {"what_was_refused_in_reset_is_not_sent", 'b', "| 101 recv 10, 102 recv 20 | rts", STAYS},
    {"what_was_refused_is_not_flushed", 'a', "1 refused, 1 flushed | | err", STAYS},
    {"a_shared_receive_that_is_too_short", 'a', "1 remote operation | | err", WHERE},
    {"a_shared_receive_that_is_too_short", 'b', "| 101 local operation | err", WHERE},
    {"a_shared_receive_of_a_write_outside", 'b', "| 101 remote access | err", TAKEN},
    {NULL, 0, NULL, NULL},
};

/* ---- states ---- */

static const enum ibv_qp_state states[] = {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR};
enum { STATES = sizeof states / sizeof states[0] };
static const struct how usual = {0};

/* What the step to that state takes, from wherever. */
static int mask_of(enum ibv_qp_state to) {
    return to == IBV_QPS_INIT ? TO_INIT : to == IBV_QPS_RTR ? TO_RTR : to == IBV_QPS_RTS ? TO_RTS : IBV_QP_STATE;
}

static void begin(struct end *a, struct end *b) {
    choose_device();
    end_open(a, 0);
    end_open(b, 0);
}

static void end(struct end *a, struct end *b) {
    end_close(a);
    end_close(b);
}

TEST(steps_from_state_to_state) {
    static const int allowed[STATES][STATES] = {
        {1, 1, 0, 0, 0}, /* from reset */
        {1, 1, 1, 0, 1}, /* init */
        {1, 0, 0, 1, 1}, /* rtr */
        {1, 0, 0, 0, 1}, /* rts: again with what brought it there is too much */
        {1, 0, 0, 0, 1}, /* err */
    };
    struct end a, b;
    begin(&a, &b);
    for (int from = 0; from < STATES; from++)
        for (int to = 0; to < STATES; to++) {
            CHECK_EQ(turn(&a, IBV_QPS_RESET), 0);
            bring(&a, &b, states[from], &usual);
            int rc = step(&a, &b, states[to], mask_of(states[to]), &usual);
            if (rc != (allowed[from][to] ? 0 : EINVAL)) {
                fprintf(stderr, "from %d to %d: %d\n", states[from], states[to], rc);
                CHECK(!"this step");
            }
            CHECK_EQ(a.qp->state, states[rc ? from : to]);
        }
    end(&a, &b);
}

/* Each step without one of the attributes that it needs, and with one that is not its. */
TEST(steps_have_all_attributes_and_no_others) {
    static const int all = TO_INIT | TO_RTR | TO_RTS;
    static const int may[] = {[IBV_QPS_RTR] = IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
                              [IBV_QPS_RTS] = IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER};
    struct end a, b;
    begin(&a, &b);
    for (enum ibv_qp_state to = IBV_QPS_INIT; to <= IBV_QPS_RTS; to++) { /* ends where the next step begins */
        for (int bit = 1; bit <= all; bit <<= 1) {
            int needed = bit & mask_of(to);
            if (bit == IBV_QP_STATE || !(bit & all) || (!needed && bit & may[to])) continue;
            int rc = step(&a, &b, to, mask_of(to) ^ bit, &usual);
            if (rc != EINVAL) {
                fprintf(stderr, "to %d with mask %#x: %d\n", to, (unsigned)(mask_of(to) ^ bit), rc);
                CHECK(!"this step");
            }
        }
        CHECK_EQ(step(&a, &b, to, mask_of(to) | may[to], &usual), 0);
    }
    end(&a, &b);
}

TEST(attributes_without_a_step) {
    struct end a, b;
    begin(&a, &b);
    bring(&a, &b, IBV_QPS_RTS, &usual);
    CHECK_EQ(step(&a, &b, IBV_QPS_RTS, IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER, &usual), 0);
    CHECK_EQ(step(&a, &b, IBV_QPS_RTS, IBV_QP_TIMEOUT, &usual), EINVAL);
    CHECK_EQ(step(&a, &b, IBV_QPS_ERR, IBV_QP_STATE | IBV_QP_ACCESS_FLAGS, &usual), EINVAL);
    CHECK_STR(state_of(&a), "rts");
    end(&a, &b);
}

TEST(attributes_that_no_device_has) {
    struct end a, b;
    begin(&a, &b);
    struct ibv_qp_attr attr = attributes(&a, &b, &usual);
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = 77;
    CHECK_EQ(v->modify_qp(a.qp, &attr, TO_INIT), EINVAL);
    CHECK_STR(state_of(&a), "reset");
    end(&a, &b);
}

/* ---- posting ---- */

CASE(posting_in_reset, "1 refused | 101 refused | reset", "| | rts", .a_stays = IN_RESET) {
    recv_into(a, 101, 10);
    send_of(a, 1, 10);
}

CASE(posting_in_init, "1 refused | | init", "| | rts", .a_stays = IN_INIT) {
    recv_into(a, 101, 10);
    send_of(a, 1, 10);
}

CASE(posting_before_it_may_send, "1 refused | 101 recv 10 | rtr", "2 send 10 | | rts", .a_stays = IN_RTR) {
    recv_into(a, 101, 10);
    send_of(a, 1, 10);
    send_of(b, 2, 10);
}

CASE(a_receive_that_was_posted_first, "| 101 recv 10 | rts", "1 send 10 | | rts", .a_stays = IN_INIT) {
    recv_into(a, 101, 10);
    CHECK_EQ(step(a, b, IBV_QPS_RTR, TO_RTR, &usual), 0);
    CHECK_EQ(step(a, b, IBV_QPS_RTS, TO_RTS, &usual), 0);
    send_of(b, 1, 10);
}

CASE(what_was_refused_is_not_sent, "1 refused, 2 send 20 | | rts", "| 101 recv 20 | rts", .a_stays = IN_INIT) {
    recv_into(b, 101, 100);
    recv_into(b, 102, 100);
    send_of(a, 1, 10);
    CHECK_EQ(step(a, b, IBV_QPS_RTR, TO_RTR, &usual), 0);
    CHECK_EQ(step(a, b, IBV_QPS_RTS, TO_RTS, &usual), 0);
    send_of(a, 2, 20);
}

CASE(what_was_refused_in_reset_is_not_sent, "1 refused, 2 send 20 | | rts", "| 101 recv 20 | rts",
     .a_stays = IN_RESET) {
    recv_into(b, 101, 100);
    recv_into(b, 102, 100);
    send_of(a, 1, 10);
    bring(a, b, IBV_QPS_RTS, &usual);
    send_of(a, 2, 20);
}

CASE(what_was_refused_is_not_sent_by_a_step, "1 refused | | rts", "| | rts", .a_stays = IN_RTR) {
    recv_into(b, 101, 100);
    send_of(a, 1, 10);
    CHECK_EQ(step(a, b, IBV_QPS_RTS, TO_RTS, &usual), 0);
    usleep(50000);
}

CASE(what_was_refused_is_not_flushed, "1 refused | | err", "| | rts", .a_stays = IN_INIT) {
    send_of(a, 1, 10);
    turn(a, IBV_QPS_ERR);
}

CASE(what_was_refused_is_forgotten_by_reset, "1 refused, 2 send 20 | | rts", "| 101 recv 20 | rts",
     .a_stays = IN_INIT) {
    recv_into(b, 101, 100);
    recv_into(b, 102, 100);
    send_of(a, 1, 10);
    turn(a, IBV_QPS_RESET);
    bring(a, b, IBV_QPS_RTS, &usual);
    send_of(a, 2, 20);
}

CASE(more_inline_than_there_is_room, "1 refused | | rts", "| | rts") {
    send_from(a, 1, piece(a, 4000), IBV_SEND_SIGNALED | IBV_SEND_INLINE);
}

CASE(more_pieces_than_there_is_room, "1 refused | 101 refused | rts", "| | rts") {
    struct ibv_sge sge[40];
    struct ibv_send_wr wr = {.wr_id = 1, .opcode = IBV_WR_SEND, .sg_list = sge, .num_sge = 40};
    for (int i = 0; i < 40; i++) sge[i] = piece(a, 1);
    post(a, &wr);
    post_receive(a, 101, sge, 40);
}

CASE(a_batch_ends_where_it_is_refused, "2 refused, 1 send 10 | | rts", "| 101 recv 10 | rts") {
    struct ibv_sge sge = piece(a, 10);
    struct ibv_send_wr wr[3], *bad;
    for (int i = 0; i < 3; i++) {
        wr[i] = (struct ibv_send_wr){.wr_id = (uint64_t)i + 1, .opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1};
        wr[i].send_flags = IBV_SEND_SIGNALED;
        wr[i].next = i < 2 ? &wr[i + 1] : NULL;
    }
    wr[1].opcode = IBV_WR_ATOMIC_FETCH_AND_ADD; /* of ten bytes */
    wr[1].wr.atomic.remote_addr = place(b) + 1;
    recv_into(b, 101, 10);
    if (ibv_post_send(a->qp, wr, &bad)) note(a->sends, "%d refused", (int)bad->wr_id);
}

/* ---- shared receives ---- */

CASE(shared_receives_are_taken_in_order, "1 send 10, 2 write 10, 3 write 10 imm, 4 send 30 | | rts",
     "| 101 recv 10, 102 recv of write 10 imm 1234, 103 recv 30 | rts", .srq = 1) {
    for (int id = 101; id <= 104; id++) recv_into(b, id, 100);
    send_of(a, 1, 10);
    write_to(a, 2, 10, b);
    reach(a, 3, IBV_WR_RDMA_WRITE_WITH_IMM, piece(a, 10), place(b), b->mr->rkey);
    send_of(a, 4, 30);
}

CASE(a_shared_receive_that_is_too_short, "1 remote invalid request | | err", "| 101 local length | err", .srq = 1) {
    recv_into(b, 101, 10);
    recv_into(b, 102, 10); /* is for others */
    send_of(a, 1, 11);
}

CASE(a_shared_receive_of_a_write_outside, "1 remote access | | err", "| | err", .srq = 1) {
    recv_into(b, 101, 10);
    reach(a, 1, IBV_WR_RDMA_WRITE_WITH_IMM, piece(a, 10), (uintptr_t)b->memory - 1, b->mr->rkey);
}

CASE(no_shared_receive, "1 rnr retries | | err", "| | rts", .srq = 1, .rnr_retry = 1) { send_of(a, 1, 10); }

CASE(shared_receives_are_not_flushed, "| | rts", "| | err", .srq = 1) {
    recv_into(b, 101, 10);
    turn(b, IBV_QPS_ERR);
}

CASE(a_wrong_key_takes_no_shared_receive, "1 remote access | | err", "| | err", .srq = 1) {
    recv_into(b, 101, 10);
    reach(a, 1, IBV_WR_RDMA_WRITE, piece(a, 10), place(b), b->mr->rkey ^ 0x5500);
}
