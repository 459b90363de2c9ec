/* test_verbs_paths.c - which device, port and GID a connection takes: ranking, trying, what is told when none will do.
 */

#define _GNU_SOURCE
#include <ftw.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hr/hr.h"
#include "providers/verbs/sim.h"
#include "verbs_rig.h"

/* sim2: GID 0 of each port is link-local, 1 of IPv4, 2 of IPv6. */
enum { IPV4 = 1, IPV6 = 2, LINK_LOCAL = 0, ALL_PAIRS = 12 };

static void open_two(struct pair *p, const char *a, const char *b) {
    char detail[256];
    memset(p, 0, sizeof *p);
    REQUIRE(node_open(&p->a, 1, "sim2", a, detail) == HR_OK);
    REQUIRE(node_open(&p->b, 2, "sim2", b, detail) == HR_OK);
}

static int port_of(const struct conn *c) {
    struct ibv_qp_attr attr = {0};
    struct ibv_qp_init_attr init;
    hr_verbs_sim.query_qp(((struct hr_verbs_ep *)c->ep)->qp, &attr, IBV_QP_PORT | IBV_QP_AV, &init);
    return attr.port_num * 10 + attr.ah_attr.grh.sgid_index;
}

static void both_ways(struct pair *p) {
    CHECK_EQ(send_some(&p->ca, 3000), HR_OK);
    CHECK_EQ(send_some(&p->cb, 3000), HR_OK);
    RUN(p->a, p->b, p->ca.messages == 1 && p->cb.messages == 1);
    CHECK(!p->ca.losses && !p->cb.losses);
}

/* ---- ranking ---- */

TEST(gids_are_ranked) {
    static const int order[] = {10 + IPV4, 20 + IPV4, 10 + IPV6, 20 + IPV6, 10 + LINK_LOCAL, 20 + LINK_LOCAL};
    struct node n;
    char text[256];
    REQUIRE(node_open(&n, 1, "sim2", NULL, text) == HR_OK);
    const struct hr_verbs_paths *paths = &inside(&n)->paths;
    CHECK_EQ(paths->n, 6);
    for (int i = 0; i < 6; i++) CHECK_EQ(paths->list[i].port * 10 + paths->list[i].index, order[i]);
    verbs->domain_describe(n.domain, text, sizeof text);
    CHECK(strstr(text, "port 1 GID 1 ::ffff:198.18.") && strstr(text, "IPv4") && strstr(text, "of 6;"));
    verbs->domain_close(n.domain);
}

TEST(a_port_and_a_gid_can_be_named) {
    struct node n;
    char detail[256];
    REQUIRE(node_open(&n, 1, "sim2:2", "gid=2", detail) == HR_OK);
    CHECK_EQ(inside(&n)->paths.n, 1);
    CHECK_EQ(inside(&n)->paths.list[0].port, 2);
    CHECK_EQ(inside(&n)->paths.list[0].index, 2);
    verbs->domain_close(n.domain);
    CHECK_EQ(node_open(&n, 1, "sim2", "gid=3", detail), HR_ERR_INVALID);
    CHECK(strstr(detail, "gid=3") && strstr(detail, "3 entries"));
}

/* A device with two ports of ten IPv4 GIDs each, and less room for messages at the second. */
static int many_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr) {
    (void)ctx;
    *attr = (struct ibv_port_attr){
        .state = IBV_PORT_ACTIVE, .active_mtu = IBV_MTU_1024, .gid_tbl_len = 10, .max_msg_sz = 1u << (31 - port)};
    return 0;
}

static int one_port_down(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *attr) {
    many_query_port(ctx, port, attr);
    if (port == 2) attr->state = IBV_PORT_DOWN;
    return 0;
}

static int many_query_gid(struct ibv_context *ctx, uint8_t port, int index, union ibv_gid *gid) {
    (void)ctx;
    *gid = (union ibv_gid){.raw = {[10] = 0xff, 0xff, 10, 0, port, (uint8_t)(index + 1)}};
    return 0;
}

TEST(ports_take_turns_among_equals) {
    struct ibv_device device = {.name = "many"};
    struct ibv_context ctx = {.device = &device};
    struct hr_verbs_backend many = {.query_port = many_query_port, .query_gid = many_query_gid};
    struct hr_verbs_wish wish = {.gid = -1};
    struct hr_verbs_paths paths;
    char detail[256];
    CHECK_EQ(hr_verbs_paths_scan(&wish, &many, &ctx, 2, &paths, detail), HR_OK);
    CHECK_EQ(paths.n, HR_VERBS_PATHS);
    for (int i = 0; i < HR_VERBS_PATHS; i++) {
        CHECK_EQ(paths.list[i].port, 1 + i % 2);
        CHECK_EQ(paths.list[i].index, i / 2);
    }
    many.query_port = one_port_down;
    CHECK_EQ(hr_verbs_paths_scan(&wish, &many, &ctx, 2, &paths, detail), HR_OK);
    CHECK_EQ(paths.list[1].port, 1);
    CHECK_EQ(paths.max_message, 1u << 29); /* the second port may come up */
}

static void describe(const struct hr_verbs_paths *paths, int fixed, struct hr_verbs_open *open_p) {
    *open_p = (struct hr_verbs_open){.npaths = (uint8_t)paths->n, .fixed = (uint8_t)fixed};
    for (int i = 0; i < paths->n; i++)
        open_p->paths[i] = (struct hr_verbs_end){.gid = paths->list[i].gid, .kind = paths->list[i].kind, .mtu = 5};
}

TEST(pairs_of_one_kind_and_network_come_first) {
    struct pair p;
    struct hr_verbs_open a, b;
    struct hr_verbs_pair pairs[HR_VERBS_PAIRS];
    open_two(&p, NULL, NULL);
    describe(&inside(&p.a)->paths, 0, &a);
    describe(&inside(&p.b)->paths, 0, &b);
    CHECK_EQ(hr_verbs_pairs(&a, &b, pairs), ALL_PAIRS);
    for (int i = 0; i < ALL_PAIRS; i++) {
        CHECK_EQ(a.paths[pairs[i].active].kind, b.paths[pairs[i].passive].kind);
        CHECK(!i || pairs[i].goodness <= pairs[i - 1].goodness);
        if (i % 4 < 2 && i < 8) CHECK_EQ(pairs[i].active, pairs[i].passive); /* of one network, before those of two */
    }
    a.npaths = 1; /* IPv4 alone */
    memmove(b.paths, b.paths + 2, 4 * sizeof b.paths[0]);
    b.npaths = 4; /* no IPv4 */
    CHECK_EQ(hr_verbs_pairs(&a, &b, pairs), 0);
    b.fixed = 1;
    CHECK_EQ(hr_verbs_pairs(&a, &b, pairs), 4);
    verbs->domain_close(p.a.domain);
    verbs->domain_close(p.b.domain);
}

/* ---- trying ---- */

TEST(a_pair_that_does_not_answer_is_left) {
    static const struct {
        const char *a, *b;
        int found; /* by the active side */
    } cases[] = {{NULL, NULL, 10 + IPV4},         {"deaf=1", NULL, 20 + IPV4},
                 {NULL, "deaf=1", 20 + IPV4},     {"deaf=1", "deaf=1", 20 + IPV4},
                 {"deaf=4", "deaf=2", 10 + IPV6}, {"deaf=1,narrow=7", NULL, 10 + LINK_LOCAL}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct pair p;
        char text[256];
        open_two(&p, cases[i].a, cases[i].b);
        connect_pair(&p, &p.ca, &p.cb);
        REQUIRE(p.ca.ups && p.cb.ups);
        CHECK_EQ(port_of(&p.ca), cases[i].found);
        CHECK_EQ(port_of(&p.cb), cases[i].found);
        both_ways(&p);
        CHECK_EQ(inside(&p.a)->counts.rnr + inside(&p.b)->counts.rnr, 0);
        verbs->domain_describe(p.a.domain, text, sizeof text);
        CHECK_EQ(strtol(strstr(text, "port ") + 5, NULL, 10), cases[i].found / 10);
        CHECK_EQ(strstr(text, "left: GID") != NULL, cases[i].a || cases[i].b);
        pair_close(&p);
    }
}

TEST(every_pair_may_fail) {
    static const struct {
        const char *options, *text;
    } cases[] = {{"deaf=100", "UDP port 4791"}, {"narrow=100", "packets of 4096 bytes do not get there"}};
    for (int i = 0; i < 2; i++) {
        struct pair p;
        open_two(&p, cases[i].options, NULL);
        connect_pair(&p, &p.ca, &p.cb);
        CHECK_EQ(p.ca.loss, HR_ERR_UNREACHABLE);
        CHECK_EQ(p.cb.loss, HR_ERR_UNREACHABLE);
        CHECK_STR(strstr(p.ca.detail, cases[i].text) ? cases[i].text : p.ca.detail, cases[i].text);
        CHECK(strstr(p.ca.detail, "the last of 12 pairs"));
        CHECK_STR(strstr(p.cb.detail, cases[i].text) ? cases[i].text : p.cb.detail, cases[i].text); /* both say it */
        CHECK(strstr(p.cb.detail, "the peer found: ") && strstr(p.cb.detail, "the last of 12 pairs"));
        CHECK_EQ(inside(&p.a)->inject.tries, ALL_PAIRS);
        pair_close(&p);
    }
}

/* What a peer says of a pair is what can be said of it, and nothing more. */
TEST(words_that_make_no_sense) {
    static const struct hr_verbs_word words[] = {
        {.kind = HR_VERBS_BAD},
        {.kind = HR_VERBS_BAD, .why = HR_VERBS_NO_QP + 1},
        {.kind = HR_VERBS_BAD, .why = HR_VERBS_STATUS},
        {.kind = HR_VERBS_BAD, .why = HR_VERBS_BAD_END},
        {.kind = HR_VERBS_BAD, .why = HR_VERBS_NARROW, .psn = 1},
        {.kind = HR_VERBS_READY, .why = HR_VERBS_NARROW},
        {.kind = HR_VERBS_TRY, .qpn = 1, .room = 1, .why = HR_VERBS_SILENT},
        {.kind = 9},
        {.kind = HR_VERBS_BAD, .turn = 1, .why = HR_VERBS_NARROW},
        {.kind = HR_VERBS_BAD, .why = HR_VERBS_STATUS + IBV_WC_GENERAL_ERR}, /* which does, and fails alone */
    };
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        struct pair p;
        uint8_t addr[2][HR_MAX_ADDR];
        open_two(&p, NULL, NULL);
        size_t len[2] = {verbs->domain_address(p.a.domain, addr[0]), verbs->domain_address(p.b.domain, addr[1])};
        REQUIRE(verbs->ep_create(p.a.domain, 2, &p.ca, &p.ca.ep) == HR_OK);
        REQUIRE(verbs->ep_create(p.b.domain, 1, &p.cb, &p.cb.ep) == HR_OK);
        CHECK_EQ(verbs->ep_connect(p.cb.ep, addr[0], len[0], 0), HR_OK);
        CHECK_EQ(verbs->ep_connect(p.ca.ep, addr[1], len[1], 1), HR_OK);
        struct hr_verbs_ep *a = (struct hr_verbs_ep *)p.ca.ep, *b = (struct hr_verbs_ep *)p.cb.ep;
        RUN(p.a, p.b, a->call && a->call->step == HR_VERBS_TRYING && b->call && b->call->step >= HR_VERBS_OPENING);
        REQUIRE(!p.ca.ups && send(a->call->source.fd, &words[i], sizeof words[i], 0) == sizeof words[i]);
        RUN(p.b, p.b, p.cb.losses || b->call->turn);
        CHECK_EQ(p.cb.loss, i < sizeof words / sizeof words[0] - 1 ? HR_ERR_PROTOCOL : HR_OK);
        if (!p.cb.losses) CHECK(strstr(inside(&p.b)->fallback, "the peer found: "));
        pair_close(&p);
    }
}

TEST(the_reason_is_told_in_full) {
    struct pair p;
    char text[HR_ABOUT];
    open_two(&p, "deaf=5", NULL);
    struct hr_verbs_domain *a = (struct hr_verbs_domain *)p.a.domain;
    for (int i = 0; i < a->paths.n; i++) memcpy(a->paths.list[i].ndev, "enp65s0f0np0", 13);
    snprintf(a->reason, sizeof a->reason, "best of 4 devices, NUMA distance 10");
    connect_pair(&p, &p.ca, &p.cb);
    REQUIRE(p.ca.ups && p.cb.ups);
    memset(a->used.gid.raw, 0x2a, 16); /* an address without zeros */
    verbs->domain_describe(p.a.domain, text, sizeof text);
    CHECK_STR(strstr(text, "IPv6, enp65s0f0np0") && strstr(text, "is UDP port 4791 open?") ? "told" : text, "told");
    pair_close(&p);
}

TEST(kinds_that_do_not_meet) {
    struct pair p;
    open_two(&p, NULL, NULL);
    struct hr_verbs_paths *a = &((struct hr_verbs_domain *)p.a.domain)->paths;
    struct hr_verbs_paths *b = &((struct hr_verbs_domain *)p.b.domain)->paths;
    a->n = 2;
    b->n = 4;
    memmove(b->list, b->list + 2, 4 * sizeof b->list[0]);
    connect_pair(&p, &p.ca, &p.cb);
    CHECK_EQ(p.ca.loss, HR_ERR_UNREACHABLE);
    CHECK(strstr(p.ca.detail, "GIDs of one kind"));
    pair_close(&p);
}

/* ---- events ---- */

static void swallow_event(const struct node *n) {
    struct ibv_async_event event;
    REQUIRE(hr_verbs_sim.get_async_event(inside(n)->ctx, &event) == 0);
    hr_verbs_sim.ack_async_event(&event);
}

TEST(ports_are_looked_at_again_after_an_event) {
    struct pair p;
    struct conn more_a = {0}, more_b = {0};
    open_two(&p, NULL, NULL);
    hr_verbs_sim_port(inside(&p.a)->ctx, 1, 0);
    RUN(p.a, p.b, inside(&p.a)->paths.n == 3);
    connect_pair(&p, &p.ca, &p.cb);
    REQUIRE(p.ca.ups && p.cb.ups);
    CHECK_EQ(port_of(&p.ca), 20 + IPV4);
    hr_verbs_sim_port(inside(&p.a)->ctx, 1, 1);
    RUN(p.a, p.b, inside(&p.a)->paths.n == 6);
    connect_pair(&p, &more_a, &more_b);
    REQUIRE(more_a.ups && more_b.ups);
    CHECK_EQ(port_of(&more_a), 10 + IPV4);
    both_ways(&p); /* the other one was left alone */
    verbs->ep_destroy(more_a.ep);
    verbs->ep_destroy(more_b.ep);
    pair_close(&p);
}

TEST(a_port_that_went_down_in_silence_is_found_out) {
    struct pair p;
    open_two(&p, NULL, NULL);
    hr_verbs_sim_port(inside(&p.b)->ctx, 1, 0);
    swallow_event(&p.b);
    CHECK_EQ(inside(&p.b)->paths.n, 6);
    connect_pair(&p, &p.ca, &p.cb);
    REQUIRE(p.ca.ups && p.cb.ups);
    CHECK_EQ(port_of(&p.cb) / 10, 2);
    both_ways(&p);
    pair_close(&p);
}

TEST(no_port_is_left) {
    struct pair p;
    open_two(&p, NULL, NULL);
    for (int port = 1; port <= 2; port++) hr_verbs_sim_port(inside(&p.a)->ctx, port, 0);
    RUN(p.a, p.b, inside(&p.a)->paths.n == 0);
    connect_pair(&p, &p.ca, &p.cb);
    CHECK_EQ(p.ca.loss, HR_ERR_UNREACHABLE);
    CHECK(strstr(p.ca.detail, "no active port"));
    pair_close(&p);
}

TEST(a_link_that_dies_ends_the_connection_with_the_reason) {
    struct pair p;
    open_two(&p, NULL, NULL);
    connect_pair(&p, &p.ca, &p.cb);
    REQUIRE(p.ca.ups && p.cb.ups);
    hr_verbs_sim_port(inside(&p.b)->ctx, 1, 0);
    RUN(p.a, p.b, (send_some(&p.ca, 100), p.ca.losses));
    CHECK_EQ(p.ca.loss, HR_ERR_PEER_LOST);
    CHECK(strstr(p.ca.detail, "retries exceeded") && strstr(p.ca.detail, "is its link up?"));
    verbs->ep_abort(p.ca.ep);
    RUN(p.a, p.b, p.cb.losses);
    pair_close(&p);
}

/* ---- what the kernel tells: a tree like sysfs, behind the device ---- */

static char tree[64];
static struct ibv_device *sim2;

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at) {
    (void)st, (void)type, (void)at;
    return remove(path);
}

static void tree_end(void) {
    if (sim2) *sim2->ibdev_path = 0;
    sim2 = NULL;
    nftw(tree, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static void tree_put(const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", tree, name);
    for (char *slash = strchr(path + strlen(tree) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    REQUIRE(file && fputs(text, file) >= 0);
    fclose(file);
}

static void tree_make(void) {
    int n;
    snprintf(tree, sizeof tree, "/tmp/hrdma-paths-XXXXXX");
    REQUIRE(mkdtemp(tree));
    for (int port = 1; port <= 2; port++)
        for (int i = 0; i < 3; i++) {
            char name[64];
            snprintf(name, sizeof name, "ports/%d/gid_attrs/ndevs/%d", port, i);
            tree_put(name, port == 1 ? "east\n" : "west\n");
            snprintf(name, sizeof name, "ports/%d/gid_attrs/types/%d", port, i);
            tree_put(name, port == 1 && i == IPV4 ? "IB/RoCE v1\n" : "RoCE v2\n");
        }
    struct ibv_device **list = hr_verbs_sim.get_device_list(&n);
    REQUIRE(list && n >= 2);
    sim2 = list[1];
    hr_verbs_sim.free_device_list(list);
    snprintf(sim2->ibdev_path, sizeof sim2->ibdev_path, "%s", tree);
}

TEST(interfaces_choose_devices_too) {
    static const struct {
        const char *ifname;
        int n, first;
    } cases[] = {{NULL, 6, 20 + IPV4}, /* port 1's is of version 1 */
                 {"east", 3, 10 + IPV6},
                 {"w*", 3, 20 + IPV4},
                 {"^east", 3, 20 + IPV4},
                 {"198.18.0.0/16", 1, 10 + IPV4},
                 {"2001:db8::/32,^west", 1, 10 + IPV6}};
    struct node n;
    char detail[256];
    tree_make();
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        REQUIRE(node_open_on(&n, 1, "sim2", cases[i].ifname, NULL, detail) == HR_OK);
        const struct hr_verbs_paths *paths = &inside(&n)->paths;
        CHECK_EQ(paths->n, cases[i].n);
        CHECK_EQ(paths->list[0].port * 10 + paths->list[0].index, cases[i].first);
        verbs->domain_close(n.domain);
    }
    CHECK_EQ(node_open_on(&n, 1, "sim2", "north", NULL, detail), HR_ERR_NO_DEVICE);
    CHECK(strstr(detail, "sim2") && strstr(detail, "north") && strstr(detail, "west"));
    CHECK_EQ(node_open_on(&n, 1, "sim2", "10.0.0.0/33", NULL, detail), HR_ERR_INVALID);
    CHECK(strstr(detail, "10.0.0.0/33"));
    REQUIRE(node_open_on(&n, 1, "sim2", "west", "gid=1", detail) == HR_OK);
    CHECK_EQ(inside(&n)->paths.n, 1);
    verbs->domain_close(n.domain);
    CHECK_EQ(node_open_on(&n, 1, "sim2", "north", "gid=1", detail), HR_ERR_NO_DEVICE);
    CHECK(strstr(detail, "north") && !strstr(detail, "no such GID"));
    REQUIRE(node_open_on(&n, 1, "sim2,sim", "north", "gid=0", detail) == HR_OK); /* the next one is tried */
    CHECK(strstr(n.domain->left, "sim2 is not used: sim2: ") && strstr(n.domain->left, "north"));
    n.domain->ops->domain_close(n.domain);
    REQUIRE(node_open_on(&n, 1, "sim", "north", NULL, detail) == HR_OK); /* is on no interface */
    verbs->domain_close(n.domain);
    tree_end();
}

static hr_status engine_open(const char *ifname, char text[HR_ABOUT]) {
    struct hr_engine *engine;
    struct hr_config config = {
        .providers = "verbs,tcp", .ifname = ifname, .rails = "tcp:lo", .devices = "verbs:sim2", .spin_us = -1};
    const char *name;
    uint8_t addr[HR_MAX_ADDR];
    size_t len;
    struct hr_caps caps;
    hr_auth_init(&config.auth, "secret", 6, 0, 1);
    hr_status status = hr_engine_open(&config, &engine, text);
    if (status != HR_OK) return status;
    hr_engine_domain(engine, 1, &name, addr, &len, &caps, text);
    CHECK_STR(name, "verbs");
    hr_engine_close(engine, hr_now());
    return HR_OK;
}

TEST(rails_of_tcp_choose_no_device) {
    char text[HR_ABOUT];
    tree_make();
    CHECK_EQ(engine_open(NULL, text), HR_OK);
    CHECK(strstr(text, "of 6;"));
    CHECK_EQ(engine_open("west", text), HR_OK);
    CHECK(strstr(text, "port 2") && strstr(text, "of 3; IPv4-mapped RoCE v2 goes before global IPv6 RoCE v2; "));
    CHECK(strstr(text, "; HRDMA_IFNAME leaves out 3; "));
    tree_end();
}

TEST(near_devices_are_known) {
    tree_make();
    CHECK_EQ(hr_verbs_numa_distance(sim2, 0), 10); /* nothing is told */
    tree_put("device/numa_node", "-1\n");
    CHECK_EQ(hr_verbs_numa_distance(sim2, 0), 10);
    tree_put("device/numa_node", "3\n");
    CHECK_EQ(hr_verbs_numa_distance(sim2, 3), 10);
    CHECK(hr_verbs_numa_distance(sim2, 100000) > 10); /* no such node */
    tree_end();
}

TEST(a_device_without_a_driver_is_named) {
    char name[64];
    tree_make();
    CHECK_EQ(hr_verbs_driverless(tree, &sim2, 1, name), 1);
    CHECK_STR(name, "ports");
    CHECK_EQ(hr_verbs_driverless("/nonexistent", &sim2, 1, name), 0);
    tree_end();
    REQUIRE(mkdir(tree, 0700) == 0);
    tree_put("sim9", "");
    CHECK_EQ(hr_verbs_driverless(tree, NULL, 0, name), 1);
    CHECK_STR(name, "sim9");
    tree_end();
}

/* ---- memory that cannot be pinned ---- */

TEST(the_memlock_limit_is_told) {
    struct pair p;
    struct rlimit old, low;
    REQUIRE(getrlimit(RLIMIT_MEMLOCK, &old) == 0);
    low = (struct rlimit){.rlim_cur = old.rlim_max < 65536 ? old.rlim_max : 65536, .rlim_max = old.rlim_max};
    REQUIRE(setrlimit(RLIMIT_MEMLOCK, &low) == 0);
    open_two(&p, "reg_errno=1", NULL);
    connect_pair(&p, &p.ca, &p.cb);
    CHECK_EQ(p.ca.loss, HR_ERR_UNREACHABLE);
    CHECK(strstr(p.ca.detail, "cannot register") && strstr(p.ca.detail, "KiB for a connection"));
    CHECK(strstr(p.ca.detail, "ulimit -l unlimited"));
    CHECK(inside(&p.a)->inject.registrations > 0);
    setrlimit(RLIMIT_MEMLOCK, &old);
    pair_close(&p);
}

TEST(arenas_that_cannot_be_pinned_are_copied) {
    enum { LEN = 1 << 18 };
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    uint8_t *here = hr_arena_alloc(LEN, 0), *there = hr_arena_alloc(LEN, HR_ARENA_WRITABLE_BY_PEERS);
    pair_open(&p, NULL);
    ((struct hr_verbs_domain *)p.a.domain)->inject.reg_error = 1;
    share(&p, there, LEN, &mem, &rmem);
    memset(here, 5, LEN);
    struct hr_rma write = {.local = here, .len = LEN, .remote = &rmem, .with_notify = 1, .value = 7, .cookie = &p};
    CHECK(!hr_is_error(verbs->post_write(p.ca.ep, &write)));
    RUN(p.a, p.b, p.cb.notifies == 1);
    CHECK_MEM(there, here, LEN);
    CHECK_EQ(inside(&p.a)->counts.staged, LEN);
    verbs->mem_deregister(p.b.domain, &mem);
    pair_close(&p);
    hr_arena_free(here);
    hr_arena_free(there);
}

/* Half a second where nobody counts, or another rail takes over. */
TEST(retries_last_longer_than_a_peer_may_be_silent) {
    static const struct {
        const char *options;
        int exponent;
    } cases[] = {{NULL, 14}, {"silence=0.2", 14}, {"silence=5", 18}, {"silence=60", 22}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ibv_qp_attr attr = {0};
        struct ibv_qp_init_attr init;
        struct pair p;
        pair_open_with(&p, cases[i].options, NULL);
        hr_verbs_sim.query_qp(((struct hr_verbs_ep *)p.ca.ep)->qp, &attr, IBV_QP_TIMEOUT, &init);
        CHECK_EQ(attr.timeout, cases[i].exponent);
        if (i > 0) CHECK(4.096e-6 * (1 << attr.timeout) * (HR_VERBS_RETRIES + 1) > 1.4 * atof(cases[i].options + 8));
        pair_close(&p);
    }
}
