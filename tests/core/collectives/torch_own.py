"""PyTorch's own tests of torch.distributed (they come with its wheel), with cam as the backend.

    python -m pytest tests/core/collectives/torch_own.py --timeout=600      # or: nox -s c10d

Not part of `make test`: each of them starts its processes afresh, which takes seconds where ours take milliseconds.
Left out are tests of accelerators, of other backends, and those whose subject is not the backend (optimizers ...).
"""

import atexit
import os
import shutil
import tempfile

# The spawned ranks import this as well, and must meet in the folder of the first.
_directory = os.environ.get("TEMP_DIR", "")
if not _directory:
    _directory = tempfile.mkdtemp(prefix="cam-c10d-")
    atexit.register(shutil.rmtree, _directory, ignore_errors=True)
for _folder in ("barrier", "test_dir"):
    os.makedirs(os.path.join(_directory, _folder), exist_ok=True)
# Torch's tests read these when they are imported.
os.environ.update(BACKEND="cam", WORLD_SIZE="2", TEMP_DIR=_directory, INIT_METHOD="env://")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29777")

from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)

_SUBJECTS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "coalescing_manager",
    "destroy",
    "gather",
    "get_",
    "irecv",
    "isend",
    "new_subgroups",
    "reduce",
    "scatter",
    "send_recv",
)
_OTHERS = ("cuda", "gpu", "nccl", "profiler", "sparse", "DistributedDataParallel", "get_data_parallel_params", "ddp")


class TestCam(TestDistBackend, DistributedTest._DistTestBase):
    """Each test runs in processes of its own."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


for _name in dir(TestCam):
    _about = _name.removeprefix("test_")
    if _name.startswith("test_") and (not _about.startswith(_SUBJECTS) or any(other in _name for other in _OTHERS)):
        getattr(TestCam, _name).__test__ = False  # not collected; setUp asks for one of them
