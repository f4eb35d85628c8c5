"""What the connector reports to vLLM: one line in its log, and Prometheus metrics."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_COUNTERS = {
    "failed_loads": "Loads of KV that failed, whole or in part.",
    "cancelled_loads": "Loads of KV whose request was aborted.",
    "declined": "Offers of KV that were not fetched: full prefix hits, rejected and aborted requests.",
    "loans": "Finished prefills whose blocks were kept for a decode instance.",
    "expired_loans": "Loans that no decode instance fetched in time.",
    "lost_loans": "Loans whose readers died.",
}
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass
class CamStats(KVConnectorStats):
    """An interval. data: transport -> [seconds], [bytes], [blocks] of its loads; counters."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {"loads": {}, "counters": dict.fromkeys(_COUNTERS, 0)}

    def load(self, transport: str, seconds: float, nbytes: int, blocks: int) -> None:
        self.data["loads"].setdefault(transport, []).append([seconds, nbytes, blocks])

    def count(self, name: str) -> None:
        self.data["counters"][name] += 1

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for transport, entries in other.data["loads"].items():
            self.data["loads"].setdefault(transport, []).extend(entries)
        for name, value in other.data["counters"].items():
            self.data["counters"][name] += value
        return self

    def reduce(self) -> dict[str, int | float]:
        told: dict[str, int | float] = {}
        for transport, entries in sorted(self.data["loads"].items()):
            seconds, nbytes = sum(entry[0] for entry in entries), sum(entry[1] for entry in entries)
            told[f"{transport} loads"] = len(entries)
            told[f"{transport} MiB"] = round(nbytes / 2**20, 3)
            told[f"{transport} mean ms"] = round(1e3 * seconds / len(entries), 3)
            told[f"{transport} GB/s"] = round(nbytes / seconds / 1e9, 3) if seconds else 0.0
        told.update({name.replace("_", " "): value for name, value in self.data["counters"].items() if value})
        return told

    def is_empty(self) -> bool:
        return not self.data["loads"] and not any(self.data["counters"].values())

    def take(self) -> "CamStats | None":
        """This interval, and begins a new one. None: nothing happened."""
        if self.is_empty():
            return None
        taken = CamStats(self.data)
        self.reset()
        return taken


class CamPromMetrics(KVConnectorPromMetrics):
    """vllm:cam_kv_*, by vLLM's labels; those of loads also by transport."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        by_transport = [*labelnames, "transport"]
        self._seconds = self._histogram_cls(
            name="vllm:cam_kv_load_seconds",
            documentation="Duration of loads of KV.",
            buckets=_SECONDS,
            labelnames=by_transport,
        )
        self._bytes = self._counter_cls(
            name="vllm:cam_kv_load_bytes", documentation="Bytes of KV loaded.", labelnames=by_transport
        )
        self._blocks = self._counter_cls(
            name="vllm:cam_kv_load_blocks", documentation="Blocks of KV loaded.", labelnames=by_transport
        )
        self._counters = {
            name: self._counter_cls(name=f"vllm:cam_kv_{name}", documentation=text, labelnames=labelnames)
            for name, text in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for transport, entries in transfer_stats_data["loads"].items():
            for seconds, nbytes, blocks in entries:
                self._seconds.labels(*labels, transport).observe(seconds)
                self._bytes.labels(*labels, transport).inc(nbytes)
                self._blocks.labels(*labels, transport).inc(blocks)
        for name, value in transfer_stats_data["counters"].items():
            self._counters[name].labels(*labels).inc(value)
