/* test_wild_heads.c - the beginning of a message, which comes with its announcement, and what a peer may say to it;
 * what is kept until its receive. HR_TEST_PROVIDER chooses the provider. */

#include "wild_rig.h"

enum { LEN = 100000, HEAD = 4096 };

#define NEEDS(cap) \
    if (!(conn_of(r, 0)->caps->flags & cap)) SKIP("the provider does not have " #cap)

static uint8_t byte_at(size_t i) { return (uint8_t)(i * 2654435761u >> 13); }

static uint8_t *message(void) {
    uint8_t *buf = malloc(LEN);
    for (size_t i = 0; i < LEN; i++) buf[i] = byte_at(i);
    return buf;
}

static void check_message(const uint8_t *buf) {
    for (size_t i = 0; i < LEN; i++)
        if (buf[i] != byte_at(i)) {
            fprintf(stderr, "byte %zu\n", i);
            CHECK_EQ(buf[i], byte_at(i));
            break;
        }
}

static uint64_t held(struct rig *r) {
    struct hr_conn *conn = conn_of(r, 0);
    hr_lock(r->e.engine);
    uint64_t held = conn->held - conn->owed_credit;
    hr_unlock(r->e.engine);
    return held;
}

static size_t spare_bytes(struct rig *r) {
    hr_lock(r->e.engine);
    size_t n = r->e.engine->spare_bytes;
    hr_unlock(r->e.engine);
    return n;
}

/* --- the engine receives
 * ------------------------------------------------------------------------------------------------------------ */

static void announce(struct rig *r, size_t head, uint64_t tag) {
    struct hr_hdr_long m = {.h = HDR(RTS, .tag = tag, .sreq = WILD_SREQ), .size = LEN};
    for (size_t i = 0; i < head; i++) r->wild[0]->payload[i] = byte_at(i);
    CHECK(say_in_order(r, 0, &m, head));
}

static void say_rest(struct rig *r, uint32_t id, size_t from) {
    struct wild *w = r->wild[0];
    for (size_t at = from, n; at < LEN; at += n) {
        n = at_most(r, LEN - at < 30000 ? LEN - at : 30000);
        for (size_t i = 0; i < n; i++) w->payload[i] = byte_at(at + i);
        CHECK(say(r, HDR(SEG, .rreq = id, .aux = at), n));
    }
}

static void begun(struct rig *r, int early) {
    NEEDS(HR_CAP_MAP);
    struct hr_request req;
    uint8_t *buf = calloc(1, LEN);
    if (early) announce(r, HEAD, 2), passed_over(r);
    CHECK_EQ(receive(r, buf, LEN, 1, 2, &req), HR_OK);
    if (!early) announce(r, HEAD, 2);
    UNTIL(r, heard(r, HR_MSG_CTS));
    CHECK_EQ(heard(r, HR_MSG_CTS)->h.aux, HEAD);
    say_rest(r, heard(r, HR_MSG_CTS)->h.rreq, HEAD);
    UNTIL(r, is_done(&req));
    CHECK_EQ(req.status, HR_OK);
    CHECK_EQ(req.nbytes, LEN);
    check_message(buf);
    CHECK_EQ(held(r), 0);
    free(buf);
}
ATTACK(a_beginning_is_not_called_for_again) { begun(r, 0); }
ATTACK(a_beginning_that_came_before_its_receive_is_kept) { begun(r, 1); }

ATTACK(a_beginning_that_comes_twice) {
    NEEDS(HR_CAP_MAP);
    struct hr_request req;
    uint8_t *buf = calloc(1, LEN);
    CHECK_EQ(receive(r, buf, LEN, 1, 2, &req), HR_OK);
    announce(r, HEAD, 2);
    UNTIL(r, heard(r, HR_MSG_CTS));
    say(r, HDR(SEG, .rreq = heard(r, HR_MSG_CTS)->h.rreq, .aux = 0), HEAD);
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    free(buf);
}

static void too_long(struct rig *r, uint64_t size, size_t head) {
    struct hr_request req;
    uint8_t *buf = calloc(1, LEN);
    struct hr_hdr_long m = {.h = HDR(RTS, .tag = 2, .sreq = WILD_SREQ), .size = size};
    memset(r->wild[0]->payload, 0xff, PAYLOAD);
    CHECK_EQ(receive(r, buf, LEN, 1, 2, &req), HR_OK);
    CHECK(say_in_order(r, 0, &m, at_most(r, head)));
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    for (size_t i = 0; i < LEN; i++)
        if (buf[i]) {
            CHECK_EQ(buf[i], 0);
            break;
        }
    free(buf);
}
ATTACK(a_beginning_that_is_all) { too_long(r, HEAD, HEAD); }
ATTACK(a_beginning_that_is_more_than_all) { too_long(r, 64, HEAD); }
ATTACK(a_beginning_of_nothing) { too_long(r, 0, HEAD); }

/* The receive that reduces comes behind a loan. */
ATTACK(a_beginning_that_ends_within_an_element) {
    NEEDS(HR_CAP_MAP);
    struct hr_program *p = program_of_rank_0();
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    struct hr_mem mem;
    struct hr_hdr_long loan = {.h = HDR(RTS, .tag = coll_tag(0, 0), .aux = SIG, .sreq = WILD_SREQ),
                               .size = ELEMENTS * 4},
                       m = {.h = HDR(RTS, .tag = coll_tag(0, 1), .aux = SIG, .sreq = WILD_SREQ + 1),
                            .size = ELEMENTS * 4};
    float *x = calloc(ELEMENTS, sizeof *x);
    show_ledger(r, 0, LEDGER_BYTES);
    loan.h.flags = HR_HDR_DESC;
    void *mine = lend(r, 0, ELEMENTS * 4, &mem, &loan.desc);
    CHECK_EQ(hr_run(r->comms[0], p, x, x, HR_FLOAT32, HR_SUM, SIG, &req), HR_OK);
    CHECK(say_in_order(r, 0, &loan, 0));
    CHECK(say_in_order(r, 0, &m, HEAD + 2));
    cut_off(r);
    UNTIL(r, is_done(&req));
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    take_back(r, 0, mine, &mem);
    hr_program_put(p);
    free(x);
}

/* What was never matched costs as much as it brought, and its place comes back. */
ATTACK(a_beginning_that_is_withdrawn) {
    struct hr_request req;
    uint8_t *buf = calloc(1, LEN);
    for (int i = 0; i < 1100; i++) { /* more than all credit */
        announce(r, HEAD, 2);
        CHECK(say(r, HDR(CANCEL, .tag = 2, .sreq = WILD_SREQ), 0));
        passed_over(r);
        CHECK_EQ(held(r), 0);
    }
    CHECK_EQ(receive(r, buf, 8, 1, 2, &req), HR_OK);
    CHECK(say_eager(r, 2, 8));
    UNTIL(r, is_done(&req));
    CHECK_EQ(req.status, HR_OK);
    free(buf);
}
/* Withdrawn before its turn: its place is passed over when that has come. */
ATTACK(a_beginning_that_is_withdrawn_before_its_turn) {
    struct hr_hdr_long m = {.h = HDR(RTS, .tag = 2, .sreq = WILD_SREQ), .size = LEN},
                       first = {.h = HDR(EAGER, .tag = 2)};
    struct hr_request req;
    uint8_t got = 0;
    m.h.bucket = first.h.bucket = hr_match_bucket(WILD_COMM, 2);
    m.h.order = 1;
    CHECK(wild_say(r, 0, &m, sizeof m, HEAD));
    CHECK(say(r, HDR(CANCEL, .tag = 2, .sreq = WILD_SREQ), 0));
    passed_over(r);
    CHECK(held(r) >= HEAD);
    CHECK(wild_say(r, 0, &first, sizeof first.h, 1));
    CHECK_EQ(receive(r, &got, 1, 1, 2, &req), HR_OK);
    UNTIL(r, is_done(&req));
    CHECK_EQ(req.status, HR_OK);
    CHECK_EQ(held(r), 0);
}

/* Early messages that are free again leave their room to others, of any such length, and not more than there may be. */
ATTACK(early_messages_leave_their_room_to_the_next) {
    static const size_t lens[] = {HR_SPARE_MIN, 20000, 5000, PAYLOAD, 64};
    enum { N = 12 };
    uint8_t *buf = malloc(PAYLOAD);
    CHECK(HR_SPARE_ROOM << (HR_SPARES - 1) >= r->wild[0]->domain->caps.eager_max);
    for (int round = 0; round < 15; round++) {
        size_t len = at_most(r, lens[round / 3]), before = spare_bytes(r), room = HR_SPARE_ROOM, wrong = 0;
        while (room < len) room *= 2;
        for (uint8_t k = 0; k < N; k++) {
            memset(r->wild[0]->payload, 16 * round + k, len);
            CHECK(say_eager(r, 2, len));
            passed_over(r); /* its payload may be the provider's until then */
        }
        size_t taken = before - spare_bytes(r);
        CHECK(len < HR_SPARE_MIN ? taken == 0 : taken <= N * room && taken % room == 0);
        if (round % 3 && len >= HR_SPARE_MIN) CHECK(taken > 0);
        for (uint8_t k = 0; k < N; k++) {
            struct hr_request req;
            memset(buf, 0, len);
            CHECK_EQ(receive(r, buf, len, 1, 2, &req), HR_OK);
            UNTIL(r, is_done(&req));
            for (size_t i = 0; i < len; i++) wrong += buf[i] != (uint8_t)(16 * round + k);
        }
        CHECK_EQ(wrong, 0);
        CHECK(spare_bytes(r) <= HR_SPARE_MOST);
    }
    free(buf);
}

/* What many short ones have left is given up for a long one. */
ATTACK(short_early_messages_do_not_take_all_room) {
    enum { N = 180 }; /* more than there may be spares of, and within the least credit */
    static const size_t lens[] = {4096, 5000};
    struct hr_request req;
    uint8_t *buf = malloc(PAYLOAD);
    size_t len = at_most(r, PAYLOAD), kept = 0;
    while (HR_SPARE_ROOM << kept < len) kept++;
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < N; i++) CHECK(say_eager(r, 2, lens[k]));
        passed_over(r);
        for (int i = 0; i < N; i++) {
            CHECK_EQ(receive(r, buf, PAYLOAD, 1, 2, &req), HR_OK);
            UNTIL(r, is_done(&req));
        }
    }
    CHECK(spare_bytes(r) > HR_SPARE_MOST - len); /* no room for another */
    CHECK(say_eager(r, 2, len));
    passed_over(r);
    CHECK_EQ(receive(r, buf, PAYLOAD, 1, 2, &req), HR_OK);
    UNTIL(r, is_done(&req));
    hr_lock(r->e.engine);
    CHECK(!hr_list_empty(&r->e.engine->spare[kept]));
    hr_unlock(r->e.engine);
    CHECK(spare_bytes(r) <= HR_SPARE_MOST);
    free(buf);
}

/* --- the engine sends
 * --------------------------------------------------------------------------------------------------------------- */

/* One message, called for in segments: the next begins with its announcement. The latter; sent: of its beginning. */
static struct hr_hdr_long *send_two(struct rig *r, const uint8_t *buf, struct hr_request *req, size_t *sent_p) {
    struct wild *w = r->wild[0];
    struct hr_conn *conn = conn_of(r, 0);
    hr_lock(r->e.engine);
    ((struct hr_caps *)(uintptr_t)conn->caps)->flags |= HR_CAP_RELAYS; /* as where each rank has a core */
    hr_unlock(r->e.engine);
    w->into = calloc(1, LEN);
    for (int i = 0; i < 2; i++) {
        w->nheard = 0;
        w->got = 0;
        CHECK_EQ(send_big(r, buf, LEN, req), HR_OK);
        UNTIL(r, heard(r, HR_MSG_RTS));
        *sent_p = w->got;
        if (i) break;
        CHECK_EQ(w->got, 0); /* it is not known yet what the peer makes of such a message */
        struct hr_hdr_long cts = {.h = HDR(CTS, .sreq = heard(r, HR_MSG_RTS)->h.sreq, .rreq = 9)};
        CHECK(wild_say(r, 0, &cts, sizeof cts, 0));
        UNTIL(r, is_done(req) && w->got == LEN);
    }
    return heard(r, HR_MSG_RTS);
}

static void answered(struct rig *r, int64_t taken) {
    NEEDS(HR_CAP_FILLS);
    struct wild *w = r->wild[0];
    struct hr_request req;
    uint8_t *buf = message();
    size_t sent;
    struct hr_hdr_long *rts = send_two(r, buf, &req, &sent);
    CHECK(sent > 0 && sent < LEN);
    uint64_t aux = taken < 0 ? sent : (uint64_t)taken;
    struct hr_hdr_long cts = {.h = HDR(CTS, .sreq = rts->h.sreq, .rreq = 9, .aux = aux)};
    if (!aux) memset(w->into, 0, LEN);
    CHECK(wild_say(r, 0, &cts, sizeof cts, 0));
    if (aux && aux != sent) {
        cut_off(r);
        CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    } else {
        UNTIL(r, is_done(&req) && w->got == LEN + (aux ? 0 : sent));
        CHECK_EQ(req.status, HR_OK);
        check_message(w->into);
    }
    free(w->into);
    w->into = NULL;
    free(buf);
}
ATTACK(the_rest_of_what_has_begun_follows) { answered(r, -1); }
ATTACK(a_beginning_that_was_not_taken_is_sent_again) { answered(r, 0); }
ATTACK(a_beginning_that_is_said_to_be_longer) { answered(r, LEN); }
ATTACK(a_beginning_that_is_said_to_be_shorter) { answered(r, 64); }

/* Who does not want the segments is sent no more beginnings, until it calls for some again. */
ATTACK(no_beginning_for_who_reads) {
    NEEDS(HR_CAP_FILLS);
    struct wild *w = r->wild[0];
    struct hr_conn *conn = conn_of(r, 0);
    struct hr_request req, next;
    uint8_t *buf = message();
    size_t sent;
    struct hr_hdr_long *rts = send_two(r, buf, &req, &sent);
    CHECK(sent > 0);
    CHECK_EQ(send_big(r, buf, LEN, &next), HR_OK); /* one at a time */
    UNTIL(r, w->nheard == 2);
    CHECK_EQ(w->got, sent);
    uint32_t second = w->heard[1].h.sreq;
    CHECK(say(r, HDR(FIN, .rreq = rts->h.sreq), 0));
    CHECK(say(r, HDR(FIN, .rreq = second), 0));
    UNTIL(r, is_done(&req) && is_done(&next));
    w->nheard = 0;
    CHECK_EQ(send_big(r, buf, LEN, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    CHECK_EQ(w->got, sent);
    CHECK(say(r, HDR(FIN, .rreq = heard(r, HR_MSG_RTS)->h.sreq), 0));
    UNTIL(r, is_done(&req));
    hr_lock(r->e.engine);
    CHECK_EQ(conn->reading.heads, 0);
    hr_unlock(r->e.engine);
    free(w->into);
    w->into = NULL;
    free(buf);
}

/* Given up when its beginning has left: the peer hears of it, and the next one begins anew. */
ATTACK(a_message_that_is_given_up_after_its_beginning) {
    NEEDS(HR_CAP_FILLS);
    struct wild *w = r->wild[0];
    struct hr_request req;
    uint8_t *buf = message();
    size_t sent;
    uint32_t sreq = send_two(r, buf, &req, &sent)->h.sreq;
    CHECK(sent > 0);
    hr_cancel(r->e.engine, &req, HR_ERR_CANCELED);
    CHECK_EQ(req.status, HR_ERR_CANCELED);
    UNTIL(r, w->last.h.kind == HR_MSG_CANCEL && w->last.h.sreq == sreq);
    struct hr_hdr_long late = {.h = HDR(CTS, .sreq = sreq, .rreq = 9, .aux = sent)};
    CHECK(wild_say(r, 0, &late, sizeof late, 0));
    passed_over(r);
    CHECK_EQ(w->got, sent); /* nothing of what is not its own any more */
    w->nheard = 0;
    w->got = 0;
    memset(w->into, 0, LEN);
    CHECK_EQ(send_big(r, buf, LEN, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    CHECK_EQ(w->got, sent);
    struct hr_hdr_long cts = {.h = HDR(CTS, .sreq = heard(r, HR_MSG_RTS)->h.sreq, .rreq = 9, .aux = sent)};
    CHECK(wild_say(r, 0, &cts, sizeof cts, 0));
    UNTIL(r, is_done(&req) && w->got == LEN);
    CHECK_EQ(req.status, HR_OK);
    check_message(w->into);
    free(w->into);
    w->into = NULL;
    free(buf);
}
