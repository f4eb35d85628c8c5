// The reductions for portable; CMakeLists.txt gives this file its instruction set.
#include "reduce_impl.h"

namespace cam {
const ReduceKernels& reduce_portable() {
    static constexpr ReduceKernels kernels = {reduce_ranks};
    return kernels;
}
}  // namespace cam
