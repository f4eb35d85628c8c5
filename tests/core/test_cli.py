"""The `cam` command: what people type, and what they get when it is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from cam.bench import benchmark
from cam.bench.launch import BenchFailed
from cam.bench.world import WorldSpec
from cam.cli import app, demo
from cam.demo import compare
from cam.demo.compare import StepComparison, check_moved, compare_steps
from cam.demo.conduct import DemoFailed, Outcome, conduct
from cam.demo.moe import Shape

WIDE = {"COLUMNS": "200", "TERM": "dumb"}
TINY = ["--tokens", "3", "--hidden", "24", "--ranks", "2", "--routing", "uniform", "--experts", "8", "--topk", "2"]


def cam(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=WIDE | environment)


def test_doctor_says_what_is_there() -> None:
    result = cam("doctor")
    assert result.exit_code == 0, result.output
    for expected in ("cores", "memory", "kernels", "portable", "memfd", "pidfd", "boot id", torch.__version__):
        assert expected in result.output
    assert "window_limit" in result.output
    assert "default (CAM_TIMEOUT_S)" in result.output
    assert "CAM can work here." in result.output


def test_doctor_says_where_a_setting_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "cam.yaml"
    file.write_text("window_limit: 64MiB\n")
    result = cam("doctor", CAM_TIMEOUT_S="5", CAM_CONFIG=str(file))
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.output.splitlines() if line.split()}
    assert "5.0" in lines["timeout_s"]
    assert lines["timeout_s"].rstrip().endswith("CAM_TIMEOUT_S")
    assert "67108864" in lines["window_limit"]
    assert str(file) in lines["window_limit"]


def test_doctor_refuses_a_configuration_that_cam_would_refuse() -> None:
    result = cam("doctor", CAM_TIMOUT_S="5")
    assert result.exit_code == 1
    assert "CAM_TIMEOUT_S" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "many"], "tokens must be a list of whole numbers such as 1,32; got 'many'"),
        (["--routing", "skewed"], "routing must be among uniform, zipf; got skewed"),
        (["--topk", "65"], "topk must be in 1..experts (64), got 65"),
        (["--dtype", "int4"], "dtype must be among bfloat16, float16, float32; got int4"),
        (["--engines", "cam"], "engines must include gloo"),
        (["--tokns", "1"], "No such option"),
    ],
)
def test_bench_refuses_bad_options(options: list[str], message: str) -> None:
    result = cam("bench", "ep", *options)
    assert result.exit_code == 2
    assert message in result.output


def test_bench_writes_its_results_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results, png = tmp_path / "deep" / "results.json", tmp_path / "speed.png"
    options = ["--rounds", "2", "--engines", "cam,gloo", "--json", str(results), "--png", str(png)]
    result = cam("bench", "ep", *TINY, *options)
    assert result.exit_code == 0, result.output
    assert "2 ranks, T 3, H 24, uniform" in result.output
    assert "CAM expert layout" in result.output
    assert len(json.loads(results.read_text())["results"]) == 1
    assert png.read_bytes().startswith(b"\x89PNG")


def test_bench_keeps_what_it_measured_before_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = benchmark.run_world

    def second_group_fails(spec: WorldSpec, *arguments: Any, **options: Any) -> None:
        if spec.ranks > 1:
            raise BenchFailed("the machine is on fire")
        whole(spec, *arguments, **options)

    monkeypatch.setattr(benchmark, "run_world", second_group_fails)
    results = tmp_path / "results.json"
    tiny = ["--tokens", "3", "--hidden", "24", "--ranks", "1,2", "--routing", "uniform", "--rounds", "1"]
    result = cam("bench", "ep", *tiny, "--engines", "gloo", "--json", str(results))
    assert result.exit_code == 1
    assert "the machine is on fire" in result.output
    assert [r["case"]["ranks"] for r in json.loads(results.read_text())["results"]] == [1]


def test_bench_tells_a_failure_in_words() -> None:
    result = cam("bench", "ep", *TINY, "--engines", "gloo", "--patience", "0.3")
    assert result.exit_code == 1
    assert "BenchFailed" in result.output
    assert "Traceback" not in result.output


# --- the demo -------------------------------------------------------------------------------------------------------


SMALL = Shape(hidden=32, intermediate=48, experts=5, topk=2, tokens=(7, 0, 4), steps=2, learning_rate=1.0)


def test_the_demo_trains_alike_in_many_processes_and_in_one() -> None:
    outcome = conduct(SMALL, deadline_s=60)
    assert outcome.agrees
    assert len(outcome.steps) == 2
    assert outcome.steps[1].loss < outcome.steps[0].loss
    assert len(outcome.checks) == 3


def test_the_demo_fails_loudly_when_the_models_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    step = StepComparison(loss=1.0, whole_loss=1.1, out=0.0, gradients=dict.fromkeys(compare.GRADIENTS, 0.0))
    monkeypatch.setattr(demo, "conduct", lambda _: Outcome([step], []))
    result = cam("demo", "--no-speeds")
    assert result.exit_code == 1
    assert "DIFFERS" in result.output
    assert "The two models differ." in result.output


def test_the_demo_fails_loudly_when_a_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAM_ISA", "abacus")
    with pytest.raises(DemoFailed, match="abacus"):
        conduct(SMALL, deadline_s=60)


def test_a_small_difference_is_found() -> None:
    whole = {name: torch.ones(4, 3) for name in ("out", *compare.GRADIENTS)} | {"loss": torch.tensor(2.0)}
    halves = [
        {name: part[:2] if rank == 0 else part[2:] for name, part in whole.items() if part.dim()}
        | {"loss": torch.tensor(1.0), "router": whole["router"]}
        for rank in range(2)
    ]
    assert compare_steps([[halves[0]], [halves[1]]], [whole])[0].agrees
    for name in ("out", *compare.GRADIENTS):
        wrong = [dict(half) for half in halves]
        wrong[0][name] = wrong[0][name].clone()
        wrong[0][name][0, 0] += 1e-4
        assert not compare_steps([[wrong[0]], [wrong[1]]], [whole])[0].agrees
    wrong = [halves[0] | {"loss": torch.tensor(1.0001)}, halves[1]]
    assert not compare_steps([[wrong[0]], [wrong[1]]], [whole])[0].agrees


def test_a_token_that_came_back_wrong_is_found() -> None:
    shape = Shape(hidden=4, experts=4, topk=1, tokens=(2,))
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]).bfloat16()
    moved = {"x": x, "experts": torch.tensor([[0], [3]]), "weights": torch.ones(2, 1)}
    right = moved | {"expert": x, "rank": x, "int8": x * 1.005}
    assert all(check.holds for check in check_moved([right], shape))
    assert [check.holds for check in check_moved([right | {"expert": x.flip(0)}], shape)] == [False, True, True]
    assert [check.holds for check in check_moved([right | {"rank": x[:1]}], shape)] == [True, False, True]
    assert [check.holds for check in check_moved([right | {"int8": x * 1.05}], shape)] == [True, True, False]
