// Prints a digest of what the portable row kernels give for fixed inputs. Built for several processors by
// test_aarch64.py, which compares the digests: the results must have the same bits everywhere.
#include <cstdio>
#include <vector>

#include "rows.h"

namespace cam {
const RowKernels& rows_portable();
}

namespace {

uint64_t state = 1;
uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 32);
}

uint64_t digest = 14695981039346656037u;
void add(const void* data, size_t bytes) {
    const auto* byte = static_cast<const unsigned char*>(data);
    for (size_t i = 0; i < bytes; ++i) digest = (digest ^ byte[i]) * 1099511628211u;
}

// Random bits with NaN and infinity left out: their payloads may differ between processors.
std::vector<uint32_t> row(cam::Dtype dtype, int64_t hidden) {
    std::vector<uint32_t> words(hidden + 16);
    for (auto& word : words) {
        word = next();
        if (dtype == cam::Dtype::float32) word &= ~0x40000000u;
        if (dtype == cam::Dtype::bfloat16) word &= ~0x40004000u;
        if (dtype == cam::Dtype::float16) word &= ~0x40004000u;
    }
    return words;
}

}  // namespace

int main() {
    const cam::RowKernels& kernels = cam::rows_portable();
    for (const auto dtype : {cam::Dtype::bfloat16, cam::Dtype::float16, cam::Dtype::float32}) {
        for (const int64_t hidden : {1, 7, 16, 100, 128, 300}) {
            const std::vector<uint32_t> rows[3] = {row(dtype, hidden), row(dtype, hidden), row(dtype, hidden)};
            const void* pointers[3] = {rows[0].data(), rows[1].data(), rows[2].data()};
            const float weights[3] = {0.3f, -1.7f, 1e-3f};
            const size_t bytes = hidden * cam::element_size(dtype);
            std::vector<uint32_t> out(hidden + 16);
            kernels.reduce(out.data(), pointers, weights, 3, rows[0].data(), hidden, dtype, false);
            add(out.data(), bytes);
            kernels.reduce(out.data(), pointers, nullptr, 2, nullptr, hidden, dtype, true);
            add(out.data(), bytes);
            const float dot = kernels.dot(pointers[0], pointers[1], hidden, dtype);
            add(&dot, sizeof dot);
            std::vector<int8_t> q(hidden);
            const float scale = kernels.quant_int8(q.data(), pointers[2], hidden, dtype);
            add(&scale, sizeof scale);
            add(q.data(), q.size());
            std::vector<uint8_t> e4m3(hidden);
            std::vector<float> scales((hidden + cam::kFp8Group - 1) / cam::kFp8Group);
            kernels.quant_fp8(e4m3.data(), scales.data(), pointers[2], hidden, dtype);
            add(scales.data(), scales.size() * sizeof(float));
            add(e4m3.data(), e4m3.size());
            kernels.copy(out.data(), pointers[1], bytes, true);
            add(out.data(), bytes);
        }
    }
    kernels.fence();
    std::printf("%016llx\n", static_cast<unsigned long long>(digest));
}
