"""What `cam doctor` says about Ascend NPUs: what is installed, and what would be used. Imports nothing of the vendor's.

Not run on hardware: on a machine with an NPU the lines about the chip come from torch_npu as documented.
"""

import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cam.errors import BackendUnavailable, CamError
from cam.npu import vendor
from cam.npu.expert_parallel import choose
from cam.npu.mc2 import configured_buffsize_mb
from cam.npu.soc import Soc, soc

NOT_RUN = "CAM's NPU paths have not been run on hardware."


def present() -> bool:
    """Whether this process has torch_npu loaded and an NPU to use."""
    npu: Any = getattr(torch, "npu", None)
    return npu is not None and bool(npu.is_available())


def chip() -> Soc:
    """The NPU of this process. Raises BackendUnavailable."""
    if not present():
        raise BackendUnavailable("no NPU: torch_npu is not loaded, or finds no device")
    npu: Any = torch.npu  # type: ignore[attr-defined]
    return soc(str(npu.get_device_name()))


def lines(environment: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """(what, found) pairs for a table."""
    return [
        ("torch_npu", _version("torch-npu")),
        ("CANN", _cann(environment)),
        ("NPU", _try(lambda: f"{chip().name} ({chip().generation})")),
        ("HCCL_BUFFSIZE", _try(lambda: f"{configured_buffsize_mb(environment)} MB per communicator")),
        ("umdk_cam_op_lib", "installed for NPUs" if vendor.installed() else "no kernels for NPUs"),
        ("decode batches", _path(max_tokens=1)),
        ("other batches", _path(max_tokens=None)),
        ("CAM's own kernels", "opt-in, ep_kernels='ascend'; tested from their Ascend IR (make test-ascend)"),
    ]


def _path(max_tokens: int | None) -> str:
    if not present():
        return "-"

    def describe() -> str:
        choice = choose(
            chip(),
            num_experts=64,
            world=8,
            max_tokens=max_tokens,
            quant=None,
            vendor_installed=vendor.installed(),
        )
        reasons = "; ".join(f"{name}: {why}" for name, why in choice.reasons.items())
        return f"{choice.path} ({reasons})" if reasons else choice.path

    return _try(describe)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cann(environment: Mapping[str, str]) -> str:
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    if not home:
        return "not set up (ASCEND_HOME_PATH is not set: source set_env.sh of the toolkit)"
    for name in ("version.cfg", "compiler/version.info", "version.info"):
        file = Path(home) / name
        if file.is_file():
            for line in file.read_text(errors="replace").splitlines():
                if "version" in line.lower() and "=" in line:
                    return f"{line.split('=', 1)[1].strip()} in {home}"
    return f"of unknown version in {home}"


def _try(describe: Any) -> str:
    try:
        return str(describe())
    except CamError as error:
        return str(error)
