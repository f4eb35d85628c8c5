"""What an engine can be told beside who it is."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cam import host
from cam.errors import ConfigError
from cam.transport import Settings
from cam_kernels import Mover


@dataclass(frozen=True)
class Options:
    """Raises ConfigError for values that are not allowed.

    transports: what "auto" may use, best first. checksum: "auto" verifies what comes from other hosts; True, False.
    threads: of a large copy; None: usable cores, at most 4. isa: of the copy kernel. inline_bytes: transfers up to
    this size are done inside the call that asks for them, which is quicker than handing them to a thread; 0: none.
    nontemporal_threshold: copies beyond this write around the caches. timeout_s: of every wait; calls can set their
    own. lease_s: a lease's time to live, seconds. memory_limit: bytes of CAM memory; None: what this process may use.
    nixl_backends, mooncake_protocol, mooncake_device: as those libraries take them. advertise: this host's address for
    peers of other hosts; None: the one that the engine listens on.
    """

    transports: tuple[str, ...] = ("shm", "cma", "nixl", "mooncake")
    checksum: bool | Literal["auto"] = "auto"
    threads: int | None = None
    isa: str = "auto"
    inline_bytes: int = 1 << 20
    nontemporal_threshold: int = 1 << 20
    timeout_s: float = 30.0
    lease_s: float = 60.0
    memory_limit: int | None = None
    nixl_backends: tuple[str, ...] = ("UCX",)
    mooncake_protocol: str = "tcp"
    mooncake_device: str = ""
    advertise: str | None = None

    def __post_init__(self) -> None:
        for name in ("transports", "nixl_backends"):
            value = getattr(self, name)
            if isinstance(value, str) or not value or not all(isinstance(each, str) for each in value):
                raise ConfigError(f"{name} must be a list of names, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        if self.checksum not in (True, False, "auto"):
            raise ConfigError(f"checksum must be true, false or 'auto', got {self.checksum!r}")
        for name, least in (
            ("threads", 1),
            ("memory_limit", 1 << 20),
            ("inline_bytes", 0),
            ("nontemporal_threshold", 0),
        ):
            value = getattr(self, name)
            optional = name in ("threads", "memory_limit")
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name} must be a whole number >= {least}, got {value!r}")
        for name in ("timeout_s", "lease_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} must be finite and > 0 (seconds), got {value!r}")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "Options":
        """From a dictionary that somebody wrote. Raises ConfigError, with the near miss of an unknown key."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
                raise ConfigError(f"unknown option {key!r}: {hint}")
        return cls(**given)

    def mover(self) -> Mover:
        """What copies, with threads of its own."""
        return Mover(self.copy_threads, self.isa, self.nontemporal_threshold)

    @property
    def copy_threads(self) -> int:
        """`threads`, decided."""
        return self.threads or min(4, host.usable_cores())

    def settings(self, listen: str | None) -> Settings:
        """The transports' part."""
        return Settings(
            nixl_backends=self.nixl_backends,
            mooncake_protocol=self.mooncake_protocol,
            mooncake_device=self.mooncake_device,
            advertise=self.advertise or listen or "127.0.0.1",
        )
