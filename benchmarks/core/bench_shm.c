/* bench_shm.c - what the shm provider costs below the engine: latency and bandwidth of two processes on two cores.
 *
 *     bench_shm [--json]
 *
 * Latency is half of a round trip post_send -> recv, both sides polling, with the engine's 48-byte header, the payload
 * copied out by the receiver; beside it the same round trip over one bare cache line, which is what the machine can do.
 * Bandwidth is of a stream of 64 KiB messages (copied in and out), of a large arena read through its mapping, and of
 * other memory read by process_vm_readv. The best of many short rounds is shown: on a machine that is not quiet the
 * others measure its neighbours.
 */

#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hr/auth.h"
#include "hr/memory.h"
#include "hr/provider.h"

extern const struct hr_provider hr_provider_shm;

enum { ROUNDS = 100, PULLS = 9, HDR = 48 };
#define LARGE ((size_t)64 << 20)

static const struct hr_provider *ops = &hr_provider_shm;
static struct hr_domain *domain;
static struct hr_ep *ep;
static uint64_t received, received_bytes, checksum;
static uint8_t landing[64 << 10];
static int up;
static struct hr_desc desc;

struct shared { /* of parent and child */
    _Alignas(128) _Atomic uint64_t ping;
    _Alignas(128) _Atomic uint64_t pong;
    _Atomic int have[2];
    uint8_t addr[2][HR_MAX_ADDR];
    size_t len[2];
} *shared;

static double now(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static void on_recv(struct hr_ep *from, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    (void)from, (void)hdr_len;
    received++;
    received_bytes += len;
    if (len == sizeof desc) memcpy(&desc, payload, len);
    if (len) memcpy(landing, payload, len);
    checksum += *(const uint64_t *)hdr;
}
static void on_done(struct hr_ep *e, void *cookie, hr_status status) { (void)e, (void)cookie, (void)status; }
static void on_notify(struct hr_ep *e, uint64_t value, size_t n) { (void)e, (void)value, (void)n; }
static void on_state(struct hr_ep *e, hr_status status, const char *detail) {
    (void)e;
    if (status != HR_OK) {
        fprintf(stderr, "connection: %s: %s\n", hr_status_text(status), detail ? detail : "");
        exit(1);
    }
    up = 1;
}

static void must(hr_status status, const char *what) {
    if (status == HR_OK) return;
    fprintf(stderr, "%s: %s\n", what, hr_status_text(status));
    exit(1);
}

static void send_message(const void *payload, size_t len) {
    uint64_t hdr[HDR / 8] = {received};
    struct hr_msg msg = {.hdr = hdr, .hdr_len = HDR, .payload = payload, .len = len};
    hr_status status;
    while ((status = ops->post_send(ep, &msg)) == HR_AGAIN) ops->progress(domain, 16, ep);
    must(status, "post_send");
}

static void wait_for(uint64_t n) {
    while (received < n) ops->progress(domain, 16, ep);
}

static void connect_to_other(int me) {
    static const struct hr_sink sink = {on_recv, on_done, on_notify, on_state};
    static struct hr_auth auth;
    struct hr_domain_params params = {.self_id = (uint64_t)me + 1, .auth = &auth, .sink = &sink, .local_peers = 1};
    char detail[256] = "";
    cpu_set_t cpus;

    CPU_ZERO(&cpus);
    CPU_SET(me, &cpus);
    sched_setaffinity(0, sizeof cpus, &cpus); /* where there is one core only, both stay on it */
    hr_auth_init(&auth, "bench", 5, 0, 0);
    if (ops->domain_open(ops, &params, &domain, detail) != HR_OK) {
        fprintf(stderr, "%s\n", detail);
        exit(1);
    }
    shared->len[me] = ops->domain_address(domain, shared->addr[me]);
    atomic_store(&shared->have[me], 1);
    while (!atomic_load(&shared->have[!me])) sched_yield();
    must(ops->ep_create(domain, (uint64_t)!me + 1, NULL, &ep), "ep_create");
    must(ops->ep_connect(ep, shared->addr[!me], shared->len[!me], me == 0), "ep_connect");
    while (!up) ops->progress(domain, 16, NULL);
}

static double best(const double *v, int n) {
    double min = v[0];
    for (int r = 1; r < n; r++)
        if (v[r] < min) min = v[r];
    return min;
}

/* Every measurement is written once, for both sides: side 0 measures, and begins. */
static double bare_line(int me) {
    double v[ROUNDS];
    uint64_t n = 1000, at = 0;
    for (int r = 0; r < ROUNDS; r++) {
        double t = now();
        for (uint64_t i = 0; i < n; i++) {
            at++;
            if (me == 0) {
                atomic_store_explicit(&shared->ping, at, memory_order_release);
                while (atomic_load_explicit(&shared->pong, memory_order_acquire) != at) continue;
            } else {
                while (atomic_load_explicit(&shared->ping, memory_order_acquire) != at) continue;
                atomic_store_explicit(&shared->pong, at, memory_order_release);
            }
        }
        v[r] = (now() - t) / (double)n / 2;
    }
    return best(v, ROUNDS);
}

static double ping_pong(int me, const void *payload, size_t len, uint64_t n) {
    double v[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        double t = now();
        for (uint64_t i = 0; i < n; i++) {
            if (me == 0) send_message(payload, len);
            wait_for(received + 1);
            if (me == 1) send_message(payload, len);
        }
        v[r] = (now() - t) / (double)n / 2;
    }
    return best(v, ROUNDS);
}

/* Seconds per message. */
static double stream(int me, const void *payload, size_t len, uint64_t n) {
    double v[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        double t = now();
        if (me == 0) {
            for (uint64_t i = 0; i < n; i++) send_message(payload, len);
            wait_for(received + 1);
        } else {
            wait_for(received + n);
            send_message(NULL, 0);
        }
        v[r] = (now() - t) / (double)n;
    }
    return best(v, ROUNDS);
}

/* Side 1 exports, side 0 reads it in pieces, as the engine does. Seconds per byte; 0: not permitted. */
static double pull(int me, void *memory, size_t piece) {
    double v[PULLS];
    struct hr_mem mem;
    struct hr_rmem rmem;
    hr_status status;
    if (me == 1) {
        memset(memory, 1, LARGE);
        must(ops->mem_register(domain, memory, LARGE, HR_ACCESS_REMOTE_READ, &mem), "mem_register");
        status = ops->mem_export(ep, &mem, memory, LARGE, &desc);
        send_message(&desc, status == HR_OK ? sizeof desc : 0);
        wait_for(received + 1);
        return 0;
    }
    received_bytes = 0;
    wait_for(received + 1);
    if (received_bytes == 0) {
        send_message(NULL, 0);
        return 0;
    }
    must(ops->mem_import(ep, &desc, &rmem), "mem_import");
    for (int r = 0; r < PULLS; r++) {
        double t = now();
        for (size_t at = 0; at < LARGE; at += piece) {
            struct hr_rma rma = {.local = (char *)memory + at, .len = piece, .remote = &rmem, .offset = at};
            must(ops->post_read(ep, &rma), "post_read");
        }
        v[r] = (now() - t) / (double)LARGE;
    }
    ops->mem_release(ep, &rmem);
    send_message(NULL, 0);
    return best(v, PULLS);
}

struct result {
    const char *name, *unit;
    double value;
};

static void show(const struct result *results, int n, int json) {
    if (json) printf("{");
    for (int i = 0; i < n; i++) {
        if (json)
            printf("%s\"%s\": %.6g", i ? ", " : "", results[i].name, results[i].value);
        else
            printf("%-28s %9.3f %s\n", results[i].name, results[i].value, results[i].unit);
    }
    if (json) printf("}\n");
}

int main(int argc, char **argv) {
    static const size_t sizes[] = {0, 8, 64, 1024, 4096, 65536};
    static char names[16][32];
    int json = argc > 1 && !strcmp(argv[1], "--json"), n = 0, me;
    struct result results[16];
    char *payload;
    void *arena, *plain;
    double t;
    pid_t child;

    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    child = fork();
    if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
    me = child == 0;
    connect_to_other(me);
    payload = hr_arena_alloc(1 << 20, 0);
    memset(payload, 7, 1 << 20);

    results[n++] = (struct result){"bare cache line", "us", 1e6 * bare_line(me)};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        snprintf(names[n], sizeof names[n], "latency %zu B", sizes[i]);
        t = ping_pong(me, payload, sizes[i], sizes[i] > 4096 ? 100 : 1000);
        results[n] = (struct result){names[n], "us", 1e6 * t};
        n++;
    }
    t = stream(me, payload, 8, 2000);
    results[n++] = (struct result){"stream 8 B", "M/s", 1e-6 / t};
    t = stream(me, payload, 65536, 200);
    results[n++] = (struct result){"stream 64 KiB", "GB/s", 65536e-9 / t};
    arena = hr_arena_alloc(LARGE, 0);
    t = pull(me, arena, 512 << 10);
    results[n++] = (struct result){"read, mapped, 64 MiB", "GB/s", t > 0 ? 1e-9 / t : 0};
    if (posix_memalign(&plain, (size_t)2 << 20, LARGE)) return 1;
    madvise(plain, LARGE, MADV_HUGEPAGE);
    memset(plain, 2, LARGE);
    t = pull(me, plain, 512 << 10);
    results[n++] = (struct result){"read, process_vm_readv", "GB/s", t > 0 ? 1e-9 / t : 0};

    atomic_store(&shared->have[me], 2);
    while (atomic_load(&shared->have[!me]) != 2) sched_yield(); /* nobody sees the other leave */
    ops->ep_destroy(ep);
    ops->domain_close(domain);
    if (me == 1) _exit(0);
    show(results, n, json);
    waitpid(child, NULL, 0);
    return 0;
}
