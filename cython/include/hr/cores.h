/* cores.h - how many processors this process may use. */
#ifndef HR_CORES_H
#define HR_CORES_H

#include <sched.h>

/* As many ranks can run at once, where each has one. Needs _GNU_SOURCE. */
static inline int hr_cores(void) {
    cpu_set_t own;
    return sched_getaffinity(0, sizeof own, &own) == 0 ? CPU_COUNT(&own) : 1;
}

#endif
