#include "elements.h"

#include <array>
#include <utility>

#include "errors.h"
#include "rows.h"

namespace cam {

const ReduceKernels& reduce_portable();
#if defined(CAM_X86)
const ReduceKernels& reduce_avx2();
const ReduceKernels& reduce_avx512();
#endif

namespace {

struct ElementFacts {
    const char* name;
    size_t bytes;
};
constexpr std::array<ElementFacts, 10> kElements = {{{"bfloat16", 2},
                                                     {"float16", 2},
                                                     {"float32", 4},
                                                     {"float64", 8},
                                                     {"int8", 1},
                                                     {"uint8", 1},
                                                     {"int16", 2},
                                                     {"int32", 4},
                                                     {"int64", 8},
                                                     {"bool", 1}}};
constexpr std::array<const char*, 9> kReductions = {"sum",     "avg",    "product", "min",       "max",
                                                    "bit_and", "bit_or", "bit_xor", "premul_sum"};

bool is_floating(Element element) { return element <= Element::float64; }

}  // namespace

Element element_named(const std::string& name) {
    std::string known;
    for (size_t i = 0; i < kElements.size(); ++i) {
        if (name == kElements[i].name) return static_cast<Element>(i);
        known += (known.empty() ? "" : ", ") + std::string(kElements[i].name);
    }
    bad_input("dtype '" + name + "' cannot be reduced; those that can are: " + known);
}

Reduction reduction_named(const std::string& name) {
    std::string known;
    for (size_t i = 0; i < kReductions.size(); ++i) {
        if (name == kReductions[i]) return static_cast<Reduction>(i);
        known += (known.empty() ? "" : ", ") + std::string(kReductions[i]);
    }
    bad_input("reduction '" + name + "' is not one of: " + known);
}

const char* element_name(Element element) { return kElements[static_cast<size_t>(element)].name; }
const char* reduction_name(Reduction reduction) { return kReductions[static_cast<size_t>(reduction)]; }
size_t element_bytes(Element element) { return kElements[static_cast<size_t>(element)].bytes; }

void check_reducible(const ReduceSpec& spec) {
    const bool bitwise = spec.reduction == Reduction::bit_and || spec.reduction == Reduction::bit_or ||
                         spec.reduction == Reduction::bit_xor;
    const bool refused = is_floating(spec.element)
                             ? bitwise
                             : spec.reduction == Reduction::premul_sum ||
                                   (spec.element == Element::boolean && spec.reduction == Reduction::average);
    if (!refused) return;
    bad_input(std::string(reduction_name(spec.reduction)) + " is not defined for " + element_name(spec.element));
}

const ReduceKernels& reduce_kernels(const std::string& isa) {
    const std::string chosen = row_kernels(isa).isa;  // one choice for all kernels, with one error message
#if defined(CAM_X86)
    if (chosen == "avx512") return reduce_avx512();
    if (chosen == "avx2") return reduce_avx2();
#endif
    return reduce_portable();
}

}  // namespace cam
