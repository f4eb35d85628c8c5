"""The worker half: owns the engine of one rank, loads what the scheduler half asks for, and keeps loans.

Every load that the scheduler waits for is reported exactly once, done or failed, and only after nothing touches its
blocks any more. Nothing here waits: each step begins what it was told, and reports what has ended since the last one.
"""

from collections.abc import Mapping

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from cam import kv
from cam_vllm import caches, secret
from cam_vllm.loading import Loading
from cam_vllm.metadata import CamHandshake, CamMetadata, Load, Loan
from cam_vllm.options import Options
from cam_vllm.remotes import Remotes
from cam_vllm.stats import CamStats

logger = init_logger(f"vllm.{__name__}")


class CamWorker:
    def __init__(self, instance: str, options: Options, config: KVCacheConfig, *, tp_rank: int, tp_size: int) -> None:
        self._options, self._config = options, config
        self._engine = kv.Engine(
            instance,
            tp_rank=tp_rank,
            tp_size=tp_size,
            secret=secret.load(options.secret_file),
            listen=options.listen,
            options=options.engine_options(),
        )
        self._remotes = Remotes(self._engine, options.transport, options.timeout_s)
        self._loadings: list[Loading] = []
        self._failed_blocks: set[int] = set()
        #: Lease -> request of the loans that have not ended.
        self._loans: dict[str, str] = {}
        self.stats = CamStats()

    def register(self, tensors: Mapping[str, torch.Tensor], holders: Mapping[str, object], total_heads: int) -> None:
        """The KV caches by layer name; `holders`: the model's layers, which share them."""
        caches.place(self._engine, self._options.kv_memory, tensors, holders)
        self._engine.register(caches.layers(tensors, self._config, total_heads))

    def handshake(self) -> CamHandshake | None:
        address = self._engine.address
        if address is None:
            return None
        return CamHandshake(self._options.advertise or address[0], address[1], self._engine.engine_id)

    def begin(self, metadata: CamMetadata) -> None:
        for loan in metadata.loans:
            self._lend(loan)
        for load in metadata.loads:
            self._load(load)

    def results(self, finished_requests: set[str]) -> KVConnectorTransferResults:
        """What has ended. finished_requests: also those aborted in this step, whose loads are cancelled."""
        results = KVConnectorTransferResults()
        running = []
        for loading in self._loadings:
            if loading.load.waited_for and loading.load.request in finished_requests:
                loading.cancel()
            if not loading.done:
                running.append(loading)
                continue
            self._tell(loading)
            if loading.load.waited_for:
                results.finished_recving.add(loading.load.request)
        self._loadings = running
        for event in self._engine.poll():
            if isinstance(event, kv.LeaseEnded):
                self._loan_ended(event, results.finished_sending)
            elif isinstance(event, kv.PeerGone):
                logger.info("cam: peer %s (engine %s) is gone: %s", event.name, event.engine_id, event.reason)
        return results

    def take_failed_blocks(self) -> set[int]:
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def close(self) -> None:
        """Idempotent."""
        for loading in self._loadings:
            loading.cancel()
        self._remotes.close()
        self._engine.close()

    def _lend(self, loan: Loan) -> None:
        self._loans[loan.lease] = loan.request
        self._engine.lease(loan.lease, ttl_s=loan.ttl_s, tag=loan.request.encode(), readers=loan.readers)
        self.stats.count("loans")

    def _load(self, load: Load) -> None:
        remote = self._remotes.get(load.offer)
        self._loadings.append(Loading(self._engine, load, remote, self._options.timeout_s))

    def _loan_ended(self, event: "kv.LeaseEnded", finished: set[str]) -> None:
        request = self._loans.pop(event.lease, None)
        if request is None:
            return
        finished.add(request)
        if event.reason == "expired":
            self.stats.count("expired_loans")
            logger.warning(
                "cam: no decode instance fetched the KV of request %s in time (lease_s); its blocks are freed", request
            )
        elif event.reason == "readers lost":
            self.stats.count("lost_loans")
            logger.warning(
                "cam: the decode instance that fetched the KV of request %s died; its blocks are freed", request
            )

    def _tell(self, loading: Loading) -> None:
        load, transfer, error = loading.load, loading.transfer, loading.error
        peer = load.offer.instance
        if not load.waited_for or loading.cancelled:
            self.stats.count("cancelled_loads" if load.waited_for else "declined")
            if error is not None and not loading.cancelled:
                logger.warning(
                    "cam: request %s: instance %s could not be told to free its blocks: %s", load.request, peer, error
                )
        elif error is not None:
            self.stats.count("failed_loads")
            self._failed_blocks.update(loading.failed_blocks)
            logger.error(
                "cam: loading the KV of request %s from instance %s (request %s) failed: %s; %d of %d blocks are not "
                "to be trusted",
                load.request, peer, load.offer.request, error, len(loading.failed_blocks), len(load.blocks),
            )  # fmt: skip
        elif transfer is not None:
            self.stats.load(transfer.transport, transfer.seconds, transfer.nbytes, len(load.blocks))
            logger.debug(
                "cam: request %s: %d blocks, %d bytes from instance %s over %s in %.3f ms",
                load.request, len(load.blocks), transfer.nbytes, peer, transfer.transport, 1e3 * transfer.seconds,
            )  # fmt: skip
