// The Python face of the expert-parallel collectives.
#include <nanobind/stl/string.h>

#include <array>

#include "bindings.h"
#include "ep.h"

using namespace nanobind::literals;

namespace cam {
namespace {

const std::array<std::string, 4> kRowDtypes = {"bfloat16", "float16", "float32", "uint8"};

template <class Enum, size_t size>
Enum one_of(const std::array<const char*, size>& names, const std::string& name, const char* what) {
    std::string known;
    for (size_t i = 0; i < size; ++i) {
        if (name == names[i]) return static_cast<Enum>(i);
        known += (known.empty() ? "" : ", ") + std::string(names[i]);
    }
    bad_input(std::string(what) + " '" + name + "' is not one of: " + known);
}

Dtype row_dtype(const std::string& name) {
    return one_of<Dtype>(std::array{"bfloat16", "float16", "float32", "opaque"}, name, "row dtype");
}
Layout layout_named(const std::string& name) { return one_of<Layout>(std::array{"expert", "rank"}, name, "layout"); }
Quant quant_named(const std::string& name) { return one_of<Quant>(std::array{"none", "int8", "fp8"}, name, "quant"); }

// What row buffers look like to a caller after `quant`: element type and elements per row.
std::string row_type(Dtype dtype, Quant quant) {
    if (quant == Quant::int8) return "int8";
    if (quant == Quant::fp8) return "uint8";
    return kRowDtypes[static_cast<size_t>(dtype)];
}

nb::object scales_view(const std::shared_ptr<Block>& block, const void* data, int64_t rows, Quant quant,
                       int64_t scale_bytes) {
    if (scale_bytes == 0) return nb::none();
    if (quant == Quant::int8) return nb::cast(view(block, data, {rows}, "float32"));
    if (quant == Quant::fp8) return nb::cast(view(block, data, {rows, scale_bytes / 4}, "float32"));
    return nb::cast(view(block, data, {rows, scale_bytes}, "uint8"));
}

nb::tuple bind_dispatch(Endpoint& endpoint, uintptr_t x, int64_t x_stride, int64_t hidden, const std::string& dtype,
                        uintptr_t scales, int64_t scale_bytes, uintptr_t topk_idx, bool topk_idx_int64, int64_t tokens,
                        int64_t topk, uintptr_t topk_weights, uintptr_t active, int64_t num_experts,
                        const std::string& layout, const std::string& quant, int64_t alignment, int64_t max_tokens,
                        double timeout_s) {
    DispatchCall call;
    call.x = {pointer<std::byte>(x), x_stride, hidden, row_dtype(dtype), pointer<std::byte>(scales), scale_bytes};
    call.selection = {tokens, topk, pointer<void>(topk_idx), topk_idx_int64, pointer<uint8_t>(active)};
    call.weights = pointer<float>(topk_weights);
    call.num_experts = num_experts;
    call.layout = layout_named(layout);
    call.quant = quant_named(quant);
    call.alignment = alignment;
    call.max_tokens = max_tokens;
    call.timeout_s = timeout_s;
    Dispatched d;
    {
        nb::gil_scoped_release release;
        d = dispatch(endpoint, call);
    }
    const std::string type = row_type(call.x.dtype, call.quant);
    const int64_t elements = call.quant == Quant::none ? hidden : d.row_bytes, world = endpoint.world();
    const bool by_rank = call.layout == Layout::rank;
    nb::object weights = nb::none();
    if (d.weights && by_rank) weights = nb::cast(view(d.table, d.weights, {d.rows, topk}, "float32"));
    if (d.weights && !by_rank) weights = nb::cast(view(d.table, d.weights, {d.rows}, "float32"));
    return nb::make_tuple(whole(d.x, {d.rows, elements}, type),
                          scales_view(d.table, d.scales, d.rows, call.quant, d.scale_bytes),
                          view(d.table, d.source, {d.rows, 3}, "int32"),
                          by_rank ? nb::cast(view(d.table, d.topk_idx, {d.rows, topk}, "int64")) : nb::none(), weights,
                          view(d.table, d.expert_counts, {d.local_experts}, "int64"),
                          view(d.table, d.source_counts, {by_rank ? 1 : d.local_experts, world}, "int64"),
                          view(d.table, d.route, {tokens, topk}, "int64"));
}

nb::tuple bind_combine(Endpoint& endpoint, uintptr_t y, int64_t rows, int64_t hidden, const std::string& dtype,
                       const std::string& layout, uintptr_t route, int64_t tokens, int64_t topk, uintptr_t weights,
                       uintptr_t bias, uintptr_t row_values, double timeout_s) {
    CombineCall call{pointer<std::byte>(y),      rows,     hidden, row_dtype(dtype),        layout_named(layout),
                     pointer<int64_t>(route),    tokens,   topk,   pointer<float>(weights), pointer<std::byte>(bias),
                     pointer<float>(row_values), timeout_s};
    Combined c;
    {
        nb::gil_scoped_release release;
        c = combine(endpoint, call);
    }
    return nb::make_tuple(whole(c.out, {tokens, hidden}, dtype),
                          c.values ? nb::cast(whole(c.values, {tokens, topk}, "float32")) : nb::none());
}

nb::tuple bind_scatter(Endpoint& endpoint, uintptr_t x, int64_t x_stride, int64_t hidden, const std::string& dtype,
                       uintptr_t scales, int64_t scale_bytes, const std::string& quant, const std::string& layout,
                       uintptr_t route, int64_t tokens, int64_t topk, int64_t rows, uintptr_t expert_counts,
                       int64_t local_experts, int64_t alignment, uintptr_t weights, uintptr_t dot_with,
                       uintptr_t token_values, double timeout_s) {
    ScatterCall call;
    call.x = {pointer<std::byte>(x), x_stride, hidden, row_dtype(dtype), pointer<std::byte>(scales), scale_bytes};
    call.quant = quant_named(quant);
    call.layout = layout_named(layout);
    call.route = pointer<int64_t>(route);
    call.tokens = tokens;
    call.topk = topk;
    call.rows = rows;
    call.expert_counts = pointer<int64_t>(expert_counts);
    call.local_experts = local_experts;
    call.alignment = alignment;
    call.weights = pointer<float>(weights);
    call.dot_with = pointer<std::byte>(dot_with);
    call.token_values = pointer<float>(token_values);
    call.timeout_s = timeout_s;
    Scattered s;
    {
        nb::gil_scoped_release release;
        s = scatter(endpoint, call);
    }
    const int64_t out_scale_bytes = call.quant == Quant::none ? scale_bytes : quant_scale_bytes(call.quant, hidden);
    nb::object values = nb::none();
    if (token_values && call.layout == Layout::rank) values = nb::cast(whole(s.row_values, {rows, topk}, "float32"));
    if (token_values && call.layout == Layout::expert) values = nb::cast(whole(s.row_values, {rows}, "float32"));
    return nb::make_tuple(whole(s.x, {rows, hidden}, row_type(call.x.dtype, call.quant)),
                          scales_view(s.scales, s.scales->data(), rows, call.quant, out_scale_bytes),
                          s.dots ? nb::cast(whole(s.dots, {tokens, topk}, "float32")) : nb::none(), values);
}

Array bind_route(Endpoint& endpoint, uintptr_t source, int64_t rows, int64_t tokens, int64_t topk, double timeout_s) {
    std::shared_ptr<Block> table;
    {
        nb::gil_scoped_release release;
        table = route(endpoint, {pointer<int32_t>(source), rows, tokens, topk, timeout_s});
    }
    return whole(table, {tokens, topk}, "int64");
}

}  // namespace

void bind_ep(nb::class_<Endpoint>& endpoint) {
    endpoint
        .def("ep_dispatch", &bind_dispatch, "x"_a, "x_stride"_a, "hidden"_a, "dtype"_a, "scales"_a, "scale_bytes"_a,
             "topk_idx"_a, "topk_idx_int64"_a, "tokens"_a, "topk"_a, "topk_weights"_a, "active"_a, "num_experts"_a,
             "layout"_a, "quant"_a, "alignment"_a, "max_tokens"_a, "timeout_s"_a)
        .def("ep_combine", &bind_combine, "y"_a, "rows"_a, "hidden"_a, "dtype"_a, "layout"_a, "route"_a, "tokens"_a,
             "topk"_a, "weights"_a, "bias"_a, "row_values"_a, "timeout_s"_a)
        .def("ep_scatter", &bind_scatter, "x"_a, "x_stride"_a, "hidden"_a, "dtype"_a, "scales"_a, "scale_bytes"_a,
             "quant"_a, "layout"_a, "route"_a, "tokens"_a, "topk"_a, "rows"_a, "expert_counts"_a, "local_experts"_a,
             "alignment"_a, "weights"_a, "dot_with"_a, "token_values"_a, "timeout_s"_a)
        .def("ep_route", &bind_route, "source"_a, "rows"_a, "tokens"_a, "topk"_a, "timeout_s"_a);
}

}  // namespace cam
