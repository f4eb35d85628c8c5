// What the expert-parallel collectives share: where rows land at the peers, how they get there, and the checks on
// routes.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ep.h"
#include "rounds.h"

namespace cam {

inline constexpr int64_t kGrain = 8;  // tokens below which splitting a loop over threads costs more than it gains

// Where a peer may write or read in the sender's window: segment offsets.
struct Landing {
    uint64_t x = 0, scales = 0, source = 0, topk_idx = 0, weights = 0;
    int64_t rows = 0;
    uint64_t dot_rows = 0;  // what the sender's rows are multiplied with (backward of combine)
};

// The first round of an operation whose sizes all ranks know: what is called, and where each rank's memory lies.
struct OpenHead {
    Signature signature;
    MemoryStatus memory;
    Landing landing;
};

// Runs that first round. Returns where each peer's memory lies; lack of it on any rank fails on all.
inline std::vector<Landing> open_round(Collective& collective, const char* phase, const Signature& signature,
                                       const MemoryStatus& memory, const Landing& own) {
    std::vector<Landing> landings(collective.endpoint().world());
    std::vector<int64_t> nothing;
    const auto no_table = [&](int) -> auto& { return nothing; };
    MemoryVerdict verdict;
    exchange_tables<OpenHead>(
        collective, phase, 0, [&](int) { return OpenHead{signature, memory, own}; },
        [&](int peer, const OpenHead& head) {
            collective.compare_signature(signature, peer, head.signature);
            verdict.see(peer, head.memory);
            landings[peer] = head.landing;
        },
        [&] { verdict.settle(collective); }, no_table, no_table);
    return landings;
}

template <class T>
T* at(std::byte* base, uint64_t offset) {
    return reinterpret_cast<T*>(base + offset);
}

// Quantises a token's row once, if asked, and copies it to its rows at the peers.
class RowSender {
public:
    RowSender(Endpoint& endpoint, const Rows& x, Quant quant, const std::vector<Landing>& landings, int64_t sent_rows)
        : endpoint_(endpoint), rows_(endpoint.rows()), x_(x), quant_(quant), landings_(landings) {
        row_bytes_ = quant == Quant::none ? x.bytes() : x.hidden;
        scale_bytes_ = quant == Quant::none ? x.scale_bytes : quant_scale_bytes(quant, x.hidden);
        nontemporal_ = static_cast<size_t>(sent_rows * row_bytes_) >= endpoint.nontemporal_threshold();
        if (quant != Quant::none) values_.resize(row_bytes_);
        scales_.resize(scale_bytes_ / sizeof(float) + 1);
    }

    void load(int64_t token) {
        row_ = x_.data + token * x_.stride;
        scale_ = x_.scales ? x_.scales + token * scale_bytes_ : reinterpret_cast<const std::byte*>(scales_.data());
        if (quant_ == Quant::none) return;
        if (quant_ == Quant::int8) {
            scales_[0] = rows_.quant_int8(reinterpret_cast<int8_t*>(values_.data()), row_, x_.hidden, x_.dtype);
        } else {
            rows_.quant_fp8(reinterpret_cast<uint8_t*>(values_.data()), scales_.data(), row_, x_.hidden, x_.dtype);
        }
        row_ = values_.data();
    }

    void send(int peer, int64_t row) {
        std::byte* base = endpoint_.peer_base(peer);
        rows_.copy(base + row_offset(landings_[peer].x, row, row_bytes_), row_, row_bytes_, nontemporal_);
        if (scale_bytes_) {
            std::memcpy(base + row_offset(landings_[peer].scales, row, scale_bytes_), scale_, scale_bytes_);
        }
    }

    void send_scaled(int peer, int64_t row, float weight) {
        rows_.scale(endpoint_.peer_base(peer) + row_offset(landings_[peer].x, row, row_bytes_), row_, weight, x_.hidden,
                    x_.dtype, nontemporal_);
    }

    int64_t row_bytes() const { return row_bytes_; }
    int64_t scale_bytes() const { return scale_bytes_; }
    const std::byte* row() const { return row_; }

private:
    Endpoint& endpoint_;
    const RowKernels& rows_;
    Rows x_;
    Quant quant_;
    const std::vector<Landing>& landings_;
    int64_t row_bytes_, scale_bytes_;
    bool nontemporal_;
    std::vector<std::byte> values_;
    std::vector<float> scales_;
    const std::byte *row_ = nullptr, *scale_ = nullptr;
};

// In the rank layout the k of one token that go to one rank share a row: only the first of them counts.
inline bool first_of_its_row(const int64_t* route, int64_t k) {
    return std::find(route, route + k, route[k]) == route + k;
}

inline int64_t rows_sent(const int64_t* route, int64_t tokens, int64_t topk) {
    int64_t rows = 0;
    for (int64_t token = 0; token < tokens; ++token, route += topk) {
        for (int64_t k = 0; k < topk; ++k) rows += route[k] >= 0 && first_of_its_row(route, k);
    }
    return rows;
}

// The route comes back from the caller: refuse one that does not fit the memory that the peers granted.
inline void check_route(const int64_t* route, int64_t entries, const std::vector<Landing>& landings) {
    for (int64_t i = 0; i < entries; ++i) {
        if (route[i] < 0) continue;
        const auto peer = static_cast<size_t>(route_rank(route[i]));
        if (peer < landings.size() && route_row(route[i]) < landings[peer].rows) continue;
        bad_input("the handle routes entry " + std::to_string(i) + " to row " + std::to_string(route_row(route[i])) +
                  " of rank " + std::to_string(peer) +
                  ", which that rank does not have: it is not the handle of this "
                  "dispatch");
    }
}

// The segment offset of the caller's memory, which is copied into the window first when it lies elsewhere.
inline uint64_t in_window(Endpoint& endpoint, const void* data, size_t bytes, std::shared_ptr<Block>& staged) {
    if (bytes == 0) return 0;
    const int64_t offset = endpoint.arena().offset_of(data, bytes);
    if (offset >= 0) return static_cast<uint64_t>(offset);
    staged = endpoint.arena().allocate(bytes);
    const bool nontemporal = bytes >= endpoint.nontemporal_threshold();
    constexpr int64_t kPiece = 64 * 1024;
    const auto size = static_cast<int64_t>(bytes);
    endpoint.pool().parallel_for((size + kPiece - 1) / kPiece, 4, [&](int64_t begin, int64_t end) {
        const int64_t first = begin * kPiece, last = std::min(size, end * kPiece);
        endpoint.rows().copy(staged->data() + first, static_cast<const std::byte*>(data) + first, last - first,
                             nontemporal);
        endpoint.rows().fence();
    });
    return staged->offset();
}

}  // namespace cam
