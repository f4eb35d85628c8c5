"""What the scheduler half tells the worker half each step, and what the workers publish at start."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from cam_vllm.params import Offer


@dataclass(frozen=True)
class Load:
    """Fetch the KV of one request. Without blocks: only tell the prefill side that nothing is wanted (any more)."""

    request: str
    offer: Offer
    blocks: tuple[int, ...]
    """Local blocks, for the tokens first_token, first_token + 1, ..."""
    first_token: int = 0
    tokens: int = 0

    @property
    def waited_for(self) -> bool:
        """The scheduler waits for the end of this load; it must be reported once, and only then."""
        return bool(self.blocks)


@dataclass(frozen=True)
class Loan:
    """The blocks of a finished request wait for decode instances."""

    request: str
    lease: str
    readers: int
    ttl_s: float | None = None
    """How long they wait. None: the option lease_s."""


@dataclass
class CamMetadata(KVConnectorMetadata):
    loads: list[Load] = field(default_factory=list)
    loans: list[Loan] = field(default_factory=list)


@dataclass
class CamHandshake(KVConnectorHandshakeMetadata):
    """Where one worker's engine answers."""

    host: str
    port: int
    engine_id: str
