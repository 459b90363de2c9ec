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
