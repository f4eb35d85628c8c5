"""`cam bench kv`: the plan, and one small run from the command line to the JSON."""

import json
import subprocess
import sys

import numpy as np
import pytest

from cam import ConfigError
from cam.bench.kv_plan import KvCase, KvPlan, fitting


def test_a_case_moves_what_its_title_says():
    case = KvCase(64, 32, 32)
    assert (case.tokens, case.blocks) == (16, 32)
    assert case.nbytes == 64 << 20
    offsets = case.offsets(case.source())
    assert len(offsets) == len(np.unique(offsets)) == 32 * 64
    assert int(offsets.max()) + case.piece <= case.pool_bytes
    assert sorted(case.source()) != case.source().tolist()
    assert not np.array_equal(case.source(), case.target())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"contenders": ("cam-shm", "nixxl")}, "nixxl"),
        ({"mib": (0,)}, "mib"),
        ({"mib": (1,), "piece_kib": (256,)}, "at least one block"),
        ({"piece_kib": (1,)}, "at least 2 KiB"),
        ({"passes": 0}, "passes"),
        ({"seconds": 0}, "seconds"),
    ],
)
def test_plans_that_make_no_sense_are_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        KvPlan(**fields)


def test_cases_that_do_not_fit_into_memory_are_reported():
    good, skipped = fitting(KvPlan().cases(), 3 << 30)
    assert {case.mib for case in good} == {64, 512}
    assert all("2048 MiB" in each["case"] and "GiB" in each["reason"] for each in skipped)


@pytest.mark.timeout(300)
def test_a_small_run_measures_everybody_and_writes_json(tmp_path):
    path = tmp_path / "kv.json"
    command = [
        sys.executable, "-m", "cam.cli", "bench", "kv", "--mib", "4", "--piece", "32", "--layers", "4", "--passes", "1",
        "--rounds", "2", "--engines", "cam-shm,cam-cma,gloo", "--json", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert report["schema"] == "cam-bench-kv/1"
    (result,) = report["results"]
    rows = {row["contender"]: row for row in result["rows"]}
    assert set(rows) == {"cam-shm", "cam-cma", "gloo", "floor-memcpy", "floor-nontemporal", "floor-contiguous"}
    assert rows["cam-shm"]["over_gloo"] == pytest.approx(
        rows["gloo"]["seconds"]["median"] / rows["cam-shm"]["seconds"]["median"]
    )
    assert rows["cam-shm"]["of_floor"] > 0
    assert rows["cam-shm"]["over_nixl"] is None
    assert result["latency"]["cam-shm"]["1 block of 1 layer, prepared"]["median"] > 0
    assert "CAM shm" in done.stdout
