/* kernels.h - the reduction kernels, once for all instruction sets: included by each <isa>.c after its primitives.
 *
 * The text is GCC's vector extension, so a + b is one instruction on any machine. The includer defines W, the bytes of
 * a vector, TABLE, ISA, and where the machine has better than what is here
 *     STREAM(p, v)                 store past the cache; p is aligned to W
 *     LOAD_PART(p, n), STORE_PART(p, v, n)
 *                                  the first n <= W bytes of a vector; no other byte may be touched
 *     LOAD_WORDS(p, n)             LOAD_PART where n is a multiple of 4
 *     FLOAT16_WIDEN(v, lo, hi)     float16 to two vectors of float, in any order
 *     FLOAT16_LOAD(p, lo, hi)      the same from memory
 *     FLOAT16_NARROW(lo, hi)       and back; a NaN is the one NaN below
 *     BFLOAT16_NARROW(lo, hi)      two vectors of float, those of the even elements and of the odd, to bfloat16
 *     UNORDERED_F32(a, b), _F64    nonzero if a lane of a or b is NaN
 *
 * One kernel walks a tile of a few vectors through all its sources, then the next tile; the accumulators stay in
 * registers. Where memory is far, the next tile may lie in the next of several pages (ways.c). Most of the
 * work has nothing to be streamed, claimed or kept for later: it goes in rows, tiles of twice as much (16-bit types in
 * avx2: of as much) in loops of few instructions.
 *
 *     src[0] |--tile--|........        acc = src[0]            (widened: bfloat16, float16 -> two vectors of float)
 *     src[1] |--tile--|........        acc = acc op src[1]
 *       ...                            ...
 *     dst    |--tile--|........        dst = acc               (scaled, its NaNs made one, narrowed)
 *
 * Results are the same bits on every machine, for every alignment, length and place in the array:
 *   - elements never meet, so there is nothing to reassociate; the ragged ends go through the same instructions as a
 *     vector with idle lanes; no product feeds a sum, so a fused multiply-add cannot arise;
 *   - which operand's NaN survives a + b differs between machines and compilers, so each result that is NaN is
 *     made the quiet positive NaN without payload;
 *   - -0.0 is less than +0.0 in min and max (IEEE 754-2019 minimum and maximum), so they do not depend on the order.
 *
 * run() is inlined with a constant operator and type into each kernel; its switches cost nothing.
 */
#include <string.h>

#include "table.h"

/* Loads and prefetches stay in the order in which they are written, upwards in memory, which is what processors expect:
 * in the compiler's, sums of what is far away take a tenth longer. */
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC optimize("no-schedule-insns2")
#endif

#include "lanes.h"

#define TILE 4
#define ROW 8
#define LINE 64
#define AHEAD 1024 /* bytes */
#define FAR_AHEAD 2048
#define SUM_AHEAD 1024  /* of sums in place, from memory */
#define HALF_AHEAD 4096 /* of 16-bit floating types, whose lines are in work for longer */
#define PAGE 4096

INLINE struct acc resume(const hr_reduce_job *job, hr_dtype t, size_t slot) {
    const char *p = (const char *)job->resume + slot * 2 * W;
    struct acc a = {load(p), {0}};
    if (is_half(t)) a.hi = load(p + W);
    return a;
}

INLINE void suspend(const hr_reduce_job *job, hr_dtype t, size_t slot, struct acc a) {
    char *p = (char *)job->suspend + slot * 2 * W;
    store(p, a.lo);
    if (is_half(t)) store(p + W, a.hi);
}

/* Up to one vector: the ragged ends, and what is less than a tile. */
INLINE void do_part(const hr_reduce_job *job, hr_redop op, hr_dtype t, size_t at, size_t n, size_t slot) {
    int s = 0;
    struct acc a = job->resume ? resume(job, t, slot) : widen(t, LOAD_PART((const char *)job->src[s++] + at, n));
    for (; s < job->nsrc; s++) a = combine(op, t, a, widen(t, LOAD_PART((const char *)job->src[s] + at, n)));
    if (job->suspend) {
        suspend(job, t, slot, a);
    } else {
        const V v = narrow(t, one_nan(t, scaled(op, t, a, job->scale)));
        STORE_PART((char *)job->dst + at, v, n);
        for (int k = 0; k < job->nalso; k++) STORE_PART((char *)job->also[k] + at, v, n);
    }
}

/* Takes lines away from other cores' caches, so that stores to them need not wait for that one after the other. Beyond
 * the end of the run it does no harm. */
INLINE void claim(const char *to, size_t n) {
    for (size_t line = 0; line < n; line += LINE) __builtin_prefetch(to + line, 1);
}

/* Asks for lines that are read soon and once. Beyond the end it does no harm. */
INLINE void fetch_ahead(const hr_reduce_job *job, size_t at) {
    for (int s = 0; s < job->nsrc; s++)
        for (size_t line = 0; line < TILE * W; line += LINE)
            __builtin_prefetch((const char *)job->src[s] + at + FAR_AHEAD + line, 0, 0);
}

/* Four vectors by name, not in an array: compilers keep names in registers. */
INLINE void do_tile(const hr_reduce_job *job, hr_redop op, hr_dtype t, size_t at, size_t slot, int nontemporal) {
    struct acc a, b, c, d;
    int s = 0;
    if (job->resume) {
        a = resume(job, t, slot);
        b = resume(job, t, slot + 1);
        c = resume(job, t, slot + 2);
        d = resume(job, t, slot + 3);
    } else {
        const char *p = (const char *)job->src[s++] + at;
        a = fetch(t, p);
        b = fetch(t, p + W);
        c = fetch(t, p + 2 * W);
        d = fetch(t, p + 3 * W);
    }
    for (; s < job->nsrc; s++) {
        const char *p = (const char *)job->src[s] + at;
        a = combine(op, t, a, fetch(t, p));
        b = combine(op, t, b, fetch(t, p + W));
        c = combine(op, t, c, fetch(t, p + 2 * W));
        d = combine(op, t, d, fetch(t, p + 3 * W));
    }
    if (job->suspend) {
        suspend(job, t, slot, a);
        suspend(job, t, slot + 1, b);
        suspend(job, t, slot + 2, c);
        suspend(job, t, slot + 3, d);
        return;
    }
    a = scaled(op, t, a, job->scale);
    b = scaled(op, t, b, job->scale);
    c = scaled(op, t, c, job->scale);
    d = scaled(op, t, d, job->scale);
    if (__builtin_expect(any_nan(t, a, b) | any_nan(t, c, d), 0)) {
        a = one_nan(t, a);
        b = one_nan(t, b);
        c = one_nan(t, c);
        d = one_nan(t, d);
    }
    char *to = (char *)job->dst + at;
    const V va = narrow(t, a), vb = narrow(t, b), vc = narrow(t, c), vd = narrow(t, d);
    if (nontemporal) {
        STREAM(to, va);
        STREAM(to + W, vb);
        STREAM(to + 2 * W, vc);
        STREAM(to + 3 * W, vd);
    } else {
        store(to, va);
        store(to + W, vb);
        store(to + 2 * W, vc);
        store(to + 3 * W, vd);
    }
    for (int k = 0; k < job->nalso; k++) {
        to = (char *)job->also[k] + at;
        store(to, va);
        store(to + W, vb);
        store(to + 2 * W, vc);
        store(to + 3 * W, vd);
    }
}

#if W > 8 /* compilers take long over what they then leave out */
INLINE void put_row(const hr_reduce_job *job, hr_dtype t, size_t at, char *const *also, int nalso, const struct acc *a,
                    int n) {
    V v[ROW];
#    pragma GCC unroll 8
    for (int k = 0; k < n; k++) store((char *)job->dst + at + k * W, v[k] = narrow(t, a[k]));
    for (int i = 0; i < nalso; i++) {
#    pragma GCC unroll 8
        for (int k = 0; k < n; k++) store(also[i] + at + k * W, v[k]);
    }
}

/* A row of n vectors of all sources, into all places. `far`: what comes later is asked for in between, as loads that
 * are needed now go first. */
INLINE void do_row(const hr_reduce_job *job, hr_redop op, hr_dtype t, size_t at, const char *const *src, int nsrc,
                   char *const *also, int nalso, int n, int far) {
    struct acc a[ROW], mended[ROW];
    int nan = 0;
#    pragma GCC unroll 8
    for (int k = 0; k < n; k++) a[k] = fetch(t, src[0] + at + k * W);
    for (int s = 1; s < nsrc; s++) {
        const char *p = src[s] + at;
#    pragma GCC unroll 8
        for (int k = 0; k < n; k++) a[k] = combine(op, t, a[k], fetch(t, p + k * W));
    }
#    pragma GCC unroll 8
    for (int k = 0; k < n; k++) a[k] = scaled(op, t, a[k], job->scale);
#    pragma GCC unroll 8
    for (int k = 0; k < n; k += 2) nan |= any_nan(t, a[k], a[k + 1]);
    if (far) {
        const size_t ahead = is_half(t) ? HALF_AHEAD : SUM_AHEAD;
        __asm__ volatile("" ::: "memory");
#    pragma GCC unroll 2
        for (int s = 0; s < nsrc; s++)
#    pragma GCC unroll 8
            for (int line = 0; line < n * W; line += LINE) __builtin_prefetch(src[s] + at + ahead + line, 0, 2);
    }
    if (__builtin_expect(nan, 0)) { /* its own way to the end, or compilers move all results, changed or not, first */
#    pragma GCC unroll 8
        for (int k = 0; k < n; k++) mended[k] = one_nan(t, a[k]);
        put_row(job, t, at, also, nalso, mended, n);
        __asm__ volatile("" ::: "memory");
        return;
    }
    put_row(job, t, at, also, nalso, a, n);
}

/* One row after the other, as many as there are; returns where they end. */
INLINE size_t do_rows(const hr_reduce_job *job, hr_redop op, hr_dtype t, size_t at, const char *const *src, int nsrc,
                      char *const *also, int nalso, int far) {
    const int n = is_half(t) && W == 32 ? TILE : ROW; /* avx2: more would go to the stack */
    for (const size_t last = job->end - n * W; at <= last; at += n * W)
        do_row(job, op, t, at, src, nsrc, also, nalso, n, far);
    return at;
}

/* The same in several pages side by side. */
INLINE size_t do_pages(const hr_reduce_job *job, hr_redop op, hr_dtype t, size_t at, const char *const *src,
                       char *const *also, int nalso) {
    const size_t pages = (size_t)job->pages;
    for (; job->end - at >= pages * PAGE; at += (pages - 1) * PAGE)
        for (const size_t last = at + PAGE; at < last; at += TILE * W)
            for (size_t page = 0; page < pages; page++)
                do_row(job, op, t, at + page * PAGE, src, 2, also, nalso, TILE, 0);
    return at;
}

/* What is done most, so it has loops of its own. */
INLINE int is_sum(hr_redop op) { return op == HR_SUM || op == HR_AVG; }

/* Returns where it ends, before what is less than a row. What counts are the few instructions between one line and the
 * next, so sums of two sources, into one place or two, have all addresses in registers. Far away, what a core can have
 * on its way at a time is the bound. */
INLINE size_t in_rows(const hr_reduce_job *job, hr_redop op, hr_dtype t, size_t at) {
    const char *const *src = (const char *const *)job->src, *const two[2] = {src[0], src[job->nsrc > 1]};
    char *const *also = (char *const *)job->also, *const one[1] = {job->nalso ? also[0] : NULL};
    if (is_sum(op) && job->store == HR_STORE_UNREAD) {
        if (job->pages > 1 && !job->nalso) at = do_pages(job, op, t, at, two, one, 0);
        if (job->pages > 1 && job->nalso) at = do_pages(job, op, t, at, two, one, 1);
        if (job->end - at < ROW * W) return at;
        if (job->nalso) return do_rows(job, op, t, at, two, 2, one, 1, 1);
        if (is_half(t) && job->pages == 1) return do_rows(job, op, t, at, two, 2, one, 0, 1);
    }
    if (is_sum(op) && job->nsrc == 2) {
        if (job->nalso == 0) return do_rows(job, op, t, at, two, 2, one, 0, 0);
        if (job->nalso == 1) return do_rows(job, op, t, at, two, 2, one, 1, 0);
    }
    return do_rows(job, op, t, at, src, job->nsrc, also, job->nalso, 0);
}

/* Whether there is nothing else to be done in between. Accumulators of 16-bit types take two registers each. */
INLINE int goes_in_rows(const hr_reduce_job *job, hr_redop op, hr_dtype t) {
    if (job->resume || job->suspend || job->store == HR_STORE_SHARED || (is_half(t) && job->nsrc > 2)) return 0;
    return job->store != HR_STORE_UNREAD || (is_sum(op) && job->in_place && job->nsrc == 2 && job->nalso <= 1);
}
#else
INLINE int goes_in_rows(const hr_reduce_job *job, hr_redop op, hr_dtype t) { return (void)job, (void)op, (void)t, 0; }
INLINE size_t in_rows(const hr_reduce_job *job, hr_redop op, hr_dtype t, size_t at) {
    (void)job, (void)op, (void)t;
    return at;
}
#endif

INLINE void run(const hr_reduce_job *caller, hr_redop op, hr_dtype t) {
    const hr_reduce_job own = *caller, *job = &own; /* a store to dst cannot change a private copy */
    const size_t skew = -((uintptr_t)job->dst + job->begin) % W;
    size_t head = job->end - job->begin > 2 * TILE * W && skew % element_size(t) == 0 ? skew : 0;
    const int far = job->store == HR_STORE_UNREAD, shared = job->store == HR_STORE_SHARED;
    const int stream = far && !job->in_place && head == skew, waits = job->resume || job->suspend;
    const int by_rows = goes_in_rows(job, op, t);
    size_t at = job->begin, slot = 0;
    if (shared) claim((const char *)job->dst + at, AHEAD);
    while (at < job->end) {
        const size_t left = job->end - at;
        if (head == 0 && left >= ROW * W && by_rows) {
            at = in_rows(job, op, t, at);
        } else if (head == 0 && left >= TILE * W) {
            const int paged = far && !waits && left >= (size_t)job->pages * PAGE;
            const size_t pages = paged ? (size_t)job->pages : 1, rows = (paged ? PAGE : left) / (TILE * W);
            for (size_t row = 0; row < rows; row++, at += TILE * W) {
                if (shared) claim((const char *)job->dst + at + AHEAD, TILE * W);
                if (far && pages == 1) fetch_ahead(job, at);
                for (size_t page = 0; page < pages; page++, slot += TILE)
                    do_tile(job, op, t, at + page * PAGE, slot, stream);
            }
            at += (pages - 1) * PAGE;
        } else {
            const size_t n = head ? head : left < W ? left : W;
            do_part(job, op, t, at, n, slot++);
            at += n;
            head = 0;
        }
    }
}

#define KERNEL(op, t) \
    static void op##_##t(const hr_reduce_job *job) { run(job, HR_##op, HR_##t); }
#define KERNELS_FLOAT(op) KERNEL(op, FLOAT16) KERNEL(op, BFLOAT16) KERNEL(op, FLOAT32) KERNEL(op, FLOAT64)
#define KERNELS_UINT(op) KERNEL(op, UINT8) KERNEL(op, UINT16) KERNEL(op, UINT32) KERNEL(op, UINT64)
#define KERNELS_INT(op) KERNEL(op, INT8) KERNEL(op, INT16) KERNEL(op, INT32) KERNEL(op, INT64)

KERNELS_FLOAT(SUM)
KERNELS_FLOAT(PROD)
KERNELS_FLOAT(MIN)
KERNELS_FLOAT(MAX)
KERNELS_FLOAT(AVG)
KERNELS_UINT(SUM)
KERNELS_UINT(PROD)
KERNELS_UINT(MIN)
KERNELS_UINT(MAX)
KERNELS_INT(MIN)
KERNELS_INT(MAX)
KERNEL(BAND, UINT64)
KERNEL(BOR, UINT64)
KERNEL(BXOR, UINT64)

#define OF_ALL(op, kind)                                                                                         \
    [HR_INT8] = op##_##kind##8, [HR_INT16] = op##_##kind##16, [HR_INT32] = op##_##kind##32,                      \
    [HR_INT64] = op##_##kind##64, [HR_UINT8] = op##_UINT8, [HR_UINT16] = op##_UINT16, [HR_UINT32] = op##_UINT32, \
    [HR_UINT64] = op##_UINT64, OF_FLOATS(op)
#define OF_FLOATS(op) \
    [HR_FLOAT16] = op##_FLOAT16, [HR_BFLOAT16] = op##_BFLOAT16, [HR_FLOAT32] = op##_FLOAT32, [HR_FLOAT64] = op##_FLOAT64

const hr_reduce_table TABLE = {
    .name = ISA,
    .kernel =
        {
            [HR_SUM] = {OF_ALL(SUM, UINT)},
            [HR_PROD] = {OF_ALL(PROD, UINT)},
            [HR_MIN] = {OF_ALL(MIN, INT)},
            [HR_MAX] = {OF_ALL(MAX, INT)},
            [HR_AVG] = {OF_FLOATS(AVG)},
            [HR_BAND] = {[HR_INT8... HR_UINT64] = BAND_UINT64},
            [HR_BOR] = {[HR_INT8... HR_UINT64] = BOR_UINT64},
            [HR_BXOR] = {[HR_INT8... HR_UINT64] = BXOR_UINT64},
        },
};
