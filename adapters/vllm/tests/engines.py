"""vLLM engines for tests: real ones, each in a process of its own."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("engine_process.py")
START_S = 150.0
CALL_S = 90.0

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


class EngineDied(Exception):
    """The engine's process ended, or did not answer; the message has the end of its log."""


class EngineProcess:
    """Use `call("generate", requests=[...])` and so on: the methods of engine_process.Commands."""

    def __init__(self, model: Path, *, environment: dict[str, str] | None = None, **arguments: Any) -> None:
        given: dict[str, Any] = {
            "model": str(model), "dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True,
            "block_size": 32,
            "num_gpu_blocks_override": 64, "disable_log_stats": False,
        }  # fmt: skip
        given.update(arguments)
        self._log = tempfile.NamedTemporaryFile("w+", prefix="engine-", suffix=".log")  # noqa: SIM115 closed with this
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps(given)],
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True,
        )  # fmt: skip

    def wait_ready(self) -> "EngineProcess":
        self._answer(START_S)
        return self

    def call(self, command: str, *, timeout_s: float = CALL_S, **keywords: Any) -> Any:
        self.send(command, **keywords)
        return self.receive(timeout_s)

    def send(self, command: str, **keywords: Any) -> None:
        if self._process.stdin is None:
            raise EngineDied("no stdin")
        self._process.stdin.write(json.dumps([command, keywords]) + "\n")
        self._process.stdin.flush()

    def receive(self, timeout_s: float = CALL_S) -> Any:
        answer = self._answer(timeout_s)
        if "error" in answer:
            raise EngineDied(f"{answer['error']}\n{self.log[-3000:]}")
        return answer["result"]

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(EngineDied, OSError):
                self.call("close", timeout_s=20)
            self.kill()

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        output = self._process.stdout
        if output is None:
            raise EngineDied("no stdout")
        end = time.monotonic() + timeout_s
        while not select.select([output], [], [], max(0.0, end - time.monotonic()))[0]:
            if time.monotonic() > end:
                raise EngineDied(f"no answer within {timeout_s} s\n{self.log[-3000:]}")
        line = output.readline()
        if not line:
            raise EngineDied(f"ended with {self._process.wait()}\n{self.log[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer
