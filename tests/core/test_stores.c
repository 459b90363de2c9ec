/* test_stores.c - when memory that other cores hold is written past the cache. */
#include "check.h"
#include "core/reduce/stores.h"

static int past_of(size_t len, int n) {
    int past = 0;
    for (int i = 0; i < n; i++) past += hr_stores_way(len) == HR_STORES_PAST;
    return past;
}

TEST(slow_stores_go_past_the_cache) {
    const size_t len = 256 << 10, n = HR_STORES_PIECE;
    int timed = 0;
    hr_stores_forget();
    for (int i = 0; i < 160; i++) timed += hr_stores_way(len) == HR_STORES_TIMED;
    CHECK_EQ(timed, 10);
    hr_stores_took(len, n, 1, 1000000); /* once held up: no reason */
    hr_stores_took(len, n, 1, 1000000);
    hr_stores_took(len, n, 1, 500); /* 2 ns a line */
    CHECK_EQ(past_of(len, 1000), 0);
    for (int i = 0; i < 4; i++) hr_stores_took(len, n, 1, 7200); /* 28 ns a line */
    CHECK_EQ(past_of(len, 1000), 997);                           /* the others look whether it is still so */
    CHECK_EQ(past_of(8 << 20, 1000), 0);                         /* other lengths know nothing of it */
    for (int i = 0; i < 8; i++) hr_stores_took(len, n, 1, 500);
    CHECK_EQ(past_of(len, 1000), 0);
    hr_stores_forget();
}
