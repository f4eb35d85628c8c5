"""The open groups' operations and window memory, for Prometheus.

Nothing is counted in Python: the native endpoint counts as it goes, and a scrape reads.

    cam_operation_{calls,bytes,seconds,wait_seconds}_total{group, rank, operation}
    cam_window_bytes{group, rank, kind="allocated" | "peak" | "resident" | "limit"}
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cam import registry
from cam.errors import CamError

_COUNTERS = {
    "calls": ("cam_operation_calls", "Collective operations that this rank completed."),
    "bytes": ("cam_operation_bytes", "Bytes of rows that this rank moved."),
    "total_s": ("cam_operation_seconds", "Seconds in native code, waiting included."),
    "wait_s": ("cam_operation_wait_seconds", "Seconds of waiting for peers."),
}
_LABELS = ("group", "rank", "operation")


class GroupCollector(Collector):
    """Reads all groups that are open in this process when it is scraped."""

    def collect(self) -> Iterable[Metric]:
        counters = {key: CounterMetricFamily(*text, labels=_LABELS) for key, text in _COUNTERS.items()}
        window = GaugeMetricFamily("cam_window_bytes", "Window memory of this rank.", labels=("group", "rank", "kind"))
        for group in registry.groups():
            rank = str(group.rank)
            try:
                operations, memory = group.endpoint.stats(), group.memory()
            except CamError:  # closed meanwhile, or its peers are elsewhere
                continue
            for operation, figures in operations.items():
                for key, counter in counters.items():
                    counter.add_metric((group.name, rank, operation), figures[key])
            for kind in ("allocated", "peak", "resident", "limit"):
                window.add_metric((group.name, rank, kind), memory[kind])
        return (*counters.values(), window)


#: CAM's own registry; mount it beside others, or scrape prometheus_text().
REGISTRY = CollectorRegistry()
REGISTRY.register(GroupCollector())


def prometheus_text() -> str:
    """All of CAM's metrics in this process, in Prometheus' text format."""
    return generate_latest(REGISTRY).decode()
