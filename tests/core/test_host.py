"""What a host must not notice: field-bugs 36-39. Memory leaves nothing behind, needs no room in /dev/shm,
survives those who only used it, and a forked child is told what it is.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cam
from tests.launcher import RankDied, RankEnv, Ranks, reached

CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x4000 | 1 << 18


def fill_and_wait(group: cam.Group) -> None:
    """Holds 8 MiB of window memory and works until it is killed."""
    tensor = group.empty((8 << 20,), torch.uint8).fill_(group.rank)
    reached("working")
    while True:
        group.barrier()
        tensor.add_(1)


def test_nothing_is_left_after_twenty_kills() -> None:
    """llm-d#352, #364. Every second round all ranks die at once, else one, and the other learns of it.

    Other programs may use /dev/shm meanwhile: what counts is that no file of it is mapped or opened by a rank.
    """
    name = f"killed-{os.getpid()}-"
    for turn in range(20):
        with Ranks(2, name=f"{name}{turn}") as ranks:
            pids = ranks.pids
            run = ranks.start(fill_and_wait)
            for rank in range(2):
                run.wait_reached(rank, "working")
                used = files_of(pids[rank])
                assert f"/memfd:cam-{name}{turn}" in used
                assert "/dev/shm" not in used
            for rank in range(2) if turn % 2 else [turn // 2 % 2]:
                ranks.kill(rank)
            results = run.join(expect_errors=True)
        assert any(isinstance(result, RankDied) for result in results)
        assert all(isinstance(result, RankDied | cam.PeerLost) for result in results)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not [file for file in os.listdir("/dev/shm") + os.listdir("/tmp") if name in file]
    # Without a name, memory exists as long as somebody holds it.
    everybody = map(int, filter(str.isdigit, os.listdir("/proc")))
    assert not [pid for pid in everybody if f"/memfd:cam-{name}" in files_of(pid)]


def files_of(pid: int) -> str:
    """All files that a process has mapped or open, as text; empty when it is gone or not ours."""
    process = Path(f"/proc/{pid}")
    files = []
    with contextlib.suppress(OSError):
        files.append((process / "maps").read_text())
        for link in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed just now
                files.append(os.readlink(link))
    return "\n".join(files)


def shm_of_64_mib(env: RankEnv) -> str:
    """In a mount namespace of its own, where /dev/shm is as small as in a container."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m"):
        return f"mount: {os.strerror(ctypes.get_errno())}"
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
    with cam.init(store=env.store, rank=env.rank, world_size=env.world_size) as group:
        tensor = group.empty((100 << 20,), torch.uint8).fill_(3)
        assert group.memory()["resident"] >= 100 << 20
        group.barrier()
        assert os.listdir("/dev/shm") == []
        assert tensor.eq(3).all()
    os._exit(0)  # a rank with a mount namespace of its own is of no use to other tests


def test_a_small_dev_shm_is_no_limit() -> None:
    """vllm#1710: 100 MiB of window memory on each rank beside a /dev/shm of 64 MiB."""
    with Ranks(2, group=False) as ranks:
        results = ranks.run(shm_of_64_mib, expect_errors=True)
    reasons = [result for result in results if isinstance(result, str)]
    if reasons:
        pytest.skip(f"no mount namespace here: {reasons[0]}")
    for result in results:
        assert isinstance(result, RankDied), result
        assert result.exitcode == 0


def peer_exits(env: RankEnv) -> None:
    """Rank 1 leaves and ends; rank 0 still has its memory, under its old name and for new tensors."""
    group = cam.init(store=env.store, rank=env.rank, world_size=env.world_size, window_limit="64MiB")
    tensor = group.empty((4 << 20,), torch.uint8).fill_(5)
    group.barrier()
    if env.rank == 1:
        group.close()
        sys.exit(0)  # with all destructors and exit handlers, unlike a kill
    with pytest.raises(cam.PeerLost):
        group.barrier()
    assert tensor.eq(5).all()
    assert group.empty((8 << 20,), torch.uint8).fill_(6).eq(6).all()
    assert group.memory()["allocated"] >= 4 << 20
    group.close()


def test_the_owner_keeps_its_memory_when_a_peer_exits() -> None:
    """tt-inference-server#2802: Python's resource tracker unlinked what an attacher had only attached."""
    with Ranks(2, group=False) as ranks:
        first, second = ranks.run(peer_exits, expect_errors=True)
    assert first is None
    assert isinstance(second, SystemExit | RankDied)


def in_forked_child(fn: Callable[[], str]) -> str:
    """What fn returns, or the error it raises, in a child forked from here."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = fn()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return text


def use_in_child(group: cam.Group) -> list[str]:
    tensor = group.empty((1 << 20,), torch.uint8).fill_(9)
    group.submit(group.barrier).result()  # a progress thread that the child will not have
    uses: dict[str, Callable[[], object]] = {
        "barrier": group.barrier,
        "exchange": lambda: group.exchange([b""] * group.size, operation="x"),
        "empty": lambda: group.empty((1,), torch.int8),
        "memory": group.memory,
        "trim": group.trim,
        "submit": lambda: group.submit(int),
    }
    answers = [in_forked_child(lambda use=use: str(use())) for use in uses.values()]

    def leave_it_all() -> str:
        nonlocal tensor
        group.close()
        tensor = torch.empty(0)
        gc.collect()
        return "left"

    assert in_forked_child(leave_it_all) == "left"
    # Nothing that the child did, or dropped, has touched the parent's group or memory.
    assert tensor.eq(9).all()
    assert group.memory()["blocks"] == 1
    for _ in range(3):
        group.barrier()
    return answers


def test_a_forked_child_is_told_what_it_is() -> None:
    """vllm-ascend#4502."""
    with Ranks(2) as ranks:
        for answers in ranks.run(use_in_child):
            assert len(answers) == 6
            for answer in answers:
                assert answer.startswith("ForkedProcess: group 'cam'")
                assert "spawn or forkserver" in answer


def fork_while_busy(group: cam.Group) -> str:
    """The child is forked while another thread holds the turn; it must not wait for a thread it does not
    have."""
    future = group.submit(lambda: [group.barrier() for _ in range(200)])
    answer = in_forked_child(lambda: str(group.barrier()))
    future.result()
    return answer


def test_a_fork_in_the_middle_of_an_operation() -> None:
    with Ranks(2) as ranks:
        assert all(answer.startswith("ForkedProcess") for answer in ranks.run(fork_while_busy))


def own_group_in_child(group: cam.Group) -> str:
    def join() -> str:
        with cam.init() as own:  # the name is free in the child
            own.barrier()
            return f"{own.rank} of {own.size}, {own.empty((3,), torch.int8).fill_(1).sum()}"

    return in_forked_child(join)


def test_a_forked_child_may_join_a_group_of_its_own() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(own_group_in_child) == ["0 of 1, 3"] * 2


def _barrier_of(group: cam.Group) -> None:
    try:
        group.barrier()
    except cam.ForkedProcess:
        os._exit(42)


def multiprocessing_child(group: cam.Group) -> int | None:
    # Ranks are daemons of the launcher, which may not have children of their own by default.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    child = multiprocessing.get_context("fork").Process(target=_barrier_of, args=(group,))
    child.start()
    child.join(30)
    group.barrier()
    return child.exitcode


def test_a_child_of_multiprocessing() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(multiprocessing_child) == [42, 42]


def test_an_interpreter_ends_quietly_with_an_open_group() -> None:
    """Neither a crash nor a message when a program forgets close(), with tensors and a progress thread
    alive."""
    program = """
import torch, cam
group = cam.init()
tensor = group.empty((1 << 20,), torch.uint8)
group.submit(group.barrier)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def killed_in_the_middle_of_joining(env: RankEnv) -> str:
    if env.rank == 1:
        from cam import peers

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        peers.Handover.exchange = die  # type: ignore[method-assign, assignment]
    with pytest.raises(cam.Timeout) as caught:
        cam.init(store=env.store, rank=env.rank, world_size=env.world_size, timeout=1.5)
    return str(caught.value.ranks)


def test_a_rank_that_dies_while_joining_is_named_and_nobody_else() -> None:
    with Ranks(3, group=False) as ranks:
        first, second, third = ranks.run(killed_in_the_middle_of_joining, expect_errors=True)
    assert isinstance(second, RankDied)
    assert (first, third) == ("(1,)", "(1,)")


def test_without_the_native_module_the_reason_is_told() -> None:
    """`import cam` and the configuration work, so that `cam doctor` can run; joining says why not."""
    program = """
import sys
sys.modules["cam_kernels"] = None
import cam
assert cam.Config(threads=2).threads == 2
try:
    cam.init()
except cam.BackendUnavailable as error:
    print(error)
try:
    cam.group()
except cam.InputError:
    print("and the name is free again")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "cpu (cam_kernels) could not be loaded: " in done.stdout, done.stderr
    assert "and the name is free again" in done.stdout
