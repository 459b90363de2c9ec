/* lanes.h - vectors of elements: loaded, widened, combined, narrowed; part of kernels.h, whose head says what an
 * instruction set defines before this and what is promised of the results. */
#define INLINE static inline __attribute__((always_inline))

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

#ifndef BFLOAT16_NARROW
/* To nearest even, in 16-bit lanes: up where what is dropped is more than half, or is half and what is kept is odd. A
 * carry out of the mantissa makes the next power of two, or infinity, as it should; NaN comes here without low bits. */
INLINE V bfloat16_narrow(V lo, V hi) {
    const u32 kept = ((u32)lo >> 16) | ((u32)hi & 0xffff0000u);
    const u32 dropped = ((u32)lo & 0xffffu) | ((u32)hi << 16);
    const u16 up = (u16)((u16)(dropped | (kept & 0x00010001u)) > 0x8000);
    return (V)((u16)kept - up);
}
#    define BFLOAT16_NARROW(lo, hi) bfloat16_narrow(lo, hi)
#endif

INLINE V narrow(hr_dtype t, struct acc a) {
    if (t == HR_FLOAT16) return FLOAT16_NARROW(a.lo, a.hi);
    if (t == HR_BFLOAT16) return BFLOAT16_NARROW(a.lo, a.hi);
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

INLINE size_t element_size(hr_dtype t) {
    if (t == HR_INT8 || t == HR_UINT8) return 1;
    if (t == HR_INT16 || t == HR_UINT16 || is_half(t)) return 2;
    return t == HR_INT64 || t == HR_UINT64 || t == HR_FLOAT64 ? 8 : 4;
}
