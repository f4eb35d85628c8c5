"""cam.bench: runs at tiny sizes, reports what it promises, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cam import ConfigError, Timeout
from cam.bench import Plan, benchmark, machine, picture, run
from cam.bench.golden import Golden, WrongResult
from cam.bench.launch import BenchFailed, Mpi
from cam.bench.plan import Case
from cam.bench.report import SCHEMA, CaseResult, find_crowding
from cam.bench.routing import make_work, popularity
from cam.bench.samples import Measured, Summary
from cam.bench.startline import StartLine

TINY: dict[str, Any] = {
    "tokens": (1, 6),
    "hidden": (40,),
    "ranks": (2,),
    "routing": ("uniform",),
    "topk": 2,
    "experts": 5,  # does not divide by the ranks
    "rounds": 2,
}
CAM_DISPATCH = {"cam-rank", "cam-expert", "cam-int8", "cam-fp8"}
CAM_COMBINE = {"cam-rank", "cam-expert", "cam-expert-outside"}
GLOO = {"gloo", "gloo-raw", "gloo-raw-rank"}
MPI = {"mpi", "mpi-raw", "mpi-raw-rank"}
FLOOR = {"memcpy", "memcpy-rank", "nontemporal", "nontemporal-rank"}


def case(**changes: Any) -> Case:
    fields: dict[str, Any] = {
        "ranks": 1,
        "hidden": 8,
        "routing": "uniform",
        "tokens": 12,
        "topk": 3,
        "experts": 6,
        "dtype": "bfloat16",
    }
    return Case(**(fields | changes))


class Alone:
    """The wire of a rank without peers."""

    name = "alone"

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor, *_: list[int]) -> None:
        out.copy_(rows)


# --- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engines", [("cam", "gloo"), ("cam", "gloo", "mpi")])
def test_a_run_measures_every_contender_and_its_json_says_so(engines: tuple[str, ...], tmp_path: Path) -> None:
    mpi = Mpi.find()
    if "mpi" in engines and mpi.version is None:
        pytest.skip(mpi.reason)
    report = run(Plan(**TINY, engines=engines), command="cam bench ep --tiny", patience_s=60)
    data = json.loads(json.dumps(report.to_json()))
    assert data["schema"] == SCHEMA
    assert data["command"] == "cam bench ep --tiny"
    assert data["machine"]["usable_cores"] >= 1
    assert data["versions"]["torch"] == torch.__version__
    assert data["plan"]["tokens"] == [1, 6]
    assert data["engines"]["gloo"] == "measured"
    assert data["engines"]["mpi"].startswith("measured" if "mpi" in engines else "not asked for")
    assert [(r["case"]["ranks"], r["case"]["tokens"]) for r in data["results"]] == [(2, 1), (2, 6)]
    assert data["groups"][0]["cam"]["threads"] == 1
    peers = GLOO | (MPI if "mpi" in engines else set())
    for result in data["results"]:
        rows = {(row["contender"], row["phase"]): row for row in result["rows"]}
        assert {c for c, phase in rows if phase == "dispatch"} == CAM_DISPATCH | peers
        assert {c for c, phase in rows if phase == "combine"} == CAM_COMBINE | peers
        assert {c for c, phase in rows if phase == "copy"} == FLOOR
        assert result["rounds"] == 2
        assert result["sent_bytes"]["expert"] == [result["case"]["tokens"] * 2 * 80] * 2
        for row in rows.values():
            assert 0 < row["min"] <= row["q1"] <= row["seconds"] <= row["q3"]
        expert, gloo = rows["cam-expert", "dispatch"], rows["gloo", "dispatch"]
        assert expert["over_gloo"] == pytest.approx(gloo["seconds"] / expert["seconds"])
        if data["groups"][0]["pinned"]:  # ranks that share a core cannot tell Python from waiting for it
            assert 0 < expert["native"] < expert["seconds"]
            assert 0 < expert["python"] < expert["seconds"]
        else:
            assert expert["native"] is expert["python"] is None
        best = min(rows[name, "copy"]["seconds"] for name in ("memcpy", "nontemporal"))
        assert expert["of_floor"] == pytest.approx(best / expert["seconds"])
        best = min(rows[name, "copy"]["seconds"] for name in ("memcpy-rank", "nontemporal-rank"))
        assert rows["cam-rank", "combine"]["of_floor"] == pytest.approx(best / rows["cam-rank", "combine"]["seconds"])
        assert (expert["over_mpi_raw"] is not None) == ("mpi" in engines)


def test_ranks_that_share_cores_are_compared_with_ranks_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.host, "usable_cores", lambda: 1)
    plan = Plan(**(TINY | {"ranks": (1, 2), "tokens": (4,)}), engines=("cam", "gloo"), quant=False)
    report = run(plan, patience_s=60)
    # 1 rank with 4 tokens and 2 with 4, as asked for; 2 with 2, which is as much in all as the first.
    assert [(r.case.ranks, r.case.tokens, r.case.cam_only) for r in report.results] == [
        (1, 4, False),
        (2, 2, True),
        (2, 4, False),
    ]
    assert {(c.contender, c.phase) for c in report.crowding} == {
        ("cam-rank", "dispatch"),
        ("cam-rank", "combine"),
        ("cam-expert", "dispatch"),
        ("cam-expert", "combine"),
        ("cam-expert-outside", "combine"),
    }
    assert {(c.total_tokens, c.base, c.ranks) for c in report.crowding} == {(4, 1, 2)}


def test_a_rank_that_fails_ends_the_run_and_shows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAM_ISA", "abacus")
    with pytest.raises(BenchFailed, match="abacus"):
        run(Plan(**TINY, engines=("cam", "gloo")), patience_s=60)


def test_no_progress_ends_the_run_with_the_case() -> None:
    with pytest.raises(BenchFailed, match="no progress for"):
        run(Plan(**TINY, engines=("gloo",)), patience_s=0.6)


def test_cases_that_do_not_fit_into_memory_are_skipped_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 20)
    report = run(Plan(**TINY, engines=("gloo",)))
    assert report.results == []
    assert [skipped["case"] for skipped in report.skipped] == [
        "2 ranks, T 1, H 40, uniform",
        "2 ranks, T 6, H 40, uniform",
    ]
    assert "GiB" in report.skipped[0]["reason"]


@pytest.mark.parametrize("engines", ["gloo", "gloo,mpi"])
def test_ranks_die_with_a_killed_benchmark(engines: str, tmp_path: Path) -> None:
    if "mpi" in engines and Mpi.find().version is None:
        pytest.skip("no MPI here")
    command = [sys.executable, "-m", "cam.cli", "bench", "ep", "--tokens", "1", "--hidden", "40", "--ranks", "2"]
    options = ["--routing", "uniform", "--rounds", "1000000", "--engines", engines]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    bench = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=environment)
    try:
        ranks = _wait_for(lambda: [pid for pid in _descendants(bench.pid) if _is_worker(pid)], count=2)
        everyone = _descendants(bench.pid)
        assert set(ranks) <= set(everyone)
    finally:
        bench.send_signal(signal.SIGKILL)
        bench.wait()
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in everyone):
        assert time.monotonic() < deadline, f"still alive: {[pid for pid in everyone if _alive(pid)]}"
        time.sleep(0.05)


def _wait_for(find: Any, count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while len(found := find()) < count:
        assert time.monotonic() < deadline, f"found only {found}"
        time.sleep(0.1)
    return list(found)


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for t in os.listdir(f"/proc/{pid}/task") for child in _children(pid, t)]
    except OSError:
        return []
    return children + [deeper for child in children for deeper in _descendants(child)]


def _children(pid: int, thread: str) -> list[str]:
    return Path(f"/proc/{pid}/task/{thread}/children").read_text().split()


def _is_worker(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return words[1:3] == [b"-m", b"cam.bench.worker"]
    except OSError:
        return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- what is right --------------------------------------------------------------------------------------------------


def test_the_golden_result_agrees_with_the_reference() -> None:
    from cam_kernels import reference

    here = case()
    work = make_work(here, 0)
    golden = Golden.find(here, work, 0, Alone())
    received = reference.dispatch([work.x], [work.topk_idx], [work.topk_weights], here.experts, layout="expert")
    assert torch.equal(golden.rows, received[0].x)
    assert torch.equal(golden.source, received[0].source.long())
    assert golden.counts == received[0].expert_counts.tolist()
    assert torch.equal(
        golden.combined(), reference.combine([golden.y], received, [work.topk_weights], layout="expert")[0]
    )
    by_rank = reference.dispatch([work.x], [work.topk_idx], [work.topk_weights], here.experts, layout="rank")
    assert torch.equal(golden.rank_rows, by_rank[0].x)
    wanted = reference.combine([golden.rank_y(golden.rank_rows)], by_rank, layout="rank")[0]
    assert torch.equal(golden.rank_combined(), wanted)


def test_a_wrong_row_is_named() -> None:
    golden = Golden.find(case(), make_work(case(), 0), 0, Alone())
    wrong = golden.rows.clone()
    wrong[4, 2] += 1
    with pytest.raises(WrongResult, match=r"dispatch differs.*1 of 36 rows differ, the first is row 4"):
        golden.expect_equal("somebody", "dispatch", wrong, golden.rows)
    with pytest.raises(WrongResult, match="error"):
        golden.expect_close("somebody", "combine", golden.combined() * 1.2, golden.combined())
    with pytest.raises(WrongResult, match="wanted"):
        golden.expect_equal("somebody", "dispatch", wrong[1:], golden.rows)


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": ()}, "tokens must list numbers >= 1"),
        ({"hidden": (0,)}, "hidden must list numbers >= 1"),
        ({"routing": ("skewed",)}, "routing must be among uniform, zipf; got skewed"),
        ({"layouts": ("row",)}, "layout must be among expert, rank; got row"),
        ({"dtype": "int4"}, "dtype must be among"),
        ({"engines": ("cam",)}, "engines must include gloo"),
        ({"topk": 9, "experts": 8}, r"topk must be in 1..experts \(8\), got 9"),
        ({"ranks": (65,)}, r"ranks must be <= experts \(64\), got 65"),
        ({"rounds": 0}, "rounds must be >= 1, got 0"),
        ({"seconds_per_case": 0.0}, "seconds per case must be > 0"),
    ],
)
def test_a_plan_refuses_what_cannot_be_measured(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(**changes)


def test_quick_only_changes_defaults() -> None:
    assert Plan.quick().tokens == (1, 128)
    assert Plan.quick(tokens=(5,)).tokens == (5,)
    assert Plan.quick(tokens=(5,)).ranks == (2,)


def test_routing_is_reproducible_distinct_and_skewed_where_asked() -> None:
    uniform, zipf = case(tokens=400, experts=64), case(tokens=400, experts=64, routing="zipf")
    for here in (uniform, zipf):
        work, again, other = make_work(here, 1), make_work(here, 1), make_work(here, 2)
        assert torch.equal(work.topk_idx, again.topk_idx)
        assert not torch.equal(work.topk_idx, other.topk_idx)
        assert all(len(set(row)) == here.topk for row in work.topk_idx.tolist())
        assert torch.allclose(work.topk_weights.sum(1), torch.ones(400))
    assert float(popularity(zipf).sum()) == pytest.approx(1)
    busiest = [int(make_work(here, 0).topk_idx.reshape(-1).bincount().max()) for here in (uniform, zipf)]
    assert busiest[1] > 3 * busiest[0]


def test_the_slowest_rank_counts_and_waiting_for_python_is_python() -> None:
    # Rank 1 comes 30 ns later out of Python; rank 0 waits for it inside its native call.
    measured = Measured.of([[(100, 90)] * 3, [(100, 60)] * 3])
    assert measured.total == Summary(*[100e-9] * 4)
    assert measured.python is not None
    assert measured.native is not None
    assert measured.python.median == pytest.approx(40e-9)
    assert measured.native.median == pytest.approx(60e-9)
    assert Measured.of([[(5, None)], [(7, None)]]) == Measured(Summary(*[7e-9] * 4), None, None)


def test_quartiles() -> None:
    assert Summary.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Summary(median=3.0, min=1.0, q1=2.0, q3=4.0)


@pytest.mark.parametrize("crowded", [False, True])
def test_a_rank_that_does_not_come_to_the_start_is_named(crowded: bool, tmp_path: Path) -> None:
    line = StartLine(tmp_path / "line", 0, 3, crowded=crowded, timeout_s=0.2)
    with pytest.raises(Timeout, match=r"ranks \[1, 2\] did not come") as caught:
        line.wait()
    assert caught.value.ranks == (1, 2)


def test_a_start_is_never_before_its_instant(tmp_path: Path) -> None:
    line = StartLine(tmp_path / "line", 0, 1, crowded=False, timeout_s=5)
    starts = [(line.wait(), time.perf_counter_ns()) for _ in range(5)]
    assert all(start <= now for start, now in starts)
    assert sorted(starts) == starts


def test_crowding_pairs_the_same_work() -> None:
    def result(ranks: int, tokens: int, seconds: float) -> CaseResult:
        summary = {"median": seconds, "min": seconds, "q1": seconds, "q3": seconds}
        measured = {
            "contender": "cam-rank",
            "label": "CAM",
            "rows": "rank",
            "phase": "combine",
            "seconds": summary,
            "native_seconds": None,
            "python_seconds": None,
        }
        here = case(ranks=ranks, tokens=tokens)
        return CaseResult.from_event({"case": vars(here), "rounds": 1, "sent_bytes": {}, "results": [measured]})

    found = find_crowding([result(2, 8, 1.0), result(4, 4, 2.5), result(4, 8, 9.0)], base=2)
    assert [(c.total_tokens, c.ratio) for c in found] == [(16, 2.5)]


def test_the_picture_is_drawn_for_each_view(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = Plan(**(TINY | {"routing": ("uniform", "zipf")}), engines=("gloo",))
    report = run(plan, command="cam bench ep", patience_s=60)
    written = picture.draw(report, tmp_path / "new" / "speed.png")
    assert [path.name for path in written] == ["speed.png", "speed-h40-zipf.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
