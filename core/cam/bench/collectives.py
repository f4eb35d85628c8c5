"""The benchmark of collectives: what is measured, one run of it, and its results.

    report = collectives.run(CollectivesPlan(ranks=(2,), sizes=(4096, 1 << 20)))

Each operation goes through torch.distributed (backend cam), through CAM's kernels alone, through Gloo and through MPI,
in turns within one run; each result is checked against Gloo's before it is timed. Two cases beside the operations: a
batch of 300 small gradients, and the communication of a DDP step. See collectives_worker for what a rank does.
"""

import datetime
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from cam import host
from cam.bench import machine
from cam.bench.launch import Mpi, run_world
from cam.errors import ConfigError

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "batch", "ddp")
DTYPES = {"float32": 4, "bfloat16": 2}
ENGINES = ("cam", "gloo", "mpi")
#: Of the JSON: raised when a field changes its meaning or goes away.
SCHEMA = "cam-bench-collectives/1"
#: The batch: this many gradients of 1 to 4 KiB.
BATCH = 300


@dataclass(frozen=True)
class Case:
    """nbytes: of the larger of a rank's input and output (for batch and ddp: of all gradients together)."""

    ranks: int
    operation: str
    dtype: str
    nbytes: int

    @property
    def title(self) -> str:
        return f"{self.ranks} ranks, {self.operation}, {self.dtype}, {size_name(self.nbytes)}"


@dataclass(frozen=True)
class CollectivesPlan:
    """sizes: bytes. rounds: timed rounds per case; None: as many as fit into seconds_per_case, 3 to 300.

    algorithm, piece: as in cam.Config (collective_algorithm, collective_piece). Raises ConfigError.
    """

    operations: tuple[str, ...] = OPERATIONS
    sizes: tuple[int, ...] = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 256 << 20)
    ranks: tuple[int, ...] = (2, 4)
    dtypes: tuple[str, ...] = tuple(DTYPES)
    engines: tuple[str, ...] = ENGINES
    rounds: int | None = None
    seconds_per_case: float = 3.0
    algorithm: str = "auto"
    piece: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("operations", OPERATIONS), ("dtypes", tuple(DTYPES)), ("engines", ENGINES)):
            _among(name, getattr(self, name), allowed)
        if "gloo" not in self.engines:
            raise ConfigError("engines must include gloo, whose results all others are checked against")
        if min(self.ranks, default=0) < 1 or min(self.sizes, default=0) < 1024:
            raise ConfigError(f"ranks must be >= 1 and sizes >= 1024, got {self.ranks} and {self.sizes}")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"rounds must be >= 1, got {self.rounds}")

    def cases(self, ranks: int) -> tuple[Case, ...]:
        sized = [name for name in self.operations if name not in ("batch", "ddp")]
        found = [Case(ranks, name, dtype, size) for name in sized for dtype in self.dtypes for size in self.sizes]
        if "batch" in self.operations:
            found.append(Case(ranks, "batch", "float32", BATCH * 2560))
        if "ddp" in self.operations:
            found.append(Case(ranks, "ddp", "float32", 0))
        return tuple(found)


@dataclass(frozen=True)
class CollectivesSpec:
    """What the launcher tells the ranks of one group."""

    ranks: int
    directory: str
    cases: tuple[Case, ...]
    plan: CollectivesPlan
    mpi: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "CollectivesSpec":
        given = data["plan"]
        plan: dict[str, Any] = {
            each.name: tuple(given[each.name]) if isinstance(given[each.name], list) else given[each.name]
            for each in fields(CollectivesPlan)
        }
        cases = tuple(Case(**case) for case in data["cases"])
        return cls(data["ranks"], data["directory"], cases, CollectivesPlan(**plan), data["mpi"])


@dataclass(frozen=True)
class Result:
    """seconds: by contender, over rounds: median, min, q1, q3; the slowest rank of a round counts."""

    case: Case
    rounds: int
    seconds: dict[str, dict[str, float]]

    def median(self, contender: str) -> float | None:
        found = self.seconds.get(contender)
        return None if found is None else found["median"]

    def over(self, contender: str, other: str) -> float | None:
        """How many times faster `contender` is than `other`."""
        mine, theirs = self.median(contender), self.median(other)
        return None if mine is None or theirs is None or mine <= 0 else theirs / mine


@dataclass
class CollectivesReport:
    command: str
    started: str
    machine: dict[str, Any]
    versions: dict[str, str]
    plan: dict[str, Any]
    engines: dict[str, str]
    results: list[Result] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def run(
    plan: CollectivesPlan,
    *,
    command: str = "",
    on_start: Callable[[str], None] = lambda _: None,
    on_result: Callable[[Result], None] = lambda _: None,
    patience_s: float = 600.0,
) -> CollectivesReport:
    """Measures every case of the plan, one number of ranks after another.

    on_start, on_result: called between cases. patience_s: the longest time for one case. Raises BenchFailed.
    """
    began = time.monotonic()
    mpi = Mpi.find() if "mpi" in plan.engines else Mpi(None, "not asked for")
    report = CollectivesReport(
        command=command,
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=machine.describe(),
        versions=machine.versions(),
        plan=asdict(plan),
        engines={
            "cam": "measured" if "cam" in plan.engines else "not asked for",
            "gloo": "measured",
            "mpi": f"measured: {mpi.version}" if mpi.version is not None else f"not measured: {mpi.reason}",
        },
    )

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            on_start(event["title"])
        elif event["event"] == "case":
            result = Result(Case(**event["case"]), event["rounds"], event["seconds"])
            report.results.append(result)
            on_result(result)

    with tempfile.TemporaryDirectory(prefix="cam-bench-") as directory:
        for ranks in plan.ranks:
            cases = _that_fit(plan.cases(ranks), report)
            spec = CollectivesSpec(ranks, directory, cases, plan, mpi=mpi.version is not None)
            run_world(
                spec,
                listen,
                mpi=mpi,
                crowded=ranks > host.usable_cores(),
                patience_s=patience_s,
                worker="cam.bench.collectives_worker",
            )
    report.seconds = time.monotonic() - began
    return report


def size_name(nbytes: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):g} {unit}"
    return f"{nbytes} B" if nbytes else "a step"


def _that_fit(cases: Sequence[Case], report: CollectivesReport) -> tuple[Case, ...]:
    """Each rank holds input, output, an expectation and copies: about six times the size."""
    available = machine.available_memory()
    fitting = []
    for case in cases:
        needed = case.ranks * (6 * case.nbytes + (1 << 28))
        if needed <= available:
            fitting.append(case)
        else:
            reason = f"needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available"
            report.skipped.append({"case": case.title, "reason": reason})
    return tuple(fitting)


def _among(name: str, values: Sequence[str], allowed: Sequence[str]) -> None:
    unknown = [value for value in values if value not in allowed]
    if unknown or not values:
        raise ConfigError(f"{name} must be among {', '.join(allowed)}; got {', '.join(unknown) or 'nothing'}")
