/* bench_tcp.c - the tcp provider beside a raw socket loop, two processes on loopback, in one run. */

/*
 * Ping-pong between two pinned processes that spin; one way is half of a round trip. The raw loop does the least that
 * can be done: send(), and recv() straight into the target until all is there. It runs twice, with the system's
 * congestion control and with the one that the provider takes on one host, so that a gain from the latter shows as what
 * it is. Up to max_send the provider sends one message, beyond that it writes segments into the peer's registered
 * memory, the last with a notification. The four are
 * interleaved over many short rounds and the best of each is shown: other load on the machine only adds.
 *
 *     bench_tcp [--options TEXT]
 */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <signal.h>

#include "hr/auth.h"
#include "hr/provider.h"

enum { ROUNDS = 100, SECONDS = 20, METHODS = 4, SIZES = 5, SIDES = 2 };
static const size_t sizes[SIZES] = {8, 1 << 10, 64 << 10, 1 << 20, 16 << 20};
static const char *const method_names[METHODS] = {"raw, system cc", "raw, same cc", "hrdma", "hrdma read"};
#define LARGEST (16u << 20)

static void need(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "bench_tcp: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec * 1e-3;
}

/* ---- raw ---- */

static void raw_send(int fd, const char *buf, size_t len) {
    while (len) {
        ssize_t n = send(fd, buf, len, MSG_NOSIGNAL | MSG_DONTWAIT);
        need(n > 0 || errno == EAGAIN, "send");
        if (n > 0) buf += n, len -= (size_t)n;
    }
}

static void raw_recv(int fd, char *buf, size_t len) {
    while (len) {
        ssize_t n = recv(fd, buf, len, MSG_DONTWAIT);
        need(n > 0 || (n < 0 && errno == EAGAIN), "recv");
        if (n > 0) buf += n, len -= (size_t)n;
    }
}

static void raw_pair(const char *cc, int fds[2]) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    need(!bind(listener, (void *)&at, len) && !listen(listener, 1), "listen");
    need(!getsockname(listener, (void *)&at, &len), "getsockname");
    fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*cc) {
        need(!setsockopt(fds[0], IPPROTO_TCP, TCP_CONGESTION, cc, (socklen_t)strlen(cc)), cc);
        need(!setsockopt(listener, IPPROTO_TCP, TCP_CONGESTION, cc, (socklen_t)strlen(cc)), cc);
    }
    need(!connect(fds[0], (void *)&at, len), "connect");
    fds[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    need(fds[1] >= 0, "accept");
    for (int i = 0; i < 2; i++) need(!setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one), "TCP_NODELAY");
    close(listener);
}

/* ---- the provider ---- */

extern const struct hr_provider hr_provider_tcp;
static const struct hr_provider *const tcp = &hr_provider_tcp;

static struct {
    struct hr_domain *domain;
    struct hr_ep *ep;
    struct hr_rmem peer;
    int up, arrived, done, have_desc;
    struct hr_desc desc;
} me;

static void on_recv(struct hr_ep *ep, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    (void)ep, (void)hdr, (void)hdr_len;
    if (!me.have_desc && len == sizeof me.desc) {
        memcpy(&me.desc, payload, len);
        me.have_desc = 1;
    } else {
        me.arrived++;
    }
}
static void on_done(struct hr_ep *ep, void *cookie, hr_status status) {
    (void)ep, (void)cookie;
    need(status == HR_OK, "operation failed");
    me.done++;
}
static void on_notify(struct hr_ep *ep, uint64_t value, size_t nbytes) {
    (void)ep, (void)value, (void)nbytes;
    me.arrived++;
}
static void on_state(struct hr_ep *ep, hr_status status, const char *detail) {
    (void)ep;
    if (status) fprintf(stderr, "bench_tcp: %s\n", detail ? detail : "?");
    if (status) exit(1);
    me.up = 1;
}
static const struct hr_sink sink = {on_recv, on_done, on_notify, on_state, NULL, NULL};

static void wait_for(const int *counter, int value) {
    while (*counter < value) tcp->progress(me.domain, 32, me.ep);
}

/* Returns when the payload may be reused. */
static void provider_send(char *buf, size_t len) {
    char hdr[16] = {0};
    if (len <= me.domain->caps.max_send) {
        struct hr_msg msg = {.hdr = hdr, .hdr_len = sizeof hdr, .payload = buf, .len = len};
        hr_status status;
        int done = me.done;
        while ((status = tcp->post_send(me.ep, &msg)) == HR_AGAIN) tcp->progress(me.domain, 32, me.ep);
        need(!hr_is_error(status), "post_send");
        if (status == HR_INPROGRESS) wait_for(&me.done, done + 1);
        return;
    }
    int done = me.done, posted = 0;
    for (size_t at = 0; at < len;) {
        size_t part = len - at < me.domain->caps.segment ? len - at : me.domain->caps.segment;
        struct hr_rma rma = {
            .local = buf + at, .len = part, .remote = &me.peer, .offset = at, .with_notify = at + part == len};
        hr_status status = tcp->post_write(me.ep, &rma);
        need(!hr_is_error(status), "post_write");
        if (status == HR_AGAIN) tcp->progress(me.domain, 32, me.ep);
        if (status == HR_AGAIN) continue;
        posted += status == HR_INPROGRESS;
        at += part;
    }
    wait_for(&me.done, done + posted);
}

/* One side pulls all of it, four segments in flight. */
static void provider_read(char *buf, size_t len) {
    int first = me.done, posted = 0;
    for (size_t at = 0; at < len;) {
        size_t part = len - at < me.domain->caps.segment ? len - at : me.domain->caps.segment;
        struct hr_rma rma = {.local = buf + at, .len = part, .remote = &me.peer, .offset = at};
        if (posted - (me.done - first) >= 4) wait_for(&me.done, first + posted - 3);
        hr_status status = tcp->post_read(me.ep, &rma);
        need(status == HR_INPROGRESS, "post_read");
        posted++;
        at += part;
    }
    wait_for(&me.done, first + posted);
}

/* ---- both ---- */

struct shared {
    uint8_t addr[SIDES][HR_MAX_ADDR];
    size_t addr_len[SIDES];
    int opened[SIDES];
    int round;
    char text[256];
};

static void provider_open(struct shared *shared, int side, const char *options, struct hr_auth *auth, char *target) {
    char detail[256] = "";
    struct hr_domain_params params = {
        .self_id = (uint64_t)side + 1, .auth = auth, .sink = &sink, .options = options, .ifname = "lo"};
    struct hr_mem mem;
    struct hr_desc desc;
    if (tcp->domain_open(tcp, &params, &me.domain, detail)) {
        fprintf(stderr, "bench_tcp: %s\n", detail);
        exit(1);
    }
    shared->addr_len[side] = tcp->domain_address(me.domain, shared->addr[side]);
    if (!side) tcp->domain_describe(me.domain, shared->text, sizeof shared->text);
    __atomic_store_n(&shared->opened[side], 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&shared->opened[!side], __ATOMIC_ACQUIRE)) sched_yield();
    need(!tcp->ep_create(me.domain, (uint64_t)!side + 1, NULL, &me.ep), "ep_create");
    need(!tcp->ep_connect(me.ep, shared->addr[!side], shared->addr_len[!side], side), "ep_connect");
    wait_for(&me.up, 1);
    need(!tcp->mem_register(me.domain, target, LARGEST, HR_ACCESS_REMOTE_WRITE | HR_ACCESS_REMOTE_READ, &mem),
         "register");
    need(!tcp->mem_export(me.ep, &mem, target, LARGEST, &desc), "export");
    provider_send((char *)desc.bytes, sizeof desc.bytes);
    wait_for(&me.have_desc, 1);
    need(!tcp->mem_import(me.ep, &me.desc, &me.peer), "import");
}

static void pass(int method, int fd, int side, char *buf, char *target, size_t size, int count) {
    for (int i = 0; i < count; i++)
        for (int turn = 0; turn < SIDES; turn++) {
            int sends = turn == side, seen = me.arrived;
            if (method < 2)
                sends ? raw_send(fd, buf, size) : raw_recv(fd, target, size);
            else if (method == 2 && sends)
                provider_send(buf, size);
            else if (method == 2)
                wait_for(&me.arrived, seen + 1);
            else if (sends) /* the other side is polling: it answers */
                provider_read(buf, size), provider_send(buf, 8);
            else
                wait_for(&me.arrived, seen + 1);
        }
}

/* Side 0 says whether there is another round: ROUNDS of them, fewer when the machine is so busy that they take long. */
static int another_round(struct shared *shared, int side, int round, double start) {
    if (side == 0) {
        int go = round < ROUNDS && (round < 3 || now() - start < SECONDS * 1e6);
        __atomic_store_n(&shared->round, go ? round + 1 : -1, __ATOMIC_RELEASE);
        return go;
    }
    int said;
    while ((said = __atomic_load_n(&shared->round, __ATOMIC_ACQUIRE)) != -1 && said <= round) sched_yield();
    return said != -1;
}

static void measure(struct shared *shared, int side, const int fds[2], char *buf, char *target) {
    double best[METHODS][SIZES] = {0}, began = now();
    int round = 0;
    for (; another_round(shared, side, round, began); round++)
        for (int s = 0; s < SIZES; s++)
            for (int m = 0; m < METHODS; m++) {
                int count = sizes[s] <= 65536 ? 20 : 1;
                pass(m, m < 2 ? fds[m] : -1, side, buf, target, sizes[s], 1);
                double start = now();
                pass(m, m < 2 ? fds[m] : -1, side, buf, target, sizes[s], count);
                double us = (now() - start) / count / 2;
                if (round == 0 || us < best[m][s]) best[m][s] = us;
            }
    if (side) return;
    printf("best of %d rounds\n%-16s", round, "one way, us");
    for (int s = 0; s < SIZES; s++) printf("%11zu", sizes[s]);
    printf("\n");
    for (int m = 0; m < METHODS; m++) {
        printf("%-16s", method_names[m]);
        for (int s = 0; s < SIZES; s++) printf("%11.2f", best[m][s]);
        printf("\n%-16s", "  GB/s");
        for (int s = 0; s < SIZES; s++) printf("%11.2f", (double)sizes[s] / best[m][s] / 1e3);
        printf("\n");
    }
    printf("%-16s", "hrdma / raw same");
    for (int s = 0; s < SIZES; s++) printf("%11.2f", best[2][s] / best[1][s]);
    printf("\n");
}

/* Huge pages where they can be had, touched. */
static char *memory(void) {
    char *p = mmap(NULL, LARGEST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(p != MAP_FAILED, "mmap");
    madvise(p, LARGEST, MADV_HUGEPAGE);
    memset(p, 1, LARGEST);
    return p;
}

int main(int argc, char **argv) {
    const char *options = argc == 3 && !strcmp(argv[1], "--options") ? argv[2] : NULL;
    int system_pair[2], same_pair[2];
    struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    struct hr_auth auth;
    if (argc > 1 && !options) return fprintf(stderr, "usage: bench_tcp [--options TEXT]\n"), 2;
    need(shared != MAP_FAILED, "mmap");
    hr_auth_init(&auth, "bench", 5, 0, 1);
    raw_pair("", system_pair);
    raw_pair("reno", same_pair);
    pid_t parent = getpid(), child = fork();
    need(child >= 0, "fork");
    int side = child == 0;
    if (side && (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != parent)) return 1;
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(side, &cpus);
    if (sysconf(_SC_NPROCESSORS_ONLN) > 1) sched_setaffinity(0, sizeof cpus, &cpus);
    int fds[2] = {system_pair[side], same_pair[side]};
    close(system_pair[!side]);
    close(same_pair[!side]);
    char *buf = memory(), *target = memory();
    provider_open(shared, side, options, &auth, target);
    if (!side) printf("%s\n", shared->text);
    measure(shared, side, fds, buf, target);
    if (side) return 0;
    int status = 0;
    need(waitpid(child, &status, 0) == child, "waitpid");
    return status != 0;
}
