"""The connector `cam`: the class that vLLM instantiates, once in its scheduler and once in each worker.

It only forwards; scheduler.py and worker.py are the two halves. Pull model: the decode side reads the prefill side's
blocks once it has blocks of its own, asynchronously: other requests' steps go on meanwhile.

Without the plugin: kv_connector="CamConnector", kv_connector_module_path="cam_vllm.connector".
"""

from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cam.errors import InputError
from cam_vllm import versions
from cam_vllm.metadata import CamHandshake, CamMetadata
from cam_vllm.options import Options
from cam_vllm.scheduler import CamScheduler
from cam_vllm.stats import CamPromMetrics, CamStats
from cam_vllm.worker import CamWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class CamConnector(KVConnectorBase_V1):
    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        versions.check(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        options = Options.parse(self._kv_transfer_config.kv_connector_extra_config)
        instance = self._kv_transfer_config.engine_id
        if instance is None:
            raise InputError("kv_transfer_config has no engine_id")
        if len(kv_cache_config.kv_cache_groups) > 1:
            kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups)
            raise InputError(
                f"the connector cam serves models with one group of KV caches, this one has {kinds}; "
                "--disable-hybrid-kv-cache-manager makes one where vLLM can"
            )
        parallel = vllm_config.parallel_config
        for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
            if getattr(parallel, name) > 1:
                raise InputError(f"the connector cam does not support {name} = {getattr(parallel, name)}")
        self._scheduler: CamScheduler | None = None
        self._worker: CamWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = CamScheduler(instance, vllm_config.cache_config.block_size, options)
        else:
            rank, size = parallel.rank % parallel.tensor_parallel_size, parallel.tensor_parallel_size
            self._worker = CamWorker(instance, options, kv_cache_config, tp_rank=rank, tp_size=size)

    # --- scheduler -------------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> CamScheduler:
        if self._scheduler is None:
            raise InputError("called on a worker's connector, but only a scheduler's can do this")
        return self._scheduler

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        group_ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return group_ids

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self.scheduler.matched_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self.scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self.scheduler.take_metadata()

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self.scheduler.filter_finished(connector_output)

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, block_ids)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        wrong = [type(item).__name__ for item in metadata.values() if not isinstance(item, CamHandshake)]
        if wrong:
            raise InputError(f"handshakes of another connector: {', '.join(wrong)}")
        self.scheduler.set_agents({r: item for r, item in metadata.items() if isinstance(item, CamHandshake)})

    def reset_cache(self) -> bool:
        """Nothing is cached here."""
        return True

    # --- worker ----------------------------------------------------------------------------------------------------

    @property
    def worker(self) -> CamWorker:
        if self._worker is None:
            raise InputError("called on a scheduler's connector, but only a worker's can do this")
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        holders = self._vllm_config.compilation_config.static_forward_context
        self.worker.register(kv_caches, holders, self._vllm_config.model_config.get_total_num_kv_heads())

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker.handshake()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, CamMetadata):
            raise InputError(f"metadata of another connector: {type(metadata).__name__}")
        self.worker.begin(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only after its load was reported."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Nothing is saved: the decode side reads the cache itself."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.results(finished_req_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.worker.results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_blocks()

    # --- both ------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        return None if self._worker is None else self._worker.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "KVConnectorStats | None":
        return CamStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        return CamPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
