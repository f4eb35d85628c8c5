"""What a benchmark of expert parallelism measures: the plan a person asks for, and its cases."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cam.errors import ConfigError

ROUTINGS = ("uniform", "zipf")
LAYOUTS = ("expert", "rank")
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
ENGINES = ("cam", "gloo", "mpi")

#: MPI 3 counts and places bytes by 32-bit integers.
_MPI_MAX_BYTES = 2**31 - 1


@dataclass(frozen=True, order=True)
class Case:
    """One measurement. tokens: per rank. cam_only: the peers are left out (only the reference path runs)."""

    ranks: int
    hidden: int
    routing: str
    tokens: int
    topk: int
    experts: int
    dtype: str
    cam_only: bool = False

    @property
    def row_bytes(self) -> int:
        return self.hidden * DTYPES[self.dtype]

    @property
    def expert_bytes(self) -> int:
        """Bytes of rows that one rank's dispatch delivers in the expert layout."""
        return self.tokens * self.topk * self.row_bytes

    @property
    def memory_bytes(self) -> int:
        """About what all ranks together hold at their peak, in bytes.

        Ready buffers for the raw transfers (3), the user path's own temporaries (3), CAM's result and the
        pages it retains (2), checks in float32 (1): each the size of the rows. Skewed routing gives one rank
        more.
        """
        return self.ranks * (9 * self.expert_bytes + (1 << 29))

    @property
    def fits_mpi(self) -> bool:
        """Whether one rank can receive the rows of all in one Alltoallv."""
        return self.ranks * self.expert_bytes <= _MPI_MAX_BYTES

    @property
    def title(self) -> str:
        return f"{self.ranks} ranks, T {self.tokens}, H {self.hidden}, {self.routing}"


@dataclass(frozen=True)
class Plan:
    """The whole benchmark. Raises ConfigError with the value found and those allowed.

    tokens: per rank. rounds: timed rounds per case; None: as many as fit into seconds_per_case, 3 to 100.
    engines: who is measured; "gloo" is always there, because every result is checked against it.
    """

    tokens: tuple[int, ...] = (1, 32, 128, 512, 2048, 4096)
    hidden: tuple[int, ...] = (2048, 7168)
    ranks: tuple[int, ...] = (2, 4)
    routing: tuple[str, ...] = ROUTINGS
    topk: int = 8
    experts: int = 64
    dtype: str = "bfloat16"
    layouts: tuple[str, ...] = LAYOUTS
    quant: bool = True
    rounds: int | None = None
    seconds_per_case: float = 8.0
    engines: tuple[str, ...] = ENGINES

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "ranks"):
            values = getattr(self, name)
            if not values or any(value < 1 for value in values):
                raise ConfigError(f"{name} must list numbers >= 1, got {list(values)}")
        _one_of("routing", self.routing, ROUTINGS)
        _one_of("layout", self.layouts, LAYOUTS)
        _one_of("dtype", [self.dtype], DTYPES)
        _one_of("engines", self.engines, ENGINES)
        if "gloo" not in self.engines:
            raise ConfigError(
                f"engines must include gloo, whose result every other one is checked against, "
                f"got {','.join(self.engines)}"
            )
        if not 1 <= self.topk <= self.experts:
            raise ConfigError(f"topk must be in 1..experts ({self.experts}), got {self.topk}")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"rounds must be >= 1, got {self.rounds}")
        if not self.seconds_per_case > 0:
            raise ConfigError(f"seconds per case must be > 0, got {self.seconds_per_case}")
        if max(self.ranks) > self.experts:
            raise ConfigError(f"ranks must be <= experts ({self.experts}), got {max(self.ranks)}")

    @classmethod
    def quick(cls, **fields: Any) -> "Plan":
        """Other defaults: a taste in a few seconds."""
        brief = {"tokens": (1, 128), "hidden": (7168,), "ranks": (2,), "routing": ("uniform",), "seconds_per_case": 2.0}
        return cls(**{**brief, **fields})

    def cases(self, cores: int) -> list[Case]:
        """Every case, grouped by number of ranks.

        Where ranks outnumber `cores`, cases with the same total number of tokens as the largest group that
        does not are added for CAM alone: they show what sharing cores costs.
        """
        result = [
            self._case(ranks, hidden, routing, tokens)
            for ranks in self.ranks
            for hidden in self.hidden
            for routing in self.routing
            for tokens in self.tokens
        ]
        base = self.base_ranks(cores)
        if base is not None and "cam" in self.engines:
            for ranks in (r for r in self.ranks if r > cores):
                for hidden in self.hidden:
                    for tokens in self.tokens:
                        shared, rest = divmod(tokens * base, ranks)
                        if shared and not rest and shared not in self.tokens:
                            result.append(self._case(ranks, hidden, self.routing[0], shared, cam_only=True))
        return sorted(result)

    def base_ranks(self, cores: int) -> int | None:
        """The largest number of ranks with a core each, when there are also more ranks than cores."""
        fitting = [ranks for ranks in self.ranks if ranks <= cores]
        return max(fitting) if fitting and max(self.ranks) > cores else None

    def _case(self, ranks: int, hidden: int, routing: str, tokens: int, cam_only: bool = False) -> Case:
        return Case(
            ranks=ranks,
            hidden=hidden,
            routing=routing,
            tokens=tokens,
            topk=self.topk,
            experts=self.experts,
            dtype=self.dtype,
            cam_only=cam_only,
        )


def _one_of(name: str, values: Sequence[str], allowed: Iterable[str]) -> None:
    unknown = [value for value in values if value not in allowed]
    if unknown or not values:
        raise ConfigError(f"{name} must be among {', '.join(allowed)}; got {', '.join(unknown) or 'nothing'}")
