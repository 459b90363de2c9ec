/* reduce.h - element types, reduction operators and the kernels that apply them. */
#ifndef HR_REDUCE_H
#define HR_REDUCE_H

#include <stddef.h>
#include <stdint.h>

typedef enum hr_dtype {
    HR_INT8,
    HR_INT16,
    HR_INT32,
    HR_INT64,
    HR_UINT8,
    HR_UINT16,
    HR_UINT32,
    HR_UINT64,
    HR_FLOAT16,
    HR_BFLOAT16,
    HR_FLOAT32,
    HR_FLOAT64,
    HR_DTYPES
} hr_dtype;

typedef enum hr_redop { HR_SUM, HR_PROD, HR_MIN, HR_MAX, HR_AVG, HR_BAND, HR_BOR, HR_BXOR, HR_REDOPS } hr_redop;

size_t hr_dtype_size(hr_dtype t);
const char *hr_dtype_name(hr_dtype t);  /* "float32" */
const char *hr_redop_name(hr_redop op); /* "sum" */
/* Bit operators need integers. */
int hr_reduce_supported(hr_redop op, hr_dtype t);

#define HR_REDUCE_MAX_SRC 64

typedef enum hr_store {
    HR_STORE_CACHED,
    HR_STORE_UNREAD, /* written past the caches, unless in place: more than they hold, or far from who reads it */
    HR_STORE_SHARED, /* memory that other cores have read: where it pays, its lines are claimed ahead of the stores */
} hr_store;

#define HR_SHARED_MIN 8192        /* shorter runs are written as all others */
#define HR_UNREAD_MIN (16u << 20) /* results that, with what they are made from, fill the caches: written past them */

/*
 * dst[i] = ((src[0][i] op src[1][i]) op src[2][i]) ... for i in [0, count), left to right, with a 32-bit accumulator
 * for 16-bit floating types (rounded once, to nearest even, at the end). nsrc 1 copies. dst may be equal to any src,
 * and must not overlap one otherwise. Any alignment. Integer sums wrap. min and max give NaN where any operand is NaN.
 *
 * avg: sums, and multiplies by scale (1 / number of ranks) before rounding if scale is not 1.0; partial reductions pass
 * 1.0, the last one 1/n. Sums of integers, which wrap, are divided by n, the whole number nearest to 1 / scale, and
 * rounded toward zero. scale is ignored by the other operators.
 */
void hr_reduce(hr_redop op, hr_dtype t, void *dst, const void *const *src, int nsrc, size_t count, double scale,
               hr_store store);

/* The same, and the result also goes to other places, each of which may be equal to a source too. */
void hr_reduce_to_all(hr_redop op, hr_dtype t, void *dst, void *const *also, int nalso, const void *const *src,
                      int nsrc, size_t count, double scale, hr_store store);

void hr_copy(void *dst, const void *src, size_t len, hr_store store);

/* The instruction set in use ("avx512", "avx2", "neon", "scalar"); HRDMA_SIMD is read by the caller, not here. */
const char *hr_reduce_isa(void);
/* For tests: force one of those available; 0 when it is not. NULL: the best. Not thread safe. */
int hr_reduce_force_isa(const char *name);
/* Whether stores to lines that another core has are faster where the lines are claimed ahead (hr/line.h). */
int hr_reduce_claims(void);
/* The processor's family as AMD counts (25: Zen 3 and 4, 26: Zen 5); 0 where the architecture has none. */
unsigned hr_reduce_family(void);
/* For tests: whether memory is written as suits processors of AMD. -1: as suits this one. */
void hr_reduce_force_amd(int is_amd);

#endif
