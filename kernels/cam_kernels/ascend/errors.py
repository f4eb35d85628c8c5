"""What can go wrong between a Triton source and a running kernel.

cam_kernels sits below cam and cannot use cam.CamError; core translates these at its border.
"""

from __future__ import annotations


class AscendError(RuntimeError):
    """Base of every error of cam_kernels.ascend."""


class MissingTool(AscendError):
    """A compiler is not installed, or not in the pinned version. The message names the package to install."""

    def __init__(self, tool: str, found: str, needed: str, install: str) -> None:
        super().__init__(f"{tool}: found {found}, needed {needed}. Install it with: {install}")
        self.tool, self.found, self.needed, self.install = tool, found, needed, install


class CompileFailed(AscendError):
    """One stage rejected a kernel. `log` is the whole output of the tool, `source` the text it was given."""

    def __init__(self, kernel: str, stage: str, log: str, source: str) -> None:
        tail = "\n".join(line for line in log.strip().splitlines()[-12:])
        super().__init__(f"kernel {kernel} failed in stage {stage}:\n{tail}")
        self.kernel, self.stage, self.log, self.source = kernel, stage, log, source


class UnifiedBufferOverflow(CompileFailed):
    """The kernel's live tiles do not fit the vector core's unified buffer: use a smaller block constant."""


class LaunchError(AscendError):
    """The arguments of a launch do not fit the kernel's signature."""


class LimitExceeded(AscendError, ValueError):
    """A shape is outside what the kernels declare. The message gives the value, the limit and the knob."""


class ParametersDiffer(AscendError):
    """A peer called the same operation with another parameter, seen before any row is sent."""

    def __init__(self, operation: str, field: str, rank: int, mine: int, theirs: int) -> None:
        super().__init__(f"{operation}: {field} is {mine} here and {theirs} on rank {rank}")
        self.operation, self.field, self.rank, self.mine, self.theirs = operation, field, rank, mine, theirs


class WaitExpired(AscendError, TimeoutError):
    """Flags did not arrive before the deadline. `late` are the ranks (or rows) that had not been seen."""

    def __init__(self, operation: str, phase: str, late: tuple[int, ...], waited_s: float) -> None:
        super().__init__(f"{operation}: {phase} waited {waited_s:.2f} s, still missing from ranks {list(late)}")
        self.operation, self.phase, self.late, self.waited_s = operation, phase, late, waited_s
