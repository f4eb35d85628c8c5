"""Throughput and time to the first token: one server, two halves over CAM, two halves over vLLM's NixlConnector.

By itself it prints the table alone; `demo.py --bench` compares tokens first.
"""

import concurrent.futures
import importlib.util
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import servers
import tiny_models
from rich import box
from rich.console import Console
from rich.table import Table

REQUESTS = 24
AT_ONCE = 4
PROMPT = 600
TOKENS = 32

Start = Callable[[servers.Servers, Path], servers.Server]


@dataclass(frozen=True)
class Timing:
    first_s: list[float]
    tokens: int
    seconds: float


def run(console: Console, model: Path) -> None:
    """Measures each way of serving for itself, and prints the table."""
    rows: list[tuple[str, Timing | str]] = []
    for name, start in (("one server", _whole), ("two halves, CAM", _cam), ("two halves, NIXL", _nixl)):
        if start is _nixl and importlib.util.find_spec("nixl") is None:
            rows.append((name, "not run: nixl is not installed (pip install --no-deps nixl nixl-cu12)"))
            continue
        try:
            with servers.Servers() as started, console.status(f"measuring: {name}"):
                rows.append((name, _measure(start(started, model), model.name)))
        except servers.ServerFailed as error:
            rows.append((name, f"not run: {str(error).splitlines()[0]}"))
    table = Table(
        title=f"[bold]Speed[/bold]: {REQUESTS} requests, {AT_ONCE} at once, prompts of {PROMPT} tokens, {TOKENS} "
        "tokens each; a tiny model on this machine's cores: the servers' own work dominates",
        title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for title in ("", "first token, median", "first token, 90 %", "tokens/s", "requests/s"):
        table.add_column(title, justify="left" if not title else "right")
    for name, timing in rows:
        if isinstance(timing, str):
            table.add_row(name, timing)
            continue
        ninety = statistics.quantiles(timing.first_s, n=10)[-1]
        table.add_row(
            name, f"{1e3 * statistics.median(timing.first_s):.0f} ms", f"{1e3 * ninety:.0f} ms",
            f"{timing.tokens / timing.seconds:.0f}", f"{len(timing.first_s) / timing.seconds:.2f}",
        )  # fmt: skip
    console.print(table)


def _whole(started: servers.Servers, model: Path) -> servers.Server:
    server = started.add(servers.vllm("whole", model, ()))
    server.wait_ready()
    return server


def _cam(started: servers.Servers, model: Path) -> servers.Server:
    return _halves(started, model, lambda role: ("--kv-connector", "cam", "--kv-role", role))


def _nixl(started: servers.Servers, model: Path) -> servers.Server:
    return _halves(
        started,
        model,
        lambda role: ("--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": role})),
    )


def _halves(started: servers.Servers, model: Path, options: Callable[[str], tuple[str, ...]]) -> servers.Server:
    halves = [
        started.add(servers.vllm(name, model, options(role), {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(servers.free_port())}))
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    for server in halves:
        server.wait_ready()
    router, _ = servers.router(*halves)
    started.add(router).wait_ready()
    return router


def _measure(server: servers.Server, model: str) -> Timing:
    def prompt(number: int) -> list[int]:
        return [(number * 37 + 13 * i + i * i // 7) % 500 for i in range(PROMPT)]

    for number in range(2):
        _stream(server, model, prompt(1000 + number))  # connections and caches are made once
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as threads:
        found = list(threads.map(lambda number: _stream(server, model, prompt(number)), range(REQUESTS)))
    return Timing([first for first, _ in found], sum(tokens for _, tokens in found), time.monotonic() - begin)


def _stream(server: servers.Server, model: str, prompt: list[int]) -> tuple[float, int]:
    """(seconds to the first token, tokens)."""
    asked = {
        "model": model, "prompt": tiny_models.words(prompt), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    begin, first, tokens = time.monotonic(), 0.0, 0
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    first = first or time.monotonic() - begin
                    tokens += len(json.loads(line[6:])["choices"][0]["text"].split())
    except OSError as error:
        raise servers.ServerFailed(f"{server.name}: {error}\n{server.tail()}") from None
    return first, tokens


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="cam-bench-") as folder:
        run(Console(), tiny_models.make("dense", Path(folder)))


if __name__ == "__main__":
    main()
