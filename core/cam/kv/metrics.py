"""Counters of an engine: per peer, transport and direction. Readable as a dict and as Prometheus text."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


@dataclass(slots=True)
class Flow:
    """What went over one transport with one peer in one direction. seconds: in transfers, from post to end;
    copying_s: in the transport alone."""

    transfers: int = 0
    nbytes: int = 0
    blocks: int = 0
    seconds: float = 0.0
    copying_s: float = 0.0
    failures: int = 0
    cancelled: int = 0
    corrupt_blocks: int = 0


class Metrics:
    """Thread-safe. leases: a snapshot of the lease counters, with "active"."""

    def __init__(self, engine: str, leases: Callable[[], dict[str, int]]) -> None:
        self._engine, self._leases = engine, leases
        self._lock = threading.Lock()
        self._flows: dict[tuple[str, str, str], Flow] = {}
        self._handshakes: dict[str, tuple[int, float]] = {}
        self._notifications = {"sent": 0, "received": 0}

    def count(
        self,
        peer: str,
        transport: str,
        direction: str,
        *,
        outcome: str,
        nbytes: int,
        blocks: int,
        seconds: float,
        copying_s: float,
        corrupt_blocks: int = 0,
    ) -> None:
        """outcome: "done", "failed" or "cancelled". nbytes, blocks: of a transfer that is done."""
        with self._lock:
            flow = self._flows.setdefault((peer, transport, direction), Flow())
            flow.transfers += 1
            flow.seconds += seconds
            flow.copying_s += copying_s
            flow.corrupt_blocks += corrupt_blocks
            if outcome == "done":
                flow.nbytes += nbytes
                flow.blocks += blocks
            elif outcome == "cancelled":
                flow.cancelled += 1
            else:
                flow.failures += 1

    def handshake(self, peer: str, seconds: float) -> None:
        with self._lock:
            count, total = self._handshakes.get(peer, (0, 0.0))
            self._handshakes[peer] = count + 1, total + seconds

    def notified(self, what: str) -> None:
        """what: "sent" or "received"."""
        with self._lock:
            self._notifications[what] += 1

    def snapshot(self) -> dict[str, Any]:
        """Plain values: flows with their bandwidth (bytes / copying_s), handshakes, notifications, leases."""
        with self._lock:
            flows = [
                {
                    "peer": peer,
                    "transport": transport,
                    "direction": direction,
                    **asdict(flow),
                    "bytes_per_s": flow.nbytes / flow.copying_s if flow.copying_s else 0.0,
                }
                for (peer, transport, direction), flow in sorted(self._flows.items())
            ]
            handshakes = {peer: {"count": n, "seconds": s} for peer, (n, s) in sorted(self._handshakes.items())}
            notifications = dict(self._notifications)
        return {
            "engine": self._engine,
            "flows": flows,
            "handshakes": handshakes,
            "notifications": notifications,
            "leases": self._leases(),
        }

    def prometheus(self) -> str:
        """The text format, of a registry of its own."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> Iterable[Metric]:
        """For a prometheus_client registry."""
        state = self.snapshot()
        labels = ["engine", "peer", "transport", "direction"]
        about = {
            "transfers": "Transfers that ended.",
            "nbytes": "Bytes of transfers that were done.",
            "blocks": "Local blocks of transfers that were done.",
            "seconds": "Time of transfers, from post to end.",
            "copying_s": "Time that transports spent copying.",
            "failures": "Transfers that failed.",
            "cancelled": "Transfers that were cancelled.",
            "corrupt_blocks": "Blocks whose checksum did not match.",
        }
        names = {"nbytes": "bytes", "copying_s": "copy_seconds"}
        for field, text in about.items():
            family = CounterMetricFamily(f"cam_kv_{names.get(field, field)}", text, labels=labels)
            for flow in state["flows"]:
                at = [self._engine, flow["peer"], flow["transport"], flow["direction"]]
                family.add_metric(at, flow[field])
            yield family
        speed = GaugeMetricFamily("cam_kv_bytes_per_second", "Bytes per second while copying.", labels=labels)
        for flow in state["flows"]:
            at = [self._engine, flow["peer"], flow["transport"], flow["direction"]]
            speed.add_metric(at, flow["bytes_per_s"])
        yield speed
        shakes = CounterMetricFamily("cam_kv_handshakes", "Peers opened.", labels=["engine", "peer"])
        for peer, each in state["handshakes"].items():
            shakes.add_metric([self._engine, peer], each["count"])
        yield shakes
        notes = CounterMetricFamily("cam_kv_notifications", "Notifications.", labels=["engine", "way"])
        for way, count in state["notifications"].items():
            notes.add_metric([self._engine, way], count)
        yield notes
        active = GaugeMetricFamily("cam_kv_leases_active", "Loans that have not ended.", labels=["engine"])
        active.add_metric([self._engine], state["leases"]["active"])
        yield active
        leases = CounterMetricFamily("cam_kv_leases", "Loans by what became of them.", labels=["engine", "event"])
        for event, count in state["leases"].items():
            if event != "active":
                leases.add_metric([self._engine, event], count)
        yield leases
