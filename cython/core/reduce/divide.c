/* divide.c - integers divided by a number of ranks, rounded toward zero: the second half of their average. */

#include "divide.h"

/* Any alignment, any memory. Integers of up to 32 bits go through double, which processors divide by side by side: the
 * quotient of x by n is at least 1 / n from the next whole number, and is rounded by less than that. */
#define DIVIDE(T, name, wide)                                          \
    static void name(void *dst, size_t count, uint64_t divisor) {      \
        typedef T element __attribute__((aligned(1), may_alias));      \
        element *x = dst;                                              \
        const wide n = (wide)divisor;                                  \
        for (size_t i = 0; i < count; i++) x[i] = (T)((wide)x[i] / n); \
    }
DIVIDE(int8_t, divide_int8, double)
DIVIDE(int16_t, divide_int16, double)
DIVIDE(int32_t, divide_int32, double)
DIVIDE(int64_t, divide_int64, int64_t)
DIVIDE(uint8_t, divide_uint8, double)
DIVIDE(uint16_t, divide_uint16, double)
DIVIDE(uint32_t, divide_uint32, double)
DIVIDE(uint64_t, divide_uint64, uint64_t)

void hr_reduce_divide(hr_dtype t, void *dst, size_t count, uint64_t divisor) {
    static void (*const divide[])(void *, size_t, uint64_t) = {
        [HR_INT8] = divide_int8,     [HR_INT16] = divide_int16,   [HR_INT32] = divide_int32,
        [HR_INT64] = divide_int64,   [HR_UINT8] = divide_uint8,   [HR_UINT16] = divide_uint16,
        [HR_UINT32] = divide_uint32, [HR_UINT64] = divide_uint64,
    };
    divide[t](dst, count, divisor);
}
