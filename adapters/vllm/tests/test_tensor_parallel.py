"""Real engines of different tensor-parallel sizes hand over to each other: each worker loads the heads it holds."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm runs these")

from adapters.vllm.examples import tiny_models
from adapters.vllm.tests.engines import EngineProcess

TOKENS = 10

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, EngineProcess]]:
    model = tiny_models.make("dense", tmp_path_factory.mktemp("models"))
    both = {"kv_connector": "cam", "kv_role": "kv_both"}
    found = {size: EngineProcess(model, tensor_parallel_size=size, kv_transfer_config=both) for size in (1, 2)}
    for engine in found.values():
        engine.wait_ready()
    yield found
    for engine in found.values():
        engine.close()


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_tokens_are_those_of_one_engine(engines: dict[int, EngineProcess], prefill: int, decode: int) -> None:
    prompts = [[(prefill * 31 + number * 17 + 7 * i) % 500 + 4 for i in range(40 + 50 * number)] for number in range(3)]
    asked = [{"prompt": prompt, "max_tokens": 1, "kv": {"do_remote_decode": True}} for prompt in prompts]
    offers = [answer["kv"] for answer in engines[prefill].call("generate", requests=asked)]
    assert [offer["tp_size"] for offer in offers] == [prefill] * 3
    handed = [
        {"prompt": prompt, "max_tokens": TOKENS, "kv": offer} for prompt, offer in zip(prompts, offers, strict=True)
    ]
    apart = [answer["tokens"] for answer in engines[decode].call("generate", requests=handed)]
    for engine in engines.values():
        state = engine.call("settle")
        assert state["requests"] == state["pending"] == []
        assert state["free"] == state["total"]
        engine.call("forget_prefixes")
    alone = engines[1].call("generate", requests=[{"prompt": prompt, "max_tokens": TOKENS} for prompt in prompts])
    assert apart == [answer["tokens"] for answer in alone]
