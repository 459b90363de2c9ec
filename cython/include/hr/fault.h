/* fault.h - what faults were injected, for tests: a test whose fault never fired must fail. */
#ifndef HR_FAULT_H
#define HR_FAULT_H

#include <stdint.h>

#include "hr/provider.h"

#define HR_FAULT_KINDS 7 /* drop delay reorder truncate error kill stop */

/* Fills up to n names (static text) and numbers of faults injected so far, and returns how many kinds there are: 0 when
 * the domain is not the fault provider's. */
int hr_fault_counts(struct hr_domain *domain, const char **names, uint64_t *values, int n);

/* Whoever injects a fault says so, when it takes effect. The number is the process's, of all domains that it had. */
void hr_fault_fired(void);
uint64_t hr_faults_fired(void);

#endif
