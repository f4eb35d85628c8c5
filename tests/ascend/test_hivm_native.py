"""Running final HIVM on the CPU shows what it is there to show: misplaced tiles, and work the compiler threw away."""

import re
from dataclasses import replace

import pytest
import torch

from cam_kernels.ascend import hivm, hivm_native, linalg
from cam_kernels.ascend.errors import CompileFailed
from cam_kernels.ascend.kernels.quant import QUANT_ROWS
from cam_kernels.ascend.launch import HivmLauncher, NativeKernel, NativeLauncher
from cam_kernels.reference import quant_int8
from tests.ascend.broken_kernels import BROKEN

VARIANT = QUANT_ROWS.variant(
    {"x_ptr": "*bf16", "q_ptr": "*i8", "scale_ptr": "*fp32", "R": "i32", "H": "i32"}, {"BH": 1024}
)


def quantise(module: hivm.HivmModule) -> bool:
    """Whether the module's kernel gives what the reference gives."""
    lowered = linalg.lower(VARIANT)
    kernel = NativeKernel(lowered, hivm_native.build(module), final=True)
    x = torch.randn(6, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, scale = torch.zeros(6, 1000, dtype=torch.int8), torch.zeros(6, 8)
    packed = kernel.pack([x, q, scale, 6, 1000])
    for program in range(2):
        kernel.run(packed, 2, program)
    wanted = quant_int8(x)
    return torch.equal(q, wanted[0]) and torch.equal(scale[:, 0], wanted[1])


@pytest.mark.parametrize("target", [hivm.A2, hivm.A3])
def test_tiles_that_overlap_give_wrong_results(target: str) -> None:
    """All of them are moved to one address."""
    module = hivm.compile_hivm(linalg.lower(VARIANT), target)
    assert quantise(module)
    moved = re.sub(r"pointer_cast\(%c\d+_i64\)", "pointer_cast(%c0_i64)", module.text)
    assert not quantise(replace(module, text=moved))


def test_a_wait_that_the_compiler_deleted_does_not_wait() -> None:
    """Its flags never come, and it returns at once: what the rule "missing" is for."""
    (variant,) = (v for rule, v, _ in BROKEN if rule == "missing")
    out = torch.zeros(8, dtype=torch.int32)
    HivmLauncher(cores=1).launch(variant.kernel, 1, torch.zeros(8, dtype=torch.int32), out, 5)
    assert out.tolist() == list(range(8))


def test_an_unknown_instruction_is_named() -> None:
    module = hivm.compile_hivm(linalg.lower(VARIANT), hivm.A3)
    with pytest.raises(CompileFailed, match="vsqueeze"):
        hivm_native.build(replace(module, text=module.text.replace("vabs_1d_float", "vsqueeze_1d_float")))
    with pytest.raises(CompileFailed, match=r"hivm\.hir\.nothing"):
        hivm_native.build(
            replace(module, text=module.text.replace("hivm.hir.get_block_idx -> i64", "hivm.hir.nothing"))
        )


def test_both_forms_agree_on_half_floats() -> None:
    """Conversions are written out in hivm_runtime.h: from denormals to infinity, both types, against torch."""
    from cam_kernels.ascend.quantising import dequant_int8

    for launcher in (NativeLauncher(cores=1), HivmLauncher(cores=1)):
        scale = torch.exp2(torch.linspace(-30, 20, 500))
        q = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).expand(500, 256).contiguous()
        for dtype in (torch.float16, torch.bfloat16):
            wanted = (q.float() * scale[:, None]).to(dtype)
            assert torch.equal(dequant_int8(launcher, q, scale, dtype), wanted)
