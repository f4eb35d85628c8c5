"""The two places where DeepSpeed has no seam. For DeepSpeed 0.19.8; later 0.19 releases as long as the checks hold.

1. deepspeed.module_inject.auto_ep_config.validate_autoep_config
   What: accepts comm_backend "cam", after checking that nothing else asks for what cam would ignore.
   Why: the names are a tuple inside the function; there is no registry of transports.
   Upstream: no issue filed; "deepep", the second transport, came as another name in that tuple.

2. deepspeed.runtime.engine.DeepSpeedEngine._configure_distributed_model
   What: before it gives MoE layers their process groups, those that the configuration names are made CAM's.
   Why: layers are built by the user's model, which does not see the configuration, and the engine knows of no
   replacement for MOELayer; sections of the configuration that DeepSpeed does not know are ignored by it.
   Upstream: none filed.

`install` checks its targets and raises TargetChanged, which names what it found. Nothing of cam is imported before a
configuration asks for it.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from cam_deepspeed.autoload import wanted

SERIES = "0.19."
_MARK = "_cam_deepspeed"


class TargetChanged(RuntimeError):
    """DeepSpeed is not as these patches know it."""


def install() -> None:
    """Patches DeepSpeed in this process. Idempotent. Raises TargetChanged before anything is changed."""
    from deepspeed.module_inject import auto_ep_config, auto_ep_layer
    from deepspeed.runtime import engine

    if hasattr(engine.DeepSpeedEngine._configure_distributed_model, _MARK):
        return
    _check_version()
    _check(auto_ep_config.validate_autoep_config, ["config", "world_size", "pp_size", "tp_size", "sp_size"])
    _check(engine.DeepSpeedEngine._configure_distributed_model, ["self", "model"])
    _check(auto_ep_layer.AutoEPMoELayer._deepep_route, ["self", "tokens", "ro"])
    _check_names(auto_ep_layer.AutoEPMoELayer._forward, {"comm_backend", "DEEPEP_BACKEND", "_deepep_route"})
    _check_names(
        engine.DeepSpeedEngine._configure_expert_parallel,
        {"validate_autoep_config", "deepspeed.module_inject.auto_ep_config"},
    )
    auto_ep_config.validate_autoep_config = _validating(auto_ep_config.validate_autoep_config)
    engine.DeepSpeedEngine._configure_distributed_model = _configuring(
        engine.DeepSpeedEngine._configure_distributed_model
    )


def _validating(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def validate_autoep_config(config: Any, *args: Any, **kwargs: Any) -> None:
        if config.enabled and config.comm_backend == "cam":
            from cam_deepspeed.autoep import check_config

            check_config(config)
            config = copy.copy(config)
            config.comm_backend = "comm"  # for the checks that follow: those of a transport with no wishes of its own
        original(config, *args, **kwargs)

    return validate_autoep_config


def _configuring(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _configure_distributed_model(self: Any, model: Any) -> None:
        autoep = self._config.expert_parallel_config
        with_autoep = autoep is not None and autoep.enabled and autoep.comm_backend == "cam"
        if with_autoep or "cam" in self._config._param_dict or wanted():
            _convert(model, self._config._param_dict, with_autoep)
        original(self, model)

    setattr(_configure_distributed_model, _MARK, True)
    return _configure_distributed_model


def _convert(model: Any, config: dict[str, Any], with_autoep: bool) -> None:
    from cam.errors import ConfigError
    from cam_deepspeed.settings import Settings

    settings = Settings.of(config)
    if with_autoep:
        from cam_deepspeed.autoep import convert_autoep

        convert_autoep(model, settings.group)
    # CAM_DEEPSPEED speaks for programs that say nothing themselves, whether they have such layers or not.
    by_variable = "moe" in wanted() and "moe" not in config.get("cam", {})
    if settings.moe or by_variable:
        from cam_deepspeed.moe import convert_moe

        if not convert_moe(model, settings.group) and not by_variable:
            raise ConfigError(
                '"cam": {"moe": true}, but the model has no deepspeed.moe.layer.MoE. (For models that AutoEP converts: '
                '"expert_parallel": {"comm_backend": "cam"})'
            )


def _check_version() -> None:
    found = version("deepspeed")
    if not found.startswith(SERIES):
        raise TargetChanged(f"cam-deepspeed knows DeepSpeed {SERIES}x from 0.19.8 on, found {found}")


def _check(function: Callable[..., Any], first: list[str]) -> None:
    found = list(inspect.signature(function).parameters)
    if found[: len(first)] != first:
        raise TargetChanged(
            f"DeepSpeed {version('deepspeed')}: {function.__qualname__} takes ({', '.join(found)}), expected "
            f"({', '.join(first)})"
        )


def _check_names(function: Callable[..., Any], names: set[str]) -> None:
    missing = names - set(function.__code__.co_names)
    if missing:
        raise TargetChanged(
            f"DeepSpeed {version('deepspeed')}: {function.__qualname__} no longer uses {', '.join(sorted(missing))}"
        )
