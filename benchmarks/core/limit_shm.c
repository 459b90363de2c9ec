/* limit_shm.c - what shared memory allows: the least work that gives the result, in C, the ranks on cores of their own.
 *
 *     limit_shm pingpong|bandwidth|allreduce|alltoall BYTES RANKS SECONDS REPETITIONS [sleep]
 *
 * pingpong: up to a page the payload travels in a slot, behind the flag; more of it the receiver copies straight out of
 * the sender's memory. Both spin on the flag, or, with `sleep`, wait in futex. bandwidth: the receiver copies once,
 * straight out of the sender's memory. allreduce: buffers lie in shared memory; each rank adds up its share of all of
 * them and writes the sum to all, past the caches where they would not hold it. alltoall: each rank copies its block of
 * all of them, past the caches in the same way.
 */

#define _GNU_SOURCE
#include "limit.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#if defined(__SSE2__)
#    include <immintrin.h>
#endif

enum { SLOT = 4096 };                   /* bytes that travel with the flag */
enum { BLOCK = 1 << 11 };               /* elements that a rank adds up at a time, in its first cache */
enum { AHEAD = 1 << 9 };                /* elements that are asked for before they are copied */
#define OUT_OF_CACHE ((size_t)16 << 20) /* bytes of all buffers from which the sum is written past the caches */

struct slot {
    _Alignas(128) _Atomic uint32_t flag;
    uint32_t unused; /* the payload begins in the line of the flag */
    char payload[];
};

static struct slot *slots[2];
static char *buffers[MOST_RANKS], *mine, *theirs;
static uint32_t turn;
static int sleeping;

static float value(size_t i, int rank) { return (float)((i * 31 + (size_t)rank * 7) % 1021); }

/* ---- pingpong ---- */

static void post(struct slot *slot, uint32_t number) {
    if (nbytes <= SLOT) memcpy(slot->payload, mine, nbytes);
    atomic_store_explicit(&slot->flag, number, memory_order_release);
    if (sleeping) syscall(SYS_futex, &slot->flag, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void take(struct slot *slot, uint32_t number) {
    unsigned spins = 0;
    while (atomic_load_explicit(&slot->flag, memory_order_acquire) != number) {
        if (sleeping)
            syscall(SYS_futex, &slot->flag, FUTEX_WAIT, number - 1, NULL, NULL, 0);
        else if (ranks > cores)
            limit_turn(&spins);
    }
    memcpy(theirs, nbytes <= SLOT ? slot->payload : buffers[!me], nbytes);
}

static void pingpong(void) {
    turn++;
    if (me == 0) post(slots[0], turn);
    take(slots[!me], turn);
    if (me == 1) post(slots[1], turn);
}

/* ---- bandwidth ---- */

static void bandwidth(void) {
    if (me == 1) memcpy(mine, buffers[0], nbytes);
}

/* ---- allreduce ---- */

static void add(float *restrict sum, const float *restrict x, size_t n) {
    for (size_t i = 0; i < n; i++) sum[i] += x[i];
}

/* Writes a sum where it will not be read soon. Both are aligned to 64 bytes. */
static void write_past(float *restrict to, const float *restrict from, size_t n) {
    size_t i = 0;
#if defined(__AVX__)
    for (; i + 8 <= n; i += 8) _mm256_stream_ps(to + i, _mm256_load_ps(from + i));
#elif defined(__SSE2__)
    for (; i + 4 <= n; i += 4) _mm_stream_ps(to + i, _mm_load_ps(from + i));
#endif
    memcpy(to + i, from + i, (n - i) * sizeof *to);
}

static void allreduce(void) {
    size_t count = nbytes / sizeof(float), line = 64 / sizeof(float);
    size_t share = (count / (size_t)ranks + line - 1) / line * line;
    size_t from = share * (size_t)me, to = me == ranks - 1 ? count : from + share;
    int past = nbytes * (size_t)ranks > OUT_OF_CACHE;
    _Alignas(64) float sum[BLOCK];

    if (to > count) to = count;
    limit_barrier();
    for (size_t at = from; at < to; at += BLOCK) {
        size_t n = to - at < BLOCK ? to - at : BLOCK;
        memcpy(sum, (float *)buffers[0] + at, n * sizeof *sum);
        for (int r = 1; r < ranks; r++) add(sum, (float *)buffers[r] + at, n);
        for (int r = 0; r < ranks; r++) {
            if (past)
                write_past((float *)buffers[r] + at, sum, n);
            else
                memcpy((float *)buffers[r] + at, sum, n * sizeof *sum);
        }
    }
#if defined(__SSE2__)
    if (past) _mm_sfence();
#endif
    limit_barrier();
}

/* ---- alltoall ---- */

/* As write_past, of what lies in no cache either. */
static void copy_past(float *restrict to, const float *restrict from, size_t n) {
    size_t line = 64 / sizeof(float);
    for (size_t i = 0; i < n; i += line) {
        __builtin_prefetch(from + i + AHEAD);
        write_past(to + i, from + i, n - i < line ? n - i : line);
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

static void alltoall(void) {
    size_t block = nbytes / sizeof(float) / (size_t)ranks;

    limit_barrier();
    for (int i = 0; i < ranks; i++) {
        int r = (me + i) % ranks;
        float *to = (float *)theirs + (size_t)r * block, *from = (float *)buffers[r] + (size_t)me * block;
        if (nbytes * (size_t)ranks > OUT_OF_CACHE && block * sizeof *to % 64 == 0)
            copy_past(to, from, block);
        else
            memcpy(to, from, block * sizeof *to);
    }
    limit_barrier();
}

/* What element `i` of this rank's result is. */
static float expected(void (*call)(void), size_t i) {
    size_t block = nbytes / sizeof(float) / (size_t)ranks;
    float sum = 0;
    if (call == alltoall) return value((size_t)me * block + i % block, (int)(i / block));
    if (call != allreduce) return value(i, !me);
    for (int r = 0; r < ranks; r++) sum += value(i, r);
    return sum;
}

/* Once more on known values; wrong elements of this rank. */
static uint64_t check(void (*call)(void)) {
    size_t count = nbytes / sizeof(float);
    float *in = (float *)mine, *out = (float *)(theirs ? theirs : mine);
    int holds = call != bandwidth || me == 1;
    uint64_t wrong = 0;

    for (size_t i = 0; i < count; i++) in[i] = value(i, me);
    limit_barrier();
    call();
    limit_barrier();
    for (size_t i = 0; i < count && holds; i++) wrong += out[i] != expected(call, i);
    return wrong;
}

int main(int argc, char **argv) {
    void (*call)(void);
    unsigned long operations = 1;

    limit_begin(argc, argv);
    sleeping = !strcmp(option, "sleep");
    if (!strcmp(what, "pingpong") && ranks == 2) {
        for (int i = 0; i < 2; i++) slots[i] = limit_memory(sizeof(struct slot) + SLOT);
        call = pingpong, operations = 2;
    } else if (!strcmp(what, "bandwidth") && ranks == 2) {
        call = bandwidth;
    } else if (!strcmp(what, "allreduce")) {
        call = allreduce;
    } else if (!strcmp(what, "alltoall") && nbytes % (sizeof(float) * (size_t)ranks) == 0) {
        call = alltoall;
    } else {
        fprintf(stderr, "limit_shm: no case %s of %d ranks\n", what, ranks);
        return 2;
    }
    for (int r = 0; r < ranks; r++) buffers[r] = limit_memory(nbytes);
    limit_fork();
    mine = buffers[me];
    if (call == pingpong || call == alltoall) theirs = limit_memory(nbytes);
    limit_measure(call, operations);
    return limit_end(check(call));
}
