/* faults.c - how many faults were injected into this process. */

#include <stdatomic.h>

#include "hr/fault.h"

static _Atomic uint64_t fired;

void hr_fault_fired(void) { atomic_fetch_add_explicit(&fired, 1, memory_order_relaxed); }

uint64_t hr_faults_fired(void) { return atomic_load_explicit(&fired, memory_order_relaxed); }
