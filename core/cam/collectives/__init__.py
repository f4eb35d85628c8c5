"""Collectives over the ranks' shared memory, and the torch.distributed backend `cam` on them.

    torch.distributed.init_process_group("cam")          # after `pip install cam`; "cpu:cam,npu:hccl" works as well

Floors of this package: reductions (what torch's names mean), engine (tensors of one cam.Group), work, process_group
(torch.distributed's face). The kernels move pieces of tensors through the ranks' windows: kernels/cpu/collectives.h.
"""
