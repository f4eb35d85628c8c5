"""The scheduler half: decides what is fetched and what is kept for others. Lives in vLLM's scheduler process.

A request passes through here in one of two ways.
- Prefill side (do_remote_decode): when it finishes, its blocks become a loan, and its answer is an offer. The blocks
  are freed when the workers report that the loan has ended: fetched, refused, expired, or the readers died.
- Decode side (do_remote_prefill): once its blocks are allocated, the workers load the part of the prompt that is not
  cached here. A request that will never be loaded (rejected, aborted early, fully cached) still tells the prefill side.
With bidirectional_kv_xfer the roles also meet the other way round: a decode's blocks become a loan for the next turn,
and a prefill loads what a decode offers.
"""

import itertools
import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from cam_vllm import params as transfer_params
from cam_vllm.fingerprint import fingerprint
from cam_vllm.metadata import CamHandshake, CamMetadata, Load, Loan
from cam_vllm.options import Options
from cam_vllm.params import Agent, BadParams, Offer

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

_HANDED_OVER = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class CamScheduler:
    def __init__(self, instance: str, block_size: int, options: Options) -> None:
        """instance: vLLM's engine id, new at each start; block_size: in tokens."""
        self._instance, self._block_size, self._options = instance, block_size, options
        self._agents: tuple[Agent, ...] = ()
        self._next = CamMetadata()
        self._numbers = itertools.count()
        #: Requests whose load, or loan, the workers have not reported as ended.
        self._loading: set[str] = set()
        self._lending: set[str] = set()
        #: Offers of requests that wait to be scheduled; None: unusable.
        self._offers: dict[str, Offer | None] = {}

    def set_agents(self, handshakes: dict[int, CamHandshake]) -> None:
        """Where the ranks' engines answer, by tensor-parallel rank."""
        self._agents = tuple(Agent(item.host, item.port, item.engine_id) for _, item in sorted(handshakes.items()))

    def matched_tokens(self, request: "Request", num_computed_tokens: int) -> int:
        """Tokens of the prompt that can be fetched beyond those that are cached here. No side effects."""
        offer = self._offer(request)
        if offer is None:
            return 0
        tokens = max(0, self._offered_tokens(request, offer) - num_computed_tokens)
        reads_back = not transfer_params.wants_remote_prefill(request.kv_transfer_params)
        return 0 if reads_back and tokens < self._options.kv_recompute_threshold else tokens

    def after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Called again, without external tokens, once the load is over: nothing happens then."""
        params = request.kv_transfer_params
        if params is None or not self._wants_load(params):
            return
        offer = self._offer(request)
        self._offers.pop(request.request_id, None)
        transfer_params.mark_processed(params)
        if offer is None:
            return
        if num_external_tokens == 0:
            self._decline(request, offer, "what it needs is cached, or quickly computed, here")
            return
        first = self._offered_tokens(request, offer) - num_external_tokens
        last = first + num_external_tokens
        chosen = blocks.get_block_ids()[0][first // self._block_size : -(-last // self._block_size)]
        self._loading.add(request.request_id)
        self._next.loads.append(Load(request.request_id, offer, tuple(chosen), first, num_external_tokens))

    def take_metadata(self) -> CamMetadata:
        taken, self._next = self._next, CamMetadata()
        return taken

    def finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """(whether the blocks must stay, the answer's kv_transfer_params)."""
        params = request.kv_transfer_params
        if params is None:
            return False, None
        if self._wants_load(params):
            # Aborted or rejected before it was scheduled: the other side must not keep its blocks for it.
            offer = self._offer(request)
            self._offers.pop(request.request_id, None)
            transfer_params.mark_processed(params)
            if offer is not None:
                self._decline(request, offer, f"it ended as {request.status.name} before it was scheduled")
            return False, None
        if request.status not in _HANDED_OVER or not block_ids:
            return False, None
        if transfer_params.wants_remote_decode(params):
            return self._lend(request, params, block_ids, request.num_prompt_tokens)
        if params and self._options.bidirectional_kv_xfer:
            # The KV of the last token that was sampled has not been computed.
            ttl_s = self._options.decoder_kv_blocks_ttl
            return self._lend(request, params, block_ids, request.num_tokens - 1, ttl_s)
        return False, None

    def filter_finished(self, output: "KVConnectorOutput") -> None:
        """Removes from the workers' report what the scheduler does not wait for.

        vLLM asserts that it knows every reported request (vllm#43226, vllm#49089): a late or second report of one that
        was aborted and forgotten would kill the engine.
        """
        for kind, waited_for in (("finished_recving", self._loading), ("finished_sending", self._lending)):
            reported: set[str] = set(getattr(output, kind) or ())
            for request in reported - waited_for:
                logger.warning("cam: %s of request %s is not waited for (any more); ignored", kind, request)
            if reported - waited_for:
                setattr(output, kind, reported & waited_for)
            waited_for -= reported

    def _lend(
        self, request: "Request", params: dict[str, Any], block_ids: list[int], most: int, ttl_s: float | None = None
    ) -> tuple[bool, dict[str, Any]]:
        lease = f"{self._instance}/{next(self._numbers)}"
        try:
            readers = transfer_params.readers(params)
        except BadParams as error:
            logger.warning("cam: request %s: %s; one reader is expected", request.request_id, error)
            readers = 1
        self._lending.add(request.request_id)
        self._next.loans.append(Loan(request.request_id, lease, readers, ttl_s))
        tokens = min(request.num_computed_tokens, most)
        answer = transfer_params.offer(
            instance=self._instance,
            request=request.request_id,
            agents=self._agents,
            blocks=block_ids[: -(-tokens // self._block_size)],
            tokens=tokens,
            lease=lease,
            prompt=fingerprint(request, tokens),
            expiry=None if ttl_s is None else time.perf_counter() + ttl_s,
        )
        return True, answer

    def _decline(self, request: "Request", offer: Offer, why: str) -> None:
        logger.debug("cam: request %s fetches nothing from %s: %s", request.request_id, offer.instance, why)
        self._next.loads.append(Load(request.request_id, offer, ()))

    def _offer(self, request: "Request") -> Offer | None:
        """The request's usable offer, checked once."""
        if not self._wants_load(request.kv_transfer_params):
            return None
        if request.request_id not in self._offers:
            self._offers[request.request_id] = self._checked(request)
        return self._offers[request.request_id]

    def _checked(self, request: "Request") -> Offer | None:
        try:
            offer = transfer_params.parse(request.kv_transfer_params or {})
        except BadParams as error:
            logger.warning("cam: request %s is computed here, its KV is not fetched: %s", request.request_id, error)
            return None
        tokens = request.num_prompt_tokens if offer.tokens is None else offer.tokens
        if not offer.prompt or (tokens <= request.num_tokens and offer.prompt == fingerprint(request, tokens)):
            return offer
        logger.warning(
            "cam: request %s is computed here: request %s of instance %s, whose KV is offered, has another prompt (its "
            "tokens, cache salt, LoRA adapter, multimodal inputs or embeddings differ)",
            request.request_id, offer.request, offer.instance,
        )  # fmt: skip
        self._decline(request, offer, "its prompt is another one")
        return None

    def _wants_load(self, params: dict[str, Any] | None) -> bool:
        return transfer_params.wants_remote_prefill(params) or (
            self._options.bidirectional_kv_xfer and transfer_params.wants_readback(params)
        )

    def _offered_tokens(self, request: "Request", offer: Offer) -> int:
        known: int = request.num_prompt_tokens
        return known if offer.tokens is None else min(offer.tokens, known)
