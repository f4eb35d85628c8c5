// The Python face of the KV cache's copies, and mappings of other processes' segments.
#include <nanobind/stl/string.h>
#include <sys/mman.h>

#include <cstring>

#include "bindings.h"
#include "kv_move.h"

using namespace nanobind::literals;

namespace cam {
namespace {

struct Call {
    Pieces pieces;
    Limits limits;
};

Call call(uintptr_t table, int64_t count, uintptr_t my_bases, uintptr_t their_bases, int64_t layers, bool to_mine,
          uintptr_t cancel, int64_t deadline_ns) {
    if (count < 0 || layers < 0)
        bad_input("a table has >= 0 pieces and layers, got " + std::to_string(count) + " and " +
                  std::to_string(layers));
    return {{pointer<Piece>(table), count, pointer<int64_t>(my_bases), pointer<int64_t>(their_bases), layers, to_mine},
            {pointer<uint32_t>(cancel), deadline_ns}};
}

nb::tuple result(const Outcome& outcome) {
    return nb::make_tuple(static_cast<int64_t>(outcome.ended), outcome.step, outcome.error);
}

}  // namespace

void bind_kv(nb::module_& m) {
    nb::class_<Mover>(m, "Mover")
        .def(nb::init<int, const std::string&, size_t>(), "threads"_a, "isa"_a, "nontemporal_threshold"_a)
        .def_prop_ro("isa", [](const Mover& mover) { return std::string(mover.isa()); })
        .def(
            "copy",
            [](Mover& mover, uintptr_t table, int64_t count, uintptr_t my_bases, uintptr_t their_bases, int64_t layers,
               bool to_mine, uintptr_t cancel, int64_t deadline_ns) {
                const Call c = call(table, count, my_bases, their_bases, layers, to_mine, cancel, deadline_ns);
                Outcome outcome;
                {
                    nb::gil_scoped_release release;
                    outcome = mover.copy(c.pieces, c.limits);
                }
                return result(outcome);
            },
            "table"_a, "count"_a, "my_bases"_a, "their_bases"_a, "layers"_a, "to_mine"_a, "cancel"_a, "deadline_ns"_a)
        .def(
            "copy_process",
            [](Mover& mover, int pid, uintptr_t table, int64_t count, uintptr_t my_bases, uintptr_t their_bases,
               int64_t layers, bool to_mine, uintptr_t cancel, int64_t deadline_ns) {
                const Call c = call(table, count, my_bases, their_bases, layers, to_mine, cancel, deadline_ns);
                Outcome outcome;
                {
                    nb::gil_scoped_release release;
                    outcome = mover.copy_process(pid, c.pieces, c.limits);
                }
                return result(outcome);
            },
            "pid"_a, "table"_a, "count"_a, "my_bases"_a, "their_bases"_a, "layers"_a, "to_mine"_a, "cancel"_a,
            "deadline_ns"_a);

    nb::class_<Segment>(m, "Mapping")
        .def(nb::init<int, size_t>(), "fd"_a, "nbytes"_a)
        .def_prop_ro("address", [](const Segment& segment) { return reinterpret_cast<uintptr_t>(segment.base()); })
        .def_prop_ro("nbytes", &Segment::bytes);
}

}  // namespace cam
