"""How this package learns that DeepSpeed is being imported.

torch calls `autoload` at `import torch` (entry point group torch.backends), often in the middle of `import deepspeed`.
It must be quick and must not raise, so it only leaves a finder that waits for one module: when deepspeed.runtime.engine
has been executed, all that the patches touch can be imported, and no engine exists yet.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TARGET = "deepspeed.runtime.engine"
VARIABLE = "CAM_DEEPSPEED"
CHOICES = frozenset({"backend", "moe"})


class _Finder(MetaPathFinder):
    """Finds TARGET as Python would, and has its loader call _loaded afterwards. Then it leaves sys.meta_path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TARGET:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            sys.meta_path.remove(self)
            _loaded()

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


def autoload() -> None:
    """Has DeepSpeed patched when it is imported, or now if it has been. Idempotent; imports nothing by itself."""
    if TARGET in sys.modules:
        # Half imported means that the finder is at work.
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            _loaded()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def wanted() -> frozenset[str]:
    """What CAM_DEEPSPEED asks for in programs that do not ask themselves: "backend", "moe". Raises ConfigError."""
    text = os.environ.get(VARIABLE, "").strip()
    spelt_out = {"0": "", "1": "backend"}.get(text, text)
    chosen = frozenset(part for each in spelt_out.split(",") if (part := each.strip()))
    if chosen - CHOICES:
        from cam.errors import ConfigError

        raise ConfigError(f"{VARIABLE} must be 1, 0 or of {', '.join(sorted(CHOICES))}; got {text!r}")
    return chosen


def _loaded() -> None:
    chosen = wanted()
    patches = importlib.import_module("cam_deepspeed.patches")
    try:
        patches.install()
    except patches.TargetChanged as error:
        if chosen:
            raise
        # Whoever has only installed this package must still be able to use DeepSpeed.
        warnings.warn(f"DeepSpeed runs without cam's MoE: {error}", RuntimeWarning, stacklevel=2)
    if "backend" in chosen:
        importlib.import_module("cam_deepspeed.default_backend").use_cam()
