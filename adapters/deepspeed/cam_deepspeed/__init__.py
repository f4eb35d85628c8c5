"""DeepSpeed on CAM.

Installed beside DeepSpeed, it needs no import: `import torch` finds it (autoload), and when DeepSpeed is imported it
teaches it two things (patches):

    "cam": {"moe": true}                                deepspeed.moe.layer.MoE dispatches and combines with cam.ep
    "expert_parallel": {"comm_backend": "cam", ...}     AutoEP does

`deepspeed.init_distributed(dist_backend="cam")` needs nothing of this package: the backend is cam's own.
CAM_DEEPSPEED=1, or `cam_deepspeed.use_cam()`, makes it DeepSpeed's default. CAM_DEEPSPEED=backend,moe also makes MoE
layers CAM's where the configuration says nothing about them.

Importing this package imports neither torch nor DeepSpeed.
"""

from typing import Any

from cam_deepspeed.autoload import autoload

__all__ = ["convert_moe", "use_cam"]

autoload()  # for those who have switched off torch's autoload


def __getattr__(name: str) -> Any:
    if name == "use_cam":
        from cam_deepspeed.default_backend import use_cam

        return use_cam
    if name == "convert_moe":
        from cam_deepspeed.moe import convert_moe

        return convert_moe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
