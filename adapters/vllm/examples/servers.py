"""`vllm serve` and the router before two of them, as processes that start, answer and end reliably."""

import contextlib
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

START_S = 240.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class ServerFailed(Exception):
    """A server ended or did not become ready; the message has the end of its log."""


class Server:
    """A process that serves HTTP on `url`; it and its children end with `close`."""

    def __init__(self, name: str, command: Sequence[str], port: int, environment: dict[str, str] | None = None) -> None:
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        self._log = tempfile.NamedTemporaryFile("w+", prefix=f"{name}-", suffix=".log")  # noqa: SIM115 closed with this
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip

    def wait_ready(self, path: str = "/health", within_s: float = START_S) -> None:
        """Raises ServerFailed."""
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.name} ended with status {self._process.returncode}\n{self.tail()}")
            with contextlib.suppress(OSError, urllib.error.URLError):
                if get(self.url + path) is not None:
                    return
            time.sleep(0.3)
        raise ServerFailed(f"{self.name} was not ready within {within_s:.0f} s\n{self.tail()}")

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def tail(self, characters: int = 4000) -> str:
        return self.log[-characters:]

    def close(self) -> None:
        """Idempotent. Asks first, then kills the process group."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


class Servers:
    """Several servers that start together and end together."""

    def __init__(self) -> None:
        self._all: list[Server] = []

    def add(self, server: Server) -> Server:
        self._all.append(server)
        return server

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        for server in reversed(self._all):
            server.close()


def vllm(name: str, model: Path, options: Sequence[str], environment: dict[str, str] | None = None) -> Server:
    """`vllm serve` of a tiny model; the model is called `model.name`."""
    port = free_port()
    command = [
        *_serve(), "--model", str(model), "--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8", "--block-size", "32",
        "--num-gpu-blocks-override", "512", "--enforce-eager", "--disable-uvicorn-access-log", *options,
    ]  # fmt: skip
    return Server(name, command, port, environment)


def _serve() -> list[str]:
    """`vllm serve`. Its command asks for the version of the distribution vllm, and fails where that is called vllm-cpu
    (0.32.0); the module behind it takes the same options."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
        return [str(Path(sys.executable).with_name("vllm")), "serve"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]


def router(prefill: Server, decode: Server) -> tuple[Server, str]:
    """A router before the two, and what it is: vllm-router where it is installed, else proxy.py."""
    found = shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    if not found:
        return proxy(prefill, decode), "examples/proxy.py"
    port = free_port()
    command = [
        found, "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation", "--prefill", prefill.url,
        "--decode", decode.url, "--kv-connector", "nixl", "--policy", "round_robin", "--log-level", "warning",
        "--prometheus-port", str(free_port()),
    ]  # fmt: skip
    return Server("router", command, port), "vllm-router"


def proxy(prefill: Server, decode: Server) -> Server:
    """proxy.py before the two."""
    port = free_port()
    command = [
        sys.executable, str(Path(__file__).with_name("proxy.py")), "--port", str(port), "--prefill", prefill.url,
        "--decode", decode.url,
    ]  # fmt: skip
    return Server("proxy", command, port)


def free_port() -> int:
    """A port that was free a moment ago. Servers here cannot be given an open socket, or tell a port they chose."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def get(url: str, within_s: float = 10.0) -> str | None:
    """The answer's body; None unless it is a 200."""
    with urllib.request.urlopen(url, timeout=within_s) as answer:
        return answer.read().decode() if answer.status == 200 else None
