"""What the KV-cache benchmark measures: cases, contenders, and how their memory is laid out."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cam.errors import ConfigError
from cam.transport.pieces import Int64s

#: In the order of the tables. "floor-...": plain copies of as many bytes without gaps, in every pair of processes.
CONTENDERS = ("cam-shm", "cam-cma", "nixl", "mooncake", "gloo")
HEADS, CHANNELS, ELEMENT = 8, 128, 2
PLANES = 2


@dataclass(frozen=True, order=True)
class KvCase:
    """One size. mib: of all that moves; piece_kib: of one block's K or V of one layer; layers."""

    mib: int
    piece_kib: int
    layers: int

    @property
    def title(self) -> str:
        return f"{self.mib} MiB in pieces of {self.piece_kib} KiB, {self.layers} layers"

    @property
    def piece(self) -> int:
        return self.piece_kib << 10

    @property
    def tokens(self) -> int:
        """Per block."""
        return self.piece // (HEADS * CHANNELS * ELEMENT)

    @property
    def blocks(self) -> int:
        """That move."""
        return (self.mib << 20) // (self.layers * PLANES * self.piece)

    @property
    def pool(self) -> int:
        """Blocks of each side's cache: a quarter more, so that those that move lie scattered."""
        return max(self.blocks + self.blocks // 4, self.blocks + 4)

    @property
    def nbytes(self) -> int:
        return self.blocks * self.layers * PLANES * self.piece

    @property
    def pool_bytes(self) -> int:
        return self.pool * self.layers * PLANES * self.piece

    @property
    def memory_bytes(self) -> int:
        """Of both processes, with the source of the plain copies, Gloo's staging and room for what libraries pin."""
        return 2 * self.pool_bytes + self.nbytes + self.nbytes // self.layers * 2 + (1 << 30)

    def source(self) -> Int64s:
        """Block ids there."""
        return np.random.default_rng(0).permutation(self.pool)[: self.blocks].astype(np.int64)

    def target(self) -> Int64s:
        """Block ids here."""
        return np.random.default_rng(1).permutation(self.pool)[: self.blocks].astype(np.int64)

    def offsets(self, blocks: Int64s) -> Int64s:
        """Byte offsets of all pieces in a pool [layers, planes, pool, piece], layer by layer."""
        base = np.arange(self.layers * PLANES, dtype=np.int64)[:, None] * self.pool + blocks
        return (base * self.piece).ravel()


@dataclass(frozen=True)
class KvPlan:
    """The whole benchmark. Raises ConfigError.

    passes: how often every contender gets a fresh pair of processes. rounds: timed rounds of each pass; None: what
    fits into `seconds`, 3 to 50. threads: of CAM's copies and of the floor; None: as cam.kv chooses.
    """

    mib: tuple[int, ...] = (64, 512, 2048)
    piece_kib: tuple[int, ...] = (32, 256)
    layers: int = 32
    contenders: tuple[str, ...] = CONTENDERS
    passes: int = 2
    rounds: int | None = None
    seconds: float = 3.0
    threads: int | None = None
    latency: bool = True

    def __post_init__(self) -> None:
        for name in ("mib", "piece_kib"):
            values = getattr(self, name)
            if not values or any(value < 1 for value in values):
                raise ConfigError(f"{name} must list numbers >= 1, got {list(values)}")
        unknown = [name for name in self.contenders if name not in CONTENDERS]
        if unknown or not self.contenders:
            raise ConfigError(f"contenders must be among {', '.join(CONTENDERS)}; got {', '.join(unknown) or 'none'}")
        for name, least in (("layers", 1), ("passes", 1), ("rounds", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be >= {least}, got {value}")
        if not self.seconds > 0:
            raise ConfigError(f"seconds must be > 0, got {self.seconds}")
        for case in self.cases():
            if case.tokens < 1 or case.blocks < 1:
                raise ConfigError(
                    f"{case.title}: a piece has at least {HEADS * CHANNELS * ELEMENT >> 10} KiB, and the whole at "
                    "least one block of every layer"
                )

    @classmethod
    def quick(cls, **fields: Any) -> "KvPlan":
        """A taste: 64 MiB, one pass."""
        return cls(**{**fields, "mib": (64,), "passes": 1, "seconds": 1.0})

    def cases(self) -> list[KvCase]:
        return [KvCase(mib, piece, self.layers) for mib in self.mib for piece in self.piece_kib]


def fitting(cases: Iterable[KvCase], available: int) -> tuple[list[KvCase], list[dict[str, str]]]:
    """The cases that memory allows, and the others with the reason."""
    good, skipped = [], []
    for case in cases:
        if case.memory_bytes <= available:
            good.append(case)
        else:
            needs = f"needs about {case.memory_bytes / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available"
            skipped.append({"case": case.title, "reason": needs})
    return good, skipped
