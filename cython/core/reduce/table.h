/* table.h - what reduce.c and the instruction sets agree on: a job, a kernel, a table of kernels. */
#ifndef HR_CORE_REDUCE_TABLE_H
#define HR_CORE_REDUCE_TABLE_H

#include "hr/reduce.h"

#define HR_REDUCE_MAX_VECTOR 64
#define HR_REDUCE_PAGES 4

/* A kernel may stop after some of the sources and go on later: it then leaves its accumulators in memory, two vectors
 * for each vector of the operands and for each of the two ragged ends. */
#define HR_REDUCE_WAITING(nbytes) (2 * (nbytes) + 4 * HR_REDUCE_MAX_VECTOR)

typedef struct hr_reduce_job {
    const void *const *src;
    int nsrc, nalso;
    void *dst, *const *also; /* also: places that get the same */
    hr_store store;
    short pages;        /* that are gone through side by side where memory is far */
    short in_place;     /* dst is one of src */
    size_t begin, end;  /* bytes of each operand to go through; whole elements */
    double scale;       /* avg only */
    const void *resume; /* accumulators of the sources before these, or NULL */
    void *suspend;      /* leave accumulators here and dst alone, or NULL */
} hr_reduce_job;
/* GCC copies a longer one by stores of 64 bytes, to frames that the address sanitizer does not align so. */
_Static_assert(sizeof(hr_reduce_job) <= 80, "a job is copied");

typedef void (*hr_reduce_kernel)(const hr_reduce_job *job);

typedef struct hr_reduce_table {
    const char *name;
    hr_reduce_kernel kernel[HR_REDOPS][HR_DTYPES];
} hr_reduce_table;

extern const hr_reduce_table hr_reduce_scalar;
#if defined(__x86_64__)
extern const hr_reduce_table hr_reduce_avx2, hr_reduce_avx512;
#elif defined(__aarch64__)
extern const hr_reduce_table hr_reduce_neon;
#endif

#endif
