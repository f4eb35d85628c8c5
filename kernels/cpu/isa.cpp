// Which table of row kernels this machine runs. Asked once per group, at run time: one wheel serves all CPUs.
#include <string>

#include "errors.h"
#include "rows.h"

namespace cam {

const RowKernels& rows_portable();
#if defined(CAM_X86)
const RowKernels& rows_avx2();
const RowKernels& rows_avx512();
#endif

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
#if defined(CAM_X86)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq")) {
        names.push_back("avx512");
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) names.push_back("avx2");
#endif
    names.push_back("portable");
    return names;
}

const RowKernels& row_kernels(const std::string& isa) {
    const auto names = available_isas();
    std::string known;
    for (const auto& name : names) {
        known += (known.empty() ? "" : ", ") + name;
        if (isa != "auto" && isa != name) continue;
#if defined(CAM_X86)
        if (name == "avx512") return rows_avx512();
        if (name == "avx2") return rows_avx2();
#endif
        if (name == "portable") return rows_portable();
    }
    bad_input("isa '" + isa + "' is not available on this machine; it has: auto, " + known + " (knob: isa / CAM_ISA)");
}

}  // namespace cam
