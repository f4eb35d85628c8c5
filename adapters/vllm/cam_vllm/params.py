"""kv_transfer_params, the dictionary that travels from the prefill server through the router to the decode server.

The keys are those of vLLM's NixlConnector, so that existing routers pass it on, with what CAM adds in keys of its own
(cam_*). The decode side gets it from outside: nothing in it is believed before it was checked here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

MAX_BLOCKS = 1 << 22
MAX_RANKS = 1024


class BadParams(ValueError):
    """kv_transfer_params that ask for a remote prefill, but cannot be used; says which key and why."""


class Agent(msgspec.Struct, frozen=True, array_like=True):
    """Where one rank of the prefill instance answers. engine_id: "" when it is not known."""

    host: str
    port: int
    engine_id: str


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A finished prefill that may be fetched: blocks of all ranks, in token order from the prompt's first token."""

    instance: str
    request: str
    agents: tuple[Agent, ...]
    blocks: tuple[int, ...]
    tokens: int | None
    """Tokens whose KV the blocks hold. None: not told."""
    lease: str | None
    prompt: str | None
    """Fingerprint of the prompt (fingerprint.py). None: not told."""


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Decode side: KV is to be fetched, and has not been yet."""
    return bool(params and params.get("do_remote_prefill"))


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Prefill side: another instance will decode."""
    return bool(params and params.get("do_remote_decode"))


def wants_readback(params: Mapping[str, Any] | None) -> bool:
    """Prefill side, bidirectional: a decode server has KV of an earlier turn, which has not been fetched yet."""
    return bool(
        wants_remote_decode(params)
        and params
        and params.get("remote_block_ids")
        and params.get("remote_engine_id")
        and not params.get("_remote_blocks_processed")
    )


def mark_processed(params: dict[str, Any]) -> None:
    """Once for each request, also after a preemption."""
    params["do_remote_prefill"] = False
    params["_remote_blocks_processed"] = True


def readers(params: Mapping[str, Any]) -> int:
    """Prefill side: how many decode instances will fetch this prefill (cam_readers). Raises BadParams."""
    count = params.get("cam_readers", 1)
    if type(count) is not int or not 1 <= count <= MAX_RANKS:
        raise BadParams(f"cam_readers = {count!r}: expected an int in 1..{MAX_RANKS}")
    return count


def offer(
    *,
    instance: str,
    request: str,
    agents: Sequence[Agent],
    blocks: Sequence[int],
    tokens: int,
    lease: str,
    prompt: str,
    expiry: float | None = None,
) -> dict[str, Any]:
    """What a finished prefill answers. expiry: set by a decode server for the next turn's prefill; on its own clock."""
    first = agents[0] if agents else Agent("", 0, "")
    return {
        "do_remote_prefill": expiry is None,
        "do_remote_decode": expiry is not None,
        "remote_block_ids": [list(blocks)],
        "remote_engine_id": instance,
        "remote_request_id": request,
        "remote_host": first.host,
        "remote_port": first.port,
        "tp_size": max(1, len(agents)),
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": expiry,
        "transfer_mode": "pull",
        "cam_agents": [[agent.host, agent.port, agent.engine_id] for agent in agents],
        "cam_lease": lease,
        "cam_prompt": prompt,
    }


def parse(params: Mapping[str, Any]) -> Offer:
    """The offer in kv_transfer_params of a decode request. Raises BadParams."""
    return Offer(
        instance=_text(params, "remote_engine_id"),
        request=_text(params, "remote_request_id"),
        agents=_agents(params),
        blocks=_blocks(params),
        tokens=_tokens(params),
        lease=_optional_text(params, "cam_lease"),
        prompt=_optional_text(params, "cam_prompt"),
    )


def _agents(params: Mapping[str, Any]) -> tuple[Agent, ...]:
    listed = params.get("cam_agents")
    size = params.get("tp_size", 1)
    if listed is None:
        if size != 1:
            raise BadParams(f"tp_size = {size!r}, but cam_agents, which says where each rank answers, is missing")
        return (_agent([_text(params, "remote_host"), params.get("remote_port"), ""]),)
    if not isinstance(listed, (list, tuple)) or not 1 <= len(listed) <= MAX_RANKS:
        raise BadParams(f"cam_agents: expected a list of 1..{MAX_RANKS} agents, found {_short(listed)}")
    return tuple(_agent(entry) for entry in listed)


def _agent(entry: object) -> Agent:
    if isinstance(entry, (list, tuple)) and len(entry) == 3:
        host, port, engine_id = entry
        if (
            isinstance(host, str) and 0 < len(host) < 256
            and type(port) is int and 0 < port < 1 << 16
            and isinstance(engine_id, str) and len(engine_id) < 256
        ):  # fmt: skip
            return Agent(host, port, engine_id)
    raise BadParams(f"an agent is [host, port, engine id], found {_short(entry)}")


def _blocks(params: Mapping[str, Any]) -> tuple[int, ...]:
    found = params.get("remote_block_ids")
    if isinstance(found, (list, tuple)) and len(found) == 1 and isinstance(found[0], (list, tuple)):
        found = found[0]  # one list per group of KV caches, of which there is one
    if not isinstance(found, (list, tuple)) or len(found) > MAX_BLOCKS:
        raise BadParams(f"remote_block_ids: expected a list of at most {MAX_BLOCKS} block ids, found {_short(found)}")
    for block in found:
        if type(block) is not int or not 0 <= block < 1 << 40:
            raise BadParams(f"remote_block_ids: {_short(block)} is not a block id")
    return tuple(found)


def _tokens(params: Mapping[str, Any]) -> int | None:
    tokens = params.get("remote_num_tokens")
    if tokens is None or tokens == 0:
        return None
    if type(tokens) is not int or not 0 < tokens < 1 << 40:
        raise BadParams(f"remote_num_tokens = {_short(tokens)}: expected a number of tokens")
    return tokens


def _text(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= 1000:
        raise BadParams(f"{key} = {_short(value)}: expected 1..1000 characters")
    return value


def _optional_text(params: Mapping[str, Any], key: str) -> str | None:
    return None if params.get(key) is None else _text(params, key)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 100 else f"{text[:100]}..."
