/* test_shm.c - the shm provider's rings and sockets: wrapping, damage, strangers, options, sleeping and waking.
 *
 * What every provider must do is in the conformance suite. Here the provider's own structures are looked at, and
 * damaged, on purpose.
 */

#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "providers/shm/address.h"
#include "shm_rig.h"

TEST(records_wrap_and_fill_the_ring) {
    struct side a, b;
    uint64_t sent = 0, full = 0;
    pair_open(&a, &b, "ring=131072");
    b.check_pattern = 1;
    while (sent <
           60000) { /* from the middle on records of one or two lines only: the ring is filled to its last line */
        size_t len = sent > 30000 ? rnd() % 32 : rnd() % 4 ? rnd() % 200 : rnd() % (SHM_SHORT + 1);
        hr_status status = send_pattern(&a, sent, len);
        sent += status == HR_OK;
        if (status == HR_AGAIN) {
            full++;
            for (int i = (int)(rnd() % 20); i >= 0; i--) turn(&b);
        }
        CHECK(status == HR_OK || status == HR_AGAIN);
    }
    UNTIL(5, b.received == sent, BOTH(&a, &b));
    CHECK(full > 100);
    CHECK_EQ(b.bad, 0);
    side_close(&a), side_close(&b);
}

/* What is long is written past the cache while that is faster, and nothing but the time may tell. */
TEST(when_the_consumer_is_far) {
    enum { LEN = 64 << 10, QUICK = LEN / 8, SLOW = LEN }; /* bytes; nanoseconds */
    struct shm_ep e = {.far = 0};
    for (int i = 0; i < 2; i++) hr_shm_wrote(&e, LEN, 0, SLOW);
    CHECK_EQ(e.far_until, 0);
    hr_shm_wrote(&e, LEN, 0, QUICK); /* the two were interrupted */
    for (int i = 0; i < 2; i++) hr_shm_wrote(&e, LEN, 0, SLOW);
    CHECK_EQ(e.far_until, 0);
    hr_shm_wrote(&e, LEN, 0, SLOW);
    CHECK(e.far_until > SLOW);
    int64_t again = e.far_until;
    hr_shm_wrote(&e, LEN, again, again + SLOW); /* tried once, and as far as before */
    CHECK(e.far_until > again + SLOW);
    again = e.far_until;
    hr_shm_wrote(&e, LEN, again, again + QUICK); /* it is near */
    for (int i = 0; i < 2; i++) hr_shm_wrote(&e, LEN, again, again + SLOW);
    CHECK_EQ(e.far_until, again);
}

TEST(payload_past_the_cache) {
    struct side a, b;
    pair_open(&a, &b, "");
    struct shm_ep *e = shm_ep(a.ep);
    b.check_pattern = 1;
    uint64_t sent = 0;
    while (sent < 300) {
        size_t len = 32768 + rnd() % 32768;
        e->far_until = sent % 3 ? INT64_MAX : 0;
        hr_status status = send_pattern(&a, sent, len);
        sent += status == HR_OK;
        CHECK(status == HR_OK || status == HR_AGAIN);
        if (status == HR_AGAIN) turn(&b);
    }
    UNTIL(5, b.received == sent, BOTH(&a, &b));
    CHECK_EQ(b.bad, 0);
    side_close(&a), side_close(&b);
}

TEST(payload_that_is_made_in_the_ring) {
    static const size_t most[] = {8, 64, 4096, 65536};
    struct side a, b;
    struct made m;
    pair_open(&a, &b, "");
    struct shm_ep *e = shm_ep(a.ep);
    CHECK(a.domain->caps.flags & HR_CAP_FILLS);
    b.check_pattern = 1;
    uint64_t sent = 0, full = 0;
    while (sent < 1000) {
        size_t len = sent % 5 == 0 ? 8 : 1 + rnd() % most[sent % 4];
        e->far_until = sent % 3 == 1 ? INT64_MAX : 0;
        e->made[0] = 1;
        e->made[1] = sent % 3 == 2 ? 0.1 : 1;
        e->nmade = 0;
        hr_status status = send_made(&a, sent, len, &m);
        CHECK_EQ(m.calls, status == HR_OK);
        if (status == HR_OK)
            CHECK_EQ(m.elsewhere, len < 32768 || sent % 3 == 0); /* far away, and where that is faster, it is copied */
        CHECK(status == HR_OK || status == HR_AGAIN);
        sent += status == HR_OK;
        full += status == HR_AGAIN;
        if (status == HR_AGAIN) turn(&b);
    }
    UNTIL(5, b.received == sent, BOTH(&a, &b));
    CHECK(full > 0);
    CHECK_EQ(b.bad, 0);
    CHECK_EQ(e->far, 0); /* slow as they were made, that says nothing of where the consumer is */
    side_close(&a), side_close(&b);
}

/* The slower way is tried now and then, and one that is hardly faster is none. */
TEST(what_is_made_goes_the_faster_way) {
    struct side a, b;
    struct made m;
    pair_open(&a, &b, "");
    struct shm_ep *e = shm_ep(a.ep);
    b.check_pattern = 1;
    for (int kind = 0; kind < 3; kind++) {
        int elsewhere = 0, most = kind == 1 ? 10 : 630;
        for (uint64_t i = 0; i < 640; i++) {
            e->made[0] = kind ? 1 : 0.1;
            e->made[1] = kind == 1 ? 0.1 : 0.9;
            CHECK_EQ(send_made(&a, b.received, 65536, &m), HR_OK);
            elsewhere += m.elsewhere;
            CHECK(e->made[0] > 0 && e->made[0] <= 4 && e->made[1] > 0 && e->made[1] <= 4);
            UNTIL(5, b.received == (uint64_t)kind * 640 + i + 1, BOTH(&a, &b));
        }
        CHECK_EQ(elsewhere, most);
    }
    CHECK_EQ(b.bad, 0);
    side_close(&a), side_close(&b);
}

/* Whatever stands in the shared segment: nothing crashes, nothing is read outside, and the endpoint ends with a
 * protocol error or goes on. (Under the address sanitizer this is the bounds test.) */
TEST(damaged_rings) {
    int broken = 0;
    for (int round = 0; round < 150; round++) {
        struct side a, b;
        pair_open(&a, &b, "ring=131072");
        struct shm_ep *e = shm_ep(b.ep);
        for (int i = 0; i < 20; i++) CHECK_EQ(send_pattern(&a, (uint64_t)i, rnd() % 300), HR_OK);
        if (round % 3 == 0) { /* the next word */
            uint64_t word = rnd() | 1;
            if (round % 2)
                word = ring_word((enum ring_kind)(1 + rnd() % 5), rnd() % 128,
                                 round % 4 == 1 ? rnd() % (2 * SHM_LONG) : (uint32_t)rnd());
            atomic_store(ring_slot(e->rx.data, e->rx.mask, e->rx.pos), word);
        } else if (round % 3 == 1) { /* anything */
            for (int i = 0; i < 300; i++) e->rx.data[rnd() % 8192] = (uint8_t)rnd();
        } else { /* how far the consumer says it is */
            atomic_store(&e->rx.ctl->head, rnd());
            for (int i = 0; i < 3000 && send_pattern(&a, 0, 100) == HR_OK; i++) continue;
        }
        for (int i = 0; i < 50; i++) BOTH(&a, &b);
        CHECK(b.lost == HR_OK || b.lost == HR_ERR_PROTOCOL);
        CHECK(a.lost == HR_OK || a.lost == HR_ERR_PROTOCOL);
        if (round % 3 == 2) CHECK_EQ(a.lost, HR_ERR_PROTOCOL);
        broken += b.lost || a.lost;
        if (a.lost) CHECK_EQ(send_small(&a), a.lost);
        side_close(&a), side_close(&b);
    }
    CHECK(broken > 75);
}

/* A file that can shrink would let the peer make our loads fault: it is looked at before it is mapped. */
TEST(damaged_control_frames) {
    struct shm_frame frames[] = {{.kind = 99},
                                 {.kind = SHM_OFFER, .size = SHM_MIN_RING},
                                 {.kind = SHM_ARENA, .id = 1, .size = 4096},
                                 {.kind = SHM_ARENA, .id = 7, .addr = 4096, .size = 1 << 20}};
    for (int i = 0; i < 4; i++) {
        struct side a, b;
        int fd = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        pair_open(&a, &b, NULL);
        CHECK_EQ(ftruncate(fd, 1 << 20), 0);
        CHECK_EQ(hr_shm_frame_send(shm_ep(a.ep), &frames[i], &fd, i == 3), HR_OK);
        UNTIL(1, b.lost, BOTH(&a, &b));
        CHECK_EQ(b.lost, HR_ERR_PROTOCOL);
        if (i == 3) CHECK(strstr(b.detail, "shrink"));
        ops->ep_abort(b.ep);
        UNTIL(1, a.lost, turn(&a));
        CHECK_EQ(a.lost, HR_ERR_PEER_LOST);
        close(fd);
        side_close(&a), side_close(&b);
    }
}

/* A message that fits the rings of one would never fit those of the other. */
TEST(rings_of_other_settings_are_refused) {
    struct side a, b;
    side_open(&a, 1, 2, "ring=131072");
    side_open(&b, 2, 1, NULL);
    CHECK_EQ(ops->ep_connect(a.ep, b.addr, b.addr_len, 1), HR_OK);
    CHECK_EQ(ops->ep_connect(b.ep, a.addr, a.addr_len, 0), HR_OK);
    UNTIL(5, b.lost, BOTH(&a, &b));
    CHECK_EQ(b.lost, HR_ERR_PROTOCOL);
    CHECK(strstr(b.detail, "offered a ring of 131072 bytes; refused because of its size: HRDMA_SHM=ring="));
    side_close(&a), side_close(&b);
}

TEST(strangers_at_the_socket) {
    struct side a, b;
    struct sockaddr_un sa;
    int fds[40];
    side_open(&a, 1, 2, NULL);
    side_open(&b, 2, 1, NULL);
    socklen_t sa_len = shm_sockaddr(&sa, shm_domain(b.domain)->name);
    for (int i = 0; i < 40; i++) { /* garbage, half a hello, nothing, and gone at once */
        uint8_t junk[200] = "";
        fds[i] = socket(AF_UNIX, SOCK_STREAM, 0);
        CHECK_EQ(connect(fds[i], (struct sockaddr *)&sa, sa_len), 0);
        for (size_t k = 0; k < sizeof junk; k++) junk[k] = (uint8_t)rnd();
        if (i % 4 < 2) CHECK(send(fds[i], junk, i % 4 ? 3 : sizeof junk, MSG_NOSIGNAL) > 0);
        if (i % 4 == 3) close(fds[i]);
    }
    for (int i = 0; i < 100; i++) turn(&b);
    ops->ep_connect(a.ep, b.addr, b.addr_len, 1);
    ops->ep_connect(b.ep, a.addr, a.addr_len, 0);
    /* Silent ones of this same process come first in the order; they go when they do not prove themselves. */
    for (int i = 0; i < 40; i++)
        if (i % 4 < 3) close(fds[i]);
    UNTIL(8, a.up && b.up, BOTH(&a, &b));
    CHECK_EQ(shm_domain(b.domain)->ncalls, 0);
    side_close(&a), side_close(&b);
}

TEST(another_user_is_refused) {
    struct side a, b;
    pid_t pid;
    int rc = 0, ended = 0;
    if (geteuid() != 0) SKIP("needs root to become another user");
    side_open(&b, 2, 1, NULL);
    pid = fork();
    if (pid == 0) {
        struct sockaddr_un sa;
        socklen_t sa_len = shm_sockaddr(&sa, shm_domain(b.domain)->name);
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        char byte;
        if (setuid(65534)) _exit(3);
        if (connect(fd, (struct sockaddr *)&sa, sa_len)) _exit(4);
        _exit(recv(fd, &byte, 1, 0) <= 0 ? 0 : 5); /* shut in its face */
    }
    UNTIL(5, ended = ended || waitpid(pid, &rc, WNOHANG) == pid, turn(&b));
    CHECK_EQ(rc, 0);
    side_close(&b);
    /* The caller looks too: another user's process may listen under the name that it was told. */
    side_open(&a, 1, 2, NULL);
    CHECK_EQ(seteuid(65534), 0);
    side_open(&b, 2, 1, NULL);
    CHECK_EQ(seteuid(0), 0);
    CHECK_EQ(ops->ep_connect(a.ep, b.addr, b.addr_len, 1), HR_OK);
    UNTIL(2, a.lost, BOTH(&a, &b));
    CHECK_EQ(a.lost, HR_ERR_AUTH);
    side_close(&a), side_close(&b);
}

TEST(options_and_hosts) {
    static const char *const bad[] = {"ring=1000", "ring=", "ring", "cma=2", "host=", "color=blue", "ring=131072,x=1"};
    struct side a, b;
    char detail[256], text[256];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        detail[0] = 0;
        CHECK_EQ(side_try(&a, 1, bad[i], detail), HR_ERR_INVALID);
        CHECK(strstr(detail, "ring=BYTES"));
    }
    side_open(&a, 1, 2, "host=alpha");
    side_open(&b, 2, 1, "host=beta,cma=0,ring=1048576");
    CHECK_EQ(ops->ep_connect(a.ep, b.addr, b.addr_len, 1), HR_ERR_UNREACHABLE);
    ops->domain_describe(b.domain, text, sizeof text);
    CHECK(strstr(text, "1024 KiB") && strstr(text, "no process_vm_readv"));
    side_close(&a), side_close(&b);
    pair_open(&a, &b, "host=alpha");
    side_close(&a), side_close(&b);
}

/* ---- sleeping: two threads, each with a domain of its own ---- */

enum { BOUNCES = 4000 };
struct sleeper {
    struct side s;
    int first, lost_wakeups;
    atomic_int sleeps;
};

static void *sleep_and_bounce(void *arg) {
    struct sleeper *me = arg;
    struct side *s = &me->s;
    struct pollfd fd = {.fd = ops->event_fd(s->domain), .events = POLLIN};
    uint64_t sent = 0;
    while (s->received < BOUNCES) {
        if (sent < s->received + (uint64_t)me->first) {
            if (send_small(s) == HR_OK) sent++;
            continue;
        }
        uint64_t before = s->received;
        turn(s);
        if (s->received != before || ops->event_arm(s->domain) == HR_AGAIN) continue;
        int n = poll(&fd, 1, 1000);
        me->sleeps++;
        ops->event_disarm(s->domain);
        turn(s);
        if (n == 0 && s->received != before) me->lost_wakeups++;
    }
    while (sent < BOUNCES) sent += send_small(s) == HR_OK;
    return NULL;
}

TEST(no_wake_up_is_lost) {
    struct sleeper a = {.first = 1}, b = {.first = 0};
    pthread_t ta, tb;
    pair_open(&a.s, &b.s, NULL);
    pthread_create(&ta, NULL, sleep_and_bounce, &a);
    pthread_create(&tb, NULL, sleep_and_bounce, &b);
    pthread_join(ta, NULL);
    pthread_join(tb, NULL);
    CHECK_EQ(a.lost_wakeups + b.lost_wakeups, 0);
    CHECK(a.sleeps + b.sleeps > BOUNCES / 40); /* how often depends on the machine; never is a fault */
    side_close(&a.s), side_close(&b.s);
}

TEST(a_record_that_is_there_prevents_sleep) {
    struct side a, b;
    pair_open(&a, &b, NULL);
    UNTIL(1, ops->event_arm(b.domain) == HR_OK, turn(&b));
    ops->event_disarm(b.domain);
    turn(&b);
    CHECK_EQ(send_small(&a), HR_OK);
    CHECK_EQ(ops->event_arm(b.domain), HR_AGAIN);
    CHECK_EQ(atomic_load(&shm_ep(b.ep)->rx.ctl->asleep), 0);
    side_close(&a), side_close(&b);
}

/* The other direction: a sender that found the ring full sleeps until there is room. */
static void *fill_and_sleep(void *arg) {
    struct sleeper *me = arg;
    struct pollfd fd = {.fd = ops->event_fd(me->s.domain), .events = POLLIN};
    for (uint64_t sent = 0; sent < 3000;) {
        hr_status status = send_pattern(&me->s, sent, 5000);
        if (status == HR_OK) sent++;
        if (status != HR_AGAIN || ops->event_arm(me->s.domain) == HR_AGAIN) {
            turn(&me->s);
            continue;
        }
        me->sleeps++;
        if (poll(&fd, 1, 1000) == 0) me->lost_wakeups++;
        ops->event_disarm(me->s.domain);
    }
    return NULL;
}

TEST(room_wakes) {
    struct sleeper a = {.first = 1};
    struct side b;
    pthread_t thread;
    pair_open(&a.s, &b, "ring=131072");
    b.check_pattern = 1;
    pthread_create(&thread, NULL, fill_and_sleep, &a);
    /* The ring holds 26: between two batches the sender fills it, and sleeps. */
    for (int batch = 1; batch <= 30; batch++) {
        UNTIL(30, atomic_load(&a.sleeps) >= batch, usleep(100));
        UNTIL(30, b.received >= 100 * (uint64_t)batch, turn(&b));
    }
    pthread_join(thread, NULL);
    CHECK_EQ(a.lost_wakeups, 0);
    CHECK_EQ(b.received, 3000);
    CHECK_EQ(b.bad, 0);
    side_close(&a.s), side_close(&b);
}
