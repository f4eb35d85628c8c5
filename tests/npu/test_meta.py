"""Every torch_npu call that CAM makes, executed on meta tensors with the wheel's own schemas and shape functions."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu import torch_npu_wheel

ROOT = Path(__file__).parents[2]

if torch_npu_wheel.wheel() is None:
    pytest.skip(f"the torch_npu wheel is not here: {torch_npu_wheel.COMMAND}", allow_module_level=True)

# Definitions in torch's registry cannot be taken back, and other tests define the same operations with doubles.
PROGRAM = """
import torch
from tests.npu import torch_npu_wheel
from cam.npu.mc2 import Mc2
from cam.npu.soc import soc

torch_npu_wheel.load_meta([
    "npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2", "npu_moe_init_routing_v2",
    "npu_moe_token_permute", "npu_moe_token_unpermute",
], torch_npu_wheel.wheel())

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")

def expect(tensor, shape, dtype):
    assert tuple(tensor.shape) == shape and tensor.dtype == dtype, (tensor.shape, tensor.dtype, shape, dtype)

for chip, tokens in (("Ascend910B3", 256), ("Ascend910_9392", 512), ("Ascend950PR_9579", 512)):
    for quant, row_type in ((None, torch.bfloat16), ("int8", torch.int8)):
        kernels = Mc2(soc(chip), "group", 3, 16, 256, tokens, quant)
        kernels.check(64, 8, 7168, torch.bfloat16, {"HCCL_BUFFSIZE": str(kernels.buffsize_mb(8, 7168))})
        capacity = tokens * 16 * 8
        ids, weights = meta(64, 8, dtype=torch.int32), meta(64, 8, dtype=torch.float32)
        rows, scales, assist, counts, recv_counts, *_ = kernels.dispatch(meta(64, 7168), ids)
        expect(rows, (capacity, 7168), row_type)
        expect(assist, (capacity * 128,), torch.int32)
        expect(counts, (16,), torch.int64)
        expect(recv_counts, (16 * 16,), torch.int32)
        out = kernels.combine(meta(capacity, 7168), ids, weights, assist, recv_counts)
        expect(out, (64, 7168), torch.bfloat16)

ids = meta(100, 8, dtype=torch.int32)
permuted, sorted_indices = torch.ops.npu.npu_moe_token_permute(meta(100, 7168), ids)
expect(permuted, (800, 7168), torch.bfloat16)
expect(sorted_indices, (800,), torch.int32)
out = torch.ops.npu.npu_moe_token_unpermute(permuted, sorted_indices, probs=meta(100, 8, dtype=torch.float32))
expect(out, (100, 7168), torch.bfloat16)
q, index, counts, scales = torch.ops.npu.npu_moe_init_routing_v2(
    meta(100, 7168), ids, active_num=800, expert_num=257, expert_tokens_num_type=1, expert_tokens_num_flag=True,
    quant_mode=1, active_expert_range=[0, 257], row_idx_type=0)
expect(q, (800, 7168), torch.int8)
expect(index, (800,), torch.int32)
expect(counts, (257,), torch.int64)
expect(scales, (800,), torch.float32)
try:
    Mc2(soc("Ascend910_9392"), "group", 16, 16, 256, 64, None).dispatch(meta(64, 7168), meta(64, 8, dtype=torch.int32))
except RuntimeError as error:
    assert "ep_rank_id" in str(error)
else:
    raise AssertionError("a rank out of range was accepted")
print("all calls accepted")
"""


def test_every_call_is_accepted_by_the_wheels_schemas_and_meta_kernels() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all calls accepted" in done.stdout
