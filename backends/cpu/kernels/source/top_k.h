#ifndef DRAFTHEAD_TOP_K
#define DRAFTHEAD_TOP_K
#include "numbers.h"
#include <cmath>
#include <vector>

namespace {
// places [rows, count] of the largest of each row of x [rows, size], for up to MOST of them
template <int MOST>
void top(const float* x, int64_t rows, int64_t size, int64_t* places, int64_t count, int threads) {
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        const float* row = x + r * size;
        int64_t* best = places + r * count;
        float values[MOST];
        // Inserts a number among the best at `rank` or, if it is larger, before; that of `rank`
        // is dropped.
        auto insert = [&](int64_t rank, int64_t place) {
            for (; rank > 0 && values[rank - 1] < row[place]; --rank) {
                values[rank] = values[rank - 1];
                best[rank] = best[rank - 1];
            }
            values[rank] = row[place];
            best[rank] = place;
        };
        for (int64_t place = 0; place < count; ++place) insert(place, place);
        for (int64_t start = count; start < size; start += LANES) {
            for (unsigned larger = above(row + start, size - start, values[count - 1]); larger;
                 larger &= larger - 1) {
                const int64_t place = start + __builtin_ctz(larger);
                // Of several larger numbers, the first may have raised the bar for the others.
                if (row[place] > values[count - 1]) insert(count - 1, place);
            }
        }
    }
}

// The same with their values, and of each row the logarithm of the sum of exp over all of it.
template <int MOST, typename number_t>
void largest(const number_t* x, int64_t rows, int64_t size, float* values, int64_t* places,
             float* totals, int64_t count, int threads) {
    using Vec = at::vec::Vectorized<float>;
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
        static thread_local std::vector<float> row;
        row.resize((size + LANES - 1) / LANES * LANES);
        std::copy_n(x + r * size, size, row.begin());
        std::fill(row.begin() + size, row.end(), -std::numeric_limits<float>::infinity());
        top<MOST>(row.data(), 1, size, places + r * count, count, 1);
        for (int64_t i = 0; i < count; ++i) values[r * count + i] = row[places[r * count + i]];
        const float most = values[r * count];
        Vec sum(0);
        for (size_t i = 0; i < row.size(); i += LANES) {
            sum = sum + (Vec::loadu(row.data() + i) - Vec(most)).exp_u20();
        }
        alignas(64) float sums[LANES];
        sum.store(sums);
        float total = 0;
        for (float one : sums) total += one;
        totals[r] = most + std::log(total);
    }
}

// The first of the largest of x [size]; -1, which is NO_TOKEN, if that is NaN or -infinity.
inline int64_t most_probable(const at::BFloat16* x, int64_t size) {
    using Vec = at::vec::Vectorized<float>;
    constexpr int64_t PART = 64 * LANES;
    float most = -std::numeric_limits<float>::infinity();
    int64_t place = size;  // the beginning of the part that has the largest
    for (int64_t start = 0; start < size; start += PART) {
        const int64_t end = std::min(start + PART, size);
        Vec of_lanes(most);
        int64_t i = start;
        // NaN counts as the largest.
        for (; i + LANES <= end; i += LANES) of_lanes = at::vec::maximum(of_lanes, Vec(load(x + i)));
        alignas(64) float lanes[LANES];
        of_lanes.store(lanes);
        float largest = most;
        auto see = [&](float one) { largest = one > largest || std::isnan(one) ? one : largest; };
        for (float one : lanes) see(one);
        for (; i < end; ++i) see(x[i]);
        if (std::isnan(largest)) return -1;
        if (largest > most) most = largest, place = start;
    }
    while (place < size && float(x[place]) != most) ++place;
    return place < size ? place : -1;
}
}  // namespace
#endif
