// What products with weights in blocks are made of, for eight columns, see `blocks.h`.
#ifndef DRAFTHEAD_MULTIPLY_BLOCKS
#define DRAFTHEAD_MULTIPLY_BLOCKS
#include "numbers.h"
#include <cstring>

namespace {
using words = uint64_t __attribute__((vector_size(32)));
constexpr int TOGETHER = 1;  // registers of columns, which share the values of a row
constexpr bool TILES = false;  // many rows are multiplied as few are

inline __m256 all_of(float value) { return _mm256_set1_ps(value); }

inline __m256 from_halves(const uint8_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline __m256i from_bytes(const uint8_t* from) {
    const auto bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_cvtepu8_epi32(bytes);
}
inline __m256i from_signed(const uint8_t* from) {
    const auto bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_cvtepi8_epi32(bytes);
}
inline int32_t largest_of(__m256i numbers) {
    auto four = _mm_max_epi32(_mm256_castsi256_si128(numbers), _mm256_extracti128_si256(numbers, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b01001110));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0b10110001)));
}
inline __m256 to_floats(__m256i whole) { return _mm256_cvtepi32_ps(whole); }
inline __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
inline __m256 load_some(const at::BFloat16* from, int count) { return load(from, count); }
inline void store_some(__m256 values, at::BFloat16* to, int count) { store(values, to, count); }

inline __m256i add_times(__m256i sums, __m256i a, __m256i b) {
    return _mm256_add_epi32(sums, _mm256_mullo_epi32(a, b));
}
inline __m256i whole_of(int value) { return _mm256_set1_epi32(value); }
inline __m256i times_128(__m256i sums) { return _mm256_slli_epi32(sums, 7); }
// Four numbers of a row, for all columns.
inline __m256i fours_of(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof(four));
    return _mm256_set1_epi32(four);
}
inline __m256i pairs_of(words columns, __m256i fours) {
    return _mm256_maddubs_epi16((__m256i)columns, fours);
}
inline __m256i add_pairs(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
inline __m256i add_both(__m256i sums, __m256i pairs) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#ifdef __AVXVNNI__
constexpr bool DOTS = true;  // one instruction multiplies fours and adds them up
inline __m256i add_dots(__m256i sums, words columns, __m256i fours) {
    return _mm256_dpbusd_avx_epi32(sums, (__m256i)columns, fours);
}
#else
constexpr bool DOTS = false;
// Of numbers less 128: sums of two products, of up to 128 and 127, have 16 bits.
inline __m256i add_dots(__m256i sums, words columns, __m256i fours) {
    const __m256i numbers = _mm256_xor_si256((__m256i)columns, _mm256_set1_epi8(-128));
    const __m256i signed_fours = _mm256_sign_epi8(fours, numbers);
    sums = add_both(sums, pairs_of((words)_mm256_abs_epi8(numbers), signed_fours));
    asm volatile("" : "+x"(sums));  // one after the other, or the compiler runs out of registers
    return sums;
}
#endif
}  // namespace
#endif
