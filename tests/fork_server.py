"""The process that ranks are forked from: multiprocessing's fork server, with everything slow already
imported.
"""

import os
import sys
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).parent.parent


def running() -> bool:
    return forkserver._forkserver._forkserver_pid is not None  # type: ignore[attr-defined]


def pid() -> int:
    if not running():
        raise RuntimeError("the fork server is not running")
    number: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return number


def start() -> None:
    """Call it from the main thread: the server dies with the thread that started it
    (forkserver_preload.py).
    """
    forkserver.set_forkserver_preload(["tests.forkserver_preload"])
    # Python < 3.12.3 does not give sys.path to the fork server before it preloads (cpython gh-117378).
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(path for path in sys.path if path)])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
