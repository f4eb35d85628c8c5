"""The one place where vLLM itself is changed.

Patch: options --kv-connector and --kv-role.
- What: EngineArgs.add_cli_args and EngineArgs.from_cli_args are wrapped.
- Why: vLLM takes a connector only as JSON (--kv-transfer-config), and plugins have no hook for options; general plugins
  are loaded before the parser is filled, so a wrapped add_cli_args is what fills it.
- Upstream: no issue known.
- Versions: those of versions.SUPPORTED.
- Check: both functions must exist with the signatures below, else PatchTargetChanged.
"""

import argparse
import functools
import inspect
from typing import Any

from cam.errors import CamError, ConfigError

_MARK = "_cam_vllm_wrapped"
_ROLES = ("kv_producer", "kv_consumer", "kv_both")


class PatchTargetChanged(CamError):
    """vLLM's code is not what a patch was written for."""


def add_command_line_options() -> None:
    """Idempotent."""
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs, _MARK, False):
        return
    add = _target(EngineArgs, "add_cli_args", staticmethod, ["parser"])
    from_args = _target(EngineArgs, "from_cli_args", classmethod, ["cls", "args"])

    @functools.wraps(add)
    def add_cli_args(parser: Any) -> Any:
        parser = add(parser)
        _add_options(parser)
        return parser

    @functools.wraps(from_args)
    def from_cli_args(cls: type, args: argparse.Namespace) -> Any:
        return from_args(cls, _folded(args))

    EngineArgs.add_cli_args = staticmethod(add_cli_args)
    EngineArgs.from_cli_args = classmethod(from_cli_args)
    setattr(EngineArgs, _MARK, True)


def _target(owner: type, name: str, kind: type, parameters: list[str]) -> Any:
    found = vars(owner).get(name)
    function = found.__func__ if isinstance(found, (staticmethod, classmethod)) else None
    if not isinstance(found, kind) or function is None or list(inspect.signature(function).parameters) != parameters:
        raise PatchTargetChanged(f"{owner.__name__}.{name} is no {kind.__name__} of ({', '.join(parameters)}) any more")
    return function


def _add_options(parser: Any) -> None:
    group = parser.add_argument_group(title="CAM", description="Short forms of --kv-transfer-config.")
    group.add_argument("--kv-connector", default=None, metavar="NAME", help="KV connector, such as cam.")
    group.add_argument(
        "--kv-role", default=None, choices=_ROLES, help="With --kv-connector: what this server does. Default: kv_both."
    )


def _folded(args: argparse.Namespace) -> argparse.Namespace:
    """The same arguments with the short forms as a KVTransferConfig."""
    connector, role = getattr(args, "kv_connector", None), getattr(args, "kv_role", None)
    if connector is None and role is None:
        return args
    if connector is None:
        raise ConfigError(f"--kv-role {role} needs --kv-connector")
    if getattr(args, "kv_transfer_config", None) is not None:
        raise ConfigError(
            "--kv-connector and --kv-transfer-config exclude each other: name the connector in one of them"
        )
    from vllm.config import KVTransferConfig

    folded = argparse.Namespace(**vars(args))
    folded.kv_transfer_config = KVTransferConfig(kv_connector=connector, kv_role=role or "kv_both")
    return folded
