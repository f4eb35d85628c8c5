"""Configuration, the shared secret, and the version check."""

import multiprocessing
import stat
from pathlib import Path

import pytest

from cam.errors import ConfigError
from cam_vllm import secret, versions
from cam_vllm.options import Options


def test_an_empty_configuration_has_defaults() -> None:
    options = Options.parse({})
    assert (options.transport, options.kv_memory, options.listen) == ("auto", "auto", "127.0.0.1")
    assert options.engine_options().lease_s == options.lease_s


def test_every_option_reaches_the_engine() -> None:
    given = {
        "lease_s": 5, "timeout_s": 7, "checksum": True, "threads": 2, "memory_limit": "64MiB", "advertise": "10.0.0.1",
        "nixl_backends": ["UCX"], "mooncake_protocol": "ascend", "mooncake_device": "d0",
    }  # fmt: skip
    engine = Options.parse(given).engine_options()
    assert (engine.lease_s, engine.timeout_s, engine.checksum, engine.threads) == (5, 7, True, 2)
    assert engine.memory_limit == 64 << 20
    assert (engine.advertise, engine.mooncake_protocol, engine.mooncake_device) == ("10.0.0.1", "ascend", "d0")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lease": 5}, "did you mean 'lease_s'"),
        ({"zzz": 5}, "known are"),
        ({"lease_s": -1}, "'lease_s'"),
        ({"kv_memory": "gpu"}, "'kv_memory'"),
        ({"checksum": "sometimes"}, "checksum"),
    ],
)
def test_wrong_options_are_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options.parse(given)


def _load(home: str, queue: "multiprocessing.Queue[bytes]") -> None:
    import os

    os.environ["XDG_STATE_HOME"] = home
    queue.put(secret.load(None))


def test_servers_that_start_together_agree_on_one_secret(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[bytes] = context.Queue()
    processes = [context.Process(target=_load, args=(str(tmp_path), queue)) for _ in range(4)]
    for process in processes:
        process.start()
    found = {queue.get(timeout=20) for _ in processes}
    for process in processes:
        process.join(20)
    assert len(found) == 1
    (file,) = (tmp_path / "cam").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_secret_that_others_can_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        secret.load(str(file))
    file.chmod(0o600)
    assert secret.load(str(file)) == b"0123456789abcdef"
    file.write_text("short")
    with pytest.raises(ConfigError, match="16 are the least"):
        secret.load(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        secret.load(str(tmp_path / "missing"))


@pytest.mark.parametrize("found", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.0rc1"])
def test_supported_versions(found: str) -> None:
    versions.check(found)


@pytest.mark.parametrize("found", ["0.31.9", "0.33.0", "1.0"])
def test_other_versions_are_refused_with_both(found: str) -> None:
    with pytest.raises(versions.UnsupportedVllm, match=found):
        versions.check(found)
