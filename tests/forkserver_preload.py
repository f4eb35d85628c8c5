"""Imported once, inside multiprocessing's fork server, before any rank is forked from it.

Everything slow to import is paid for here, so that starting a rank is one fork. The fork server also asks the
kernel to kill it when pytest dies; ranks ask the same with respect to the fork server
(tests/rank_process.py), so a `kill -9` of pytest takes the whole tree with it, even ranks that hang or are
stopped.
"""

import contextlib
import ctypes
import gc
import importlib
import signal

PR_SET_PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

for name in (
    "numpy",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "hypothesis",
    "pytest",
    "cam",
    "cam.ep",
    "cam_kernels.ascend.expert_parallel",  # only where triton-ascend is
    "tests.rank_process",
):
    # cam may be half written while it is being worked on: the rank then reports the import error itself.
    with contextlib.suppress(Exception):
        importlib.import_module(name)

# Objects made so far are never collected in the children: their pages stay shared.
gc.collect()
gc.freeze()
