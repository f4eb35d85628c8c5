"""Where a setting comes from, and what is refused."""

import os
import pickle
from datetime import timedelta
from pathlib import Path

import pytest

import cam
from cam import host
from cam.deadline import seconds


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("CAM_"):
            monkeypatch.delenv(name)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "cam.yaml"
    path.write_text("timeout_s: 7\nthreads: 3\nwindow_limit: 2GiB\n")
    return path


def test_defaults() -> None:
    config = cam.Config()
    assert config.timeout_s == 30.0
    assert config.name == "cam"
    assert config.window_retain == 1 << 30
    assert (config.window_limit, config.spin_us, config.threads) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5KiB", 1536),
        (4096, 4096),
        ("4096", 4096),
        ("auto", None),
    ],
)
def test_sizes_with_units(text: str | int, size: int | None) -> None:
    assert cam.Config(window_limit=text).window_limit == size


def test_arguments_then_environment_then_file(monkeypatch: pytest.MonkeyPatch, yaml_file: Path) -> None:
    assert cam.Config.load(yaml_file).timeout_s == 7
    monkeypatch.setenv("CAM_TIMEOUT_S", "5")
    config = cam.Config.load(yaml_file)
    assert (config.timeout_s, config.threads, config.window_limit) == (5, 3, 2 << 30)
    assert cam.Config.load(yaml_file, timeout_s=4).timeout_s == 4
    assert cam.Config(timeout_s=4).timeout_s == 4
    assert cam.Config().timeout_s == 5


def test_file_named_by_environment(monkeypatch: pytest.MonkeyPatch, yaml_file: Path) -> None:
    monkeypatch.setenv("CAM_CONFIG", str(yaml_file))
    assert (cam.Config().timeout_s, cam.Config().threads) == (7, 3)
    assert cam.Config(threads=1).threads == 1
    monkeypatch.setenv("CAM_THREADS", "2")
    assert cam.Config().threads == 2


def test_replace_keeps_the_rest_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    config = cam.Config(timeout_s=4, threads=2)
    monkeypatch.setenv("CAM_THREADS", "9")
    assert config.replace(timeout_s=6) == config.model_copy(update={"timeout_s": 6.0})


def test_unknown_argument_names_the_near_miss() -> None:
    with pytest.raises(cam.ConfigError, match=r"'timout_s'.*'timeout_s'"):
        cam.Config(timout_s=3)


def test_unknown_variable_names_the_near_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAM_WINDOW_LIMITS", "4GB")
    with pytest.raises(cam.ConfigError, match=r"CAM_WINDOW_LIMITS.*'CAM_WINDOW_LIMIT'"):
        cam.Config()


def test_a_variable_that_an_installed_adapter_announces_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAM_SOMEADAPTER", "1")
    with pytest.raises(cam.ConfigError, match="CAM_SOMEADAPTER"):
        cam.Config()
    installed = tmp_path / "cam_someadapter-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: cam-someadapter\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[cam.variables]\nCAM_SOMEADAPTER = cam_someadapter\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cam.Config()


def test_unknown_key_of_a_file_names_the_near_miss(tmp_path: Path) -> None:
    path = tmp_path / "cam.yaml"
    path.write_text("spinus: 3\n")
    with pytest.raises(cam.ConfigError, match=r"cam\.yaml.*'spinus'.*'spin_us'"):
        cam.Config.load(path)


def test_a_key_like_no_other_lists_what_is_known() -> None:
    with pytest.raises(cam.ConfigError, match=r"known are .*isa, name, .*window_retain"):
        cam.Config(qqq=1)


@pytest.mark.parametrize("content", ["- 1\n- 2\n", "a: [", "3\n"])
def test_a_file_that_is_no_mapping_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cam.yaml"
    path.write_text(content)
    with pytest.raises(cam.ConfigError, match=r"cam\.yaml"):
        cam.Config.load(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(cam.ConfigError, match="absent"):
        cam.Config.load(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    "fields",
    [
        {"timeout_s": 0},
        {"timeout_s": -1},
        {"timeout_s": float("inf")},
        {"timeout_s": "soon"},
        {"window_limit": 0},
        {"window_limit": "4 parsecs"},
        {"threads": 0},
        {"spin_us": -1},
        {"isa": "mmx"},
        {"name": ""},
    ],
)
def test_a_wrong_value_names_field_value_and_variable(fields: dict[str, object]) -> None:
    ((field, value),) = fields.items()
    with pytest.raises(cam.ConfigError) as caught:
        cam.Config(**fields)
    assert f"{field} = {value!r}" in str(caught.value)
    assert f"CAM_{field.upper()}" in str(caught.value)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        cam.Config().timeout_s = 3  # type: ignore[misc]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "1", timedelta(0)])
def test_a_timeout_is_finite_and_positive(timeout: object) -> None:
    with pytest.raises(cam.InputError, match="timeout must be finite and > 0"):
        seconds(timeout, 1.0)  # type: ignore[arg-type]


def test_a_timeout_is_seconds_or_a_timedelta() -> None:
    assert seconds(None, 30.0) == 30.0
    assert seconds(2, 30.0) == 2.0
    assert seconds(timedelta(milliseconds=250), 30.0) == 0.25


def test_memory_and_cores_are_capped_by_cgroups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Version 2 at the group itself, version 1 at an ancestor; a group that is not mounted here does not
    count."""
    files = {
        "a/b/memory.max": "max",
        "a/memory.max": str(6 << 20),
        "memory/x/memory.limit_in_bytes": str(5 << 20),
        "a/b/cpu.max": "100000 100000",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    mine = tmp_path / "cgroup"
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host, "_MINE", mine)
    mine.write_text("0::/a/b\n")
    assert host.usable_memory() == 6 << 20
    assert host.usable_cores() == 1
    mine.write_text("4:memory:/x/gone\n0::/\n")
    assert host.usable_memory() == 5 << 20
    mine.write_text("")
    assert host.usable_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert host.usable_cores() == len(os.sched_getaffinity(0))


def test_errors_survive_pickling_with_their_fields() -> None:
    error = cam.Timeout("late", operation="dispatch", phase="counts", ranks=[1, 3], waited_s=2.5)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, TimeoutError)
    assert (str(copy), copy.operation, copy.phase, copy.ranks, copy.waited_s) == (
        "late",
        "dispatch",
        "counts",
        (1, 3),
        2.5,
    )
    full = pickle.loads(pickle.dumps(cam.OutOfWindowMemory("full", rank=2, requested=9, allocated=8, limit=10)))
    assert isinstance(full, MemoryError)
    assert (full.rank, full.requested, full.allocated, full.limit) == (2, 9, 8, 10)
