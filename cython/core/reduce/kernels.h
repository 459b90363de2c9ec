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
 *     UNORDERED_F32(a, b), _F64    nonzero if a lane of a or b is NaN
 *
 * One kernel walks a tile of a few vectors through all its sources, then the next tile; the accumulators stay in
 * registers. Where memory is far, the next tile may lie in the next of four pages (`pages` in reduce.c).
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

#define INLINE static inline __attribute__((always_inline))
#define TILE 4
#define PAIR 8 /* vectors that are loaded, then stored, where two sources are far away */
#define LINE 64
#define AHEAD 1024 /* bytes */
#define FAR_AHEAD 2048
#define SUM_AHEAD 1024  /* of sums in place, from memory */
#define HALF_AHEAD 4096 /* of 16-bit floating types, whose lines are in work for longer */
#define PAGE 4096

typedef uint64_t V __attribute__((vector_size(W)));
typedef uint8_t u8 __attribute__((vector_size(W)));
typedef uint16_t u16 __attribute__((vector_size(W)));
typedef uint32_t u32 __attribute__((vector_size(W)));
typedef uint64_t u64 __attribute__((vector_size(W)));
typedef int8_t i8 __attribute__((vector_size(W)));
typedef int16_t i16 __attribute__((vector_size(W)));
typedef int32_t i32 __attribute__((vector_size(W)));
typedef int64_t i64 __attribute__((vector_size(W)));
typedef float f32 __attribute__((vector_size(W)));
typedef double f64 __attribute__((vector_size(W)));

/* A vector's worth of elements as accumulators: 16-bit floating types take both vectors, others one. */
struct acc {
    V lo, hi;
};
_Static_assert(W <= HR_REDUCE_MAX_VECTOR, "room for the accumulators of the ragged ends");

INLINE V load(const char *p) {
    V v;
    memcpy(&v, p, W);
    return v;
}

INLINE void store(char *p, V v) { memcpy(p, &v, W); }

#ifndef STREAM
#    define STREAM(p, v) store(p, v)
#endif

#ifndef UNORDERED_F32
INLINE int any_lane(V m) {
    uint64_t any = m[0];
    for (size_t i = 1; i < W / 8; i++) any |= m[i];
    return any != 0;
}
#    define UNORDERED_F32(a, b) any_lane((V)(((f32)(a) != (f32)(a)) | ((f32)(b) != (f32)(b))))
#    define UNORDERED_F64(a, b) any_lane((V)(((f64)(a) != (f64)(a)) | ((f64)(b) != (f64)(b))))
#endif

#ifndef LOAD_PART
/* Steps of constant size: a memcpy of variable size costs more than the arithmetic of a short array. A call, or a
 * quarter of all kernels would be this. */
static __attribute__((noinline)) void copy_part(char *to, const char *from, size_t n) {
#    define STEP(size)              \
        if (n & (size)) {           \
            memcpy(to, from, size); \
            to += (size);           \
            from += (size);         \
        }
    STEP(W)
    STEP(W / 2)
    STEP(W / 4)
    STEP(W / 8)
    STEP(W / 16)
#    if W > 16
    STEP(W / 32)
#    endif
#    undef STEP
}

INLINE V load_part(const char *p, size_t n) {
    V v = {0};
    if (n == W) return load(p);
#    ifdef LOAD_WORDS
    if (n % 4 == 0) return LOAD_WORDS(p, n);
#    endif
    copy_part((char *)&v, p, n);
    return v;
}

INLINE void store_part(char *p, V v, size_t n) {
    if (n == W) {
        store(p, v);
    } else {
        copy_part(p, (const char *)&v, n);
    }
}
#    define LOAD_PART(p, n) load_part(p, n)
#    define STORE_PART(p, v, n) store_part(p, v, n)
#endif

/* m has all bits of a lane set, or none. */
INLINE V either(V m, V yes, V no) { return (yes & m) | (no & ~m); }

#ifndef FLOAT16_WIDEN
/* float16 by integer arithmetic, two halves of a 32-bit lane apart. h is in the low 16 bits of each lane. Subnormal
 * halves are made by a subtraction of normal floats, which is exact and does not depend on a flush-to-zero mode. */
INLINE V float16_widen(u32 h) {
    const u32 magnitude = (h & 0x7fff) << 13, exponent = magnitude & (0x7c00u << 13);
    const u32 normal = magnitude + (112u << 23), special = magnitude + (224u << 23);
    const u32 one = (u32){0} + (113u << 23);
    const V subnormal = (V)((f32)(magnitude + one) - (f32)one);
    const V finite = either((V)(exponent == 0), subnormal, (V)normal);
    return either((V)(exponent == 0x7c00u << 13), (V)special, finite) | (V)((h & 0x8000) << 16);
}

INLINE u32 float16_narrow(V v) {
    const u32 sign = (u32)v & 0x80000000u, x = (u32)v ^ sign;
    const u32 magic = (u32){0} + (126u << 23); /* 0.5: its last bit is the last bit of a subnormal half */
    const u32 normal = (x - (112u << 23) + 0xfff + ((x >> 13) & 1)) >> 13;
    const V subnormal = (V)((f32)x + (f32)magic);
    V h = either((V)((i32)x < (113 << 23)), (V)((u32)subnormal - magic), (V)normal);
    h = either((V)((i32)x >= (143 << 23)), (V)((u32){0} + 0x7c00), h);
    h = either((V)((i32)x > (255 << 23)), (V)((u32){0} + 0x7e00), h);
    return (u32)h | (sign >> 16);
}
#    define FLOAT16_WIDEN(v, lo, hi) (lo = float16_widen((u32)(v) & 0xffff), hi = float16_widen((u32)(v) >> 16))
#    define FLOAT16_NARROW(lo, hi) ((V)(float16_narrow(lo) | (float16_narrow(hi) << 16)))
#endif

/* Half as wide as their accumulators. */
INLINE int is_half(hr_dtype t) { return t == HR_FLOAT16 || t == HR_BFLOAT16; }

INLINE struct acc widen(hr_dtype t, V v) {
    struct acc a = {v, {0}};
    if (t == HR_FLOAT16) {
        FLOAT16_WIDEN(v, a.lo, a.hi);
    } else if (t == HR_BFLOAT16) { /* even elements and odd ones: no lane has to move */
        a.lo = (V)((u32)v << 16);
        a.hi = (V)((u32)v & 0xffff0000u);
    }
    return a;
}

INLINE struct acc fetch(hr_dtype t, const char *p) {
#ifdef FLOAT16_LOAD
    struct acc a;
    if (t == HR_FLOAT16) {
        FLOAT16_LOAD(p, a.lo, a.hi);
        return a;
    }
#endif
    return widen(t, load(p));
}

/* To nearest even, in 16-bit lanes: up where what is dropped is more than half, or is half and what is kept is odd. A
 * carry out of the mantissa makes the next power of two, or infinity, as it should; NaN comes here without low bits. */
INLINE V bfloat16_narrow(V lo, V hi) {
    const u32 kept = ((u32)lo >> 16) | ((u32)hi & 0xffff0000u);
    const u32 dropped = ((u32)lo & 0xffffu) | ((u32)hi << 16);
    const u16 up = (u16)((u16)(dropped | (kept & 0x00010001u)) > 0x8000);
    return (V)((u16)kept - up);
}

INLINE V narrow(hr_dtype t, struct acc a) {
    if (t == HR_FLOAT16) return FLOAT16_NARROW(a.lo, a.hi);
    if (t == HR_BFLOAT16) return bfloat16_narrow(a.lo, a.hi);
    return a.lo;
}

#define INTEGER_OP(S, U)                                \
    switch (op) {                                       \
    case HR_SUM: return (V)((U)a + (U)b);               \
    case HR_PROD: return (V)((U)a * (U)b);              \
    case HR_MIN: return either((V)((S)a < (S)b), a, b); \
    case HR_MAX: return either((V)((S)a > (S)b), a, b); \
    case HR_BAND: return a & b;                         \
    case HR_BOR: return a | b;                          \
    default: return a ^ b;                              \
    }
/* min keeps the first operand's minus sign, max its plus sign: right where both are ordered, which also settles
 * zeros. (a < b) is false for NaN, so a NaN in b is taken; a NaN in a is put in afterwards. */
#define FLOAT_OP(F, U, SIGN)                                                                        \
    switch (op) {                                                                                   \
    case HR_PROD: return (V)((F)a * (F)b);                                                          \
    case HR_MIN: return either((V)((F)a < (F)b), a, b) | (V)((U)a & (SIGN)) | (V)((F)a != (F)a);    \
    case HR_MAX: return (either((V)((F)a > (F)b), a, b) & (V)((U)a | ~(SIGN))) | (V)((F)a != (F)a); \
    default: return (V)((F)a + (F)b);                                                               \
    }

INLINE V lanes(hr_redop op, hr_dtype t, V a, V b) {
    switch (t) {
    case HR_INT8: INTEGER_OP(i8, u8)
    case HR_INT16: INTEGER_OP(i16, u16)
    case HR_INT32: INTEGER_OP(i32, u32)
    case HR_INT64: INTEGER_OP(i64, u64)
    case HR_UINT8: INTEGER_OP(u8, u8)
    case HR_UINT16: INTEGER_OP(u16, u16)
    case HR_UINT32: INTEGER_OP(u32, u32)
    case HR_UINT64: INTEGER_OP(u64, u64)
    case HR_FLOAT64: FLOAT_OP(f64, u64, 1ull << 63)
    default: FLOAT_OP(f32, u32, 1u << 31)
    }
}

INLINE struct acc combine(hr_redop op, hr_dtype t, struct acc a, struct acc b) {
    a.lo = lanes(op, t, a.lo, b.lo);
    if (is_half(t)) a.hi = lanes(op, t, a.hi, b.hi);
    return a;
}

INLINE V scale_lanes(hr_dtype t, V v, double scale) {
    return t == HR_FLOAT64 ? (V)((f64)v * scale) : (V)((f32)v * (float)scale);
}

INLINE struct acc scaled(hr_redop op, hr_dtype t, struct acc a, double scale) {
    if (op == HR_AVG) a.lo = scale_lanes(t, a.lo, scale);
    if (op == HR_AVG && is_half(t)) a.hi = scale_lanes(t, a.hi, scale);
    return a;
}

INLINE V one_nan_lanes(hr_dtype t, V v) {
    if (t == HR_FLOAT64) return either((V)((f64)v != (f64)v), (V)((u64){0} + (0x7ff8ull << 48)), v);
    return either((V)((f32)v != (f32)v), (V)((u32){0} + (0x7fc0u << 16)), v);
}

INLINE struct acc one_nan(hr_dtype t, struct acc a) {
    if (t >= HR_FLOAT16) a.lo = one_nan_lanes(t, a.lo);
    if (is_half(t)) a.hi = one_nan_lanes(t, a.hi);
    return a;
}

/* Whether a lane of a or b is NaN: dearer to mend than to find. */
INLINE int any_nan(hr_dtype t, struct acc a, struct acc b) {
    if (t < HR_FLOAT16) return 0;
    if (t == HR_FLOAT64) return UNORDERED_F64(a.lo, b.lo);
    return UNORDERED_F32(a.lo, b.lo) | (is_half(t) ? UNORDERED_F32(a.hi, b.hi) : 0);
}

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

/* Eight vectors of two sources, into two places. What comes later is asked for in between:
 * loads that are needed now go first. */
INLINE void do_pair(const char *x, const char *y, char *to, char *too, hr_redop op, hr_dtype t, double scale) {
    const size_t ahead = is_half(t) ? HALF_AHEAD : SUM_AHEAD;
    struct acc a[PAIR];
    int nan = 0;
#pragma GCC unroll 8
    for (int k = 0; k < PAIR; k++) a[k] = fetch(t, x + k * W);
#pragma GCC unroll 8
    for (int k = 0; k < PAIR; k++) a[k] = scaled(op, t, combine(op, t, a[k], fetch(t, y + k * W)), scale);
#pragma GCC unroll 8
    for (int k = 0; k < PAIR; k += 2) nan |= any_nan(t, a[k], a[k + 1]);
    __asm__ volatile("" ::: "memory");
#pragma GCC unroll 8
    for (size_t line = 0; line < PAIR * W; line += LINE) __builtin_prefetch(x + ahead + line, 0, 2);
#pragma GCC unroll 8
    for (size_t line = 0; line < PAIR * W; line += LINE) __builtin_prefetch(y + ahead + line, 0, 2);
    if (__builtin_expect(nan, 0)) {
#pragma GCC unroll 8
        for (int k = 0; k < PAIR; k++) a[k] = one_nan(t, a[k]);
    }
#pragma GCC unroll 8
    for (int k = 0; k < PAIR; k++) store(to + k * W, a[k].lo = narrow(t, a[k]));
#pragma GCC unroll 8
    for (int k = 0; k < PAIR; k++) store(too + k * W, a[k].lo);
}

/* Two sources that are far away, the result in the place of both: what a core can have on its way at a time is the
 * bound, so few instructions are to stand between one line and the next. Returns where it ends. */
INLINE size_t pair(const hr_reduce_job *job, hr_redop op, hr_dtype t, size_t at) {
    const char *x = job->src[0], *y = job->src[1];
    char *to = job->dst, *too = job->also[0];
    const double scale = job->scale;
    for (const size_t last = job->end - PAIR * W; at <= last; at += PAIR * W)
        do_pair(x + at, y + at, to + at, too + at, op, t, scale);
    return at;
}

INLINE size_t element_size(hr_dtype t) {
    if (t == HR_INT8 || t == HR_UINT8) return 1;
    if (t == HR_INT16 || t == HR_UINT16 || is_half(t)) return 2;
    return t == HR_INT64 || t == HR_UINT64 || t == HR_FLOAT64 ? 8 : 4;
}

INLINE void run(const hr_reduce_job *caller, hr_redop op, hr_dtype t) {
    const hr_reduce_job own = *caller, *job = &own; /* a store to dst cannot change a private copy */
    const size_t skew = -((uintptr_t)job->dst + job->begin) % W;
    size_t head = job->end - job->begin > 2 * TILE * W && skew % element_size(t) == 0 ? skew : 0;
    const int far = job->store == HR_STORE_UNREAD, shared = job->store == HR_STORE_SHARED;
    const int stream = far && !job->in_place && head == skew, waits = job->resume || job->suspend;
    size_t at = job->begin, slot = 0;
    if (shared) claim((const char *)job->dst + at, AHEAD);
    while (at < job->end) {
        const size_t left = job->end - at;
        if (head == 0 && left >= PAIR * W && far && job->in_place && job->nsrc == 2 && job->nalso == 1 && !waits &&
            job->pages > 1) {
            at = pair(job, op, t, at);
        } else if (head == 0 && left >= TILE * W) {
            const int paged = far && !waits && left >= HR_REDUCE_PAGES * PAGE;
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

#define ROW(op, kind)                                                                                            \
    [HR_INT8] = op##_##kind##8, [HR_INT16] = op##_##kind##16, [HR_INT32] = op##_##kind##32,                      \
    [HR_INT64] = op##_##kind##64, [HR_UINT8] = op##_UINT8, [HR_UINT16] = op##_UINT16, [HR_UINT32] = op##_UINT32, \
    [HR_UINT64] = op##_UINT64, ROW_FLOAT(op)
#define ROW_FLOAT(op) \
    [HR_FLOAT16] = op##_FLOAT16, [HR_BFLOAT16] = op##_BFLOAT16, [HR_FLOAT32] = op##_FLOAT32, [HR_FLOAT64] = op##_FLOAT64

const hr_reduce_table TABLE = {
    .name = ISA,
    .kernel =
        {
            [HR_SUM] = {ROW(SUM, UINT)},
            [HR_PROD] = {ROW(PROD, UINT)},
            [HR_MIN] = {ROW(MIN, INT)},
            [HR_MAX] = {ROW(MAX, INT)},
            [HR_AVG] = {ROW_FLOAT(AVG)},
            [HR_BAND] = {[HR_INT8... HR_UINT64] = BAND_UINT64},
            [HR_BOR] = {[HR_INT8... HR_UINT64] = BOR_UINT64},
            [HR_BXOR] = {[HR_INT8... HR_UINT64] = BXOR_UINT64},
        },
};
