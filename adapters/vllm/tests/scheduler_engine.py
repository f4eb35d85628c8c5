"""vLLM's real scheduler with CAM's scheduler half, without workers: what they would report is written by hand."""

import itertools
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from cam_vllm.metadata import CamHandshake, CamMetadata

SIZE, BLOCKS = 16, 40
_numbers = itertools.count(1)


class Engine:
    """A scheduler without workers: `step` schedules, takes the metadata, and reports what it is told to."""

    def __init__(
        self,
        model: Path,
        role: str,
        policy: str = "fail",
        kv_connector: str = "CamConnector",
        **extra: Any,
    ) -> None:
        config = VllmConfig(
            model_config=ModelConfig(model=str(model), dtype="float32", max_model_len=512),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, is_encoder_decoder=False
            ),
            cache_config=CacheConfig(block_size=SIZE, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector=kv_connector,
                kv_connector_module_path="cam_vllm.connector" if kv_connector == "CamConnector" else None,
                kv_role=role,
                kv_load_failure_policy=policy,
                kv_connector_extra_config=extra,
            ),
        )
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=SIZE,
            log_stats=True,
        )
        if kv_connector == "CamConnector":
            handshake = CamHandshake("127.0.0.1", 1111, f"engine-of-{role}")
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        self._output: SchedulerOutput | None = None

    def add(self, request: Request) -> Request:
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> CamMetadata:
        self._output = self.scheduler.schedule()
        metadata = self._output.kv_connector_metadata
        assert isinstance(metadata, CamMetadata)
        return metadata

    def report(
        self, *, received: set[str] = frozenset(), sent: set[str] = frozenset(), failed: set[int] = frozenset()
    ) -> dict[str, Any]:
        """What the workers answer to the last schedule(): tokens for what was scheduled, and transfers that ended."""
        assert self._output is not None
        names = list(self._output.num_scheduled_tokens)
        finished = {}
        outputs = self.scheduler.update_from_output(
            self._output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[[9] for _ in names],
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=None,
                kv_connector_output=KVConnectorOutput(
                    finished_sending=set(sent), finished_recving=set(received), invalid_block_ids=set(failed)
                ),
            ),
        )
        for group in outputs.values():
            for output in group.outputs:
                if output.finish_reason is not None:
                    finished[output.request_id] = output
        return finished

    def step(self, **reports: Any) -> tuple[CamMetadata, dict[str, Any]]:
        metadata = self.schedule()
        return metadata, self.report(**reports)

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)

    def run_to_end(self, limit: int = 40) -> dict[str, Any]:
        finished: dict[str, Any] = {}
        for _ in range(limit):
            if not self.scheduler.get_num_unfinished_requests():
                return finished
            finished |= self.step()[1]
        raise AssertionError("requests do not finish")

    @property
    def free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def check_clean(self) -> None:
        self.scheduler.schedule()
        assert not self.scheduler.requests
        assert self.free == self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        half = self.scheduler.connector.scheduler
        assert not half._loading
        assert not half._lending
        assert not half._offers


def request(
    tokens: int | list[int],
    kv: dict[str, Any] | None,
    *,
    max_tokens: int = 3,
    salt: str | None = None,
    lora: str | None = None,
) -> Request:
    prompt = tokens if isinstance(tokens, list) else [(7 * i + 3) % 500 for i in range(tokens)]
    parameters = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": kv} if kv else None
    )
    return Request(
        request_id=f"request-{next(_numbers)}",
        prompt_token_ids=list(prompt),
        sampling_params=parameters,
        pooling_params=None,
        cache_salt=salt,
        lora_request=None if lora is None else LoRARequest(lora, 1, "/nowhere"),
        block_hasher=get_request_block_hasher(SIZE, sha256),
    )


def prefilled(prefill: Engine, tokens: int | list[int] = 40, **how: Any) -> tuple[Request, dict[str, Any], CamMetadata]:
    """A prefill that has finished: (request, its answer's kv_transfer_params, the metadata with its loan)."""
    asked = prefill.add(request(tokens, {"do_remote_decode": True}, max_tokens=1, **how))
    _, finished = prefill.step()
    answer = finished[asked.request_id].kv_transfer_params
    return asked, answer, prefill.schedule()


def settle(prefill: Engine, *asked: Request) -> None:
    prefill.report(sent={each.request_id for each in asked})
