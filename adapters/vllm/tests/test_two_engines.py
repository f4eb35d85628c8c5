"""Real vLLM engines in processes of their own: prefill here, decode there, beside one engine that does both."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm runs these")

from adapters.vllm.examples import tiny_models
from adapters.vllm.tests.engines import EngineProcess

TOKENS = 10
LEASE_S = 8.0
TIMEOUT_S = 10.0

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module", params=["dense", "moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make(request.param, tmp_path_factory.mktemp("models"))


def connector(role: str, policy: str = "fail", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "cam", "kv_role": role, "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"lease_s": LEASE_S, "timeout_s": TIMEOUT_S, **extra},
    }  # fmt: skip


class Trio:
    def __init__(self, model: Path) -> None:
        self.model = model
        self._all: list[EngineProcess] = []
        self.whole = self.start()
        self.prefill = self.start(kv_transfer_config=connector("kv_producer"))
        self.decode = self.start(kv_transfer_config=connector("kv_consumer", policy="recompute"))
        for engine in (self.whole, self.prefill, self.decode):
            engine.wait_ready()

    def start(self, **arguments: Any) -> EngineProcess:
        self._all.append(EngineProcess(self.model, **arguments))
        return self._all[-1]

    def offers(self, *prompts: list[int], **more: Any) -> list[dict[str, Any]]:
        kv = {"do_remote_decode": True}
        asked = [{"prompt": prompt, "max_tokens": 1, "kv": kv, **more} for prompt in prompts]
        return [answer["kv"] for answer in self.prefill.call("generate", requests=asked)]

    def answers(self, engine: EngineProcess, prompts: list[list[int]], kv: list[Any], **more: Any) -> list[list[int]]:
        asked = [
            {"prompt": prompt, "max_tokens": TOKENS, "kv": offer, **more}
            for prompt, offer in zip(prompts, kv, strict=True)
        ]
        return [answer["tokens"] for answer in engine.call("generate", requests=asked)]

    def alone(self, *prompts: list[int]) -> list[list[int]]:
        return self.answers(self.whole, list(prompts), [None] * len(prompts))

    def apart(self, *prompts: list[int]) -> list[list[int]]:
        return self.answers(self.decode, list(prompts), self.offers(*prompts))

    def check_clean(self) -> None:
        for engine in (self.prefill, self.decode):
            state = engine.call("settle")
            assert state["requests"] == state["pending"] == []
            assert state["free"] == state["total"]

    def close(self) -> None:
        for engine in self._all:
            engine.close()


@pytest.fixture(scope="module")
def trio(model: Path) -> Iterator[Trio]:
    found = Trio(model)
    yield found
    found.close()


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + 7 * i + i * i // 5) % 500 + 4 for i in range(length)]


def moved(engine: EngineProcess) -> tuple[int, int]:
    """(transfers, blocks) that the engine has read."""
    flows = [flow for flow in engine.call("counters")["flows"] if flow["direction"] == "read"]
    return sum(flow["transfers"] for flow in flows), sum(flow["blocks"] for flow in flows)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100, 256])
def test_tokens_are_those_of_one_engine(trio: Trio, length: int) -> None:
    asked = prompt(length, length)
    before = moved(trio.decode)
    assert trio.apart(asked) == trio.alone(asked)
    after = moved(trio.decode)
    assert (after[0] - before[0], after[1] - before[1]) == (1, -(-length // 32))
    trio.check_clean()


def test_many_at_once_are_those_of_one_engine(trio: Trio) -> None:
    prompts = [prompt(100 + i, 20 + 17 * i) for i in range(8)]
    assert trio.apart(*prompts) == trio.alone(*prompts)
    trio.check_clean()


def test_a_spoiled_cache_gives_other_tokens(trio: Trio) -> None:
    """The proof that decode uses what was moved: else equal tokens would say nothing."""
    asked = prompt(200, 100)
    offers = trio.offers(asked)
    trio.prefill.call("fill_cache", value=0.0)
    assert trio.answers(trio.decode, [asked], offers) != trio.alone(asked)
    trio.check_clean()
    trio.decode.call("forget_prefixes")
    trio.prefill.call("forget_prefixes")


def test_a_known_prefix_is_not_moved_again(trio: Trio) -> None:
    start = prompt(300, 96)
    trio.apart(start)
    before = moved(trio.decode)
    longer = [*start, *prompt(301, 40)]
    assert trio.apart(longer) == trio.alone(longer)
    assert moved(trio.decode)[1] - before[1] == 2  # 136 tokens: 5 blocks, 3 of them known
    trio.check_clean()


def test_a_loan_that_nobody_fetches_ends(trio: Trio) -> None:
    trio.offers(prompt(400, 64))
    held = trio.prefill.call("state")
    assert held["free"] < held["total"]
    trio.check_clean()
    assert "no decode instance fetched the KV of request" in trio.prefill.log


def test_an_offer_that_has_expired_is_computed_again(trio: Trio) -> None:
    asked = prompt(500, 64)
    offers = trio.offers(asked)
    trio.check_clean()  # waits for the end of the loan
    assert trio.answers(trio.decode, [asked], offers) == trio.alone(asked)
    trio.check_clean()
    assert re.search(
        r"loading the KV of request \S+ from instance \S+ \(request \S+\) failed: .*expired", trio.decode.log
    )


def test_another_salt_is_not_served_from_the_offer(trio: Trio) -> None:
    asked = prompt(600, 64)
    offers = trio.offers(asked, salt="a")
    before = moved(trio.decode)
    assert trio.answers(trio.decode, [asked], offers, salt="b") == trio.alone(asked)
    assert moved(trio.decode)[1] == before[1]
    trio.check_clean()


def test_an_aborted_decode_frees_both_sides(trio: Trio) -> None:
    offers = trio.offers(prompt(700, 128), prompt(701, 128))
    names = [
        trio.decode.call("add", prompt=prompt(700 + i, 128), max_tokens=TOKENS, kv=offer)
        for i, offer in enumerate(offers)
    ]
    trio.decode.call("abort", name=names[0])  # before its first step
    trio.decode.call("step")
    trio.decode.call("abort", name=names[1])  # while, or after, it is loaded
    trio.check_clean()


def test_a_stopped_prefill_does_not_stop_the_decode(trio: Trio) -> None:
    """Other requests go on while a load waits; it ends with its deadline, and is computed here."""
    stuck, other = prompt(710, 64), prompt(711, 64)
    (offer,) = trio.offers(stuck)
    alone = trio.alone(stuck, other)
    trio.prefill.signal(signal.SIGSTOP)
    try:
        trio.decode.call("add", prompt=stuck, max_tokens=TOKENS, kv=offer)
        trio.decode.call("add", prompt=other, max_tokens=TOKENS)
        late, early = trio.decode.call("finish")
    finally:
        trio.prefill.signal(signal.SIGCONT)
    assert [late["tokens"], early["tokens"]] == alone
    assert early["seconds"] < TIMEOUT_S <= late["seconds"] + 0.5
    trio.check_clean()


def test_the_log_says_where_the_cache_lies_and_how_it_is_reached(trio: Trio) -> None:
    assert "lies in CAM memory: peers of this host map it (shm)" in trio.prefill.log
    assert re.search(r"opened instance \S+: shm: ", trio.decode.log)


def test_a_decode_that_dies_and_comes_back(trio: Trio) -> None:
    """Killed with one load under way (it waits for the stopped prefill) and one not begun: the prefill frees both."""
    offers = trio.offers(prompt(720, 128), prompt(721, 64))
    trio.prefill.signal(signal.SIGSTOP)
    try:
        trio.decode.call("add", prompt=prompt(720, 128), max_tokens=TOKENS, kv=offers[0])
        trio.decode.call("step")
        assert trio.decode.call("state")["pending"]
        trio.decode.kill()
    finally:
        trio.prefill.signal(signal.SIGCONT)
    state = trio.prefill.call("settle")
    assert state["requests"] == state["pending"] == []
    assert state["free"] == state["total"]
    trio.decode = trio.start(kv_transfer_config=connector("kv_consumer", policy="recompute")).wait_ready()
    asked = prompt(722, 64)
    assert trio.apart(asked) == trio.alone(asked)
    trio.check_clean()


def test_a_prefill_that_dies_and_comes_back(trio: Trio) -> None:
    """Last, because it kills. The decode recomputes what it cannot fetch, and takes the new instance for what it is."""
    asked = prompt(800, 64)
    offers = trio.offers(asked)
    trio.prefill.kill()
    assert trio.answers(trio.decode, [asked], offers) == trio.alone(asked)
    trio.prefill = trio.start(kv_transfer_config=connector("kv_producer")).wait_ready()
    other = prompt(801, 64)
    before = moved(trio.decode)
    assert trio.apart(other) == trio.alone(other)
    assert moved(trio.decode)[1] - before[1] == 2
    trio.check_clean()
