/* test_ifaces.c - the interface grammar, on a host that is made up. */

#include <arpa/inet.h>

#include "check.h"
#include "hr/ifaces.h"

#define N 7
static struct hr_iface host[N];

static void add(int i, const char *name, const char *address, int prefix) {
    memset(&host[i], 0, sizeof host[i]);
    snprintf(host[i].name, sizeof host[i].name, "%s", name);
    host[i].prefix = (uint8_t)prefix;
    host[i].loopback = strcmp(name, "lo") == 0;
    if (inet_pton(AF_INET, address, &host[i].at.v4.sin_addr) == 1)
        host[i].at.sa.sa_family = AF_INET;
    else if (inet_pton(AF_INET6, address, &host[i].at.v6.sin6_addr) == 1)
        host[i].at.sa.sa_family = AF_INET6;
    else
        REQUIRE(!"an address");
}

static void make_host(void) {
    add(0, "eth0", "10.1.2.3", 16);
    add(1, "eth0", "fd00:1::3", 64);
    add(2, "eth1", "10.2.2.3", 16);
    add(3, "docker0", "172.17.0.1", 16);
    add(4, "ib0", "192.168.7.3", 25);
    add(5, "lo", "127.0.0.1", 8);
    add(6, "lo", "::1", 128);
}

static const char *chosen(const char *grammar) {
    static char text[N + 1];
    char detail[256] = "";
    make_host();
    hr_status status = hr_ifaces_choose(host, N, grammar, detail);
    if (status == HR_ERR_INVALID) return "invalid";
    if (status == HR_ERR_NO_DEVICE) return "none";
    for (int i = 0; i < N; i++) text[i] = host[i].chosen ? '1' : '.';
    return text;
}

TEST(what_a_grammar_chooses) {
    static const struct {
        const char *grammar, *expected;
    } cases[] = {
        {NULL, "1111111"},
        {"", "1111111"},
        {"eth0", "11....."},
        {"eth*", "111...."},
        {"eth[1-9]", "..1...."},
        {"eth0,ib0", "11..1.."},
        {" eth0 , ib0 ", "11..1.."},
        {"^docker0", "111.111"},
        {"^docker*,^lo", "111.1.."},
        {"^lo,eth*", "111...."},
        {"eth*,^eth1", "11....."},
        {"^eth1,eth*", "11....."},
        {"10.0.0.0/8", "1.1...."},
        {"10.1.0.0/16", "1......"},
        {"10.1.2.3", "1......"},
        {"10.1.2.3/16", "1......"},
        {"192.168.7.0/25", "....1.."},
        {"192.168.7.128/25", "none"},
        {"0.0.0.0/0", "1.1111."},
        {"::/0", ".1....1"},
        {"fd00:1::/64", ".1....."},
        {"fd00:2::/64", "none"},
        {"eth0,^::/0", "1......"},
        {"10.0.0.0/8,^10.2.0.0/16,lo", "1....11"},
        {"eth0,wlan0", "11....."},
        {"wlan0", "none"},
        {"eth", "none"},
        {"^*", "none"},
        {",", "invalid"},
        {"eth0,", "invalid"},
        {"^", "invalid"},
        {"eth0,,eth1", "invalid"},
        {"10.0.0.0/33", "invalid"},
        {"10.0.0.0/", "invalid"},
        {"10.0.0.0/x", "invalid"},
        {"10.0.0.0/-1", "invalid"},
        {"::/129", "invalid"},
        {"10.0.0/8", "invalid"},
        {"eth0/8", "invalid"},
        {"a-name-that-is-longer-than-any-interface-or-network-could-ever-be-written", "invalid"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *got = chosen(cases[i].grammar);
        if (strcmp(got, cases[i].expected)) fprintf(stderr, "grammar '%s':\n", cases[i].grammar);
        CHECK_STR(got, cases[i].expected);
    }
}

TEST(messages_show_the_item_and_what_exists) {
    char detail[256] = "";
    make_host();
    CHECK_EQ(hr_ifaces_choose(host, N, "eth0,10.0.0.0/33", detail), HR_ERR_INVALID);
    CHECK(strstr(detail, "10.0.0.0/33") && strstr(detail, "0..32"));
    CHECK_EQ(hr_ifaces_choose(host, N, "wlan0", detail), HR_ERR_NO_DEVICE);
    CHECK(strstr(detail, "wlan0") && strstr(detail, "eth1 10.2.2.3/16"));
    CHECK_EQ(hr_ifaces_choose(host, 0, NULL, detail), HR_ERR_NO_DEVICE);
    CHECK(strstr(detail, "ip link set lo up"));
    char many[200] = "a";
    for (int i = 0; i < 64; i++) strcat(many, ",a");
    CHECK_EQ(hr_ifaces_choose(host, N, many, detail), HR_ERR_INVALID);
    CHECK(strstr(detail, "64"));
}

TEST(networks) {
    union hr_sockaddr a = {.v4 = {.sin_family = AF_INET}}, b = a, v6 = {.v6 = {.sin6_family = AF_INET6}};
    char text[HR_SOCKADDR_TEXT];
    a.v4.sin_addr.s_addr = htonl(0xc0a80780);
    b.v4.sin_addr.s_addr = htonl(0xc0a807ff);
    CHECK(hr_sockaddr_within(&a, &b, 25) && !hr_sockaddr_within(&a, &b, 26) && hr_sockaddr_within(&a, &b, 0));
    CHECK(!hr_sockaddr_within(&a, &v6, 0));
    hr_sockaddr_set_port(&a, 4242);
    CHECK_STR(hr_sockaddr_text(&a, text), "192.168.7.128:4242");
    v6.v6.sin6_addr = in6addr_loopback;
    CHECK(hr_sockaddr_loopback(&v6) && !hr_sockaddr_loopback(&a));
    CHECK_STR(hr_sockaddr_text(&v6, text), "::1");
    hr_sockaddr_set_port(&v6, 80);
    CHECK_STR(hr_sockaddr_text(&v6, text), "[::1]:80");
}

TEST(this_host) {
    struct hr_iface *list;
    int n = hr_ifaces_scan(&list), loopback = 0;
    REQUIRE(n >= 0);
    for (int i = 0; i < n; i++) {
        CHECK(list[i].loopback >= loopback); /* loopback comes last */
        loopback = list[i].loopback;
        CHECK_EQ(hr_sockaddr_port(&list[i].at), 0);
        CHECK(list[i].prefix > 0);
        CHECK_EQ(hr_sockaddr_loopback(&list[i].at), list[i].loopback);
    }
    free(list);
}
