// Expert parallelism over shared windows: four collectives.
//
//   dispatch   counts round -> grants round -> rows written to their final place -> completion round
//   combine    offsets round -> rows read where they lie and summed -> completion round
//   scatter    like dispatch along a known route: repeated dispatch, and the backward of combine
//   route      rebuilds a route from the source triplets of the received rows (the stateless UMDK contract)
//
// The receiver decides where rows go: it learns how many rows each source has for each of its experts, takes exactly
// the memory it needs from its arena, and grants each source the first row per expert. Senders write rows straight
// into the result. Lack of memory is part of the grant, so all ranks fail alike before any row is sent.
#pragma once

#include <cstdint>
#include <memory>

#include "endpoint.h"
#include "ep_layout.h"

namespace cam {

enum class Quant : int64_t { none = 0, int8 = 1, fp8 = 2 };

// Rows of the caller, anywhere in its memory.
struct Rows {
    const std::byte* data = nullptr;
    int64_t stride = 0;  // bytes from row to row
    int64_t hidden = 0;  // elements; bytes for opaque rows
    Dtype dtype = Dtype::bfloat16;
    const std::byte* scales = nullptr;  // opaque rows: [tokens, scale_bytes], forwarded as they are
    int64_t scale_bytes = 0;

    int64_t bytes() const { return hidden * static_cast<int64_t>(element_size(dtype)); }
};

struct DispatchCall {
    Rows x;
    Selection selection;
    const float* weights = nullptr;  // [tokens, topk]
    int64_t num_experts = 0;
    Layout layout = Layout::expert;
    Quant quant = Quant::none;
    int64_t alignment = 1;
    int64_t max_tokens = -1;
    double timeout_s = 30;
};

struct Dispatched {
    int64_t rows = 0, local_experts = 0, row_bytes = 0, scale_bytes = 0;
    std::shared_ptr<Block> x, table;
    std::byte* scales = nullptr;       // [rows, scale_bytes]
    int32_t* source = nullptr;         // [rows, 3]
    int64_t* topk_idx = nullptr;       // [rows, topk], rank layout
    float* weights = nullptr;          // [rows] or [rows, topk]
    int64_t* expert_counts = nullptr;  // [local_experts]
    int64_t* source_counts = nullptr;  // [local_experts, world] or [1, world]
    int64_t* route = nullptr;          // [tokens, topk]
};

Dispatched dispatch(Endpoint& endpoint, const DispatchCall& call);

struct CombineCall {
    const std::byte* y = nullptr;  // [rows, hidden], contiguous; in the window: read in place, else copied there first
    int64_t rows = 0, hidden = 0;
    Dtype dtype = Dtype::bfloat16;
    Layout layout = Layout::expert;
    const int64_t* route = nullptr;  // [tokens, topk]
    int64_t tokens = 0, topk = 0;
    const float* weights = nullptr;     // [tokens, topk] or null
    const std::byte* bias = nullptr;    // [tokens, hidden] or null
    const float* row_values = nullptr;  // [rows] or [rows, topk]: sent back to (token, k)
    double timeout_s = 30;
};

struct Combined {
    std::shared_ptr<Block> out;     // [tokens, hidden]
    std::shared_ptr<Block> values;  // [tokens, topk] float, when row_values were given
};

Combined combine(Endpoint& endpoint, const CombineCall& call);

struct ScatterCall {
    Rows x;  // hidden 0: no rows, only token_values
    Quant quant = Quant::none;
    Layout layout = Layout::expert;
    const int64_t* route = nullptr;
    int64_t tokens = 0, topk = 0;
    int64_t rows = 0;  // what this rank receives
    const int64_t* expert_counts = nullptr;
    int64_t local_experts = 0, alignment = 1;
    const float* weights = nullptr;       // [tokens, topk]: row(t, k) = round(weight * x[t])
    const std::byte* dot_with = nullptr;  // this rank's [rows, hidden]: dots[t, k] = <x[t], peer's row(t, k)>
    const float* token_values = nullptr;  // [tokens, topk]: sent along to the rows
    double timeout_s = 30;
};

struct Scattered {
    std::shared_ptr<Block> x, scales, dots, row_values;
};

Scattered scatter(Endpoint& endpoint, const ScatterCall& call);

struct RouteCall {
    const int32_t* source = nullptr;  // [rows, 3]
    int64_t rows = 0, tokens = 0, topk = 0;
    double timeout_s = 30;
};

std::shared_ptr<Block> route(Endpoint& endpoint, const RouteCall& call);  // [tokens, topk] int64

// Bytes per row of scales that `quant` produces.
inline int64_t quant_scale_bytes(Quant quant, int64_t hidden) {
    switch (quant) {
        case Quant::none:
            return 0;
        case Quant::int8:
            return sizeof(float);
        case Quant::fp8:
            return (hidden + kFp8Group - 1) / kFp8Group * static_cast<int64_t>(sizeof(float));
    }
    return 0;
}

}  // namespace cam
