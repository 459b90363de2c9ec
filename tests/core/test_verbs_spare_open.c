/* test_verbs_spare_open.c - rails of devices, and the one over tcp, that do not open or that one end lacks. */

#include <arpa/inet.h>
#include <sys/resource.h>

#include "bond_rig.h"

/* Bridges inside this host, which no device is behind, do not take all the places. */
TEST(where_the_spare_rail_is_called) {
    static struct hr_verbs_domain d = {.is_tcp = 1};
    static const char *const names[] = {"eth0", "br0", "br1", "br2", "eth1", "lo"};
    struct hr_iface ifaces[6];
    union hr_sockaddr list[HR_BOND_ADDRESSES];
    for (int i = 0; i < 6; i++) {
        ifaces[i] = (struct hr_iface){.prefix = 24, .loopback = i == 5};
        snprintf(ifaces[i].name, sizeof ifaces[i].name, "%s", names[i]);
        ifaces[i].at.v4.sin_family = AF_INET;
        ifaces[i].at.v4.sin_addr.s_addr = htonl(0x0a000001u + ((unsigned)i << 8));
    }
    strcpy(d.behind[0], "eth1");
    strcpy(d.behind[HR_VERBS_PATHS], "eth0");
    d.ifaces = ifaces;
    static const struct {
        int first, n, expected[3], count;
    } cases[] = {
        {0, 6, {1, 2, 0}, 3},                                          /* one of those that share a device's fate */
        {0, 2, {1, 0}, 2},    {4, 2, {4, 5}, 2}, {1, 3, {1, 2, 3}, 3}, /* there is none */
        {3, 3, {3, 4, 5}, 3},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        d.ifaces = ifaces + cases[k].first;
        d.nifaces = cases[k].n;
        CHECK_EQ(hr_verbs_call_addresses(&d, list, HR_BOND_ADDRESSES), cases[k].count);
        for (int i = 0; i < cases[k].count; i++) CHECK(hr_sockaddr_same(&list[i], &ifaces[cases[k].expected[i]].at));
    }
}

/* An interface that is not there: the devices are used, and it is said why tcp is not. */
TEST(a_spare_rail_that_does_not_open_is_left) {
    struct bond_rig rig = {0};
    char detail[256];
    for (int i = 0; i < 2; i++) {
        struct bond_side *side = &rig.side[i];
        side->rig = &rig;
        hr_auth_init(&side->auth, "secret", 6, 0, 0);
        struct hr_domain_params params = {.self_id = (uint64_t)i + 1, .device = "sim2", .auth = &side->auth};
        params.sink = &bond_sink;
        params.options = "fallback=tcp";
        params.ifname = i ? "nowhere*" : NULL;
        REQUIRE(hr_provider_verbs.domain_open(&hr_provider_verbs, &params, &side->domain, detail) == HR_OK);
    }
    CHECK(!*rig.side[0].domain->left);
    CHECK(strstr(rig.side[1].domain->left, "tcp is not used: "));
    CHECK(strstr(rig.side[1].domain->left, "nowhere"));
    bond_connect(&rig);
    CHECK_EQ(lanes_up(&rig.side[0]), 1);
    CHECK(carried(&rig));
    for (int i = 0; i < 2; i++) rig.side[i].domain->ops->ep_destroy(rig.side[i].ep);
    for (int i = 0; i < 2; i++) rig.side[i].domain->ops->domain_close(rig.side[i].domain);
}

/* With fewer files than two devices need, one of them is done without. */
TEST(a_device_that_does_not_open_is_left) {
    struct rlimit was, tight;
    int partly = 0, whole = 0;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &was) == 0);
    for (rlim_t n = 8; n < 100 && !whole; n++) {
        struct bond_rig rig = {0};
        char detail[256] = "";
        tight = (struct rlimit){n, was.rlim_max};
        REQUIRE(setrlimit(RLIMIT_NOFILE, &tight) == 0);
        hr_status status = bond_side_open(&rig, 0, "sim2,sim2", NULL, detail);
        REQUIRE(setrlimit(RLIMIT_NOFILE, &was) == 0);
        if (status != HR_OK) {
            CHECK(*detail && !partly);
            continue;
        }
        const char *left = rig.side[0].domain->left;
        struct hr_verbs_domain *const *rails = bond_of(&rig.side[0])->rails;
        if (rig.side[0].domain->ops->domain_close != hr_provider_verbs.domain_close) {
            whole = rails[0] && rails[1];
            partly += !whole;
            CHECK(whole ? !*left : strstr(left, "sim2 is not used: ") != NULL);
        }
        REQUIRE(bond_side_open(&rig, 1, "sim2,sim2", NULL, detail) == HR_OK);
        if (!whole && rig.side[0].domain->ops->domain_close != hr_provider_verbs.domain_close) {
            bond_connect(&rig);
            CHECK_EQ(lanes_up(&rig.side[0]), 1);
            CHECK(carried(&rig));
            for (int i = 0; i < 2; i++) rig.side[i].domain->ops->ep_destroy(rig.side[i].ep);
        }
        for (int i = 0; i < 2; i++) rig.side[i].domain->ops->domain_close(rig.side[i].domain);
    }
    CHECK(partly && whole);
}

/* Rails are paired by number, whichever are there. */
TEST(a_rail_that_one_end_lacks) {
    for (int lacks = 0; lacks < 3; lacks++) {
        struct bond_rig rig = {0};
        char detail[256];
        for (int i = 0; i < 2; i++) REQUIRE(bond_side_open(&rig, i, "sim2,sim2,sim2", NULL, detail) == HR_OK);
        struct hr_bond *bond = bond_of(&rig.side[1]);
        struct hr_verbs_domain *without = bond->rails[lacks];
        bond->rails[lacks] = NULL;
        bond->address_len = hr_verbs_addresses_write(bond->rails, bond->n, bond->address);
        bond_connect(&rig);
        UNTIL(&rig, all_up(&rig));
        CHECK_EQ(lanes_up(&rig.side[0]), 2);
        CHECK(bond_ep_of(&rig.side[0])->n <= lacks || bond_ep_of(&rig.side[0])->lanes[lacks].stage == HR_BOND_NONE);
        CHECK(carried(&rig));
        for (int i = 0; i < 2; i++) rig.side[i].domain->ops->ep_destroy(rig.side[i].ep);
        bond->rails[lacks] = without;
        for (int i = 0; i < 2; i++) rig.side[i].domain->ops->domain_close(rig.side[i].domain);
    }
}
