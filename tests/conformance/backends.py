"""The kernel backends that the conformance suite runs over. A new backend is one more entry here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import cam_kernels
from cam_kernels.ascend import toolchain
from tests.conformance.case import Case
from tests.launcher import Ranks


def _nothing(case: Case) -> str:
    return ""


@dataclass(frozen=True)
class Backend:
    """name: shown in test ids. config: the fields of cam.Config that choose it.

    lacks: what a case needs and the backend does not have, as a word of the InputError that must then come; "" if it
    has everything. layouts: likewise, for tests without a Case.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    lacks: Callable[[Case], str] = _nothing
    layouts: tuple[str, ...] = ("expert", "rank")

    def __str__(self) -> str:
        return self.name

    def ranks(self, world: int, **options: Any) -> Ranks:
        """Ranks whose group uses this backend. options: of Ranks."""
        return Ranks(world, **{**self.config, **options})


def _ascend_lacks(case: Case) -> str:
    hidden = max(case.hidden, case.out_hidden or 1)
    for needed, word in (
        (case.layout == "rank", "layout='rank'"),
        (case.quant == "fp8", "quant='fp8'"),
        (case.experts > 512, "num_experts is"),
        (not 1 <= case.hidden <= hidden <= 8192, "hidden is"),
        (not 1 <= case.topk <= 16, "top-k is"),
        (case.prequantised not in (None, "int8 [T]", "int8 [T, 1]"), "forward int8 rows"),
    ):
        if needed:
            return word
    return ""


CPU = [Backend(f"cpu-{isa}", {"isa": isa}) for isa in cam_kernels.isas()]

#: CAM's Ascend kernels, from their Ascend IR: where their compilers are, in the environment of `make test-ascend`.
ASCEND = (
    [Backend("ascend-ir", {"ep_kernels": "ascend"}, lacks=_ascend_lacks, layouts=("expert",))]
    if toolchain.usable()
    else []
)

#: The one that users get by default on this machine: for tests of behaviour that no CPU kernel decides.
DEFAULT = Backend("default")


def _marked(backends: Sequence[Backend]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", backends, ids=str)


#: The CPU kernels of this machine once, and each other kind of kernels.
KINDS = [DEFAULT, *ASCEND]

on_backends = _marked([*CPU, *ASCEND])
on_backends_with_gradients = _marked(CPU)
on_kinds = _marked(KINDS)
#: The same, with the layouts that each kind has.
on_kinds_in_layouts = pytest.mark.parametrize(
    ("backend", "layout"),
    [pytest.param(kind, layout, id=f"{kind}-{layout}") for kind in KINDS for layout in kind.layouts],
)
#: For properties, which draw one of a family.
on_families = pytest.mark.parametrize(
    "family", [pytest.param(family, id=name) for name, family in (("cpu", CPU), ("ascend-ir", ASCEND)) if family]
)
