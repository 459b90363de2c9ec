/* test_tcp_peers.c - tcp peers in processes of their own: killed, leaving, frozen. */

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "tcp_rig.h"

enum { TARGET = 1 << 20 };

/* The child is node 2 and does `act` when connected; the parent is node 1. */
struct family {
    struct node a;
    struct conn c;
    pid_t child;
    struct board { /* shared */
        uint8_t addr[2][HR_MAX_ADDR];
        size_t addr_len[2];
        int ready[2];
        struct hr_desc desc;
    } *board;
};

static void child_main(struct family *f, void (*act)(struct node *, struct conn *, struct board *)) {
    struct node b;
    struct conn c;
    node_open(&b, 2, "lo", NULL);
    memcpy(f->board->addr[1], b.addr, b.addr_len);
    f->board->addr_len[1] = b.addr_len;
    __atomic_store_n(&f->board->ready[1], 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&f->board->ready[0], __ATOMIC_ACQUIRE)) usleep(100);
    conn_start(&c, &b, 1, f->board->addr[0], f->board->addr_len[0], 1);
    RUN(&b, NULL, c.ups);
    act(&b, &c, f->board);
    _exit(check_failures());
}

static void family_start(struct family *f, void *target, void (*act)(struct node *, struct conn *, struct board *)) {
    struct hr_mem mem;
    memset(f, 0, sizeof *f);
    f->board = mmap(NULL, sizeof *f->board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(f->board != MAP_FAILED);
    pid_t parent = getpid();
    f->child = fork();
    REQUIRE(f->child >= 0);
    if (f->child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent) child_main(f, act);
        _exit(1);
    }
    node_open(&f->a, 1, "lo", NULL);
    memcpy(f->board->addr[0], f->a.addr, f->a.addr_len);
    f->board->addr_len[0] = f->a.addr_len;
    while (!__atomic_load_n(&f->board->ready[1], __ATOMIC_ACQUIRE)) usleep(100);
    conn_start(&f->c, &f->a, 2, f->board->addr[1], f->board->addr_len[1], 0);
    if (target) {
        REQUIRE(tcp->mem_register(f->a.domain, target, TARGET, HR_ACCESS_REMOTE_WRITE, &mem) == HR_OK);
        REQUIRE(tcp->mem_export(f->c.ep, &mem, target, TARGET, &f->board->desc) == HR_OK);
    }
    __atomic_store_n(&f->board->ready[0], 1, __ATOMIC_RELEASE);
    RUN(&f->a, NULL, f->c.ups);
}

static void family_end(struct family *f) {
    int status;
    tcp->ep_destroy(f->c.ep);
    tcp->domain_close(f->a.domain);
    kill(f->child, SIGKILL);
    CHECK_EQ(waitpid(f->child, &status, 0), f->child);
    munmap(f->board, sizeof *f->board);
}

static void write_for_ever(struct node *b, struct conn *c, struct board *board) {
    static uint8_t bytes[TARGET];
    struct hr_rmem rmem;
    rig_fill(bytes, sizeof bytes, 1);
    REQUIRE(tcp->mem_import(c->ep, &board->desc, &rmem) == HR_OK);
    struct hr_rma write = {.local = bytes, .len = TARGET, .remote = &rmem, .with_notify = 1};
    while (!c->losses) {
        tcp->post_write(c->ep, &write);
        tcp->progress(b->domain, 8, NULL);
    }
}

static void poll_only(struct node *b, struct conn *c, struct board *board) {
    (void)board;
    while (!c->losses) tcp->progress(b->domain, 8, NULL);
}

static uint8_t target[TARGET], expected[TARGET];

TEST(killed_in_the_middle_of_a_write) {
    struct family f;
    family_start(&f, target, write_for_ever);
    RUN(&f.a, NULL, f.c.notifies > 3);
    double start = rig_seconds();
    kill(f.child, SIGKILL);
    RUN(&f.a, NULL, f.c.losses);
    CHECK(rig_seconds() - start < 5);
    CHECK_EQ(f.c.loss, HR_ERR_PEER_LOST);
    CHECK(strstr(f.c.detail, "127.0.0.1:") || strstr(f.c.detail, "[::1]:"));
    CHECK_EQ(rig_send(&f.c, 1, NULL, 0), HR_ERR_PEER_LOST);
    family_end(&f);
}

/* Stopped, given up here, memory in new use, continued: what it still writes goes nowhere. */
TEST(frozen_and_awake_again) {
    struct family f;
    family_start(&f, target, write_for_ever);
    RUN(&f.a, NULL, f.c.notifies > 3);
    kill(f.child, SIGSTOP);
    rig_pump(&f.a, NULL, 100);
    CHECK_EQ(f.c.losses, 0); /* a frozen peer is for heartbeats to find */
    tcp->ep_abort(f.c.ep);
    memset(target, 0x5a, TARGET);
    memset(expected, 0x5a, TARGET);
    kill(f.child, SIGCONT);
    rig_pump(&f.a, NULL, 200);
    CHECK_MEM(target, expected, TARGET);
    int status = 0; /* it learns of it and leaves its loop */
    for (int i = 0; i < 200 && waitpid(f.child, &status, WNOHANG) == 0; i++) usleep(10000);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    f.child = fork(); /* for family_end */
    if (f.child == 0) _exit(0);
    family_end(&f);
}

TEST(nothing_is_sent_to_a_frozen_peer_without_end) {
    struct family f;
    static uint8_t bytes[100000];
    family_start(&f, NULL, poll_only);
    kill(f.child, SIGSTOP);
    int again = 0;
    for (int i = 0; i < 2000 && again < 10; i++) {
        again += rig_send(&f.c, 1, bytes, sizeof bytes) == HR_AGAIN;
        tcp->progress(f.a.domain, 8, f.c.ep);
    }
    CHECK_EQ(again, 10);
    CHECK(tcp->ep_unsent(f.c.ep) > 0);
    /* Asleep meanwhile: no event, and no processor time. */
    struct pollfd pfd = {.fd = tcp->event_fd(f.a.domain), .events = POLLIN};
    rig_pump(&f.a, NULL, 20);
    CHECK_EQ(tcp->event_arm(f.a.domain), HR_OK);
    CHECK_EQ(poll(&pfd, 1, 100), 0);
    double start = rig_seconds();
    tcp->ep_abort(f.c.ep);
    CHECK(rig_seconds() - start < 2);
    family_end(&f);
}

static void send_some_and_leave(struct node *b, struct conn *c, struct board *board) {
    static uint8_t bytes[50000];
    (void)board;
    rig_fill(bytes, sizeof bytes, 2);
    for (uint64_t i = 0; i < 200;) {
        hr_status status = rig_send(c, i, bytes, sizeof bytes);
        if (status == HR_OK || status == HR_INPROGRESS) i++;
        tcp->progress(b->domain, 8, NULL);
    }
    /* As an engine does before it closes: until all has left. */
    RUN(b, NULL, tcp->ep_unsent(c->ep) == 0);
    _exit(0);
}

TEST(what_was_sent_arrives_before_the_loss) {
    struct family f;
    family_start(&f, NULL, send_some_and_leave);
    /* It is long gone when its messages are looked at. */
    int status;
    for (int i = 0; i < 1000 && f.c.messages < 20; i++) tcp->progress(f.a.domain, 1, f.c.ep);
    RUN(&f.a, NULL, f.c.losses);
    CHECK_EQ(f.c.messages, 200);
    CHECK_EQ(f.c.hdr[0], 199);
    CHECK_EQ(f.c.loss, HR_ERR_PEER_LOST);
    CHECK_EQ(waitpid(f.child, &status, 0), f.child);
    f.child = fork();
    if (f.child == 0) _exit(0);
    family_end(&f);
}
