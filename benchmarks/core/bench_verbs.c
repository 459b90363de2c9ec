/* bench_verbs.c - latency of the verbs provider below the engine: two processes, each polling on a core of its own.
 *
 *     bench_verbs [DEVICE [ROUND-TRIPS]]        sim and 1000 otherwise
 *
 * One way of 8 bytes in microseconds, median of the round trips: as a message behind the engine's 48-byte header, and
 * as a write with a notification, which is what `hrdma.Endpoint` does. Comparable with ib_send_lat, t_typical, on the
 * same device. bench_verbs.py runs it beside that.
 */

#define _GNU_SOURCE
#include <string.h>

#include "hr/clock.h"
#include "hr/memory.h"
#include "two.h"

extern const struct hr_provider hr_provider_verbs;

enum { BYTES = 8, MOST = 1000000 };

static uint64_t notified;
static struct hr_desc desc;

static void on_recv(struct hr_ep *from, const void *hdr, size_t hdr_len, const void *payload, size_t len) {
    (void)from, (void)hdr, (void)hdr_len;
    if (len == sizeof desc) memcpy(&desc, payload, len);
    received++;
}
static void on_notify(struct hr_ep *e, uint64_t value, size_t n) {
    (void)e, (void)n;
    if (value != (1ull << 63 | notified)) must(HR_ERR_PROTOCOL, "a notification out of order");
    notified++;
}
static const struct hr_sink sink = {on_recv, on_done, on_notify, on_state, NULL, NULL};

static int before(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void by_message(uint64_t i) {
    uint64_t word = i;
    if (me == 0) send_message(&word, sizeof word);
    wait_for(&received, i + 2); /* one was the descriptor */
    if (me == 1) send_message(&word, sizeof word);
}

static struct hr_rmem there;
static uint64_t *memory; /* what the peer writes to, and what is written */

static void write_word(uint64_t i) {
    struct hr_rma rma = {
        .local = memory + 1, .len = BYTES, .remote = &there, .with_notify = 1, .value = 1ull << 63 | i};
    hr_status status;
    memory[1] = i;
    while ((status = ops->post_write(ep, &rma)) == HR_AGAIN) ops->progress(domain, 16, ep);
    must(status, "post_write");
}

static void by_write(uint64_t i) {
    if (me == 0) write_word(i);
    wait_for(&notified, i + 1);
    if (memory[0] != i) must(HR_ERR_PROTOCOL, "a notification before its bytes");
    if (me == 1) write_word(i);
}

static void measure(const char *name, void (*turn)(uint64_t), int n) {
    int64_t *took = calloc((size_t)n, sizeof *took);
    if (!took) must(HR_ERR_NOMEM, name);
    for (int i = 0; i < n; i++) {
        int64_t start = hr_now();
        turn((uint64_t)i);
        took[i] = hr_now() - start;
    }
    qsort(took, (size_t)n, sizeof *took, before);
    if (me == 0) printf("%s %.2f\n", name, (double)took[n / 2] / 2e3);
    free(took);
}

static void run(const char *device, int n) {
    struct hr_mem mem;
    struct hr_desc mine;
    two_connect(&hr_provider_verbs, device, &sink);
    memory = hr_arena_alloc(4096, HR_ARENA_WRITABLE_BY_PEERS);
    if (!memory) must(HR_ERR_NOMEM, "hr_arena_alloc");
    must(ops->mem_register(domain, memory, BYTES, HR_ACCESS_REMOTE_WRITE, &mem), "mem_register");
    must(ops->mem_export(ep, &mem, memory, BYTES, &mine), "mem_export");
    send_message(&mine, sizeof mine);
    wait_for(&received, 1);
    must(ops->mem_import(ep, &desc, &there), "mem_import");
    measure("message", by_message, n);
    measure("write", by_write, n);
    while (ops->ep_unsent(ep)) ops->progress(domain, 16, ep);
    atomic_fetch_add(&meeting->have[me], 1);
    while (atomic_load(&meeting->have[!me]) < 2) sched_yield(); /* neither leaves before the other has all */
    ops->mem_deregister(domain, &mem);
    ops->ep_destroy(ep);
    ops->domain_close(domain);
    hr_arena_free(memory);
}

int main(int argc, char **argv) {
    const char *device = argc > 1 ? argv[1] : "sim";
    int n = argc > 2 ? atoi(argv[2]) : 1000;
    if (argc > 3 || n < 1 || n > MOST) {
        fprintf(stderr, "usage: %s [DEVICE [ROUND-TRIPS]]    1 to %d of them\n", argv[0], MOST);
        return 2;
    }
    pid_t child = two_start();
    run(device, n);
    if (child) two_end(child);
    return 0;
}
