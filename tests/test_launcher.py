"""The launcher: whatever goes wrong in a rank is reported in full, quickly, and leaves nothing behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tests.launcher import PerRank, RankDied, RankEnv, RankFailed, Ranks, close_all, reached

ROOT = Path(__file__).parent.parent


def add(env: RankEnv, x: torch.Tensor, own: int) -> tuple[int, torch.Tensor]:
    return env.rank, x + own


def pid(env: RankEnv) -> int:
    return os.getpid()


def processor_time(env: RankEnv) -> float:
    return time.process_time()


def fail_on(env: RankEnv, rank: int) -> str:
    if env.rank == rank:
        print("some words on stdout")
        raise LookupError(f"nothing at {rank}")
    return "fine"


def wait_for_ever(env: RankEnv, guilty: int) -> None:
    if env.rank == guilty:
        stuck_here(env)


def stuck_here(env: RankEnv) -> None:
    env.store.get("a key that nobody sets")


def die_on(env: RankEnv, rank: int) -> int:
    if env.rank == rank:
        os.write(2, b"last words\n")
        os.kill(os.getpid(), signal.SIGKILL)
    return env.rank


def crash_on(env: RankEnv, rank: int) -> None:
    if env.rank == rank:
        os.kill(os.getpid(), signal.SIGSEGV)


def pause(env: RankEnv) -> int:
    reached("pause")
    signal.pause()
    return env.rank


class KeywordOnly(Exception):
    def __init__(self, *, rank: int) -> None:
        self.rank = rank
        super().__init__(f"about rank {rank}")


def raise_keyword_only(env: RankEnv) -> None:
    raise KeywordOnly(rank=env.rank)


def return_a_lambda(env: RankEnv) -> object:
    return lambda: None


def return_a_view(env: RankEnv) -> torch.Tensor:
    big = torch.arange(1 << 20)
    return big.view(1024, 1024)[:, 3]


def is_gone(process: int) -> bool:
    """No such process, or one that is dead and only waits for a container's init to notice."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(processes: list[int], seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    while not all(map(is_gone, processes)):
        assert time.monotonic() < until, f"still alive: {[p for p in processes if not is_gone(p)]}"
        time.sleep(0.01)


def test_results_come_by_rank_with_shared_and_own_arguments() -> None:
    with Ranks(3, group=False) as ranks:
        results = ranks.run(add, torch.ones(2), PerRank([10, 20, 30]))
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert [x.tolist() for _, x in results] == [[11, 11], [21, 21], [31, 31]]


def test_processes_are_reused_while_healthy() -> None:
    with Ranks(2, group=False) as ranks:
        first = ranks.run(pid)
        assert ranks.run(pid) == first == ranks.pids
    with Ranks(2, group=False) as ranks:
        assert ranks.run(pid) == first


def test_nested_pools_are_different_processes() -> None:
    with Ranks(2, group=False) as outer, Ranks(2, group=False) as inner:
        assert not set(outer.pids) & set(inner.pids)


def test_starting_a_rank_is_cheap() -> None:
    """Measured in processor time, which other load does not change: importing torch alone would take a second."""
    close_all()
    with Ranks(8, group=False) as ranks:
        assert sorted(ranks.run(processor_time))[4] < 0.5


def test_an_exception_shows_rank_type_traceback_and_output() -> None:
    with Ranks(2, group=False) as ranks:
        before = ranks.pids
        with pytest.raises(RankFailed) as caught:
            ranks.run(fail_on, 1)
        for part in (
            "rank 1",
            "LookupError: nothing at 1",
            "in fail_on",
            "test_launcher.py",
            "some words on stdout",
        ):
            assert part in str(caught.value)
        assert isinstance(caught.value.failures[1], LookupError)
        wait_until_gone(before)
        assert ranks.run(fail_on, 99) == ["fine", "fine"], "the pool is rebuilt"


def test_one_failure_does_not_wait_for_ranks_that_hang() -> None:
    start = time.monotonic()
    with Ranks(2, group=False) as ranks, pytest.raises(RankFailed) as caught:
        ranks.run(hang_unless_failing, deadline=50)
    assert time.monotonic() - start < 20
    assert "LookupError" in str(caught.value)
    assert "stuck_here" in str(caught.value), "where the other rank was is shown too"


def hang_unless_failing(env: RankEnv) -> None:
    if env.rank == 0:
        raise LookupError("first")
    stuck_here(env)


def test_a_hang_ends_at_the_deadline_and_shows_stacks() -> None:
    with Ranks(3, group=False) as ranks:
        before = ranks.pids
        start = time.monotonic()
        with pytest.raises(RankFailed, match=r"not finished after 0\.5 s") as caught:
            ranks.run(wait_for_ever, 2, deadline=0.5)
        assert time.monotonic() - start < 10
        assert "stuck_here" in str(caught.value)
        wait_until_gone(before)


def test_a_hang_is_an_error_even_when_errors_are_expected() -> None:
    with Ranks(2, group=False) as ranks, pytest.raises(RankFailed, match="not finished"):
        ranks.run(wait_for_ever, 1, deadline=0.3, expect_errors=True)


def test_a_stopped_rank_cannot_block_the_test() -> None:
    big = torch.zeros(1 << 20)  # does not fit into a pipe: the parent is blocked while it sends
    with Ranks(2, group=False) as ranks:
        ranks.kill(1, signal.SIGSTOP)
        with pytest.raises(RankFailed, match="not finished"):
            ranks.run(add, big, PerRank([0, 0]), deadline=0.5)


def test_kill_9_is_reported_with_the_signal() -> None:
    with Ranks(2, group=False) as ranks, pytest.raises(RankFailed) as caught:
        ranks.run(die_on, 0)
    assert "rank 0 died (killed by SIGKILL)" in str(caught.value)
    assert "last words" in str(caught.value)
    assert isinstance(caught.value.failures[0], RankDied)


def test_a_crash_shows_the_python_stack() -> None:
    with Ranks(2, group=False) as ranks, pytest.raises(RankFailed) as caught:
        ranks.run(crash_on, 1)
    assert "killed by SIGSEGV" in str(caught.value)
    assert "in crash_on" in str(caught.value)


def test_a_test_can_kill_a_rank_in_the_middle_of_a_run() -> None:
    with Ranks(2, group=False) as ranks:
        run = ranks.start(pause_on, 1)
        run.wait_reached(1, "pause")
        ranks.kill(1)
        alive, dead = run.join(expect_errors=True)
        assert alive == "alive"
        assert isinstance(dead, RankDied)
        assert (dead.rank, dead.exitcode) == (1, -signal.SIGKILL)


def pause_on(env: RankEnv, rank: int) -> str:
    if env.rank == rank:
        pause(env)
    return "alive"


def test_waiting_for_a_rank_that_never_gets_there_raises() -> None:
    with Ranks(1, group=False) as ranks:
        run = ranks.start(pid)
        with pytest.raises(RankFailed, match="before it reached 'pause'"):
            run.wait_reached(0, "pause")


def test_expected_errors_are_values_and_survivors_go_on() -> None:
    with Ranks(3, group=False) as ranks:
        before = ranks.pids
        results = ranks.run(fail_on, 0, expect_errors=True)
        assert isinstance(results[0], LookupError)
        assert results[1:] == ["fine", "fine"]
        assert ranks.run(pid) == before, "the ranks stay for the rest of the block"
    wait_until_gone(before)


def test_exceptions_with_keyword_only_arguments_arrive() -> None:
    with Ranks(2, group=False) as ranks:
        errors = ranks.run(raise_keyword_only, expect_errors=True)
    assert [(type(e), e.rank, str(e)) for e in errors] == [
        (KeywordOnly, 0, "about rank 0"),
        (KeywordOnly, 1, "about rank 1"),
    ]


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with Ranks(1, group=False) as ranks, pytest.raises(RankFailed, match="cannot pickle the result"):
        ranks.run(return_a_lambda)


def test_tensors_return_as_their_logical_values() -> None:
    with Ranks(1, group=False) as ranks:
        (column,) = ranks.run(return_a_view)
    assert torch.equal(column, torch.arange(1 << 20).view(1024, 1024)[:, 3])
    assert column.untyped_storage().nbytes() == 1024 * 8


def test_per_rank_needs_one_value_per_rank() -> None:
    with Ranks(2, group=False) as ranks:
        with pytest.raises(ValueError, match="3 values for 2 ranks"):
            ranks.run(add, PerRank([1, 2, 3]), 0)
        assert len(ranks.run(pid)) == 2


def test_no_file_descriptors_leak() -> None:
    def cycle() -> None:
        with Ranks(2, group=False) as ranks:
            ranks.run(fail_on, 1, expect_errors=True)

    cycle()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        cycle()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


PARENT = textwrap.dedent(
    """
    import signal, sys
    from tests.launcher import Ranks, PerRank
    from tests.test_launcher import pause_on
    with Ranks(2, group=False) as ranks:
        print(*ranks.pids, flush=True)
        ranks.kill(0, signal.SIGSTOP)
        run = ranks.start(pause_on, 1)
        run.wait_reached(1, "pause")
        print("ready", flush=True)
        run.join()
    """
)


def test_ranks_die_with_the_parent_even_when_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert parent.stdout.readline() == "ready\n"
        assert len(pids) == 2
        parent.kill()
        parent.wait(10)
        wait_until_gone(pids)
