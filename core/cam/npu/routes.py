"""What every path of cam.npu takes and gives. Not run on hardware."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Routes:
    """experts [T, K] int, -1 = not selected, masks applied. weights [T, K] fp32 or None."""

    experts: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class Rows:
    """Fields of cam.ep.Received in the expert layout. source is [0, 3] where a path does not tell."""

    x: Tensor
    scales: Tensor | None
    expert_counts: Tensor
    source_counts: Tensor
    source: Tensor
    topk_weights: Tensor | None


class Sent(Protocol):
    """What a path remembers of a dispatch, for its combines. rows: how many were received, padding included."""

    @property
    def routes(self) -> Routes: ...
    @property
    def rows(self) -> int: ...


class ExpertPath(Protocol):
    """One rank's side of dispatch and combine, expert layout. Calls are collective.

    timeout_s: longest wait for a peer; None: the path's own. A path raises InputError for what it does not have, before
    anything is sent.
    """

    def dispatch(
        self, x: Tensor, routes: Routes, *, scales: Tensor | None = None, timeout_s: float | None = None
    ) -> tuple[Rows, Sent]:
        """x [T, H], with scales [T] or [T, 1] where it is quantised already -> rows of this rank's experts."""
        ...

    def combine(
        self,
        y: Tensor,
        sent: Sent,
        *,
        apply_weights: bool,
        bias: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Tensor:
        """y [R, H'] -> [T, H']: the sum over k, weighted where asked, plus bias [T, H']."""
        ...

    def row_values(self, values: Tensor, sent: Sent, *, timeout_s: float | None = None) -> Tensor:
        """values fp32 [R] of received rows -> [T, K] at their tokens, 0 where nothing was sent."""
        ...
