/* clock.h - the clock of deadlines: nanoseconds that only go forward. */
#ifndef HR_CLOCK_H
#define HR_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t hr_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
