#ifndef DRAFTHEAD_DRAW
#define DRAFTHEAD_DRAW
#include "common.h"
#include <cmath>
#include <vector>

namespace {
// See `arrival_times` and `race` in heads/sampling.py.
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, MIX_1 = 0xBF58476D1CE4E5B9,
                   MIX_2 = 0x94D049BB133111EB;

inline float uniform(uint64_t key, int64_t token) {
    uint64_t bits = (key + uint64_t(token) + 1) * GOLDEN;
    bits = (bits ^ (bits >> 30)) * MIX_1;
    bits = (bits ^ (bits >> 27)) * MIX_2;
    bits ^= bits >> 31;
    return float(int64_t(bits >> 1)) * 0x1p-63f + 0x1p-64f;
}

// Those of eight tokens; `bits` is that of the scalar version before it is mixed.
inline __m256 uniforms(__m512i bits) {
    bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 30));
    bits = _mm512_mullo_epi64(bits, _mm512_set1_epi64(int64_t(MIX_1)));
    bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 27));
    bits = _mm512_mullo_epi64(bits, _mm512_set1_epi64(int64_t(MIX_2)));
    bits = _mm512_xor_si512(bits, _mm512_srli_epi64(bits, 31));
    const __m256 numbers = _mm512_cvtepi64_ps(_mm512_srli_epi64(bits, 1));
    return _mm256_add_ps(_mm256_mul_ps(numbers, _mm256_set1_ps(0x1p-63f)),
                         _mm256_set1_ps(0x1p-64f));
}

// The token that is fastest so far.
struct Race {
    float speed = 0;
    int64_t token = -1;

    void enter(int64_t other, float mass, float uniform) {
        const float time = -std::log1p(-std::min(uniform, 1 - 0x1p-24f));
        if (mass / time > speed) speed = mass / time, token = other;
    }
};

struct Candidate {
    float logit, mass;
    int64_t token;
};

struct Settings {
    float temperature;
    int64_t top_k;
    float top_p, min_p;

    explicit Settings(const float* four)
        : temperature(four[0]), top_k(four[1]), top_p(four[2]), min_p(four[3]) {}
};

// The distribution of a token: logits and settings.
template <typename logit_t>
struct Row {
    const logit_t* logits;
    int64_t size;
    Settings settings;
    std::vector<float>& masses;  // exp((logit - largest) / temperature), 0 after the last token
    double total = 0;            // NaN where a logit is NaN, or the largest infinite

    Row(const logit_t* logits, int64_t size, const Settings& settings, std::vector<float>& masses)
        : logits(logits), size(size), settings(settings), masses(masses) {
        __m512 most = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
        for (int64_t start = 0; start < size; start += 16) {
            const auto some = first(size - start);
            most = _mm512_mask_max_ps(most, some, most, load(logits + start, some));
        }
        const __m512 largest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        const __m512 temperature = _mm512_set1_ps(settings.temperature);
        __m512d low = _mm512_setzero_pd(), high = low;
        masses.resize((size + 15) / 16 * 16);
        for (int64_t start = 0; start < size; start += 16) {
            const auto some = first(size - start);
            const __m512 below = _mm512_sub_ps(load(logits + start, some), largest);
            const at::vec::Vectorized<float> scaled = _mm512_div_ps(below, temperature);
            const __m512 mass = _mm512_maskz_mov_ps(some, scaled.exp());
            _mm512_storeu_ps(&masses[start], mass);
            low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(mass)));
            high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(mass, 1)));
        }
        total = _mm512_reduce_add_pd(_mm512_add_pd(low, high));
    }

    // The token that wins the race; -1, which is NO_TOKEN, where the logits describe no
    // distribution.
    int64_t token(uint64_t key) const {
        // Neither holds for NaN. The largest logit has mass 1, or NaN if it is infinite.
        if (!(total > 0 && total < std::numeric_limits<double>::infinity())) return -1;
        if (settings.top_k < size || settings.top_p < 1 || settings.min_p > 0) {
            Race race;
            for (const Candidate& one : kept()) {
                race.enter(one.token, one.mass, uniform(key, one.token));
            }
            return race.token;
        }
        return winner(key);
    }

    // Of all tokens.
    int64_t winner(uint64_t key) const {
        Race race;
        const __m512i step = _mm512_set1_epi64(int64_t(8 * GOLDEN));
        const __m512i numbers = _mm512_set_epi64(8, 7, 6, 5, 4, 3, 2, 1);
        __m512i bits = _mm512_add_epi64(
            _mm512_set1_epi64(int64_t(key * GOLDEN)),
            _mm512_mullo_epi64(numbers, _mm512_set1_epi64(int64_t(GOLDEN))));
        for (int64_t start = 0; start < size; start += 8, bits = _mm512_add_epi64(bits, step)) {
            const __m256 mass = _mm256_loadu_ps(&masses[start]), u = uniforms(bits);
            // No time is shorter than its uniform number.
            const __m256 bound = _mm256_mul_ps(u, _mm256_set1_ps(race.speed));
            unsigned faster = _mm256_cmp_ps_mask(mass, bound, _CMP_GT_OQ);
            if (!faster) continue;
            alignas(32) float eight[8];
            _mm256_store_ps(eight, u);
            for (; faster; faster &= faster - 1) {
                const int64_t i = __builtin_ctz(faster);
                race.enter(start + i, masses[start + i], eight[i]);
            }
        }
        return race.token;
    }

    // The tokens that top-k, then top-p and then min-p leave; see `kept_of_sorted`.
    std::vector<Candidate> kept() const {
        const bool has_top_k = settings.top_k < size;
        std::vector<Candidate> best = candidates();
        // Of equals the first come first, see `nucleus`.
        std::sort(best.begin(), best.end(), [](const Candidate& a, const Candidate& b) {
            return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
        });
        double whole = total, above = 0;
        if (has_top_k) {
            auto end = best.begin() + std::min<int64_t>(settings.top_k, best.size());
            while (end != best.end() && end->logit == end[-1].logit) ++end;
            best.erase(end, best.end());
            whole = 0;
            for (const Candidate& one : best) whole += one.mass;
        }
        int64_t count = 0;
        for (; count < int64_t(best.size()); above += best[count++].mass) {
            if (above >= settings.top_p * whole || best[count].mass < settings.min_p) break;
        }
        best.resize(count);
        return best;
    }

    // All tokens above a bound that lies below the last one kept.
    std::vector<Candidate> candidates() const {
        float bound = 1;  // the mass of the largest
        while (bound > 0 && !reaches(bound)) bound /= 2;
        std::vector<Candidate> found;
        for (int64_t start = 0; start < size; start += 16) {
            unsigned above = within(start, bound);
            for (; above; above &= above - 1) {
                const int64_t token = start + __builtin_ctz(above);
                found.push_back({float(logits[token]), masses[token], token});
            }
        }
        return found;
    }

    // Which of sixteen tokens have at least the mass `bound`.
    __mmask16 within(int64_t start, float bound) const {
        const __m512 sixteen = _mm512_loadu_ps(&masses[start]);
        return _mm512_mask_cmp_ps_mask(first(size - start), sixteen, _mm512_set1_ps(bound),
                                       _CMP_GE_OQ);
    }

    // Whether no filter keeps a token of less mass than `bound`.
    bool reaches(float bound) const {
        const bool has_top_k = settings.top_k < size;
        if (!has_top_k && settings.top_p >= 1) return bound <= settings.min_p;
        int64_t count = 0;
        __m512 mass = _mm512_setzero_ps();
        for (int64_t start = 0; start < size; start += 16) {
            const auto some = within(start, bound);
            count += __builtin_popcount(some);
            mass = _mm512_mask_add_ps(mass, some, mass, _mm512_loadu_ps(&masses[start]));
        }
        if (has_top_k) return count >= settings.top_k;
        // Rounding of the sum must not end the search too early.
        return _mm512_reduce_add_ps(mass) > settings.top_p * total * (1 + 1e-4);
    }
};

// Of trees [rows, nodes] the target's own token after each node on the accepted path, -1 elsewhere;
// logits [rows, nodes, size].
template <typename logit_t>
void draw(const logit_t* logits, const int64_t* tree, const int64_t* parents, const int64_t* keys,
          const float* settings, int64_t* tokens, int64_t rows, int64_t nodes, int64_t size,
          int threads) {
    #pragma omp parallel for num_threads(threads) schedule(static) if (rows > 1)
    for (int64_t r = 0; r < rows; ++r) {
        static thread_local std::vector<float> masses;
        const int64_t start = r * nodes;
        std::fill_n(tokens + start, nodes, -1);
        for (int64_t node = 0; node < nodes;) {
            const Row<logit_t> row(logits + (start + node) * size, size, Settings(settings),
                                   masses);
            const int64_t token = tokens[start + node] = row.token(keys[start + node]);
            int64_t child = token < 0 ? nodes : 1;
            while (child < nodes &&
                   (parents[start + child] != node || tree[start + child] != token)) ++child;
            node = child;
        }
    }
}
}  // namespace
#endif
