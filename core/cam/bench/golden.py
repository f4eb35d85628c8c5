"""What every contender must produce in one case, found through Gloo before anything is timed."""

from dataclasses import dataclass

import torch

from cam.bench import userpath
from cam.bench.plan import Case
from cam.bench.routing import Work
from cam.bench.userpath import Experts, Route
from cam.bench.wires import Wire
from cam.errors import CamError


class WrongResult(CamError):
    """A contender's result differs from the one found through Gloo; nothing was timed."""


@dataclass(frozen=True)
class RankRoute:
    """Rows of the rank layout: one per (token, rank that owns at least one of its experts).

    tokens: token of each sent row, by destination, then token. splits / out_splits: as in Route.
    """

    tokens: torch.Tensor
    splits: list[int]
    out_splits: list[int]

    @classmethod
    def find(cls, topk_idx: torch.Tensor, experts: Experts, wire: Wire) -> "RankRoute":
        world = len(experts.per_rank)
        goes_to = torch.zeros(len(topk_idx), world, dtype=torch.bool)
        goes_to.scatter_(1, experts.owners[topk_idx], True)
        counts = goes_to.sum(0)
        theirs = torch.empty_like(counts)
        wire.all_to_all(theirs, counts, [1] * world, [1] * world)
        return cls(goes_to.t().nonzero()[:, 1], counts.tolist(), theirs.tolist())


@dataclass(frozen=True)
class Golden:
    """rows: [R, H] expert layout; source: [R, 3] int64 (rank, token, k); counts: rows per local expert.

    y: [R, H] what the experts are taken to return, the same rows in another order; returned: [T, K, H] the
    row of y for each (token, k), brought back by Gloo. rank_rows, rank_source: the rank layout, [R', H] and
    [R', 2].
    """

    case: Case
    work: Work
    rank: int
    experts: Experts
    route: Route
    rank_route: RankRoute
    rows: torch.Tensor
    source: torch.Tensor
    counts: list[int]
    y: torch.Tensor
    returned: torch.Tensor
    rank_rows: torch.Tensor
    rank_source: torch.Tensor

    @classmethod
    def find(cls, case: Case, work: Work, rank: int, gloo: Wire) -> "Golden":
        experts = Experts.spread(case.experts, case.ranks)
        rows, route = userpath.dispatch(work.x, work.topk_idx, experts, rank, gloo)
        origin = torch.stack(
            [torch.full_like(route.order, rank), route.order // case.topk, route.order % case.topk], dim=1
        )
        source = origin.new_empty(sum(route.out_splits), 3)
        gloo.all_to_all(source, origin, route.out_splits, route.splits)
        # Which expert each row is for, told by its sender: the counts then do not rest on the sort under
        # test.
        chosen = work.topk_idx.reshape(-1)[route.order]
        wanted = chosen.new_empty(len(rows))
        gloo.all_to_all(wanted, chosen, route.out_splits, route.splits)
        first = sum(experts.per_rank[:rank])
        counts = (wanted - first).bincount(minlength=experts.per_rank[rank]).tolist()

        rank_route = RankRoute.find(work.topk_idx, experts, gloo)
        rank_rows = work.x.new_empty(sum(rank_route.out_splits), case.hidden)
        gloo.all_to_all(
            rank_rows,
            work.x.index_select(0, rank_route.tokens),
            rank_route.out_splits,
            rank_route.splits,
        )
        tokens = rank_route.tokens.new_empty(len(rank_rows))
        gloo.all_to_all(tokens, rank_route.tokens, rank_route.out_splits, rank_route.splits)
        ranks = torch.arange(case.ranks).repeat_interleave(torch.tensor(rank_route.out_splits))
        y = rows.flip(0)
        return cls(
            case=case,
            work=work,
            rank=rank,
            experts=experts,
            route=route,
            rank_route=rank_route,
            rows=rows,
            source=source.index_select(0, route.regroup),
            counts=counts,
            y=y,
            returned=userpath.send_back(y, route, case.topk, gloo),
            rank_rows=rank_rows,
            rank_source=torch.stack([ranks, tokens], dim=1),
        )

    def combined(self) -> torch.Tensor:
        """[T, H]: weighted sum of `returned` in float32, k ascending, multiply then add, rounded once."""
        total = torch.zeros(self.case.tokens, self.case.hidden)
        for k in range(self.case.topk):
            total += self.work.topk_weights[:, k, None] * self.returned[:, k].float()
        return total.to(self.y.dtype)

    def rank_y(self, received: torch.Tensor) -> torch.Tensor:
        """What this rank's experts are taken to return for rows in the rank layout: differs from rank to
        rank.
        """
        return received * (self.rank + 1)

    def rank_combined(self) -> torch.Tensor:
        """[T, H]: sum over the ranks that a token was sent to, ascending, in float32, rounded once."""
        total = torch.zeros(self.case.tokens, self.case.hidden)
        start = 0
        for rank, count in enumerate(self.rank_route.splits):
            tokens = self.rank_route.tokens[start : start + count]
            start += count
            total.index_add_(0, tokens, (self.work.x.index_select(0, tokens) * (rank + 1)).float())
        return total.to(self.work.x.dtype)

    def expect_equal(self, contender: str, what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        """Raises WrongResult unless both are bitwise equal."""
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise WrongResult(
                f"{self._where(contender, what)}: {tuple(found.shape)} {found.dtype}, "
                f"wanted {tuple(wanted.shape)} {wanted.dtype}"
            )
        if not torch.equal(found, wanted):
            rows = (found != wanted).reshape(len(found), -1).any(1).nonzero()[:, 0]
            raise WrongResult(
                f"{self._where(contender, what)}: {len(rows)} of {len(found)} rows differ, "
                f"the first is row {int(rows[0])}"
            )

    def expect_close(self, contender: str, what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
        """Raises WrongResult if the largest error exceeds 4 units in the last place of the largest value.

        For the weighted sums of the peers' paths, whose order and roundings are torch's.
        """
        if found.shape != wanted.shape:
            raise WrongResult(
                f"{self._where(contender, what)}: shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
            )
        if found.numel() == 0:
            return
        largest = float(wanted.abs().max())
        error = float((found.float() - wanted.float()).abs().max())
        if not error <= 4 * torch.finfo(found.dtype).eps * largest:
            raise WrongResult(f"{self._where(contender, what)}: error {error:.3g}, largest value {largest:.3g}")

    def _where(self, contender: str, what: str) -> str:
        return f"{contender}, {self.case.title}, rank {self.rank}: {what} differs from Gloo's"
