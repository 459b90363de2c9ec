/* divide.h - integers divided in place. */
#ifndef HR_CORE_REDUCE_DIVIDE_H
#define HR_CORE_REDUCE_DIVIDE_H

#include "hr/reduce.h"

/* dst[i] = dst[i] / divisor, rounded toward zero. For integers, of any alignment; divisor from 1 to 2**31. */
void hr_reduce_divide(hr_dtype t, void *dst, size_t count, uint64_t divisor);

#endif
