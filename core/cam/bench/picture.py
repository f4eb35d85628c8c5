"""The picture of a benchmark: how many times faster than Gloo's user path, by tokens per rank.

Needs matplotlib (the extra `cam[bench]`), which is imported only here and only when a picture is drawn.
"""

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cam.bench.report import PHASES, CaseResult, Report
from cam.errors import BackendUnavailable


@dataclass(frozen=True)
class Style:
    """How a contender's line looks. name: at the end of the line; the chart has no legend to look up."""

    name: str
    colour: str
    width: float
    dashes: str = "-"
    marker: str = "o"


_STYLES = {
    "cam-rank": Style("CAM, rank layout", "#00796b", 2.6),
    "cam-expert": Style("CAM, expert layout", "#1565c0", 2.6),
    "cam-expert-outside": Style("CAM, y outside window", "#1565c0", 1.3, "--", ""),
    "cam-int8": Style("CAM, int8", "#7b1fa2", 1.5, "-", ""),
    "cam-fp8": Style("CAM, fp8", "#c2185b", 1.5, "-", ""),
    "mpi-raw": Style("MPI all_to_all", "#ef6c00", 1.3, "--", ""),
    "mpi": Style("MPI user path", "#ef6c00", 2.0),
    "gloo-raw": Style("Gloo all_to_all", "#616161", 1.3, "--", ""),
}
_FLOORS = {"expert": "floor: plain copy", "rank": "floor, rank rows"}
_FLOOR_COLOUR = "#9e9e9e"
_INK = "#263238"

#: Labels at the ends of lines keep this distance, in fractions of the axis.
_LABEL_STEP = 0.05


def draw(report: Report, path: Path) -> list[Path]:
    """Writes the picture of the widest hidden size and the first routing to `path`.

    Further hidden sizes and routings go to files beside it, named like it with "-h2048-zipf". Returns all
    paths. Raises BackendUnavailable without matplotlib.
    """
    plots = _pyplot()
    seen = {(r.case.hidden, r.case.routing) for r in report.results if not r.case.cam_only}
    order = {routing: place for place, routing in enumerate(report.plan["routing"])}
    views = sorted(seen, key=lambda view: (-view[0], order.get(view[1], 0)))
    written = []
    for number, (hidden, routing) in enumerate(views):
        target = path if number == 0 else path.with_name(f"{path.stem}-h{hidden}-{routing}{path.suffix}")
        results = [
            r for r in report.results if (r.case.hidden, r.case.routing) == (hidden, routing) and not r.case.cam_only
        ]
        _draw_one(plots, report, results, target)
        written.append(target)
    return written


def require() -> None:
    """Raises BackendUnavailable without matplotlib: better before a long run than after it."""
    _pyplot()


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise BackendUnavailable(
            f"a picture needs matplotlib, which does not load ({error}); pip install 'cam[bench]'"
        ) from error
    return pyplot


def _draw_one(plots: Any, report: Report, results: list[CaseResult], path: Path) -> None:
    groups = sorted({r.case.ranks for r in results})
    case = results[0].case
    figure, grid = plots.subplots(
        len(groups),
        2,
        figsize=(15, 1.9 + 4.4 * len(groups)),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for axes_pair, ranks in zip(grid, groups, strict=True):
        mine = sorted((r for r in results if r.case.ranks == ranks), key=lambda r: r.case.tokens)
        for axes, phase in zip(axes_pair, PHASES, strict=True):
            labels = _draw_lines(axes, mine, phase)
            _dress(axes, mine, phase, ranks, crowded=ranks > report.machine["usable_cores"])
            axes.set_ylim(*_limits(results))
            _place_labels(axes, labels)
    for axes in grid[-1]:
        axes.set_xlabel("tokens per rank", color=_INK)
    for axes in grid[:, 0]:
        axes.set_ylabel("times faster than Gloo's user path", color=_INK)
    figure.suptitle(
        f"MoE dispatch and combine: hidden {case.hidden}, top-{case.topk} of {case.experts} experts, "
        f"{case.dtype}, {case.routing} routing",
        fontsize=15,
        fontweight="bold",
        color=_INK,
    )
    figure.supxlabel(_caption(report), fontsize=8.5, color="#546e7a", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plots.close(figure)


def _draw_lines(axes: Any, results: list[CaseResult], phase: str) -> list[tuple[float, str, str]]:
    """Draws every contender and the floors; returns (height, text, colour) of each line's end."""
    labels = []
    for key, style in _STYLES.items():
        points = [(r.case.tokens, row) for r in results if (row := r.find(key, phase)) is not None]
        points = [(tokens, row) for tokens, row in points if row.over_gloo is not None]
        if not points:
            continue
        tokens = [point[0] for point in points]
        heights = [float(row.over_gloo or 0) for _, row in points]
        axes.plot(tokens, heights, style.dashes, color=style.colour, lw=style.width, marker=style.marker, ms=5)
        if style.marker:
            low = [height * row.seconds / row.q3 for height, (_, row) in zip(heights, points, strict=True)]
            high = [height * row.seconds / row.q1 for height, (_, row) in zip(heights, points, strict=True)]
            axes.fill_between(tokens, low, high, color=style.colour, alpha=0.12, lw=0)
        labels.append((heights[-1], f"{style.name}  {_times(heights[-1])}", style.colour))
    for rows, name in _FLOORS.items():
        floors = [
            (r.case.tokens, gloo.seconds / floor)
            for r in results
            if (gloo := r.find("gloo", phase)) is not None and (floor := r.floor(rows)) is not None
        ]
        if floors:
            axes.plot(*zip(*floors, strict=True), ":", color=_FLOOR_COLOUR, lw=2.2, zorder=1)
            labels.append((floors[-1][1], f"{name}  {_times(floors[-1][1])}", "#757575"))
    return labels


def _dress(axes: Any, results: list[CaseResult], phase: str, ranks: int, *, crowded: bool) -> None:
    tokens = [r.case.tokens for r in results]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axhline(1, color=_INK, lw=1)
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.minorticks_off()
    ticks = [base * 10**power for power in range(-2, 4) for base in (1, 2, 5)]
    axes.set_yticks(ticks, [_times(tick) for tick in ticks])
    axes.grid(True, color="#eceff1")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=_INK)
    place = "sharing cores" if crowded else "a core each"
    axes.set_title(f"{phase}, {ranks} ranks, {place}", loc="left", fontsize=12, fontweight="bold", color=_INK)
    gloo = [(r.case.tokens, row.seconds) for r in results if (row := r.find("gloo", phase)) is not None]
    span = math.log(max(tokens) / min(tokens))
    for position, (count, seconds) in enumerate(gloo):
        if position + 1 < len(gloo) and math.log(gloo[position + 1][0] / count) < 0.12 * span:
            continue  # the next one's text would run into this one
        axes.annotate(
            _duration(seconds),
            (count, 0),
            (0, 3),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color="#546e7a",
        )


def _limits(results: list[CaseResult]) -> tuple[float, float]:
    heights = [row.over_gloo for r in results for row in r.rows if row.over_gloo and row.contender in _STYLES]
    for r in results:
        for phase in PHASES:
            gloo = r.find("gloo", phase)
            heights += [gloo.seconds / f for rows in _FLOORS if gloo and (f := r.floor(rows))]
    return min([0.6, *(height * 0.6 for height in heights)]), max([2.0, *heights]) * 1.6


def _place_labels(axes: Any, labels: list[tuple[float, str, str]]) -> None:
    """Writes each text beside the end of its line, moved apart where they would overlap."""
    to_axes = axes.transScale + axes.transLimits
    placed = sorted((float(to_axes.transform((1, height))[1]), text, colour) for height, text, colour in labels)
    heights = [height for height, _, _ in placed]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + _LABEL_STEP)
    # What was pushed out at the top moves down again, and pushes the others.
    if heights and heights[-1] > 1:
        heights[-1] = 1.0
        for i in range(len(heights) - 2, -1, -1):
            heights[i] = min(heights[i], heights[i + 1] - _LABEL_STEP)
    for (_, text, colour), height in zip(placed, heights, strict=True):
        axes.text(1.015, height, text, transform=axes.transAxes, va="center", fontsize=9.5, color=colour)


def _caption(report: Report) -> str:
    machine, torch = report.machine, report.versions["torch"]
    mpi = report.engines["mpi"].removeprefix("measured: ")
    method = (
        "At the foot: what Gloo's user path took. Medians of rounds in which all contenders take turns; the "
        "slowest rank counts; shades are quartiles; every result was checked against Gloo's before."
    )
    where = (
        f"{machine['cpu']}, {machine['usable_cores']} cores, Linux {machine['kernel']}, torch {torch}, "
        f"MPI {mpi}; {report.started}"
    )
    lines = [f"$ {report.command}", method, where] if report.command else [method, where]
    return "\n".join(part for line in lines for part in textwrap.wrap(line, 190))


def _times(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.2g}x"


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2g} s"
