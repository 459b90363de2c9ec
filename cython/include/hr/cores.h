/* cores.h - whether the ranks of this host have a processor each. */
#ifndef HR_CORES_H
#define HR_CORES_H

#include <sched.h>

/* With so many peers on this host, on the processors that this process may use. Needs _GNU_SOURCE. */
static inline int hr_crowded(int local_peers) {
    cpu_set_t own;
    return local_peers >= (sched_getaffinity(0, sizeof own, &own) == 0 ? CPU_COUNT(&own) : 1);
}

#endif
