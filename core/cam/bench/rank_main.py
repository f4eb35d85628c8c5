"""How a rank of a benchmark starts and, whatever happens, ends: the one main of all workers."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch


class Spec(Protocol):
    """What every worker's specification says: whether the ranks were started by mpirun."""

    mpi: bool


def rank_main(spec_path: str, parse: Callable[[Any], Any], run: Callable[[Any, int], None]) -> None:
    """run(spec, rank) with the specification that lies in spec_path as JSON."""
    torch.set_num_threads(1)
    spec: Spec = parse(json.loads(Path(spec_path).read_text()))
    mpi: Any = None
    if spec.mpi:
        from mpi4py import MPI

        mpi = MPI
    rank = mpi.COMM_WORLD.rank if mpi else int(os.environ["RANK"])
    try:
        run(spec, rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if mpi:
            mpi.COMM_WORLD.Abort(1)  # MPI_Finalize would wait for ranks that are stuck in a call
        os._exit(1)  # as would Gloo's threads
