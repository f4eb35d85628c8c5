// What collectives reduce: element types, reductions, and one table of functions per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace cam {

enum class Element : int64_t { bfloat16, float16, float32, float64, int8, uint8, int16, int32, int64, boolean };
enum class Reduction : int64_t { sum, average, product, minimum, maximum, bit_and, bit_or, bit_xor, premul_sum };

// Both throw Error(bad_input), which lists the names there are.
Element element_named(const std::string& name);
Reduction reduction_named(const std::string& name);
const char* element_name(Element element);
const char* reduction_name(Reduction reduction);
size_t element_bytes(Element element);

// factor: what premul_sum multiplies each rank's elements by.
struct ReduceSpec {
    Element element = Element::float32;
    Reduction reduction = Reduction::sum;
    double factor = 1.0;
};

// Throws Error(bad_input) where a reduction has no meaning for the element type.
void check_reducible(const ReduceSpec& spec);

struct ReduceKernels {
    // out[i] = sources[0][i] (+) sources[1][i] (+) ..., in this order. bf16 and fp16 accumulate in fp32 and are rounded
    // once. out may be one of the sources. A NaN anywhere gives NaN, in minimum and maximum too; integers wrap around;
    // average divides by `count`, integers towards zero; for bool, sum is or, product is and.
    void (*reduce)(void* out, const void* const* sources, int count, int64_t elements, const ReduceSpec& spec);
};

// As row_kernels() in rows.h.
const ReduceKernels& reduce_kernels(const std::string& isa);

}  // namespace cam
