// Rows of whole numbers. A row is turned first, in blocks of 64 values, by a Hadamard matrix, as
// weights are: that changes no product but for a factor of 64, and shares out the largest values of a row.
// Then it is divided by its scale and rounded to -127 to 127, and stored with SHIFT added.
#ifndef DRAFTHEAD_INT8
#define DRAFTHEAD_INT8
#include "fours.h"
#include <bit>
#include <cstring>
#include <vector>

namespace {
constexpr int TURNED = 64;  // values of a block
constexpr int LEVELS = 127;
constexpr int64_t SHARED_ROWS = 8192;  // of fewer values threads would wait longer than they work

inline int64_t padded(int64_t inner) { return (inner + TURNED - 1) / TURNED * TURNED; }

// v[i] + v[i + s] and v[i] - v[i + s], s = 1, 2, 4 ... 32, for the 64 values of a block.
inline void turn(floats* v) {
    constexpr int COUNT = TURNED / LANES;
    c10::ForcedUnroll<std::countr_zero(unsigned(LANES))>{}([&](auto stage) INLINE {
        for (int i = 0; i < COUNT; ++i) v[i] = sums_and_differences<1 << stage>(v[i]);
    });
    for (int step = 1; step < COUNT; step *= 2) {
        for (int i = 0; i < COUNT; ++i) {
            if (i & step) continue;
            const floats a = v[i], b = v[i + step];
            v[i] = a + b;
            v[i + step] = a - b;
        }
    }
}

// Writes the numbers of a row x [inner], with zeros beyond and `shift` added; returns its scale. Where
// the row has a value that is infinite or no number, the scale is such a value.
inline float to_int8(const at::BFloat16* x, int64_t inner, int shift, uint8_t* to) {
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < padded(inner)) memory.resize(padded(inner));
    ints most = {};
    for (int64_t k = 0; k < inner; k += TURNED) {
        floats v[TURNED / LANES];
        if (inner - k >= TURNED) {
            for (int i = 0; i < TURNED / LANES; ++i) v[i] = load(x + k + i * LANES);
        } else {
            at::BFloat16 some[TURNED] = {};
            std::copy(x + k, x + inner, some);
            for (int i = 0; i < TURNED / LANES; ++i) v[i] = load(some + i * LANES);
        }
        turn(v);
        for (int i = 0; i < TURNED / LANES; ++i) {
            most = larger(most, v[i]);
            store(v[i], memory.data() + k + i * LANES);
        }
    }
    int32_t bits[LANES];
    std::memcpy(bits, &most, sizeof(bits));
    float largest;
    std::memcpy(&largest, std::max_element(bits, bits + LANES), sizeof(largest));
    largest = std::max(largest, 1e-30f);  // which keeps what is no number
    const float factor = LEVELS / largest;
    for (int64_t k = 0; k < padded(inner); k += LANES) {
        store_bytes(load(memory.data() + k) * factor, shift, to + k);
    }
    return largest / LEVELS;
}

// Rows of x [rows, inner] as whole numbers.
struct Int8Rows {
    static constexpr int LINES = 4;  // of weights for 8 values of x
    uint8_t* numbers;
    std::vector<float> scales;
    int64_t inner;  // with zeros to whole blocks

    Int8Rows(const at::BFloat16* x, const at::BFloat16*, int64_t rows, int64_t inner, int threads)
        : scales(rows), inner(padded(inner)) {
        static thread_local std::vector<uint8_t> memory;
        if (int64_t(memory.size()) < rows * this->inner) memory.resize(rows * this->inner);
        numbers = memory.data();
        fill(x, rows, inner, threads);
    }

    void fill(const at::BFloat16* x, int64_t rows, int64_t size, int threads) {
        #pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > SHARED_ROWS)
        for (int64_t r = 0; r < rows; ++r) {
            scales[r] = to_int8(x + r * size, size, SHIFT, numbers + r * inner);
        }
    }
};

// A block of 32 columns: the numbers of every four values of x, of one column after the other; where
// sums start, as rows are shifted; and the scales.
struct Int8Block {
    const int8_t* numbers;
    const int32_t* starts;
    const float* scales;

    Int8Block(const at::BFloat16* block, int64_t inner)
        : numbers(reinterpret_cast<const int8_t*>(block)),
          starts(reinterpret_cast<const int32_t*>(numbers + inner * 32)),
          scales(reinterpret_cast<const float*>(starts + 32)) {}
};
}  // namespace
#endif
