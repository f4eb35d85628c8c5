// Scatter: rows along a known route, optionally scaled by their weights, with the dot products that the weights'
// gradients are. See ep.h.
#include "ep_rows.h"

namespace cam {
namespace {

Signature scatter_signature(const ScatterCall& call) {
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
    return signature;
}

int64_t row_bytes(const ScatterCall& call) { return call.quant == Quant::none ? call.x.bytes() : call.x.hidden; }

int64_t scale_bytes(const ScatterCall& call) {
    return call.quant == Quant::none ? call.x.scale_bytes : quant_scale_bytes(call.quant, call.x.hidden);
}

int64_t value_bytes(const ScatterCall& call) {
    if (!call.token_values) return 0;
    return call.rows * (call.layout == Layout::rank ? call.topk : 1) * static_cast<int64_t>(sizeof(float));
}

// What peers will not write: padding rows, and the values of (row, k) that have no token's k.
void clear_gaps(Endpoint& endpoint, const ScatterCall& call, const Scattered& result) {
    std::memset(result.row_values->data(), 0, value_bytes(call));
    const int64_t row = row_bytes(call), scale = scale_bytes(call);
    for_padding({call.expert_counts, static_cast<size_t>(call.local_experts)}, call.alignment,
                [&](int64_t first, int64_t last) {
                    endpoint.rows().zero(result.x->data() + first * row, (last - first) * row);
                    std::memset(result.scales->data() + first * scale, 0, (last - first) * scale);
                });
}

void send_token(Endpoint& endpoint, const ScatterCall& call, const std::vector<Landing>& landings, RowSender& sender,
                int64_t token, float* dots) {
    const bool by_rank = call.layout == Layout::rank;
    const int64_t* route = call.route + token * call.topk;
    if (call.x.hidden > 0) sender.load(token);
    for (int64_t k = 0; k < call.topk; ++k) {
        const int64_t index = token * call.topk + k;
        if (dots) dots[index] = 0.0f;
        if (route[k] < 0) continue;
        const int peer = route_rank(route[k]);
        const int64_t row = route_row(route[k]);
        std::byte* base = endpoint.peer_base(peer);
        if (call.token_values) {
            at<float>(base, landings[peer].weights)[by_rank ? row * call.topk + k : row] = call.token_values[index];
        }
        if (call.x.hidden == 0 || (by_rank && !first_of_its_row(route, k))) continue;
        if (call.weights) {
            sender.send_scaled(peer, row, call.weights[index]);
        } else {
            sender.send(peer, row);
        }
        if (dots) {
            const std::byte* other = base + row_offset(landings[peer].dot_rows, row, call.x.bytes());
            dots[index] = endpoint.rows().dot(sender.row(), other, call.x.hidden, call.x.dtype);
        }
    }
}

}  // namespace

Scattered scatter(Endpoint& endpoint, const ScatterCall& call) {
    return run_collective(endpoint, Operation::scatter, call.timeout_s, [&](Collective& collective) {
        Scattered result;
        std::shared_ptr<Block> staged_dot;
        Landing own;
        own.rows = call.rows;
        const MemoryStatus memory = try_allocate([&] {
            result.x = endpoint.arena().allocate(call.rows * row_bytes(call));
            result.scales = endpoint.arena().allocate(call.rows * scale_bytes(call));
            result.row_values = endpoint.arena().allocate(value_bytes(call));
            if (call.dot_with) {
                result.dots = endpoint.arena().allocate(call.tokens * call.topk * sizeof(float));
                own.dot_rows = in_window(endpoint, call.dot_with, call.rows * call.x.bytes(), staged_dot);
            }
            own.x = result.x->offset();
            own.scales = result.scales->offset();
            own.weights = result.row_values->offset();
        });
        if (!memory.failed) {
            for (const auto& block : {result.x, result.scales, result.row_values}) collective.lend(block);
            clear_gaps(endpoint, call, result);
        }
        const auto landings = open_round(collective, "grants", scatter_signature(call), memory, own);
        check_route(call.route, call.tokens * call.topk, landings);

        const int64_t sent = rows_sent(call.route, call.tokens, call.topk);
        float* dots = result.dots ? reinterpret_cast<float*>(result.dots->data()) : nullptr;
        endpoint.pool().parallel_for(call.tokens, kGrain, [&](int64_t begin, int64_t end) {
            RowSender sender(endpoint, call.x, call.quant, landings, sent);
            for (int64_t token = begin; token < end; ++token) {
                send_token(endpoint, call, landings, sender, token, dots);
            }
            endpoint.rows().fence();
        });
        collective.add_bytes(sent * (row_bytes(call) + scale_bytes(call)));
        collective.synchronise("rows");
        return result;
    });
}

}  // namespace cam
