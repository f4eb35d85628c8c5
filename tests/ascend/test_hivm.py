"""Every kernel compiles to final HIVM for every target, fits the unified buffer and keeps the rules of hivm_check."""

import re
from dataclasses import replace

import pytest

from cam_kernels.ascend import catalogue, hivm, linalg
from cam_kernels.ascend.errors import CompileFailed, UnifiedBufferOverflow
from cam_kernels.ascend.hivm_check import Expectation, Report, check
from cam_kernels.ascend.hivm_graph import UnreadableHivm
from cam_kernels.ascend.kernel import Variant
from tests.ascend.broken_kernels import BROKEN, SOUND, TOO_LARGE

FAMILIES = sorted({declared.variant.name for declared in catalogue.declared()})
in_targets = pytest.mark.parametrize("target", hivm.TARGETS)


SENDER = Expectation(sends=True, flags=True)


def compiled(variant: Variant, target: str) -> hivm.HivmModule:
    return hivm.compile_hivm(linalg.lower(variant), target)


def rules(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings}


@in_targets
@pytest.mark.parametrize("name", FAMILIES)
def test_declared_variants(name: str, target: str) -> None:
    wrong = []
    for declared in catalogue.declared():
        if declared.variant.name != name:
            continue
        report = check(compiled(declared.variant, target), declared.expected)
        wrong += [f"{declared}: {finding}" for finding in report.findings]
    assert not wrong, "\n".join(wrong)


@in_targets
def test_a_sound_kernel_passes(target: str) -> None:
    report = check(compiled(SOUND, target), SENDER)
    assert (report.findings, report.peer_stores, report.flag_stores) == ((), 1, 1)


@in_targets
@pytest.mark.parametrize(
    ("rule", "variant", "expected"), [pytest.param(*broken, id=f"{broken[0]}-{broken[1].name}") for broken in BROKEN]
)
def test_a_broken_kernel_fails(rule: str, variant: Variant, expected: Expectation, target: str) -> None:
    if target == hivm.A5 and rule in ("integer-division", "ub"):
        pytest.skip("950 divides integers as such and has a larger unified buffer")
    assert rule in rules(check(compiled(variant, target), expected))


def test_a_scalar_store_is_found() -> None:
    """Triton-Ascend copies even single elements, so the text is edited."""
    module = compiled(SOUND, hivm.A3)
    store = "memref.store %c0_i32, %arg3[%c0] : memref<?xi32, #hivm.address_space<gm>>\n    "
    assert "%c0_i32 = " in module.text
    text = module.text.replace("hivm.hir.set_mask_norm", store + "hivm.hir.set_mask_norm")
    assert "scalar-store" in rules(check(replace(module, text=text), SENDER))


@in_targets
def test_a_unified_buffer_overflow_is_an_error_that_says_so(target: str) -> None:
    with pytest.raises(UnifiedBufferOverflow, match="ub overflow"):
        compiled(TOO_LARGE, target)


@pytest.mark.parametrize("kind", ["set", "wait"])
@in_targets
def test_every_lost_sync_flag_is_found(kind: str, target: str) -> None:
    """The compiler makes no such mistake, so the text is edited: each set_flag (wait_flag) in turn is taken out."""
    module = compiled(SOUND, target)
    lines = module.text.splitlines()
    places = [n for n, line in enumerate(lines) if f"hivm.hir.{kind}_flag" in line]
    assert places
    for place in places:
        text = "\n".join(lines[:place] + lines[place + 1 :])
        assert "paired-sync" in rules(check(replace(module, text=text), SENDER))


@in_targets
def test_a_lost_barrier_is_found_in_every_kernel_that_sends(target: str) -> None:
    """Each full barrier that stands before a flag is taken out of the real kernels."""
    for declared in catalogue.declared():
        if declared.expected != SENDER:
            continue
        module = compiled(declared.variant, target)
        text = re.sub(r"\n\s*hivm\.hir\.pipe_barrier\[<PIPE_ALL>\]", "", module.text)
        assert "barrier" in rules(check(replace(module, text=text), SENDER)), str(declared)


def test_text_that_is_not_understood_is_an_error() -> None:
    module = compiled(SOUND, hivm.A3)
    with pytest.raises(UnreadableHivm, match="unknown region"):
        check(replace(module, text=module.text.replace("scf.for", "scf.parallel", 1)), SENDER)
    with pytest.raises(UnreadableHivm, match="entry"):
        check(replace(module, text=module.text.replace("hacc.entry", "hacc.other")), SENDER)


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(CompileFailed, match="Ascend310"):
        compiled(SOUND, "Ascend310")
