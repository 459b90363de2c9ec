/* test_verbs_devices.c - the names of devices: what is not there, what will not do now, and whose number stays free. */

#include "bond_rig.h"

static hr_status open_named(struct bond_rig *rig, int i, const char *device, const char *options, char detail[256]) {
    detail[0] = 0;
    return bond_side_open(rig, i, device, options, detail);
}

static void close_side(struct bond_rig *rig, int i) {
    if (rig->side[i].ep) rig->side[i].domain->ops->ep_destroy(rig->side[i].ep);
    rig->side[i].domain->ops->domain_close(rig->side[i].domain);
    rig->side[i].ep = NULL;
}

TEST(what_is_named_and_not_there_is_an_error) {
    static const struct {
        const char *device, *text;
        hr_status status;
    } cases[] = {
        {"nope", "nope", HR_ERR_NO_DEVICE},
        {"sim,nope", "nope", HR_ERR_NO_DEVICE},
        {"nope,sim", "nope", HR_ERR_NO_DEVICE},
        {"sim,sim,sim,nope", "nope", HR_ERR_NO_DEVICE},
        {"sim2,no*,nope:2", "nope", HR_ERR_NO_DEVICE},
        {"sim,sim:9", "sim has no port 9: it has 1", HR_ERR_NO_DEVICE},
        {"sim2:3", "sim2 has no port 3: it has 2", HR_ERR_NO_DEVICE},
        {"no*", "no*", HR_ERR_NO_DEVICE},
        {" , ", "no RDMA device", HR_ERR_NO_DEVICE},
        {"sim:abc", "sim:abc names no port: 'abc'", HR_ERR_INVALID},
        {"sim,sim2:1x", "sim2:1x names no port: '1x'", HR_ERR_INVALID},
        {"sim:", "sim: names no port: ''", HR_ERR_INVALID},
        {"sim:0", "'0'", HR_ERR_INVALID},
        {"sim:+1", "'+1'", HR_ERR_INVALID},
        {"sim: 1", "' 1'", HR_ERR_INVALID},
        {"sim:256", "'256'", HR_ERR_INVALID},
        {"sim:1:1", "'1:1'", HR_ERR_INVALID},
        {"no*:y,sim", "no*:y", HR_ERR_INVALID},
    };
    struct bond_rig rig = {0};
    char detail[256];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_EQ(open_named(&rig, 0, cases[i].device, NULL, detail), cases[i].status);
        CHECK_STR(strstr(detail, cases[i].text) ? cases[i].text : detail, cases[i].text);
    }
}

TEST(blanks_around_names_are_none) {
    static const char *const cases[] = {"sim, sim2", " sim ,\tsim2:2 ", "sim,, sim2,"};
    struct bond_rig rig = {0};
    char detail[256];
    for (int i = 0; i < 3; i++) {
        REQUIRE(open_named(&rig, 0, cases[i], NULL, detail) == HR_OK);
        CHECK_EQ(bond_of(&rig.side[0])->opened, 2);
        CHECK_STR(bond_of(&rig.side[0])->rails[0]->name, "sim");
        CHECK_STR(bond_of(&rig.side[0])->rails[1]->name, "sim2");
        CHECK_STR(rig.side[0].domain->left, "");
        close_side(&rig, 0);
    }
}

TEST(what_is_done_without_is_said) {
    static const struct {
        const char *device, *left;
    } cases[] = {
        {"no_such_*,sim", "no_such_* is not used: "}, /* none is called so, or there is no library to ask */
        {"sim,sim,sim2,sim2", "sim2 is not used: 3 devices are the most"},
        {"sim2,sim,sim", "sim is not used: verbs option gid=2: sim has no such GID; it has 1 entries; sim is"}};
    struct bond_rig rig = {0};
    char detail[256];
    for (int i = 0; i < 3; i++) {
        REQUIRE(open_named(&rig, 0, cases[i].device, i == 2 ? "gid=2" : NULL, detail) == HR_OK);
        const char *left = rig.side[0].domain->left;
        CHECK_STR(strstr(left, cases[i].left) ? cases[i].left : left, cases[i].left);
        close_side(&rig, 0);
    }
    CHECK_EQ(open_named(&rig, 0, "sim,sim", "gid=2", detail), HR_ERR_INVALID); /* nothing is left */
    CHECK(strstr(detail, "sim has no such GID; it has 1 entries"));
}

/* "sim" has no GID 2, as a port that is down has none: what is behind it keeps its number, and meets that number. */
TEST(a_device_that_will_not_do_leaves_its_number_free) {
    struct bond_rig rig = {0};
    char detail[256];
    REQUIRE(open_named(&rig, 0, "sim,sim2", "gid=2", detail) == HR_OK);
    REQUIRE(open_named(&rig, 1, "sim2,sim2", "gid=2", detail) == HR_OK);
    struct hr_bond *bond = bond_of(&rig.side[0]);
    CHECK_EQ(bond->n, 2);
    CHECK(!bond->rails[0]);
    CHECK_STR(bond->rails[1]->name, "sim2");
    bond_connect(&rig);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(lanes_up(&rig.side[i]), 1);
        CHECK(hr_bond_lane_up(bond_ep_of(&rig.side[i]), 1));
    }
    for (int i = 0; i < 2; i++) close_side(&rig, i);
}

/* Its only rail is the second, the peer's only one the first: they would be of different networks. */
TEST(rails_of_different_numbers_do_not_meet) {
    struct bond_rig rig = {0};
    char detail[256];
    uint8_t addr[HR_MAX_ADDR];
    REQUIRE(open_named(&rig, 0, "sim,sim2", "gid=2", detail) == HR_OK);
    REQUIRE(open_named(&rig, 1, "sim2,sim", "gid=2", detail) == HR_OK);
    struct hr_domain *a = rig.side[0].domain;
    size_t len = rig.side[1].domain->ops->domain_address(rig.side[1].domain, addr);
    REQUIRE(a->ops->ep_create(a, 2, &rig.side[0], &rig.side[0].ep) == HR_OK);
    CHECK_EQ(a->ops->ep_connect(rig.side[0].ep, addr, len, 1), HR_ERR_UNREACHABLE);
    for (int i = 0; i < 2; i++) close_side(&rig, i);
}

TEST(why_a_gid_is_chosen) {
    struct hr_verbs_path ipv4 = {.kind = 4, .mtu = 5, .ethernet = 1}, ipv6 = {.kind = 3, .mtu = 5, .ethernet = 1};
    struct hr_verbs_path narrow = {.kind = 4, .mtu = 3, .ethernet = 1}, old = {.kind = 1, .mtu = 5, .ethernet = 1};
    struct hr_verbs_path ib = {.kind = 2, .mtu = 5};
    struct {
        struct hr_verbs_path list[3];
        int n, i, gid, excluded;
        const char *text;
    } cases[] = {{{ipv4}, 1, 0, -1, 0, "there is no other"},
                 {{ipv4, ipv4}, 2, 0, -1, 0, "the first of 2 that are equal"},
                 {{ipv4, ipv4, ipv6}, 3, 0, -1, 0, "IPv4-mapped RoCE v2 goes before global IPv6 RoCE v2"},
                 {{ipv4, ipv6, old}, 3, 1, -1, 0, "global IPv6 RoCE v2 goes before RoCE v1"},
                 {{ipv4, narrow, ipv6}, 3, 0, -1, 0, "MTU 4096 goes before 1024"},
                 {{ib}, 1, 0, -1, 2, "there is no other; HRDMA_IFNAME leaves out 2"},
                 {{ipv4, ipv6}, 2, 0, 1, 0, "gid=1 asks for it"}};
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        struct hr_verbs_paths paths = {.n = cases[k].n, .excluded = cases[k].excluded};
        struct hr_verbs_wish wish = {.gid = cases[k].gid};
        char text[200];
        memcpy(paths.list, cases[k].list, sizeof cases[k].list);
        hr_verbs_path_why(&wish, &paths, cases[k].i, text);
        CHECK_STR(text, cases[k].text);
    }
    char kind[40];
    hr_verbs_path_kind(&ib, kind);
    CHECK_STR(kind, "link-local");
}
