// The row kernels for avx512; CMakeLists.txt gives this file its instruction set.
#include "rows_impl.h"

namespace cam {
const RowKernels& rows_avx512() {
    static constexpr RowKernels kernels = table("avx512");
    return kernels;
}
}  // namespace cam
