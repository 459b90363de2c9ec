/* test_tcp_data.c - the tcp provider on slow sockets: partial sends, revoking and taking back half-way. */

#include <netinet/tcp.h>
#include <sys/syscall.h>

#include "tcp_rig.h"

#define TINY "sndbuf=4K,rcvbuf=4K"

enum { BIG = 4 << 20 };
static uint8_t source[BIG], sink_memory[BIG + 64], elsewhere[BIG];

struct pair {
    struct node a, b;
    struct conn ca, cb;
};

static void pair_open(struct pair *p, const char *options) {
    node_open(&p->a, 1, "lo", options);
    node_open(&p->b, 2, "lo", options);
    rig_connect(&p->a, &p->b, &p->ca, &p->cb);
    rig_fill(source, BIG, 1);
    memset(sink_memory, 0, sizeof sink_memory);
    memset(elsewhere, 0, sizeof elsewhere);
}

static void pair_close(struct pair *p) {
    tcp->ep_destroy(p->ca.ep);
    tcp->ep_destroy(p->cb.ep);
    tcp->domain_close(p->a.domain);
    tcp->domain_close(p->b.domain);
}

TEST(everything_in_small_pieces) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    uint64_t counter[1] = {40}, before = 0;
    struct hr_mem counter_mem;
    struct hr_rmem counter_rmem;
    pair_open(&p, TINY);
    rig_share(&p.cb, &p.ca, sink_memory, BIG, HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_READ, &mem, &rmem);
    rig_share(&p.cb, &p.ca, counter, 8, HR_ACCESS_REMOTE_ATOMIC, &counter_mem, &counter_rmem);
    struct hr_rma write = {.local = source, .len = BIG, .remote = &rmem, .with_notify = 1, .value = 99};
    struct hr_rma read = {.local = elsewhere, .len = BIG, .remote = &rmem};
    struct hr_atomic add = {.result = &before, .remote = &counter_rmem, .operand = 2};
    p.cb.data = malloc(HR_TCP_MAX_SEND);
    CHECK_EQ(tcp->post_write(p.ca.ep, &write), HR_INPROGRESS);
    CHECK(tcp->ep_unsent(p.ca.ep) > BIG / 2);
    CHECK_EQ(rig_send(&p.ca, 3, source + 7, HR_TCP_MAX_SEND), HR_INPROGRESS);
    CHECK_EQ(tcp->post_atomic(p.ca.ep, &add), HR_INPROGRESS);
    RUN(&p.a, &p.b, p.cb.notifies && p.cb.messages && p.ca.dones == 3);
    CHECK_EQ(p.cb.value, 99);
    CHECK_EQ(p.cb.nbytes, BIG);
    CHECK_MEM(sink_memory, source, BIG);
    CHECK_MEM(p.cb.data, source + 7, HR_TCP_MAX_SEND);
    CHECK_EQ(before, 40);
    CHECK_EQ(counter[0], 42);
    CHECK_EQ(tcp->post_read(p.ca.ep, &read), HR_INPROGRESS);
    RUN(&p.a, &p.b, p.ca.dones == 4);
    CHECK_MEM(elsewhere, source, BIG);
    RUN(&p.a, &p.b, tcp->ep_unsent(p.ca.ep) == 0 && tcp->ep_unsent(p.cb.ep) == 0);
    free(p.cb.data);
    pair_close(&p);
}

/* A message posted during a long read is not behind all of it. */
TEST(messages_get_between_the_chunks_of_a_read) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    pair_open(&p, TINY);
    rig_share(&p.cb, &p.ca, source, BIG, HR_ACCESS_REMOTE_READ, &mem, &rmem);
    struct hr_rma read = {.local = elsewhere, .len = BIG, .remote = &rmem};
    CHECK_EQ(tcp->post_read(p.ca.ep, &read), HR_INPROGRESS);
    RUN(&p.a, &p.b, elsewhere[0] == source[0] && elsewhere[1] == source[1]);
    CHECK_EQ(rig_send(&p.cb, 1, "x", 1), HR_INPROGRESS);
    RUN(&p.a, &p.b, p.ca.messages);
    CHECK_EQ(p.ca.dones, 0);
    RUN(&p.a, &p.b, p.ca.dones);
    CHECK_MEM(elsewhere, source, BIG);
    pair_close(&p);
}

TEST(the_queue_is_bounded) {
    struct pair p;
    int taken = 0, again = 0;
    pair_open(&p, TINY);
    for (int i = 0; i < 100; i++) {
        hr_status status = rig_send(&p.ca, (uint64_t)i, source, 60000);
        if (status == HR_INPROGRESS) taken++;
        if (status == HR_AGAIN) again++;
    }
    CHECK_EQ(taken, HR_TCP_QUEUE);
    CHECK_EQ(again, 100 - taken);
    RUN(&p.a, &p.b, p.ca.dones == taken && p.cb.messages == taken);
    CHECK_EQ(p.cb.hdr[0], taken - 1);
    pair_close(&p);
}

/* Writes that nothing could overtake any more stay with the engine, which sends what is urgent first. */
TEST(writes_leave_room_for_messages) {
    enum { PIECE = 64 << 10 };
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    int taken = 0;
    pair_open(&p, TINY);
    rig_share(&p.cb, &p.ca, sink_memory, BIG, HR_ACCESS_REMOTE_WRITE, &mem, &rmem);
    struct hr_rma write = {.local = source, .len = PIECE, .remote = &rmem, .with_notify = 1};
    while (tcp->post_write(p.ca.ep, &write) == HR_INPROGRESS && taken < HR_TCP_QUEUE) taken++;
    CHECK(taken > 1);
    CHECK(taken * PIECE < HR_TCP_QUEUE_BYTES + 2 * PIECE);
    CHECK_EQ(tcp->post_write(p.ca.ep, &write), HR_AGAIN);
    CHECK_EQ(rig_send(&p.ca, 5, source, 4096), HR_INPROGRESS);
    RUN(&p.a, &p.b, p.cb.messages && p.ca.dones == taken + 1);
    CHECK_EQ(p.cb.notifies, taken);
    CHECK_EQ(tcp->post_write(p.ca.ep, &write), HR_INPROGRESS);
    RUN(&p.a, &p.b, p.cb.notifies == taken + 1);
    pair_close(&p);
}

TEST(an_idle_connection_is_small) {
    struct pair p;
    pair_open(&p, NULL);
    for (int i = 0; i < 1000; i++) {
        CHECK_EQ(rig_send(&p.ca, 1, source, 512), HR_OK);
        if (i % 16 == 15) rig_pump(NULL, &p.b, 0);
    }
    RUN(&p.a, &p.b, p.cb.messages == 1000);
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)p.cb.ep;
    CHECK(ep->rx_cap <= 16384 && !ep->ring && !ep->pending && !ep->serve);
    pair_close(&p);
}

/* What is received into grows with the longest message that has come, no further, and keeps what is in it. */
TEST(the_buffer_grows_with_the_messages) {
    static const size_t lens[] = {512, 100000, 1000, 130 << 10, HR_TCP_MAX_SEND, 2000, HR_TCP_MAX_SEND - 1};
    enum { N = sizeof lens / sizeof *lens };
    size_t largest = HR_TCP_MAX_SEND + HR_MAX_HDR + sizeof(struct hr_tcp_frame), total = 0, longest = 0;
    struct pair p;
    pair_open(&p, NULL);
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)p.cb.ep;
    p.cb.data = malloc(N * HR_TCP_MAX_SEND);
    for (int i = 0; i < N; i++) {
        CHECK(!hr_is_error(rig_send(&p.ca, 1, source + i, lens[i])));
        RUN(&p.a, &p.b, p.cb.messages == i + 1);
        CHECK_MEM(p.cb.data + total, source + i, lens[i]);
        total += lens[i];
        if (lens[i] > longest) longest = lens[i];
        size_t most = longest < 16000 ? 16384 : longest < (130 << 10) ? 130 << 10 : largest;
        CHECK(ep->rx_cap > longest && ep->rx_cap <= most);
    }
    free(p.cb.data);
    p.cb.data = NULL;
    pair_close(&p);
}

static struct {
    int calls;
    ssize_t least, most;
} handed; /* to the kernel, at a time */

ssize_t sendmsg(int fd, const struct msghdr *msg, int flags) { /* in place of the library's */
    ssize_t n = syscall(SYS_sendmsg, fd, msg, flags);
    if (n <= 0) return n;
    if (!handed.calls++ || n < handed.least) handed.least = n;
    if (n > handed.most) handed.most = n;
    return n;
}

static size_t segment_now(struct hr_ep *ep) {
    int mss = 0;
    socklen_t size = sizeof mss;
    CHECK_EQ(getsockopt(((struct hr_tcp_ep *)ep)->source.fd, IPPROTO_TCP, TCP_MAXSEG, &mss, &size), 0);
    return (size_t)mss;
}

/* Where ranks share processors, a little more than a segment goes as two of one length, as long as the receiver has not
 * said that it is awake; a little less, as one. */
TEST(a_short_segment_is_made_longer) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    int seen[2] = {0};
    rig_local_peers = 1 << 20;
    pair_open(&p, NULL);
    rig_local_peers = 0;
    rig_share(&p.cb, &p.ca, sink_memory, BIG, HR_ACCESS_REMOTE_WRITE, &mem, &rmem);
    for (int i = 0; i < 200; i++) {
        size_t mss = segment_now(p.ca.ep), heads = sizeof(struct hr_tcp_frame) + sizeof(struct hr_tcp_write);
        struct hr_rma write = {.local = source, .remote = &rmem, .with_notify = 1};
        write.len = i % 2 ? mss + mss / 8 - heads : mss - mss / 8 - heads;
        int before = p.cb.notifies;
        memset(&handed, 0, sizeof handed);
        CHECK(!hr_is_error(tcp->post_write(p.ca.ep, &write)));
        if (segment_now(p.ca.ep) == mss && (size_t)handed.least * (size_t)handed.calls + 1 >= write.len + heads) {
            CHECK_EQ(handed.calls, 1 + i % 2);
            CHECK(handed.most - handed.least <= 1);
            seen[i % 2]++;
        }
        RUN(&p.a, &p.b, p.cb.notifies == before + 1);
    }
    CHECK(seen[0] > 50 && seen[1] > 50); /* in the others the segment grew, or the socket took a part */
    pair_close(&p);
}

/* Who does not sleep says so, and gets such a frame in one call, until it has slept. */
TEST(a_short_segment_stays_short_for_who_is_awake) {
    struct pair p;
    struct hr_mem mem, back;
    struct hr_rmem rmem, own;
    int seen[2] = {0};
    rig_local_peers = 1 << 20;
    pair_open(&p, NULL);
    rig_local_peers = 0;
    struct hr_tcp_domain *b = hr_tcp_domain_of(p.cb.ep);
    rig_share(&p.cb, &p.ca, sink_memory, BIG, HR_ACCESS_REMOTE_WRITE, &mem, &rmem);
    rig_share(&p.ca, &p.cb, source, BIG, HR_ACCESS_REMOTE_WRITE, &back, &own);
    for (int i = 0; i < 200; i++) {
        int slept = i / 2 % 2, before = p.ca.notifies;
        struct hr_rma word = {.local = sink_memory, .len = 8, .remote = &own, .with_notify = 1};
        b->slept = 0; /* whatever happened before */
        if (slept) CHECK_EQ(tcp->event_arm(p.cb.ep->domain), HR_OK);
        tcp->event_disarm(p.cb.ep->domain);
        CHECK(!hr_is_error(tcp->post_write(p.cb.ep, &word)));
        RUN(&p.a, &p.b, p.ca.notifies == before + 1);
        size_t mss = segment_now(p.ca.ep), heads = sizeof(struct hr_tcp_frame) + sizeof(struct hr_tcp_write);
        struct hr_rma write = {.local = source + 64, .len = mss + mss / 8 - heads, .remote = &rmem, .with_notify = 1};
        before = p.cb.notifies;
        memset(&handed, 0, sizeof handed);
        CHECK(!hr_is_error(tcp->post_write(p.ca.ep, &write)));
        if (segment_now(p.ca.ep) == mss && (size_t)handed.least * (size_t)handed.calls + 1 >= write.len + heads) {
            CHECK_EQ(handed.calls, 1 + slept);
            seen[slept]++;
        }
        RUN(&p.a, &p.b, p.cb.notifies == before + 1);
    }
    CHECK(seen[0] > 25 && seen[1] > 25);
    static const int sleeps[] = {1, 3, 40}; /* it wears off, the later the more it has slept */
    for (int k = 0; k < 3; k++) {
        int frames = sleeps[k] * 50 < 1000 ? sleeps[k] * 50 : 1000;
        b->slept = 0;
        for (int i = 0; i < sleeps[k]; i++) {
            CHECK_EQ(tcp->event_arm(p.cb.ep->domain), HR_OK);
            tcp->event_disarm(p.cb.ep->domain);
        }
        for (int i = 0; i <= frames; i++) {
            struct hr_rma word = {.local = sink_memory, .len = 8, .remote = &own, .with_notify = 1};
            int before = p.ca.notifies;
            CHECK(!hr_is_error(tcp->post_write(p.cb.ep, &word)));
            RUN(&p.a, &p.b, p.ca.notifies == before + 1);
            CHECK_EQ(((struct hr_tcp_ep *)p.ca.ep)->peer_sleeps != 0, i < frames);
        }
    }
    pair_close(&p);
}

/* Frames around whole segments of loopback, which are cut: all of it, in order, and on from where a write ended if the
 * socket takes only a part. In the last round they are not, as no ranks share processors. */
TEST(frames_that_end_in_a_short_segment) {
    static const char *const options[] = {NULL, "sndbuf=96K", TINY, NULL};
    for (int o = 0; o < 4; o++) {
        struct pair p;
        struct hr_mem mem;
        struct hr_rmem rmem;
        rig_local_peers = o < 3 ? 1 << 20 : 0;
        pair_open(&p, options[o]);
        rig_local_peers = 0;
        CHECK_EQ(((struct hr_tcp_ep *)p.ca.ep)->tx_long, o < 2);
        rig_share(&p.cb, &p.ca, sink_memory, BIG, HR_ACCESS_REMOTE_WRITE, &mem, &rmem);
        for (int i = 0; i < 200; i++) {
            size_t len = (size_t)(1 + i % 9) * segment_now(p.ca.ep) - 200 + (size_t)i * 7, from = (size_t)i * 1000;
            struct hr_rma write = {
                .local = source + from, .len = len, .remote = &rmem, .with_notify = 1, .value = from};
            int before = p.cb.notifies;
            memset(sink_memory, 0, len + 64);
            CHECK(!hr_is_error(tcp->post_write(p.ca.ep, &write)));
            CHECK(!hr_is_error(rig_send(&p.ca, from, source, 8))); /* behind it */
            RUN(&p.a, &p.b, p.cb.notifies == before + 1 && p.cb.messages == i + 1);
            CHECK_EQ(p.cb.hdr[0], from);
            CHECK_EQ(p.cb.value, from);
            CHECK_EQ(p.cb.nbytes, len);
            CHECK_MEM(sink_memory, source + from, len);
            CHECK_EQ(sink_memory[len], 0);
        }
        pair_close(&p);
    }
}

/* ---- revoking and taking back ---- */

TEST(a_region_goes_in_the_middle_of_a_write) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    pair_open(&p, TINY);
    rig_share(&p.cb, &p.ca, sink_memory, BIG, HR_ACCESS_REMOTE_WRITE, &mem, &rmem);
    struct hr_rma write = {.local = source, .len = BIG, .remote = &rmem, .with_notify = 1};
    CHECK_EQ(tcp->post_write(p.ca.ep, &write), HR_INPROGRESS);
    RUN(&p.a, &p.b, sink_memory[8192] == source[8192] && sink_memory[8193] == source[8193]);
    CHECK_EQ(rig_send(&p.ca, 17, NULL, 0), HR_INPROGRESS);
    tcp->mem_deregister(p.b.domain, &mem);
    memset(sink_memory, 0x55, sizeof sink_memory);
    memset(elsewhere, 0x55, sizeof elsewhere);
    RUN(&p.a, &p.b, p.cb.messages && p.ca.dones == 2);
    CHECK_EQ(p.cb.hdr[0], 17);
    CHECK_EQ(p.cb.notifies, 0);
    CHECK_MEM(sink_memory, elsewhere, BIG);
    pair_close(&p);
}

TEST(a_region_goes_in_the_middle_of_a_read) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    pair_open(&p, TINY);
    uint8_t *copy = malloc(BIG), *owned = malloc(BIG);
    memcpy(owned, source, BIG);
    rig_share(&p.cb, &p.ca, owned, BIG, HR_ACCESS_REMOTE_READ, &mem, &rmem);
    struct hr_rma read = {.local = elsewhere, .len = BIG, .remote = &rmem};
    CHECK_EQ(tcp->post_read(p.ca.ep, &read), HR_INPROGRESS);
    RUN(&p.a, &p.b, elsewhere[8192] == source[8192] && elsewhere[8193] == source[8193]);
    tcp->mem_deregister(p.b.domain, &mem);
    free(owned); /* an access to it from now on is one that the address sanitizer sees */
    RUN(&p.a, &p.b, p.ca.dones);
    CHECK_EQ(p.ca.done_status, HR_ERR_ACCESS);
    size_t same = 0;
    while (same < BIG && elsewhere[same] == source[same]) same++;
    for (; same < BIG && !elsewhere[same]; same++) {}
    CHECK_EQ(same, BIG); /* what came is the original, the rest was not touched */
    CHECK_EQ(rig_send(&p.ca, 1, NULL, 0), HR_OK);
    RUN(&p.a, &p.b, p.cb.messages);
    free(copy);
    pair_close(&p);
}

TEST(a_read_is_let_go) {
    struct pair p;
    struct hr_mem mem;
    struct hr_rmem rmem;
    int cookie, other;
    pair_open(&p, TINY);
    rig_share(&p.cb, &p.ca, source, BIG, HR_ACCESS_REMOTE_READ, &mem, &rmem);
    struct hr_rma read = {.local = elsewhere, .len = BIG, .remote = &rmem, .cookie = &cookie};
    struct hr_rma small = {.local = sink_memory, .len = 100, .remote = &rmem, .cookie = &other};
    CHECK_EQ(tcp->post_read(p.ca.ep, &read), HR_INPROGRESS);
    CHECK_EQ(tcp->post_read(p.ca.ep, &small), HR_INPROGRESS);
    RUN(&p.a, &p.b, elsewhere[8192] == source[8192] && elsewhere[8193] == source[8193]);
    CHECK_EQ(tcp->cancel(p.ca.ep, &cookie), HR_OK);
    memset(elsewhere, 0x33, BIG);
    RUN(&p.a, &p.b, p.ca.dones);
    CHECK_MEM(sink_memory, source, 100);
    for (int i = 0; i < BIG; i++)
        if (elsewhere[i] != 0x33) {
            CHECK_EQ(i, -1);
            break;
        }
    CHECK_EQ(p.ca.dones, 1);
    CHECK_EQ(tcp->cancel(p.ca.ep, &cookie), HR_ERR_INVALID);
    pair_close(&p);
}

TEST(sends_are_let_go_whole_or_half) {
    struct pair p;
    uint8_t *lent = malloc(HR_TCP_MAX_SEND);
    int first, second, third;
    struct hr_msg msg = {.hdr = "header..", .hdr_len = 8, .payload = lent, .len = HR_TCP_MAX_SEND, .cookie = &first};
    pair_open(&p, TINY);
    memcpy(lent, source, HR_TCP_MAX_SEND);
    p.cb.data = malloc(2 * HR_TCP_MAX_SEND);
    CHECK_EQ(tcp->post_send(p.ca.ep, &msg), HR_INPROGRESS); /* half of it is in the kernel */
    msg.cookie = &second;
    CHECK_EQ(tcp->post_send(p.ca.ep, &msg), HR_INPROGRESS);
    msg.cookie = &third, msg.payload = source + 5, msg.len = 50;
    CHECK_EQ(tcp->post_send(p.ca.ep, &msg), HR_INPROGRESS);
    CHECK_EQ(tcp->cancel(p.ca.ep, &second), HR_OK);
    CHECK_EQ(tcp->cancel(p.ca.ep, &first), HR_OK);
    free(lent);
    RUN(&p.a, &p.b, p.cb.messages == 2 && p.ca.dones == 1);
    CHECK_EQ(p.cb.len, 50);
    CHECK_EQ(p.cb.filled, HR_TCP_MAX_SEND + 50);
    CHECK_MEM(p.cb.data, source, HR_TCP_MAX_SEND);
    CHECK_MEM(p.cb.data + HR_TCP_MAX_SEND, source + 5, 50);
    free(p.cb.data);
    pair_close(&p);
}
