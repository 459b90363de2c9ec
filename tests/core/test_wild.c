/* test_wild.c - a peer that keeps to no rule: one attack at a time.
 *
 * The engine must not crash, nor touch memory that was not posted, nor grow without bound; it ends the connection with
 * HR_ERR_PROTOCOL or passes the nonsense over, and its other connections go on. Run it under the sanitizers:
 * HR_TEST_PROVIDER chooses the provider.
 */

#include "wild_rig.h"

/* --- headers
 * ------------------------------------------------------------------------------------------------------------------------
 */

ATTACK(a_header_that_is_too_short) {
    uint64_t word = HR_MSG_EAGER;
    CHECK(wild_say(r, 0, &word, sizeof word, 100));
    cut_off(r);
}
ATTACK(a_kind_that_is_none) {
    CHECK(say(r, (struct hr_hdr){.kind = 200}, 0));
    cut_off(r);
}
ATTACK(a_rendezvous_without_its_second_half) {
    CHECK(say(r, HDR(RTS, .sreq = 1), 0));
    cut_off(r);
}
ATTACK(a_bucket_beyond_the_last) {
    CHECK(say(r, HDR(EAGER, .bucket = HR_BUCKETS), 8));
    cut_off(r);
}
ATTACK(the_same_place_in_the_order_twice) {
    CHECK(say(r, HDR(EAGER, .bucket = 3, .order = 1), 8));
    CHECK(say(r, HDR(EAGER, .bucket = 3, .order = 1), 8));
    passed_over(r); /* nothing is known yet: their turn has not come */
    CHECK(say(r, HDR(EAGER, .bucket = 3, .order = 0), 8));
    cut_off(r);
}
ATTACK(a_place_that_is_past) {
    CHECK(say_eager(r, 1, 8));
    CHECK(say(r, HDR(EAGER, .tag = 1, .bucket = hr_match_bucket(WILD_COMM, 1), .order = 0), 8));
    cut_off(r);
}
ATTACK(credit_that_nobody_owes) {
    CHECK(say(r, HDR(CREDIT, .credit = UINT32_MAX), 0)); /* less than before: an old message, if anything */
    passed_over(r);
    CHECK(say(r, HDR(CREDIT, .credit = 1), 0));
    cut_off(r);
}
ATTACK(acknowledgements_of_nothing) {
    for (uint32_t i = 0; i < 100; i++) CHECK(say(r, HDR(CREDIT, .ack = i << 30 | i), 0));
    for (int i = 0; i < 100; i++) CHECK(say(r, HDR(ECHO, .aux = UINT64_MAX - (uint64_t)i * i), 0));
    passed_over(r);
}
ATTACK(a_farewell_twice) {
    struct hr_request any, one;
    char a[8] = {0}, b[8] = {0};
    CHECK_EQ(receive(r, a, sizeof a, HR_ANY_SOURCE, 1, &any), HR_OK);
    CHECK_EQ(receive(r, b, sizeof b, 1, 1, &one), HR_OK);
    for (int i = 0; i < 3; i++) say(r, HDR(BYE), 0);
    say_eager(r, 1, 8); /* nothing counts any more */
    UNTIL(r, is_done(&one) && is_done(&any));
    CHECK_EQ(one.status, HR_ERR_CLOSED);
    CHECK_EQ(any.status, HR_ERR_CLOSED);
    hr_lock(r->e.engine);
    CHECK_EQ(r->comms[0]->nclosed, 1);
    hr_unlock(r->e.engine);
}

/* --- memory
 * -------------------------------------------------------------------------------------------------------------------------
 */

/* What nobody asked for lies here up to the credit and not a message further; what is said beyond it, kernels keep. */
static void cut_off_at(struct rig *r, struct hr_conn *conn, uint64_t messages) {
    cut_off(r);
    hr_lock(r->e.engine);
    CHECK(conn->rx_msgs > messages && conn->rx_msgs <= messages + 3);
    hr_unlock(r->e.engine);
}
ATTACK(more_than_the_credit) {
    struct hr_conn *conn = conn_of(r, 0);
    memset(r->wild[0]->payload, 7, PAYLOAD);
    for (uint64_t said = 0; said < 1000000 && !r->wild[0]->lost && say_eager(r, said % 50, 1000); said++) continue;
    cut_off_at(r, conn, hr_credit_max(conn) / (HR_EAGER_COST + 1000));
}
ATTACK(headers_beyond_the_credit) {
    struct hr_conn *conn = conn_of(r, 0);
    for (uint32_t said = 0; said < 1000000 && !r->wild[0]->lost && say_rts(r, 1, 1u << 20, said); said++) continue;
    cut_off_at(r, conn, hr_credit_max(conn) / HR_EAGER_COST);
}
ATTACK(places_far_in_the_future) {
    struct hr_conn *conn = conn_of(r, 0);
    for (uint32_t said = 0; said < 1000000 && !r->wild[0]->lost; said++)
        if (!say(r, HDR(EAGER, .bucket = (uint8_t)(said % HR_BUCKETS), .order = 1000000 + said * 3), 100)) break;
    cut_off_at(r, conn, hr_credit_max(conn) / (HR_EAGER_COST + 100));
}
ATTACK(a_storm_of_skips) {
    struct hr_conn *conn = conn_of(r, 0);
    for (uint32_t said = 0; said < 1000000 && !r->wild[0]->lost; said++)
        if (!say(r, HDR(SKIP, .bucket = (uint8_t)(said % HR_BUCKETS), .order = 1 + said * 3), 0)) break;
    cut_off_at(r, conn, hr_credit_max(conn) / HR_EAGER_COST);
}
ATTACK(a_skip_of_an_absurd_length) {
    CHECK(say(r, HDR(SKIP, .aux = 1ull << 63), 0));
    cut_off(r);
}
ATTACK(withdrawals_that_keep_their_place) { /* RTS before its turn, then CANCEL: a place stays, and costs */
    struct hr_conn *conn = conn_of(r, 0);
    uint8_t bucket = hr_match_bucket(WILD_COMM, 1);
    for (uint32_t said = 0; said < 1000000 && !r->wild[0]->lost; said++) {
        struct hr_hdr_long m = {.h = HDR(RTS, .tag = 1, .bucket = bucket, .order = 1 + said, .sreq = said)};
        if (!wild_say(r, 0, &m, sizeof m, 0) || !say(r, HDR(CANCEL, .tag = 1, .sreq = said), 0)) break;
    }
    cut_off_at(r, conn, 2 * hr_credit_max(conn) / HR_EAGER_COST);
}
ATTACK(breaks_of_what_is_not_there) {
    for (uint64_t i = 0; i < 20000; i++)
        CHECK(say(r, (struct hr_hdr){.kind = HR_MSG_BREAK, .comm = 1000000 + i, .status = HR_ERR_BROKEN}, 0));
    passed_over(r);
    CHECK(conn_of(r, 0)->nbreaks <= 1024);
}
ATTACK(questions_without_listening) {
    int said = 0;
    if (!strcmp(world_provider(), "verbs")) SKIP("the provider took 64 messages, no more, of one who does not listen");
    r->wild[0]->deaf = 1;
    while (said < 1000000 && say(r, HDR(PROBE), 0))
        if (++said % 64 == 0) { /* what it sends is read at once */
            turn(r);
            if (state_of(r, 0) != HR_OK) break;
        }
    r->wild[0]->deaf = 0;
    cut_off(r);
    CHECK(said < 1000000);
}

/* --- communicators
 * ------------------------------------------------------------------------------------------------------------------------
 */

ATTACK(a_break_that_blames_nobody) {
    CHECK(say(r, HDR(BREAK, .tag = 12345, .status = HR_ERR_PEER_LOST, .flags = 255), 0));
    cut_off(r);
}
ATTACK(a_break_of_a_status_and_phase_that_are_none) {
    struct hr_comm_state state;
    CHECK(say(r, HDR(BREAK, .tag = 1, .status = -120, .flags = 255), 0));
    UNTIL(r, state_of(r, 0) != HR_OK);
    hr_comm_state(r->comms[0], &state);
    CHECK_EQ(state.status, -120);
    CHECK(hr_status_text((hr_status)state.status) && hr_phase_name((enum hr_phase)state.phase));
}
ATTACK(a_break_of_others) {
    CHECK(say(r, (struct hr_hdr){.kind = HR_MSG_BREAK, .comm = DECENT_COMM, .status = HR_ERR_PEER_LOST}, 0));
    cut_off(r);
}
ATTACK(a_message_into_the_communicator_of_others) {
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    uint32_t x = 0, y = 4711;
    struct hr_hdr_long m = {.h = {.kind = HR_MSG_EAGER, .comm = DECENT_COMM, .tag = 9}};
    CHECK_EQ(hr_irecv(r->e.comm, &x, sizeof x, HR_ANY_SOURCE, 9, &req), HR_OK);
    CHECK(say_in_order(r, 0, &m, 4));
    passed_over(r);
    CHECK(!is_done(&req));
    CHECK_EQ(send_to(&r->decent, &y, sizeof y, 0, 9), HR_OK);
    CHECK_EQ(finish(&r->e, &req, 5), HR_OK);
    CHECK_EQ(req.peer, 1);
    CHECK_EQ(x, 4711);
    CHECK_EQ(hr_irecv(r->e.comm, &x, sizeof x, HR_ANY_SOURCE, 9, &req), HR_OK); /* nor from where it lies */
    CHECK(!is_done(&req));
    hr_cancel(r->e.engine, &req, HR_ERR_CANCELED);
}

/* Nor can it spoil their collectives, past or to come. */
ATTACK(a_collective_of_others) {
    struct hr_hdr_long m = {.h = {.kind = HR_MSG_EAGER, .comm = DECENT_COMM, .tag = HR_COLL_TAG}};
    hr_lock(r->e.engine);
    r->e.comm->run_seq = 3; /* as if some had been run */
    hr_unlock(r->e.engine);
    CHECK(say_in_order(r, 0, &m, 4));
    cut_off(r);
}

/* --- transfers
 * ------------------------------------------------------------------------------------------------------------------------
 */

ATTACK(answers_to_what_was_never_asked) {
    static const uint32_t ids[] = {0, 1, 63, 64, 1u << 20, (1u << 20) + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        struct hr_hdr_long cts = {.h = HDR(CTS, .sreq = ids[i], .rreq = 7), .size = 0};
        CHECK(wild_say(r, 0, &cts, sizeof cts, 0));
        CHECK(say(r, HDR(SEG, .rreq = ids[i]), 5000));
        CHECK(say(r, HDR(FIN, .rreq = ids[i]), 0));
        CHECK(say(r, HDR(FIN, .rreq = ids[i], .status = HR_ERR_CANCELED), 0));
        CHECK(say(r, HDR(CANCEL, .rreq = ids[i]), 0));
        CHECK(say(r, HDR(CANCEL, .sreq = ids[i]), 0));
    }
    passed_over(r);
}

/* The transfers of two others have ids that can be guessed. */
ATTACK(answers_in_the_name_of_others) {
    size_t n = 2000000;
    uint8_t *out = malloc(n), *in = calloc(1, n), *there = malloc(n), *back = calloc(1, n);
    struct hr_request send = {.priority = HR_PRIORITY_DEFAULT}, recv = send, give = send, take = send;
    memset(out, 0x5a, n);
    memset(there, 0x3c, n);
    CHECK_EQ(hr_isend(r->e.comm, out, n, 1, 4, &send), HR_OK);
    CHECK_EQ(hr_irecv(r->e.comm, in, n, 1, 5, &recv), HR_OK);
    CHECK_EQ(hr_isend(r->decent.comm, there, n, 0, 5, &give), HR_OK);
    for (uint32_t i = 0; i < 64; i++) {
        uint32_t id = (1u << 20) + i;
        struct hr_hdr_long cts = {.h = HDR(CTS, .sreq = id, .rreq = 7)};
        CHECK(wild_say(r, 0, &cts, sizeof cts, 0));
        CHECK(say(r, HDR(SEG, .rreq = id), 100));
        CHECK(say(r, HDR(FIN, .rreq = id), 0));
        CHECK(say(r, HDR(CANCEL, .rreq = id), 0));
        CHECK(say(r, HDR(CANCEL, .sreq = id, .tag = 5), 0));
    }
    passed_over(r);
    CHECK_EQ(hr_irecv(r->decent.comm, back, n, 0, 4, &take), HR_OK);
    CHECK_EQ(finish(&r->e, &recv, 10), HR_OK);
    CHECK_EQ(finish(&r->decent, &take, 10), HR_OK);
    CHECK_EQ(finish(&r->e, &send, 10), HR_OK);
    CHECK_EQ(finish(&r->decent, &give, 10), HR_OK);
    CHECK_MEM(back, out, n);
    CHECK_MEM(in, there, n);
    free(out);
    free(in);
    free(there);
    free(back);
}

ATTACK(a_size_that_cannot_be) {
    struct hr_request req;
    char *buf = calloc(1, 100);
    for (int i = 0; i < 3; i++) {
        uint64_t size = i == 0 ? 1ull << 63 : i == 1 ? UINT64_MAX : 101;
        CHECK_EQ(receive(r, buf, 100, 1, 2, &req), HR_OK);
        CHECK(say_rts(r, 2, size, 17));
        UNTIL(r, is_done(&req));
        CHECK_EQ(req.status, HR_ERR_TRUNCATED);
        CHECK_EQ(req.nbytes, size);
    }
    passed_over(r);
    free(buf);
}

/* The engine's receive of 100000 bytes in segments or by writes; the CTS. */
static struct hr_hdr_long *start_transfer(struct rig *r, uint8_t *buf, struct hr_request *req) {
    CHECK_EQ(receive(r, buf, 100000, 1, 2, req), HR_OK);
    CHECK(say_rts(r, 2, 100000, 17));
    UNTIL(r, heard(r, HR_MSG_CTS));
    REQUIRE(heard(r, HR_MSG_CTS));
    return heard(r, HR_MSG_CTS);
}

ATTACK(segments_that_do_not_fit) {
    struct hr_request req;
    uint8_t *buf = calloc(1, 100000);
    uint32_t id = start_transfer(r, buf, &req)->h.rreq;
    memset(r->wild[0]->payload, 0xff, PAYLOAD);
    size_t piece = at_most(r, 50000);
    say(r, HDR(SEG, .rreq = id, .aux = 100000 - piece + 10000 % piece), piece);
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    for (int i = 0; i < 100000; i++)
        if (buf[i]) {
            CHECK_EQ(buf[i], 0);
            break;
        }
    free(buf);
}
ATTACK(segments_that_are_too_many) {
    struct hr_request req;
    uint8_t *buf = calloc(1, 100000);
    struct hr_hdr_long *cts = start_transfer(r, buf, &req);
    size_t piece = at_most(r, 50000);
    for (uint64_t at = 0; at < 200000; at += piece)
        if (!say(r, HDR(SEG, .rreq = cts->h.rreq, .aux = at), piece)) break;
    if (cts->h.flags & HR_HDR_DESC) { /* it was to be written */
        cut_off(r);
        CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    } else { /* those after the last are for nobody */
        passed_over(r);
        CHECK_EQ(req.status, HR_OK);
    }
    free(buf);
}
ATTACK(writes_that_do_not_fit) {
    struct hr_request req;
    uint8_t *buf = calloc(1, 100000);
    struct wild *w = r->wild[0];
    struct hr_hdr_long *cts = start_transfer(r, buf, &req);
    struct hr_rmem rmem;
    if (cts->h.flags & HR_HDR_DESC) {
        CHECK_EQ(w->ops->mem_import(w->ep, &cts->desc, &rmem), HR_OK);
        rmem.len = 1u << 30; /* the provider here believes it, the one there must not */
        static const struct {
            uint64_t offset, len, id;
        } writes[] = {{100000, 10, 1}, {99990, 20, 1}, {1 << 20, 50000, 0}};
        for (size_t i = 0; i < sizeof writes / sizeof *writes; i++) {
            struct hr_rma rma = {.local = w->payload,
                                 .len = writes[i].len,
                                 .remote = &rmem,
                                 .offset = writes[i].offset,
                                 .with_notify = 1,
                                 .value = writes[i].id ? cts->h.rreq : 999};
            UNTIL(r, w->lost || w->ops->post_write(w->ep, &rma) != HR_AGAIN);
        }
        /* right in memory, wrong in number: the whole of it twice */
        struct hr_rma rma = {
            .local = w->payload, .len = 60000, .remote = &rmem, .with_notify = 1, .value = cts->h.rreq};
        for (int i = 0; i < 2; i++) UNTIL(r, w->lost || w->ops->post_write(w->ep, &rma) != HR_AGAIN);
        if (!strcmp(world_provider(), "verbs")) { /* the device there saw it first */
            UNTIL(r, state_of(r, 0) != HR_OK);
            CHECK(hr_is_peer_error(state_of(r, 0)) && hr_is_peer_error((hr_status)req.status));
        } else {
            cut_off(r);
            CHECK(req.status == HR_ERR_PROTOCOL);
        }
    } else {
        hr_cancel(r->e.engine, &req, HR_ERR_CANCELED);
    }
    free(buf);
}
ATTACK(memory_that_is_shorter_than_promised) {
    struct hr_request req;
    uint8_t *buf = calloc(1, 100000);
    struct hr_mem mem;
    struct hr_hdr_long m = {.h = HDR(RTS, .flags = HR_HDR_DESC, .tag = 2, .sreq = WILD_SREQ), .size = 100000};
    show_ledger(r, 0, LEDGER_BYTES);
    void *mine = lend(r, 0, 4096, &mem, &m.desc);
    CHECK_EQ(receive(r, buf, 100000, 1, 2, &req), HR_OK);
    CHECK(say_in_order(r, 0, &m, 0));
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    take_back(r, 0, mine, &mem);
    free(buf);
}
/* The sender may take an offer back while it is read: what was read is then nobody's message. */
ATTACK(an_offer_that_stands_no_longer) {
    static const size_t lens[] = {20000, 1 << 20}; /* read at once, and piece by piece */
    if (!(conn_of(r, 0)->caps->flags & HR_CAP_MAP)) SKIP("the provider does not have HR_CAP_MAP");
    show_ledger(r, 0, LEDGER_BYTES);
    for (uint32_t i = 0; i < 2; i++) {
        struct hr_request req;
        struct hr_mem mem;
        uint8_t *buf = malloc(lens[i]), text[] = "the next";
        struct hr_hdr_long m = {.h = HDR(RTS, .flags = HR_HDR_DESC, .tag = 2, .sreq = WILD_SREQ + i), .size = lens[i]};
        void *mine = lend(r, 0, lens[i], &mem, &m.desc);
        r->wild[0]->ledger[i] = 0;
        CHECK_EQ(receive(r, buf, lens[i], 1, 2, &req), HR_OK);
        CHECK(say_in_order(r, 0, &m, 0));
        passed_over(r);
        for (int k = 0; k < 100; k++) turn(r);
        CHECK(!is_done(&req));
        CHECK(say(r, HDR(CANCEL, .tag = 2, .sreq = WILD_SREQ + i), 0));
        memcpy(r->wild[0]->payload, text, sizeof text);
        CHECK(say_eager(r, 2, sizeof text));
        UNTIL(r, is_done(&req));
        CHECK_EQ(req.status, HR_OK);
        CHECK_MEM(buf, text, sizeof text);
        take_back(r, 0, mine, &mem);
        free(buf);
    }
}
ATTACK(a_ledger_that_is_too_short) {
    show_ledger(r, 0, LEDGER_BYTES / 2);
    cut_off(r);
}
ATTACK(a_second_ledger) {
    struct hr_hdr_long m = {.h = HDR(LEDGER), .size = LEDGER_BYTES};
    struct hr_mem mem;
    show_ledger(r, 0, LEDGER_BYTES);
    void *mine = lend(r, 0, LEDGER_BYTES, &mem, &m.desc);
    passed_over(r);
    wild_say(r, 0, &m, sizeof m, 0);
    cut_off(r);
    take_back(r, 0, mine, &mem);
}
ATTACK(a_ledger_without_its_second_half) {
    CHECK(say(r, HDR(LEDGER), 0));
    cut_off(r);
}
ATTACK(descriptors_of_noise) {
    show_ledger(r, 0, LEDGER_BYTES);
    for (int i = 0; i < 200; i++) {
        struct hr_request req;
        uint8_t *buf = calloc(1, 50000);
        struct hr_hdr_long m = {.h = HDR(RTS, .flags = HR_HDR_DESC, .tag = 2, .sreq = WILD_SREQ), .size = 50000};
        uint64_t words[4];
        for (int j = 0; j < 4; j++)
            words[j] = (uint64_t)i * 0x9e3779b97f4a7c15ull >> (i % 5 * 13) ^ (uint64_t)j << (i % 60);
        memcpy(&m.desc, words, sizeof words);
        CHECK_EQ(receive(r, buf, 50000, 1, 2, &req), HR_OK);
        if (!say_in_order(r, 0, &m, 0)) i = 200;
        for (int j = 0; j < 4; j++) turn(r);
        hr_cancel(r->e.engine, &req, HR_ERR_CANCELED);
        free(buf);
    }
}

ATTACK(the_end_said_twice) {
    struct hr_request req;
    uint8_t *buf = calloc(1, 400000);
    CHECK_EQ(send_big(r, buf, 400000, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    uint32_t id = heard(r, HR_MSG_RTS)->h.sreq;
    for (int i = 0; i < 3; i++) CHECK(say(r, HDR(FIN, .rreq = id), 0));
    passed_over(r);
    CHECK_EQ(req.status, HR_OK);
    free(buf);
}
/* While segments or writes of it are with the provider, nobody else can say that the transfer has ended. */
ATTACK(the_end_said_in_the_middle) {
    struct hr_request req;
    size_t n = 64u << 20;
    uint8_t *buf = calloc(1, n);
    CHECK_EQ(send_big(r, buf, n, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    struct hr_hdr_long cts = {.h = HDR(CTS, .sreq = heard(r, HR_MSG_RTS)->h.sreq, .rreq = 9)};
    r->wild[0]->deaf = 1;
    CHECK(wild_say(r, 0, &cts, sizeof cts, 0));
    for (int i = 0; i < 200; i++) turn(r);
    CHECK(say(r, HDR(FIN, .rreq = cts.h.sreq), 0));
    UNTIL(r, state_of(r, 0) == HR_ERR_PROTOCOL);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    free(buf);
    r->wild[0]->deaf = 0;
}
ATTACK(asked_to_write_where_nothing_is) {
    struct hr_request req;
    uint8_t *buf = calloc(1, 400000);
    CHECK_EQ(send_big(r, buf, 400000, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    struct hr_hdr_long cts = {.h = HDR(CTS, .flags = HR_HDR_DESC, .sreq = heard(r, HR_MSG_RTS)->h.sreq, .rreq = 9)};
    memset(&cts.desc, 0x77, sizeof cts.desc);
    CHECK(wild_say(r, 0, &cts, sizeof cts, 0));
    for (int i = 0; i < 1000; i++) turn(r); /* refused here, or there */
    free(buf);
}
/* A send that is withdrawn by its receiver would be posted as a receive: into memory that is only read. */
ATTACK(a_withdrawal_of_the_engines_own_send) {
    struct hr_request req;
    static const uint8_t constant[400000];
    CHECK_EQ(send_big(r, constant, sizeof constant, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    CHECK(say(r, HDR(CANCEL, .rreq = heard(r, HR_MSG_RTS)->h.sreq), 0));
    say_eager(r, 3, 100);
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
}
