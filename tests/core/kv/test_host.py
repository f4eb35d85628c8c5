"""What the host allows and what is left on it: refusals of the kernel, processes that are killed."""

import ctypes
import os
import struct
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from cam import NotReachable
from tests.core.kv import programs
from tests.core.kv.meeting import Meeting, make
from tests.core.kv.oracle import Shape
from tests.launcher import RankEnv, Ranks, reached

_PR_SET_DUMPABLE = 4
_CAP_SYS_PTRACE = 19
_SHAPE = Shape("bpthd", 8, 16, 2, channels=8)


def _zeros(tensor, _layer) -> None:
    tensor.zero_()


def _give_up_ptrace() -> None:
    """This thread, and those that it starts, may attach to no process that is not dumpable."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", 0x20080522, 0)
    data = ctypes.create_string_buffer(24)
    if libc.capget(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    words = list(struct.unpack("=6I", data.raw))
    for index in range(3):  # effective, permitted, inheritable
        words[index] &= ~(1 << _CAP_SYS_PTRACE)
    if libc.capset(header, struct.pack("=6I", *words)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _forbidden(env: RankEnv, name: str) -> str:
    meeting = Meeting(env, name)
    if env.rank == 0:
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
        engine, _ = make("owner", _SHAPE, 1, shared=False, fill=_zeros)
        with engine:
            meeting.put("owner", engine.describe())
            meeting.get("done")
        return ""
    _give_up_ptrace()
    engine, _ = make("reader", _SHAPE, 1, shared=False, fill=_zeros)
    with engine:
        description = meeting.get("owner")
        try:
            with pytest.raises(NotReachable) as caught:
                engine.open(description, transport="cma")
        finally:
            meeting.put("done")
        return str(caught.value)


def test_cma_says_so_when_the_kernel_forbids_it():
    with Ranks(2, group=False) as ranks:
        run = ranks.start(_forbidden, str(uuid.uuid4()))
        ranks.kill(0, 0)  # no signal: later tests get other processes
        _, said = run.join()
    assert "EPERM" in said
    assert "ptrace_scope" in said


def _shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _owner_forever(env: RankEnv, name: str) -> None:
    meeting = Meeting(env, name)
    if env.rank == 0:
        engine, tensors = make("owner", programs.BIG, 2, shared=True, fill=_zeros)
        meeting.put("owner", engine.describe())
        reached("ready")
        meeting.get("never")
        del tensors
        return
    engine, tensors = make("reader", programs.BIG, 2, shared=True, fill=_zeros)
    remote = engine.open(meeting.get("owner"))
    blocks = list(range(programs.BIG.blocks))
    reached("ready")
    while True:
        engine.read(remote, blocks, blocks).wait()


def test_nothing_is_left_after_kill_9_of_both_sides_again_and_again():
    before = _shared_files()
    for round_ in range(5):
        with Ranks(2, group=False, deadline=60) as ranks:
            run = ranks.start(_owner_forever, str(uuid.uuid4()))
            for rank in (0, 1):
                run.wait_reached(rank, "ready")
            pids = ranks.pids
            for rank in (round_ % 2, 1 - round_ % 2):
                ranks.kill(rank)
            run.join(expect_errors=True)
        assert not any(Path(f"/proc/{pid}/fd").exists() and os.listdir(f"/proc/{pid}/fd") for pid in pids)
    assert _shared_files() <= before


def test_an_engine_that_nobody_closed_lets_its_process_end():
    program = (
        "import torch\nfrom cam import kv\n"
        "a, b = kv.Engine('a'), kv.Engine('b')\n"
        "for e in (a, b):\n"
        "    e.register([kv.Layer('l', e.empty((4, 16, 8), torch.float32), 'btd')])\n"
        "a.read(a.open(b.describe()), [0], [1], notify=b'x').wait()\n"
        "print('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
