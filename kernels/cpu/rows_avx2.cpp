// The row kernels for avx2; CMakeLists.txt gives this file its instruction set.
#include "rows_impl.h"

namespace cam {
const RowKernels& rows_avx2() {
    static constexpr RowKernels kernels = table("avx2");
    return kernels;
}
}  // namespace cam
