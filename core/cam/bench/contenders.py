"""Who is measured. A contender does one round of its work and checks its own result before it is timed.

CAM's contenders are in cam_contenders; the peers and the floor are here.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

import cam_kernels
from cam.bench import userpath
from cam.bench.golden import Golden, WrongResult
from cam.bench.plan import Case
from cam.bench.userpath import Route
from cam.bench.wires import Wire

T = TypeVar("T")


class Timed(Protocol):
    """Starts `call` on all ranks at one instant, records how long it takes as `phase`, returns its result."""

    def __call__(self, phase: str, call: Callable[[], T]) -> T: ...


class Contender(Protocol):
    """key: name in the JSON. label: name for people.

    rows: whose rows it moves: "expert" or "rank" layout, "" where neither (quantised): what it is compared
    with.
    """

    key: str
    label: str
    rows: str

    def check(self, golden: Golden) -> None:
        """Raises WrongResult. Collective: all ranks call it."""

    def round(self, timed: Timed) -> None:
        """Phases: "dispatch" and "combine"; the floor has "copy"."""

    def native_s(self) -> float | None:
        """Seconds spent in native calls so far; None where that is not known."""


@dataclass(frozen=True)
class Ready:
    """Memory that exists, and has been touched, before anything is timed.

    sent: [T * K, H] the rows a rank sends. received: at least [R, H], ordinary memory. window: at least
    [max(R, T * K), H], memory that peers can read (ordinary memory where CAM is not measured).
    """

    sent: torch.Tensor
    received: torch.Tensor
    window: torch.Tensor

    @classmethod
    def make(cls, case: Case, golden: Golden, empty: Callable[[tuple[int, int], torch.dtype], torch.Tensor]) -> "Ready":
        rows = max(len(golden.rows), case.tokens * case.topk)
        window = empty((rows, case.hidden), golden.rows.dtype)
        window.zero_()
        window[: len(golden.y)] = golden.y
        sent = golden.work.x.index_select(0, golden.route.order // case.topk)
        return cls(sent, golden.y, window)  # golden.y is not read again after the checks


class UserPath:
    """The whole path over a peer's wire, as in cam.bench.userpath."""

    rows = "expert"

    def __init__(self, wire: Wire, label: str, golden: Golden, ready: Ready) -> None:
        self.key, self.label = wire.name, label
        self._wire, self._work, self._ready = wire, golden.work, ready
        self._experts, self._rank = golden.experts, golden.rank

    def check(self, golden: Golden) -> None:
        rows, route = self._dispatch()
        golden.expect_equal(self.label, "dispatch", rows, golden.rows)
        golden.expect_close(self.label, "combine", self._combine(route), golden.combined())

    def round(self, timed: Timed) -> None:
        _, route = timed("dispatch", self._dispatch)
        del _
        timed("combine", lambda: self._combine(route))

    def native_s(self) -> None:
        return None

    def _dispatch(self) -> tuple[torch.Tensor, Route]:
        return userpath.dispatch(self._work.x, self._work.topk_idx, self._experts, self._rank, self._wire)

    def _combine(self, route: Route) -> torch.Tensor:
        return userpath.combine(self._ready.received, self._work.topk_weights, route, self._wire)


class Raw:
    """One all-to-all of the rows of a layout, on buffers that are ready: the wire alone."""

    def __init__(self, wire: Wire, label: str, rows: str, golden: Golden, ready: Ready) -> None:
        self.rows, self.label = rows, label
        self.key = f"{wire.name}-raw" if rows == "expert" else f"{wire.name}-raw-{rows}"
        self._wire = wire
        route = golden.route if rows == "expert" else golden.rank_route
        self._splits, self._out_splits = route.splits, route.out_splits
        self._sent = ready.sent[: sum(self._splits)]
        self._received = ready.received[: sum(self._out_splits)]

    def check(self, golden: Golden) -> None:
        if self.rows == "expert":
            sent, wanted = self._sent, golden.rows
        else:
            sent, wanted = golden.work.x.index_select(0, golden.rank_route.tokens), golden.rank_rows
        found = torch.empty_like(self._received)
        self._wire.all_to_all(found, sent, self._out_splits, self._splits)
        if self.rows == "expert":
            found = found.index_select(0, golden.route.regroup)
        golden.expect_equal(self.label, "dispatch", found, wanted)

    def round(self, timed: Timed) -> None:
        timed(
            "dispatch",
            lambda: self._wire.all_to_all(self._received, self._sent, self._out_splits, self._splits),
        )
        timed(
            "combine",
            lambda: self._wire.all_to_all(self._sent, self._received, self._splits, self._out_splits),
        )

    def native_s(self) -> None:
        return None


class Floor:
    """A plain copy of a layout's rows from ordinary into window memory, all ranks at the same time: libc's memcpy, or
    non-temporal stores.

    Dispatch delivers these bytes, combine reads them. Dispatch finds most of its source in the cache (a token is read
    once for several rows) and combine writes fewer bytes than it reads, so more than 100 % of this floor is possible.
    """

    def __init__(self, rows: str, nontemporal: bool, golden: Golden, ready: Ready) -> None:
        self.rows, self._nontemporal = rows, nontemporal
        suffix = "" if rows == "expert" else f"-{rows}"
        self.key = ("nontemporal" if nontemporal else "memcpy") + suffix
        self.label = ("non-temporal copy" if nontemporal else "memcpy") + suffix.replace("-rank", " (rank)")
        count = sum((golden.route if rows == "expert" else golden.rank_route).splits)
        self._source, self._target = ready.sent[:count], ready.window[:count]
        self._bytes = self._source.numel() * self._source.element_size()

    def check(self, golden: Golden) -> None:
        before = self._target.clone()
        self._run()
        if not torch.equal(self._target, self._source):
            raise WrongResult(f"{self.label} of {self._bytes} bytes did not copy them, {golden.case.title}")
        self._target.copy_(before)

    def round(self, timed: Timed) -> None:
        timed("copy", self._run)

    def native_s(self) -> None:
        return None

    def _run(self) -> None:
        if self._nontemporal:
            cam_kernels.copy(self._target.data_ptr(), self._source.data_ptr(), self._bytes, True)
        else:
            ctypes.memmove(self._target.data_ptr(), self._source.data_ptr(), self._bytes)
