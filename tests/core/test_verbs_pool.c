/* test_verbs_pool.c - receives that endpoints share: how many, promises kept, what a broken queue pair takes with it.
 */

#include "providers/verbs/sim.h"
#include "verbs_rig.h"

enum { MOST = 64, OWN = (HR_VERBS_RECVS + HR_VERBS_SPARE) * HR_VERBS_STRIDE };

/* Many connections between two domains, of which b's receives are looked at. */
struct many {
    struct pair p;
    struct conn a[MOST], b[MOST];
    int n;
};

/* options NULL: all share. */
static void many_open(struct many *m, int n, const char *options) {
    char detail[256];
    if (!options) options = "receives=shared";
    memset(m, 0, sizeof *m);
    REQUIRE(node_open(&m->p.a, 1, "sim", NULL, detail) == HR_OK);
    REQUIRE(node_open(&m->p.b, 2, "sim", options, detail) == HR_OK);
    for (; m->n < n; m->n++) {
        connect_pair(&m->p, &m->a[m->n], &m->b[m->n]);
        REQUIRE(m->a[m->n].ups && m->b[m->n].ups);
    }
}

static struct hr_verbs_ep *ep_of(const struct conn *c) { return (struct hr_verbs_ep *)c->ep; }

static struct hr_verbs_domain *at_b(const struct many *m) { return (struct hr_verbs_domain *)m->p.b.domain; }

/* What the device has of a pool, and what queue pairs have taken and not told of. */
static int32_t really_posted(const struct hr_verbs_pool *pool) {
    struct sim_context *ctx = sim_of(pool->domain->ctx);
    const struct sim_srq *srq = (const struct sim_srq *)pool->srq;
    pthread_mutex_lock(&ctx->lock);
    int32_t n = (int32_t)(srq->tail - srq->head);
    for (int i = 0; i < SIM_MAX_QP; i++)
        if (ctx->qps[i] && ctx->qps[i]->base.srq == pool->srq)
            n += (int32_t)(ctx->qps[i]->rq_tail - ctx->qps[i]->rq_head);
    pthread_mutex_unlock(&ctx->lock);
    return n;
}

/* With nothing on its way. */
static void pools_are_honest(const struct many *m) {
    struct hr_verbs_domain *d = at_b(m);
    for (struct hr_link *l = d->pools.next; l != &d->pools; l = l->next) {
        const struct hr_verbs_pool *pool = hr_container(l, struct hr_verbs_pool, link);
        uint32_t promised = 0, beyond = 0;
        for (int i = 0; i < m->n; i++) {
            const struct hr_verbs_ep *ep = m->b[i].ep ? ep_of(&m->b[i]) : NULL;
            if (!ep || ep->pool != pool) continue;
            promised += ep->promised;
            beyond += ep->promised > pool->base ? ep->promised - pool->base : 0;
            CHECK(ep->promised <= HR_VERBS_RECVS);
        }
        CHECK_EQ(pool->promised, promised);
        CHECK_EQ(pool->beyond, beyond);
        CHECK(hr_verbs_pool_posted(pool) <= really_posted(pool));
        CHECK(hr_verbs_pool_posted(pool) >= (int32_t)(promised + pool->members * HR_VERBS_SPARE));
    }
}

static void no_message_found_no_receive(const struct many *m) {
    CHECK_EQ(inside(&m->p.a)->counts.rnr + inside(&m->p.b)->counts.rnr, 0);
    for (int i = 0; i < m->n; i++) CHECK(!m->a[i].losses && !m->b[i].losses);
}

static void many_close(struct many *m) {
    for (int i = 0; i < m->n; i++) {
        if (m->a[i].ep) verbs->ep_destroy(m->a[i].ep);
        if (m->b[i].ep) verbs->ep_destroy(m->b[i].ep);
    }
    pump(&m->p.b);
    CHECK_EQ(inside(&m->p.b)->cq_used, 0);
    CHECK_EQ(inside(&m->p.b)->counts.receives, 0);
    CHECK(hr_list_empty(&at_b(m)->pools));
    verbs->domain_close(m->p.a.domain);
    verbs->domain_close(m->p.b.domain);
}

/* Sends n on a connection, both ends driven. */
static void stream(struct many *m, int i, int n) {
    int before = m->b[i].messages, sent = 0;
    for (int64_t until = hr_now() + 10000 * HR_VERBS_MS; sent < n && hr_now() < until;) {
        while (sent < n && send_some(&m->a[i], 64) == HR_OK) sent++;
        pump(&m->p.a), pump(&m->p.b);
    }
    RUN(m->p.a, m->p.b, m->b[i].messages == before + n);
}

/* As many as there is room for, while nobody makes progress at the other end. */
static int unheard(struct many *m, int i) {
    struct hr_verbs_ep *ep = ep_of(&m->a[i]);
    int sent = 0;
    for (int64_t until = hr_now() + 10000 * HR_VERBS_MS; (ep->room || ep->unsent) && hr_now() < until;) {
        if (ep->room) sent += send_some(&m->a[i], 64) == HR_OK;
        verbs->ep_unsent(&ep->base);
        pump(&m->p.a);
    }
    CHECK(!ep->room && !ep->unsent);
    return sent;
}

/* ---- how many ---- */

TEST(idle_peers_cost_a_third) {
    static struct many m;
    many_open(&m, MOST, NULL);
    uint64_t shared = inside(&m.p.b)->counts.receives;
    CHECK(shared * 20 <= (uint64_t)MOST * OWN * 7);
    pools_are_honest(&m);
    for (int i = 0; i < MOST; i++) stream(&m, i, 20);
    CHECK_EQ(inside(&m.p.b)->counts.receives, shared);
    no_message_found_no_receive(&m);
    many_close(&m);
    many_open(&m, MOST, "receives=own");
    CHECK_EQ(inside(&m.p.b)->counts.receives, (uint64_t)MOST * OWN);
    for (int i = 0; i < MOST; i++) CHECK_EQ(ep_of(&m.a[i])->room, HR_VERBS_RECVS);
    many_close(&m);
}

TEST(the_first_two_have_their_own) {
    static struct many m;
    many_open(&m, 5, "");
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < m.n; i++) CHECK_EQ(ep_of(&m.b[i])->pool->srq == NULL, i < 2);
        for (int i = 0; i < m.n && !turn; i++) CHECK_EQ(ep_of(&m.a[i])->room, i < 2 ? HR_VERBS_RECVS : 16);
        CHECK_EQ(inside(&m.p.b)->alone, 2);
        for (int i = 0; i < m.n; i++) stream(&m, i, 200);
        if (turn) break;
        verbs->ep_destroy(m.a[1].ep); /* the next one takes its place */
        verbs->ep_destroy(m.b[1].ep);
        CHECK_EQ(inside(&m.p.b)->alone, 1);
        memset(&m.a[1], 0, sizeof m.a[1]);
        memset(&m.b[1], 0, sizeof m.b[1]);
        connect_pair(&m.p, &m.a[1], &m.b[1]);
        REQUIRE(m.a[1].ups && m.b[1].ups);
    }
    no_message_found_no_receive(&m);
    many_close(&m);
    many_open(&m, 0, "");
    CHECK_EQ(inside(&m.p.b)->alone, 0);
    many_close(&m);
}

TEST(one_peer_costs_no_more_than_it_did) {
    static struct many m;
    for (int n = 1; n <= 2; n++) {
        many_open(&m, n, NULL);
        CHECK_EQ(inside(&m.p.b)->counts.receives, n * OWN);
        many_close(&m);
    }
}

TEST(a_queue_that_is_full_is_followed_by_another) {
    static struct many m;
    many_open(&m, 0, NULL);
    at_b(&m)->attr.max_srq_wr = 150;
    for (; m.n < 8; m.n++) connect_pair(&m.p, &m.a[m.n], &m.b[m.n]);
    int pools = 0;
    for (struct hr_link *l = at_b(&m)->pools.next; l != &at_b(&m)->pools; l = l->next) pools++;
    CHECK(pools > 1 && pools < 8);
    for (int i = 0; i < 8; i++) stream(&m, i, 300);
    pools_are_honest(&m);
    no_message_found_no_receive(&m);
    many_close(&m);
}

/* It said that it has shared queues, and has none. */
TEST(without_a_queue_each_has_its_own) {
    static struct many m;
    many_open(&m, 0, NULL);
    CHECK(at_b(&m)->shares);
    at_b(&m)->attr.max_srq_wr = 0;
    for (; m.n < 3; m.n++) connect_pair(&m.p, &m.a[m.n], &m.b[m.n]);
    CHECK(!at_b(&m)->shares);
    CHECK_EQ(inside(&m.p.b)->counts.receives, 3 * OWN);
    for (int i = 0; i < 3; i++) stream(&m, i, 300);
    no_message_found_no_receive(&m);
    many_close(&m);
}

TEST(receives_that_cannot_be_had_are_told_of) {
    static struct many m;
    many_open(&m, 2, NULL);
    at_b(&m)->inject.reg_error = 1;
    at_b(&m)->inject.budget = 100;
    connect_pair(&m.p, &m.a[2], &m.b[2]);
    m.n = 3;
    CHECK_EQ(m.b[2].losses, 1);
    CHECK(strstr(m.b[2].detail, "cannot register"));
    at_b(&m)->inject.reg_error = 0;
    for (int i = 0; i < 2; i++) stream(&m, i, 300);
    CHECK(!m.b[0].losses && !m.b[1].losses);
    many_close(&m);
}

/* ---- promises ---- */

TEST(who_floods_takes_nothing_from_the_others) {
    enum { N = 12 };
    static struct many m;
    many_open(&m, N, NULL);
    stream(&m, 0, 1000);
    CHECK(ep_of(&m.b[0])->promised > HR_VERBS_RECVS - 2 * HR_VERBS_TOGETHER);
    for (int round = 0; round < 5; round++) {
        int before = m.b[0].messages, sent = unheard(&m, 0);
        CHECK(sent >= HR_VERBS_RECVS / 2 - HR_VERBS_TOGETHER && sent <= HR_VERBS_RECVS);
        for (int i = 1; i < N; i++) {
            int had = m.b[i].messages, n = unheard(&m, i);
            CHECK(n > HR_VERBS_TOGETHER / 2 && n <= HR_VERBS_RECVS);
            CHECK_EQ(m.b[i].messages, had);
            m.b[i].value = (uint64_t)(had + n);
        }
        RUN(m.p.a, m.p.b, m.b[0].messages == before + sent);
        for (int i = 1; i < N; i++) RUN(m.p.a, m.p.b, (uint64_t)m.b[i].messages == m.b[i].value);
        pools_are_honest(&m);
    }
    no_message_found_no_receive(&m);
    many_close(&m);
}

TEST(all_that_flood_get_on) {
    enum { N = 10, EACH = 2000 };
    static struct many m;
    int sent[N] = {0}, done = 0;
    many_open(&m, N, NULL);
    for (int64_t until = hr_now() + 20000 * HR_VERBS_MS; done < N && hr_now() < until;) {
        done = 0;
        for (int i = 0; i < N; i++) {
            while (sent[i] < EACH && send_some(&m.a[i], 64) == HR_OK) sent[i]++;
            CHECK(m.b[i].messages + HR_VERBS_RECVS >= sent[i]);
            done += m.b[i].messages == EACH;
        }
        pump(&m.p.a), pump(&m.p.b);
    }
    CHECK_EQ(done, N);
    pools_are_honest(&m);
    no_message_found_no_receive(&m);
    many_close(&m);
}

/* More have been busy than there is a surplus for: who still is gets what the others had. */
TEST(what_is_not_needed_any_more_goes_to_others) {
    enum { N = 9 };
    static struct many m;
    many_open(&m, N, NULL);
    uint32_t base = ep_of(&m.b[0])->pool->base;
    for (int i = 0; i < N; i++) stream(&m, i, 500);
    CHECK(ep_of(&m.b[0])->promised > base); /* they were first, and have said nothing since */
    CHECK(ep_of(&m.b[N - 1])->promised <= base);
    for (int i = 0; i < N - 1; i++)
        for (int k = 0; k < HR_VERBS_RECVS; k++) stream(&m, i, 1);
    for (int i = 0; i < N - 1; i++) CHECK(ep_of(&m.b[i])->promised <= base);
    stream(&m, N - 1, 500);
    CHECK(ep_of(&m.b[N - 1])->promised > HR_VERBS_RECVS - 2 * HR_VERBS_TOGETHER);
    pools_are_honest(&m);
    no_message_found_no_receive(&m);
    many_close(&m);
}

/* Notices that are immediate data have no place for a word of it. */
TEST(hunger_is_told_of_by_who_only_writes) {
    static struct many m;
    struct hr_mem mem;
    struct hr_rmem rmem;
    uint64_t here = 1, *there = hr_arena_alloc(4096, HR_ARENA_WRITABLE_BY_PEERS);
    many_open(&m, 2, NULL);
    struct pair p = m.p;
    p.ca = m.a[0], p.cb = m.b[0];
    share(&p, there, 4096, &mem, &rmem);
    for (int sent = 0; sent < 500;) {
        struct hr_rma write = {.local = &here, .len = 8, .remote = &rmem, .with_notify = 1, .value = (uint64_t)sent};
        hr_status status = HR_OK;
        while (sent < 500 && status == HR_OK) sent += (status = verbs->post_write(m.a[0].ep, &write)) == HR_OK;
        CHECK(status == HR_OK || status == HR_AGAIN || status == HR_INPROGRESS);
        sent += status == HR_INPROGRESS;
        for (int i = 0; i < 4; i++) pump(&m.p.a), pump(&m.p.b);
    }
    RUN(m.p.a, m.p.b, m.b[0].notifies == 500);
    CHECK(ep_of(&m.b[0])->promised > HR_VERBS_RECVS - 2 * HR_VERBS_TOGETHER);
    no_message_found_no_receive(&m);
    verbs->mem_deregister(m.p.b.domain, &mem);
    many_close(&m);
    hr_arena_free(there);
}

/* ---- broken queue pairs ---- */

static void half_a_message_comes(struct conn *c) {
    struct sim_qp *qp = (struct sim_qp *)ep_of(c)->qp;
    struct sim_context *ctx = sim_of(qp->base.context);
    pthread_mutex_lock(&ctx->lock);
    if (qp->rq_head == qp->rq_tail) sim_srq_take(qp);
    pthread_mutex_unlock(&ctx->lock);
}

static void again(struct many *m, int i) {
    verbs->ep_destroy(m->a[i].ep);
    verbs->ep_destroy(m->b[i].ep);
    m->a[i] = m->b[i] = (struct conn){0};
    connect_pair(&m->p, &m->a[i], &m->b[i]);
    REQUIRE(m->a[i].ups && m->b[i].ups);
}

static void broken_often(int keeps, int unfetched, int half) {
    enum { N = 4, TIMES = 150 };
    static struct many m;
    many_open(&m, N, NULL);
    sim_of(at_b(&m)->ctx)->keeps = keeps;
    uint64_t before = inside(&m.p.b)->counts.receives;
    for (int k = 0; k < TIMES; k++) {
        int i = k % 2;
        if (unfetched) unheard(&m, i);
        if (half) half_a_message_comes(&m.b[i]);
        again(&m, i);
        pools_are_honest(&m);
        if (k % 10 == 0)
            for (int other = 2; other < N; other++) stream(&m, other, 40);
    }
    for (int i = 0; i < N; i++) stream(&m, i, 500);
    pools_are_honest(&m);
    no_message_found_no_receive(&m);
    uint64_t kept = keeps ? (uint64_t)TIMES * (half ? 1 : 0) * HR_VERBS_STRIDE : 0;
    CHECK(inside(&m.p.b)->counts.receives <= 2 * before + kept + 64 * HR_VERBS_STRIDE);
    many_close(&m);
}

TEST(queue_pairs_that_end_often_leave_what_there_was) { broken_often(0, 0, 0); }
TEST(queue_pairs_that_break_in_a_message_leave_what_there_was) { broken_often(0, 0, 1); }
TEST(a_device_that_keeps_what_was_taken_leaves_enough) { broken_often(1, 0, 1); }
TEST(what_came_and_was_not_heard_is_given_back) { broken_often(0, 1, 1); }
TEST(what_a_device_throws_away_was_fetched_before) { broken_often(1, 1, 0); }

/* Where nothing else happens, doubts are settled by the greetings of those that come and go. */
TEST(doubts_do_not_pile_up) {
    static struct many m;
    many_open(&m, 2, NULL);
    for (int k = 0; k < 600; k++) again(&m, 0);
    CHECK(inside(&m.p.b)->counts.receives <= 5ull * OWN);
    pools_are_honest(&m);
    many_close(&m);
}

/* It is told that it is over, and keeps its place in the pool until it is destroyed. */
TEST(what_comes_to_who_has_failed_is_given_back) {
    static struct many m;
    many_open(&m, 3, NULL);
    for (int k = 0; k < 40; k++) {
        unheard(&m, 0);
        if (k % 3 == 0) half_a_message_comes(&m.b[0]);
        if (k % 2)
            hr_verbs_qp_break(ep_of(&m.b[0])); /* an event tells */
        else
            hr_verbs_ep_fail(ep_of(&m.b[0]), HR_ERR_PEER_LOST, "a test", 0);
        RUN(m.p.b, m.p.b, m.b[0].losses);
        CHECK_EQ(really_posted(ep_of(&m.b[0])->pool), hr_verbs_pool_posted(ep_of(&m.b[0])->pool));
        again(&m, 0);
        for (int i = 1; i < 3; i++) stream(&m, i, 100); /* settles doubts */
        pools_are_honest(&m);
    }
    for (int i = 0; i < 3; i++) CHECK(!m.a[i].losses && !m.b[i].losses);
    many_close(&m);
}

static struct conn *to_abort;
static void abort_on_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    on_recv(ep, hdr, hdr_len, payload, len);
    if (ep == to_abort->ep) verbs->ep_abort(ep);
}

/* As the engine does when a message makes no sense. */
TEST(an_endpoint_is_aborted_by_what_it_hears) {
    static const struct hr_sink aborts = {abort_on_recv, on_done, on_notify, on_state, NULL, NULL};
    static struct many m;
    for (int own = 0; own < 2; own++) {
        many_open(&m, 2, own ? "receives=own" : NULL);
        at_b(&m)->base.sink = &aborts;
        for (int i = 1; i >= 0; i--) { /* the last one takes the pool with it */
            int before = m.b[i].messages;
            unheard(&m, i);
            to_abort = &m.b[i];
            RUN(m.p.b, m.p.b, m.b[i].messages == before + 1);
            RUN(m.p.a, m.p.a, m.a[i].losses == 1);
            pools_are_honest(&m);
            if (i) stream(&m, 0, 300);
        }
        many_close(&m);
    }
}

/* What came for a queue pair that is gone is not heard by the next one of its number. */
TEST(a_number_that_is_used_again) {
    static struct many m;
    for (int fetched = 0; fetched < 2; fetched++) {
        many_open(&m, 2, NULL);
        uint32_t number = ep_of(&m.b[0])->qp->qp_num;
        CHECK(unheard(&m, 0) > 0);
        while (fetched && hr_verbs_fetch(at_b(&m)) > 0) {}
        verbs->ep_destroy(m.a[0].ep);
        verbs->ep_destroy(m.b[0].ep);
        sim_of(at_b(&m)->ctx)->generation[number % SIM_MAX_QP]--;
        m.a[0] = m.b[0] = (struct conn){0};
        connect_pair(&m.p, &m.a[0], &m.b[0]);
        CHECK_EQ(ep_of(&m.b[0])->qp->qp_num, number);
        stream(&m, 0, 1);
        CHECK_EQ(m.b[0].messages, 1);
        pools_are_honest(&m);
        no_message_found_no_receive(&m);
        many_close(&m);
    }
}

/* ---- what the two ends have differs ---- */

TEST(an_end_that_shares_and_one_that_does_not) {
    static struct many m;
    many_open(&m, 3, "receives=own");
    CHECK_EQ(ep_of(&m.a[0])->room, HR_VERBS_RECVS);
    CHECK(ep_of(&m.b[2])->room < HR_VERBS_RECVS);
    for (int i = 0; i < 3; i++) stream(&m, i, 300);
    for (int sent = 0; sent < 300;) {
        sent += send_some(&m.b[2], 4000) == HR_OK;
        pump(&m.p.a), pump(&m.p.b);
    }
    RUN(m.p.a, m.p.b, m.a[2].messages == 300);
    no_message_found_no_receive(&m);
    many_close(&m);
}

/* ---- more than the device has ---- */

/* The connection that is one too many fails with the reason, and those that stand go on. */
TEST(more_queue_pairs_than_the_device_has) {
    struct pair p;
    struct conn more[2][2] = {0};
    struct ibv_qp *taken[SIM_MAX_QP];
    int n = 0;
    char text[96];
    pair_open(&p, NULL);
    const struct hr_verbs_domain *d = inside(&p.b);
    struct ibv_qp_init_attr init = {.send_cq = d->cq, .recv_cq = d->cq, .qp_type = IBV_QPT_RC};
    init.cap = (struct ibv_qp_cap){.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1};
    while (n < SIM_MAX_QP && (taken[n] = hr_verbs_sim.create_qp(d->pd, &init))) n++;
    CHECK_EQ(n, SIM_MAX_QP - 1);
    connect_pair(&p, &more[0][0], &more[0][1]);
    CHECK(more[0][1].loss == HR_ERR_UNREACHABLE && hr_is_peer_error(more[0][0].loss));
    snprintf(text, sizeof text, "cannot create a queue pair: Cannot allocate memory (the device has %d)", SIM_MAX_QP);
    CHECK(strstr(more[0][1].detail, text));
    CHECK_EQ(send_some(&p.ca, 100), HR_OK);
    RUN(p.a, p.b, p.cb.messages == 1);
    hr_verbs_sim.destroy_qp(taken[--n]);
    connect_pair(&p, &more[1][0], &more[1][1]);
    CHECK(more[1][0].ups && more[1][1].ups);
    while (n) hr_verbs_sim.destroy_qp(taken[--n]);
    for (int i = 0; i < 2; i++)
        for (int side = 0; side < 2; side++) verbs->ep_destroy(more[i][side].ep);
    pair_close(&p);
}

/* What cannot be registered is copied, as long as a connection's own buffers could be. */
TEST(more_registrations_than_the_device_has) {
    struct pair p;
    struct hr_mem mem, refused;
    struct hr_rmem rmem;
    struct ibv_mr *taken[SIM_MAX_MR];
    struct conn more[2] = {0};
    int n = 0;
    uint8_t byte, *here = hr_arena_alloc(1 << 20, 0), *there = hr_arena_alloc(1 << 20, HR_ARENA_WRITABLE_BY_PEERS);
    pair_open(&p, NULL);
    share(&p, there, 1 << 20, &mem, &rmem);
    const struct hr_verbs_domain *d = inside(&p.a);
    while (n < SIM_MAX_MR && (taken[n] = hr_verbs_sim.reg_mr(d->pd, &byte, 1, IBV_ACCESS_LOCAL_WRITE))) n++;
    CHECK(n > SIM_MAX_MR - 20 && n < SIM_MAX_MR);
    CHECK_EQ(verbs->mem_register(p.a.domain, here, 100, HR_ACCESS_REMOTE_READ, &refused), HR_ERR_NOMEM);
    struct hr_rma write = {.local = here, .len = 1 << 20, .remote = &rmem, .cookie = &p};
    memset(here, 5, 1 << 20);
    CHECK_EQ(verbs->post_write(p.ca.ep, &write), HR_INPROGRESS);
    RUN(p.a, p.b, p.ca.dones == 1);
    CHECK_EQ(p.ca.done_status, HR_OK);
    RUN(p.a, p.b, memcmp(there, here, 1 << 20) == 0); /* it has left, and is not there yet */
    CHECK(d->counts.staged == 1 << 20 && !d->counts.direct);
    connect_pair(&p, &more[0], &more[1]);
    CHECK(more[0].loss == HR_ERR_UNREACHABLE && strstr(more[0].detail, "for a connection: Cannot allocate memory"));
    while (n) hr_verbs_sim.dereg_mr(taken[--n]);
    for (int side = 0; side < 2; side++) verbs->ep_destroy(more[side].ep);
    verbs->mem_deregister(p.b.domain, &mem);
    pair_close(&p);
    hr_arena_free(here);
    hr_arena_free(there);
}
