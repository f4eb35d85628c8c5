"""Many rounds at capacity, with ranks that are slow in turn: epochs, reuse of memory, bit-stable results."""

import pytest

from tests.conformance import stress
from tests.conformance.backends import Backend, on_backends, on_kinds_in_layouts
from tests.launcher import Ranks

in_layouts = pytest.mark.parametrize("layout", ["expert", "rank"])


@in_layouts
@pytest.mark.parametrize("quant", [None, "int8"])
def test_500_rounds_at_capacity(layout: str, quant: str | None) -> None:
    """One rank is slow at a different point of every round; every row of every round is compared."""
    with Ranks(4, deadline=120) as ranks:
        for wrong in ranks.run(stress.rounds, 500, layout, quant):
            assert not wrong, "\n".join(wrong)


@on_backends
def test_every_backend_for_100_rounds(backend: Backend) -> None:
    with backend.ranks(2) as ranks:
        for wrong in ranks.run(stress.rounds, 100, "expert", None):
            assert not wrong, "\n".join(wrong)


def test_eight_ranks_on_few_cores() -> None:
    with Ranks(8) as ranks:
        for wrong in ranks.run(stress.rounds, 60, "rank", None):
            assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("spin_us", [0, 2000])
def test_waits_that_only_sleep_or_only_spin(spin_us: int) -> None:
    with Ranks(3, spin_us=spin_us) as ranks:
        for wrong in ranks.run(stress.rounds, 100, "expert", None):
            assert not wrong, "\n".join(wrong)


@on_kinds_in_layouts
def test_many_dispatches_in_flight(backend: Backend, layout: str) -> None:
    with backend.ranks(3) as ranks:
        for wrong in ranks.run(stress.in_flight, 12, layout):
            assert not wrong, "\n".join(wrong)


@on_kinds_in_layouts
def test_async_forms_give_the_same(backend: Backend, layout: str) -> None:
    with backend.ranks(3) as ranks:
        for wrong in ranks.run(stress.asynchronous, 40, layout):
            assert not wrong, "\n".join(wrong)


@in_layouts
def test_memory_does_not_grow(layout: str) -> None:
    with Ranks(2) as ranks:
        for first, last in ranks.run(stress.memory_after_rounds, layout):
            assert last == first
