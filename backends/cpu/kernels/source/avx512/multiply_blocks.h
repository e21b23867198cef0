// What products with weights in blocks are made of, for sixteen columns, see `blocks.h`.
#ifndef DRAFTHEAD_MULTIPLY_BLOCKS
#define DRAFTHEAD_MULTIPLY_BLOCKS
#include "numbers.h"
#include <cstring>

namespace {
using words = uint64_t __attribute__((vector_size(64)));
constexpr int TOGETHER = 2;  // registers of columns, which share the values of a row
#ifdef __AMX_INT8__
constexpr bool TILES = true;  // many rows are multiplied by tiles
#else
constexpr bool TILES = false;
#endif

inline __m512 all_of(float value) { return _mm512_set1_ps(value); }

inline __m512 from_halves(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline __m512i from_bytes(const uint8_t* from) {
    const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepu8_epi32(bytes);
}
inline __m512i from_signed(const uint8_t* from) {
    const auto bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi8_epi32(bytes);
}
inline int32_t largest_of(__m512i numbers) { return _mm512_reduce_max_epi32(numbers); }
inline __m512 to_floats(__m512i whole) { return _mm512_cvtepi32_ps(whole); }
inline __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
inline __m512 load_some(const at::BFloat16* from, int count) {
    return load(from, first(std::max(count, 0)));
}
inline void store_some(__m512 values, at::BFloat16* to, int count) {
    store(values, to, first(std::max(count, 0)));
}

inline __m512i add_times(__m512i sums, __m512i a, __m512i b) {
    return _mm512_add_epi32(sums, _mm512_mullo_epi32(a, b));
}
inline __m512i whole_of(int value) { return _mm512_set1_epi32(value); }
inline __m512i times_128(__m512i sums) { return _mm512_slli_epi32(sums, 7); }
// Four numbers of a row, for all columns.
inline __m512i fours_of(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof(four));
    return _mm512_set1_epi32(four);
}
inline __m512i pairs_of(words columns, __m512i fours) {
    return _mm512_maddubs_epi16((__m512i)columns, fours);
}
inline __m512i add_pairs(__m512i a, __m512i b) { return _mm512_add_epi16(a, b); }
inline __m512i add_both(__m512i sums, __m512i pairs) {
    return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#ifdef __AVX512VNNI__
constexpr bool DOTS = true;  // one instruction multiplies fours and adds them up
inline __m512i add_dots(__m512i sums, words columns, __m512i fours) {
    return _mm512_dpbusd_epi32(sums, (__m512i)columns, fours);
}
#else
constexpr bool DOTS = false;
// Of numbers less 128: sums of two products, of up to 128 and 127, have 16 bits.
inline __m512i add_dots(__m512i sums, words columns, __m512i fours) {
    const __m512i numbers = _mm512_xor_si512((__m512i)columns, _mm512_set1_epi8(-128));
    const __m512i signed_fours = _mm512_mask_sub_epi8(fours, _mm512_movepi8_mask(numbers),
                                                      _mm512_setzero_si512(), fours);
    sums = add_both(sums, pairs_of((words)_mm512_abs_epi8(numbers), signed_fours));
    asm volatile("" : "+v"(sums));  // one after the other, or the compiler runs out of registers
    return sums;
}
#endif
}  // namespace
#endif
