"""--kv-connector and --kv-role, as `vllm serve` parses them."""

import argparse
from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm runs these")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from adapters.vllm.examples import tiny_models
from cam.errors import ConfigError
from cam_vllm import patches, plugin

Parse = Callable[..., AsyncEngineArgs]


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Parse:
    model = str(tiny_models.make("dense", tmp_path_factory.mktemp("models")))

    def parse(*arguments: str) -> AsyncEngineArgs:
        plugin.register()
        parser = make_arg_parser(FlexibleArgumentParser())
        return AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", model, *arguments]))

    return parse


def test_the_short_options_name_a_connector(parsed: Parse) -> None:
    config = parsed("--kv-connector", "cam", "--kv-role", "kv_producer").kv_transfer_config
    assert (config.kv_connector, config.kv_role) == ("cam", "kv_producer")
    assert parsed("--kv-connector", "cam").kv_transfer_config.kv_role == "kv_both"
    assert parsed().kv_transfer_config is None


def test_the_long_form_still_works(parsed: Parse) -> None:
    config = parsed("--kv-transfer-config", '{"kv_connector": "cam", "kv_role": "kv_consumer"}').kv_transfer_config
    assert (config.kv_connector, config.kv_role) == ("cam", "kv_consumer")
    dotted = parsed("--kv-transfer-config.kv_connector", "cam", "--kv-transfer-config.kv_role", "kv_both")
    assert dotted.kv_transfer_config.kv_connector == "cam"


def test_contradictions_are_refused(parsed: Parse) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        parsed("--kv-connector", "cam", "--kv-transfer-config", '{"kv_connector": "cam", "kv_role": "kv_both"}')
    with pytest.raises(ConfigError, match="needs --kv-connector"):
        parsed("--kv-role", "kv_both")
    with pytest.raises(SystemExit):
        parsed("--kv-connector", "cam", "--kv-role", "reader")


def test_the_plugin_runs_twice_and_finds_its_class() -> None:
    plugin.register()
    plugin.register()
    from cam_vllm.connector import CamConnector

    assert KVConnectorFactory.get_connector_class_by_name("cam") is CamConnector


def test_a_changed_target_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_cli_args(cls: type, args: argparse.Namespace, more: int) -> None:
        raise NotImplementedError

    monkeypatch.delattr(EngineArgs, patches._MARK, raising=False)
    monkeypatch.setattr(EngineArgs, "add_cli_args", staticmethod(lambda parser: parser))
    monkeypatch.setattr(EngineArgs, "from_cli_args", classmethod(from_cli_args))
    with pytest.raises(patches.PatchTargetChanged, match="from_cli_args"):
        patches.add_command_line_options()
