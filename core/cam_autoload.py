"""Makes torch.distributed know the backend `cam`; called by `import torch` (entry point group torch.backends).

Beside the package, not in it, because it runs in every process that imports torch, of people who may never use CAM: it
imports nothing of CAM, and an exception here would break `import torch` for the whole environment.
TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns such entry points off; `cam_autoload.register()` can then be called by hand.
"""

import contextlib
from typing import Any


def register() -> None:
    """Registers the backend, once. Never raises."""
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and "CAM" not in dist.Backend._plugins:
            # For cpu alone: a backend that names a device also becomes that device's default if it has none yet, and
            # npu's is hccl, whichever is imported first. "cpu:cam,npu:hccl" says both.
            dist.Backend.register_backend("cam", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> Any:
    from cam.collectives.process_group import create

    return create(options, backend_options)
