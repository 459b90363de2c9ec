/* neon.c - reduction kernels for 64-bit ARM, where NEON and its float16 conversions are part of the baseline. */
#if defined(__aarch64__)

#    include <arm_neon.h>

#    define TABLE hr_reduce_neon
#    define ISA "neon"
#    define W 16

#    define FLOAT16_WIDEN(v, lo, hi)                                     \
        (lo = (V)vcvt_f32_f16(vget_low_f16(vreinterpretq_f16_u64((v)))), \
         hi = (V)vcvt_f32_f16(vget_high_f16(vreinterpretq_f16_u64((v)))))
#    define FLOAT16_NARROW(lo, hi) ((V)vcombine_f16(vcvt_f16_f32((float32x4_t)(lo)), vcvt_f16_f32((float32x4_t)(hi))))

#    include "kernels.h"

#else
typedef int hr_reduce_neon_unused;
#endif
