"""What is left when a call fails: the others learn why, soon; memory comes back; a group that can go on does."""

import time
from datetime import timedelta
from signal import SIGSTOP

import pytest

import cam
from tests.conformance import survival
from tests.conformance.backends import Backend, on_kinds, on_kinds_in_layouts
from tests.launcher import RankDied

in_layouts = pytest.mark.parametrize("layout", ["expert", "rank"])


@pytest.mark.parametrize("world", [2, 3, 8])
@on_kinds_in_layouts
def test_a_rank_is_killed_at_any_moment(backend: Backend, layout: str, world: int) -> None:
    """kill -9 from outside, wherever the victim is: each survivor raises PeerLost with its rank within 2 s."""
    for attempt in range(3):
        victim = attempt % world
        with backend.ranks(world) as ranks:
            run = ranks.start(survival.loop, layout, attempt)
            for rank in range(world):
                run.wait_reached(rank, "looping")
            ranks.kill(victim)
            start = time.monotonic()
            results = run.join(expect_errors=True)
            took = time.monotonic() - start
        for rank, error in enumerate(results):
            if rank == victim:
                assert isinstance(error, RankDied)
                continue
            assert isinstance(error, cam.PeerLost), repr(error)
            assert error.rank == victim
            assert f"rank {victim}" in str(error)
            assert error.operation in ("dispatch", "combine")
            assert error.phase
        assert took < 10, "2 s, plus what a loaded machine takes to end the processes"


@on_kinds
def test_a_stopped_rank_is_late_not_dead(backend: Backend) -> None:
    with backend.ranks(3) as ranks:
        run = ranks.start(survival.loop, "expert", 0, 0.7)
        for rank in range(3):
            run.wait_reached(rank, "looping")
        ranks.kill(1, SIGSTOP)
        for rank in (0, 2):
            run.wait_reached(rank, "failed")
        ranks.kill(1)
        results = run.join(expect_errors=True)
    for rank in (0, 2):
        error = results[rank]
        assert isinstance(error, cam.Timeout), repr(error)
        assert list(error.ranks) == [1]
        assert error.waited_s >= 0.5


@on_kinds
def test_a_rank_that_leaves_is_named(backend: Backend) -> None:
    """A rank that closes its group, or ends, while others call: PeerLost, not a wait until the deadline."""
    with backend.ranks(3) as ranks:
        start = time.monotonic()
        results = ranks.run(survival.leave, 2)
        ranks.discard()
        assert time.monotonic() - start < 10
    for rank in (0, 1):
        assert isinstance(results[rank], cam.PeerLost), repr(results[rank])
        assert results[rank].rank == 2


@on_kinds
def test_a_closed_group_refuses_calls(backend: Backend) -> None:
    with backend.ranks(2) as ranks:
        errors = ranks.run(survival.use_after_close)
        ranks.discard()
    for error in errors:
        assert isinstance(error, cam.CamError), repr(error)
        assert "closed" in str(error) or "no group" in str(error)


@pytest.mark.parametrize("timeout", [0.3, timedelta(seconds=0.3)], ids=["seconds", "timedelta"])
@on_kinds
def test_timeouts_of_calls(backend: Backend, timeout: float | timedelta) -> None:
    with backend.ranks(2) as ranks:
        (late,) = ranks.run(survival.alone, timeout)[:1]
        ranks.discard()
    assert isinstance(late, cam.Timeout), repr(late)
    assert 0.25 <= late.waited_s <= 5


@on_kinds
def test_errors_that_all_ranks_share_cost_nothing(backend: Backend) -> None:
    """After Mismatch, OutOfWindowMemory and InputError the group works, and no window memory is lost."""
    with backend.ranks(3, window_limit="8MiB") as ranks:
        for raised, before, after in ranks.run(survival.shared_errors):
            assert raised == ["Mismatch", "OutOfWindowMemory", "InputError"] * 5
            assert after == before


@on_kinds
def test_what_was_received_survives_the_sender(backend: Backend) -> None:
    """Rows are in the receiver's own window: they stay readable when the peer that sent them is dead."""
    with backend.ranks(2) as ranks:
        survivor, dead = ranks.run(survival.outlive_sender, expect_errors=True)
        assert isinstance(dead, RankDied)
        assert survivor is True


@on_kinds
def test_ctrl_c_ends_a_wait(backend: Backend) -> None:
    """A user's Ctrl-C on a rank that waits for a late peer raises KeyboardInterrupt soon, not after the deadline."""
    with backend.ranks(2, deadline=40) as ranks:
        run = ranks.start(survival.interrupted)
        run.wait_reached(0, "waiting")
        ranks.kill(0, 2)
        run.wait_reached(0, "interrupted")
        ranks.kill(1)
        assert run.join(expect_errors=True)[0] == "KeyboardInterrupt"
