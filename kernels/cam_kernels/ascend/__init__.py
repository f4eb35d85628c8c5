"""CAM's kernels for Ascend NPUs: Triton-Ascend sources, the compilers that take them to the device and to this CPU,
and the checks on what the device would run. README.md is the page for kernel authors.

    kernels/                                                          the kernels
    routing, expert_parallel, experts, deep_moe, paging, buckets,
    quantising                                                        host code, an operation each
    window, tiling                                                    memory layout, block sizes
    kernel, linalg, hivm, native, hivm_native, launch, cache,
    toolchain                                                         compiling and launching
    hivm_graph, hivm_check, catalogue                                 what is checked without an NPU

Needs an environment of its own, because triton-ascend owns the import name `triton`. Importing this package imports
none of it; toolchain.usable() and toolchain.report() say what is there.

Not run on hardware.
"""
