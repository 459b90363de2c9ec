/* test_wild_runs.c - a peer that keeps to no rule inside a collective. HR_TEST_PROVIDER chooses the provider. */

#include "wild_rig.h"

/* --- collectives
 * -----------------------------------------------------------------------------------------------------------------------
 */

/* Mapped and read in place over the length that the program has: it must be there. */
ATTACK(a_loan_that_is_too_short) {
    struct hr_program *p = program_of_rank_0();
    float *x = calloc(ELEMENTS, 4);
    struct hr_mem mem;
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    struct hr_hdr_long m = {.h = HDR(RTS, .flags = HR_HDR_DESC, .tag = coll_tag(0, 0), .aux = SIG, .sreq = WILD_SREQ),
                            .size = 4096};
    show_ledger(r, 0, LEDGER_BYTES);
    void *mine = lend(r, 0, 4096, &mem, &m.desc);
    CHECK_EQ(hr_run(r->comms[0], p, x, x, HR_FLOAT32, HR_SUM, SIG, &req), HR_OK);
    CHECK(say_in_order(r, 0, &m, 0));
    UNTIL(r, is_done(&req));
    CHECK_EQ(req.status, HR_ERR_MISMATCH);
    take_back(r, 0, mine, &mem);
    hr_program_put(p);
    free(x);
}
/* Nor may it be taken back while it is read, and the collective succeed. */
ATTACK(a_loan_that_is_taken_back) {
    if (!(conn_of(r, 0)->caps->flags & HR_CAP_MAP)) SKIP("the provider does not have HR_CAP_MAP");
    struct hr_program *p = program_of_rank_0();
    float *x = calloc(ELEMENTS, 4);
    struct hr_mem mem;
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    struct hr_hdr_long m = {.h = HDR(RTS, .flags = HR_HDR_DESC, .tag = coll_tag(0, 0), .aux = SIG, .sreq = WILD_SREQ),
                            .size = ELEMENTS * 4};
    show_ledger(r, 0, LEDGER_BYTES);
    void *mine = lend(r, 0, ELEMENTS * 4, &mem, &m.desc);
    r->wild[0]->ledger[0] = 0;
    CHECK_EQ(hr_run(r->comms[0], p, x, x, HR_FLOAT32, HR_SUM, SIG, &req), HR_OK);
    CHECK(say_in_order(r, 0, &m, 0));
    for (uint64_t tag = 1; tag < 2; tag++) {
        struct hr_hdr_long rest = {.h = HDR(RTS, .tag = coll_tag(0, tag), .aux = SIG, .sreq = 4), .size = ELEMENTS * 4};
        CHECK(say_in_order(r, 0, &rest, 0));
    }
    passed_over(r);
    for (int i = 0; i < 100; i++) turn(r);
    CHECK(!is_done(&req));
    CHECK(say(r, HDR(BREAK, .tag = 1, .status = HR_ERR_BROKEN), 0));
    UNTIL(r, is_done(&req));
    CHECK_EQ(req.status, HR_ERR_BROKEN);
    take_back(r, 0, mine, &mem);
    hr_program_put(p);
    free(x);
}
ATTACK(an_operand_in_ragged_pieces) {
    struct hr_program *p = program_of_rank_0();
    float *x = calloc(ELEMENTS, 4);
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    uint64_t n = ELEMENTS * 4;
    CHECK_EQ(hr_run(r->comms[0], p, x, x, HR_FLOAT32, HR_SUM, SIG, &req), HR_OK);
    for (uint64_t tag = 0; tag < 2; tag++) {
        struct hr_hdr_long m = {.h = HDR(RTS, .tag = coll_tag(0, tag), .aux = SIG, .sreq = 17 + (uint32_t)tag),
                                .size = n};
        struct wild *w = r->wild[0];
        w->nheard = 0;
        memset(w->heard, 0, sizeof w->heard);
        CHECK(say_in_order(r, 0, &m, 0));
        UNTIL(r, heard(r, HR_MSG_CTS));
        struct hr_hdr_long *cts = heard(r, HR_MSG_CTS);
        if (tag == 0 && cts->h.flags & HR_HDR_DESC) { /* the loan is copied into scratch by writes */
            struct hr_rmem rmem;
            CHECK_EQ(w->ops->mem_import(w->ep, &cts->desc, &rmem), HR_OK);
            for (uint64_t at = 0; at < n; at += 40000) {
                struct hr_rma rma = {.local = w->payload,
                                     .len = 40000,
                                     .remote = &rmem,
                                     .offset = at,
                                     .with_notify = 1,
                                     .value = cts->h.rreq};
                UNTIL(r, w->ops->post_write(w->ep, &rma) != HR_AGAIN);
            }
        } else {
            uint64_t piece = at_most(r, tag ? 33333 : 40000) - (tag && at_most(r, 40000) < 40000);
            for (uint64_t at = 0; at < n; at += piece)
                if (!say(r, HDR(SEG, .rreq = cts->h.rreq, .aux = at), n - at < piece ? n - at : piece)) break;
        }
    }
    cut_off(r);
    CHECK_EQ(req.status, HR_ERR_PROTOCOL);
    hr_program_put(p);
    free(x);
}

/* Rank 0's part of an allreduce of two halves, in place, whose results are put back. */
static struct hr_program *halves_of_rank_0(uint64_t n, int borrows) {
    struct hr_program *p = NULL;
    char detail[256] = "";
    uint32_t unlocks[] = {1, 3, 2};
    struct hr_ref refs[] = {{HR_BUF_OUT, 0, 0}, {HR_BUF_BORROWED, 0, 2}};
    struct hr_instr instrs[] = {
        {.op = HR_OP_SEND, .peer = 1, .tag = 0, .nunlock = 1, .len = n, .src_buf = HR_BUF_OUT, .src_off = n},
        {.op = HR_OP_RECV, .peer = 1, .tag = 1, .after = 1, .len = n, .dst_buf = HR_BUF_OUT, .dst_off = n},
        {.op = HR_OP_RECV_REDUCE, .peer = 1, .tag = 0, .unlock = 1, .nunlock = 1, .len = n, .dst_buf = HR_BUF_OUT},
        {.op = HR_OP_SEND, .peer = 1, .tag = 1, .after = 1, .len = n, .src_buf = HR_BUF_OUT},
        {.op = HR_OP_REDUCE, .peer = -1, .after = 1, .unlock = 1, .nunlock = 1, .len = n, .dst_buf = HR_BUF_OUT},
    };
    instrs[1].flags = instrs[3].flags = HR_INSTR_RETURNS;
    instrs[1].ref = 0;
    instrs[3].ref = 2;
    if (borrows) {
        instrs[2].op = HR_OP_BORROW;
        instrs[2].dst_buf = HR_BUF_TMP;
        instrs[2].unlock = 2;
        unlocks[2] = 4;
        instrs[4].nref = 2;
    }
    hr_status status = hr_program_new(instrs, 4 + (uint32_t)borrows, unlocks, 3, refs, borrows ? 2 : 0, 2 * n, 2 * n,
                                      borrows ? n : 0, 2, &p, detail);
    if (status != HR_OK) fprintf(stderr, "%s\n", detail);
    REQUIRE(p);
    return p;
}

/* It offers memory to put results back to, says that it stands, and lets nobody hold it. */
static void an_offer_that_nobody_can_hold(struct rig *r, uint64_t n, int borrows) {
    struct hr_program *p = halves_of_rank_0(n, borrows);
    struct hr_conn *conn = conn_of(r, 0);
    struct wild *w = r->wild[0];
    uint8_t *x = malloc(3 * n), *mine = malloc(n);
    struct hr_mem mem;
    struct hr_request req = {.priority = HR_PRIORITY_DEFAULT};
    struct hr_hdr_long m = {.h = HDR(RTS, .tag = coll_tag(0, 0), .aux = SIG, .sreq = WILD_SREQ), .size = n};
    uint64_t changed = 0;
    memset(x, 1, 3 * n), memset(mine, 1, n);
    m.h.flags = HR_HDR_DESC | HR_HDR_OPEN | HR_HDR_SAYS | HR_HDR_PUT;
    for (int i = 0; i < HR_RELAYS; i++)
        conn->reading.relay[i] = (struct hr_relay){.cost = {[HR_RELAYED] = 9, [HR_READ] = 1}, .next = INT64_MAX};
    show_ledger(r, 0, LEDGER_BYTES);
    w->ledger[0] |= 2;
    CHECK_EQ(w->ops->mem_register(w->domain, mine, n, HR_ACCESS_REMOTE_READ | HR_ACCESS_REMOTE_PUT, &mem), HR_OK);
    CHECK_EQ(w->ops->mem_export(w->ep, &mem, mine, n, &m.desc), HR_OK);
    CHECK_EQ(hr_run(r->comms[0], p, x, x, HR_UINT8, HR_SUM, SIG, &req), HR_OK);
    CHECK(say_in_order(r, 0, &m, 0));
    passed_over(r);
    for (int i = 0; i < 1000; i++) turn(r);
    CHECK(!is_done(&req));
    CHECK(say(r, HDR(BREAK, .tag = 1, .status = HR_ERR_BROKEN), 0));
    UNTIL(r, is_done(&req));
    for (uint64_t i = n; i < 3 * n; i++) changed += x[i] != 1; /* the other half, and what is behind */
    for (uint64_t i = 0; i < n; i++) changed += mine[i] != 1;
    CHECK_EQ(changed, 0);
    w->ops->mem_deregister(w->domain, &mem);
    hr_program_put(p);
    free(x);
    free(mine);
}
ATTACK(an_offer_that_stands_and_cannot_be_held) {
    if (!conn_of(r, 0)->lanes[0].ep->puts) SKIP("the provider does not have HR_CAP_PUT");
    an_offer_that_nobody_can_hold(r, 1 << 20, 0);
}
ATTACK(a_short_offer_that_stands_and_cannot_be_held) {
    if (!conn_of(r, 0)->lanes[0].ep->puts) SKIP("the provider does not have HR_CAP_PUT");
    an_offer_that_nobody_can_hold(r, 16384, 0);
}
ATTACK(a_loan_that_stands_and_cannot_be_held) {
    if (!conn_of(r, 0)->lanes[0].ep->puts) SKIP("the provider does not have HR_CAP_PUT");
    an_offer_that_nobody_can_hold(r, 1 << 20, 1);
}
