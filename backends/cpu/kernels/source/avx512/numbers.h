// Sixteen numbers at a time, for processors with AVX512.
#ifndef DRAFTHEAD_NUMBERS
#define DRAFTHEAD_NUMBERS
#include "common.h"
#include <limits>

namespace {
constexpr int LANES = 16;
using floats = __m512;
using ints = __m512i;

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

inline __m512 load(const float* from) { return _mm512_loadu_ps(from); }

inline __m512 load(const float* from, __mmask16 some) { return _mm512_maskz_loadu_ps(some, from); }

// Sixteen numbers rounded to bfloat16: to the nearest, or of two to the even one. A number that is
// none becomes another that is none.
inline __m256i narrow(__m512 values) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(values);
#else
    const __m512i bits = (__m512i)values;
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 none = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, none, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

// Stores sixteen numbers, rounded to bfloat16.
inline void store(__m512 values, at::BFloat16* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(values));
}

inline void store(__m512 values, at::BFloat16* to, __mmask16 some) {
    _mm256_mask_storeu_epi16(to, some, narrow(values));
}

inline void store(__m512 values, float* to) { _mm512_storeu_ps(to, values); }

// Stores sixteen numbers up to 127, rounded to whole ones, with `shift` added.
inline void store_bytes(__m512 values, int shift, uint8_t* to) {
    const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(values), _mm512_set1_epi32(shift));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(whole));
}

// Of pairs of numbers a and b, S places apart, a + b and a - b.
template <int S>
inline __m512 sums_and_differences(__m512 values) {
    constexpr __mmask16 SECOND = S == 1 ? 0xaaaa : S == 2 ? 0xcccc : S == 4 ? 0xf0f0 : 0xff00;
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 other = _mm512_permutexvar_ps(_mm512_xor_si512(places, _mm512_set1_epi32(S)), values);
    return _mm512_mask_sub_ps(_mm512_add_ps(other, values), SECOND, other, values);
}

// The larger of the bits of sizes, which are in the order of these, and before those of no number.
inline __m512i larger(__m512i bits, __m512 values) {
    return _mm512_max_epi32(bits, _mm512_and_si512((__m512i)values, _mm512_set1_epi32(0x7fffffff)));
}

// Which of the first `count` of sixteen numbers are larger than `bound`.
inline unsigned above(const float* from, int64_t count, float bound) {
    const auto some = first(count);
    return _mm512_mask_cmp_ps_mask(some, load(from, some), _mm512_set1_ps(bound), _CMP_GT_OQ);
}
}  // namespace
#endif
