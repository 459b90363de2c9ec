/* test_tcp.c - the tcp provider: connecting, strangers, streams, options. What all providers do is in conformance.c. */

#include <arpa/inet.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>

#include "tcp_rig.h"

/* ---- connecting ---- */

/* An address of a tcp domain that lists these IPv4 hosts and ports. */
static size_t made_address(uint8_t *bytes, uint64_t host_id, int n, const char *const *hosts, const uint16_t *ports) {
    bytes[0] = 1;
    bytes[1] = (uint8_t)n;
    memcpy(bytes + 2, &host_id, 8);
    for (int i = 0; i < n; i++) {
        uint16_t port = htons(ports[i]);
        bytes[10 + 7 * i] = 4;
        memcpy(bytes + 11 + 7 * i, &port, 2);
        REQUIRE(inet_pton(AF_INET, hosts[i], bytes + 13 + 7 * i) == 1);
    }
    return 10 + 7 * (size_t)n;
}

static uint16_t port_of(const struct node *n) { return (uint16_t)(n->addr[11] << 8 | n->addr[12]); }

/* A listener that is not ours. backlog < 0: bound and not listening, so that nobody else gets the port. */
static int stranger(uint16_t *port_p, int backlog) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(!bind(fd, (void *)&at, len) && !getsockname(fd, (void *)&at, &len));
    if (backlog >= 0) REQUIRE(!listen(fd, backlog));
    *port_p = ntohs(at.sin_port);
    return fd;
}

TEST(nobody_listens) {
    struct node a;
    struct conn c;
    uint8_t bytes[HR_MAX_ADDR];
    uint16_t port;
    int fd = stranger(&port, -1);
    char expected[64];
    node_open(&a, 1, "lo", NULL);
    conn_start(&c, &a, 2, bytes, made_address(bytes, 0, 1, (const char *[]){"127.0.0.1"}, &port), 1);
    CHECK_EQ(c.losses, 0); /* never from ep_connect */
    RUN(&a, NULL, c.losses);
    CHECK_EQ(c.loss, HR_ERR_UNREACHABLE);
    snprintf(expected, sizeof expected, "127.0.0.1:%d", port);
    CHECK(strstr(c.detail, expected) && strstr(c.detail, "Connection refused"));
    rig_pump(&a, NULL, 50);
    CHECK_EQ(c.losses, 1);
    tcp->ep_destroy(c.ep);
    tcp->domain_close(a.domain);
    close(fd);
}

/* The first address refuses, the second accepts and says nothing, the third belongs to somebody who talks otherwise. */
TEST(the_next_address_is_tried) {
    struct node a, b;
    struct conn ca, cb;
    uint8_t bytes[HR_MAX_ADDR];
    uint16_t ports[4];
    const char *hosts[4] = {"127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1"};
    int refuses = stranger(&ports[0], -1), silent = stranger(&ports[1], 8), talks = stranger(&ports[2], 8);
    node_open(&a, 1, "127.0.0.1", NULL);
    node_open(&b, 2, "127.0.0.1", NULL);
    ports[3] = port_of(&b);
    conn_start(&cb, &b, 1, a.addr, a.addr_len, 0);
    conn_start(&ca, &a, 2, bytes, made_address(bytes, 0, 4, hosts, ports), 1);
    double start = rig_seconds();
    int fd = -1;
    while (!ca.ups && !ca.losses && rig_seconds() < start + 10) {
        rig_pump(&a, &b, 1);
        if (fd >= 0 || poll(&(struct pollfd){.fd = talks, .events = POLLIN}, 1, 0) != 1) continue;
        fd = accept(talks, NULL, NULL);
        CHECK(write(fd, "220 hello\r\n", 11) == 11);
    }
    CHECK_EQ(ca.ups, 1);
    CHECK(rig_seconds() - start > 1 && rig_seconds() - start < 8);
    tcp->ep_destroy(ca.ep);
    tcp->ep_destroy(cb.ep);
    tcp->domain_close(a.domain);
    tcp->domain_close(b.domain);
    close(refuses), close(silent), close(talks), close(fd);
}

TEST(without_a_token_only_this_host) {
    struct node a, b;
    struct conn ca, cb;
    uint8_t bytes[HR_MAX_ADDR];
    uint16_t port = 4242;
    char detail[256];
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    hr_auth_init(&a.auth, NULL, 0, 0, 1);
    hr_auth_init(&b.auth, NULL, 0, 0, 1);
    REQUIRE(node_try(&a, 1, NULL, NULL, detail) == HR_OK && node_try(&b, 2, NULL, NULL, detail) == HR_OK);
    rig_connect(&a, &b, &ca, &cb);
    tcp->ep_destroy(ca.ep);
    conn_start(&ca, &a, 2, bytes, made_address(bytes, 7, 1, (const char *[]){"198.51.100.77"}, &port), 1);
    RUN(&a, NULL, ca.losses);
    CHECK_EQ(ca.loss, HR_ERR_AUTH);
    CHECK(strstr(ca.detail, "HRDMA_TOKEN"));
    tcp->ep_destroy(ca.ep);
    tcp->ep_destroy(cb.ep);
    tcp->domain_close(a.domain);
    tcp->domain_close(b.domain);
}

static void connects_over(const char *ifname) {
    struct node a, b;
    struct conn ca, cb;
    node_open(&a, 1, ifname, NULL);
    node_open(&b, 2, ifname, NULL);
    rig_connect(&a, &b, &ca, &cb);
    CHECK_EQ(rig_send(&ca, 5, "hello", 5), HR_OK);
    RUN(&a, &b, cb.messages);
    CHECK_EQ(tcp->ep_set_class(ca.ep, 46, 3), HR_OK);
    int value = 0, fd = ((struct hr_tcp_ep *)ca.ep)->source.fd;
    socklen_t len = sizeof value;
    int v6 = strchr(ifname, ':') != NULL;
    CHECK(!getsockopt(fd, v6 ? IPPROTO_IPV6 : IPPROTO_IP, v6 ? IPV6_TCLASS : IP_TOS, &value, &len));
    CHECK_EQ(value >> 2, 46);
    CHECK(!getsockopt(fd, SOL_SOCKET, SO_PRIORITY, &value, &len));
    CHECK_EQ(value, 4); /* the kernel counts the other way */
    CHECK_EQ(tcp->ep_set_class(ca.ep, 46, 0), HR_OK);
    CHECK(!getsockopt(fd, SOL_SOCKET, SO_PRIORITY, &value, &len));
    CHECK_EQ(value, 6);
    CHECK_EQ(tcp->ep_set_class(ca.ep, 64, 0), HR_ERR_INVALID);
    tcp->ep_destroy(ca.ep);
    tcp->ep_destroy(cb.ep);
    tcp->domain_close(a.domain);
    tcp->domain_close(b.domain);
}

TEST(ipv4) { connects_over("127.0.0.1"); }
TEST(ipv6) {
    struct hr_iface *list;
    int has = 0, n = hr_ifaces_scan(&list);
    for (int i = 0; i < n; i++) has |= list[i].at.sa.sa_family == AF_INET6 && list[i].loopback;
    if (n >= 0) free(list);
    if (!has) SKIP("this host has no IPv6");
    connects_over("::1");
}

TEST(streams_of_one_peer_pair_in_order) {
    struct node a, b;
    struct conn ca[3], cb[3];
    node_open(&a, 1, "lo", NULL);
    node_open(&b, 2, "lo", NULL);
    for (int i = 0; i < 3; i++) conn_start(&ca[i], &a, 2, b.addr, b.addr_len, 1);
    rig_pump(&a, &b, 20); /* all of them wait to be met */
    for (int i = 0; i < 3; i++) conn_start(&cb[i], &b, 1, a.addr, a.addr_len, 0);
    for (int i = 0; i < 3; i++) RUN(&a, &b, ca[i].ups && cb[i].ups);
    for (int i = 0; i < 3; i++) CHECK_EQ(rig_send(&ca[i], 100 + (uint64_t)i, NULL, 0), HR_OK);
    for (int i = 0; i < 3; i++) {
        RUN(&a, &b, cb[i].messages);
        CHECK_EQ(cb[i].hdr[0], 100 + i);
    }
    /* One goes and comes again, the others stay. */
    tcp->ep_destroy(ca[1].ep);
    RUN(&a, &b, cb[1].losses);
    tcp->ep_destroy(cb[1].ep);
    rig_connect(&a, &b, &ca[1], &cb[1]);
    CHECK_EQ(rig_send(&cb[2], 7, NULL, 0), HR_OK);
    RUN(&a, &b, ca[2].messages);
    for (int i = 0; i < 3; i++) tcp->ep_destroy(ca[i].ep), tcp->ep_destroy(cb[i].ep);
    tcp->domain_close(a.domain);
    tcp->domain_close(b.domain);
}

/* More silent strangers than are let in at a time: they are thrown out after their seconds, then the peer is served. */
TEST(silent_strangers_do_not_lock_out_a_peer) {
    struct node a, b;
    struct conn ca, cb;
    int fds[260], before = rig_fds();
    rig_strangers.n = 0;
    node_open(&a, 1, "127.0.0.1", NULL);
    node_open(&b, 2, "127.0.0.1", NULL);
    struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(port_of(&b))};
    for (int i = 0; i < 260; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        REQUIRE(!connect(fds[i], (void *)&at, sizeof at));
    }
    RUN(&a, &b, ((struct hr_tcp_domain *)b.domain)->door.half_open == 256);
    rig_pump(&a, &b, 50);
    CHECK_EQ(((struct hr_tcp_domain *)b.domain)->door.half_open, 256);
    /* Full, it must not keep a sleeper awake. */
    struct pollfd pfd = {.fd = tcp->event_fd(b.domain), .events = POLLIN};
    int woken = 0;
    for (int i = 0; i < 10; i++) {
        woken += poll(&pfd, 1, 10);
        rig_pump(NULL, &b, 0);
    }
    CHECK(woken < 8);
    conn_start(&cb, &b, 1, a.addr, a.addr_len, 0);
    conn_start(&ca, &a, 2, b.addr, b.addr_len, 1);
    RUN(&a, &b, ca.ups && cb.ups);
    CHECK_EQ(ca.losses, 0);
    CHECK_EQ(rig_strangers.n, 1); /* not one for each of them */
    CHECK(strstr(rig_strangers.text, "127.0.0.1:") && strstr(rig_strangers.text, "did not prove within 5 s"));
    for (int i = 0; i < 260; i++) close(fds[i]);
    tcp->ep_destroy(ca.ep);
    tcp->ep_destroy(cb.ep);
    tcp->domain_close(a.domain);
    tcp->domain_close(b.domain);
    CHECK_EQ(rig_fds(), before);
}

/* ---- options ---- */

TEST(options_are_checked) {
    static const char *const wrong[][2] = {
        {"speed=1", "speed"},        {"cc=nonsense", "nonsense"}, {"cc", "cc="},
        {"sndbuf=0", "sndbuf=0"},    {"rcvbuf=4Q", "4Q"},         {"sndbuf=9G", "9G"},
        {"user_timeout=x", "86400"}, {"cc=auto,,x=1", "'x'"},     {"sndbuf=-4K", "-4K"},
        {"streams=5", "1 to 4"},     {"streams=0", "streams=0"}};
    struct node n;
    char detail[256];
    memset(&n, 0, sizeof n);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK_EQ(node_try(&n, 1, "lo", wrong[i][0], detail), HR_ERR_INVALID);
        if (!strstr(detail, wrong[i][1])) fprintf(stderr, "%s: %s\n", wrong[i][0], detail);
        CHECK(strstr(detail, wrong[i][1]));
    }
    CHECK_EQ(node_try(&n, 1, "no-such-*", NULL, detail), HR_ERR_NO_DEVICE);
    CHECK(strstr(detail, "no-such-*") && strstr(detail, "127.0.0.1"));
    struct hr_domain_params params = {.device = "mlx5_0", .auth = &n.auth, .sink = &rig_sink};
    CHECK_EQ(tcp->domain_open(tcp, &params, &n.domain, detail), HR_ERR_INVALID);
    CHECK(strstr(detail, "mlx5_0"));
}

static void cc_is(const char *options, const char *one) {
    struct node a, b;
    struct conn ca, cb;
    char name[16] = "", text[512];
    socklen_t len = sizeof name;
    node_open(&a, 1, "lo", options);
    node_open(&b, 2, "lo", options);
    rig_connect(&a, &b, &ca, &cb);
    for (int i = 0; i < 2; i++) {
        int fd = ((struct hr_tcp_ep *)(i ? ca.ep : cb.ep))->source.fd;
        CHECK(!getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &len));
        CHECK_STR(name, one);
    }
    tcp->domain_describe(a.domain, text, sizeof text);
    CHECK(strstr(text, "127.0.0.1:") && (strstr(text, name) || strstr(text, "system")));
    tcp->ep_destroy(ca.ep);
    tcp->ep_destroy(cb.ep);
    tcp->domain_close(a.domain);
    tcp->domain_close(b.domain);
}

TEST(congestion_control) {
    char name[16] = "";
    socklen_t len = sizeof name;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    REQUIRE(!getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &len));
    close(fd);
    cc_is(NULL, "reno");
    cc_is("cc=reno", "reno");
    cc_is("cc=system", name);
}
