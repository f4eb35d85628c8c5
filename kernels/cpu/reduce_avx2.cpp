// The reductions for avx2; CMakeLists.txt gives this file its instruction set.
#include "reduce_impl.h"

namespace cam {
const ReduceKernels& reduce_avx2() {
    static constexpr ReduceKernels kernels = {reduce_ranks};
    return kernels;
}
}  // namespace cam
