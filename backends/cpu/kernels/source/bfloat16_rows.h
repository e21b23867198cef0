// Rows of bfloat16 numbers: as they are where instructions multiply them, else in float32.
#ifndef DRAFTHEAD_BFLOAT16_ROWS
#define DRAFTHEAD_BFLOAT16_ROWS
#include "numbers.h"
#include <cstring>
#include <vector>

namespace {
#ifdef __AVX512BF16__
using number_t = at::BFloat16;  // that is multiplied

inline void copy(const at::BFloat16* from, int64_t size, number_t* to) {
    std::memcpy(to, from, size * sizeof(*to));
}

inline const number_t* numbers_of(const at::BFloat16* from, int64_t) { return from; }
#else
using number_t = float;

inline void copy(const at::BFloat16* from, int64_t size, number_t* to) {
    const int64_t whole = size / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) store(load(from + i), to + i);
    for (int64_t i = whole; i < size; ++i) to[i] = from[i];
}

inline const number_t* numbers_of(const at::BFloat16* from, int64_t size) {
    static thread_local std::vector<number_t> memory;
    if (int64_t(memory.size()) < size) memory.resize(size);
    copy(from, size, memory.data());
    return memory.data();
}
#endif

// Rows x [rows, inner]
struct Bfloat16Rows {
    static constexpr int LINES = 8;  // of weights for 8 values of x
    const number_t* x;
    int64_t inner;

    Bfloat16Rows(const at::BFloat16* from, const at::BFloat16*, int64_t rows, int64_t inner, int)
        : x(numbers_of(from, rows * inner)), inner(inner) {}

};
}  // namespace
#endif
