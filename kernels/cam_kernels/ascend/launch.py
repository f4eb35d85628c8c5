"""Run kernels: on this CPU from their Ascend IR, or on an NPU through triton-ascend.

Both launchers take the same call, so the host code of an operation is written once:

    launcher.launch(kernel, grid, *arguments, CONSTANT=value)
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from cam_kernels.ascend import hivm, hivm_native, linalg, native
from cam_kernels.ascend.cache import ArtefactCache
from cam_kernels.ascend.errors import LaunchError
from cam_kernels.ascend.kernel import Constant, Kernel, Variant

_SCALARS: dict[str, Any] = {
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}


class Launcher(Protocol):
    """Starts kernels in order: a launch sees all that earlier launches of the same launcher stored."""

    cores: int
    """How many programs run at once; operations take it as their grid."""

    def launch(self, kernel: Kernel, grid: int, *arguments: object, **constants: Constant) -> None: ...

    def finish(self) -> None:
        """Return when every launch has ended, so that the host may read its results."""
        ...


class NativeKernel:
    """A variant compiled for this CPU, callable for one program id.

    final: made from final HIVM and not from linalg IR. The two differ in how a program learns its id: from its last
    arguments, or from the block index of its core.
    """

    def __init__(self, module: linalg.LinalgModule, library: Path, *, final: bool = False) -> None:
        self.name = module.entry
        self._final = final
        self._library = ctypes.CDLL(str(library))
        self._entry = getattr(self._library, module.entry)
        self._entry.restype = None
        self.user_types = module.argument_types[linalg.LEADING_ARGUMENTS : -linalg.TRAILING_ARGUMENTS]

    def pack(self, arguments: Sequence[object]) -> list[Any]:
        """C arguments for these values: leading ones of the ABI included, grid and program id not."""
        if len(arguments) != len(self.user_types):
            raise LaunchError(f"kernel {self.name} takes {len(self.user_types)} arguments, given {len(arguments)}")
        # Lock and workspace; before them, in final HIVM, the address that cores synchronise by.
        packed: list[Any] = [ctypes.c_int64(0)] if self._final else []
        packed += _memref(0, 0) * linalg.LEADING_ARGUMENTS
        for kind, value in zip(self.user_types, arguments, strict=True):
            if kind.startswith("memref"):
                if not isinstance(value, torch.Tensor) or not value.is_contiguous() or value.device.type != "cpu":
                    raise LaunchError(f"kernel {self.name}: a contiguous CPU tensor is needed for {kind}")
                packed += _memref(value.data_ptr(), value.numel())
            elif kind in _SCALARS:
                packed.append(_SCALARS[kind](value))
            else:
                raise LaunchError(f"kernel {self.name}: argument type {kind} has no C form here")
        return packed

    def run(self, packed: list[Any], grid: int, program: int) -> None:
        """Run one program id. ctypes lets go of the GIL meanwhile."""
        sizes = [ctypes.c_int32(v) for v in (grid, 1, 1)]
        if self._final:
            self._library.cam_begin_block(ctypes.c_int64(program))
            self._entry(*packed, *sizes)
        else:
            self._library.cam_begin_program()
            self._entry(*packed, *sizes, *[ctypes.c_int32(v) for v in (program, 0, 0)])


def _memref(address: int, elements: int) -> list[Any]:
    pointer = ctypes.c_void_p(address)
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(elements), ctypes.c_int64(1)]


class NativeLauncher:
    """Runs Ascend IR on this CPU.

    cores: grid size that operations use, whatever this machine has. It stands for the vector cores of a device.
    threads: how many program ids run at the same time. Kernels of this package have no order between their programs,
        so any number gives the same result; with one thread they run in ascending order.
    Libraries are shared by all launchers of the process.
    """

    _loaded: dict[tuple[Variant, str], NativeKernel] = {}  # noqa: RUF012  (a cache for the process, guarded by _lock)
    _lock = threading.Lock()

    def __init__(self, *, cores: int = 4, threads: int = 1, cache: ArtefactCache | None = None) -> None:
        if cores < 1 or threads < 1:
            raise LaunchError(f"cores and threads must be positive, given {cores} and {threads}")
        self.cores = cores
        self._cache = cache or ArtefactCache()
        self._pool = ThreadPoolExecutor(threads, "cam-ascend-core") if threads > 1 else None

    def load(self, variant: Variant) -> NativeKernel:
        """Compile a variant, or take it from the process's or the disk's cache."""
        with self._lock:
            key = (variant, self._form)
            found = self._loaded.get(key)
            if found is None:
                found = self._loaded[key] = self._compile(linalg.lower(variant, self._cache))
            return found

    _form = "linalg"

    def _compile(self, module: linalg.LinalgModule) -> NativeKernel:
        return NativeKernel(module, native.build(module, self._cache))

    def launch(self, kernel: Kernel, grid: int, *arguments: object, **constants: Constant) -> None:
        """Run all programs of a launch; returns when they have ended."""
        compiled = self.load(kernel.variant_for(arguments, constants))
        packed = compiled.pack(arguments)
        if self._pool is None:
            for program in range(grid):
                compiled.run(packed, grid, program)
        else:
            for done in [self._pool.submit(compiled.run, packed, grid, program) for program in range(grid)]:
                done.result()

    def finish(self) -> None:
        """Nothing to do: launch() already waited."""

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()


class HivmLauncher(NativeLauncher):
    """Runs final HIVM on this CPU: the form that the NPU's compiler ends with, tiles at their addresses in UB.

    target: hivm.A2 or hivm.A3. Cube kernels, whose instructions have no CPU form, run from linalg IR.
    """

    def __init__(
        self, *, target: str = hivm.A3, cores: int = 4, threads: int = 1, cache: ArtefactCache | None = None
    ) -> None:
        super().__init__(cores=cores, threads=threads, cache=cache)
        self._form = target

    def _compile(self, module: linalg.LinalgModule) -> NativeKernel:
        if module.core != "aiv":
            return super()._compile(module)
        final = hivm.compile_hivm(module, self._form, self._cache)
        return NativeKernel(module, hivm_native.build(final, self._cache), final=True)


class NpuLauncher:
    """Launches the same kernels on an NPU, on torch_npu's current stream. Not run on hardware.

    triton-ascend compiles (hivmc included, which needs CANN) and caches on the first launch of a variant. The tensors
    are on the NPU; programs beyond the vector cores of the device are run in turns by its scheduler.
    """

    def __init__(self, device: torch.device, cores: int) -> None:
        if device.type != "npu":
            raise LaunchError(f"NpuLauncher runs on an npu device, given {device}")
        self.cores = cores
        self._device = device

    def launch(self, kernel: Kernel, grid: int, *arguments: object, **constants: Constant) -> None:
        """Enqueue a launch; it starts when earlier work of the stream is done."""
        kernel.variant_for(arguments, constants)
        for value in arguments:
            if isinstance(value, torch.Tensor) and (value.device != self._device or not value.is_contiguous()):
                raise LaunchError(f"kernel {kernel.name}: a contiguous tensor on {self._device} is needed")
        kernel.fn[(grid,)](*arguments, **constants)

    def finish(self) -> None:
        """Wait for the device's stream."""
        torch.get_device_module(self._device).current_stream(self._device).synchronize()
