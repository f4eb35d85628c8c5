"""What each generation of Ascend chips allows. Not run on hardware.

The numbers are those of the vendor's documentation of aclnnMoeDistributeDispatchV2 and of its tiling code.
"""

import re
from dataclasses import dataclass
from typing import Literal

from cam.errors import BackendUnavailable

Generation = Literal["A2", "A3", "A5"]


@dataclass(frozen=True)
class Soc:
    """One chip, and the limits of MC2's dispatch and combine on it.

    name: as torch_npu.npu.get_device_name() gives it. max_tokens: per rank and call. vector_cores: of the whole chip.
    """

    name: str
    generation: Generation
    vector_cores: int
    max_tokens: int
    min_hidden: int
    max_hidden: int
    hidden_multiple: int
    max_topk: int = 16
    max_experts: int = 1024
    max_ranks: int = 768


def soc(name: str) -> Soc:
    """The chip of that name. Raises BackendUnavailable for one that is not known."""
    if re.fullmatch(r"Ascend910B\d.*", name):
        return Soc(name, "A2", 48, max_tokens=256, min_hidden=32, max_hidden=7168, hidden_multiple=32)
    if re.fullmatch(r"Ascend910_93\d\d", name):
        return Soc(name, "A3", 48, max_tokens=512, min_hidden=1024, max_hidden=8192, hidden_multiple=1)
    if re.fullmatch(r"Ascend(950|910_95).*", name):
        return Soc(name, "A5", 56, max_tokens=512, min_hidden=1024, max_hidden=8192, hidden_multiple=1)
    raise BackendUnavailable(
        f"NPU {name!r} is not known to CAM; known are Ascend910B* (A2), Ascend910_93* (A3) and Ascend950* (A5)"
    )
