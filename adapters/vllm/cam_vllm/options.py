"""kv_connector_extra_config of the connector `cam`, typed. Unknown keys are refused with the near miss."""

import difflib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from cam import kv
from cam.errors import ConfigError


class Options(BaseModel):
    """What `kv_connector_extra_config` may hold."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    transport: str = "auto"
    """How KV is moved: "shm", "cma", "nixl", "mooncake", or "auto": the best that both sides can prove."""

    kv_memory: Literal["auto", "cam", "vllm"] = "auto"
    """Where the KV cache lies. "cam": in memory that peers of this host map; "vllm": where vLLM put it (peers of this
    host read it with process_vm_readv); "auto": cam, or vllm with a warning when it cannot be moved."""

    listen: str = "127.0.0.1"
    """Address on which this instance's workers answer peers. The ports are given by the system and published."""

    advertise: str | None = None
    """Address by which peers reach `listen`. None: `listen` itself."""

    secret_file: str | None = None
    """File whose content both sides share; whoever can read it can read the KV cache. None: one file per user,
    made when it is missing ($XDG_STATE_HOME/cam/kv-secret), which serves instances of one user on one host."""

    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0
    """How long finished blocks wait for the decode instance, in seconds; each touch by it starts the time anew."""

    bidirectional_kv_xfer: bool = False
    """Whether a prefill server also fetches what a decode server computed (the next turn of a conversation). The name
    is NixlConnector's, as are the next two."""

    kv_recompute_threshold: Annotated[int, Field(ge=0)] = 64
    """A prefill server computes rather than fetches fewer tokens than this."""

    decoder_kv_blocks_ttl: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 480.0
    """How long a decode server's finished blocks wait for the next turn, in seconds."""

    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 30.0
    """Deadline of opening a peer, and of one transfer, in seconds."""

    checksum: Literal["auto"] | bool = "auto"
    """Whether blocks are verified; "auto": between hosts."""

    threads: Annotated[int | None, Field(ge=1)] = None
    """Threads that copy. None: the engine decides."""

    memory_limit: Annotated[ByteSize, Field(gt=0)] | None = None
    """Most bytes of CAM memory. None: the engine decides."""

    nixl_backends: tuple[str, ...] = ("UCX",)
    mooncake_protocol: str = "tcp"
    mooncake_device: str = ""

    @classmethod
    def parse(cls, extra: dict[str, Any]) -> "Options":
        """Raises ConfigError that names the key, the value found and what is allowed."""
        for key in extra:
            if key not in cls.model_fields:
                near = difflib.get_close_matches(str(key), cls.model_fields, n=1)
                hint = f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(cls.model_fields))}"
                raise ConfigError(f"unknown key {key!r} in kv_connector_extra_config{hint}")
        try:
            return cls(**extra)
        except ValidationError as error:
            raise ConfigError(
                "; ".join(
                    f"kv_connector_extra_config[{'.'.join(map(str, item['loc']))!r}] = {item['input']!r}: {item['msg']}"
                    for item in error.errors(include_url=False)
                )
            ) from None

    def engine_options(self) -> kv.Options:
        """The part that is the engine's."""
        return kv.Options(
            checksum=self.checksum,
            threads=self.threads,
            timeout_s=self.timeout_s,
            lease_s=self.lease_s,
            memory_limit=self.memory_limit,
            nixl_backends=self.nixl_backends,
            mooncake_protocol=self.mooncake_protocol,
            mooncake_device=self.mooncake_device,
            advertise=self.advertise,
        )
