"""The operations of a group of real processes: barrier, exchange, submitted work, in one order."""

import signal
import threading

import pytest

import cam
from tests.launcher import Ranks, reached


def exchange_rounds(group: cam.Group, rounds: int) -> None:
    for turn in range(rounds):
        sent = [b"%d>%d@%d" % (group.rank, peer, turn) * (turn % 3) for peer in range(group.size)]
        received = group.exchange(sent, operation="rounds")
        expected = [b"%d>%d@%d" % (peer, group.rank, turn) * (turn % 3) for peer in range(group.size)]
        assert received == expected
        group.barrier()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_exchange_delivers_to_each_its_own(size: int) -> None:
    """8 ranks outnumber the cores of the machines that this runs on."""
    with Ranks(size) as ranks:
        ranks.run(exchange_rounds, 100)


def exchange_large(group: cam.Group) -> bool:
    sent = [bytes([group.rank, peer]) * (100_000 * peer) for peer in range(group.size)]
    received = group.exchange(sent, operation="large")
    return received == [bytes([peer, group.rank]) * (100_000 * group.rank) for peer in range(group.size)]


def test_exchange_of_more_than_a_mailbox() -> None:
    with Ranks(3) as ranks:
        assert ranks.run(exchange_large) == [True] * 3


def wrong_number_of_payloads(group: cam.Group) -> None:
    with pytest.raises(cam.InputError, match=r"one payload per rank \(2\), got 3"):
        group.exchange([b""] * 3, operation="wrong")
    group.barrier()  # nothing was sent: the group is as good as before


def test_a_bad_argument_is_raised_before_anything_is_sent() -> None:
    with Ranks(2) as ranks:
        ranks.run(wrong_number_of_payloads)


def different_operations(group: cam.Group) -> str:
    with pytest.raises(cam.Mismatch) as caught:
        group.exchange([b""] * group.size, operation="left" if group.rank == 0 else "right")
    error = caught.value
    group.barrier()
    return f"{error.field} {error.mine} {error.rank} {error.theirs}"


def test_ranks_in_different_operations_learn_of_it_and_go_on() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(different_operations) == ["operation left 1 right", "operation right 0 left"]


def ordered_submissions(group: cam.Group) -> list[int]:
    """Submitted work and direct calls pair up across ranks in program order, without any waiting in
    between."""
    log: list[int] = []

    def work(number: int) -> int:
        group.barrier()
        (first, *_) = group.exchange([b"%d" % number] * group.size, operation=f"work {number}")
        log.append(int(first))
        return number

    futures = []
    for number in range(0, 30, 3):
        futures += [group.submit(lambda n=number: work(n)), group.submit(lambda n=number + 1: work(n))]
        work(number + 2)
    assert [future.result() for future in futures] == [n for n in range(30) if n % 3 != 2]
    return log


def test_submitted_work_runs_in_program_order() -> None:
    with Ranks(3) as ranks:
        assert ranks.run(ordered_submissions) == [list(range(30))] * 3


def failing_submission(group: cam.Group) -> None:
    def fail() -> None:
        raise ValueError("mine")

    future = group.submit(fail)
    group.barrier()
    with pytest.raises(ValueError, match="mine"):
        future.result()


def test_an_error_in_submitted_work_belongs_to_its_future() -> None:
    with Ranks(2) as ranks:
        ranks.run(failing_submission)


def close_from_inside(group: cam.Group) -> None:
    """The last thing that submitted work does is to leave; the caller finds the group closed."""

    def work() -> None:
        group.barrier()
        group.close()

    group.submit(work).result()
    with pytest.raises(cam.GroupAborted, match="has closed"):
        group.barrier()


def test_submitted_work_may_close_the_group() -> None:
    with Ranks(2) as ranks:
        ranks.kill(0, signal.SIGCONT)  # harmless; keeps the closed group from being used again
        ranks.run(close_from_inside)


def threads_in_turn(group: cam.Group, threads: int, rounds: int) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(rounds):
                with group.turn:  # two calls that belong together
                    group.exchange([b"x"] * group.size, operation="pair")
                    group.barrier()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []


def test_threads_take_turns() -> None:
    """All threads do the same, so any order of turns pairs up; unserialised, pairs would come apart."""
    with Ranks(2) as ranks:
        ranks.run(threads_in_turn, 4, 50)


def exchange_with_the_dead(group: cam.Group) -> tuple[str, str]:
    reached("begun")
    if group.rank == 1:
        signal.pause()
    with pytest.raises(cam.PeerLost) as caught:
        group.exchange([b""] * group.size, operation="handshake")
    return caught.value.operation, str(caught.value)


def test_an_exchange_is_named_in_its_errors() -> None:
    with Ranks(3) as ranks:
        run = ranks.start(exchange_with_the_dead)
        run.wait_reached(1, "begun")
        ranks.kill(1)
        first, _, third = run.join(expect_errors=True)
    for operation, message in (first, third):
        assert operation == "handshake"
        assert "handshake (payloads): rank 1" in message
