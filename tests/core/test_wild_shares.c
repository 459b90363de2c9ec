/* test_wild_shares.c - a peer that keeps to no rule where both ends copy, or a result is put back. HR_TEST_PROVIDER
 * chooses the provider. */

#include "wild_rig.h"

enum { LEN = 1 << 20 };

static uint8_t *memory(void) {
    uint8_t *buf = hr_arena_alloc(LEN, HR_ARENA_WRITABLE_BY_PEERS);
    memset(buf, 3, LEN);
    return buf;
}

/* A call for help with what the engine sends. */
static void call(struct rig *r, uint64_t from, uint64_t size, int twice, int right) {
    struct hr_request req;
    struct hr_mem mem;
    uint8_t *buf = memory();
    show_ledger(r, 0, LEDGER_BYTES);
    CHECK_EQ(send_big(r, buf, LEN, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    struct hr_hdr_long help = {.h = HDR(HELP, .sreq = heard(r, HR_MSG_RTS)->h.sreq, .rreq = 9, .aux = from),
                               .size = size};
    void *mine = lend(r, 0, LEN, &mem, &help.desc); /* read-only: nobody is helped */
    for (int i = 0; i <= twice; i++) CHECK(wild_say(r, 0, &help, sizeof help, 0));
    if (right && conn_of(r, 0)->caps->flags & HR_CAP_MAP) {
        passed_over(r);
        CHECK(say(r, HDR(FIN, .flags = HR_HDR_OPEN, .rreq = help.h.sreq), 0)); /* nothing was open: as any other */
        UNTIL(r, is_done(&req));
        CHECK_EQ(req.status, HR_OK);
        CHECK(!(req.flags & HR_REQ_RETURNED));
    } else {
        cut_off(r);
        CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    }
    take_back(r, 0, mine, &mem);
    hr_arena_free(buf);
}
ATTACK(a_call_for_help_where_the_engine_may_not_write) { call(r, 0, LEN, 0, 1); }
/* Where it may: twice, with nothing, and then as if it had not been asked. */
static void call_where_it_may(struct rig *r, uint64_t size, int calls, int cts) {
    struct hr_request req;
    struct hr_mem mem;
    uint8_t *buf = memory();
    if (!(conn_of(r, 0)->caps->flags & HR_CAP_MAP_WRITE)) SKIP("the provider does not have HR_CAP_MAP_WRITE");
    show_ledger(r, 0, LEDGER_BYTES);
    CHECK_EQ(send_big(r, buf, LEN, &req), HR_OK);
    UNTIL(r, heard(r, HR_MSG_RTS));
    uint32_t sreq = heard(r, HR_MSG_RTS)->h.sreq;
    struct hr_hdr_long help = {.h = HDR(HELP, .sreq = sreq, .rreq = 9), .size = size},
                       segments = {.h = HDR(CTS, .sreq = sreq, .rreq = 9)};
    void *mine = lend_for(r, 0, LEN, HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_MAP, &mem, &help.desc);
    for (int i = 0; i < calls; i++) wild_say(r, 0, &help, sizeof help, 0);
    if (cts) wild_say(r, 0, &segments, sizeof segments, 0);
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    take_back(r, 0, mine, &mem);
    hr_arena_free(buf);
}
ATTACK(two_calls_for_help_where_the_engine_may_write) { call_where_it_may(r, LEN, 2, 0); }
ATTACK(a_call_for_help_with_no_byte) { call_where_it_may(r, 0, 2, 0); }
ATTACK(a_call_for_segments_after_one_for_help) { call_where_it_may(r, LEN, 1, 1); }
ATTACK(a_call_for_help_beyond_what_is_sent) { call(r, 4096, LEN, 0, 0); }
ATTACK(a_call_for_help_far_beyond_what_is_sent) { call(r, UINT64_MAX - 5, 4096, 0, 0); }
ATTACK(two_calls_for_help) { call(r, 0, LEN, 1, 0); }
ATTACK(a_call_for_help_with_nothing) {
    struct hr_hdr_long help = {.h = HDR(HELP, .sreq = 77, .rreq = 9), .size = 1};
    CHECK(wild_say(r, 0, &help, sizeof help, 0));
    passed_over(r);
    CHECK(say(r, HDR(HELP, .sreq = 77), 0)); /* and without its second half */
    cut_off(r);
}
ATTACK(help_with_nothing) {
    CHECK(say(r, HDR(HELPED, .rreq = 77, .aux = 3), 0));
    passed_over(r);
}

/* Help with what the engine receives: as it was not asked, or more than there is. */
static void helped(struct rig *r, uint64_t len, uint64_t count) {
    struct hr_request req;
    struct hr_mem mem;
    uint8_t *buf = memory();
    if (!(conn_of(r, 0)->caps->flags & HR_CAP_MAP)) SKIP("the provider does not have HR_CAP_MAP");
    struct hr_hdr_long m = {.h = HDR(RTS, .flags = HR_HDR_DESC, .tag = 2, .sreq = WILD_SREQ), .size = len};
    show_ledger(r, 0, LEDGER_BYTES);
    void *mine = lend(r, 0, len, &mem, &m.desc);
    CHECK_EQ(receive(r, buf, len, 1, 2, &req), HR_OK);
    r->wild[0]->ledger[0] = 0; /* so that it does not end */
    CHECK(say_in_order(r, 0, &m, 0));
    passed_over(r);
    for (uint32_t id = 0; id < 4096 && state_of(r, 0) == HR_OK; id++) /* one of them is the transfer's */
        say(r, HDR(HELPED, .rreq = id % 64 + ((id / 64 + 1) << HR_ID_INDEX_BITS), .aux = count), 0);
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    take_back(r, 0, mine, &mem);
    hr_arena_free(buf);
}
ATTACK(help_that_was_not_asked_for) { helped(r, 100000, 1); }
ATTACK(more_help_than_there_is_to_do) { helped(r, LEN, 1000); }
ATTACK(immeasurable_help) { helped(r, LEN, UINT64_MAX); }
