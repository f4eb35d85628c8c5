"""NIXL (UCX): other hosts, and this one where nothing better is allowed.

An agent with a progress thread is made when the first peer asks for this transport: it takes tens of
milliseconds and threads that nobody else should pay for.

Seen with nixl-cu12 1.5.1: a process that has made an agent may crash when it exits, after everything else is done,
in a destructor of the libnl that the wheel brings; without CAM too.
"""

import contextlib
import threading
import time
from typing import Any

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

from cam.errors import BackendUnavailable, NotReachable
from cam.transport.liveness import lost_soon
from cam.transport.pieces import Batch, Int64s, runs
from cam.transport.protocol import Ended, Home, Limits, Offer, Outcome, Target

_SPIN_S = 200e-6
_NAP_S = 100e-6
_ABORT_GRACE_S = 2.0


class Nixl:
    name = "nixl"

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._agent: Any = None
        self._registered: Any = None

    def offer(self, request: bytes) -> Offer:
        return Offer(bytes(self._started().get_agent_metadata()))

    def connect(self, target: Target) -> "_Agents":
        agent = self._started()
        metadata = target.ask(b"").blob
        try:
            peer = agent.add_remote_agent(metadata)
        except Exception as error:  # the binding's own classes have no base of their own
            raise NotReachable(f"nixl: {target.name}: its agent is not accepted: {_text(error)}") from error
        return _Agents(agent, peer if isinstance(peer, str) else peer.decode(), target, self._home)

    def close(self) -> None:
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None and self._registered is not None:
                with contextlib.suppress(Exception):  # the agent goes in any case
                    agent.deregister_memory(self._registered)
            self._registered = None

    def _started(self) -> Any:
        with self._lock:
            if self._agent is None:
                backends = list(self._home.settings.nixl_backends)
                try:
                    agent = nixl_agent(self._home.name, nixl_agent_config(enable_prog_thread=True, backends=backends))
                    ranges = [(each.address, each.nbytes, 0, "") for each in self._home.ranges]
                    self._registered = agent.register_memory(ranges, "DRAM")
                except Exception as error:
                    raise BackendUnavailable(
                        f"transport 'nixl' does not start with backends {', '.join(backends)}: {_text(error)}"
                    ) from error
                self._agent = agent
            return self._agent


class _Agents:
    """This process's agent and the peer's."""

    def __init__(self, agent: Any, peer: str, target: Target, home: Home) -> None:
        self._agent, self._peer, self._target = agent, peer, target
        self.reason = f"NIXL with {', '.join(home.settings.nixl_backends)}"
        self._closed = False

    def addresses(self, theirs: Int64s) -> Int64s:
        return theirs

    def prepare(self, batch: Batch, to_mine: bool) -> "_Prepped":
        return _Prepped(self._agent, self._peer, self._target, batch, to_mine)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with contextlib.suppress(Exception):  # it may know by itself that the peer is gone
                self._agent.remove_remote_agent(self._peer)


class _Prepped:
    """Descriptor lists of both sides."""

    def __init__(self, agent: Any, peer: str, target: Target, batch: Batch, to_mine: bool) -> None:
        self._agent, self._target = agent, target
        self._operation = "READ" if to_mine else "WRITE"
        mine, theirs, nbytes, _ = runs(batch)
        self._indices = np.arange(len(nbytes), dtype=np.int32)
        self._lists: list[Any] = []
        if len(nbytes):
            try:
                for owner, addresses in (("NIXL_INIT_AGENT", mine), (peer, theirs)):
                    rows = np.stack([addresses, nbytes, np.zeros_like(nbytes)], axis=1).astype(np.uint64)
                    self._lists.append(agent.prep_xfer_dlist(owner, agent.get_xfer_descs(rows, "DRAM")))
            except Exception as error:
                self.close()
                raise NotReachable(f"nixl: {target.name}: the transfer cannot be prepared: {_text(error)}") from error

    def run(self, limits: Limits) -> Outcome:
        if limits.is_cancelled():
            return Outcome(Ended.CANCELLED)
        if time.monotonic_ns() > limits.deadline_ns:
            return Outcome(Ended.LATE)
        if not len(self._indices):
            return Outcome(Ended.DONE)
        agent = self._agent
        handle = None
        try:
            mine, theirs = self._lists
            handle = agent.make_prepped_xfer(self._operation, mine, self._indices, theirs, self._indices)
            state = agent.transfer(handle)
            began = time.monotonic()
            early = Ended.DONE
            while state not in ("DONE", "ERR"):
                now = time.monotonic()
                if early is Ended.DONE:
                    if limits.is_cancelled():
                        early, patience = Ended.CANCELLED, now + _ABORT_GRACE_S
                    elif time.monotonic_ns() > limits.deadline_ns:
                        early, patience = Ended.LATE, now
                    elif self._target.lost():
                        early, patience = Ended.LOST, now + _ABORT_GRACE_S
                # What is under way cannot be called back for sure: it is given time to end by itself first.
                if early is not Ended.DONE and now > patience:
                    return Outcome(early, 0, self._target.lost())
                if now - began > _SPIN_S:
                    time.sleep(_NAP_S)
                state = agent.check_xfer_state(handle)
            if state == "ERR":
                return self._failed("NIXL reports an error")
            return Outcome(early if early is Ended.CANCELLED else Ended.DONE)
        except Exception as error:
            return self._failed(_text(error))
        finally:
            if handle is not None:
                with contextlib.suppress(Exception):
                    agent.release_xfer_handle(handle)

    def _failed(self, why: str) -> Outcome:
        lost = lost_soon(self._target.lost)
        return Outcome(Ended.LOST if lost else Ended.FAILED, 0, lost or why)

    def close(self) -> None:
        lists, self._lists = self._lists, []
        self._indices = self._indices[:0]
        for each in lists:
            with contextlib.suppress(Exception):
                self._agent.release_dlist_handle(each)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
