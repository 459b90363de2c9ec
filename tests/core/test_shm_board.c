/* test_shm_board.c - payloads that go to several peers: one copy, read by all, and what becomes of it. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shm_rig.h"

enum { READERS = 2, LEN = 16 << 10 };

/* One that sends and has a second endpoint, and two that read. */
struct circle {
    struct side from, to[READERS];
    struct hr_ep *eps[READERS];
};

static void circle_open(struct circle *c) {
    side_open(&c->from, 1, 2, NULL);
    c->eps[0] = c->from.ep;
    REQUIRE(ops->ep_create(c->from.domain, 3, NULL, &c->eps[1]) == HR_OK);
    for (int i = 0; i < READERS; i++) {
        side_open(&c->to[i], (uint64_t)i + 2, 1, NULL);
        c->to[i].check_pattern = 1;
        CHECK_EQ(ops->ep_connect(c->eps[i], c->to[i].addr, c->to[i].addr_len, 1), HR_OK);
        CHECK_EQ(ops->ep_connect(c->to[i].ep, c->from.addr, c->from.addr_len, 0), HR_OK);
    }
    UNTIL(5, c->to[0].up && c->to[1].up && shm_domain(c->from.domain)->nlive == READERS,
          (turn(&c->from), BOTH(&c->to[0], &c->to[1])));
    REQUIRE(shm_domain(c->from.domain)->nlive == READERS);
}

static void circle_close(struct circle *c) {
    ops->ep_destroy(c->eps[1]);
    side_close(&c->from);
    for (int i = 0; i < READERS; i++) side_close(&c->to[i]);
}

static struct shm_board *board(struct circle *c) { return &shm_domain(c->from.domain)->board; }

/* Message seq of so many bytes to one; same: as hr_msg. */
static hr_status show(struct circle *c, int to, uint64_t seq, size_t len, uint64_t same) {
    static uint8_t payload[SHM_LONG];
    uint64_t hdr[8] = {seq};
    struct hr_msg msg = {.hdr = hdr, .hdr_len = 8 + 8 * (seq % 8), .payload = payload, .len = len, .same = same};
    fill(payload, len, seq);
    return ops->post_send(c->eps[to], &msg);
}

TEST(several_read_one_copy) {
    struct circle c;
    uint64_t shown = 0;
    circle_open(&c);
    CHECK_EQ(board(&c)->state, SHM_BOARD_UNUSED);
    for (uint64_t seq = 0; seq < 3000; seq++) {
        size_t len = seq % 10 == 9 ? rnd() % SHM_SHOWN : SHM_SHOWN + rnd() % (64 << 10);
        for (int i = 0; i < READERS; i++) {
            uint64_t before = board(&c)->tail;
            CHECK_EQ(show(&c, i, seq, len, seq + 1), HR_OK);
            if (i || len < SHM_SHOWN)
                CHECK_EQ(board(&c)->tail, before); /* it was there, or is too short */
            else
                CHECK(board(&c)->tail >= before + len && board(&c)->tail % SHM_LINE == 0);
            shown += board(&c)->same == seq + 1;
        }
        UNTIL(5, c.to[0].received > seq && c.to[1].received > seq, BOTH(&c.to[0], &c.to[1]));
    }
    CHECK_EQ(shown, READERS * 2700);
    for (int i = 0; i < READERS; i++) CHECK_EQ(c.to[i].bad, 0);
    circle_close(&c);
}

/* The same number is the same payload, of one length. What comes in between goes where it always went. */
TEST(others_in_between) {
    struct circle c;
    circle_open(&c);
    CHECK_EQ(show(&c, 0, 0, LEN, 7), HR_OK);
    uint64_t tail = board(&c)->tail;
    CHECK_EQ(show(&c, 0, 1, LEN, 0), HR_OK);
    CHECK_EQ(show(&c, 1, 0, LEN, 7), HR_OK);
    CHECK_EQ(board(&c)->tail, tail);
    CHECK_EQ(show(&c, 1, 1, LEN / 2, 7), HR_OK);
    CHECK_EQ(board(&c)->tail, tail + LEN / 2);
    UNTIL(5, c.to[0].received == 2 && c.to[1].received == 2, BOTH(&c.to[0], &c.to[1]));
    CHECK_EQ(c.to[0].bad + c.to[1].bad, 0);
    circle_close(&c);
}

/* Nothing is written over that somebody may be reading; the others' messages go by their rings meanwhile. */
TEST(who_does_not_read_costs_the_others_the_board_alone) {
    enum { FIRST = SHM_BOARD / LEN, MORE = 20, SHORT = 3 << 10 };
    struct circle c;
    circle_open(&c);
    for (uint64_t seq = 0; seq < FIRST + MORE; seq++) {
        for (int i = 0; i < READERS; i++) CHECK_EQ(show(&c, i, seq, LEN, seq + 1), HR_OK);
        UNTIL(5, c.to[0].received > seq, turn(&c.to[0]));
        CHECK_EQ(board(&c)->same, seq < FIRST ? seq + 1 : FIRST);
    }
    CHECK_EQ(board(&c)->tail, SHM_BOARD);
    UNTIL(5, c.to[1].received == FIRST + MORE, turn(&c.to[1]));
    for (int i = 0; i < READERS; i++) {
        CHECK_EQ(show(&c, i, FIRST + MORE, SHORT, 1000), HR_OK);
        UNTIL(5, c.to[i].received == FIRST + MORE + 1, turn(&c.to[i]));
    }
    CHECK_EQ(board(&c)->tail, SHM_BOARD + SHORT);
    for (int i = 0; i < READERS; i++) { /* what has been read is said before a sleep */
        struct shm_ep *e = shm_ep(c.to[i].ep);
        e->said = SHM_BOARD; /* it may have looked around meanwhile */
        CHECK_EQ(ops->event_arm(c.to[i].domain), HR_OK);
        CHECK_EQ(e->said, SHM_BOARD + SHORT);
        CHECK_EQ(atomic_load(&e->rx.ctl->taken), e->said);
        ops->event_disarm(c.to[i].domain);
    }
    CHECK_EQ(c.to[0].bad + c.to[1].bad, 0);
    circle_close(&c);
}

/* A second time to one peer: its word of the first would be taken for the second. */
TEST(once_to_each) {
    struct circle c;
    circle_open(&c);
    CHECK_EQ(show(&c, 0, 0, LEN, 1), HR_OK);
    UNTIL(5, c.to[0].received == 1, turn(&c.to[0]));
    CHECK_EQ(ops->event_arm(c.to[0].domain), HR_OK);
    ops->event_disarm(c.to[0].domain);
    CHECK_EQ(show(&c, 0, 1, LEN, 1), HR_OK); /* unread for long */
    for (uint64_t seq = 0; seq < 100; seq++) {
        CHECK_EQ(show(&c, 1, seq, LEN, seq + 2), HR_OK);
        UNTIL(5, c.to[1].received > seq, turn(&c.to[1]));
    }
    CHECK_EQ(board(&c)->tail, 101 * LEN);
    UNTIL(5, c.to[0].received == 2, turn(&c.to[0]));
    CHECK_EQ(c.to[0].bad + c.to[1].bad, 0);
    circle_close(&c);
}

/* No room in a ring: nothing is put on the board for it, and later it is what it is then. */
TEST(a_full_ring) {
    struct circle c;
    uint64_t seq = 0;
    circle_open(&c);
    while (show(&c, 0, seq, 64, 0) == HR_OK) seq++;
    for (int i = 0; i < 10; i++) CHECK_EQ(show(&c, 0, seq, LEN, 1), HR_AGAIN);
    CHECK_EQ(board(&c)->tail, 0);
    CHECK_EQ(show(&c, 1, 0, LEN, 1), HR_OK);
    CHECK_EQ(show(&c, 1, 1, LEN, 2), HR_OK);
    UNTIL(5, c.to[0].received == seq, turn(&c.to[0]));
    CHECK_EQ(show(&c, 0, seq, LEN, 1), HR_OK); /* put there again, as another came between */
    CHECK_EQ(board(&c)->tail, 3 * LEN);
    UNTIL(5, c.to[0].received == seq + 1 && c.to[1].received == 2, BOTH(&c.to[0], &c.to[1]));
    CHECK_EQ(c.to[0].bad + c.to[1].bad, 0);
    circle_close(&c);
}

/* One that gets little is no hindrance: of a position long ago it has read what it was shown. */
TEST(who_is_shown_little) {
    struct circle c;
    uint64_t other = 0;
    circle_open(&c);
    for (uint64_t seq = 0; seq < 1000; seq++) {
        CHECK_EQ(show(&c, 0, seq, LEN, seq + 1), HR_OK);
        if (seq % 100 == 99) {
            CHECK_EQ(show(&c, 1, other, LEN, 5000 + other), HR_OK);
            other++;
            UNTIL(5, c.to[1].received == other, turn(&c.to[1]));
        }
        UNTIL(5, c.to[0].received > seq, turn(&c.to[0]));
        int64_t end = hr_now() + 100000000; /* it says so within 20 ms of polling */
        while (shm_ep(c.to[1].ep)->said != shm_ep(c.to[1].ep)->read && hr_now() < end) turn(&c.to[1]);
    }
    CHECK_EQ(board(&c)->tail, 1010 * LEN);
    CHECK_EQ(c.to[0].bad + c.to[1].bad, 0);
    circle_close(&c);
}

/* Given up with something unread, it may read that still: so it stays. Nothing unread, or gone: the others keep the
 * board. */
TEST(who_is_given_up_reads_what_it_was_shown) {
    enum { UNREAD, READ, GONE, KINDS };
    for (int kind = 0; kind < KINDS; kind++) {
        struct circle c;
        circle_open(&c);
        for (int i = 0; i < READERS; i++) CHECK_EQ(show(&c, i, 0, LEN, 1), HR_OK);
        if (kind == READ) {
            UNTIL(5, c.to[1].received == 1, turn(&c.to[1]));
            CHECK_EQ(ops->event_arm(c.to[1].domain), HR_OK);
        }
        if (kind == GONE) {
            ops->ep_abort(c.to[1].ep);
            UNTIL(5, c.from.lost, turn(&c.from));
        }
        ops->ep_abort(c.eps[1]);
        CHECK_EQ(board(&c)->state, kind == UNREAD ? SHM_BOARD_LEFT : SHM_BOARD_OPEN);
        for (uint64_t seq = 0; seq < 100; seq++) {
            UNTIL(5, c.to[0].received > seq, turn(&c.to[0]));
            CHECK_EQ(show(&c, 0, seq + 1, LEN, seq + 2), HR_OK);
        }
        CHECK_EQ(board(&c)->tail, kind == UNREAD ? LEN : 101 * LEN);
        if (kind != GONE) UNTIL(5, c.to[1].lost, turn(&c.to[1]));
        CHECK_EQ(c.to[1].received, kind != GONE);
        CHECK_EQ(c.to[0].bad + c.to[1].bad, 0);
        circle_close(&c);
    }
}

/* The file stays as long as somebody reads it. */
TEST(what_was_shown_outlives_the_sender) {
    struct circle c;
    circle_open(&c);
    for (uint64_t seq = 0; seq < 5; seq++)
        for (int i = 0; i < READERS; i++) CHECK_EQ(show(&c, i, seq, LEN, seq + 1), HR_OK);
    ops->ep_destroy(c.eps[1]);
    side_close(&c.from);
    for (int i = 0; i < READERS; i++) {
        UNTIL(5, c.to[i].lost, turn(&c.to[i]));
        CHECK_EQ(c.to[i].received, 5);
        CHECK_EQ(c.to[i].bad, 0);
        side_close(&c.to[i]);
    }
}

TEST(a_reader_that_lies) {
    static const uint64_t lies[] = {1 << 20, UINT64_MAX, SHM_BOARD + SHM_LINE};
    for (int k = 0; k < 3; k++) {
        struct circle c;
        circle_open(&c);
        for (uint64_t seq = 0; seq < SHM_BOARD / LEN; seq++) CHECK_EQ(show(&c, 1, seq, LEN, seq + 1), HR_OK);
        atomic_store(&shm_ep(c.to[1].ep)->rx.ctl->taken, lies[k]);
        CHECK_EQ(show(&c, 1, SHM_BOARD / LEN, LEN, 1000), HR_AGAIN);
        CHECK_EQ(shm_ep(c.eps[1])->lost, HR_ERR_PROTOCOL);
        UNTIL(5, c.from.lost, turn(&c.from));
        CHECK_EQ(c.from.lost, HR_ERR_PROTOCOL);
        CHECK(strstr(c.from.detail, "never shown"));
        CHECK_EQ(show(&c, 0, 0, LEN, 1001), HR_OK); /* the others go on */
        UNTIL(5, c.to[0].received == 1, turn(&c.to[0]));
        circle_close(&c);
    }
}

/* A record that shows what is not there ends the endpoint; nothing is read outside of the board. */
TEST(a_sender_that_lies) {
    static const struct {
        uint64_t at;
        size_t len;
    } lies[] = {{0, SHM_LONG + 1}, {SHM_BOARD - 64, 128}, {0, UINT32_MAX}, {UINT64_MAX - 63, 4096}, {0, 0}, {0, 4096}};
    for (int k = 0; k < 6; k++) {
        struct side a, b;
        pair_open(&a, &b, NULL);
        struct shm_ep *e = shm_ep(a.ep);
        static uint8_t payload[4096];
        uint64_t hdr = 0;
        struct hr_msg msg = {.hdr = &hdr, .hdr_len = 8, .payload = payload, .len = sizeof payload, .same = 1};
        if (k != 5) CHECK_EQ(ops->post_send(a.ep, &msg), HR_OK); /* there it has no board yet */
        memcpy(ring_tx_at(&e->tx), &hdr, 8);
        memcpy(ring_tx_at(&e->tx) + 8, &lies[k].at, 8);
        ring_tx_publish(&e->tx, ring_word(RING_SHOWN, 8, lies[k].len), ring_record(8, 8));
        UNTIL(5, b.lost, BOTH(&a, &b));
        CHECK_EQ(b.lost, HR_ERR_PROTOCOL);
        CHECK_EQ(b.received, k != 5);
        side_close(&a), side_close(&b);
    }
}

/* A file that can shrink, one of another size, one that says another, a second one, none. */
TEST(boards_that_cannot_be) {
    enum { SHRINKS, SHORT, SAYS_SHORT, TWICE, NONE, KINDS };
    for (int k = 0; k < KINDS; k++) {
        struct side a, b;
        struct shm_frame frame = {.kind = SHM_BOARD_IS, .size = k == SAYS_SHORT ? SHM_BOARD / 2 : SHM_BOARD};
        int fd = memfd_create("board", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        pair_open(&a, &b, NULL);
        CHECK_EQ(ftruncate(fd, k == SHORT || k == SAYS_SHORT ? SHM_BOARD / 2 : SHM_BOARD), 0);
        if (k != SHRINKS) CHECK_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
        for (int i = 0; i < 1 + (k == TWICE); i++)
            CHECK_EQ(hr_shm_frame_send(shm_ep(a.ep), &frame, &fd, k != NONE), HR_OK);
        UNTIL(5, b.lost, BOTH(&a, &b));
        CHECK_EQ(b.lost, k == NONE ? HR_ERR_UNREACHABLE : HR_ERR_PROTOCOL);
        CHECK(strstr(b.detail, "offered a board"));
        close(fd);
        side_close(&a), side_close(&b);
    }
}

TEST(readers_cannot_write) {
    struct circle c;
    circle_open(&c);
    CHECK_EQ(show(&c, 0, 0, LEN, 1), HR_OK);
    int fd = board(&c)->fd;
    CHECK(mmap(NULL, SHM_BOARD, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
    CHECK(pwrite(fd, "x", 1, 0) < 0);
    CHECK(ftruncate(fd, 0) < 0);
    CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) < 0);
    circle_close(&c);
}
