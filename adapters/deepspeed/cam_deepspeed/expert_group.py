"""The CAM group of DeepSpeed's expert-parallel ranks."""

import os
import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.constants import default_pg_timeout

import cam
from cam.errors import ConfigError


class ExpertGroup:
    """A CAM group for as long as layers hold this object: then it is closed.

    group: over the ranks of process_group. fields: of cam.Config, as it was joined with.
    """

    def __init__(self, process_group: dist.ProcessGroup, group: cam.Group, fields: Mapping[str, Any]) -> None:
        self.process_group, self.group, self.fields = process_group, group, dict(fields)
        weakref.finalize(self, group.close)


#: By the process group's name, which torch keeps unique among the groups that are alive.
_joined: "weakref.WeakValueDictionary[str, ExpertGroup]" = weakref.WeakValueDictionary()


def expert_group(process_group: dist.ProcessGroup, fields: Mapping[str, Any]) -> ExpertGroup:
    """The CAM group over the same ranks; joined, by all of them, when it is asked for first.

    fields: of cam.Config. The default deadline is DeepSpeed's, not cam's: ranks of a training job may be late by
    minutes (a checkpoint, the first batch), and a rank that has died is noticed at once in any case.

    Raises what cam.init raises. Whether the ranks can reach each other is cam.ep.Buffer's to say.
    """
    name = process_group.group_name
    known = _joined.get(name)
    if known is not None and known.process_group is process_group:
        if known.fields != fields:
            raise ConfigError(
                f"the expert-parallel group {name!r} was joined with {known.fields}, not with {dict(fields)}: engines "
                'that share it need the same "cam": {"group": ...}'
            )
        return known
    if known is not None:
        # Of a process group that was destroyed since; an engine is never let go of by DeepSpeed, nor are its layers.
        known.group.close()
    defaults: dict[str, Any] = {}
    if "CAM_TIMEOUT_S" not in os.environ:
        defaults["timeout_s"] = default_pg_timeout.total_seconds()
    group = cam.init(process_group, name=f"deepspeed.{name}", **(defaults | dict(fields)))
    joined = ExpertGroup(process_group, group, fields)
    _joined[name] = joined
    return joined
