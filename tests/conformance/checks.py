"""Cases on a backend: what it has is compared with the golden, what it lacks must be refused."""

from tests.conformance import golden, programs
from tests.conformance.backends import Backend
from tests.conformance.case import Case


def check(backend: Backend, *cases: Case, **config: object) -> None:
    """Dispatch and combine of cases of one world size, all on one live group."""
    offered = [case for case in cases if not backend.lacks(case)]
    lacking = [case for case in cases if backend.lacks(case)]
    with backend.ranks(cases[0].world, **config) as ranks:
        by_rank = ranks.run(programs.forward_many, offered)
        for said in ranks.run(programs.refusals, lacking):
            for case, text in zip(lacking, said, strict=True):
                assert backend.lacks(case) in text, f"{case}: {text}"
    for n, case in enumerate(offered):
        golden.check_forward(case, [seen[n] for seen in by_rank])


def check_repeated(backend: Backend, case: Case, other: Case) -> None:
    """`other` differs from `case` in what is sent, not in where it goes."""
    lacking = next(filter(backend.lacks, (case, other)), None)
    if lacking is not None:
        return check(backend, lacking)
    with backend.ranks(case.world) as ranks:
        by_rank = ranks.run(programs.repeated, case, other)
    parts, again = golden.received(case), golden.received(other)
    # Repeated dispatches are combined without the bias.
    outs = golden.outputs(case, parts, biased=False)
    outs_again = golden.outputs(other, again, biased=False)
    for rank, (first, second) in enumerate(by_rank):
        golden.check_received(first, parts[rank], rank)
        golden.check_received(second, again[rank], rank)
        golden.same_bits(first["out"], outs[rank], "first combine")
        golden.same_bits(second["out"], outs_again[rank], "second combine")
    return None
