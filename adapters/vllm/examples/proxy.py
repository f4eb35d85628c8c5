"""The least that a router between a prefill and a decode server must do. For more, use vllm-router.

A request goes to the prefill server first, for one token, with kv_transfer_params that ask it to keep the KV; its
answer's kv_transfer_params go with the request to the decode server, whose answer is passed on, streamed or not.
A client that goes away ends its request at the servers too; blocks that nobody fetches then are freed with their lease.
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import Response, StreamingResponse

FIRST = {"do_remote_decode": True, "do_remote_prefill": False}
ANSWER_S = 600.0


def application(prefill: str, decode: str) -> FastAPI:
    """prefill, decode: URLs of the servers."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            app.state.session = session
            yield

    app = FastAPI(lifespan=life)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"prefill": prefill, "decode": decode}

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def forward(request: Request) -> Response:
        session: aiohttp.ClientSession = app.state.session
        path = request.url.path
        asked = await _body(request)
        try:
            async with session.post(prefill + path, json=first_half(asked)) as answer:
                if answer.status != 200:
                    return Response(await answer.read(), answer.status, media_type=answer.content_type)
                offer = (await answer.json()).get("kv_transfer_params")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise HTTPException(502, f"the prefill server {prefill}: {type(error).__name__}: {error}") from None
        try:
            answer = await session.post(decode + path, json={**asked, "kv_transfer_params": offer})
        except (aiohttp.ClientError, TimeoutError) as error:
            raise HTTPException(502, f"the decode server {decode}: {type(error).__name__}: {error}") from None
        return StreamingResponse(_stream(answer), answer.status, media_type=answer.content_type)

    return app


def first_half(asked: dict[str, Any]) -> dict[str, Any]:
    """The prefill server's request: one token, not streamed, and a KV cache that stays."""
    first = {**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": FIRST}
    for refused in ("stream_options", "min_tokens"):  # without streaming; with fewer tokens
        first.pop(refused, None)
    if "max_completion_tokens" in first:
        first["max_completion_tokens"] = 1
    return first


async def _body(request: Request) -> dict[str, Any]:
    try:
        asked = await request.json()
    except ValueError as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from None
    if not isinstance(asked, dict):
        raise HTTPException(400, f"the body must be a JSON object, found {type(asked).__name__}")
    return asked


async def _stream(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """What the decode server sends. Closed early, it closes the connection: the server then aborts the request."""
    async with answer:
        async for part in answer.content.iter_any():
            yield part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True, help="URL of the prefill server")
    parser.add_argument("--decode", required=True, help="URL of the decode server")
    options = parser.parse_args()
    uvicorn.run(application(options.prefill, options.decode), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
