// What several kernels use. The code generator puts torch's headers before these files: they bring
// the processor's intrinsics, at::BFloat16, at::vec::Vectorized and c10::ForcedUnroll.
#ifndef DRAFTHEAD_COMMON  // one file may hold several kernels
#define DRAFTHEAD_COMMON
#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#define INLINE __attribute__((always_inline))  // for lambdas that keep sums in registers

namespace {
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

// f(number of rows as a constant), for 1 to MOST rows
template <int MOST, typename F>
inline void with_rows(int64_t rows, const F& f) {
    if constexpr (MOST > 0) {
        if (rows == MOST) f(std::integral_constant<int, MOST>{});
        else with_rows<MOST - 1>(rows, f);
    }
}

// f(first row, number of rows as a constant) for groups of at most MOST rows, all of nearly the
// same size: 13 rows in groups of at most 8 are 7 and 6.
template <int MOST, typename F>
inline void in_groups(int64_t rows, const F& f) {
    const int64_t groups = (rows + MOST - 1) / MOST, group = (rows + groups - 1) / groups;
    for (int64_t r = 0; r < rows; r += group) {
        with_rows<MOST>(std::min(group, rows - r), [&](auto count) { f(r, count); });
    }
}
}  // namespace
#endif
