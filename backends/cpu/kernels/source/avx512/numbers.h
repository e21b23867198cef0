// Sixteen numbers at a time, for processors with AVX512-BF16.
#ifndef DRAFTHEAD_NUMBERS
#define DRAFTHEAD_NUMBERS
#include "common.h"
#include <limits>

namespace {
constexpr int LANES = 16;

// The mask of the first `count` of sixteen numbers.
inline __mmask16 first(int64_t count) {
    return (__mmask16)((1u << std::min<int64_t>(16, count)) - 1);
}

inline __m512 widen(__m256i halves) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

// Sixteen numbers as float32; with a mask, 0 for those outside it.
inline __m512 load(const at::BFloat16* from) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

inline __m512 load(const at::BFloat16* from, __mmask16 some) {
    return widen(_mm256_maskz_loadu_epi16(some, from));
}

inline __m512 load(const float* from, __mmask16 some) { return _mm512_maskz_loadu_ps(some, from); }

// Stores sixteen numbers, rounded to bfloat16.
inline void store(__m512 values, at::BFloat16* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
}

inline void store(__m512 values, at::BFloat16* to, __mmask16 some) {
    _mm256_mask_storeu_epi16(to, some, (__m256i)_mm512_cvtneps_pbh(values));
}

// Which of the first `count` of sixteen numbers are larger than `bound`.
inline unsigned above(const float* from, int64_t count, float bound) {
    const auto some = first(count);
    return _mm512_mask_cmp_ps_mask(some, load(from, some), _mm512_set1_ps(bound), _CMP_GT_OQ);
}
}  // namespace
#endif
