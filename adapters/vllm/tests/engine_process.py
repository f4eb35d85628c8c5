"""A vLLM engine in a process of its own, told what to do by JSON lines on stdin. Started by engines.py.

Scheduler and worker live in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0, TP 1), or in children of it.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints to stdout must not be taken for an answer
    from vllm import LLM

    arguments = json.loads(sys.argv[1])
    llm = LLM(**arguments)
    engine = Commands(llm)
    print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
    for line in sys.stdin:
        command, keywords = json.loads(line)
        try:
            answer = {"result": getattr(engine, command)(**keywords)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class Commands:
    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._numbers = 0

    @property
    def _core(self) -> Any:
        return self._engine.engine_core.engine_core

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """requests: prompt (token ids), max_tokens, kv (kv_transfer_params or None), salt. All at once."""
        for request in requests:
            self.add(**request)
        return self.finish()

    def add(self, prompt: list[int], max_tokens: int, kv: dict[str, Any] | None = None, salt: str | None = None) -> str:
        from vllm import SamplingParams

        self._numbers += 1
        name = f"request-{self._numbers}"
        extra = {"kv_transfer_params": kv} if kv is not None else None
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            given["cache_salt"] = salt
        self._engine.add_request(name, given, parameters)
        return name

    def finish(self, deadline_s: float = 60) -> list[dict[str, Any]]:
        """Steps until no request is left; outputs in the order of their addition."""
        found = {}
        end = time.monotonic() + deadline_s
        while self._engine.has_unfinished_requests():
            if time.monotonic() > end:
                raise TimeoutError(f"requests still unfinished after {deadline_s} s")
            for output in self._engine.step():
                if output.finished:
                    found[output.request_id] = {
                        "tokens": list(output.outputs[0].token_ids),
                        "finish": output.outputs[0].finish_reason,
                        "cached": output.num_cached_tokens,
                        "kv": output.kv_transfer_params,
                    }
        return [found[name] for name in sorted(found, key=lambda name: int(name.split("-")[1]))]

    def step(self, times: int = 1) -> None:
        """Also without requests, as a server's loop does while blocks are on loan."""
        for _ in range(times):
            if self._core.scheduler.has_requests():
                self._engine.step()
            time.sleep(0.002)

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])

    def settle(self, deadline_s: float = 20) -> dict[str, Any]:
        """Steps until the scheduler has forgotten every request, and says what is left."""
        end = time.monotonic() + deadline_s
        while self._core.scheduler.has_requests() and time.monotonic() < end:
            self.step()
        return self.state()

    def state(self) -> dict[str, Any]:
        scheduler = self._core.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        connector = scheduler.connector
        return {
            "requests": sorted(scheduler.requests),
            "free": pool.get_num_free_blocks(),
            "total": pool.num_gpu_blocks - 1,
            "pending": None
            if connector is None
            else sorted(connector._scheduler._loading | connector._scheduler._lending),
        }

    def fill_cache(self, value: float) -> None:
        """Overwrites the whole KV cache, as the model's layers see it."""
        for layer in self._engine.vllm_config.compilation_config.static_forward_context.values():
            if hasattr(layer, "kv_cache"):  # not the experts
                layer.kv_cache.fill_(value)

    def forget_prefixes(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    def counters(self) -> dict[str, Any]:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker._engine.metrics()

    def close(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if has_kv_transfer_group():
            get_kv_transfer_group().shutdown()


if __name__ == "__main__":
    main()
