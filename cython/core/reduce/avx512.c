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

/* As in lanes.h, but that halves of 32-bit lanes are moved and merged by one instruction each. */
static inline __attribute__((always_inline)) __m512i bfloat16_narrow(__m512i lo, __m512i hi) {
    const __mmask64 upper = 0xccccccccccccccccu;
    const __m512i to_lower = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    const __m512i to_upper = _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100);
    const __m512i kept = _mm512_mask_shuffle_epi8(hi, ~upper, lo, to_lower);
    const __m512i dropped = _mm512_mask_shuffle_epi8(lo, upper, hi, to_upper);
    const __m512i odd = _mm512_and_si512(kept, _mm512_set1_epi16(1));
    const __mmask32 up = _mm512_cmpgt_epu16_mask(_mm512_or_si512(dropped, odd), _mm512_set1_epi16(-0x8000));
    return _mm512_mask_sub_epi16(kept, up, kept, _mm512_set1_epi16(-1));
}
#    define BFLOAT16_NARROW(lo, hi) ((V)bfloat16_narrow((__m512i)(lo), (__m512i)(hi)))

#    include "kernels.h"

#else
typedef int hr_reduce_avx512_unused;
#endif
