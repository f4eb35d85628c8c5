"""`cam bench collectives`: the torch backend `cam`, and its kernels alone, against Gloo and MPI."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from cam.bench import collectives
from cam.bench.collectives import CollectivesPlan, Result, size_name
from cam.errors import CamError, ConfigError

_DEFAULT_SIZES = "4KiB,64KiB,256KiB,1MiB,16MiB,256MiB"


def command(
    sizes: Annotated[str, typer.Option(help="Bytes of the larger of input and output, a list.")] = _DEFAULT_SIZES,
    operations: Annotated[str, typer.Option(help="What is measured.")] = ",".join(collectives.OPERATIONS),
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,4",
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16.")] = "float32,bfloat16",
    engines: Annotated[str, typer.Option(help="MPI needs mpirun and mpi4py.")] = "cam,gloo,mpi",
    algorithm: Annotated[str, typer.Option(help="auto, flat or direct.")] = "auto",
    piece: Annotated[str, typer.Option(help="Bytes that a rank stages at once; 0: chosen.")] = "0",
    rounds: Annotated[int | None, typer.Option(help="Timed rounds per case; else what time allows.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for a case's rounds, without --rounds.")] = 3.0,
    quick: Annotated[bool, typer.Option("--quick", help="A taste: 2 ranks, 4 KiB and 1 MiB, float32.")] = False,
    patience: Annotated[float, typer.Option(help="Seconds that one case may take at most.")] = 600.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this file.")] = None,
) -> None:
    """Collectives: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, a batch, a DDP step.

    "cam" goes through torch.distributed like Gloo; "kernels" are CAM's native calls, to be compared with MPI's.
    Contenders take turns within each round, the slowest rank counts, results are checked against Gloo's first.
    """
    console = Console()
    try:
        plan = CollectivesPlan(
            operations=_words(operations),
            sizes=tuple(_bytes(word) for word in _words(sizes)),
            ranks=tuple(_number(word) for word in _words(ranks)),
            dtypes=_words(dtypes),
            engines=_words(engines),
            rounds=rounds,
            seconds_per_case=seconds,
            algorithm=algorithm,
            piece=_bytes(piece),
        )
        if quick:
            plan = CollectivesPlan(sizes=(4 << 10, 1 << 20), ranks=(2,), dtypes=("float32",), engines=plan.engines)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        report = collectives.run(
            plan,
            command=" ".join(["cam", *sys.argv[1:]]),
            on_result=lambda result: console.print(_line(result), highlight=False),
            patience_s=patience,
        )
    except CamError as error:
        console.print(f"[bold red]{type(error).__name__}[/bold red]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        raise typer.Exit(1) from None
    for skipped in report.skipped:
        console.print(f"[yellow]skipped[/yellow] {skipped['case']}: {skipped['reason']}")
    for count in plan.ranks:
        console.print(_table(count, [result for result in report.results if result.case.ranks == count]))
    console.print(f"MPI {report.engines['mpi']}. {report.seconds:.0f} s.", style="dim")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
        console.print(f"results: {json_file}")


def _line(result: Result) -> str:
    told = ", ".join(f"{name} {_ms(each['median'])}" for name, each in result.seconds.items())
    return f"{result.case.title}: {told} ms"


def _table(ranks: int, results: list[Result]) -> Table:
    table = Table(title=f"[bold]{ranks} ranks[/bold], ms", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("operation", "dtype", "size"):
        table.add_column(name)
    for name in ("cam", "kernels", "Gloo", "MPI", "cam x Gloo", "kernels x MPI"):
        table.add_column(name, justify="right")
    for result in results:
        case = result.case
        kernels, gain = result.median("cam kernels"), result.over("cam", "gloo")
        if case.operation == "batch":
            kernels, gain = None, result.over("cam", "cam loop")
        if case.operation == "ddp":
            gain = _communication(result, "gloo") / max(_communication(result, "cam"), 1e-9)
        table.add_row(
            {"batch": "batch (x cam loop)", "ddp": "DDP (x communication)"}.get(case.operation, case.operation),
            case.dtype,
            size_name(case.nbytes),
            _ms(result.median("cam")),
            _ms(kernels),
            _ms(result.median("gloo")),
            _ms(result.median("mpi")),
            _factor(gain),
            _factor(result.over("cam kernels", "mpi")),
        )
    return table


def _communication(result: Result, contender: str) -> float:
    """What a DDP step takes longer than one without communication, in seconds."""
    return max((result.median(contender) or 0.0) - (result.median("alone") or 0.0), 0.0)


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return ""
    milliseconds = seconds * 1e3
    return f"{milliseconds:.4f}" if milliseconds < 0.1 else f"{milliseconds:.3g}"


def _factor(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"a whole number is needed, got {text!r}") from None


def _bytes(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise ConfigError(f"a size in bytes such as 64KiB is needed, got {text!r}") from None
