// The Python face of the collectives and of messages between two ranks.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings.h"
#include "channels.h"
#include "collectives.h"

using namespace nanobind::literals;

namespace cam {
namespace {

using Address = uintptr_t;
using Addresses = std::vector<uintptr_t>;
using SpanTuple = std::tuple<uintptr_t, uintptr_t, int64_t>;

template <class Pointer>
std::vector<Pointer> pointers(const Addresses& addresses) {
    std::vector<Pointer> result;
    result.reserve(addresses.size());
    for (const uintptr_t address : addresses) result.push_back(reinterpret_cast<Pointer>(address));
    return result;
}

std::vector<Span> spans_of(const std::vector<SpanTuple>& tuples) {
    std::vector<Span> spans;
    spans.reserve(tuples.size());
    for (const auto& [in, out, elements] : tuples) {
        if (elements < 0) bad_input("a tensor cannot have " + std::to_string(elements) + " elements");
        spans.push_back({pointer<void>(in), reinterpret_cast<void*>(out), elements});
    }
    return spans;
}

ReduceSpec spec_of(const std::string& dtype, const std::string& reduction, double factor) {
    return {element_named(dtype), reduction_named(reduction), factor};
}

Tuning tuning_of(const std::string& algorithm, size_t piece) { return {algorithm_named(algorithm), piece}; }

void bind_all_reduce(Endpoint& endpoint, const std::vector<SpanTuple>& spans, const std::string& dtype,
                     const std::string& reduction, double factor, const std::string& algorithm, size_t piece,
                     double timeout_s) {
    const ReduceSpec spec = spec_of(dtype, reduction, factor);
    const Tuning tuning = tuning_of(algorithm, piece);
    const std::vector<Span> given = spans_of(spans);
    nb::gil_scoped_release release;
    all_reduce(endpoint, given, spec, tuning, timeout_s);
}

void bind_reduce(Endpoint& endpoint, const std::vector<SpanTuple>& spans, const std::string& dtype,
                 const std::string& reduction, double factor, int root, const std::string& algorithm, size_t piece,
                 double timeout_s) {
    const ReduceSpec spec = spec_of(dtype, reduction, factor);
    const Tuning tuning = tuning_of(algorithm, piece);
    const std::vector<Span> given = spans_of(spans);
    nb::gil_scoped_release release;
    reduce(endpoint, given, spec, root, tuning, timeout_s);
}

void bind_reduce_scatter(Endpoint& endpoint, const Addresses& parts, const std::vector<int64_t>& elements, Address out,
                         const std::string& dtype, const std::string& reduction, double factor,
                         const std::string& algorithm, size_t piece, double timeout_s) {
    const ReduceSpec spec = spec_of(dtype, reduction, factor);
    const Tuning tuning = tuning_of(algorithm, piece);
    const auto from = pointers<const void*>(parts);
    nb::gil_scoped_release release;
    reduce_scatter(endpoint, from, elements, reinterpret_cast<void*>(out), spec, tuning, timeout_s);
}

void bind_all_gather(Endpoint& endpoint, Address in, const std::vector<int64_t>& nbytes, const Addresses& outs,
                     const std::string& algorithm, size_t piece, double timeout_s) {
    const Tuning tuning = tuning_of(algorithm, piece);
    const auto to = pointers<void*>(outs);
    nb::gil_scoped_release release;
    all_gather(endpoint, pointer<void>(in), nbytes, to, tuning, timeout_s);
}

void bind_gather(Endpoint& endpoint, Address in, const std::vector<int64_t>& nbytes, const Addresses& outs, int root,
                 const std::string& algorithm, size_t piece, double timeout_s) {
    const Tuning tuning = tuning_of(algorithm, piece);
    const auto to = pointers<void*>(outs);
    nb::gil_scoped_release release;
    gather(endpoint, pointer<void>(in), nbytes, to, root, tuning, timeout_s);
}

void bind_broadcast(Endpoint& endpoint, Address data, int64_t nbytes, int root, const std::string& algorithm,
                    size_t piece, double timeout_s) {
    const Tuning tuning = tuning_of(algorithm, piece);
    nb::gil_scoped_release release;
    broadcast(endpoint, reinterpret_cast<void*>(data), nbytes, root, tuning, timeout_s);
}

void bind_all_to_all(Endpoint& endpoint, const Addresses& ins, const std::vector<int64_t>& in_bytes,
                     const Addresses& outs, const std::vector<int64_t>& out_bytes, const std::string& algorithm,
                     size_t piece, double timeout_s) {
    const Tuning tuning = tuning_of(algorithm, piece);
    const auto from = pointers<const void*>(ins);
    const auto to = pointers<void*>(outs);
    nb::gil_scoped_release release;
    all_to_all(endpoint, from, in_bytes, to, out_bytes, tuning, timeout_s);
}

void bind_scatter(Endpoint& endpoint, const Addresses& ins, const std::vector<int64_t>& in_bytes, Address out,
                  int64_t out_bytes, int root, const std::string& algorithm, size_t piece, double timeout_s) {
    const Tuning tuning = tuning_of(algorithm, piece);
    const auto from = pointers<const void*>(ins);
    nb::gil_scoped_release release;
    scatter(endpoint, from, in_bytes, reinterpret_cast<void*>(out), out_bytes, root, tuning, timeout_s);
}

// (address, elements, dtype, bytes an element, whether it is one run of memory) of anything that speaks DLPack or the
// buffer protocol. NumPy, torch, JAX, TensorFlow: nobody's Python code is asked.
nb::tuple array_facts(const nb::ndarray<nb::device::cpu>& array) {
    const auto dtype = array.dtype();
    const char* kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    std::string name = dtype.code < std::size(kinds) && dtype.lanes == 1 ? kinds[dtype.code] : "opaque";
    if (name != "bool") name += std::to_string(dtype.bits);
    bool plain = true;
    int64_t step = 1;
    for (size_t i = array.ndim(); i-- > 0;) {
        plain = plain && (array.shape(i) == 1 || array.stride(i) == step);
        step *= static_cast<int64_t>(array.shape(i));
    }
    const auto elements = static_cast<int64_t>(array.size());
    return nb::make_tuple(reinterpret_cast<uintptr_t>(array.data()), elements, name, dtype.bits / 8 * dtype.lanes,
                          plain || elements == 0);
}

}  // namespace

void bind_collectives(nb::module_& m, nb::class_<Endpoint>& endpoint) {
    endpoint
        .def("all_reduce", &bind_all_reduce, "spans"_a, "dtype"_a, "reduction"_a, "factor"_a, "algorithm"_a, "piece"_a,
             "timeout_s"_a)
        .def("reduce", &bind_reduce, "spans"_a, "dtype"_a, "reduction"_a, "factor"_a, "root"_a, "algorithm"_a,
             "piece"_a, "timeout_s"_a)
        .def("reduce_scatter", &bind_reduce_scatter, "parts"_a, "elements"_a, "out"_a, "dtype"_a, "reduction"_a,
             "factor"_a, "algorithm"_a, "piece"_a, "timeout_s"_a)
        .def("all_gather", &bind_all_gather, "own"_a, "nbytes"_a, "outs"_a, "algorithm"_a, "piece"_a, "timeout_s"_a)
        .def("gather", &bind_gather, "own"_a, "nbytes"_a, "outs"_a, "root"_a, "algorithm"_a, "piece"_a, "timeout_s"_a)
        .def("broadcast", &bind_broadcast, "data"_a, "nbytes"_a, "root"_a, "algorithm"_a, "piece"_a, "timeout_s"_a)
        .def("all_to_all", &bind_all_to_all, "ins"_a, "in_bytes"_a, "outs"_a, "out_bytes"_a, "algorithm"_a, "piece"_a,
             "timeout_s"_a)
        .def("scatter", &bind_scatter, "ins"_a, "in_bytes"_a, "out"_a, "out_bytes"_a, "root"_a, "algorithm"_a,
             "piece"_a, "timeout_s"_a);

    m.def("array_facts", &array_facts, "array"_a);
    nb::class_<Channels>(m, "Channels")
        .def(nb::init<Endpoint&>(), "endpoint"_a, nb::keep_alive<1, 2>())
        .def(
            "send",
            [](Channels& channels, int to, int64_t tag, Address data, size_t nbytes, double timeout_s) {
                channels.send(to, tag, pointer<void>(data), nbytes, timeout_s);
            },
            "to"_a, "tag"_a, "data"_a, "nbytes"_a, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "post",
            [](Channels& channels, int from, int64_t tag, Address data, size_t nbytes) {
                return channels.post(from, tag, reinterpret_cast<void*>(data), nbytes);
            },
            "source"_a, "tag"_a, "data"_a, "nbytes"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("test", &Channels::test, "receive"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("wait", &Channels::wait, "receive"_a, "timeout_s"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("forget", &Channels::forget, "receive"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace cam
