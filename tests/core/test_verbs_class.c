/* test_verbs_class.c - the traffic class of a queue pair: it goes with the path, each end sets its own, and it is read
 * back. */

#include "providers/verbs/sim.h"
#include "verbs_rig.h"

static void open_two(struct pair *p) {
    char detail[256];
    REQUIRE(node_open(&p->a, 1, "sim2", NULL, detail) == HR_OK);
    REQUIRE(node_open(&p->b, 2, "sim2", NULL, detail) == HR_OK);
}

static struct hr_verbs_backend forgetful;

static int forgets_class(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init) {
    int rc = hr_verbs_sim.query_qp(qp, attr, mask, init);
    attr->ah_attr.grh.traffic_class = 0;
    return rc;
}

static struct ibv_ah_attr way_of(const struct conn *c) {
    struct ibv_qp_attr attr = {0};
    struct ibv_qp_init_attr init;
    hr_verbs_sim.query_qp(((struct hr_verbs_ep *)c->ep)->qp, &attr, IBV_QP_AV, &init);
    return attr.ah_attr;
}

static void connect_classed(struct pair *p, int dscp_a, int dscp_b) {
    uint8_t addr[2][HR_MAX_ADDR];
    size_t len[2] = {verbs->domain_address(p->a.domain, addr[0]), verbs->domain_address(p->b.domain, addr[1])};
    CHECK_EQ(verbs->ep_create(p->a.domain, 2, &p->ca, &p->ca.ep), HR_OK);
    CHECK_EQ(verbs->ep_create(p->b.domain, 1, &p->cb, &p->cb.ep), HR_OK);
    CHECK_EQ(verbs->ep_set_class(p->ca.ep, dscp_a, 2), HR_OK);
    CHECK_EQ(verbs->ep_set_class(p->cb.ep, dscp_b, 6), HR_OK);
    CHECK_EQ(verbs->ep_connect(p->cb.ep, addr[0], len[0], 0), HR_OK);
    CHECK_EQ(verbs->ep_connect(p->ca.ep, addr[1], len[1], 1), HR_OK);
    RUN(p->a, p->b, p->ca.ups && p->cb.ups);
}

TEST(each_end_sets_the_class_of_what_it_sends) {
    struct pair p = {0};
    open_two(&p);
    connect_classed(&p, 26, 46);
    CHECK_EQ(way_of(&p.ca).grh.traffic_class, 26 << 2);
    CHECK_EQ(way_of(&p.cb).grh.traffic_class, 46 << 2);
    CHECK_EQ(way_of(&p.ca).sl, 5); /* the higher service level is the more urgent one */
    CHECK_EQ(way_of(&p.cb).sl, 1);
    CHECK_EQ(verbs->ep_set_class(p.ca.ep, 26, 2), HR_OK); /* as it is */
    CHECK_EQ(verbs->ep_set_class(p.ca.ep, 27, 2), HR_ERR_UNSUPPORTED);
    CHECK_EQ(verbs->ep_set_class(p.ca.ep, 64, 2), HR_ERR_INVALID);
    CHECK_EQ(send_some(&p.ca, 3000), HR_OK);
    CHECK_EQ(send_some(&p.cb, 3000), HR_OK);
    RUN(p.a, p.b, p.ca.messages == 1 && p.cb.messages == 1);
    pair_close(&p);
}

TEST(a_device_that_does_not_take_the_class_is_found_out) {
    struct pair p = {0};
    open_two(&p);
    forgetful = hr_verbs_sim;
    forgetful.query_qp = forgets_class;
    ((struct hr_verbs_domain *)p.a.domain)->verbs = &forgetful;
    connect_classed(&p, 26, 46);
    CHECK_EQ(verbs->ep_set_class(p.ca.ep, 26, 2), HR_ERR_UNSUPPORTED);
    CHECK_EQ(verbs->ep_set_class(p.cb.ep, 46, 6), HR_OK);
    CHECK_EQ(send_some(&p.ca, 3000), HR_OK);
    CHECK_EQ(send_some(&p.cb, 3000), HR_OK);
    RUN(p.a, p.b, p.ca.messages == 1 && p.cb.messages == 1);
    pair_close(&p);
}
