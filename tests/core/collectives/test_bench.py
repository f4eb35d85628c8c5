"""`cam bench collectives`: a small run of everything, and plans that are refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cam.bench import collectives
from cam.bench.collectives import CollectivesPlan
from cam.cli import app
from cam.errors import ConfigError


def cam(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "collectives", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_a_small_run_measures_and_checks_everything(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    sizes = ("--sizes", "4KiB,100KiB", "--rounds", "2", "--ranks", "2")
    result = cam(*sizes, "--engines", "cam,gloo", "--json", str(file))
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["schema"] == collectives.SCHEMA
    seen = {(each["case"]["operation"], each["case"]["dtype"]) for each in report["results"]}
    assert {name for name, _ in seen} == set(collectives.OPERATIONS)
    assert ("all_reduce", "bfloat16") in seen
    for each in report["results"]:
        assert {"cam", "gloo"} <= set(each["seconds"])
        assert all(times["median"] > 0 for times in each["seconds"].values())
    assert "not asked for" in report["engines"]["mpi"]
    assert "cam x Gloo" in result.output


def test_arguments_are_checked() -> None:
    for arguments, message in (
        (("--operations", "all_shuffle"), "all_shuffle"),
        (("--sizes", "big"), "64KiB"),
        (("--ranks", "two"), "whole number"),
        (("--engines", "cam"), "gloo"),
    ):
        result = cam(*arguments)
        assert result.exit_code == 2
        assert message in result.output
    with pytest.raises(ConfigError, match="rounds"):
        CollectivesPlan(rounds=0)
