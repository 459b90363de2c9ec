/* avx512.c - reduction kernels for x86-64 with AVX-512 F, BW, DQ and VL.
 *
 * AVX512_BF16 is of no use here: its conversion flushes subnormals. */
#if defined(__x86_64__)
#    pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,prfchw")

#    include <immintrin.h>

#    define TABLE hr_reduce_avx512
#    define ISA "avx512"
#    define W 64

#    define STREAM(p, v) _mm512_stream_si512((void *)(p), (__m512i)(v))

#    define FIRST(n) (~0ull >> (64 - (n))) /* n is 1 to 64 */
#    define LOAD_PART(p, n) ((V)_mm512_maskz_loadu_epi8(FIRST(n), (p)))
#    define STORE_PART(p, v, n) _mm512_mask_storeu_epi8((p), FIRST(n), (__m512i)(v))

#    define UNORDERED_F32(a, b) _mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_UNORD_Q)
#    define UNORDERED_F64(a, b) _mm512_cmp_pd_mask((__m512d)(a), (__m512d)(b), _CMP_UNORD_Q)

#    define FLOAT16_WIDEN(v, lo, hi)                                    \
        (lo = (V)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)(v))), \
         hi = (V)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)(v), 1)))
#    define FLOAT16_LOAD(p, lo, hi)                                                       \
        (lo = (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p))), \
         hi = (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)((p) + 32))))
#    define FLOAT16_NARROW(lo, hi)                                                                               \
        ((V)_mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph((__m512)(lo), _MM_FROUND_TO_NEAREST_INT)), \
                               _mm512_cvtps_ph((__m512)(hi), _MM_FROUND_TO_NEAREST_INT), 1))

#    include "kernels.h"

#else
typedef int hr_reduce_avx512_unused;
#endif
