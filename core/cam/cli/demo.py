"""`cam demo`: shows that a model spread over processes computes what one process computes, and how fast."""

from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from cam.bench import Plan, benchmark
from cam.bench.report import case_table
from cam.demo.compare import GRADIENT_BOUND, LOSS_BOUND, StepComparison
from cam.demo.conduct import Outcome, conduct
from cam.demo.moe import Shape
from cam.errors import CamError


def command(
    speeds: Annotated[bool, typer.Option(help="Also measure speeds, as cam bench ep --quick does.")] = True,
) -> None:
    """Trains a small MoE model over 4 processes and compares every step with the same model in one process.

    Exits with 1 when something differs.
    """
    console = Console()
    shape = Shape()
    console.print(_introduction(shape))
    try:
        with console.status(f"training over {shape.ranks} processes, and in one"):
            outcome = conduct(shape)
    except CamError as error:
        console.print("[bold red]The demo failed[/bold red]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from None
    _show(console, outcome)
    if not outcome.agrees:
        console.print("[bold red]The two models differ.[/bold red]")
        raise typer.Exit(1)
    console.print("[bold green]Four processes compute what one computes.[/bold green]\n")
    if speeds:
        _measure(console)


def _introduction(shape: Shape) -> str:
    return (
        f"[bold]A mixture of {shape.experts} experts over {shape.ranks} processes[/bold]: "
        f"top-{shape.topk}, hidden {shape.hidden}, SwiGLU, float32, SGD. "
        f"Tokens per process: {', '.join(map(str, shape.tokens))}.\n"
    )


def _show(console: Console, outcome: Outcome) -> None:
    table = Table(
        title="[bold]Training, beside the same model in one process[/bold]",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        caption=f"largest differences, relative; allowed: loss {LOSS_BOUND:.0e}, others {GRADIENT_BOUND:.0e}",
        caption_justify="left",
        padding=(0, 1, 0, 0),
    )
    for name in ("step", "loss", "one process", "off by", "output", "d input", "d router", "d experts", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for number, step in enumerate(outcome.steps, 1):
        table.add_row(str(number), *_cells(step))
    console.print(table)
    for check in outcome.checks:
        mark = "[green]yes[/green]" if check.holds else "[bold red]NO[/bold red]"
        console.print(f"  {mark}  {check.statement}: {check.detail}", highlight=False)


def _cells(step: StepComparison) -> list[str]:
    return [
        f"{step.loss:.6f}",
        f"{step.whole_loss:.6f}",
        _difference(step.loss_difference),
        _difference(step.out),
        _difference(step.gradients["input"]),
        _difference(step.gradients["router"]),
        _difference(max(step.gradients["gate_up"], step.gradients["down"])),
        "[green]ok[/green]" if step.agrees else "[bold red]DIFFERS[/bold red]",
    ]


def _difference(value: float) -> str:
    return "equal" if value == 0 else f"{value:.0e}"


def _measure(console: Console) -> None:
    try:
        with console.status("measuring speeds: 2 processes, hidden 7168"):
            report = benchmark.run(Plan.quick(), command="cam bench ep --quick")
    except CamError as error:
        console.print("[bold red]The benchmark failed[/bold red]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from None
    for result in report.results:
        console.print(case_table(result))
    console.print("More: cam bench ep --help", style="dim")
