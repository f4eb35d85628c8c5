"""The prefill instances that this worker has opened. Opening takes round trips: it happens beside the model's steps."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from vllm.logger import init_logger

from cam import kv
from cam.deadline import Deadline
from cam.errors import CamError, NotReachable
from cam_vllm.params import Agent, Offer

logger = init_logger(f"vllm.{__name__}")

#: Instances that are opened at the same time; one that does not answer holds a thread until the deadline.
OPENING_THREADS = 4

_Key = tuple[Agent, ...]


class Remotes:
    """One open remote per instance. Thread-safe."""

    def __init__(self, engine: kv.Engine, transport: str, timeout_s: float) -> None:
        self._engine, self._transport, self._timeout_s = engine, transport, timeout_s
        self._lock = threading.Lock()
        self._open: dict[_Key, Future[kv.Remote]] = {}
        self._threads = ThreadPoolExecutor(OPENING_THREADS, thread_name_prefix="cam-open")

    def get(self, offer: Offer) -> "Future[kv.Remote]":
        """The opened instance, now or later; raises CamError from the future. A dead or failed one is opened anew."""
        with self._lock:
            for key in [key for key, entry in self._open.items() if _over(entry)]:
                entry = self._open.pop(key)
                if entry.exception() is None:
                    self._threads.submit(entry.result().close)
            if offer.agents not in self._open:
                self._open[offer.agents] = self._threads.submit(self._connect, offer)
            return self._open[offer.agents]

    def close(self) -> None:
        """Waits for openings under way (they have deadlines) and closes all."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            entries, self._open = list(self._open.values()), {}
        for entry in entries:
            if not entry.cancelled() and entry.exception() is None:
                entry.result().close()

    def _connect(self, offer: Offer) -> kv.Remote:
        deadline = Deadline(self._timeout_s)
        descriptions = [
            self._engine.fetch(agent.host, agent.port, timeout=max(0.001, deadline.left_s)) for agent in offer.agents
        ]
        remote = self._engine.open(*descriptions, transport=self._transport, timeout=max(0.001, deadline.left_s))
        expected = {agent.engine_id for agent in offer.agents} - {""}
        if expected - set(remote.engine_ids):
            remote.close()
            raise NotReachable(
                f"instance {offer.instance} is gone: at its addresses answer engines {', '.join(remote.engine_ids)}, "
                f"expected were {', '.join(sorted(expected))}"
            )
        logger.info("cam: opened instance %s: %s", offer.instance, remote.reason)
        return remote


def _over(entry: "Future[kv.Remote]") -> bool:
    if not entry.done():
        return False
    error = entry.exception()
    if error is not None and not isinstance(error, CamError):
        logger.error("cam: opening an instance failed unexpectedly", exc_info=error)
    return error is not None or not entry.result().alive
