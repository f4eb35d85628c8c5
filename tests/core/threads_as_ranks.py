"""Ranks as threads, for the pieces that know nothing of processes; a thread can also play a stranger or a liar."""

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LIMIT_S = 20.0


def on_threads(size: int, fn: Callable[[int], Any]) -> list[Any]:
    """fn(rank) on as many threads as there are ranks; exceptions are returned in place of results."""

    def run(rank: int) -> Any:
        try:
            return fn(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def descriptors_open() -> int:
    gc.collect()  # stores of earlier tests hold sockets
    return len(os.listdir("/proc/self/fd"))
