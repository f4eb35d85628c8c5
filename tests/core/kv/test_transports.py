"""One conformance suite over every transport that this machine has."""

import signal
import uuid

import pytest

from cam import transport as transports
from tests.core.kv import programs
from tests.launcher import Ranks

AVAILABLE = transports.available()


@pytest.fixture(params=sorted(AVAILABLE), name="transport")
def _transport(request: pytest.FixtureRequest) -> str:
    reason = AVAILABLE[request.param]
    if reason:
        pytest.skip(reason)
    return request.param


def _name() -> str:
    return str(uuid.uuid4())


@pytest.mark.parametrize(
    "program",
    [
        programs.read_and_write,
        programs.prepared_layer_by_layer,
        programs.nothing_to_move,
        programs.cancelled,
        programs.late,
    ],
    ids=lambda program: program.__name__,
)
def test_between_two_processes(transport, program):
    with Ranks(2, group=False) as ranks:
        ranks.run(program, _name(), transport)


def test_other_geometry_and_back(transport):
    with Ranks(3, group=False) as ranks:
        ranks.run(programs.other_geometry, _name(), transport)


def test_the_owner_is_killed_in_the_middle(transport):
    with Ranks(2, group=False) as ranks:
        run = ranks.start(programs.owner_dies, _name(), transport, deadline=150)
        run.wait_reached(0, "owner is up")
        run.wait_reached(1, "reading")
        ranks.kill(0)
        _, took = run.join(expect_errors=True)
        assert isinstance(took, float), took
        assert took < 60


def test_the_owner_is_stopped_in_the_middle(transport):
    with Ranks(2, group=False) as ranks:
        run = ranks.start(programs.owner_stops, _name(), transport, deadline=150)
        run.wait_reached(0, "owner is up")
        run.wait_reached(1, "reading")
        ranks.kill(0, signal.SIGSTOP)
        run.wait_reached(1, "through")
        ranks.kill(0)
        _, (took, outcome) = run.join(expect_errors=True)
    assert took < 90, outcome
    if transport in ("shm", "cma"):
        assert outcome == "done"


def test_the_reader_is_killed_in_the_middle(transport):
    with Ranks(3, group=False) as ranks:
        run = ranks.start(programs.reader_dies, _name(), transport, deadline=150)
        run.wait_reached(1, "reading")
        ranks.kill(1)
        owner, _, second = run.join(expect_errors=True)
        assert owner is None, owner
        assert second is None, second
