"""The CAM group of DeepSpeed's expert-parallel ranks."""

import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.constants import default_pg_timeout

import cam
from cam.errors import ConfigError

#: By the process group's name, which torch keeps unique among the groups that are alive.
_joined: "dict[str, tuple[weakref.ref[dist.ProcessGroup], cam.Group, Mapping[str, Any]]]" = {}


def expert_group(process_group: dist.ProcessGroup, fields: Mapping[str, Any]) -> cam.Group:
    """The CAM group over the same ranks; joined, by all of them, when it is asked for first.

    It ends when nothing holds the process group any more, or when torch uses the process group's name again.

    fields: of cam.Config. The default deadline is DeepSpeed's, not cam's: ranks of a training job may be late by
    minutes (a checkpoint, the first batch), and a rank that has died is noticed at once in any case.

    Raises what cam.init raises. Whether the ranks can reach each other is cam.ep.Buffer's to say.
    """
    name = process_group.group_name
    known = _joined.get(name)
    if known is not None:
        process_group_then, joined, fields_then = known
        if process_group_then() is process_group:
            if fields_then != fields:
                raise ConfigError(
                    f"the expert-parallel group {name!r} was joined with {dict(fields_then)}, not with {dict(fields)}: "
                    'engines that share it need the same "cam": {"group": ...}'
                )
            return joined
        joined.close()  # of a process group that was destroyed since
        del _joined[name]
    defaults: dict[str, Any] = {}
    if "CAM_TIMEOUT_S" not in os.environ:
        defaults["timeout_s"] = default_pg_timeout.total_seconds()
    joined = cam.init(process_group, name=f"deepspeed.{name}", **(defaults | dict(fields)))
    _joined[name] = (weakref.ref(process_group), joined, dict(fields))
    # Layers hold their process group, so nobody can be using the CAM group when that one is gone.
    weakref.finalize(process_group, joined.close)
    return joined
