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
#include <string.h>
#include <time.h>

#include "hr/memory.h"
#include "two.h"

extern const struct hr_provider hr_provider_shm;

enum { ROUNDS = 100, PULLS = 9 };
#define LARGE ((size_t)64 << 20)

static uint64_t received_bytes, checksum;
static uint8_t landing[64 << 10];
static struct hr_desc desc;

static struct line { /* of parent and child */
    _Alignas(128) _Atomic uint64_t ping;
    _Alignas(128) _Atomic uint64_t pong;
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
static void on_notify(struct hr_ep *e, uint64_t value, size_t n) { (void)e, (void)value, (void)n; }
static const struct hr_sink sink = {on_recv, on_done, on_notify, on_state, NULL, NULL};

static double best(const double *v, int n) {
    double min = v[0];
    for (int r = 1; r < n; r++)
        if (v[r] < min) min = v[r];
    return min;
}

/* Every measurement is written once, for both sides: side 0 measures, and begins. */
static double bare_line(void) {
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

static double ping_pong(const void *payload, size_t len, uint64_t n) {
    double v[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        double t = now();
        for (uint64_t i = 0; i < n; i++) {
            if (me == 0) send_message(payload, len);
            wait_for(&received, received + 1);
            if (me == 1) send_message(payload, len);
        }
        v[r] = (now() - t) / (double)n / 2;
    }
    return best(v, ROUNDS);
}

/* Seconds per message. */
static double stream(const void *payload, size_t len, uint64_t n) {
    double v[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        double t = now();
        if (me == 0) {
            for (uint64_t i = 0; i < n; i++) send_message(payload, len);
            wait_for(&received, received + 1);
        } else {
            wait_for(&received, received + n);
            send_message(NULL, 0);
        }
        v[r] = (now() - t) / (double)n;
    }
    return best(v, ROUNDS);
}

/* Side 1 exports, side 0 reads it in pieces, as the engine does. Seconds per byte; 0: not permitted. */
static double pull(void *memory, size_t piece) {
    double v[PULLS];
    struct hr_mem mem;
    struct hr_rmem rmem;
    hr_status status;
    if (me == 1) {
        memset(memory, 1, LARGE);
        must(ops->mem_register(domain, memory, LARGE, HR_ACCESS_REMOTE_READ, &mem), "mem_register");
        status = ops->mem_export(ep, &mem, memory, LARGE, &desc);
        send_message(&desc, status == HR_OK ? sizeof desc : 0);
        wait_for(&received, received + 1);
        return 0;
    }
    received_bytes = 0;
    wait_for(&received, received + 1);
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
    int json = argc > 1 && !strcmp(argv[1], "--json"), n = 0;
    struct result results[16];
    char *payload;
    void *arena, *plain;
    double t;

    shared = both_see(sizeof *shared);
    pid_t child = two_start();
    two_connect(&hr_provider_shm, NULL, &sink);
    payload = hr_arena_alloc(1 << 20, 0);
    memset(payload, 7, 1 << 20);

    results[n++] = (struct result){"bare cache line", "us", 1e6 * bare_line()};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        snprintf(names[n], sizeof names[n], "latency %zu B", sizes[i]);
        t = ping_pong(payload, sizes[i], sizes[i] > 4096 ? 100 : 1000);
        results[n] = (struct result){names[n], "us", 1e6 * t};
        n++;
    }
    t = stream(payload, 8, 2000);
    results[n++] = (struct result){"stream 8 B", "M/s", 1e-6 / t};
    t = stream(payload, 65536, 200);
    results[n++] = (struct result){"stream 64 KiB", "GB/s", 65536e-9 / t};
    arena = hr_arena_alloc(LARGE, 0);
    t = pull(arena, 512 << 10);
    results[n++] = (struct result){"read, mapped, 64 MiB", "GB/s", t > 0 ? 1e-9 / t : 0};
    if (posix_memalign(&plain, (size_t)2 << 20, LARGE)) return 1;
    madvise(plain, LARGE, MADV_HUGEPAGE);
    memset(plain, 2, LARGE);
    t = pull(plain, 512 << 10);
    results[n++] = (struct result){"read, process_vm_readv", "GB/s", t > 0 ? 1e-9 / t : 0};

    atomic_store(&meeting->have[me], 2);
    while (atomic_load(&meeting->have[!me]) != 2) sched_yield(); /* nobody sees the other leave */
    ops->ep_destroy(ep);
    ops->domain_close(domain);
    if (me == 1) _exit(0);
    show(results, n, json);
    two_end(child);
    return 0;
}
