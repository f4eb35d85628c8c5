// The row kernels for portable; CMakeLists.txt gives this file its instruction set.
#include "rows_impl.h"

namespace cam {
const RowKernels& rows_portable() {
    static constexpr RowKernels kernels = table("portable");
    return kernels;
}
}  // namespace cam
