/* avx2.c - reduction kernels for x86-64 with AVX2 and F16C. */
#if defined(__x86_64__)
#    pragma GCC target("avx2,f16c,prfchw")

#    include <immintrin.h>

#    define TABLE hr_reduce_avx2
#    define ISA "avx2"
#    define W 32

#    define STREAM(p, v) _mm256_stream_si256((__m256i *)(void *)(p), (__m256i)(v))

static const int32_t words[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
#    define LOAD_WORDS(p, n) \
        (V) _mm256_maskload_epi32((const int *)(p), _mm256_loadu_si256((const __m256i *)(words + 8 - (n) / 4)))

#    define UNORDERED_F32(a, b) _mm256_movemask_ps(_mm256_cmp_ps((__m256)(a), (__m256)(b), _CMP_UNORD_Q))
#    define UNORDERED_F64(a, b) _mm256_movemask_pd(_mm256_cmp_pd((__m256d)(a), (__m256d)(b), _CMP_UNORD_Q))

#    define FLOAT16_WIDEN(v, lo, hi)                                    \
        (lo = (V)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)(v))), \
         hi = (V)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)(v), 1)))
#    define FLOAT16_LOAD(p, lo, hi)                                                    \
        (lo = (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p))), \
         hi = (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)((p) + 16))))
#    define FLOAT16_NARROW(lo, hi)                                                     \
        ((V)_mm256_set_m128i(_mm256_cvtps_ph((__m256)(hi), _MM_FROUND_TO_NEAREST_INT), \
                             _mm256_cvtps_ph((__m256)(lo), _MM_FROUND_TO_NEAREST_INT)))

/* As in lanes.h, with instructions that merge halves of 32-bit lanes. */
static inline __attribute__((always_inline)) __m256i bfloat16_narrow(__m256i lo, __m256i hi) {
    const __m256i kept = _mm256_blend_epi16(_mm256_srli_epi32(lo, 16), hi, 0xaa);
    const __m256i dropped = _mm256_blend_epi16(lo, _mm256_slli_epi32(hi, 16), 0xaa);
    const __m256i rest = _mm256_or_si256(dropped, _mm256_and_si256(kept, _mm256_set1_epi16(1)));
    const __m256i up = _mm256_cmpeq_epi16(_mm256_max_epu16(rest, _mm256_set1_epi16(-0x7fff)), rest);
    return _mm256_sub_epi16(kept, up);
}
#    define BFLOAT16_NARROW(lo, hi) ((V)bfloat16_narrow((__m256i)(lo), (__m256i)(hi)))

#    include "kernels.h"

#else
typedef int hr_reduce_avx2_unused;
#endif
