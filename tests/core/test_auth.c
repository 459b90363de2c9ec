/* test_auth.c - the handshake against good, broken and hostile peers, over streams cut at every byte. */

#include <errno.h>
#include <sys/socket.h>

#include "check.h"
#include "hr/auth.h"

/* While a cap is set, the sockets of these tests take and give at most so many bytes at a time, and say EAGAIN half the
 * time. */
static size_t send_cap, recv_cap;

static int full(size_t cap) {
    static uint32_t seed = 1;
    seed = seed * 1103515245 + 12345;
    return cap && seed >> 31;
}

ssize_t send(int fd, const void *buf, size_t len, int flags) {
    if (full(send_cap)) return errno = EAGAIN, -1;
    return sendto(fd, buf, send_cap && len > send_cap ? send_cap : len, flags, NULL, 0);
}

ssize_t recv(int fd, void *buf, size_t len, int flags) {
    if (full(recv_cap)) return errno = EAGAIN, -1;
    return recvfrom(fd, buf, recv_cap && len > recv_cap ? recv_cap : len, flags, NULL, NULL);
}

TEST(key_is_the_hash_of_the_token) {
    struct hr_auth auth;
    uint8_t zero[32] = {0}, hash[32];
    hr_sha256("abc", 3, hash);
    hr_auth_init(&auth, "abc", 3, 0, 9);
    CHECK_MEM(auth.key, hash, 32);
    CHECK_EQ(auth.have_token, 1);
    CHECK_EQ(auth.epoch, 9);
    hr_auth_init(&auth, NULL, 0, 1, 0);
    CHECK_MEM(auth.key, zero, 32);
    CHECK_EQ(auth.have_token, 0);
    CHECK_EQ(auth.insecure, 1);
}

/* Two sides with a test in the middle: caller - wire[0] | wire[1] - acceptor. */
enum { CALLER, ACCEPTOR };
struct pair {
    struct hr_auth auth[2];
    struct hr_handshake hs[2];
    hr_status status[2];
    int side[2], wire[2], want_write[2];
};

static void pair_open(struct pair *p) {
    for (int i = 0; i < 2; i++) {
        int fds[2];
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) == 0);
        p->side[i] = fds[0];
        p->wire[i] = fds[1];
        p->status[i] = HR_AGAIN;
        hr_auth_init(&p->auth[i], "token", 5, 0, 3);
    }
}

static void pair_start(struct pair *p) {
    hr_handshake_start(&p->hs[CALLER], &p->auth[CALLER], 1, 100, 200);
    hr_handshake_start(&p->hs[ACCEPTOR], &p->auth[ACCEPTOR], 0, 200, 0);
}

static void pair_close(struct pair *p) {
    for (int i = 0; i < 2; i++) {
        close(p->side[i]);
        close(p->wire[i]);
    }
}

/* One step of one side; a side that refuses closes, as its owner must. */
static void step(struct pair *p, int i) {
    if (p->status[i] != HR_AGAIN) return;
    p->status[i] = hr_handshake_step(&p->hs[i], p->side[i], &p->want_write[i]);
    if (hr_is_error(p->status[i])) shutdown(p->side[i], SHUT_RDWR);
}

/* Carries at most max bytes that side `from` sent, with change (offset in its stream, mask) applied; what it carried
 * is kept in log. */
struct stream {
    uint8_t log[256];
    size_t have;
    size_t flip_at;
    uint8_t flip;
};

static size_t carry(struct pair *p, int from, size_t max, struct stream *s) {
    ssize_t n = recvfrom(p->wire[from], s->log + s->have, max < 256 - s->have ? max : 256 - s->have, 0, NULL, NULL);
    if (n == 0) shutdown(p->wire[!from], SHUT_WR);
    if (n <= 0) return 0;
    if (s->flip && s->flip_at >= s->have && s->flip_at < s->have + (size_t)n) s->log[s->flip_at] ^= s->flip;
    CHECK_EQ(sendto(p->wire[!from], s->log + s->have, (size_t)n, MSG_NOSIGNAL, NULL, 0), n);
    s->have += (size_t)n;
    return (size_t)n;
}

static void run_pair(struct pair *p, size_t max, struct stream streams[2]) {
    for (int round = 0; round < 2000; round++) {
        for (int i = 0; i < 2; i++) step(p, i);
        for (int i = 0; i < 2; i++) carry(p, i, max, &streams[i]);
        if (p->status[CALLER] != HR_AGAIN && p->status[ACCEPTOR] != HR_AGAIN) return;
    }
}

#define CALLER_BYTES (HR_HELLO_BYTES + HR_PROOF_BYTES)
#define ACCEPTOR_BYTES HR_CHALLENGE_BYTES

static void check_good(struct pair *p) {
    CHECK_EQ(p->status[CALLER], HR_OK);
    CHECK_EQ(p->status[ACCEPTOR], HR_OK);
    CHECK_EQ(p->hs[CALLER].peer_id, 200);
    CHECK_EQ(p->hs[ACCEPTOR].peer_id, 100);
}

TEST(good_run) {
    struct pair p;
    struct stream s[2] = {0};
    pair_open(&p);
    pair_start(&p);
    run_pair(&p, 256, s);
    check_good(&p);
    CHECK_EQ(s[CALLER].have, CALLER_BYTES);
    CHECK_EQ(s[ACCEPTOR].have, ACCEPTOR_BYTES);
    pair_close(&p);
}

TEST(good_run_without_token) {
    struct pair p;
    struct stream s[2] = {0};
    pair_open(&p);
    for (int i = 0; i < 2; i++) hr_auth_init(&p.auth[i], NULL, 0, 0, 3);
    pair_start(&p);
    run_pair(&p, 256, s);
    check_good(&p);
    pair_close(&p);
}

/* The network delivers k bytes, both sides look, then the rest: for every k, in each direction. */
TEST(every_split) {
    for (int from = 0; from < 2; from++) {
        size_t total = from == CALLER ? CALLER_BYTES : ACCEPTOR_BYTES;
        for (size_t k = 1; k < total; k++) {
            struct pair p;
            struct stream s[2] = {0};
            pair_open(&p);
            pair_start(&p);
            for (int round = 0; round < 6; round++) {
                for (int i = 0; i < 2; i++) step(&p, i);
                carry(&p, !from, 256, &s[!from]);
                if (s[from].have < k) carry(&p, from, k - s[from].have, &s[from]);
            }
            CHECK(p.status[from == CALLER ? ACCEPTOR : CALLER] == HR_AGAIN);
            CHECK_EQ(s[from].have, k);
            run_pair(&p, 256, s);
            check_good(&p);
            pair_close(&p);
        }
    }
}

TEST(byte_by_byte_on_the_wire) {
    struct pair p;
    struct stream s[2] = {0};
    pair_open(&p);
    pair_start(&p);
    run_pair(&p, 1, s);
    check_good(&p);
    pair_close(&p);
}

TEST(short_reads_and_writes) {
    for (size_t cap = 1; cap <= HR_HELLO_BYTES; cap++) {
        struct pair p;
        struct stream s[2] = {0};
        pair_open(&p);
        pair_start(&p);
        send_cap = cap;
        recv_cap = 1 + cap * 7 % HR_HELLO_BYTES;
        run_pair(&p, 256, s);
        send_cap = recv_cap = 0;
        check_good(&p);
        pair_close(&p);
    }
}

TEST(says_which_way_it_waits) {
    struct pair p;
    uint8_t junk[4096] = {0};
    size_t filled = 0;
    ssize_t n;
    pair_open(&p);
    pair_start(&p);
    while ((n = sendto(p.side[CALLER], junk, sizeof junk, MSG_NOSIGNAL, NULL, 0)) > 0) filled += (size_t)n;
    step(&p, CALLER);
    CHECK_EQ(p.status[CALLER], HR_AGAIN);
    CHECK_EQ(p.want_write[CALLER], 1);
    while (filled) {
        n = recvfrom(p.wire[CALLER], junk, filled < sizeof junk ? filled : sizeof junk, 0, NULL, NULL);
        REQUIRE(n > 0);
        filled -= (size_t)n;
    }
    step(&p, CALLER);
    CHECK_EQ(p.status[CALLER], HR_AGAIN);
    CHECK_EQ(p.want_write[CALLER], 0);
    struct stream s[2] = {0};
    run_pair(&p, 256, s);
    check_good(&p);
    pair_close(&p);
}

/* What follows the handshake in the same packet stays in the socket. */
TEST(reads_no_byte_past_the_end) {
    struct pair p;
    struct stream s[2] = {0};
    char rest[8] = {0};
    pair_open(&p);
    pair_start(&p);
    step(&p, CALLER);
    carry(&p, CALLER, 256, &s[CALLER]);
    step(&p, ACCEPTOR);
    carry(&p, ACCEPTOR, 256, &s[ACCEPTOR]);
    CHECK_EQ(sendto(p.wire[CALLER], "frame", 5, 0, NULL, 0), 5);
    step(&p, CALLER);
    CHECK_EQ(sendto(p.side[CALLER], "frame", 5, 0, NULL, 0), 5);
    carry(&p, CALLER, 256, &s[CALLER]);
    step(&p, ACCEPTOR);
    check_good(&p);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(recvfrom(p.side[i], rest, sizeof rest, 0, NULL, NULL), 5);
        CHECK_MEM(rest, "frame", 5);
    }
    pair_close(&p);
}

TEST(wrong_key) {
    struct pair p;
    struct stream s[2] = {0};
    pair_open(&p);
    hr_auth_init(&p.auth[ACCEPTOR], "tokem", 5, 0, 3);
    pair_start(&p);
    run_pair(&p, 256, s);
    CHECK_EQ(p.status[CALLER], HR_ERR_AUTH);
    CHECK_EQ(p.status[ACCEPTOR], HR_ERR_PEER_LOST);
    CHECK_EQ(s[CALLER].have, HR_HELLO_BYTES); /* the caller gave no proof to one that had none */
    CHECK_EQ(p.hs[ACCEPTOR].peer_id, 0);
    pair_close(&p);
}

TEST(a_token_on_one_side_only) {
    struct pair p;
    struct stream s[2] = {0};
    pair_open(&p);
    hr_auth_init(&p.auth[CALLER], NULL, 0, 0, 3);
    pair_start(&p);
    run_pair(&p, 256, s);
    CHECK_EQ(p.status[CALLER], HR_ERR_AUTH);
    CHECK_EQ(p.status[ACCEPTOR], HR_ERR_PEER_LOST);
    pair_close(&p);
}

TEST(wrong_epoch) {
    struct pair p;
    struct stream s[2] = {0};
    pair_open(&p);
    p.auth[CALLER].epoch = 4;
    pair_start(&p);
    run_pair(&p, 256, s);
    CHECK_EQ(p.status[ACCEPTOR], HR_ERR_AUTH);
    CHECK_EQ(p.status[CALLER], HR_ERR_PEER_LOST);
    CHECK_EQ(s[ACCEPTOR].have, 0); /* refused without a word */
    pair_close(&p);
}

TEST(wrong_id) {
    struct pair p;
    struct stream s[2] = {0};
    pair_open(&p);
    pair_start(&p);
    hr_handshake_start(&p.hs[CALLER], &p.auth[CALLER], 1, 100, 201); /* looks for 201, finds 200 */
    run_pair(&p, 256, s);
    CHECK_EQ(p.status[ACCEPTOR], HR_ERR_AUTH);
    CHECK_EQ(p.status[CALLER], HR_ERR_PEER_LOST);
    pair_close(&p);
}

/* Every bit that arrives matters, reserved bytes of the challenge (the last 8) excepted. */
TEST(one_bit_flipped_anywhere) {
    for (int from = 0; from < 2; from++) {
        size_t total = from == CALLER ? CALLER_BYTES : ACCEPTOR_BYTES - 8;
        for (size_t at = 0; at < total; at++) {
            struct pair p;
            struct stream s[2] = {0};
            s[from].flip_at = at;
            s[from].flip = (uint8_t)(1u << at % 8);
            pair_open(&p);
            pair_start(&p);
            run_pair(&p, 256, s);
            CHECK(p.status[ACCEPTOR] < 0);
            /* a proof spoilt after it left the caller is the acceptor's matter */
            CHECK(p.status[CALLER] < 0 || at >= HR_HELLO_BYTES);
            if (from == ACCEPTOR || at < 8) CHECK_EQ(p.status[!from], at < 8 ? HR_ERR_PROTOCOL : HR_ERR_AUTH);
            pair_close(&p);
        }
    }
}

/* An attacker that recorded a good run plays one side of it to a fresh partner. */
TEST(replay) {
    for (int played = 0; played < 2; played++) {
        struct pair good, fresh;
        struct stream s[2] = {0};
        uint8_t sink[256];
        pair_open(&good);
        pair_start(&good);
        run_pair(&good, 256, s);
        check_good(&good);
        pair_close(&good);

        pair_open(&fresh);
        pair_start(&fresh);
        int victim = !played;
        REQUIRE(sendto(fresh.wire[victim], s[played].log, s[played].have, 0, NULL, 0) == (ssize_t)s[played].have);
        step(&fresh, victim);
        CHECK_EQ(fresh.status[victim], HR_ERR_AUTH);
        if (victim == CALLER) { /* nothing but its hello left it */
            CHECK_EQ(recvfrom(fresh.wire[victim], sink, sizeof sink, 0, NULL, NULL), HR_HELLO_BYTES);
        }
        pair_close(&fresh);
    }
}

/* The attacker has no key and sends back what it is given. */
TEST(reflection_to_the_caller) {
    struct pair p;
    uint8_t hello[HR_HELLO_BYTES];
    pair_open(&p);
    pair_start(&p);
    step(&p, CALLER);
    REQUIRE(recvfrom(p.wire[CALLER], hello, sizeof hello, 0, NULL, NULL) == sizeof hello);
    REQUIRE(sendto(p.wire[CALLER], hello, sizeof hello, 0, NULL, 0) == sizeof hello);
    step(&p, CALLER);
    CHECK_EQ(p.status[CALLER], HR_ERR_AUTH);
    pair_close(&p);
}

TEST(reflection_to_the_acceptor) {
    struct pair p;
    struct stream s[2] = {0};
    uint8_t challenge[HR_CHALLENGE_BYTES];
    pair_open(&p);
    pair_start(&p);
    step(&p, CALLER);
    carry(&p, CALLER, 256, &s[CALLER]);
    step(&p, ACCEPTOR);
    REQUIRE(recvfrom(p.wire[ACCEPTOR], challenge, sizeof challenge, 0, NULL, NULL) == sizeof challenge);
    REQUIRE(sendto(p.wire[ACCEPTOR], challenge + 24, HR_PROOF_BYTES, 0, NULL, 0) == HR_PROOF_BYTES);
    step(&p, ACCEPTOR);
    CHECK_EQ(p.status[ACCEPTOR], HR_ERR_AUTH);
    pair_close(&p);
}

/* A rank that calls the attacker is itself an acceptor: the attacker hands it its own hello to get a proof made. */
TEST(reflection_to_the_callers_own_acceptor) {
    struct pair p;
    struct stream s[2] = {0};
    pair_open(&p);
    pair_start(&p);
    hr_handshake_start(&p.hs[ACCEPTOR], &p.auth[ACCEPTOR], 0, 100, 0);
    run_pair(&p, 256, s);
    CHECK_EQ(p.status[ACCEPTOR], HR_ERR_AUTH);
    CHECK_EQ(s[ACCEPTOR].have, 0);
    pair_close(&p);
}

/* A proof got from rank 200 by naming it is no good at rank 300. */
TEST(relay_to_a_third_rank) {
    struct pair p, third;
    struct stream s[2] = {0};
    pair_open(&p);
    pair_start(&p);
    run_pair(&p, 256, s);
    pair_open(&third);
    hr_handshake_start(&third.hs[ACCEPTOR], &third.auth[ACCEPTOR], 0, 300, 0);
    REQUIRE(sendto(third.wire[ACCEPTOR], s[CALLER].log, s[CALLER].have, 0, NULL, 0) == (ssize_t)s[CALLER].have);
    step(&third, ACCEPTOR);
    CHECK_EQ(third.status[ACCEPTOR], HR_ERR_AUTH);
    pair_close(&third);
    pair_close(&p);
}

TEST(garbage_is_refused_at_its_first_byte) {
    struct pair p;
    pair_open(&p);
    pair_start(&p);
    REQUIRE(sendto(p.wire[ACCEPTOR], "h", 1, 0, NULL, 0) == 1);
    step(&p, ACCEPTOR);
    CHECK_EQ(p.status[ACCEPTOR], HR_AGAIN);
    REQUIRE(sendto(p.wire[ACCEPTOR], "t", 1, 0, NULL, 0) == 1);
    step(&p, ACCEPTOR);
    CHECK_EQ(p.status[ACCEPTOR], HR_ERR_PROTOCOL);
    CHECK_EQ(hr_handshake_step(&p.hs[ACCEPTOR], p.side[ACCEPTOR], &p.want_write[ACCEPTOR]), HR_ERR_PROTOCOL);
    REQUIRE(sendto(p.wire[CALLER], "GET / HTTP/1.1\r\n", 16, 0, NULL, 0) == 16);
    step(&p, CALLER);
    CHECK_EQ(p.status[CALLER], HR_ERR_PROTOCOL);
    pair_close(&p);
}

/* The stream ends after k bytes, for every k. */
TEST(early_close) {
    for (int from = 0; from < 2; from++) {
        size_t total = from == CALLER ? CALLER_BYTES : ACCEPTOR_BYTES;
        for (size_t k = 0; k < total; k++) {
            struct pair p;
            struct stream s[2] = {0};
            pair_open(&p);
            pair_start(&p);
            for (int round = 0; round < 6; round++) {
                for (int i = 0; i < 2; i++) step(&p, i);
                carry(&p, !from, 256, &s[!from]);
                if (s[from].have < k) carry(&p, from, k - s[from].have, &s[from]);
            }
            shutdown(p.wire[!from], SHUT_RDWR);
            errno = 0;
            step(&p, !from);
            CHECK_EQ(p.status[!from], HR_ERR_PEER_LOST);
            CHECK(errno == ECONNRESET || errno == EPIPE);
            pair_close(&p);
        }
    }
}

TEST(nonces_differ) {
    struct hr_auth auth;
    struct hr_handshake a, b;
    hr_auth_init(&auth, "token", 5, 0, 0);
    hr_handshake_start(&a, &auth, 1, 1, 2);
    hr_handshake_start(&b, &auth, 1, 1, 2);
    CHECK(memcmp(a.nonce, b.nonce, sizeof a.nonce) != 0);
    CHECK(memcmp(a.hello, b.hello, sizeof a.hello) != 0);
}
