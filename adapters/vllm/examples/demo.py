"""One model served in two halves, a prefill server and a decode server, beside the same model served in one piece.

    python demo.py              # a dense and a mixture-of-experts model; exit status 1 when a token differs
    python demo.py --bench      # also times: one server, two halves over CAM, two halves over vLLM's NixlConnector

Everything is made here: the models have random weights. All servers are `vllm serve`, asked through the OpenAI API.
"""

import argparse
import concurrent.futures
import json
import re
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
import bench
import servers
import tiny_models

TOKENS = 24
LENGTHS = (5, 31, 32, 33, 64, 150, 300, 600)
HALVES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True)
class Moved:
    """What a decode server loaded, by transport."""

    loads: int
    nbytes: int
    blocks: int
    seconds: float


@dataclass(frozen=True)
class Answers:
    kind: str
    prompts: list[list[int]]
    whole: list[str]
    halves: list[str]
    moved: dict[str, Moved]
    failed: int
    router: str
    where: str
    seconds: float

    @property
    def differing(self) -> int:
        return sum(a != b for a, b in zip(self.whole, self.halves, strict=True))

    @property
    def problems(self) -> list[str]:
        found = [f"{self.differing} of {len(self.prompts)} answers differ"] if self.differing else []
        expected = len(self.prompts)
        loads = sum(item.loads for item in self.moved.values())
        if loads < expected:
            found.append(f"only {loads} of {expected} prompts were loaded by the decode server: it computed the others")
        if self.failed:
            found.append(f"{self.failed} loads failed")
        if len(set(self.whole)) < len(self.whole) // 2:
            found.append("the model answers everything alike: equal tokens would prove nothing")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", action="store_true", help="also measure")
    parser.add_argument("--model", choices=tiny_models.KINDS, action="append", help="only this one")
    options = parser.parse_args()
    console = Console()
    console.print(Panel.fit(
        "A model served in two halves: one vLLM server computes the prompts, another one the answers.\n"
        "CAM hands over the KV cache. Every token is compared with one undivided vLLM server.",
        title="[bold]CAM: prefill and decode apart[/bold]", border_style="cyan",
    ))  # fmt: skip
    outcomes = []
    try:
        with tempfile.TemporaryDirectory(prefix="cam-demo-") as folder:
            for kind in options.model or tiny_models.KINDS:
                model = tiny_models.make(kind, Path(folder))
                outcomes.append(compare(console, kind, model))
                show(console, outcomes[-1])
            if options.bench:
                bench.run(console, tiny_models.make("dense", Path(folder)))
    except servers.ServerFailed as error:
        console.print("[bold red]The demo failed[/bold red]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        return 1
    return summary(console, outcomes)


def compare(console: Console, kind: str, model: Path) -> Answers:
    """Serves the model in one piece and in two halves, and asks both the same."""
    begin = time.monotonic()
    with servers.Servers() as started, console.status(f"{kind} model: starting three vLLM servers and a router"):
        whole = started.add(servers.vllm("whole", model, ()))
        halves = {
            name: started.add(servers.vllm(name, model, ("--kv-connector", "cam", "--kv-role", role)))
            for name, role in HALVES.items()
        }
        for server in (whole, *halves.values()):
            server.wait_ready()
        router, which = servers.router(halves["prefill"], halves["decode"])
        started.add(router).wait_ready()
        prompts = [[(length * 31 + 7 * i + 3 * i * i) % 500 for i in range(length)] for length in LENGTHS]
        alone = [ask(whole, model.name, prompt) for prompt in prompts]
        # Twice as halves: one after the other, then all at once, with other prompts, so that loads and steps overlap.
        more = [[(length * 17 + 11 * i) % 500 for i in range(length)] for length in LENGTHS]
        apart = [ask(router, model.name, prompt) for prompt in prompts]
        alone += [ask(whole, model.name, prompt) for prompt in more]
        with concurrent.futures.ThreadPoolExecutor(len(more)) as threads:
            apart += list(threads.map(lambda prompt: ask(router, model.name, prompt), more))
        moved, failed = wait_for_metrics(halves["decode"], len(prompts) + len(more))
        where = next((line for line in halves["decode"].log.splitlines() if "cam: the KV cache" in line), "")
        return Answers(
            kind, prompts + more, alone, apart, moved, failed, which, where.partition("cam: ")[2],
            time.monotonic() - begin,
        )  # fmt: skip


def ask(server: servers.Server, model: str, prompt: list[int]) -> str:
    """The answer's text: one word per token."""
    asked = {
        "model": model, "prompt": tiny_models.words(prompt), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
            return text
    except OSError as error:
        raise servers.ServerFailed(f"{server.name}: {error}\n{server.tail()}") from None


def wait_for_metrics(decode: servers.Server, loads: int) -> tuple[dict[str, Moved], int]:
    """vLLM publishes them with its steps: the last ones may be on their way."""
    end = time.monotonic() + 10
    while True:
        moved, failed = read_metrics(decode)
        if sum(item.loads for item in moved.values()) >= loads or time.monotonic() > end:
            return moved, failed
        time.sleep(0.2)


def read_metrics(decode: servers.Server) -> tuple[dict[str, Moved], int]:
    """(by transport, failed loads), of vLLM's Prometheus page."""
    page = servers.get(f"{decode.url}/metrics") or ""

    def by_transport(name: str) -> dict[str, float]:
        lines = re.findall(rf'^vllm:cam_kv_{name}{{.*transport="(\w+)".*}} (\S+)$', page, re.MULTILINE)
        return {transport: float(value) for transport, value in lines}

    loads, seconds = by_transport("load_seconds_count"), by_transport("load_seconds_sum")
    nbytes, blocks = by_transport("load_bytes_total"), by_transport("load_blocks_total")
    failed = re.findall(r"^vllm:cam_kv_failed_loads_total{.*} (\S+)$", page, re.MULTILINE)
    moved = {
        name: Moved(int(count), int(nbytes[name]), int(blocks[name]), seconds[name]) for name, count in loads.items()
    }
    return moved, int(sum(map(float, failed)))


def show(console: Console, answers: Answers) -> None:
    table = Table(
        title=f"[bold]{answers.kind} model[/bold]: {len(answers.prompts)} prompts, {TOKENS} tokens each, through "
        f"{answers.router}, in {answers.seconds:.0f} s",
        title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in ("prompt", "one server answers", "two halves answer", ""):
        table.add_column(name, justify="right" if name == "prompt" else "left")
    for prompt, whole, halves in zip(answers.prompts, answers.whole, answers.halves, strict=True):
        equal = whole == halves
        mark = "[green]equal[/green]" if equal else "[bold red]DIFFERENT[/bold red]"
        table.add_row(f"{len(prompt)} tokens", _short(whole), _short(halves), mark)
    console.print(table)
    for transport, item in answers.moved.items():
        speed = f"{item.nbytes / item.seconds / 1e9:.2f} GB/s" if item.seconds else "-"
        console.print(
            f"  moved over [bold]{transport}[/bold]: {item.loads} loads, {item.blocks} blocks, "
            f"{item.nbytes / 2**20:.2f} MiB; {1e3 * item.seconds / item.loads:.2f} ms each, "
            f"leases and all ({speed})"
        )
    console.print(f"  {answers.where}\n", highlight=False)


def summary(console: Console, outcomes: list[Answers]) -> int:
    problems = [f"{answers.kind}: {problem}" for answers in outcomes for problem in answers.problems]
    if problems:
        console.print(Panel("\n".join(problems), title="[bold]FAILED[/bold]", border_style="red"))
        return 1
    count = sum(len(answers.prompts) for answers in outcomes)
    nbytes = sum(item.nbytes for answers in outcomes for item in answers.moved.values())
    transports = ", ".join(sorted({name for answers in outcomes for name in answers.moved}))
    console.print(Panel.fit(
        f"[bold green]All {count * TOKENS} tokens of {count} answers are equal.[/bold green]\n"
        f"The decode servers computed no prompt: {nbytes / 2**20:.1f} MiB of KV came from the prefill servers over "
        f"{transports}.",
        title="[bold]CAM[/bold]", border_style="green",
    ))  # fmt: skip
    return 0


def _short(text: str) -> str:
    found = text.split()
    return " ".join(found[:5]) + (" ..." if len(found) > 5 else "")


if __name__ == "__main__":
    sys.exit(main())
