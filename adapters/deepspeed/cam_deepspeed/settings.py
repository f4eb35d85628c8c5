"""The section "cam" of a DeepSpeed configuration."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cam.errors import ConfigError

SECTION = "cam"


@dataclass(frozen=True)
class Settings:
    """For example: "cam": {"moe": true, "group": {"window_limit": "4GB"}}

    moe: deepspeed.moe.layer.MoE layers dispatch and combine with cam.ep.
    group: fields of cam.Config for the groups of expert-parallel ranks; CAM_* variables fill in what is missing.
        timeout_s is DeepSpeed's own (DEEPSPEED_TIMEOUT) where neither says otherwise.
    """

    moe: bool = False
    group: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, deepspeed_config: Mapping[str, Any]) -> "Settings":
        """Raises ConfigError: unknown key (with the near miss), wrong type."""
        section = deepspeed_config.get(SECTION, {})
        if not isinstance(section, Mapping):
            raise ConfigError(f'"{SECTION}" must be a section, {{"moe": true}} for example, got {section!r}')
        known = [each.name for each in fields(cls)]
        for key in section:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
                raise ConfigError(f'unknown key {key!r} in section "{SECTION}"{hint}')
        settings = cls(**section)
        if not isinstance(settings.moe, bool):
            raise ConfigError(f'"{SECTION}": "moe" must be true or false, got {settings.moe!r}')
        if not isinstance(settings.group, Mapping) or "name" in settings.group:
            raise ConfigError(
                f'"{SECTION}": "group" holds fields of cam.Config, except "name", which follows the process group; '
                f"got {settings.group!r}"
            )
        return settings
