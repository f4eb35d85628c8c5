"""The least that a router between a prefill and a decode server must do. For more, use vllm-router.

A request goes to the prefill server first, for one token, with kv_transfer_params that ask it to keep the KV; its
answer's kv_transfer_params go with the request to the decode server, whose answer is passed on, streamed or not.
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


def application(prefill: str, decode: str) -> FastAPI:
    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
            app.state.session = session
            yield

    app = FastAPI(lifespan=life)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"prefill": prefill, "decode": decode}

    @app.post("/v1/{endpoint:path}")
    async def forward(endpoint: str, request: Request) -> Response:
        session: aiohttp.ClientSession = app.state.session
        asked: dict[str, Any] = await request.json()
        first = {**asked, "max_tokens": 1, "stream": False, "kv_transfer_params": FIRST}
        first.pop("stream_options", None)
        if "max_completion_tokens" in first:
            first["max_completion_tokens"] = 1
        async with session.post(f"{prefill}/v1/{endpoint}", json=first) as answer:
            if answer.status != 200:
                raise HTTPException(answer.status, await answer.text())
            offer = (await answer.json()).get("kv_transfer_params")
        second = {**asked, "kv_transfer_params": offer}
        answer = await session.post(f"{decode}/v1/{endpoint}", json=second)
        return StreamingResponse(answer.content.iter_any(), answer.status, media_type=answer.content_type)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prefill", required=True, help="URL of the prefill server")
    parser.add_argument("--decode", required=True, help="URL of the decode server")
    options = parser.parse_args()
    uvicorn.run(application(options.prefill, options.decode), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
