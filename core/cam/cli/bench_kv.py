"""`cam bench kv`: the KV cache's transfer against its peers and plain copies."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cam.bench import kv_benchmark
from cam.bench.kv_plan import CONTENDERS, KvPlan
from cam.bench.kv_report import KvReport, KvResult, case_table, latency_table
from cam.errors import CamError, ConfigError


def command(
    mib: Annotated[str, typer.Option(help="Sizes of a whole transfer, MiB, a list.")] = "64,512,2048",
    piece_kib: Annotated[str, typer.Option("--piece", help="Sizes of a block's K or V in one layer, KiB.")] = "32,256",
    layers: Annotated[int, typer.Option(help="Layers.")] = 32,
    engines: Annotated[str, typer.Option(help="Who takes part.")] = ",".join(CONTENDERS),
    passes: Annotated[int, typer.Option(help="How often each gets a fresh pair of processes.")] = 2,
    rounds: Annotated[int | None, typer.Option(help="Timed rounds per pass; else what time allows.")] = None,
    seconds: Annotated[float, typer.Option(help="Time for a pass's rounds, without --rounds.")] = 3.0,
    threads: Annotated[int | None, typer.Option(help="Threads of CAM's copies and of the plain ones.")] = None,
    latency: Annotated[bool, typer.Option(help="Also measure single blocks and opening.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="A taste: 64 MiB, one pass.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all results to this file.")] = None,
) -> None:
    """KV-cache transfer: scattered blocks of one process into scattered blocks of another.

    CAM over shared memory and over cross memory attach, NIXL READ, Mooncake READ, Gloo layer by layer, and plain copies
    of as many bytes without gaps as the floor. What arrives is checked before and after the timed rounds.
    """
    console = Console()
    try:
        fields: dict[str, Any] = {
            "mib": _numbers("mib", mib),
            "piece_kib": _numbers("piece", piece_kib),
            "layers": layers,
            "contenders": tuple(dict.fromkeys(part.strip() for part in engines.split(","))),
            "passes": passes,
            "rounds": rounds,
            "seconds": seconds,
            "threads": threads,
            "latency": latency,
        }
        plan = KvPlan.quick(**fields) if quick else KvPlan(**fields)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    with console.status("starting") as status:

        def finished(_: KvReport, result: KvResult) -> None:
            console.print(case_table(result))

        try:
            report = kv_benchmark.run(
                plan, command=" ".join(["cam", *sys.argv[1:]]), started=status.update, finished=finished
            )
        except CamError as error:
            console.print(f"{type(error).__name__}: {error}", style="bold red", markup=False, highlight=False)
            raise typer.Exit(1) from None
    table = latency_table(report.results)
    if table is not None:
        console.print(table)
    for name, state in report.engines.items():
        if state != "measured":
            console.print(f"{name}: {state}", style="yellow", markup=False)
    for each in report.skipped:
        console.print(f"skipped {each['case']}: {each['reason']}", style="yellow", markup=False)
    console.print(
        f"{len(report.results)} cases in {report.seconds:.0f} s; every result checked. % floor: of the speed of the "
        "faster plain copy between the same rounds.",
        style="dim",
    )
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(report.to_json(), indent=1) + "\n")
        console.print(f"results: {json_file}")


def _numbers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError(f"{name} must be a list of whole numbers such as 32,256; got {text!r}") from None
