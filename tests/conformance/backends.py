"""The kernel backends that the conformance suite runs over. A new backend is one more entry here."""

from dataclasses import dataclass, field
from typing import Any

import cam_kernels


@dataclass(frozen=True)
class Backend:
    """name: shown in test ids. config: the fields of cam.Config that choose it."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


BACKENDS = [Backend(f"cpu-{isa}", {"isa": isa}) for isa in cam_kernels.isas()]

#: The one that users get by default on this machine: for tests of behaviour that no kernel decides.
DEFAULT = Backend("default")
