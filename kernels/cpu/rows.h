// What is done to single rows: copy, quantise, weighted sum. One table of functions per instruction set; all of them
// give the same bits, because every sum has one fixed order and nothing is contracted into fused multiply-adds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cam {

enum class Dtype : int64_t { bfloat16 = 0, float16 = 1, float32 = 2, opaque = 3 };

inline size_t element_size(Dtype dtype) {
    switch (dtype) {
        case Dtype::bfloat16:
        case Dtype::float16:
            return 2;
        case Dtype::float32:
            return 4;
        case Dtype::opaque:
            return 1;
    }
    return 1;
}

inline constexpr int64_t kFp8Group = 128;  // channels per fp8 scale (DeepEP's)

struct RowKernels {
    const char* isa;

    void (*copy)(void* dst, const void* src, size_t bytes, bool nontemporal);
    // With non-temporal stores, fetching ahead, at the end already from `next`, which is read after this.
    void (*copy_ahead)(void* dst, const void* src, size_t bytes, const void* next);
    void (*zero)(void* dst, size_t bytes);
    // Makes non-temporal stores visible before the flag that announces them.
    void (*fence)();

    // s = amax(|row|) / 127, q = round_half_even(x / s); a zero row gives q = 0, s = 0. Returns s.
    float (*quant_int8)(int8_t* q, const void* x, int64_t hidden, Dtype dtype);
    // Per kFp8Group channels: amax = max(|x|, 1e-4), s = amax / 448, q = e4m3(x / s) to nearest even, saturating.
    void (*quant_fp8)(uint8_t* q, float* scales, const void* x, int64_t hidden, Dtype dtype);

    // out = round(0 + w[0] * rows[0] + w[1] * rows[1] + ... (+ bias)), fp32, in this order; weights may be null (ones).
    void (*reduce)(void* out, const void* const* rows, const float* weights, int count, const void* bias,
                   int64_t hidden, Dtype dtype, bool nontemporal);
    // dst = round(weight * src)
    void (*scale)(void* dst, const void* src, float weight, int64_t hidden, Dtype dtype, bool nontemporal);
    // fp32 dot product: 16 lanes by index modulo 16, each in order, then lanes added pairwise.
    float (*dot)(const void* a, const void* b, int64_t hidden, Dtype dtype);
};

// Names of the tables this machine can run, best first.
std::vector<std::string> available_isas();
// "auto" or one of available_isas(); throws Error(bad_input) that lists them.
const RowKernels& row_kernels(const std::string& isa);

}  // namespace cam
