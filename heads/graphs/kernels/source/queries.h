#ifndef DRAFTHEAD_QUERIES
#define DRAFTHEAD_QUERIES

namespace {
constexpr int MOST_QUERIES = 16;  // of one head of keys, worked on together

// Queries that share a head of keys, their masks, and where their outputs go.
template <int D, typename mask_t>
struct Queries {
    alignas(64) at::BFloat16 query[MOST_QUERIES * D];
    const mask_t* mask[MOST_QUERIES];
    at::BFloat16* output[MOST_QUERIES];
};
}  // namespace
#endif
