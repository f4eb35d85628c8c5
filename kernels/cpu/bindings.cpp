// The Python face of the native code: addresses and sizes in, DLPack arrays over window memory out.
// The interpreter lock is released while ranks wait for each other or move rows.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "ep.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cam {
namespace {

using Array = nb::ndarray<>;

struct NamedDtype {
    const char* name;
    nb::dlpack::dtype dtype;
};
constexpr uint8_t code(nb::dlpack::dtype_code value) { return static_cast<uint8_t>(value); }
constexpr NamedDtype kDtypes[] = {
    {"bfloat16", {code(nb::dlpack::dtype_code::Bfloat), 16, 1}}, {"float16", {code(nb::dlpack::dtype_code::Float), 16, 1}},
    {"float32", {code(nb::dlpack::dtype_code::Float), 32, 1}},   {"float64", {code(nb::dlpack::dtype_code::Float), 64, 1}},
    {"int8", {code(nb::dlpack::dtype_code::Int), 8, 1}},         {"uint8", {code(nb::dlpack::dtype_code::UInt), 8, 1}},
    {"int16", {code(nb::dlpack::dtype_code::Int), 16, 1}},       {"int32", {code(nb::dlpack::dtype_code::Int), 32, 1}},
    {"int64", {code(nb::dlpack::dtype_code::Int), 64, 1}},       {"bool", {code(nb::dlpack::dtype_code::Bool), 8, 1}},
};

nb::dlpack::dtype dtype_named(const std::string& name) {
    std::string known;
    for (const auto& entry : kDtypes) {
        if (name == entry.name) return entry.dtype;
        known += (known.empty() ? "" : ", ") + std::string(entry.name);
    }
    bad_input("dtype '" + name + "' is not one of: " + known);
}

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
Layout layout_named(const std::string& name) {
    return one_of<Layout>(std::array{"expert", "rank"}, name, "layout");
}
Quant quant_named(const std::string& name) {
    return one_of<Quant>(std::array{"none", "int8", "fp8"}, name, "quant");
}

// An array over part of a block, which lives as long as any view of the array.
Array view(const std::shared_ptr<Block>& block, const void* data, std::initializer_list<int64_t> shape,
           const std::string& dtype) {
    auto* keep = new std::shared_ptr<Block>(block);
    nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<Block>*>(p); });
    std::vector<size_t> sizes(shape.begin(), shape.end());
    return Array(const_cast<void*>(data), sizes.size(), sizes.data(), owner, nullptr, dtype_named(dtype));
}

Array whole(const std::shared_ptr<Block>& block, std::initializer_list<int64_t> shape, const std::string& dtype) {
    return view(block, block->data(), shape, dtype);
}

template <class T>
const T* pointer(uintptr_t address) {
    return reinterpret_cast<const T*>(address);
}

Array empty(const std::shared_ptr<Arena>& arena, const std::vector<int64_t>& shape, const std::string& dtype) {
    const nb::dlpack::dtype type = dtype_named(dtype);
    size_t bytes = type.bits / 8;
    for (const int64_t size : shape) {
        if (size < 0 || __builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes)) {
            bad_input("a shape must have sizes >= 0 whose product fits 64 bits, got a size of " + std::to_string(size));
        }
    }
    const auto block = arena->allocate(bytes);
    auto* keep = new std::shared_ptr<Block>(block);
    nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<Block>*>(p); });
    std::vector<size_t> sizes(shape.begin(), shape.end());
    return Array(block->data(), sizes.size(), sizes.data(), owner, nullptr, type);
}

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
    CombineCall call{pointer<std::byte>(y), rows, hidden, row_dtype(dtype), layout_named(layout),
                     pointer<int64_t>(route), tokens, topk, pointer<float>(weights), pointer<std::byte>(bias),
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

// Runs Python's signal handlers, so that Ctrl-C ends a wait.
void check_signals() {
    nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

std::vector<nb::bytes> bind_exchange(Endpoint& endpoint, const std::vector<nb::bytes>& payloads,
                                     const std::string& operation, double timeout_s) {
    std::vector<std::string_view> views;
    for (const auto& payload : payloads) views.emplace_back(payload.c_str(), payload.size());
    std::vector<std::string> received;
    {
        nb::gil_scoped_release release;
        received = endpoint.exchange(views, operation, timeout_s);
    }
    std::vector<nb::bytes> result;
    for (const auto& payload : received) result.emplace_back(payload.data(), payload.size());
    return result;
}

nb::dict stats_dict(const Endpoint& endpoint) {
    nb::dict result;
    for (const auto& [name, stats] : endpoint.stats()) {
        nb::dict entry;
        entry["calls"] = stats.calls;
        entry["bytes"] = stats.bytes;
        entry["wait_s"] = stats.wait_s;
        entry["total_s"] = stats.total_s;
        result[name.c_str()] = entry;
    }
    return result;
}

struct ErrorClass {
    Failure failure;
    const char* name;
    PyObject* type = nullptr;
};
ErrorClass error_classes[] = {
    {Failure::wait_timeout, "WaitTimeout"},     {Failure::peer_died, "PeerDied"},
    {Failure::aborted, "Aborted"},              {Failure::parameter_mismatch, "ParameterMismatch"},
    {Failure::out_of_memory, "OutOfMemory"},    {Failure::bad_input, "BadInput"},
};

nb::dict error_fields(const Error& error) {
    nb::dict fields;
    fields["message"] = error.message;
    fields["operation"] = error.operation;
    fields["phase"] = error.phase;
    fields["ranks"] = error.ranks;
    fields["waited_s"] = error.waited_s;
    fields["field"] = error.field;
    fields["mine"] = error.mine;
    fields["theirs"] = error.theirs;
    fields["requested"] = error.requested;
    fields["allocated"] = error.allocated;
    fields["limit"] = error.limit;
    return fields;
}

void translate_error(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const Error& error) {
        for (const auto& entry : error_classes) {
            if (entry.failure == error.failure) {
                PyErr_SetObject(entry.type, error_fields(error).ptr());
                return;
            }
        }
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}

void copy_bytes(uintptr_t target, uintptr_t source, size_t bytes, bool nontemporal, const std::string& isa) {
    const RowKernels& rows = row_kernels(isa);
    nb::gil_scoped_release release;
    rows.copy(reinterpret_cast<void*>(target), pointer<void>(source), bytes, nontemporal);
    rows.fence();
}

}  // namespace

NB_MODULE(_native, m) {
    for (auto& entry : error_classes) {
        const std::string qualified = std::string("cam_kernels._native.") + entry.name;
        entry.type = PyErr_NewException(qualified.c_str(), nullptr, nullptr);
        m.attr(entry.name) = nb::handle(entry.type);
    }
    nb::register_exception_translator(translate_error);

    m.def("isas", &available_isas);
    m.def("control_bytes", &control_bytes, "world_size"_a);
    m.def("row_offset", &row_offset, "base"_a, "row"_a, "row_bytes"_a);
    m.def("copy", &copy_bytes, "dst_ptr"_a, "src_ptr"_a, "nbytes"_a, "nontemporal"_a, "isa"_a = "auto");

    nb::class_<Arena>(m, "Arena")
        .def(nb::new_([](int fd, int world_size, size_t limit, size_t retain) {
                 return std::make_shared<Arena>(fd, world_size, limit, retain);
             }),
             "fd"_a, "world_size"_a, "limit"_a, "retain"_a)
        .def("empty", [](std::shared_ptr<Arena> arena, const std::vector<int64_t>& shape,
                         const std::string& dtype) { return empty(arena, shape, dtype); }, "shape"_a, "dtype"_a)
        .def("offset_of", [](const Arena& arena, uintptr_t ptr, size_t nbytes) {
                 return arena.offset_of(pointer<void>(ptr), nbytes); }, "ptr"_a, "nbytes"_a)
        .def("trim", &Arena::trim)
        .def("stats", [](const Arena& arena) {
            const ArenaStats stats = arena.stats();
            nb::dict result;
            result["allocated"] = stats.allocated;
            result["peak"] = stats.peak;
            result["resident"] = stats.resident;
            result["limit"] = stats.limit;
            result["blocks"] = stats.blocks;
            return result;
        });

    nb::class_<Endpoint>(m, "Endpoint")
        .def(nb::new_([](int rank, std::shared_ptr<Arena> arena, const std::vector<int>& peer_fds,
                         const std::vector<int>& peer_pidfds, int spin_us, int threads, const std::string& isa,
                         size_t nontemporal_threshold) {
                 return std::make_unique<Endpoint>(
                     rank, std::move(arena), peer_fds, peer_pidfds,
                     EndpointOptions{spin_us, threads, isa, nontemporal_threshold, check_signals});
             }),
             "rank"_a, "arena"_a, "peer_fds"_a, "peer_pidfds"_a, "spin_us"_a, "threads"_a, "isa"_a,
             "nontemporal_threshold"_a)
        .def("barrier", &Endpoint::barrier, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("exchange", &bind_exchange, "payloads"_a, "operation"_a, "timeout_s"_a)
        .def("close", &Endpoint::close)
        .def("stats", &stats_dict)
        .def_prop_ro("isa", [](Endpoint& endpoint) { return std::string(endpoint.rows().isa); })
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
