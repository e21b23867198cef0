#ifndef DRAFTHEAD_DRAW
#define DRAFTHEAD_DRAW
#include "common.h"
#include <vector>

namespace {
// The distribution of a token: logits and a temperature.
template <typename logit_t>
struct Row {
    static constexpr int64_t BLOCK = 64;  // tokens
    const logit_t* logits;
    int64_t size;
    float largest, temperature;

    Row(const logit_t* logits, int64_t size, float temperature)
        : logits(logits), size(size), temperature(temperature) {
        const __m512 least = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        __m512 most = least;
        for (int64_t start = 0; start < size; start += 16) {
            const auto some = first(size - start);
            most = _mm512_mask_max_ps(most, some, most, load(logits + start, some));
        }
        largest = _mm512_reduce_max_ps(most);
    }

    // exp((logit - largest) / temperature) of sixteen tokens, 0 after the last token.
    __m512 masses(int64_t start) const {
        const auto some = first(size - start);
        const __m512 below = _mm512_sub_ps(load(logits + start, some), _mm512_set1_ps(largest));
        const at::vec::Vectorized<float> scaled = _mm512_div_ps(below, _mm512_set1_ps(temperature));
        return _mm512_maskz_mov_ps(some, scaled.exp());
    }

    double mass_of_block(int64_t start) const {
        __m512d sum = _mm512_setzero_pd();
        for (int64_t place = start; place < std::min(start + BLOCK, size); place += 16) {
            const __m512 sixteen = masses(place);
            const __m256 high = _mm512_extractf32x8_ps(sixteen, 1);
            sum = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(sixteen)));
            sum = _mm512_add_pd(sum, _mm512_cvtps_pd(high));
        }
        return _mm512_reduce_add_pd(sum);
    }

    // The first token at which the cumulative mass exceeds uniform times the whole; -1, which is
    // NO_TOKEN, where the logits describe no distribution.
    int64_t token(double uniform) const {
        std::vector<double> until;  // the end of each block, the mass so far
        until.reserve((size + BLOCK - 1) / BLOCK);
        double mass = 0;
        for (int64_t start = 0; start < size; start += BLOCK) {
            until.push_back(mass += mass_of_block(start));
        }
        // Neither holds for NaN. The largest logit has mass 1, or NaN if it is infinite.
        if (!(mass > 0 && mass < std::numeric_limits<double>::infinity())) return -1;
        const double goal = uniform * mass;
        auto block = std::upper_bound(until.begin(), until.end(), goal);
        // Just below 1, the product can round to the whole: the last block with mass is meant.
        if (block == until.end()) block = std::lower_bound(until.begin(), until.end(), mass);
        const double before = block == until.begin() ? 0 : block[-1];
        return token_of_block((block - until.begin()) * BLOCK, before, goal);
    }

    int64_t token_of_block(int64_t start, double mass, double goal) const {
        int64_t last = start;  // with mass: sums in another order may fall short of the block's
        for (int64_t place = start; place < std::min(start + BLOCK, size); place += 16) {
            alignas(64) float sixteen[16];
            _mm512_store_ps(sixteen, masses(place));
            for (int64_t i = 0; i < 16; ++i) {
                if (sixteen[i] == 0) continue;
                last = place + i;
                mass += sixteen[i];
                if (mass > goal) return last;
            }
        }
        return last;
    }
};

// tokens [rows] of logits [rows, size], by uniform [rows]
template <typename logit_t, typename temperature_t, typename uniform_t>
void draw(const logit_t* logits, const temperature_t* temperature, const uniform_t* uniform,
          int64_t* tokens, int64_t rows, int64_t size, int threads) {
    #pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; ++r) {
        const Row<logit_t> row(logits + r * size, size, *temperature);
        tokens[r] = row.token(uniform[r]);
    }
}
}  // namespace
#endif
