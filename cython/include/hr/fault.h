/* fault.h - what the fault provider has injected, for tests: a test whose fault never fired must fail. */
#ifndef HR_FAULT_H
#define HR_FAULT_H

#include <stdint.h>

#include "hr/provider.h"

#define HR_FAULT_KINDS 7 /* drop delay reorder truncate error kill stop */

/* Fills up to n names (static text) and numbers of faults injected so far, and returns how many kinds there are: 0 when
 * the domain is not the fault provider's. */
int hr_fault_counts(struct hr_domain *domain, const char **names, uint64_t *values, int n);

#endif
