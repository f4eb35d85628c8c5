"""Children that die with their parent, whatever kills it.

    python cam/bench/tether.py PARENT_PID COMMAND [ARGUMENT ...]

becomes COMMAND (exec), which the kernel kills when the parent ends. PARENT_PID: who that must be, 0: whoever it is.
Run by path, because as a module of the package it would first import torch, and until then a parent's end would go
unnoticed.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends.

    parent: its pid; where another process has taken its place, it has died before the request, and this one ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]) or os.getppid())
    os.execvp(sys.argv[2], sys.argv[2:])
