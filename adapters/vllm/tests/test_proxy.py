"""examples/proxy.py between two real `vllm serve`, asked through the OpenAI API."""

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` runs these")

from adapters.vllm.examples import servers, tiny_models

TOKENS = 12

pytestmark = pytest.mark.timeout(420)


@dataclass(frozen=True)
class Trio:
    model: str
    prefill: servers.Server
    decode: servers.Server
    proxy: servers.Server

    def asked(self, seed: int, **more: Any) -> dict[str, Any]:
        prompt = tiny_models.words([(seed * 31 + 7 * i) % 500 for i in range(100)])
        asked = {"model": self.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        return {**asked, **more}


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    model = tiny_models.make("dense", tmp_path_factory.mktemp("models"))
    with servers.Servers() as started:
        halves = [
            started.add(servers.vllm(name, model, ("--kv-connector", "cam", "--kv-role", role)))
            for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
        ]
        for server in halves:
            server.wait_ready()
        proxy = started.add(servers.proxy(*halves))
        proxy.wait_ready()
        yield Trio(model.name, *halves, proxy)


def post(server: servers.Server, asked: Any, path: str = "/v1/completions") -> Any:
    """The connection, with its answer's status and body still to be read."""
    body = json.dumps(asked).encode()
    return urllib.request.urlopen(
        urllib.request.Request(server.url + path, body, {"Content-Type": "application/json"}), timeout=120
    )


def text(server: servers.Server, asked: dict[str, Any]) -> str:
    with post(server, asked) as answer:
        found: str = json.load(answer)["choices"][0]["text"]
        return found


def refused(server: servers.Server, asked: Any) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as raised:
        post(server, asked)
    return raised.value.code, raised.value.read().decode()


def metric(server: servers.Server, name: str) -> float:
    page = servers.get(f"{server.url}/metrics") or ""
    return sum(map(float, re.findall(rf"^vllm:{name}{{.*}} (\S+)$", page, re.MULTILINE)))


def wait_until(server: servers.Server, name: str, value: float, within_s: float = 20) -> None:
    """vLLM publishes its metrics with its steps."""
    end = time.monotonic() + within_s
    while metric(server, name) != value:
        assert time.monotonic() < end, f"{server.name}: {name} is {metric(server, name)}, expected {value}"
        time.sleep(0.1)


@pytest.mark.parametrize("streamed", [False, True])
def test_answers_are_those_of_one_server(trio: Trio, streamed: bool) -> None:
    """The prefill server, asked by itself, is the undivided one."""
    asked = trio.asked(1 + streamed, min_tokens=TOKENS)
    loads = metric(trio.decode, "cam_kv_load_seconds_count")
    if streamed:
        with post(trio.proxy, {**asked, "stream": True, "stream_options": {"include_usage": True}}) as answer:
            events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
        assert events[-1]["usage"]["completion_tokens"] == TOKENS
        found = "".join(event["choices"][0]["text"] for event in events[:-1])
    else:
        found = text(trio.proxy, asked)
    assert len(found.split()) == TOKENS
    assert found == text(trio.prefill, asked)
    wait_until(trio.decode, "cam_kv_load_seconds_count", loads + 1)


def test_a_refusal_is_passed_on_with_its_reason(trio: Trio) -> None:
    asked = trio.asked(3, temperature=-1)
    code, body = refused(trio.proxy, asked)
    assert (code, body) == refused(trio.prefill, asked)
    assert code == 400
    assert "temperature" in body


@pytest.mark.parametrize("body", [[], "text", 1])
def test_a_body_that_is_no_object_is_refused(trio: Trio, body: object) -> None:
    code, told = refused(trio.proxy, body)
    assert (code, type(body).__name__ in told) == (400, True)


def test_a_client_that_goes_away_ends_its_request(trio: Trio) -> None:
    with post(trio.proxy, trio.asked(4, max_tokens=900, stream=True)) as answer:
        assert answer.readline().startswith(b"data: ")
        wait_until(trio.decode, "num_requests_running", 1)
    wait_until(trio.decode, "num_requests_running", 0)
    assert text(trio.proxy, trio.asked(5)) == text(trio.prefill, trio.asked(5))


def test_a_server_that_is_gone_is_named(trio: Trio) -> None:
    """Last, because it ends one."""
    trio.decode.close()
    code, told = refused(trio.proxy, trio.asked(6))
    assert (code, trio.decode.url in told) == (502, True)
