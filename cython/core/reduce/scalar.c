/* scalar.c - reduction kernels for any machine: 16-byte vectors, which the compiler maps to what the target's baseline
 * has (SSE2 on x86-64) or to single elements. */
#define TABLE hr_reduce_scalar
#define ISA "scalar"
#define W 16

#include "kernels.h"
