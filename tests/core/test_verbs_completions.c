/* test_verbs_completions.c - what completes, at both ends, in good cases and bad ones: the same on every device. */

/*
 * Runs on the simulated device, or on HR_TEST_DEVICE: on "sim_rxe", and in the guests on soft-RoCE (tests/rxe). So the
 * simulated device is held against a driver of the kernel, and both against the InfiniBand specification (volume 1,
 * 9.9.2 and 11.6.2).
 */

#include "completions.h"

/* Linux 6.1. */
#define KEY "a key that is not there is no protection error to it, a range that is not is one"
#define UNSAID "the kernel is not told of receives that are posted, and looks for them when a packet comes"
const struct deviation deviations_of_soft_roce[] = {
    {"a_message_longer_than_its_receive", 'a', "1 remote operation, 2 flushed | | err", WHERE},
    {"a_message_longer_than_its_receive", 'b', "| 101 local operation, 102 flushed | err", WHERE},
    {"a_message_longer_in_a_later_packet", 'a', "1 remote operation | | err", WHERE},
    {"a_message_longer_in_a_later_packet", 'b', "| 101 local operation | err", WHERE},
    {"a_message_for_a_receive_of_nothing", 'a', "1 remote operation | | err", WHERE},
    {"a_message_for_a_receive_of_nothing", 'b', "| 101 local operation | err", WHERE},
    {"a_receive_with_a_wrong_key", 'b', "| 101 local operation, 102 flushed | err", WHERE},
    {"a_receive_outside_its_region", 'b', "| 101 local operation | err", WHERE},
    {"a_receive_that_may_not_be_written", 'b', "| 101 local operation | err", WHERE},
    {"a_send_with_a_wrong_key", 'a', "1 local operation, 2 flushed | | err", KEY},
    {"a_send_with_a_wrong_key_later", 'a', "1 local operation | | err", KEY},
    {"a_write_with_a_wrong_key_here", 'a', "1 write 10, 2 local operation | | err", KEY},
    {"a_write_with_immediate_data_outside", 'b', "| 101 remote access | err", TAKEN},
    {"a_write_with_immediate_data_outside_and_no_receive", 'a', "1 rnr retries | | err", TAKEN},
    {"a_write_with_immediate_data_outside_and_no_receive", 'b', "| | rts", TAKEN},
    {"what_is_posted_after_the_failure_is_flushed", 'a', "1 flushed, 2 flushed | | err", UNSAID},
    {NULL, 0, NULL, NULL},
};

/* ---- what goes well ---- */

CASE(a_send, "1 send 100 | | rts", "| 101 recv 100 | rts") {
    memset(a->memory, 7, 100);
    recv_into(b, 101, 1000);
    send_of(a, 1, 100);
}

CASE(a_send_of_many_packets, "1 send 30000 | | rts", "| 101 recv 30000 | rts") {
    recv_into(b, 101, 30000);
    send_of(a, 1, 30000);
}

CASE(a_send_of_nothing, "1 send 0 | | rts", "| 101 recv 0, 102 recv 0 | rts") {
    recv_into(b, 101, 0);
    recv_into(b, 102, 100);
    send_from(a, 5, piece(a, 0), 0);
    send_of(a, 1, 0);
}

CASE(a_send_inline, "1 send 64 | | rts", "| 101 recv 64 | rts") {
    recv_into(b, 101, 64);
    send_from(a, 1, (struct ibv_sge){(uintptr_t)a->memory, 64, 0}, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
}

CASE(a_send_with_immediate_data, "1 send 100 imm | | rts", "| 101 recv 100 imm 1234 | rts") {
    recv_into(b, 101, 100);
    reach(a, 1, IBV_WR_SEND_WITH_IMM, piece(a, 100), 0, 0);
}

CASE(pieces_of_memory, "1 send 3000 | | rts", "| 101 recv 3000 | rts") {
    struct ibv_sge from[2] = {{(uintptr_t)a->memory, 1000, a->mr->lkey},
                              {(uintptr_t)a->memory + 5000, 2000, a->mr->lkey}};
    struct ibv_sge to[2] = {{(uintptr_t)b->memory, 2500, b->mr->lkey},
                            {(uintptr_t)b->memory + 5000, 1000, b->mr->lkey}};
    struct ibv_send_wr wr = {.wr_id = 1, .opcode = IBV_WR_SEND, .sg_list = from, .num_sge = 2};
    wr.send_flags = IBV_SEND_SIGNALED;
    post_receive(b, 101, to, 2);
    post(a, &wr);
}

CASE(a_write, "1 write 100, 2 write 30000 | | rts", "| | rts") {
    write_to(a, 1, 100, b);
    write_to(a, 2, 30000, b);
}

CASE(a_write_with_immediate_data, "1 write 100 imm, 2 write 20000 imm | | rts",
     "| 101 recv of write 100 imm 1234, 102 recv of write 20000 imm 1234 | rts") {
    recv_into(b, 101, 0);
    recv_into(b, 102, 10);
    reach(a, 1, IBV_WR_RDMA_WRITE_WITH_IMM, piece(a, 100), place(b), b->mr->rkey);
    reach(a, 2, IBV_WR_RDMA_WRITE_WITH_IMM, piece(a, 20000), place(b), b->mr->rkey);
}

CASE(a_read, "1 read 100, 2 read 30000 | | rts", "| | rts") {
    read_from(a, 1, 100, b);
    read_from(a, 2, 30000, b);
}

/* No key is looked at where no byte moves. */
CASE(reads_and_writes_of_nothing, "1 write 0, 2 read 0, 3 write 0 imm | | rts",
     "| 101 recv of write 0 imm 1234 | rts") {
    recv_into(b, 101, 0);
    reach(a, 1, IBV_WR_RDMA_WRITE, piece(a, 0), 1, 0);
    reach(a, 2, IBV_WR_RDMA_READ, piece(a, 0), 1, 0);
    reach(a, 3, IBV_WR_RDMA_WRITE_WITH_IMM, piece(a, 0), 1, 0);
}

CASE(atomics, "1 add 8, 2 swap 8, 3 swap 8 | | rts", "| | rts") {
    struct ibv_sge sge = piece(a, 8);
    struct ibv_send_wr swap = {.wr_id = 2, .opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .sg_list = &sge, .num_sge = 1};
    add_at(a, 1, place(b), b->mr->rkey);
    swap.send_flags = IBV_SEND_SIGNALED;
    swap.wr.atomic.remote_addr = place(b);
    swap.wr.atomic.rkey = b->mr->rkey;
    swap.wr.atomic.compare_add = 5; /* what the sum is */
    swap.wr.atomic.swap = 9;
    post(a, &swap);
    swap.wr_id = 3;
    post(a, &swap); /* finds another value, which is a success too */
}

CASE(only_what_is_signaled_completes, "4 send 10 | | rts", "| 101 recv 10, 102 recv 10 | rts") {
    recv_into(b, 101, 10);
    recv_into(b, 102, 10);
    send_from(a, 1, piece(a, 10), 0);
    struct ibv_sge sge = piece(a, 10);
    struct ibv_send_wr write = {.wr_id = 2, .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1};
    write.wr.rdma.remote_addr = place(b);
    write.wr.rdma.rkey = b->mr->rkey;
    post(a, &write);
    write.wr_id = 3;
    write.opcode = IBV_WR_RDMA_READ;
    post(a, &write);
    send_of(a, 4, 10);
}

CASE(all_kinds_complete_in_order,
     "1 read 20000, 2 send 10, 3 add 8, 4 write 5000, 5 read 10, 6 write 10 imm, 7 send 0 | | rts",
     "| 101 recv 10, 102 recv of write 10 imm 1234, 103 recv 0 | rts") {
    for (int id = 101; id <= 103; id++) recv_into(b, id, 10);
    read_from(a, 1, 20000, b);
    send_of(a, 2, 10);
    add_at(a, 3, place(b), b->mr->rkey);
    write_to(a, 4, 5000, b);
    read_from(a, 5, 10, b);
    reach(a, 6, IBV_WR_RDMA_WRITE_WITH_IMM, piece(a, 10), place(b), b->mr->rkey);
    send_of(a, 7, 0);
}

CASE(more_reads_than_may_be_under_way, "1 read 5000, 2 read 5000, 3 read 5000, 4 add 8, 5 read 1 | | rts", "| | rts",
     .reads = 1) {
    for (int id = 1; id <= 3; id++) read_from(a, id, 5000, b);
    add_at(a, 4, place(b), b->mr->rkey);
    read_from(a, 5, 1, b);
}

CASE(both_ways, "1 send 10 | 101 recv 20 | rts", "2 send 20 | 102 recv 10 | rts") {
    recv_into(a, 101, 100);
    recv_into(b, 102, 100);
    send_of(a, 1, 10);
    send_of(b, 2, 20);
}

/* ---- messages and their receives ---- */

CASE(a_message_longer_than_its_receive, "1 remote invalid request, 2 flushed | | err",
     "| 101 local length, 102 flushed | err") {
    recv_into(b, 101, 100);
    recv_into(b, 102, 100);
    send_of(a, 1, 101);
    send_of(a, 2, 10);
}

CASE(a_message_longer_in_a_later_packet, "1 remote invalid request | | err", "| 101 local length | err") {
    recv_into(b, 101, 9000);
    send_of(a, 1, 20000);
}

CASE(a_message_for_a_receive_of_nothing, "1 remote invalid request | | err", "| 101 local length | err") {
    recv_into(b, 101, 0);
    send_of(a, 1, 1);
}

CASE(a_receive_with_a_wrong_key, "1 remote operation, 2 flushed | | err", "| 101 local protection, 102 flushed | err") {
    struct ibv_sge wrong = {(uintptr_t)b->memory, 100, b->mr->lkey ^ 0x5500};
    post_receive(b, 101, &wrong, 1);
    recv_into(b, 102, 100);
    send_of(a, 1, 10);
    send_of(a, 2, 10);
}

CASE(a_receive_outside_its_region, "1 remote operation | | err", "| 101 local protection | err") {
    struct ibv_sge outside = {(uintptr_t)b->memory + MEMORY - 10, 100, b->mr->lkey};
    post_receive(b, 101, &outside, 1);
    send_of(a, 1, 50);
}

CASE(a_receive_that_may_not_be_written, "1 remote operation | | err", "| 101 local protection | err") {
    struct ibv_sge closed = {(uintptr_t)b->memory, 100, b->closed->lkey};
    post_receive(b, 101, &closed, 1);
    send_of(a, 1, 50);
}

CASE(no_receive, "1 rnr retries, 2 flushed | | err", "| | rts", .rnr_retry = 1) {
    send_of(a, 1, 10);
    send_of(a, 2, 10);
}

CASE(no_receive_for_immediate_data, "1 rnr retries | | err", "| | rts", .rnr_retry = 1) {
    reach(a, 1, IBV_WR_RDMA_WRITE_WITH_IMM, piece(a, 10), place(b), b->mr->rkey);
}

CASE(one_receive_for_two_messages, "1 send 10, 2 rnr retries | | err", "| 101 recv 10 | rts", .rnr_retry = 1) {
    recv_into(b, 101, 10);
    send_of(a, 1, 10);
    send_of(a, 2, 10);
}

CASE(a_receive_that_comes_very_late, "1 send 10 | | rts", "| 101 recv 10 | rts", .timeout = 10, .retry_cnt = 1) {
    send_of(a, 1, 10);
    usleep(300000);
    recv_into(b, 101, 10);
}

CASE(a_receive_that_comes_late, "1 send 10, 2 write 10 | | rts", "| 101 recv 10 | rts") {
    send_of(a, 1, 10);
    write_to(a, 2, 10, b);
    usleep(5000);
    recv_into(b, 101, 10);
}

/* ---- memory of the peer ---- */

CASE(a_write_outside, "1 remote access, 2 flushed | | err", "| 101 flushed | err") {
    recv_into(b, 101, 10);
    reach(a, 1, IBV_WR_RDMA_WRITE, piece(a, 100), place(b) + MEMORY - OTHER_HALF - 99, b->mr->rkey);
    send_of(a, 2, 10);
}

CASE(a_write_before, "1 remote access | | err", "| | err") {
    reach(a, 1, IBV_WR_RDMA_WRITE, piece(a, 100), (uintptr_t)b->memory - 1, b->mr->rkey);
}

CASE(a_write_of_many_packets_outside, "1 remote access | | err", "| | err") {
    reach(a, 1, IBV_WR_RDMA_WRITE, piece(a, 30000), (uintptr_t)b->memory + MEMORY - 20000, b->mr->rkey);
}

CASE(a_write_with_immediate_data_outside, "1 remote access | | err", "| 101 flushed | err") {
    recv_into(b, 101, 10);
    reach(a, 1, IBV_WR_RDMA_WRITE_WITH_IMM, piece(a, 10), (uintptr_t)b->memory - 1, b->mr->rkey);
}

CASE(a_write_with_immediate_data_of_many_packets_outside, "1 remote access | | err", "| 101 flushed | err") {
    recv_into(b, 101, 10);
    reach(a, 1, IBV_WR_RDMA_WRITE_WITH_IMM, piece(a, 20000), (uintptr_t)b->memory - 1, b->mr->rkey);
}

CASE(a_write_with_immediate_data_outside_and_no_receive, "1 remote access | | err", "| | err", .rnr_retry = 1) {
    reach(a, 1, IBV_WR_RDMA_WRITE_WITH_IMM, piece(a, 10), (uintptr_t)b->memory - 1, b->mr->rkey);
}

CASE(a_read_outside, "1 remote access, 2 flushed | | err", "| | err") {
    reach(a, 1, IBV_WR_RDMA_READ, piece(a, 100), (uintptr_t)b->memory + MEMORY - 99, b->mr->rkey);
    read_from(a, 2, 10, b);
}

CASE(an_atomic_outside, "1 remote access | | err", "| | err") {
    add_at(a, 1, (uintptr_t)b->memory + MEMORY, b->mr->rkey);
}

CASE(a_wrong_key_of_a_write, "1 write 10, 2 remote access, 3 flushed | | err", "| | err") {
    write_to(a, 1, 10, b);
    reach(a, 2, IBV_WR_RDMA_WRITE, piece(a, 10), place(b), b->mr->rkey ^ 0x5500);
    write_to(a, 3, 10, b);
}

CASE(a_wrong_key_of_a_read, "1 remote access | | err", "| | err") {
    reach(a, 1, IBV_WR_RDMA_READ, piece(a, 10), place(b), b->mr->rkey ^ 0x5500);
}

CASE(a_wrong_key_of_an_atomic, "1 remote access | | err", "| | err") { add_at(a, 1, place(b), b->mr->rkey ^ 0x5500); }

CASE(a_region_that_may_not_be_written, "1 remote access | | err", "| | err") {
    reach(a, 1, IBV_WR_RDMA_WRITE, piece(a, 10), place(b), b->closed->rkey);
}

CASE(a_region_that_may_not_be_read, "1 remote access | | err", "| | err") {
    reach(a, 1, IBV_WR_RDMA_READ, piece(a, 10), place(b), b->closed->rkey);
}

CASE(a_region_without_atomics, "1 remote access | | err", "| | err") { add_at(a, 1, place(b), b->closed->rkey); }

CASE(a_queue_pair_that_may_not_be_written, "1 remote invalid request | | err", "| 101 flushed | err",
     .rights = IBV_ACCESS_REMOTE_READ) {
    recv_into(b, 101, 10);
    write_to(a, 1, 10, b);
}

CASE(a_queue_pair_that_may_not_be_read, "1 remote invalid request | | err", "| | err",
     .rights = IBV_ACCESS_REMOTE_WRITE) {
    read_from(a, 1, 10, b);
}

CASE(a_queue_pair_without_atomics, "1 remote invalid request | | err", "| | err", .rights = IBV_ACCESS_REMOTE_WRITE) {
    add_at(a, 1, place(b), b->mr->rkey);
}

CASE(an_atomic_that_is_not_aligned, "1 refused | | rts", "| | rts") { add_at(a, 1, place(b) + 4, b->mr->rkey); }

/* ---- memory of one's own ---- */

CASE(a_send_with_a_wrong_key, "1 local protection, 2 flushed | | err", "| | rts") {
    send_from(a, 1, (struct ibv_sge){(uintptr_t)a->memory, 10, a->mr->lkey ^ 0x5500}, IBV_SEND_SIGNALED);
    send_of(a, 2, 10);
}

CASE(a_send_with_a_wrong_key_later, "1 local protection | | err", "| | rts") {
    struct ibv_sge from[2] = {{(uintptr_t)a->memory, 10, a->mr->lkey},
                              {(uintptr_t)a->memory, 10, a->mr->lkey ^ 0x5500}};
    struct ibv_send_wr wr = {.wr_id = 1, .opcode = IBV_WR_SEND, .sg_list = from, .num_sge = 2};
    wr.send_flags = IBV_SEND_SIGNALED;
    recv_into(b, 101, 100);
    post(a, &wr);
}

CASE(a_send_from_outside, "1 local protection | | err", "| | rts") {
    send_from(a, 1, (struct ibv_sge){(uintptr_t)a->memory + MEMORY - 10, 11, a->mr->lkey}, IBV_SEND_SIGNALED);
}

CASE(a_write_with_a_wrong_key_here, "1 write 10, 2 local protection | | err", "| | rts") {
    write_to(a, 1, 10, b);
    reach(a, 2, IBV_WR_RDMA_WRITE, (struct ibv_sge){(uintptr_t)a->memory, 10, a->mr->lkey ^ 0x5500}, place(b),
          b->mr->rkey);
}

CASE(a_read_into_a_wrong_key, "1 local protection, 2 flushed | | err", "| | rts") {
    reach(a, 1, IBV_WR_RDMA_READ, (struct ibv_sge){(uintptr_t)a->memory, 10, a->mr->lkey ^ 0x5500}, place(b),
          b->mr->rkey);
    read_from(a, 2, 10, b);
}

CASE(a_read_into_what_may_not_be_written, "1 local protection | | err", "| | rts") {
    reach(a, 1, IBV_WR_RDMA_READ, (struct ibv_sge){(uintptr_t)a->memory, 10, a->closed->lkey}, place(b), b->mr->rkey);
}

/* What fails is told though nobody asked. */
CASE(a_failure_is_told_unasked, "1 remote access, 2 flushed | | err", "| | err") {
    struct ibv_sge sge = piece(a, 10);
    struct ibv_send_wr wr = {.wr_id = 1, .opcode = IBV_WR_RDMA_WRITE, .sg_list = &sge, .num_sge = 1};
    wr.wr.rdma.remote_addr = place(b);
    post(a, &wr);
    send_from(a, 2, piece(a, 10), 0);
}

/* ---- a peer that does not answer ---- */

CASE(a_peer_that_is_gone, "1 retries, 2 flushed | 101 flushed | err", "| | gone", .timeout = 10, .retry_cnt = 1) {
    recv_into(a, 101, 10);
    v->destroy_qp(b->qp);
    b->qp = NULL;
    send_of(a, 1, 10);
    send_of(a, 2, 10);
}

CASE(a_peer_that_is_gone_and_is_read, "1 retries | | err", "| | gone", .timeout = 10, .retry_cnt = 1) {
    v->destroy_qp(b->qp);
    b->qp = NULL;
    read_from(a, 1, 10, b);
}

CASE(a_peer_that_is_not_ready, "1 retries | | err", "| | init", .timeout = 10, .retry_cnt = 1, .b_stays = IN_INIT) {
    send_of(a, 1, 10);
}

CASE(a_peer_that_may_only_receive, "1 send 10 | | rts", "| 101 recv 10 | rtr", .b_stays = IN_RTR) {
    recv_into(b, 101, 10);
    send_of(a, 1, 10);
}

CASE(a_peer_that_has_failed, "1 retries | | err", "| | err", .timeout = 10, .retry_cnt = 1, .b_stays = IN_ERR) {
    write_to(a, 1, 10, b);
}

CASE(a_peer_that_expects_an_earlier_packet, "1 retries | | err", "| 101 flushed | err", .timeout = 10, .retry_cnt = 1,
     .rq_psn = PSN - 3) {
    recv_into(b, 101, 10);
    send_of(a, 1, 10);
    usleep(50000);
    turn(b, IBV_QPS_ERR);
}

/* ---- flushing ---- */

CASE(what_is_posted_is_flushed, "1 flushed, 2 flushed, 3 flushed | 101 flushed, 102 flushed | err", "| | rts",
     .rnr_timer = 30) {
    recv_into(a, 101, 10);
    recv_into(a, 102, 10);
    send_of(a, 1, 10); /* waits for a receive */
    send_from(a, 2, piece(a, 10), 0);
    read_from(a, 3, 10, b);
    usleep(5000);
    turn(a, IBV_QPS_ERR);
}

CASE(what_has_completed_stays, "1 write 10 | 101 flushed | err", "| | rts") {
    recv_into(a, 101, 10);
    write_to(a, 1, 10, b);
    usleep(500000); /* it is over by then, also on a machine that has more to do; who asks whether it is takes the
                       completion */
    turn(a, IBV_QPS_ERR);
}

CASE(what_is_posted_after_the_failure_is_flushed, "1 flushed, 2 flushed | 101 flushed | err", "| | rts") {
    turn(a, IBV_QPS_ERR);
    send_of(a, 1, 10);
    read_from(a, 2, 10, b);
    recv_into(a, 101, 10);
}

CASE(reset_forgets, "| | reset", "| | rts", .rnr_timer = 30) {
    recv_into(a, 101, 10);
    send_of(a, 1, 10); /* waits for a receive */
    usleep(5000);
    turn(a, IBV_QPS_RESET);
}

CASE(again_after_reset, "2 send 20 | | rts", "| 102 recv 20 | rts") {
    struct how how = {.rnr_retry = 7};
    recv_into(b, 101, 10);
    turn(a, IBV_QPS_RESET);
    turn(b, IBV_QPS_RESET);
    bring(a, b, IBV_QPS_RTS, &how);
    bring(b, a, IBV_QPS_RTS, &how);
    recv_into(b, 102, 20);
    send_of(a, 2, 20);
}
