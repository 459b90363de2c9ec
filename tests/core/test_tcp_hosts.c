/* test_tcp_hosts.c - tcp between two hosts: network namespaces that this test makes (root, and the ip command). */

#define _GNU_SOURCE
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "tcp_rig.h"

/* Two processes, A and B, each in a namespace of its own, that take turns by `step`. Both go when the test goes. */
static struct board {
    int step;
    uint8_t addr[2][HR_MAX_ADDR];
    size_t addr_len[2];
} *board;

static int shell(const char *format, ...) {
    char command[256];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    return system(command);
}

static void step_to(int step) { __atomic_store_n(&board->step, step, __ATOMIC_RELEASE); }
static int step(void) { return __atomic_load_n(&board->step, __ATOMIC_ACQUIRE); }
static void step_wait(int until) {
    while (step() < until) usleep(200);
}

static void open_as(struct node *n, int side, int token, int insecure) {
    char detail[256] = "";
    memset(n, 0, sizeof *n);
    hr_auth_init(&n->auth, "rig", token ? 3 : 0, insecure, 1);
    hr_status status = node_try(n, (uint64_t)side + 1, NULL, "user_timeout=1", detail);
    if (status) fprintf(stderr, "%s\n", detail);
    REQUIRE(status == HR_OK);
    memcpy(board->addr[side], n->addr, n->addr_len);
    board->addr_len[side] = n->addr_len;
}

/* The one who waits does not dial: it gives its own address, as the other may be about to change. */
static void call(struct node *n, struct conn *c, int side, int active, int far) {
    int whose = active ? !side : side;
    uint8_t addr[HR_MAX_ADDR];
    memcpy(addr, board->addr[whose], sizeof addr);
    addr[2] ^= (uint8_t)far; /* of the machine's name */
    conn_start(c, n, (uint64_t)!side + 1, addr, board->addr_len[whose], active);
}

/* Between two namespaces of one machine no network is seen: reno, as on loopback. To another machine: the system's. */
static void control_is(struct conn *c, int near) {
    char name[16] = "", ours[16] = "reno";
    socklen_t len = sizeof name;
    struct hr_tcp_ep *ep = (struct hr_tcp_ep *)c->ep;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(!hr_sockaddr_loopback(&ep->peer));
    CHECK(!getsockopt(ep->source.fd, IPPROTO_TCP, TCP_CONGESTION, name, &len));
    if (!near) CHECK(!getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, ours, &len));
    CHECK_STR(name, ours);
    close(fd);
}

/* A waits and looks at what B's calls come to. */
static void host_a(void) {
    struct node n;
    struct conn c;

    open_as(&n, 0, 1, 0);
    step_to(1);
    step_wait(2);
    call(&n, &c, 0, 0, 0);
    RUN(&n, NULL, c.ups && c.messages);
    control_is(&c, 1);
    CHECK_EQ(rig_send(&c, 1, "x", 1), HR_OK);
    RUN(&n, NULL, tcp->ep_unsent(c.ep) == 0);

    /* The cable is pulled: nobody says so, but what is sent is not acknowledged. */
    CHECK_EQ(shell("ip link set hrt0 down"), 0);
    double start = rig_seconds();
    CHECK_EQ(rig_send(&c, 2, "y", 1), HR_OK);
    CHECK(tcp->ep_unsent(c.ep) > 0);
    RUN(&n, NULL, c.losses);
    CHECK(rig_seconds() - start < 6);
    CHECK_EQ(c.loss, HR_ERR_PEER_LOST);
    CHECK(strstr(c.detail, "10.213.7.2:"));
    CHECK_EQ(shell("ip link set hrt0 up"), 0);
    tcp->ep_destroy(c.ep);
    tcp->domain_close(n.domain);

    /* Without a token a caller from elsewhere is sent away, however insecure it is. */
    open_as(&n, 0, 0, 0);
    step_to(3);
    call(&n, &c, 0, 0, 0);
    while (step() < 4) rig_pump(&n, NULL, 1);
    CHECK_EQ(c.ups, 0);
    tcp->ep_destroy(c.ep);
    tcp->domain_close(n.domain);

    /* Both insecure: that is what they asked for. */
    open_as(&n, 0, 0, 1);
    step_to(5);
    step_wait(6);
    call(&n, &c, 0, 0, 1); /* and say that they are on two machines */
    RUN(&n, NULL, c.ups);
    control_is(&c, 0);
    while (step() < 7) rig_pump(&n, NULL, 1);
    tcp->ep_destroy(c.ep);
    tcp->domain_close(n.domain);
}

static void host_b(void) {
    struct node n;
    struct conn c;
    open_as(&n, 1, 1, 0);
    step_wait(1);
    step_to(2);
    call(&n, &c, 1, 1, 0);
    RUN(&n, NULL, c.ups);
    control_is(&c, 1); /* it dials the other's address */
    CHECK_EQ(rig_send(&c, 1, "x", 1), HR_OK);
    while (step() < 3) rig_pump(&n, NULL, 1);
    tcp->ep_destroy(c.ep);
    tcp->domain_close(n.domain);

    open_as(&n, 1, 0, 1);
    call(&n, &c, 1, 1, 0);
    RUN(&n, NULL, c.losses);
    CHECK_EQ(c.loss, HR_ERR_UNREACHABLE);
    CHECK(strstr(c.detail, "token"));
    tcp->ep_destroy(c.ep);
    step_to(4);
    step_wait(5);
    step_to(6);
    call(&n, &c, 1, 1, 1);
    RUN(&n, NULL, c.ups);
    control_is(&c, 0);
    step_to(7);
    tcp->ep_destroy(c.ep);
    tcp->domain_close(n.domain);
}

TEST(two_hosts) {
    if (geteuid() != 0 || shell("ip -V >/dev/null 2>&1")) SKIP("needs root and the ip command");
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(board != MAP_FAILED);
    int status = 0;
    fflush(NULL);
    pid_t a = fork();
    if (a == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (unshare(CLONE_NEWNET)) _exit(77);
        pid_t b = fork();
        if (b == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (unshare(CLONE_NEWNET)) _exit(77);
            step_to(-1);
            while (step() == -1) usleep(200);
            CHECK_EQ(shell("ip addr add 10.213.7.2/24 dev hrt1 && ip link set hrt1 up && ip link set lo up"), 0);
            host_b();
            _exit(check_failures() != 0);
        }
        while (step() != -1 && waitpid(b, &status, WNOHANG) == 0) usleep(200);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77) _exit(77);
        if (shell("ip link add hrt0 type veth peer name hrt1 netns %d 2>/dev/null", b)) _exit(77);
        CHECK_EQ(shell("ip addr add 10.213.7.1/24 dev hrt0 && ip link set hrt0 up && ip link set lo up"), 0);
        step_to(0);
        host_a();
        waitpid(b, &status, 0);
        _exit(check_failures() != 0 || status != 0);
    }
    REQUIRE(a > 0 && waitpid(a, &status, 0) == a);
    munmap(board, sizeof *board);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) SKIP("network namespaces or veth are not to be had here");
    CHECK_EQ(status, 0);
}
