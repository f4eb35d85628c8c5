"""A conformance case: a few numbers from which every rank, and the golden, make the same inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One dispatch and combine.

    tokens: T of each rank (its length is the world size). hidden, experts, topk: H, E, K. out_hidden,
    out_dtype: of the rows given to combine (default: as x). routing: see _route. prequantised: x is an opaque
    pair, one of PAIRS.
    strided: x, topk_idx and topk_weights are not contiguous. weights, masks, bias: given or not.
    special: some elements of x and of combine's rows are NaN, infinite, denormal, -0 or the largest finite.
    """

    tokens: tuple[int, ...]
    hidden: int = 32
    experts: int = 8
    topk: int = 2
    layout: str = "expert"
    dtype: torch.dtype = torch.bfloat16
    quant: str | None = None
    prequantised: str | None = None
    alignment: int = 1
    routing: str = "mixed"
    weights: bool = True
    masks: bool = False
    bias: bool = False
    idx_dtype: torch.dtype = torch.int64
    strided: bool = False
    out_hidden: int | None = None
    out_dtype: torch.dtype | None = None
    special: bool = False
    seed: int = 0

    @property
    def world(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Inputs:
    """One rank's arguments of dispatch, and its bias of combine."""

    x: Tensor | tuple[Tensor, Tensor]
    topk_idx: Tensor
    topk_weights: Tensor | None
    mask: Tensor | None
    bias: Tensor | None


ROUTINGS = ("uniform", "holes", "rank0", "last", "skewed", "duplicates", "none", "distinct", "mixed")
PAIRS = ("int8 [T]", "int8 [T, 1]", "fp8 [T, 3]", "uint8 [T, 2] half", "int32 [T, 5]", "bf16 [T]")


def generator(case: Case, rank: int, purpose: int) -> torch.Generator:
    return torch.Generator().manual_seed((case.seed * 64 + rank) * 8 + purpose)


def inputs(case: Case, rank: int) -> Inputs:
    tokens, k = case.tokens[rank], case.topk
    g = generator(case, rank, 0)
    idx = _route(case, rank, g).to(case.idx_dtype)
    weights = torch.randn(tokens, k, generator=g) if case.weights else None
    mask = torch.rand(tokens, generator=g) < 0.7 if case.masks else None
    wide = case.out_hidden or case.hidden
    bias = _floats(tokens, wide, case.out_dtype or case.dtype, generator(case, rank, 1)) if case.bias else None
    x: Tensor | tuple[Tensor, Tensor]
    if case.prequantised is not None:
        x = _pair(case, rank)
    else:
        x = _floats(tokens, case.hidden, case.dtype, generator(case, rank, 2))
        if case.special:
            _add_specials(x, generator(case, rank, 2))
        if case.quant is not None and tokens > 1:
            x[1] = 0  # a zero row has a rule of its own
    if case.strided:
        x = tuple(map(strided, x)) if isinstance(x, tuple) else strided(x)  # type: ignore[assignment]
        idx = strided(idx)
        weights = None if weights is None else strided(weights)
    return Inputs(x, idx, weights, mask, bias)


def all_inputs(case: Case) -> list[Inputs]:
    return [inputs(case, rank) for rank in range(case.world)]


def expert_output(case: Case, rank: int, rows: int) -> Tensor:
    """[R, H'] What the experts of a rank return; random, so that combine is tested on its own."""
    y = _floats(rows, case.out_hidden or case.hidden, case.out_dtype or case.dtype, generator(case, rank, 3))
    if case.special:
        _add_specials(y, generator(case, rank, 3))
    return y


def row_weights(case: Case, rank: int, rows: int) -> Tensor:
    """Weights of received rows, as combine's topk_weights wants them: [R] or [R, K] by layout."""
    shape = (rows,) if case.layout == "expert" else (rows, case.topk)
    return torch.randn(shape, generator=generator(case, rank, 4))


def cotangent(like: Tensor, case: Case, rank: int, purpose: int) -> Tensor:
    """An incoming gradient for `like`."""
    return torch.randn(like.shape, generator=generator(case, rank, purpose)).to(like.dtype)


def strided(x: Tensor) -> Tensor:
    """The same values, not contiguous: every other column of a wider tensor (every other element in one
    dimension).
    """
    wide = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


def _floats(rows: int, columns: int, dtype: torch.dtype, g: torch.Generator) -> Tensor:
    # Magnitudes that differ by row: a scale taken from another row, or a sum in another order, shows.
    x = torch.randn(rows, columns, generator=g)
    return (x * 2.0 ** torch.randint(-3, 4, (rows, 1), generator=g)).to(dtype)


def _add_specials(x: Tensor, g: torch.Generator) -> None:
    """One in ten rows becomes all denormal; half of the others get some of the values that arithmetic treats apart."""
    info = torch.finfo(x.dtype)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, info.max, info.min, info.smallest_normal / 4])
    chosen = odd.to(x.dtype)[torch.randint(0, len(odd), x.shape, generator=g)]
    rows = torch.rand(x.shape[0], 1, generator=g)
    here = (rows < 0.5) & (torch.rand(x.shape, generator=g) < 1 / (x.shape[1] + 1))
    x[:] = torch.where(here, chosen, x)
    x[:] = torch.where(rows > 0.9, (x.float() * (info.smallest_normal / 64)).to(x.dtype), x)


def _pair(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    tokens, hidden, g = case.tokens[rank], case.hidden, generator(case, rank, 2)
    small = torch.randint(-128, 128, (tokens, hidden), generator=g, dtype=torch.int8)
    match case.prequantised:
        case "int8 [T]":
            return small, torch.rand(tokens, generator=g)
        case "int8 [T, 1]":
            return small, torch.rand(tokens, 1, generator=g)
        case "fp8 [T, 3]":
            return small.view(torch.float8_e4m3fn), torch.rand(tokens, 3, generator=g)
        case "uint8 [T, 2] half":
            return small.view(torch.uint8), torch.rand(tokens, 2, generator=g).half()
        case "int32 [T, 5]":
            return torch.randint(-(2**31), 2**31, (tokens, hidden), generator=g, dtype=torch.int32), torch.rand(
                tokens, 5, generator=g
            )
        case "bf16 [T]":
            return torch.randn(tokens, hidden, generator=g).bfloat16(), torch.rand(tokens, generator=g)
    raise ValueError(f"prequantised={case.prequantised!r}: one of {PAIRS}")


def _route(case: Case, rank: int, g: torch.Generator) -> Tensor:
    """topk_idx int64 [T, K]."""
    shape, experts = (case.tokens[rank], case.topk), case.experts
    uniform = torch.randint(0, experts, shape, generator=g)
    match case.routing:
        case "uniform":
            return uniform
        case "holes":
            return torch.where(torch.rand(shape, generator=g) < 0.4, -1, uniform)
        case "rank0":
            return uniform % -(-experts // case.world)
        case "last":
            return torch.full(shape, experts - 1)
        case "skewed":
            return (torch.rand(shape, generator=g) ** 4 * experts).long()
        case "duplicates":
            return uniform[:, :1].expand(shape).clone()
        case "none":
            return torch.full(shape, -1)
        case "distinct":
            scores = torch.rand(shape[0], max(experts, shape[1]), generator=g)
            chosen = scores.topk(shape[1], dim=1).indices
            return torch.where(chosen < experts, chosen, -1)
        case "mixed":
            idx = torch.where(torch.rand(shape, generator=g) < 0.2, -1, uniform)
            repeat = torch.rand(shape[0], 1, generator=g) < 0.3
            return torch.where(repeat, idx[:, :1], idx)
    raise ValueError(f"routing={case.routing!r}: one of {ROUTINGS}")
