#ifndef DRAFTHEAD_DRAW
#define DRAFTHEAD_DRAW
#include "masses.h"
#include "race.h"
#include <algorithm>
#include <limits>
#include <vector>

namespace {
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
        total = weigh_all(logits, size, settings.temperature, masses);
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
        return winner(masses, size, key);
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
        for (int64_t start = 0; start < size; start += LANES) {
            unsigned above = within(masses, size, start, bound);
            for (; above; above &= above - 1) {
                const int64_t token = start + __builtin_ctz(above);
                found.push_back({float(logits[token]), masses[token], token});
            }
        }
        return found;
    }

    // Whether no filter keeps a token of less mass than `bound`.
    bool reaches(float bound) const {
        const bool has_top_k = settings.top_k < size;
        if (!has_top_k && settings.top_p >= 1) return bound <= settings.min_p;
        const Within kept = all_within(masses, size, bound);
        if (has_top_k) return kept.count >= settings.top_k;
        // Rounding of the sum must not end the search too early.
        return kept.mass > settings.top_p * total * (1 + 1e-4);
    }
};

// Of trees [rows, nodes] the target's own token after each node on the accepted path, -1 elsewhere;
// logits [rows, nodes, size], settings [rows, 4].
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
            const Row<logit_t> row(logits + (start + node) * size, size, Settings(settings + 4 * r),
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
