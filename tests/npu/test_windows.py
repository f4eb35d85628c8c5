"""Windows of CAM's own kernels: what ranks write there, peers see; failures are everybody's; nothing is left.

The NPU form runs on CPU tensors, with torch_npu's two functions for handles between processes replaced by torch's own
for shared memory. That they exist and take what they give is read from the pinned wheel.
"""

import ast
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import cam
from cam.npu import windows
from cam.npu.windows import Windows, open_windows
from tests.launcher import Ranks
from tests.npu import torch_npu_wheel

CPU = torch.device("cpu")


def write_everywhere(group: Any, opened: Windows) -> list[int]:
    """Every rank writes its number at its place in all windows, through their addresses; returns what it then finds."""
    for rank, base in enumerate(opened.bases):
        theirs = windows._bytes_at(base, group.size)
        assert rank != group.rank or theirs.data_ptr() == opened.memory.data_ptr()
        theirs[group.rank] = group.rank + 1
    group.barrier()
    found: list[int] = opened.memory[: group.size].tolist()
    return found


def shared(group: Any, nbytes: int) -> list[int]:
    opened = open_windows(group, nbytes, CPU, 20.0)
    assert opened.memory.shape == (nbytes,)
    assert not opened.memory.any()
    group.barrier()
    return write_everywhere(group, opened)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_what_one_rank_writes_the_others_see(world: int) -> None:
    with Ranks(world) as ranks:
        assert ranks.run(shared, 5000) == [list(range(1, world + 1))] * world


def alarmed(group: Any) -> list[int | None]:
    opened = open_windows(group, 512, CPU, 20.0)
    before = opened.alarm()
    group.barrier()
    if group.rank == 1:
        opened.raise_alarm()
    group.barrier()
    return [before, opened.alarm()]


def test_an_alarm_is_seen_by_all() -> None:
    with Ranks(3) as ranks:
        assert ranks.run(alarmed) == [[None, 1]] * 3


def left_behind(group: Any) -> tuple[int, int]:
    """Descriptors and window mappings after many windows, more than before."""
    counts = []
    for _ in range(2):
        for _ in range(5):
            open_windows(group, 1 << 20, CPU, 20.0)
        maps = Path("/proc/self/maps").read_text().count("-ascend-")
        counts.append((len(os.listdir("/proc/self/fd")), maps))
    return counts[1][0] - counts[0][0], counts[1][1]


def test_nothing_is_left_of_windows() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(left_behind) == [(0, 0)] * 2


def one_cannot(group: Any) -> str:
    """Rank 1 cannot make its window."""
    if group.rank == 1:
        windows.Segment = _refusing  # type: ignore[assignment, misc]
    try:
        open_windows(group, 512, CPU, 20.0)
    except cam.NotReachable as error:
        return str(error)
    return "opened"


def _refusing(name: str, size: int) -> None:
    raise OSError("no memory for it")


def test_a_window_that_cannot_be_made_is_everybodys_error() -> None:
    with Ranks(3) as ranks:
        for text in ranks.run(one_cannot):
            assert "rank 1: a window of 4608 bytes cannot be made: no memory for it" in text
        ranks.discard()  # one of them has a patched module


def over_handles(group: Any, nbytes: int) -> list[int]:
    storage: Any = torch.UntypedStorage
    storage._share_npu_, storage._new_shared_npu = _share, staticmethod(_new_shared)
    heads = windows._open_npu(group, windows._HEAD_BYTES + nbytes, 20.0, CPU)
    return write_everywhere(group, Windows(group.rank, heads, []))


def _share(storage: Any) -> tuple[int, bytes, int, int, bytes, int, bytes, bool]:
    fd, size = storage._share_fd_cpu_()  # moves the storage into shared memory, at first
    return 0, f"{os.getpid()}:{fd}".encode(), size, 0, b"", 0, b"", False


def _new_shared(device: int, handle: bytes, size: int, *counters: object) -> Any:
    pid, fd = handle.decode().split(":")
    return torch.UntypedStorage._new_shared_fd_cpu(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), size)


def test_windows_over_handles_between_processes() -> None:
    with Ranks(3) as ranks:
        assert ranks.run(over_handles, 700) == [[1, 2, 3]] * 3
        ranks.discard()


def test_handles_have_the_fields_that_torch_npu_gives_and_takes() -> None:
    path = torch_npu_wheel.wheel()
    if path is None:
        pytest.skip(f"the torch_npu wheel is not here: {torch_npu_wheel.COMMAND}")
    tree = ast.parse(zipfile.ZipFile(path).read("torch_npu/multiprocessing/reductions.py"))
    given, taken = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "_share_npu_" in ast.dump(node.value):
            given = [ast.unparse(each) for each in node.targets[0].elts]  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("._new_shared_npu"):
            taken = [ast.unparse(each) for each in node.args]
    assert given == [
        "device", "handle", "storage_size_bytes", "storage_offset_bytes", "ref_counter_handle", "ref_counter_offset",
        "event_handle", "event_sync_required",
    ]  # fmt: skip
    assert [each.removeprefix("storage_") for each in taken] == [each.removeprefix("storage_") for each in given]
