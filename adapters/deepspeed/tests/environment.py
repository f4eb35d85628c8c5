"""What DeepSpeed needs from its process: variables, and an op that it builds for itself."""

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Beside the interpreter: the op belongs to one DeepSpeed and one torch.
EXTENSIONS = Path(sys.prefix) / "torch_extensions"
BUILD_S = 900.0
_BUILD = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load(verbose=False)"


def skip_without_deepspeed() -> None:
    """At the head of a test file."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: `make test-deepspeed` runs these", allow_module_level=True)


def variables() -> dict[str, str]:
    # The ninja of this virtual environment: another one may not know the log of the first, and build everything again.
    path = os.pathsep.join([str(Path(sys.executable).absolute().parent), os.environ.get("PATH", "")])
    return {
        "PATH": path,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(EXTENSIONS)),
    }


def prepare(work: Path | None = None) -> None:
    """Builds deepspeed_shm_comm, or finishes it; the first init_distributed on a CPU would do it otherwise.

    A build that was killed leaves a file `lock` behind, for which torch's loader then waits for ever. Only one process
    builds here, so the file means just that.

    work: given by ci's suite runner, whose pytest processes then inherit the variables.
    """
    if work is not None:
        os.environ.update(variables())
    environment = os.environ | variables()
    folder = Path(environment["TORCH_EXTENSIONS_DIR"]) / "deepspeed_shm_comm"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "cam-build.lock", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        # Importing DeepSpeed takes seconds; where it has written what to build, ninja alone knows whether it is built.
        known = (folder / "build.ninja").exists()
        command = ["ninja"] if known else [sys.executable, "-c", _BUILD]
        subprocess.run(command, cwd=folder if known else None, env=environment, check=True, timeout=BUILD_S)
