"""The `cam` command. `cam doctor` says what this machine offers, `cam demo` shows CAM at work, `cam bench`
measures.
"""

import typer

from cam.cli import bench, bench_collectives, demo, doctor

app = typer.Typer(
    name="cam",
    help="Communication ops for large models.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    # CamErrors are told in one line; anything else is a bug and shows its plain traceback.
    pretty_exceptions_enable=False,
)
app.command("doctor")(doctor.command)
app.command("demo")(demo.command)
bench.app.command("collectives")(bench_collectives.command)
app.add_typer(bench.app, name="bench")
