// The reductions for avx512; CMakeLists.txt gives this file its instruction set.
#include "reduce_impl.h"

namespace cam {
const ReduceKernels& reduce_avx512() {
    static constexpr ReduceKernels kernels = {reduce_ranks};
    return kernels;
}
}  // namespace cam
