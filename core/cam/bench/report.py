"""Results of a benchmark: figures with what they are compared with, as JSON and as tables for a terminal."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from cam.bench.plan import Case

#: Of the JSON: raised when a field changes its meaning or goes away.
SCHEMA = "cam-bench-ep/1"

PHASES = ("dispatch", "combine")


@dataclass(frozen=True)
class Row:
    """One contender's phase. Seconds are medians over rounds; min, q1, q3 describe the spread of `seconds`.

    native, python: parts of it, where known. over_gloo, over_mpi_raw: how many times faster than Gloo's user
    path and than MPI's all_to_all of the same rows. of_floor: the time of the faster plain copy of the same
    rows as a fraction of this one. None where the comparison was not measured or makes no sense.
    """

    contender: str
    label: str
    rows: str
    phase: str
    seconds: float
    min: float
    q1: float
    q3: float
    native: float | None
    python: float | None
    over_gloo: float | None
    over_mpi_raw: float | None
    of_floor: float | None


@dataclass(frozen=True)
class CaseResult:
    """sent_bytes: per layout, the bytes of rows that each rank sends (its own included)."""

    case: Case
    rounds: int
    sent_bytes: dict[str, list[int]]
    rows: list[Row]

    @classmethod
    def from_event(cls, event: dict[str, Any]) -> "CaseResult":
        """event: "case", as cam.bench.worker reports it."""
        measured = event["results"]
        medians = {(m["contender"], m["phase"]): float(m["seconds"]["median"]) for m in measured}
        return cls(
            case=Case(**event["case"]),
            rounds=event["rounds"],
            sent_bytes=event["sent_bytes"],
            rows=[_row(m, medians) for m in measured],
        )

    def find(self, contender: str, phase: str) -> Row | None:
        for row in self.rows:
            if (row.contender, row.phase) == (contender, phase):
                return row
        return None

    def floor(self, rows: str) -> float | None:
        """Seconds of the faster plain copy of a layout's rows."""
        copies = [row.seconds for row in self.rows if row.phase == "copy" and row.rows == rows]
        return min(copies, default=None)


@dataclass(frozen=True)
class Crowding:
    """CAM's time for the same total number of tokens with `ranks` sharing cores, and with `base` ranks that
    do not.
    """

    contender: str
    label: str
    phase: str
    hidden: int
    routing: str
    total_tokens: int
    base: int
    base_seconds: float
    ranks: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.base_seconds


@dataclass
class Report:
    """Everything that one run of the benchmark found out."""

    command: str
    started: str
    machine: dict[str, Any]
    versions: dict[str, str]
    plan: dict[str, Any]
    engines: dict[str, str]
    groups: list[dict[str, Any]] = field(default_factory=list)
    results: list[CaseResult] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)
    crowding: list[Crowding] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        for plain, crowding in zip(data["crowding"], self.crowding, strict=True):
            plain["ratio"] = crowding.ratio
        return {"schema": SCHEMA, **data}


def find_crowding(results: Iterable[CaseResult], base: int) -> list[Crowding]:
    """Pairs each result of more than `base` ranks with that of `base` ranks for the same total of tokens."""
    results = list(results)
    found = []
    bases = {(r.case.hidden, r.case.routing, r.case.tokens * base): r for r in results if r.case.ranks == base}
    for result in (r for r in results if r.case.ranks > base):
        case = result.case
        total = case.tokens * case.ranks
        other = bases.get((case.hidden, case.routing, total))
        for row in result.rows if other is not None else ():
            before = other.find(row.contender, row.phase) if other is not None else None
            if before is not None and row.contender.startswith("cam-"):
                found.append(
                    Crowding(
                        row.contender,
                        row.label,
                        row.phase,
                        case.hidden,
                        case.routing,
                        total,
                        base,
                        before.seconds,
                        case.ranks,
                        row.seconds,
                    )
                )
    return found


def case_table(result: CaseResult) -> Table:
    """One case: a line per contender, first for dispatch, then for combine."""
    case = result.case
    details = f"top-{case.topk} of {case.experts}, {case.dtype}, {result.rounds} rounds"
    table = Table(
        title=f"[bold]{case.title}[/bold]  ({details})",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # so that it fits 80 columns
    )
    table.add_column(no_wrap=True)
    for name in ("ms", "+-%", "x Gloo", "x MPI", "% floor", "native us", "Py us"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in PHASES:
        table.add_section()
        table.add_row(phase, style="bold")
        for row in (row for row in result.rows if row.phase in (phase, "copy")):
            style = "green" if row.contender.startswith("cam-") else "dim" if row.phase == "copy" else ""
            table.add_row(row.label, *_cells(row), style=style)
    return table


def crowding_table(crowding: Iterable[Crowding]) -> Table:
    title = "[bold]CAM with more ranks than cores, the same tokens in all[/bold]"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("layout", "phase", "H", "routing", "tokens", "ms", "ranks", "ms", "ratio"):
        table.add_column(name, justify="left" if name in ("layout", "phase") else "right", no_wrap=True)
    for c in sorted(crowding, key=lambda c: (c.hidden, c.routing, c.contender, c.phase, c.total_tokens)):
        table.add_row(
            c.contender.removeprefix("cam-"),
            c.phase,
            str(c.hidden),
            c.routing,
            str(c.total_tokens),
            _ms(c.base_seconds),
            f"{c.base} > {c.ranks}",
            _ms(c.seconds),
            f"{c.ratio:.2f}",
        )
    return table


def _cells(row: Row) -> Iterator[str]:
    yield _ms(row.seconds)
    yield f"{50 * (row.q3 - row.q1) / row.seconds:.0f}"  # half the distance between the quartiles
    yield "" if row.over_gloo is None else _factor(row.over_gloo)
    yield "" if row.over_mpi_raw is None else _factor(row.over_mpi_raw)
    yield "" if row.of_floor is None else f"{100 * row.of_floor:.0f}"
    yield "" if row.native is None else f"{row.native * 1e6:.0f}"
    yield "" if row.python is None else f"{row.python * 1e6:.0f}"


def _row(measured: dict[str, Any], medians: dict[tuple[str, str], float]) -> Row:
    phase, rows = measured["phase"], measured["rows"]
    total = measured["seconds"]
    seconds = float(total["median"])
    suffix = "" if rows == "expert" else f"-{rows}"
    copies = [
        medians[name, "copy"] for name in (f"nontemporal{suffix}", f"memcpy{suffix}") if (name, "copy") in medians
    ]

    def over(contender: str) -> float | None:
        other = medians.get((contender, phase))
        return None if other is None else other / seconds

    def median(part: str) -> float | None:
        return None if measured[part] is None else float(measured[part]["median"])

    return Row(
        contender=measured["contender"],
        label=measured["label"],
        rows=rows,
        phase=phase,
        seconds=seconds,
        min=total["min"],
        q1=total["q1"],
        q3=total["q3"],
        native=median("native_seconds"),
        python=median("python_seconds"),
        over_gloo=over("gloo"),
        over_mpi_raw=over(f"mpi-raw{suffix}") if rows else None,
        of_floor=min(copies) / seconds if copies and rows else None,
    )


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    if milliseconds < 1:
        return f"{milliseconds:.3f}"
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
