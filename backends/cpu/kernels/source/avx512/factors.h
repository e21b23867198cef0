// What both sets of products with AVX512 read. A block in bytes has the values 128 + v of 32 columns,
// for v of 0 to 127, without their leading bits, which are the same for all; then 32 scales in
// float32. A weight is scale * (128 + v - ZERO).
#ifndef DRAFTHEAD_FACTORS
#define DRAFTHEAD_FACTORS
#include "numbers.h"
#include <vector>

namespace {
constexpr float ZERO = 192;

// The values 128 + v of 32 bytes v.
inline __m512i from_bytes(const uint8_t* bytes) {
    const auto* from = reinterpret_cast<const __m256i*>(bytes);
    const __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256(from));
    return _mm512_or_si512(low, _mm512_set1_epi16(0x4300));  // 128
}

// Sums over each row of x [rows, inner], which blocks in bytes need.
inline std::vector<float> sums_of(const at::BFloat16* x, int64_t rows, int64_t inner) {
    std::vector<float> sums(rows);
    for (int64_t r = 0; r < rows; ++r) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t k = 0; k < inner; k += 16) {
            sum = _mm512_add_ps(sum, load(x + r * inner + k, first(inner - k)));
        }
        sums[r] = _mm512_reduce_add_ps(sum);
    }
    return sums;
}

// Rows of x [rows, inner] and, for blocks in bytes, their sums.
template <bool IN_BYTES>
struct Factors {
    const at::BFloat16* x;
    int64_t inner;
    std::vector<float> sums;

    Factors(const at::BFloat16* x, int64_t rows, int64_t inner) : x(x), inner(inner) {
        if constexpr (IN_BYTES) sums = sums_of(x, rows, inner);
    }
};
}  // namespace
#endif
