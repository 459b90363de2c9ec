/* stores.c - times plain stores to shared memory, and decides.
 *
 * A counter for each class, moved by each timing: one that was held up by something else (the thread lost its core)
 * decides nothing. Timing costs two looks at the clock, so one piece in EVERY is timed; a slow one costs as much as ten
 * others, so once stores go past the cache one in SELDOM is.
 */
#include "stores.h"

enum { CLASSES = 3, SURE = 8, BYPASS_FROM = 4, EVERY = 16, SELDOM = 256 };

/* ns that a line may take: more is slower than past the cache, reading again included. What a source adds is for
 * reading it from another core. Short runs gain by staying in the cache; long ones come from further away anyway. */
enum { LINE = 64, SLOW_SOURCE = 3 };
static const int slow_line[CLASSES] = {10, 4, 10};

static struct {
    int slow, turn;
} classes[CLASSES];

static int class_of(size_t len) { return len < HR_STORES_PIECE ? 0 : len <= 256u << 10 ? 1 : 2; }

/* Threads that come together may count one less: no harm. */
static int get(const int *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static void set(int *p, int value) { __atomic_store_n(p, value, __ATOMIC_RELAXED); }

enum hr_stores_way hr_stores_way(size_t len) {
    int c = class_of(len), past = get(&classes[c].slow) >= BYPASS_FROM, turn = get(&classes[c].turn) + 1;
    int timed = turn >= (past ? SELDOM : EVERY);
    set(&classes[c].turn, timed ? 0 : turn);
    return timed ? HR_STORES_TIMED : past ? HR_STORES_PAST : HR_STORES_THROUGH;
}

void hr_stores_took(size_t len, size_t n, int nsrc, int64_t ns) {
    int c = class_of(len), slow = get(&classes[c].slow);
    int64_t limit = (int64_t)(n / LINE) * (slow_line[c] + SLOW_SOURCE * nsrc);
    int next = ns > limit ? slow + 1 : slow - 1;
    if (next >= 0 && next <= SURE) set(&classes[c].slow, next);
}

void hr_stores_forget(void) {
    for (int c = 0; c < CLASSES; c++) {
        set(&classes[c].slow, 0);
        set(&classes[c].turn, 0);
    }
}
