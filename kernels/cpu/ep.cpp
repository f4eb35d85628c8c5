#include "ep.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>

namespace cam {
namespace {

constexpr int64_t kGrain = 8;  // tokens below which splitting a loop over threads costs more than it gains

// Whether this rank could get the memory it needs. Part of its message, so that all ranks fail alike.
struct MemoryStatus {
    int64_t failed = 0, requested = 0, allocated = 0, limit = 0;
};

// Where a peer may write or read in the sender's window: segment offsets.
struct Landing {
    uint64_t x = 0, scales = 0, source = 0, topk_idx = 0, weights = 0;
    int64_t rows = 0;
};

// Runs `allocate` and reports lack of memory instead of throwing, because this rank must still answer its peers.
template <class Allocate>
MemoryStatus try_allocate(Allocate&& allocate) {
    try {
        allocate();
        return {};
    } catch (const Error& error) {
        if (error.failure != Failure::out_of_memory) throw;
        return {1, error.requested, error.allocated, error.limit};
    }
}

// Raises on every rank alike if any rank has no memory.
class MemoryVerdict {
public:
    void see(int peer, const MemoryStatus& status) {
        if (status.failed && rank_ < 0) {
            rank_ = peer;
            status_ = status;
        }
    }
    void settle(Collective& call) const {
        if (rank_ < 0) return;
        Error error(Failure::out_of_memory, "a rank's window is full");
        error.ranks = {rank_};
        error.requested = status_.requested;
        error.allocated = status_.allocated;
        error.limit = status_.limit;
        call.fail_agreed(error);
    }

private:
    int rank_ = -1;
    MemoryStatus status_;
};

// A round in which each rank sends every peer a head and a table of int64. Tables that exceed a mailbox take more
// rounds; `longest` is the longest table of any pair, which every rank can compute once the heads agree.
template <class Head, class MakeHead, class SeeHead, class Settle, class Outgoing, class Incoming>
void exchange_tables(Collective& call, const char* phase, int64_t longest, MakeHead&& make_head, SeeHead&& see_head,
                     Settle&& settle, Outgoing&& outgoing, Incoming&& incoming) {
    const int world = call.endpoint().world();
    constexpr int64_t kPiece = (kSlotCapacity - sizeof(Head)) / sizeof(int64_t);
    for (int64_t begin = 0; begin == 0 || begin < longest; begin += kPiece) {
        const auto piece = [&](auto& table) {
            const auto size = static_cast<int64_t>(table.size());
            const int64_t first = std::min(begin, size);
            return std::pair(table.data() + first, static_cast<size_t>(std::min(kPiece, size - first)));
        };
        call.begin(phase);
        for (int peer = 0; peer < world; ++peer) {
            Writer message = call.outgoing(peer);
            message.put<Head>(make_head(peer));
            const auto [values, count] = piece(outgoing(peer));
            message.put_array(values, count);
            call.set_length(peer, message);
        }
        call.finish();
        for (int peer = 0; peer < world; ++peer) see_head(peer, call.incoming(peer).template get<Head>());
        settle();
        for (int peer = 0; peer < world; ++peer) {
            Reader message = call.incoming(peer);
            message.template get<Head>();
            const auto [values, count] = piece(incoming(peer));
            message.get_array(values, count);
        }
    }
}

// Hands out parts of one block, each on its own cache line.
class Carver {
public:
    template <class T>
    size_t add(int64_t count) {
        const size_t at = used_;
        used_ += (static_cast<size_t>(count) * sizeof(T) + kCacheLine - 1) / kCacheLine * kCacheLine;
        return at;
    }
    size_t total() const { return used_; }

private:
    size_t used_ = 0;
};

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
bool first_of_its_row(const int64_t* route, int64_t k) { return std::find(route, route + k, route[k]) == route + k; }

int64_t rows_sent(const int64_t* route, int64_t tokens, int64_t topk) {
    int64_t rows = 0;
    for (int64_t token = 0; token < tokens; ++token, route += topk) {
        for (int64_t k = 0; k < topk; ++k) rows += route[k] >= 0 && first_of_its_row(route, k);
    }
    return rows;
}

// The route comes back from the caller: refuse one that does not fit the memory that the peers granted.
void check_route(const int64_t* route, int64_t entries, const std::vector<Landing>& landings) {
    for (int64_t i = 0; i < entries; ++i) {
        if (route[i] < 0) continue;
        const auto peer = static_cast<size_t>(route_rank(route[i]));
        if (peer < landings.size() && route_row(route[i]) < landings[peer].rows) continue;
        bad_input("the handle routes entry " + std::to_string(i) + " to row " + std::to_string(route_row(route[i])) +
                  " of rank " + std::to_string(peer) + ", which that rank does not have: it is not the handle of this "
                  "dispatch");
    }
}

struct CountsHead {
    Signature signature;
};

struct GrantHead {
    MemoryStatus memory;
    Landing landing;
};

struct OpenHead {
    Signature signature;
    MemoryStatus memory;
    Landing landing;
};

void carve_dispatch_table(Endpoint& endpoint, const DispatchCall& call, const Placement& placement, Dispatched& out,
                          Landing& landing) {
    const int64_t topk = call.selection.topk, weight_width = call.layout == Layout::rank ? topk : 1;
    Carver carve;
    const size_t counts = carve.add<int64_t>(out.local_experts);
    const size_t source_counts = carve.add<int64_t>(static_cast<int64_t>(placement.source_counts.size()));
    const size_t route = carve.add<int64_t>(call.selection.tokens * topk);
    const size_t source = carve.add<int32_t>(out.rows * 3);
    const size_t scales = carve.add<std::byte>(out.rows * out.scale_bytes);
    const size_t weights = carve.add<float>(call.weights ? out.rows * weight_width : 0);
    const size_t topk_idx = carve.add<int64_t>(call.layout == Layout::rank ? out.rows * topk : 0);
    out.x = endpoint.arena().allocate(out.rows * out.row_bytes);
    out.table = endpoint.arena().allocate(carve.total());
    std::byte* base = out.table->data();
    out.expert_counts = at<int64_t>(base, counts);
    out.source_counts = at<int64_t>(base, source_counts);
    out.route = at<int64_t>(base, route);
    out.source = at<int32_t>(base, source);
    out.scales = base + scales;
    out.weights = call.weights ? at<float>(base, weights) : nullptr;
    out.topk_idx = call.layout == Layout::rank ? at<int64_t>(base, topk_idx) : nullptr;
    const uint64_t table = out.table->offset();
    landing = {out.x->offset(), table + scales, table + source, table + topk_idx, table + weights, out.rows};
    std::copy(placement.expert_counts.begin(), placement.expert_counts.end(), out.expert_counts);
    std::copy(placement.source_counts.begin(), placement.source_counts.end(), out.source_counts);
}

void clear_dispatch_padding(Endpoint& endpoint, const DispatchCall& call, const Placement& placement, Dispatched& out) {
    for_padding(placement.expert_counts, call.alignment, [&](int64_t first, int64_t last) {
        endpoint.rows().zero(out.x->data() + first * out.row_bytes, (last - first) * out.row_bytes);
        std::fill(out.source + first * 3, out.source + last * 3, -1);
        std::memset(out.scales + first * out.scale_bytes, 0, (last - first) * out.scale_bytes);
        if (out.weights) std::fill(out.weights + first, out.weights + last, 0.0f);
    });
}

// What travels beside a dispatched row: where it comes from, and its weights.
void send_row_facts(Endpoint& endpoint, const DispatchCall& call, const ExpertMap& experts, const Landing& landing,
                    int64_t token, int64_t k, int peer, int64_t row) {
    const int64_t topk = call.selection.topk;
    std::byte* base = endpoint.peer_base(peer);
    int32_t* source = at<int32_t>(base, landing.source) + row * 3;
    source[0] = endpoint.rank();
    source[1] = static_cast<int32_t>(token);
    source[2] = call.layout == Layout::expert ? static_cast<int32_t>(k) : -1;
    if (call.layout == Layout::expert) {
        if (call.weights) at<float>(base, landing.weights)[row] = call.weights[token * topk + k];
        return;
    }
    int64_t* indices = at<int64_t>(base, landing.topk_idx) + row * topk;
    float* weights = call.weights ? at<float>(base, landing.weights) + row * topk : nullptr;
    for (int64_t j = 0; j < topk; ++j) {
        const int64_t expert = call.selection.at(token, j);
        const bool local = expert >= 0 && experts.owner(expert) == peer;
        indices[j] = local ? expert - experts.begin(peer) : -1;
        if (weights) weights[j] = local ? call.weights[token * topk + j] : 0.0f;
    }
}

Signature dispatch_signature(const DispatchCall& call) {
    Signature signature;
    signature.value[Signature::layout] = static_cast<int64_t>(call.layout);
    signature.value[Signature::dtype] = static_cast<int64_t>(call.x.dtype);
    signature.value[Signature::hidden] = call.x.hidden;
    signature.value[Signature::topk] = call.selection.topk;
    signature.value[Signature::num_experts] = call.num_experts;
    signature.value[Signature::quant] = static_cast<int64_t>(call.quant);
    signature.value[Signature::alignment] = call.alignment;
    signature.value[Signature::max_tokens] = call.max_tokens;
    signature.value[Signature::scale_bytes] = call.x.scale_bytes;
    signature.value[Signature::weights] = call.weights != nullptr;
    return signature;
}

}  // namespace

Dispatched dispatch(Endpoint& endpoint, const DispatchCall& call) {
    if (call.max_tokens >= 0 && call.selection.tokens > call.max_tokens) {
        bad_input("dispatch got " + std::to_string(call.selection.tokens) + " tokens; this buffer allows " +
                  std::to_string(call.max_tokens) + " (knob: max_tokens)");
    }
    const int world = endpoint.world(), me = endpoint.rank();
    const ExpertMap experts(call.num_experts, world);
    const bool by_rank = call.layout == Layout::rank;
    return run_collective(endpoint, Operation::dispatch, call.timeout_s, [&](Collective& collective) {
        const SendCounts counts = count_selections(call.selection, experts, world, call.layout);
        const Signature signature = dispatch_signature(call);

        std::vector<std::vector<int64_t>> to_send(world), received(world);
        for (int peer = 0; peer < world; ++peer) {
            if (by_rank) to_send[peer].push_back(counts.per_rank[peer]);
            const auto first = counts.per_expert.begin() + experts.begin(peer);
            to_send[peer].insert(to_send[peer].end(), first, first + experts.count(peer));
            received[peer].resize(experts.count(me) + by_rank);
        }
        exchange_tables<CountsHead>(
            collective, "counts", experts.longest() + by_rank, [&](int) { return CountsHead{signature}; },
            [&](int peer, const CountsHead& head) { collective.compare_signature(signature, peer, head.signature); },
            [] {}, [&](int peer) -> auto& { return to_send[peer]; }, [&](int peer) -> auto& { return received[peer]; });

        Dispatched out;
        Placement placement = place(received, experts.count(me), call.layout, call.alignment);
        out.rows = placement.rows;
        out.local_experts = experts.count(me);
        out.row_bytes = call.quant == Quant::none ? call.x.bytes() : call.x.hidden;
        out.scale_bytes =
            call.quant == Quant::none ? call.x.scale_bytes : quant_scale_bytes(call.quant, call.x.hidden);
        Landing own;
        const MemoryStatus memory =
            try_allocate([&] { carve_dispatch_table(endpoint, call, placement, out, own); });
        if (!memory.failed) {
            collective.lend(out.x);
            collective.lend(out.table);
        }

        std::vector<Landing> landings(world);
        std::vector<std::vector<int64_t>> granted(world);
        for (int peer = 0; peer < world; ++peer) granted[peer].resize(by_rank ? 1 : experts.count(peer));
        MemoryVerdict verdict;
        exchange_tables<GrantHead>(
            collective, "grants", by_rank ? 1 : experts.longest(), [&](int) { return GrantHead{memory, own}; },
            [&](int peer, const GrantHead& head) {
                verdict.see(peer, head.memory);
                landings[peer] = head.landing;
            },
            [&] { verdict.settle(collective); }, [&](int peer) -> auto& { return placement.starts[peer]; },
            [&](int peer) -> auto& { return granted[peer]; });

        assign_routes(call.selection, experts, call.layout, granted, out.route);
        const int64_t tokens = call.selection.tokens, topk = call.selection.topk;
        const int64_t sent = rows_sent(out.route, tokens, topk);
        endpoint.pool().parallel_for(tokens, kGrain, [&](int64_t begin, int64_t end) {
            RowSender sender(endpoint, call.x, call.quant, landings, sent);
            for (int64_t token = begin; token < end; ++token) {
                const int64_t* route = out.route + token * topk;
                bool loaded = false;
                for (int64_t k = 0; k < topk; ++k) {
                    if (route[k] < 0 || (by_rank && !first_of_its_row(route, k))) continue;
                    if (!loaded) sender.load(token);
                    loaded = true;
                    const int peer = route_rank(route[k]);
                    sender.send(peer, route_row(route[k]));
                    send_row_facts(endpoint, call, experts, landings[peer], token, k, peer, route_row(route[k]));
                }
            }
            endpoint.rows().fence();
        });
        clear_dispatch_padding(endpoint, call, placement, out);
        collective.add_bytes(sent * (out.row_bytes + out.scale_bytes));
        collective.synchronise("rows");
        return out;
    });
}

namespace {

Signature combine_signature(const CombineCall& call) {
    Signature signature;
    signature.value[Signature::layout] = static_cast<int64_t>(call.layout);
    signature.value[Signature::dtype] = static_cast<int64_t>(call.dtype);
    signature.value[Signature::hidden] = call.hidden;
    signature.value[Signature::topk] = call.topk;
    signature.value[Signature::row_values] = call.row_values != nullptr;
    return signature;
}

// The segment offset of the caller's memory, which is copied into the window first when it lies elsewhere.
uint64_t in_window(Endpoint& endpoint, const void* data, size_t bytes, std::shared_ptr<Block>& staged) {
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

// The peers' rows of one token in the order in which they are summed: k ascending, or in the rank layout one per rank,
// rank ascending.
class RowGatherer {
public:
    RowGatherer(Endpoint& endpoint, const CombineCall& call, const std::vector<Landing>& landings)
        : endpoint_(endpoint), call_(call), landings_(landings), row_bytes_(call.hidden * element_size(call.dtype)) {
        rows_.resize(call.topk);
        weights_.resize(call.topk);
        routes_.resize(call.topk);
    }

    int gather(int64_t token) {
        const int64_t* route = call_.route + token * call_.topk;
        int count = 0;
        for (int64_t k = 0; k < call_.topk; ++k) {
            if (route[k] < 0 || (call_.layout == Layout::rank && !first_of_its_row(route, k))) continue;
            if (call_.weights) weights_[count] = call_.weights[token * call_.topk + k];
            routes_[count++] = route[k];
        }
        if (call_.layout == Layout::rank) std::sort(routes_.begin(), routes_.begin() + count);
        for (int i = 0; i < count; ++i) {
            const int peer = route_rank(routes_[i]);
            rows_[i] = endpoint_.peer_base(peer) + row_offset(landings_[peer].x, route_row(routes_[i]), row_bytes_);
        }
        return count;
    }

    const void* const* rows() const { return rows_.data(); }
    const float* weights() const { return call_.weights ? weights_.data() : nullptr; }

private:
    Endpoint& endpoint_;
    const CombineCall& call_;
    const std::vector<Landing>& landings_;
    int64_t row_bytes_;
    std::vector<const void*> rows_;
    std::vector<float> weights_;
    std::vector<int64_t> routes_;
};

void gather_values(Endpoint& endpoint, const CombineCall& call, const std::vector<Landing>& landings, float* values) {
    for (int64_t i = 0; i < call.tokens * call.topk; ++i) {
        const int64_t route = call.route[i];
        if (route < 0) {
            values[i] = 0.0f;
            continue;
        }
        const float* peer_values = at<float>(endpoint.peer_base(route_rank(route)), landings[route_rank(route)].weights);
        const int64_t row = route_row(route);
        values[i] = call.layout == Layout::expert ? peer_values[row] : peer_values[row * call.topk + i % call.topk];
    }
}

}  // namespace

Combined combine(Endpoint& endpoint, const CombineCall& call) {
    const int world = endpoint.world();
    const int64_t row_bytes = call.hidden * static_cast<int64_t>(element_size(call.dtype));
    const int64_t value_width = call.layout == Layout::rank ? call.topk : 1;
    return run_collective(endpoint, Operation::combine, call.timeout_s, [&](Collective& collective) {
        Combined result;
        std::shared_ptr<Block> staged_y, staged_values;
        Landing own;
        own.rows = call.rows;
        const MemoryStatus memory = try_allocate([&] {
            result.out = endpoint.arena().allocate(call.tokens * row_bytes);
            if (call.row_values) result.values = endpoint.arena().allocate(call.tokens * call.topk * sizeof(float));
            own.x = in_window(endpoint, call.y, call.rows * row_bytes, staged_y);
            if (call.row_values) {
                own.weights = in_window(endpoint, call.row_values, call.rows * value_width * sizeof(float), staged_values);
            }
        });
        const Signature signature = combine_signature(call);
        std::vector<Landing> landings(world);
        std::vector<int64_t> nothing;
        MemoryVerdict verdict;
        exchange_tables<OpenHead>(
            collective, "offsets", 0, [&](int) { return OpenHead{signature, memory, own}; },
            [&](int peer, const OpenHead& head) {
                collective.compare_signature(signature, peer, head.signature);
                verdict.see(peer, head.memory);
                landings[peer] = head.landing;
            },
            [&] { verdict.settle(collective); }, [&](int) -> auto& { return nothing; },
            [&](int) -> auto& { return nothing; });
        check_route(call.route, call.tokens * call.topk, landings);

        std::byte* out = result.out->data();
        const bool nontemporal = static_cast<size_t>(call.tokens * row_bytes) >= endpoint.nontemporal_threshold();
        std::atomic<int64_t> read{0};
        endpoint.pool().parallel_for(call.tokens, kGrain, [&](int64_t begin, int64_t end) {
            RowGatherer gatherer(endpoint, call, landings);
            int64_t rows = 0;
            for (int64_t token = begin; token < end; ++token) {
                const int count = gatherer.gather(token);
                const std::byte* bias = call.bias ? call.bias + token * row_bytes : nullptr;
                endpoint.rows().reduce(out + token * row_bytes, gatherer.rows(), gatherer.weights(), count, bias,
                                       call.hidden, call.dtype, nontemporal);
                rows += count;
            }
            endpoint.rows().fence();
            read += rows;
        });
        if (call.row_values) gather_values(endpoint, call, landings, reinterpret_cast<float*>(result.values->data()));
        collective.add_bytes(read * row_bytes);
        // The caller may overwrite or free its rows once we return: not before all peers have read them.
        collective.synchronise("rows");
        return result;
    });
}

Scattered scatter(Endpoint& endpoint, const ScatterCall& call) {
    const int world = endpoint.world();
    const bool by_rank = call.layout == Layout::rank;
    const int64_t value_width = by_rank ? call.topk : 1;
    return run_collective(endpoint, Operation::scatter, call.timeout_s, [&](Collective& collective) {
        Scattered result;
        std::shared_ptr<Block> staged_dot;
        std::vector<Landing> landings(world);
        Landing own;
        own.rows = call.rows;
        const int64_t row_bytes = call.quant == Quant::none ? call.x.bytes() : call.x.hidden;
        const int64_t scale_bytes =
            call.quant == Quant::none ? call.x.scale_bytes : quant_scale_bytes(call.quant, call.x.hidden);
        const size_t value_bytes = call.token_values ? call.rows * value_width * sizeof(float) : 0;
        const MemoryStatus memory = try_allocate([&] {
            result.x = endpoint.arena().allocate(call.rows * row_bytes);
            result.scales = endpoint.arena().allocate(call.rows * scale_bytes);
            result.row_values = endpoint.arena().allocate(value_bytes);
            if (call.dot_with) {
                result.dots = endpoint.arena().allocate(call.tokens * call.topk * sizeof(float));
                own.topk_idx = in_window(endpoint, call.dot_with, call.rows * call.x.bytes(), staged_dot);
            }
            own.x = result.x->offset();
            own.scales = result.scales->offset();
            own.weights = result.row_values->offset();
        });
        if (!memory.failed) {
            for (const auto& block : {result.x, result.scales, result.row_values}) collective.lend(block);
            std::memset(result.row_values->data(), 0, value_bytes);
            for_padding({call.expert_counts, static_cast<size_t>(call.local_experts)}, call.alignment,
                        [&](int64_t first, int64_t last) {
                            endpoint.rows().zero(result.x->data() + first * row_bytes, (last - first) * row_bytes);
                            std::memset(result.scales->data() + first * scale_bytes, 0, (last - first) * scale_bytes);
                        });
        }
        Signature signature;
        signature.value[Signature::layout] = static_cast<int64_t>(call.layout);
        signature.value[Signature::dtype] = static_cast<int64_t>(call.x.dtype);
        signature.value[Signature::hidden] = call.x.hidden;
        signature.value[Signature::topk] = call.topk;
        signature.value[Signature::quant] = static_cast<int64_t>(call.quant);
        signature.value[Signature::alignment] = call.alignment;
        signature.value[Signature::scale_bytes] = call.x.scale_bytes;
        signature.value[Signature::weights] = call.dot_with != nullptr;
        signature.value[Signature::row_values] = call.token_values != nullptr;
        signature.value[Signature::scaled] = call.weights != nullptr;
        std::vector<int64_t> nothing;
        MemoryVerdict verdict;
        exchange_tables<OpenHead>(
            collective, "grants", 0, [&](int) { return OpenHead{signature, memory, own}; },
            [&](int peer, const OpenHead& head) {
                collective.compare_signature(signature, peer, head.signature);
                verdict.see(peer, head.memory);
                landings[peer] = head.landing;
            },
            [&] { verdict.settle(collective); }, [&](int) -> auto& { return nothing; },
            [&](int) -> auto& { return nothing; });
        check_route(call.route, call.tokens * call.topk, landings);

        const int64_t sent = rows_sent(call.route, call.tokens, call.topk);
        endpoint.pool().parallel_for(call.tokens, kGrain, [&](int64_t begin, int64_t end) {
            RowSender sender(endpoint, call.x, call.quant, landings, sent);
            for (int64_t token = begin; token < end; ++token) {
                const int64_t* route = call.route + token * call.topk;
                if (call.x.hidden > 0) sender.load(token);
                for (int64_t k = 0; k < call.topk; ++k) {
                    const int64_t index = token * call.topk + k;
                    if (call.dot_with) reinterpret_cast<float*>(result.dots->data())[index] = 0.0f;
                    if (route[k] < 0) continue;
                    const int peer = route_rank(route[k]);
                    const int64_t row = route_row(route[k]);
                    std::byte* base = endpoint.peer_base(peer);
                    if (call.token_values) {
                        at<float>(base, landings[peer].weights)[by_rank ? row * call.topk + k : row] =
                            call.token_values[index];
                    }
                    if (call.x.hidden == 0 || (by_rank && !first_of_its_row(route, k))) continue;
                    if (call.weights) {
                        sender.send_scaled(peer, row, call.weights[index]);
                    } else {
                        sender.send(peer, row);
                    }
                    if (call.dot_with) {
                        reinterpret_cast<float*>(result.dots->data())[index] =
                            endpoint.rows().dot(sender.row(), base + row_offset(landings[peer].topk_idx, row, row_bytes),
                                                call.x.hidden, call.x.dtype);
                    }
                }
            }
            endpoint.rows().fence();
        });
        collective.add_bytes(sent * (row_bytes + scale_bytes));
        collective.synchronise("rows");
        return result;
    });
}

std::shared_ptr<Block> route(Endpoint& endpoint, const RouteCall& call) {
    const int world = endpoint.world(), me = endpoint.rank();
    for (int64_t row = 0; row < call.rows; ++row) {
        const int32_t source = call.source[row * 3];
        if (source >= 0 && source < world) continue;
        bad_input("row " + std::to_string(row) + " names source rank " + std::to_string(source) + " in a group of " +
                  std::to_string(world));
    }
    struct Head {
        MemoryStatus memory;
        uint64_t offset;
        int64_t tokens, topk;
    };
    struct Verdict {
        int64_t bad_row = -1, source = 0, token = 0, k = 0, tokens = 0, topk = 0;
    };
    return run_collective(endpoint, Operation::route, call.timeout_s, [&](Collective& collective) {
        std::shared_ptr<Block> table;
        const MemoryStatus memory =
            try_allocate([&] { table = endpoint.arena().allocate(call.tokens * call.topk * sizeof(int64_t)); });
        if (!memory.failed) {
            collective.lend(table);
            std::fill_n(reinterpret_cast<int64_t*>(table->data()), call.tokens * call.topk, int64_t{-1});
        }
        std::vector<Head> heads(world);
        std::vector<int64_t> nothing;
        const auto no_table = [&](int) -> auto& { return nothing; };
        MemoryVerdict memory_verdict;
        exchange_tables<Head>(
            collective, "grants", 0,
            [&](int) { return Head{memory, memory.failed ? 0 : table->offset(), call.tokens, call.topk}; },
            [&](int peer, const Head& head) {
                memory_verdict.see(peer, head.memory);
                heads[peer] = head;
            },
            [&] { memory_verdict.settle(collective); }, no_table, no_table);
        Verdict verdict;
        for (int64_t row = 0; row < call.rows; ++row) {
            const int32_t* source = call.source + row * 3;
            const Head& head = heads[source[0]];
            if (source[1] < 0 || source[1] >= head.tokens || source[2] < 0 || source[2] >= head.topk) {
                verdict = {row, source[0], source[1], source[2], head.tokens, head.topk};
                break;
            }
            at<int64_t>(endpoint.peer_base(source[0]), head.offset)[source[1] * head.topk + source[2]] =
                pack_route(me, row);
        }
        Verdict worst;
        int worst_rank = -1;
        exchange_tables<Verdict>(
            collective, "rows", 0, [&](int) { return verdict; },
            [&](int peer, const Verdict& theirs) {
                if (theirs.bad_row < 0 || worst_rank >= 0) return;
                worst = theirs;
                worst_rank = peer;
            },
            [&] {
                if (worst_rank < 0) return;
                Error error(Failure::bad_input,
                            "row " + std::to_string(worst.bad_row) + " of rank " + std::to_string(worst_rank) +
                                " names token " + std::to_string(worst.token) + ", k " + std::to_string(worst.k) +
                                " of rank " + std::to_string(worst.source) + ", which has " +
                                std::to_string(worst.tokens) + " tokens and top-k " + std::to_string(worst.topk));
                error.ranks = {worst_rank};
                collective.fail_agreed(error);
            },
            no_table, no_table);
        return table;
    });
}

}  // namespace cam
