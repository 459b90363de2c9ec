/* test_tcp_one_way.c - long transfers one way between processes of one host: when sockets hold less and more, and that
 * nothing is dropped for it. */

#define _GNU_SOURCE
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>

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

static int in_own_network;

/* The first time: a network namespace with nothing but loopback. */
static void own_network(void) {
    static int tried;
    struct ifreq lo = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    if (tried++ || (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET))) return;
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0 && ioctl(fd, SIOCSIFFLAGS, &lo) == 0);
    close(fd);
    in_own_network = 1;
}

static void pair_open(struct pair *p, const char *options, int local_peers) {
    own_network();
    memset(p, 0, sizeof *p);
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
        while ((status = tcp->post_write(p->ca.ep, &write)) == HR_AGAIN && rig_seconds() < end) {
            tcp->progress(p->a.domain, 8, NULL);
            tcp->progress(p->b.domain, 8, NULL);
        }
        REQUIRE(!hr_is_error(status) && status != HR_AGAIN);
    }
    RUN(&p->a, &p->b, p->cb.notifies == before + n);
    CHECK_MEM(target, source + 4096 * ((n - 1) % 512), LEN);
}

/* How much came and had no room, each of which costs 200 ms: the kernel counts that by namespaces. (What is sent again
 * as the machine stood still is no loss.) Where there can be no namespace of its own nothing is counted. */
static long dropped(void) {
    static const char *const names[] = {"RcvPruned", "TCPRcvQDrop", "TCPBacklogDrop"};
    static char lines[2][8192];
    char *next[2];
    long sum = 0, found = 0;
    FILE *f = fopen("/proc/net/netstat", "r");
    if (!in_own_network) {
        if (f) fclose(f);
        return 0;
    }
    REQUIRE(f && fgets(lines[0], sizeof *lines, f) && fgets(lines[1], sizeof *lines, f));
    fclose(f);
    char *name = strtok_r(lines[0], " \n", &next[0]), *value = strtok_r(lines[1], " \n", &next[1]);
    for (; name && value; name = strtok_r(NULL, " \n", &next[0]), value = strtok_r(NULL, " \n", &next[1]))
        for (int i = 0; i < 3; i++)
            if (strcmp(name, names[i]) == 0) sum += atol(value), found++;
    CHECK_EQ(found, 3);
    return sum;
}

static int can_narrow(void) {
    own_network();
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), can = fd >= 0 && hr_tcp_one_way_able(fd);
    close(fd);
    return can;
}
#define NEEDS_BUFFERS \
    if (!can_narrow()) SKIP("this kernel does not have buffers back, or permits none of 4 MiB");

/* Writes one way until the receiver is narrow. */
static void narrow(struct pair *p) {
    for (int i = 0; i < 40 && !p->to->one_way.buffer; i++) {
        writes(p, 2, 1);
        CHECK_EQ(dropped(), 0);
    }
    CHECK(p->from->one_way.sending && p->to->one_way.receiving && p->to->one_way.buffer);
}

/* A test between two ends, where the kernel can do it. */
#define TEST_NARROW(name)                       \
    static void name##_between(struct pair *p); \
    TEST(name) {                                \
        struct pair p;                          \
        NEEDS_BUFFERS                           \
        pair_open(&p, NULL, 0);                 \
        name##_between(&p);                     \
        pair_close(&p);                         \
    }                                           \
    static void name##_between(struct pair *p)

TEST_NARROW(a_receiver_is_narrowed_while_its_peer_says_so) {
    int unsent = option(p->from, IPPROTO_TCP, TCP_NOTSENT_LOWAT);
    for (int turn = 0; turn < 3; turn++) {
        writes(p, 1, 1);
        CHECK(!p->from->one_way.sending && !p->to->one_way.receiving && !p->to->one_way.window);
        narrow(p);
        CHECK(option(p->from, IPPROTO_TCP, TCP_NOTSENT_LOWAT) > unsent);
        CHECK(option(p->to, SOL_SOCKET, SO_RCVBUF) < 1 << 20);
        CHECK(option(p->to, SOL_SOCKET, SO_BUF_LOCK) & LOCKED);
        writes(p, 40, 1);
        CHECK_EQ(dropped(), 0);
        int buffer = p->to->one_way.buffer;
        writes(p, 1, 0);
        CHECK(!p->from->one_way.sending && !p->to->one_way.receiving && !p->to->one_way.buffer &&
              !p->to->one_way.window);
        CHECK_EQ(option(p->from, IPPROTO_TCP, TCP_NOTSENT_LOWAT), unsent);
        CHECK(option(p->to, SOL_SOCKET, SO_RCVBUF) >= (buffer < 8 << 20 ? buffer & ~1 : 8 << 20));
        CHECK(!(option(p->to, SOL_SOCKET, SO_BUF_LOCK) & LOCKED));
        writes(p, 20, 0);
        CHECK_EQ(dropped(), 0);
    }
}

/* Taken back before all that was offered has come, too. */
TEST_NARROW(a_receiver_that_has_only_offered_less_offers_more_again) {
    for (int turn = 0; turn < 10; turn++) {
        writes(p, 3, 1);
        CHECK(p->from->one_way.sending && p->to->one_way.receiving && p->to->one_way.window);
        int window = p->to->one_way.window;
        writes(p, 1, 0);
        CHECK(!p->to->one_way.window);
        CHECK(option(p->to, IPPROTO_TCP, TCP_WINDOW_CLAMP) >= window && !p->to->one_way.buffer);
        CHECK_EQ(dropped(), 0);
    }
}

static int writable(const struct hr_tcp_ep *ep) {
    struct pollfd fd = {.fd = ep->source.fd, .events = POLLOUT};
    return poll(&fd, 1, 0) > 0 && fd.revents & POLLOUT;
}

/* What waits is written as soon as there is room, not when the kernel says that a third of its buffer is free (or that
 * little is unsent, which is sooner, and taken away here). */
TEST_NARROW(a_sender_that_waits_for_room_takes_what_there_is) {
    int unbounded = 1 << 30;
    narrow(p);
    CHECK_EQ(setsockopt(p->from->source.fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &unbounded, sizeof unbounded), 0);
    struct hr_rma write = {.local = source, .len = LEN, .remote = &p->rmem, .with_notify = 1, .one_way = 1};
    int posted = 0, before = p->cb.notifies, early = 0;
    for (hr_status status = HR_OK; status != HR_AGAIN; posted += status != HR_AGAIN) {
        status = tcp->post_write(p->ca.ep, &write);
        REQUIRE(!hr_is_error(status) && posted < 100);
    }
    double end = rig_seconds() + 10;
    while (p->from->tx_count && rig_seconds() < end) {
        size_t left = p->from->tx_bytes;
        int told = writable(p->from);
        tcp->progress(p->a.domain, 8, p->ca.ep);
        early += !told && p->from->tx_bytes < left;
        tcp->progress(p->b.domain, 1, p->cb.ep);
    }
    CHECK(early > 0);
    RUN(&p->a, &p->b, p->cb.notifies == before + posted);
    CHECK_EQ(dropped(), 0);
    CHECK_MEM(target, source, LEN);
}

static void stays_wide(const char *options, int local_peers, int one_way) {
    struct pair p;
    NEEDS_BUFFERS
    pair_open(&p, options, local_peers);
    writes(&p, 20, one_way);
    CHECK(!p.from->one_way.sending && !p.from->base.one_way);
    CHECK(!p.to->one_way.receiving && !p.to->one_way.window && !p.to->one_way.buffer);
    pair_close(&p);
}

TEST(a_buffer_of_somebodys_choice_stays) { stays_wide("rcvbuf=1M", 0, 1); }
TEST(ranks_that_share_cores_are_left_alone) { stays_wide(NULL, 1 << 20, 1); }
TEST(what_is_not_said_to_go_one_way_changes_nothing) { stays_wide(NULL, 0, 0); }

/* What is narrow for a transfer is not for the next one, of whatever kind: messages, and answers to reads. */
TEST_NARROW(any_other_payload_ends_it) {
    for (int turn = 0; turn < 4; turn++) {
        int messages = p->cb.messages, done = p->cb.dones;
        narrow(p);
        CHECK(!hr_is_error(rig_send(&p->ca, 1, source, 64))); /* a header says nothing */
        RUN(&p->a, &p->b, p->cb.messages == messages + 1);
        CHECK(p->from->one_way.sending && p->to->one_way.buffer);
        if (turn % 2) {
            struct hr_mem mem;
            struct hr_rmem rmem;
            rig_share(&p->ca, &p->cb, source, LEN, HR_ACCESS_REMOTE_READ, &mem, &rmem);
            struct hr_rma read = {.local = target, .len = LEN, .remote = &rmem};
            CHECK_EQ(tcp->post_read(p->cb.ep, &read), HR_INPROGRESS);
            RUN(&p->a, &p->b, p->cb.dones == done + 1);
            CHECK_MEM(target, source, LEN);
        } else {
            CHECK(!hr_is_error(rig_send(&p->ca, 2, source, HR_TCP_MAX_SEND)));
            RUN(&p->a, &p->b, p->cb.messages == messages + 2);
        }
        CHECK(!p->from->one_way.sending);
        CHECK(!p->to->one_way.receiving && !p->to->one_way.buffer && !p->to->one_way.window);
        writes(p, 1, 0);
        CHECK_EQ(dropped(), 0);
    }
}

/* Whatever a peer says, and however often. */
TEST_NARROW(a_peer_that_changes_its_mind_loses_nothing) {
    int offered = 0, narrowed = 0;
    for (int i = 0; i < 60; i++) {
        writes(p, 1 + i % 13, i % 3 > 0);
        CHECK_EQ(dropped(), 0);
        offered += p->to->one_way.window && !p->to->one_way.buffer;
        narrowed += p->to->one_way.buffer > 0;
    }
    CHECK(offered + narrowed > 10 && narrowed);
}
