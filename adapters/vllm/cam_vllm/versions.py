"""Which vLLM this adapter was written for and tested with."""

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from cam.errors import CamError

#: The connector interface (kv_connector/v1/base.py), the scheduler's calls and the CPU cache layout are those of 0.32.
SUPPORTED = SpecifierSet(">=0.32.0,<0.33", prereleases=True)


class UnsupportedVllm(CamError):
    """The installed vLLM is not one that cam-vllm supports."""


def check(found: str) -> None:
    """Raises UnsupportedVllm that names both versions."""
    # A local or development suffix ("+cpu", ".dev3") does not change the interface.
    if Version(Version(found).base_version) not in SUPPORTED:
        raise UnsupportedVllm(f"cam-vllm supports vLLM {SUPPORTED}, installed is {found}")
