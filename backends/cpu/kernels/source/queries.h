#ifndef DRAFTHEAD_QUERIES
#define DRAFTHEAD_QUERIES
#include "bfloat16_rows.h"

namespace {
// A score so far below the largest is that of a hidden column, to which a mask has added the least
// number of its type. Where all columns are hidden, none is.
constexpr float HIDDEN = -1e38f;

// Up to MOST_QUERIES queries that share a head of keys, their masks, and where their outputs go.
template <int D, typename mask_t>
struct Queries {
    alignas(64) number_t query[MOST_QUERIES * D];
    const mask_t* mask[MOST_QUERIES];
    at::BFloat16* output[MOST_QUERIES];
};
}  // namespace
#endif
