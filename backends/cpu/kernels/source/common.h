// What several kernels use. operations.cpp includes torch's headers before these files: they bring
// the processor's intrinsics, at::BFloat16, at::vec::Vectorized and c10::ForcedUnroll.
#ifndef DRAFTHEAD_COMMON  // one file may hold several kernels
#define DRAFTHEAD_COMMON
#include <algorithm>
#include <cstdint>
#include <type_traits>

#define INLINE __attribute__((always_inline))  // for lambdas that keep sums in registers

namespace {
// f(number of rows as a constant), for 1 to MOST rows
template <int MOST, typename F>
inline void with_rows(int64_t rows, const F& f) {
    if constexpr (MOST > 0) {
        if (rows == MOST) f(std::integral_constant<int, MOST>{});
        else with_rows<MOST - 1>(rows, f);
    }
}

// Rows of each group but the last, where groups have at most `most` rows and nearly the same size:
// 13 rows in groups of at most 8 are 7 and 6.
inline int64_t group_size(int64_t rows, int64_t most) {
    const int64_t groups = (rows + most - 1) / most;
    return (rows + groups - 1) / groups;
}

// f(first row, number of rows as a constant) for groups of at most MOST rows, see `group_size`
template <int MOST, typename F>
inline void in_groups(int64_t rows, const F& f) {
    const int64_t group = group_size(rows, MOST);
    for (int64_t r = 0; r < rows; r += group) {
        with_rows<MOST>(std::min(group, rows - r), [&](auto count) { f(r, count); });
    }
}
}  // namespace
#endif
