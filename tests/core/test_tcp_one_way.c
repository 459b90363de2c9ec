/* test_tcp_one_way.c - long transfers one way between processes of one host: when sockets hold less and more, and that
 * nothing is dropped for it. */

#include <linux/sock_diag.h>
#include <netinet/tcp.h>

#include "tcp_rig.h"

#ifndef SO_BUF_LOCK
#    define SO_BUF_LOCK 72
#endif

enum { LEN = 2 << 20, LOCKED = 2 /* SOCK_RCVBUF_LOCK */ };
static uint8_t source[2 * LEN], target[LEN];

struct pair {
    struct node a, b;
    struct conn ca, cb;
    struct hr_tcp_ep *from, *to;
    struct hr_mem mem;
    struct hr_rmem rmem;
};

static void pair_open(struct pair *p, const char *options, int local_peers) {
    rig_local_peers = local_peers;
    node_open(&p->a, 1, "lo", options);
    node_open(&p->b, 2, "lo", options);
    rig_local_peers = 0;
    rig_connect(&p->a, &p->b, &p->ca, &p->cb);
    p->from = (struct hr_tcp_ep *)p->ca.ep;
    p->to = (struct hr_tcp_ep *)p->cb.ep;
    rig_fill(source, sizeof source, 5);
    rig_share(&p->cb, &p->ca, target, LEN, HR_ACCESS_REMOTE_WRITE, &p->mem, &p->rmem);
}

static void pair_close(struct pair *p) {
    tcp->ep_destroy(p->ca.ep);
    tcp->ep_destroy(p->cb.ep);
    tcp->domain_close(p->a.domain);
    tcp->domain_close(p->b.domain);
}

static int option(const struct hr_tcp_ep *ep, int level, int name) {
    int value = -1;
    socklen_t len = sizeof value;
    CHECK_EQ(getsockopt(ep->source.fd, level, name, &value, &len), 0);
    return value;
}

/* n writes of LEN, as many on their way as are taken; the last one is looked at. */
static void writes(struct pair *p, int n, int one_way) {
    int before = p->cb.notifies;
    for (int i = 0; i < n; i++) {
        struct hr_rma write = {
            .local = source + 4096 * (i % 512), .len = LEN, .remote = &p->rmem, .with_notify = 1, .one_way = one_way};
        hr_status status;
        double end = rig_seconds() + 10;
        while ((status = tcp->post_write(p->ca.ep, &write)) == HR_AGAIN && rig_seconds() < end)
            tcp->progress(p->a.domain, 8, NULL), tcp->progress(p->b.domain, 8, NULL);
        REQUIRE(!hr_is_error(status) && status != HR_AGAIN);
    }
    RUN(&p->a, &p->b, p->cb.notifies == before + n);
    CHECK_MEM(target, source + 4096 * ((n - 1) % 512), LEN);
}

/* What has come to the receiver and had no room: that costs 200 ms. */
static uint32_t lost(const struct pair *p) {
    uint32_t info[SK_MEMINFO_VARS] = {0};
    socklen_t len = sizeof info;
    CHECK_EQ(getsockopt(p->to->source.fd, SOL_SOCKET, SO_MEMINFO, info, &len), 0);
    CHECK(len > SK_MEMINFO_DROPS * sizeof *info);
    return info[SK_MEMINFO_DROPS];
}

TEST(a_receiver_is_narrowed_while_its_peer_says_so) {
    struct pair p;
    pair_open(&p, NULL, 0);
    if (!((struct hr_tcp_domain *)p.b.domain)->may_narrow) {
        pair_close(&p);
        SKIP("this kernel does not have buffers back, or permits none of this size");
    }
    int unsent = option(p.from, IPPROTO_TCP, TCP_NOTSENT_LOWAT);
    for (int turn = 0; turn < 3; turn++) {
        writes(&p, 1, 1);
        CHECK(!p.from->one_way.sending && !p.to->one_way.receiving && !p.to->one_way.window);
        for (int i = 0; i < 40 && !p.to->one_way.buffer; i++) {
            writes(&p, 2, 1);
            CHECK_EQ(lost(&p), 0);
        }
        CHECK(p.from->one_way.sending && p.to->one_way.receiving && p.to->one_way.buffer);
        CHECK(option(p.from, IPPROTO_TCP, TCP_NOTSENT_LOWAT) > unsent);
        CHECK(option(p.to, SOL_SOCKET, SO_RCVBUF) < 1 << 20);
        CHECK(option(p.to, SOL_SOCKET, SO_BUF_LOCK) & LOCKED);
        writes(&p, 40, 1);
        CHECK_EQ(lost(&p), 0);
        int buffer = p.to->one_way.buffer;
        writes(&p, 1, 0);
        CHECK(!p.from->one_way.sending && !p.to->one_way.receiving && !p.to->one_way.buffer && !p.to->one_way.window);
        CHECK_EQ(option(p.from, IPPROTO_TCP, TCP_NOTSENT_LOWAT), unsent);
        CHECK(option(p.to, SOL_SOCKET, SO_RCVBUF) >= buffer || option(p.to, SOL_SOCKET, SO_RCVBUF) > 1 << 20);
        CHECK(!(option(p.to, SOL_SOCKET, SO_BUF_LOCK) & LOCKED));
        writes(&p, 20, 0);
        CHECK_EQ(lost(&p), 0);
    }
    pair_close(&p);
}

/* Taken back before all that was offered has come, too. */
TEST(a_receiver_that_has_only_offered_less_offers_more_again) {
    struct pair p;
    pair_open(&p, NULL, 0);
    for (int turn = 0; turn < 10 && ((struct hr_tcp_domain *)p.b.domain)->may_narrow; turn++) {
        writes(&p, 3, 1);
        CHECK(p.from->one_way.sending && p.to->one_way.receiving && p.to->one_way.window && !p.to->one_way.buffer);
        int window = p.to->one_way.window;
        writes(&p, 1, 0);
        CHECK(!p.to->one_way.window);
        CHECK(option(p.to, IPPROTO_TCP, TCP_WINDOW_CLAMP) >= window);
        CHECK_EQ(lost(&p), 0);
    }
    pair_close(&p);
}

static void stays_wide(const char *options, int local_peers, int one_way) {
    struct pair p;
    pair_open(&p, options, local_peers);
    writes(&p, 20, one_way);
    CHECK(!p.from->one_way.sending || strstr(options ? options : "", "rcvbuf"));
    CHECK(!p.to->one_way.receiving && !p.to->one_way.window && !p.to->one_way.buffer);
    pair_close(&p);
}

TEST(a_buffer_of_somebodys_choice_stays) { stays_wide("rcvbuf=1M", 0, 1); }
TEST(ranks_that_share_cores_are_left_alone) { stays_wide(NULL, 1 << 20, 1); }
TEST(what_is_not_said_to_go_one_way_changes_nothing) { stays_wide(NULL, 0, 0); }

/* Whatever a peer says, and however often. */
TEST(a_peer_that_changes_its_mind_loses_nothing) {
    struct pair p;
    pair_open(&p, NULL, 0);
    for (int i = 0; i < 60; i++) {
        writes(&p, 1 + i % 5, i % 3 > 0);
        CHECK_EQ(lost(&p), 0);
    }
    pair_close(&p);
}
