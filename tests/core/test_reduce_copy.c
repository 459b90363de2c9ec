/* test_reduce_copy.c - hr_copy: all lengths and ways, and nothing beside the destination. */

#include <string.h>

#include "check.h"
#include "hr/reduce.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define FOR_EACH_ISA                               \
    for (size_t isa = 0; isa < COUNT(isas); isa++) \
        if (hr_reduce_force_isa(isas[isa]))

enum { MARGIN = 256, LONGEST = (2 << 20) + 77, CANARY = 0xa5 };

static unsigned char from[LONGEST + 4096], to[sizeof from + 4096 + 2 * MARGIN];
static const char *const isas[] = {"avx512", "avx2", "neon", "scalar"};

static void fill(void) {
    for (size_t k = 0; k < sizeof from; k++) from[k] = (unsigned char)(k * 7 + (k >> 8));
}

static void check(unsigned char *dst, const unsigned char *src, size_t len, hr_store store) {
    memset(dst - MARGIN, CANARY, MARGIN);
    memset(dst, CANARY, len + MARGIN);
    hr_copy(dst, src, len, store);
    CHECK_MEM(dst, src, len);
    for (size_t i = 0; i < MARGIN; i++) CHECK(dst[i - MARGIN] == CANARY && dst[len + i] == CANARY);
}

TEST(copy) {
    static const size_t lens[] = {0, 1, 63, 64, 4097, (1 << 20) - 1, 1 << 20, LONGEST};
    fill();
    FOR_EACH_ISA for (size_t i = 0; i < COUNT(lens); i++) {
        for (int how = 0; how < 2 * (HR_STORE_SHARED + 1); how++) {
            hr_reduce_force_amd(how % 2);
            check(to + MARGIN + 37 * i % 64, from + 53 * i % 64, lens[i], (hr_store)(how / 2));
        }
    }
    hr_reduce_force_amd(-1);
    memcpy(to, from, 1 << 20);
    hr_copy(to, to, 1 << 20, HR_STORE_UNREAD);
    CHECK_MEM(to, from, 1 << 20);
    hr_reduce_force_isa(NULL);
}

/* Where a string move would be slow: see hr_copy. */
TEST(copy_to_a_little_ahead_in_the_page) {
    static const size_t lens[] = {2047, 2048, 5000, 8192, 70001};
    fill();
    FOR_EACH_ISA for (size_t ahead = 0; ahead <= 33; ahead++) for (size_t i = 0; i < COUNT(lens); i++) {
        const unsigned char *src = from + 1000 * i % 4096;
        unsigned char *first = to + MARGIN;
        hr_reduce_force_amd(ahead % 3 != 0);
        for (int store = HR_STORE_CACHED; store <= HR_STORE_SHARED; store++)
            check(first + ((uintptr_t)src + ahead - (uintptr_t)first) % 4096, src, lens[i], (hr_store)store);
    }
    hr_reduce_force_amd(-1);
    hr_reduce_force_isa(NULL);
}
