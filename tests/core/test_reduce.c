/* test_reduce.c - every reduction kernel of every instruction set here, bit for bit against plain element-wise code. */
#include <math.h>
#include <pthread.h>
#include <sys/mman.h>

#include "check.h"
#include "hr/reduce.h"
#include "watched.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static const char *const isas[] = {"avx512", "avx2", "neon", "scalar"};
#define FOR_EACH_ISA                               \
    for (size_t isa = 0; isa < COUNT(isas); isa++) \
        if (hr_reduce_force_isa(isas[isa]))

static uint64_t seed = 1;

ORACLE static uint64_t random64(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed * 0x2545f4914f6cdd1dull;
}

static size_t below(size_t n) { return random64() % n; }

/* --- the reference: one element at a time, 16-bit types through exact double arithmetic --- */

static int is_float(hr_dtype t) { return t >= HR_FLOAT16; }
static int is_signed(hr_dtype t) { return t <= HR_INT64; }

ORACLE static uint64_t get_bits(hr_dtype t, const void *p) {
    uint64_t bits = 0;
    for (size_t i = 0, size = hr_dtype_size(t); i < size; i++) bits |= (uint64_t)((const uint8_t *)p)[i] << (8 * i);
    return bits;
}

ORACLE static void put_bits(hr_dtype t, void *p, uint64_t bits) {
    for (size_t i = 0, size = hr_dtype_size(t); i < size; i++) ((uint8_t *)p)[i] = (uint8_t)(bits >> (8 * i));
}

/* exponent and mantissa widths: 5 and 10, 8 and 7 */
ORACLE static double half_value(unsigned bits, int mantissa_bits) {
    const int exponents = 1 << (15 - mantissa_bits), bias = exponents / 2 - 1;
    const int exponent = (bits >> mantissa_bits) & (exponents - 1);
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == exponents - 1) return mantissa ? NAN : sign * INFINITY;
    if (!exponent) return sign * ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

ORACLE static unsigned half_bits(double x, int mantissa_bits) {
    const int exponents = 1 << (15 - mantissa_bits), bias = exponents / 2 - 1;
    const unsigned sign = signbit(x) ? 0x8000 : 0, infinity = (unsigned)(exponents - 1) << mantissa_bits;
    int exponent;
    if (isnan(x)) return infinity | 1u << (mantissa_bits - 1);
    if (isinf(x)) return sign | infinity;
    frexp(x, &exponent); /* 2**(exponent - 1) <= |x| */
    if (x == 0 || exponent < 2 - bias) exponent = 2 - bias;
    /* In units of the last place: a subnormal's bits are this number itself, a carry is the next exponent. */
    const double units = nearbyint(ldexp(fabs(x), mantissa_bits + 1 - exponent));
    const unsigned bits = (unsigned)units + ((unsigned)(exponent - 2 + bias) << mantissa_bits);
    return sign | (bits < infinity ? bits : infinity);
}

ORACLE static float get_float(hr_dtype t, const void *p) {
    float x;
    if (t == HR_FLOAT16) return (float)half_value((unsigned)get_bits(t, p), 10);
    if (t == HR_BFLOAT16) return (float)half_value((unsigned)get_bits(t, p), 7);
    memcpy(&x, p, sizeof x);
    return x;
}

ORACLE static void put_float(hr_dtype t, void *p, float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x)) bits = 0x7fc00000;
    if (t == HR_FLOAT16) bits = half_bits(x, 10);
    if (t == HR_BFLOAT16) bits = half_bits(x, 7);
    put_bits(t, p, bits);
}

#define FLOAT_REFERENCE(T, name)                                   \
    static T name(hr_redop op, T a, T b) {                         \
        if (op == HR_SUM || op == HR_AVG) return a + b;            \
        if (op == HR_PROD) return a * b;                           \
        if (isnan(a) || isnan(b)) return NAN;                      \
        if (a == b) return (op == HR_MIN) == !!signbit(a) ? a : b; \
        return (op == HR_MIN) == (a < b) ? a : b;                  \
    }
FLOAT_REFERENCE(float, combine_float)
FLOAT_REFERENCE(double, combine_double)

ORACLE static uint64_t combine_integer(hr_redop op, hr_dtype t, uint64_t a, uint64_t b) {
    const int less = is_signed(t) ? (int64_t)a < (int64_t)b : a < b;
    switch (op) {
    case HR_PROD: return a * b;
    case HR_MIN: return less ? a : b;
    case HR_MAX: return less ? b : a;
    case HR_BAND: return a & b;
    case HR_BOR: return a | b;
    case HR_BXOR: return a ^ b;
    default: return a + b;
    }
}

ORACLE static uint64_t get_integer(hr_dtype t, const void *p) {
    const int unused = 64 - 8 * (int)hr_dtype_size(t);
    const uint64_t bits = get_bits(t, p) << unused;
    return is_signed(t) ? (uint64_t)((int64_t)bits >> unused) : bits >> unused;
}

ORACLE static void reference(hr_redop op, hr_dtype t, char *dst, const void *const *src, int nsrc, size_t count,
                             double scale) {
    const size_t size = hr_dtype_size(t);
    for (size_t at = 0; at < count * size; at += size) {
        const char *first = (const char *)src[0] + at;
        if (nsrc == 1 && (op != HR_AVG || scale == 1.0)) {
            memcpy(dst + at, first, size);
        } else if (!is_float(t)) {
            const int64_t n = op == HR_AVG ? llround(1.0 / scale) : 1;
            uint64_t a = get_integer(t, first);
            for (int s = 1; s < nsrc; s++) a = combine_integer(op, t, a, get_integer(t, (const char *)src[s] + at));
            put_bits(t, dst + at, a);
            a = get_integer(t, dst + at); /* wrapped */
            put_bits(t, dst + at, is_signed(t) ? (uint64_t)((int64_t)a / n) : a / (uint64_t)n);
        } else if (t == HR_FLOAT64) {
            double a, b;
            uint64_t bits;
            memcpy(&a, first, sizeof a);
            for (int s = 1; s < nsrc; s++) {
                memcpy(&b, (const char *)src[s] + at, sizeof b);
                a = combine_double(op, a, b);
            }
            if (op == HR_AVG) a *= scale;
            memcpy(&bits, &a, sizeof bits);
            put_bits(t, dst + at, isnan(a) ? 0x7ff8ull << 48 : bits);
        } else {
            float a = get_float(t, first);
            for (int s = 1; s < nsrc; s++) a = combine_float(op, a, get_float(t, (const char *)src[s] + at));
            if (op == HR_AVG) a *= (float)scale;
            put_float(t, dst + at, a);
        }
    }
}

/* --- operands --- */

/* Bit patterns where arithmetic goes wrong, for the floating types in their order. */
static const uint64_t specials[4][16] = {
    {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x0400, 0x8400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00, 0x7c01, 0xfe55,
     0x3c00, 0xbc00},
    {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x8080, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7fc0, 0x7f81, 0xffd5,
     0x3f80, 0xbf80},
    {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x80800000, 0x7f7fffff, 0xff7fffff,
     0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffd55555, 0x3f800000, 0xbf800000},
    {0, 1ull << 63, 1, 1ull << 63 | 1, ~0ull >> 12, 1ull << 52, 0x8010ull << 48, 0x7fefffffffffffff, 0xffefffffffffffff,
     0x7ff0ull << 48, 0xfff0ull << 48, 0x7ff8ull << 48, 0x7ff0000000000001, 0xfffd555555555555, 0x3ff0ull << 48,
     0xbff0ull << 48},
};

enum { TAME, SPICED, WILD };

/* TAME: floats of a few binades, so that sums of many stay finite. SPICED: some specials among them. WILD: any bits. */
ORACLE static void fill(hr_dtype t, char *p, size_t count, int kind) {
    const size_t size = hr_dtype_size(t);
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = random64();
        if (is_float(t) && kind == SPICED && below(24) == 0) {
            bits = specials[t - HR_FLOAT16][below(16)];
        } else if (is_float(t) && kind != WILD) {
            const double x = ldexp((double)(int64_t)bits, -62 - (int)below(6));
            if (t == HR_FLOAT64) {
                memcpy(&bits, &x, sizeof bits);
            } else {
                put_float(t, &bits, (float)x);
                bits = get_bits(t, &bits);
            }
        }
        put_bits(t, p + i * size, bits);
    }
}

#define MARGIN 64
#define CANARY 0xa5

/* dst and the sources of one case, each somewhere in its own room with canaries around dst. */
static char *room[HR_REDUCE_MAX_SRC + 1], *expected;
static size_t room_size;

static void make_rooms(size_t nbytes) {
    room_size = nbytes + 2 * MARGIN;
    for (size_t i = 0; i < COUNT(room); i++) REQUIRE((room[i] = malloc(room_size)));
    REQUIRE((expected = malloc(nbytes)));
}

static void free_rooms(void) {
    for (size_t i = 0; i < COUNT(room); i++) free(room[i]);
    free(expected);
}

/* The first wrong byte, or nbytes; canaries count. */
ORACLE static size_t first_wrong(const char *dst, const char *want, size_t nbytes) {
    if (!memcmp(dst, want, nbytes)) return nbytes;
    for (size_t i = 0; i < nbytes; i++)
        if (dst[i] != want[i]) return i;
    return nbytes;
}

ORACLE static int all_canaries(const char *p, const char *end) {
    return p == end || ((unsigned char)*p == CANARY && !memcmp(p, p + 1, (size_t)(end - p) - 1));
}

static int canaries_live(const char *base, const char *dst, size_t nbytes) {
    return all_canaries(base, dst) && all_canaries(dst + nbytes, base + room_size);
}

/* alias: the source that is dst, or -1. */
static void one_case(hr_redop op, hr_dtype t, int nsrc, size_t count, int alias, hr_store store, int kind) {
    const size_t size = hr_dtype_size(t), nbytes = count * size;
    const double scale = op == HR_AVG && below(4) ? 1.0 / nsrc : 1.0;
    const void *src[HR_REDUCE_MAX_SRC];
    char *dst = room[nsrc] + below(MARGIN);

    memset(room[nsrc], CANARY, room_size);
    for (int s = 0; s < nsrc; s++) {
        char *p = s == alias ? dst : room[s] + below(MARGIN);
        fill(t, p, count, kind);
        src[s] = p;
    }
    reference(op, t, expected, src, nsrc, count, scale);
    hr_reduce(op, t, dst, src, nsrc, count, scale, store);

    const size_t wrong = first_wrong(dst, expected, nbytes);
    if (wrong < nbytes && check_note())
        fprintf(stderr, "%s: %s %s %s nsrc %d count %zu alias %d: element %zu is %llx, expected %llx\n", check_current,
                hr_reduce_isa(), hr_redop_name(op), hr_dtype_name(t), nsrc, count, alias, wrong / size,
                (unsigned long long)get_bits(t, dst + wrong / size * size),
                (unsigned long long)get_bits(t, expected + wrong / size * size));
    CHECK(canaries_live(room[nsrc], dst, nbytes));
}

#define FOR_EACH_KERNEL                     \
    for (int op = 0; op < HR_REDOPS; op++)  \
        for (int t = 0; t < HR_DTYPES; t++) \
            if (hr_reduce_supported(op, t))

/* --- the tests --- */

static void *sum_in_thread(void *arg) {
    const int32_t one = 1, two = 2;
    hr_reduce(HR_SUM, HR_INT32, arg, (const void *[]){&one, &two}, 2, 1, 1.0, 0);
    return NULL;
}

/* First in the file, so that the choice of the instruction set is what the threads do together. */
TEST(first_use_by_several_threads) {
    pthread_t thread[4];
    int32_t result[4] = {0};
    for (int i = 0; i < 4; i++) REQUIRE(!pthread_create(&thread[i], NULL, sum_in_thread, &result[i]));
    for (int i = 0; i < 4; i++) {
        pthread_join(thread[i], NULL);
        CHECK_EQ(result[i], 3);
    }
}

TEST(tables) {
    CHECK_STR(hr_dtype_name(HR_INT8), "int8");
    CHECK_STR(hr_dtype_name(HR_UINT64), "uint64");
    CHECK_STR(hr_dtype_name(HR_BFLOAT16), "bfloat16");
    CHECK_STR(hr_dtype_name(HR_DTYPES), "unknown");
    CHECK_STR(hr_redop_name(HR_SUM), "sum");
    CHECK_STR(hr_redop_name(HR_BXOR), "bxor");
    CHECK_STR(hr_redop_name(HR_REDOPS), "unknown");
    CHECK_EQ(hr_dtype_size(HR_INT8), 1);
    CHECK_EQ(hr_dtype_size(HR_BFLOAT16), 2);
    CHECK_EQ(hr_dtype_size(HR_FLOAT64), 8);
    CHECK_EQ(hr_dtype_size(HR_DTYPES), 0);
    for (int op = 0; op < HR_REDOPS; op++)
        for (int t = 0; t < HR_DTYPES; t++) CHECK_EQ(hr_reduce_supported(op, t), op <= HR_AVG || !is_float(t));
    CHECK(!hr_reduce_supported(HR_REDOPS, HR_INT8));
    CHECK(!hr_reduce_supported(HR_SUM, HR_DTYPES));
}

TEST(forcing_an_instruction_set) {
    CHECK(!hr_reduce_force_isa("mmx"));
    CHECK(hr_reduce_force_isa("scalar"));
    CHECK_STR(hr_reduce_isa(), "scalar");
    CHECK(hr_reduce_force_isa(NULL));
    const char *best = hr_reduce_isa();
    for (size_t i = 0; i < COUNT(isas) && strcmp(isas[i], best); i++) CHECK(!hr_reduce_force_isa(isas[i]));
    hr_reduce_force_isa(NULL);
}

TEST(every_kernel_small) {
    static const int nsrcs[] = {1, 2, 3, 4, 8, 9, 17, 64};
    make_rooms(700 * 8);
    FOR_EACH_ISA FOR_EACH_KERNEL for (size_t n = 0; n < COUNT(nsrcs); n++) {
        for (int kind = TAME; kind <= WILD; kind++) {
            const size_t counts[] = {below(4), below(16), below(70), below(nsrcs[n] > 9 ? 140 : 700)};
            for (size_t c = 0; c < COUNT(counts); c++)
                one_case(op, t, nsrcs[n], counts[c], (int)below(nsrcs[n] + 1) - 1, (int)below(2), kind);
        }
    }
    free_rooms();
}

/* Each count and each alignment of dst, through the heads, tiles and tails. */
TEST(every_count) {
    make_rooms(300 * 8);
    FOR_EACH_ISA for (int t = 0; t < HR_DTYPES; t++) {
        for (size_t count = 0; count < 300; count++) one_case(HR_SUM, t, 3, count, (int)below(4) - 1, 0, SPICED);
    }
    free_rooms();
}

/* More sources than go through a kernel at once and more bytes than a block, where accumulators wait in memory. */
TEST(many_sources_in_blocks) {
    static const hr_redop ops[] = {HR_SUM, HR_AVG, HR_MAX, HR_BXOR};
    make_rooms(40000);
    FOR_EACH_ISA for (int t = 0; t < HR_DTYPES; t++) {
        for (size_t o = 0; o < COUNT(ops); o++) {
            if (!hr_reduce_supported(ops[o], t)) continue;
            const int nsrc = 9 + (int)below(t % 3 ? 10 : 56);
            one_case(ops[o], t, nsrc, (20000 + below(20000)) / hr_dtype_size(t), (int)below(nsrc + 1) - 1, 0, TAME);
        }
    }
    free_rooms();
}

TEST(nontemporal) {
    make_rooms((1 << 20) + (1 << 17));
    FOR_EACH_ISA for (int t = 0; t < HR_DTYPES; t += 5) for (int nsrc = 1; nsrc <= 2; nsrc++) {
        one_case(HR_SUM, t, nsrc, ((1 << 20) + below(1 << 17)) / hr_dtype_size(t), -1, 1, TAME);
        one_case(HR_SUM, t, nsrc, ((1 << 20) + below(1 << 17)) / hr_dtype_size(t), nsrc - 1, 1, TAME);
    }
    free_rooms();
}

/* The lengths around four pages, which are gone through side by side, or not, where memory is far. */
TEST(memory_that_others_have_read_and_memory_that_is_far) {
    static const size_t lens[] = {8192, 9000, 16384, 20000, 32768, 70001, (1 << 20) + 12345};
    make_rooms((1 << 20) + 12345);
    FOR_EACH_ISA for (size_t i = 0; i < 2 * COUNT(lens); i++) {
        hr_reduce_force_amd(i % 2 == 0);
        for (int s = HR_STORE_UNREAD; s <= HR_STORE_SHARED; s++)
            for (int t = 0; t < HR_DTYPES; t += 5) {
                one_case(HR_SUM, t, 2, lens[i / 2] / hr_dtype_size(t), -1, s, TAME);
                one_case(HR_SUM, t, 2, lens[i / 2] / hr_dtype_size(t), 0, s, TAME);
                one_case(HR_SUM, t, 1, lens[i / 2] / hr_dtype_size(t), -1, s, TAME);
            }
    }
    hr_reduce_force_amd(-1);
    free_rooms();
}

/* No byte outside the operands is touched: each lies against an inaccessible page, before or behind it. */
TEST(no_overrun) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *edge[3];
    for (int i = 0; i < 3; i++) {
        edge[i] = mmap(NULL, 3 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(edge[i] != MAP_FAILED && !mprotect(edge[i] + page, page, PROT_READ | PROT_WRITE));
    }
    FOR_EACH_ISA for (int t = 0; t < HR_DTYPES; t++) {
        for (size_t nbytes = hr_dtype_size(t); nbytes < 1200; nbytes += hr_dtype_size(t)) {
            for (int behind = 0; behind < 2; behind++) {
                const size_t at = behind ? 2 * page - nbytes : page;
                const void *src[2] = {edge[1] + at, edge[2] + at};
                hr_reduce(HR_SUM, t, edge[0] + at, src, 2, nbytes / hr_dtype_size(t), 1.0, 0);
                CHECK_EQ(edge[0][at], 0);
            }
        }
    }
    for (int i = 0; i < 3; i++) munmap(edge[i], 3 * page);
}

/* x + -0.0 is x: every 16-bit float is widened and narrowed again, and every NaN becomes the one NaN. */
TEST(every_half_survives) {
    static uint16_t x[65536], zero[65536], out[65536];
    for (int i = 0; i < 65536; i++) {
        x[i] = (uint16_t)i;
        zero[i] = 0x8000;
    }
    FOR_EACH_ISA for (int t = HR_FLOAT16; t <= HR_BFLOAT16; t++) {
        const unsigned infinity = t == HR_FLOAT16 ? 0x7c00 : 0x7f80, nan = t == HR_FLOAT16 ? 0x7e00 : 0x7fc0;
        hr_reduce(HR_SUM, t, out, (const void *[]){x, zero}, 2, 65536, 1.0, 0);
        for (unsigned i = 0; i < 65536; i++) CHECK_EQ(out[i], (i & 0x7fff) > infinity ? nan : i);
    }
}

/* Scaled so that results fall between two halves, on ties, into the subnormals and over the top. */
TEST(every_half_rounds_to_even) {
    static uint16_t x[65536], out[65536], want[65536];
    static const double scales[] = {0.5, 1.5, 0.25 + 0x1p-12, 1.0 / 3, 0x1p-9 * 1.25, 0x1p-20, 1.0 + 0x1p-11, 3.75};
    for (int i = 0; i < 65536; i++) x[i] = (uint16_t)i;
    for (size_t s = 0; s < COUNT(scales); s++) {
        for (int t = HR_FLOAT16; t <= HR_BFLOAT16; t++) {
            reference(HR_AVG, t, (char *)want, (const void *[]){x}, 1, 65536, scales[s]);
            FOR_EACH_ISA {
                hr_reduce(HR_AVG, t, out, (const void *[]){x}, 1, 65536, scales[s], 0);
                CHECK_MEM(out, want, sizeof out);
            }
        }
    }
}

/* 256 + 63 * 1 is 319: bfloat16 has 318 and 320 there, and rounds each 256 + 1 back to 256. */
TEST(halves_round_once) {
    uint16_t first[40], one[40], out[40];
    const void *src[HR_REDUCE_MAX_SRC] = {first};
    for (int i = 0; i < 40; i++) {
        first[i] = 0x4380;
        one[i] = 0x3f80;
    }
    for (int s = 1; s < HR_REDUCE_MAX_SRC; s++) src[s] = one;
    FOR_EACH_ISA {
        hr_reduce(HR_SUM, HR_BFLOAT16, out, src, HR_REDUCE_MAX_SRC, 40, 1.0, 0);
        for (int i = 0; i < 40; i++) CHECK_EQ(out[i], 0x43a0);
    }
}

TEST(zeros_and_nans) {
    static const float nan = NAN, a[] = {0.0f, -0.0f, INFINITY, 1.0f, NAN, -INFINITY};
    static const float b[] = {-0.0f, 0.0f, -INFINITY, NAN, 1.0f, NAN};
    float out[6];
    const void *src[] = {a, b};
    FOR_EACH_ISA {
        hr_reduce(HR_MIN, HR_FLOAT32, out, src, 2, 6, 1.0, 0);
        CHECK(signbit(out[0]) && signbit(out[1]) && out[2] == -INFINITY);
        for (int i = 3; i < 6; i++) CHECK_MEM(&out[i], &nan, sizeof nan);
        hr_reduce(HR_MAX, HR_FLOAT32, out, src, 2, 6, 1.0, 0);
        CHECK(!signbit(out[0]) && !signbit(out[1]) && out[2] == INFINITY);
        for (int i = 3; i < 6; i++) CHECK_MEM(&out[i], &nan, sizeof nan);
        hr_reduce(HR_SUM, HR_FLOAT32, out, src, 2, 6, 1.0, 0);
        for (int i = 2; i < 6; i++) CHECK_MEM(&out[i], &nan, sizeof nan);
    }
}

TEST(scale_is_for_avg_only) {
    const float a[] = {2.0f, 3.0f};
    float out[2];
    FOR_EACH_ISA {
        hr_reduce(HR_SUM, HR_FLOAT32, out, (const void *[]){a, a}, 2, 2, 0.5, 0);
        CHECK(out[0] == 4.0f && out[1] == 6.0f);
        hr_reduce(HR_SUM, HR_FLOAT32, out, (const void *[]){a}, 1, 2, 0.5, 0);
        CHECK(out[0] == 2.0f && out[1] == 3.0f);
        hr_reduce(HR_AVG, HR_FLOAT32, out, (const void *[]){a}, 1, 2, 0.5, 0);
        CHECK(out[0] == 1.0f && out[1] == 1.5f);
    }
}

/* Also where the number of ranks is beyond the type. */
TEST(integers_are_divided_toward_zero) {
    static const double ranks[] = {2, 3, 127, 128, 256, 65537, 2147483647};
    static char x[8 * 4096], out[sizeof x], want[sizeof x];
    for (size_t r = 0; r < COUNT(ranks); r++)
        for (int t = HR_INT8; t <= HR_UINT64; t++) {
            fill(t, x, sizeof x / hr_dtype_size(t), 0);
            reference(HR_AVG, t, want, (const void *[]){x}, 1, sizeof x / hr_dtype_size(t), 1.0 / ranks[r]);
            hr_reduce(HR_AVG, t, out, (const void *[]){x}, 1, sizeof x / hr_dtype_size(t), 1.0 / ranks[r], 0);
            CHECK_MEM(out, want, sizeof out);
        }
}

/* The checks above are worth something only if they see one wrong bit, or one byte beside the result. */
TEST(a_wrong_bit_is_seen) {
    make_rooms(1000);
    memset(room[0], CANARY, room_size);
    memset(expected, 0, 1000);
    memset(room[0] + 7, 0, 1000);
    CHECK_EQ(first_wrong(room[0] + 7, expected, 1000), 1000);
    CHECK(canaries_live(room[0], room[0] + 7, 1000));
    room[0][7 + 999] ^= 1;
    CHECK_EQ(first_wrong(room[0] + 7, expected, 1000), 999);
    room[0][7 + 1000] ^= 1;
    CHECK(!canaries_live(room[0], room[0] + 7, 1000));
    free_rooms();
}
