"""What is right: every op of CAM in a few lines of plain torch, slow and plainly correct.

Functions take the inputs of ALL ranks as lists (index = rank) and return what each rank must receive; nothing
here communicates or imports the native module. The CPU and Ascend kernels are tested against this package.
"""

from cam_kernels.reference.backward import combine_backward, dispatch_backward
from cam_kernels.reference.combine import combine, combined_weights
from cam_kernels.reference.dispatch import Received, dispatch, expert_ranges
from cam_kernels.reference.oracle import moe
from cam_kernels.reference.quant import dequant_fp8, dequant_int8, quant_fp8, quant_int8
from cam_kernels.reference.umdk import get_dispatch_layout, moe_combine_prefill, moe_dispatch_prefill

__all__ = [
    "Received",
    "combine",
    "combine_backward",
    "combined_weights",
    "dequant_fp8",
    "dequant_int8",
    "dispatch",
    "dispatch_backward",
    "expert_ranges",
    "get_dispatch_layout",
    "moe",
    "moe_combine_prefill",
    "moe_dispatch_prefill",
    "quant_fp8",
    "quant_int8",
]
