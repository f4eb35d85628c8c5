// Where the rows of a dispatch go: which rank owns which expert, and at which row each source's tokens start.
// Counts and indices only, no addresses and no waiting, so it is tested alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace cam {

enum class Layout : int64_t { expert = 0, rank = 1 };

// Contiguous experts per rank; the first (total % world) ranks own one more.
class ExpertMap {
public:
    ExpertMap(int64_t total, int world);
    int64_t total() const { return total_; }
    int64_t begin(int rank) const { return first_[rank]; }
    int64_t count(int rank) const { return first_[rank + 1] - first_[rank]; }
    int64_t longest() const { return count(0); }
    int owner(int64_t expert) const { return owner_[expert]; }

private:
    int64_t total_;
    std::vector<int64_t> first_;
    std::vector<int32_t> owner_;
};

// A (rank, row) pair in 64 bits: what the caller's opaque handle stores for each (token, k). -1 = not routed.
inline constexpr int kRowBits = 40;
inline int64_t pack_route(int rank, int64_t row) { return static_cast<int64_t>(rank) << kRowBits | row; }
inline int route_rank(int64_t route) { return static_cast<int>(route >> kRowBits); }
inline int64_t route_row(int64_t route) { return route & ((int64_t{1} << kRowBits) - 1); }

inline uint64_t row_offset(uint64_t base, int64_t row, int64_t row_bytes) {
    return base + static_cast<uint64_t>(row) * static_cast<uint64_t>(row_bytes);
}

// The caller's selections. Masked tokens and entries of -1 select nothing.
struct Selection {
    int64_t tokens = 0, topk = 0;
    const void* topk_idx = nullptr;  // [tokens, topk], int64 or int32, contiguous
    bool wide = true;
    const uint8_t* active = nullptr;  // [tokens] or null

    int64_t at(int64_t token, int64_t k) const {
        if (active && !active[token]) return -1;
        const int64_t index = token * topk + k;
        return wide ? static_cast<const int64_t*>(topk_idx)[index] : static_cast<const int32_t*>(topk_idx)[index];
    }
};

// What one rank has for every other: rows per expert (expert layout), or rows and selections (rank layout).
struct SendCounts {
    std::vector<int64_t> per_expert;  // [num_experts] selections
    std::vector<int64_t> per_rank;    // [world] rows, rank layout only
};
// Throws Error(bad_input) for an index outside [-1, num_experts).
SendCounts count_selections(const Selection& selection, const ExpertMap& experts, int world, Layout layout);

// What a receiver decides: its rows, and where each source starts.
struct Placement {
    int64_t rows = 0;
    std::vector<int64_t> expert_counts;        // [local experts]
    std::vector<int64_t> source_counts;        // expert layout [local experts, world]; rank layout [world]
    std::vector<std::vector<int64_t>> starts;  // [world] of [local experts] (expert layout) or of [1]
};
// received[source] = that source's per_expert counts of this rank's experts, preceded by its rows in the rank layout.
Placement place(const std::vector<std::vector<int64_t>>& received, int64_t local_experts, Layout layout,
                int64_t alignment);

// Calls body(first, last) for each expert's padding rows.
template <class Body>
void for_padding(std::span<const int64_t> expert_counts, int64_t alignment, Body&& body) {
    int64_t row = 0;
    for (const int64_t count : expert_counts) {
        const int64_t padded = (count + alignment - 1) / alignment * alignment;
        if (padded > count) body(row + count, row + padded);
        row += padded;
    }
}

// route[token, k] from the starts that the receivers granted: [world] of [experts of that rank] or of [1].
void assign_routes(const Selection& selection, const ExpertMap& experts, Layout layout,
                   const std::vector<std::vector<int64_t>>& granted, int64_t* route);

}  // namespace cam
