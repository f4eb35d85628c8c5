"""Children that die with their parent, whatever kills it.

    python cam/bench/tether.py PARENT_PID COMMAND [ARGUMENT ...]

becomes COMMAND (exec), which the kernel kills when the parent ends. For commands that cannot ask for that
themselves (mpirun). Run by path, because as a module of the package it would first import torch.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent ends.

    parent: the pid that must still be the parent, else this process ends at once: the parent may have died
    before the request.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
