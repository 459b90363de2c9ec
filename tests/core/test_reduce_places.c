/* test_reduce_places.c - reductions whose results go to several places, some of which are operands: as peers' arrays
 * are that get results put back. Each is held against hr_reduce into memory of its own. */

#include <string.h>

#include "check.h"
#include "hr/reduce.h"

enum { MOST = 70001, MARGIN = 64, ROOMS = 7, CANARY = 0xa5 };

static char room[ROOMS][MOST + 2 * MARGIN], untouched[MOST + 2 * MARGIN], expected[MOST + MARGIN];
static uint64_t state = 1;

static uint64_t below(uint64_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (state >> 33) % n;
}

static void fill(char *p, size_t nbytes) { /* NaN and infinity now and then */
    for (size_t i = 0; i < nbytes; i += 4) {
        uint32_t bits = (uint32_t)below(UINT64_C(1) << 31) << 1 | (uint32_t)below(2);
        memcpy(p + i, &bits, nbytes - i < 4 ? nbytes - i : 4);
    }
}

static int intact(const char *base, const char *from, size_t nbytes) {
    const char *end = base + sizeof room[0];
    return !memcmp(base, untouched, (size_t)(from - base)) &&
           !memcmp(from + nbytes, untouched, (size_t)(end - from) - nbytes);
}

/* Sources lie in the first rooms, in the first of which the result goes, or in the last room; of the places that also
 * get it the first is the second source's, where `back`. */
static void one_case(hr_redop op, hr_dtype t, size_t nbytes, int nsrc, int in_place, int back, int nalso,
                     hr_store store) {
    const size_t size = hr_dtype_size(t), count = nbytes / size, skew = below(2) ? below(MARGIN / size) * size : 0;
    const double scale = op == HR_AVG ? 1.0 / nsrc : 1.0;
    const void *src[3];
    char *at[ROOMS];
    void *also[3];
    memset(room, CANARY, sizeof room);
    for (int i = 0; i < ROOMS; i++) at[i] = room[i] + MARGIN - skew;
    for (int s = 0; s < nsrc; s++) {
        fill(at[s], count * size);
        src[s] = at[s];
    }
    char *dst = in_place ? at[0] : at[ROOMS - 1];
    for (int k = 0; k < nalso; k++) also[k] = back && k == 0 ? at[1] : at[ROOMS - 2 - k];
    hr_reduce(op, t, expected, src, nsrc, count, scale, HR_STORE_CACHED);
    hr_reduce_to_all(op, t, dst, also, nalso, src, nsrc, count, scale, store);
    int right = !memcmp(dst, expected, count * size);
    for (int k = 0; k < nalso; k++) right &= !memcmp(also[k], expected, count * size);
    for (int i = 0; i < ROOMS; i++) right &= intact(room[i], at[i], count * size);
    if (!right && check_note())
        fprintf(stderr, "%s: %s %s %s, %zu bytes, %d sources, in place %d, back %d, %d more, store %d\n", check_current,
                hr_reduce_isa(), hr_redop_name(op), hr_dtype_name(t), nbytes, nsrc, in_place, back, nalso, store);
}

TEST(all_places_get_the_same) {
    static const char *const isas[] = {"avx512", "avx2", "neon", "scalar"};
    static const size_t lens[] = {40, 512, 4100, 20008, MOST - 1};
    memset(untouched, CANARY, sizeof untouched);
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        if (!hr_reduce_force_isa(isas[i])) continue;
        for (int op = 0; op < HR_REDOPS; op++)
            for (int t = 0; t < HR_DTYPES; t++)
                for (size_t l = 0; hr_reduce_supported(op, t) && l < sizeof lens / sizeof *lens; l++) {
                    hr_reduce_force_amd(below(3) == 0);
                    for (int store = HR_STORE_CACHED; store <= HR_STORE_SHARED; store++)
                        one_case(op, t, lens[l], 2 + (int)below(2) * (store == HR_STORE_CACHED), below(4) != 0,
                                 below(4) != 0, (int)below(4), store);
                }
    }
    hr_reduce_force_amd(-1);
    hr_reduce_force_isa(NULL);
}

/* Pieces of what is far go by each way in turn, until it is known which is fast (ways.c): 30 of a kind, with ends that
 * are no whole pages, on either side of where shorter ones are not tried. */
TEST(each_way_through_far_memory_has_the_same_result) {
    enum { LONGEST = (1 << 17) + 9 * 4096 + 24, KINDS = 4 };
    static const size_t lens[] = {LONGEST, 1 << 17, (1 << 17) - 8, (1 << 17) + 4104};
    static const hr_dtype dtypes[] = {HR_FLOAT32, HR_BFLOAT16, HR_INT8};
    char *place[3];
    char *own = malloc(LONGEST), *other = malloc(LONGEST), *sum = malloc(LONGEST);
    for (int i = 0; i < 3; i++) REQUIRE((place[i] = aligned_alloc(4096, 1 << 18)));
    REQUIRE(own && other && sum);
    for (size_t i = 0; i < LONGEST; i++) {
        own[i] = (char)below(60); /* no NaN of any type */
        other[i] = (char)below(60);
    }
    for (size_t k = 0; k < sizeof dtypes / sizeof *dtypes * KINDS; k++) {
        const hr_dtype t = dtypes[k / KINDS];
        const int kind = (int)(k % KINDS), in_place = kind > 1, back = kind > 2;
        for (int turn = 0; turn < 30; turn++) {
            const size_t n = lens[turn % 4], count = n / hr_dtype_size(t);
            const void *src[2] = {place[0], place[1]};
            void *also[1] = {place[1]};
            memcpy(place[0], own, n);
            memcpy(place[1], other, n);
            hr_reduce(HR_SUM, t, sum, src, 2, count, 1.0, HR_STORE_CACHED);
            memset(place[2], CANARY, 1 << 18);
            char *dst = in_place ? place[0] : place[2];
            if (kind == 0)
                hr_copy(dst, place[0], n, HR_STORE_UNREAD);
            else
                hr_reduce_to_all(HR_SUM, t, dst, also, back, src, 2, count, 1.0, HR_STORE_UNREAD);
            CHECK_MEM(dst, kind ? sum : own, n);
            CHECK_MEM(place[1], back ? sum : other, n);
            CHECK(in_place || place[2][n] == (char)CANARY);
        }
    }
    for (int i = 0; i < 3; i++) free(place[i]);
    free(own);
    free(other);
    free(sum);
}

TEST(lines_are_claimed_where_that_pays) {
    for (int amd = 0; amd < 2; amd++) {
        hr_reduce_force_amd(amd);
        CHECK_EQ(hr_reduce_claims(), !amd);
    }
    hr_reduce_force_amd(-1);
}
