"""`cam bench`: benchmarks, each against its peers and the memory's own speed in one run."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cam.bench import Case, CaseResult, Plan, Report, benchmark, picture
from cam.bench.report import case_table, crowding_table
from cam.cli import bench_kv
from cam.errors import CamError, ConfigError

app = typer.Typer(help="Measure CAM and its peers.", no_args_is_help=True, rich_markup_mode="markdown")


def _shown(field: str) -> str:
    """The defaults of a field of the plan, as help shows them."""

    def text(plan: Plan) -> str:
        value = getattr(plan, field)
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    return f"{text(Plan())}; with --quick {text(Plan.quick())}"


@app.callback()
def _bench() -> None:
    """Measure CAM and its peers."""


@app.command("ep")
def ep(
    tokens: Annotated[str | None, typer.Option(help="Tokens per rank.", show_default=_shown("tokens"))] = None,
    hidden: Annotated[str | None, typer.Option(help="Hidden sizes.", show_default=_shown("hidden"))] = None,
    ranks: Annotated[str | None, typer.Option(help="Numbers of ranks.", show_default=_shown("ranks"))] = None,
    routing: Annotated[
        str | None, typer.Option(help="How tokens choose experts.", show_default=_shown("routing"))
    ] = None,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = Plan.topk,
    experts: Annotated[int, typer.Option(help="Experts of all ranks together.")] = Plan.experts,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = Plan.dtype,
    layout: Annotated[str, typer.Option(help="CAM's layouts.")] = "expert,rank",
    quant: Annotated[bool, typer.Option(help="Also dispatch quantised to int8 and fp8.")] = True,
    engines: Annotated[str, typer.Option(help="MPI needs mpirun and mpi4py.")] = "cam,gloo,mpi",
    rounds: Annotated[int | None, typer.Option(help="Timed rounds per case; else what time allows.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Time for a case's rounds.", show_default=_shown("seconds_per_case"))
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A taste in seconds: other defaults.")] = False,
    patience: Annotated[float, typer.Option(help="Seconds that one case may take at most.")] = 600.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the results into this file.")] = None,
) -> None:
    """Expert parallelism: dispatch and combine.

    CAM in each layout; Gloo and MPI as the whole user path and as the bare all_to_all; plain copies of the same bytes
    as the floor. Contenders take turns within each round, the slowest rank counts, and every result is checked
    against Gloo's before it is timed.
    """
    console = Console()
    live = _Live(console)
    try:
        if png is not None:
            picture.require()
        given: dict[str, Any] = {
            "tokens": _numbers("tokens", tokens),
            "hidden": _numbers("hidden", hidden),
            "ranks": _numbers("ranks", ranks),
            "routing": _words(routing),
            "topk": topk,
            "experts": experts,
            "dtype": dtype,
            "layouts": _words(layout),
            "quant": quant,
            "rounds": rounds,
            "seconds_per_case": seconds,
            "engines": _words(engines),
        }
        given = {name: value for name, value in given.items() if value is not None}
        plan = Plan.quick(**given) if quick else Plan(**given)
        with live:
            benchmark.run(plan, command=_command(), progress=live, patience_s=patience)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except CamError as error:
        console.print(f"[bold red]{type(error).__name__}[/bold red]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from error
    finally:
        # What was measured before a failure, or before the user's patience ended, is not thrown away.
        if live.report is not None and live.report.results:
            _deliver(console, live.report, json_file, png)


app.command("kv")(bench_kv.command)


class _Live:
    """Shows progress. Draws only when told something: the cores belong to what is measured."""

    def __init__(self, console: Console) -> None:
        self.report: Report | None = None
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> "_Live":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def planned(self, report: Report, cases: list[Case]) -> None:
        self.report = report
        load, cores = report.machine["load"], report.machine["usable_cores"]
        if load > cores / 2:
            self._console.print(f"[yellow]busy machine[/yellow]: load {load:.1f} on {cores} cores blurs the figures")
        for skipped in report.skipped:
            self._console.print(f"[yellow]skipped[/yellow] {skipped['case']}: {skipped['reason']}")
        for engine, state in report.engines.items():
            if state.startswith("not measured"):
                self._console.print(f"[yellow]{engine}[/yellow] {state}")
        self._progress.update(self._task, total=len(cases), refresh=True)

    def started(self, title: str) -> None:
        self._progress.update(self._task, description=title, refresh=True)

    def finished(self, result: CaseResult) -> None:
        self._console.print(case_table(result))
        self._progress.update(self._task, advance=1, refresh=True)


def _deliver(console: Console, report: Report, json_file: Path | None, png: Path | None) -> None:
    if report.crowding:
        console.print(crowding_table(report.crowding))
    console.print(
        f"{len(report.results)} cases, each checked against Gloo's result, in {report.seconds:.0f} s. "
        "+-%: half the distance between the quartiles. x MPI: over MPI's all_to_all of the same rows. "
        "% floor: of the speed of a plain copy of the same rows. native us, Py us: the parts of the time inside and "
        "outside of native calls. (rank): the rows of the rank layout.",
        style="dim",
    )
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
        console.print(f"results: {json_file}", soft_wrap=True)
    if png is not None:
        for path in picture.draw(report, png):
            console.print(f"picture: {path}", soft_wrap=True)


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{name} must be a list of whole numbers such as 1,32; got {text!r}") from None


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _command() -> str:
    return " ".join(["cam", *sys.argv[1:]])
