"""The kernel in README.md compiles, runs and passes the checks: what the page says, works."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import cam_kernels.ascend
from cam_kernels.ascend import hivm, linalg
from cam_kernels.ascend.hivm_check import Expectation, check
from cam_kernels.ascend.launch import NativeLauncher

README = Path(cam_kernels.ascend.__file__).with_name("README.md").read_text()
HEADER = """
import triton
import triton.language as tl
from cam_kernels.ascend.kernel import Kernel
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Any:
    source, _ = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    file = tmp_path / "readme_kernel.py"  # Triton reads the source of a kernel from its file
    file.write_text(HEADER + source)
    namespace: dict[str, Any] = {"__name__": "readme_kernel", "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    return namespace["SCALE_ROWS"]


def test_the_example_runs(kernel: Any) -> None:
    x, launcher = torch.randn(5, 3000).bfloat16(), NativeLauncher(cores=4)
    out = torch.empty_like(x)
    launcher.launch(kernel, launcher.cores, x, out, 5, 3000, 2.0, BH=1024)
    assert torch.equal(out, x * 2)


@pytest.mark.parametrize("target", hivm.TARGETS)
def test_the_example_keeps_the_rules(kernel: Any, target: str) -> None:
    variant = kernel.variant(
        {"x_ptr": "*bf16", "out_ptr": "*bf16", "R": "i32", "H": "i32", "factor": "fp32"}, {"BH": 1024}
    )
    assert not check(hivm.compile_hivm(linalg.lower(variant), target), Expectation()).findings


def test_every_rule_of_the_checker_is_explained() -> None:
    from cam_kernels.ascend import hivm_check

    rules = set(re.findall(r'Finding\(\s*"([a-z-]+)"', Path(hivm_check.__file__).read_text()))
    assert rules == set(re.findall(r"^\| ([a-z-]+) \|", README, re.MULTILINE)) - {"rule", "---"}
