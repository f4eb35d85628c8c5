// Combine: each rank reads its tokens' rows where they lie in the peers' windows, and sums them. See ep.h.
#include <atomic>

#include "ep_rows.h"

namespace cam {
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
        const float* peer_values =
            at<float>(endpoint.peer_base(route_rank(route)), landings[route_rank(route)].weights);
        const int64_t row = route_row(route);
        values[i] = call.layout == Layout::expert ? peer_values[row] : peer_values[row * call.topk + i % call.topk];
    }
}

}  // namespace

Combined combine(Endpoint& endpoint, const CombineCall& call) {
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
                own.weights =
                    in_window(endpoint, call.row_values, call.rows * value_width * sizeof(float), staged_values);
            }
        });
        const Signature signature = combine_signature(call);
        const std::vector<Landing> landings = open_round(collective, "offsets", signature, memory, own);
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

}  // namespace cam
