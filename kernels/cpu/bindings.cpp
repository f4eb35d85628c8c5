// The Python face of the native code: addresses and sizes in, DLPack arrays over window memory out.
// The interpreter lock is released while ranks wait for each other or move rows.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "ep_layout.h"

using namespace nanobind::literals;

namespace cam {
namespace {

struct NamedDtype {
    const char* name;
    nb::dlpack::dtype dtype;
};
constexpr uint8_t code(nb::dlpack::dtype_code value) { return static_cast<uint8_t>(value); }
constexpr NamedDtype kDtypes[] = {
    {"bfloat16", {code(nb::dlpack::dtype_code::Bfloat), 16, 1}},
    {"float16", {code(nb::dlpack::dtype_code::Float), 16, 1}},
    {"float32", {code(nb::dlpack::dtype_code::Float), 32, 1}},
    {"float64", {code(nb::dlpack::dtype_code::Float), 64, 1}},
    {"int8", {code(nb::dlpack::dtype_code::Int), 8, 1}},
    {"uint8", {code(nb::dlpack::dtype_code::UInt), 8, 1}},
    {"int16", {code(nb::dlpack::dtype_code::Int), 16, 1}},
    {"int32", {code(nb::dlpack::dtype_code::Int), 32, 1}},
    {"int64", {code(nb::dlpack::dtype_code::Int), 64, 1}},
    {"bool", {code(nb::dlpack::dtype_code::Bool), 8, 1}},
};

}  // namespace

nb::dlpack::dtype dtype_named(const std::string& name) {
    std::string known;
    for (const auto& entry : kDtypes) {
        if (name == entry.name) return entry.dtype;
        known += (known.empty() ? "" : ", ") + std::string(entry.name);
    }
    bad_input("dtype '" + name + "' is not one of: " + known);
}

Array view(const std::shared_ptr<Block>& block, const void* data, const std::vector<int64_t>& shape,
           const std::string& dtype) {
    auto* keep = new std::shared_ptr<Block>(block);
    nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<Block>*>(p); });
    std::vector<size_t> sizes(shape.begin(), shape.end());
    return Array(const_cast<void*>(data), sizes.size(), sizes.data(), owner, nullptr, dtype_named(dtype));
}

namespace {

Array empty(const std::shared_ptr<Arena>& arena, const std::vector<int64_t>& shape, const std::string& dtype) {
    size_t bytes = dtype_named(dtype).bits / 8;
    for (const int64_t size : shape) {
        if (size < 0 || __builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes)) {
            bad_input("a shape must have sizes >= 0 whose product fits 64 bits, got a size of " + std::to_string(size));
        }
    }
    return whole(arena->allocate(bytes), shape, dtype);
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
    {Failure::wait_timeout, "WaitTimeout"},  {Failure::peer_died, "PeerDied"},
    {Failure::aborted, "Aborted"},           {Failure::parameter_mismatch, "ParameterMismatch"},
    {Failure::out_of_memory, "OutOfMemory"}, {Failure::bad_input, "BadInput"},
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
    // Whoever keeps a group to the end of the process, as compilers' caches do, would get a page of warnings.
    nb::set_leak_warnings(false);
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
        .def(
            "empty",
            [](std::shared_ptr<Arena> arena, const std::vector<int64_t>& shape, const std::string& dtype) {
                return empty(arena, shape, dtype);
            },
            "shape"_a, "dtype"_a)
        .def(
            "offset_of",
            [](const Arena& arena, uintptr_t ptr, size_t nbytes) {
                return arena.offset_of(pointer<void>(ptr), nbytes);
            },
            "ptr"_a, "nbytes"_a)
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

    nb::class_<Endpoint> endpoint(m, "Endpoint");
    endpoint
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
        .def("abort", &Endpoint::abort, "message"_a)
        .def("stats", &stats_dict)
        .def_prop_ro("isa", [](Endpoint& endpoint) { return std::string(endpoint.rows().isa); });
    bind_ep(endpoint);
    bind_collectives(m, endpoint);
    bind_kv(m);
}

}  // namespace cam
