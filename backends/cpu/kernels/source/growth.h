// Dynamic trees of drafts, one row at a time: what `heads/growing/dynamic.py` says in operations.
#ifndef DRAFTHEAD_GROWTH
#define DRAFTHEAD_GROWTH
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

namespace {
// The numbers of the `count` largest of scores [size], of equals the first.
inline std::vector<int64_t> best_of(const float* scores, int64_t size, int64_t count) {
    std::vector<int64_t> order(size);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](auto a, auto b) {
        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    });
    order.resize(count);
    return order;
}

// A log-probability as what a path's score changes by: never above 0, and no NaN.
inline float as_value(float log_prob) {
    return std::isnan(log_prob) ? -std::numeric_limits<float>::infinity() : std::min(log_prob, 0.0f);
}

// Of candidates [size] the tree of the `nodes` best: see `Candidates.tables`.
inline void best_tree(const float* scores, const int64_t* tokens, const int64_t* parents,
                      int64_t size, int64_t nodes, int64_t* its_tokens, int64_t* above,
                      int64_t* depths, bool* ancestors, float* its_scores) {
    std::vector<int64_t> chosen = best_of(scores, size, nodes), node(size, 0);
    std::sort(chosen.begin(), chosen.end());
    for (int64_t n = 0; n < nodes; ++n) {
        const int64_t number = chosen[n];
        node[number] = n;
        above[n] = n ? node[std::max<int64_t>(parents[number], 0)] : -1;
        depths[n] = n ? depths[above[n]] + 1 : 0;
        its_tokens[n] = tokens[number];
        its_scores[n] = scores[number];
        bool* row = ancestors + n * nodes;
        if (n) std::copy_n(ancestors + above[n] * nodes, nodes, row);
        else std::fill_n(row, nodes, false);
        row[n] = true;
    }
}
}  // namespace
#endif
