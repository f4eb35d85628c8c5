"""What installing cam-deepspeed does to DeepSpeed: in processes of their own, because it happens at the import."""

import os
import subprocess
import sys

import pytest

from adapters.deepspeed.tests.environment import skip_without_deepspeed, variables

skip_without_deepspeed()

IMPORT_S = 120


def python(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CAM_")}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=clean | variables() | environment,
        capture_output=True,
        text=True,
        timeout=IMPORT_S,
    )


BACKEND = """
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
print(get_accelerator().communication_backend_name(), get_accelerator().device_name(),
      hasattr(DeepSpeedEngine._configure_distributed_model, "_cam_deepspeed"))
import sys
print("cam.ep" in sys.modules)
"""


@pytest.mark.parametrize(
    ("first", "environment", "answer"),
    [
        ("", {}, "gloo cpu True"),
        ("", {"CAM_DEEPSPEED": "1"}, "cam cpu True"),
        ("import torch", {"CAM_DEEPSPEED": "backend, moe"}, "cam cpu True"),
        ("", {"CAM_DEEPSPEED": "moe"}, "gloo cpu True"),
        ("import cam_deepspeed", {"CAM_DEEPSPEED": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "cam cpu True"),
        ("import deepspeed, cam_deepspeed", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "gloo cpu True"),
    ],
)
def test_deepspeed_is_patched_whoever_is_imported_first(first: str, environment: dict[str, str], answer: str) -> None:
    done = python(first + BACKEND, **environment)
    assert done.returncode == 0, done.stderr
    assert answer in done.stdout


def test_a_wrong_value_is_refused() -> None:
    done = python("import deepspeed", CAM_DEEPSPEED="yes")
    assert done.returncode != 0
    assert "CAM_DEEPSPEED must be 1, 0 or of backend, moe; got 'yes'" in done.stderr


CHANGED = """
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.runtime.engine import DeepSpeedEngine
from cam_deepspeed import patches
original = DeepSpeedEngine._configure_distributed_model.__wrapped__
DeepSpeedEngine._configure_distributed_model = original
AutoEPMoELayer._deepep_route = lambda self, tokens, router_output, extra: None
try:
    patches.install()
except patches.TargetChanged as error:
    print("refused:", error)
print("untouched:", DeepSpeedEngine._configure_distributed_model is original)
"""


def test_a_changed_target_is_refused_before_anything_is_patched() -> None:
    done = python(CHANGED)
    assert "refused: DeepSpeed 0.19" in done.stdout, done.stderr
    assert "(self, tokens, router_output, extra), expected (self, tokens, ro)" in done.stdout
    assert "untouched: True" in done.stdout


def test_importing_torch_imports_no_deepspeed() -> None:
    done = python("import torch, sys; print(sorted(name for name in sys.modules if 'deepspeed' in name))")
    assert done.stdout.strip() == "['cam_deepspeed', 'cam_deepspeed.autoload']", done.stdout + done.stderr
