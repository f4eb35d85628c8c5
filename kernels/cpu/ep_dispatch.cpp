// Dispatch: counts, grants, rows. See ep.h.
#include "ep_rows.h"

namespace cam {
namespace {

struct CountsHead {
    Signature signature;
};

struct GrantHead {
    MemoryStatus memory;
    Landing landing;
};

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
        out.scale_bytes = call.quant == Quant::none ? call.x.scale_bytes : quant_scale_bytes(call.quant, call.x.hidden);
        Landing own;
        const MemoryStatus memory = try_allocate([&] { carve_dispatch_table(endpoint, call, placement, out, own); });
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

}  // namespace cam
