"""Results of the KV-cache benchmark, as JSON and as tables."""

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.table import Table

from cam.bench.kv_pair import Pass
from cam.bench.kv_plan import KvCase
from cam.bench.samples import Summary

#: Raised when a field changes its meaning or goes away.
SCHEMA = "cam-bench-kv/1"

LABELS = {
    "cam-shm": "CAM shm",
    "cam-cma": "CAM cma",
    "nixl": "NIXL READ",
    "mooncake": "Mooncake READ",
    "gloo": "Gloo send/recv per layer",
    "floor-nontemporal": "plain copy, non-temporal",
    "floor-memcpy": "plain copy, memcpy",
}


@dataclass(frozen=True)
class KvRow:
    """Seconds for the whole case over all passes. of_floor: the time of the faster plain copy, measured between this
    contender's own rounds, as a fraction of this one. over_nixl, over_gloo: how many times faster."""

    contender: str
    seconds: Summary
    gb_per_s: float
    of_floor: float | None
    over_nixl: float | None
    over_gloo: float | None
    rounds: int


@dataclass
class KvResult:
    case: KvCase
    rows: list[KvRow] = field(default_factory=list)
    latency: dict[str, dict[str, Summary]] = field(default_factory=dict)


@dataclass
class KvReport:
    command: str
    started: str
    machine: dict[str, Any]
    versions: dict[str, str]
    plan: dict[str, Any]
    engines: dict[str, str] = field(default_factory=dict)
    skipped: list[dict[str, str]] = field(default_factory=list)
    results: list[KvResult] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def summarise(case: KvCase, passes: dict[str, list[Pass]]) -> KvResult:
    """passes: of each contender."""
    times = {name: [second for each in found for second in each.rounds] for name, found in passes.items()}
    every = [each for found in passes.values() for each in found]
    floors = {
        "floor-nontemporal": [second for each in every for second in each.nontemporal],
        "floor-memcpy": [second for each in every for second in each.memcpy],
    }
    medians = {name: statistics.median(values) for name, values in (times | floors).items()}
    result = KvResult(case)
    for name, values in (times | floors).items():
        own = passes.get(name, [])
        floor = min(statistics.median(_joined(own, kind)) for kind in ("nontemporal", "memcpy")) if own else 0.0
        result.rows.append(
            KvRow(
                name,
                Summary.of(values),
                case.nbytes / medians[name] / 1e9,
                floor / medians[name] if floor else None,
                _over(medians, "nixl", name),
                _over(medians, "gloo", name),
                len(values),
            )
        )
        latency: dict[str, list[float]] = {}
        for each in own:
            for what, tries in each.latency.items():
                latency.setdefault(what, []).extend(tries)
        if latency:
            result.latency[name] = {what: Summary.of(tries) for what, tries in latency.items()}
    return result


def case_table(result: KvResult) -> Table:
    """One case."""
    title = f"[bold]{result.case.title}[/bold]  ({result.case.blocks} of {result.case.pool} blocks, scattered)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    for name in ("ms", "+-%", "GB/s", "x NIXL", "x Gloo", "% floor", "rounds"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        style = "green" if row.contender.startswith("cam-") else "dim" if row.contender.startswith("floor") else ""
        spread = 50 * (row.seconds.q3 - row.seconds.q1) / row.seconds.median
        table.add_row(
            LABELS[row.contender],
            f"{row.seconds.median * 1e3:.3g}",
            f"{spread:.0f}",
            f"{row.gb_per_s:.2f}",
            _text(row.over_nixl),
            _text(row.over_gloo),
            "" if row.of_floor is None else f"{100 * row.of_floor:.0f}",
            str(row.rounds),
            style=style,
        )
    return table


def latency_table(results: Iterable[KvResult]) -> Table | None:
    """Small things, of the first case that measured them for each piece size."""
    table = Table(title="[bold]Small things[/bold], microseconds", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("", "piece", "median", "min", "3rd quartile"):
        table.add_column(name, justify="right" if name and name != "piece" else "left")
    seen: set[tuple[str, int, str]] = set()
    for result in results:
        for contender, entries in result.latency.items():
            for what, summary in entries.items():
                key = contender, result.case.piece_kib, what
                if key in seen:
                    continue
                seen.add(key)
                table.add_row(
                    f"{LABELS[contender]}: {what}",
                    f"{result.case.piece_kib} KiB",
                    *(f"{value * 1e6:.0f}" for value in (summary.median, summary.min, summary.q3)),
                )
    return table if seen else None


def _joined(passes: list[Pass], kind: str) -> list[float]:
    return [second for each in passes for second in getattr(each, kind)]


def _over(medians: dict[str, float], other: str, name: str) -> float | None:
    return medians[other] / medians[name] if other in medians and name != other else None


def _text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
