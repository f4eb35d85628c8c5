"""Expert parallelism on Ascend NPUs: which of the vendor's paths serves a buffer, its arguments and its limits.

    soc              what a chip allows
    mc2              torch_npu's npu_moe_distribute_dispatch_v2 / combine_v2: decode-size batches
    vendor           openEuler UMDK's umdk_cam_op_lib, where it is installed
    alltoall         HCCL all-to-all around torch_npu's permutations: everything else, and training
    expert_parallel  the choice between them, behind cam.ep.Buffer
    status           what `cam doctor` prints

Not run on hardware. What is tested without: every torch_npu call against the schemas and Meta kernels of the pinned
wheel, and the whole host side over Gloo with the NPU's operations replaced by plain torch.
"""
