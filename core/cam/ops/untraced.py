"""Op implementations that torch.compile must not look into."""

from collections.abc import Callable
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable[..., object])


def untraced(implementation: F) -> F:
    """The implementation, left alone by torch.compile, with all that it calls.

    Behind a graph break the compiler meets every Python frame, that of an op's implementation as well, and would trace
    the addresses in it. torch.compiler.disable says the same, but imports the compiler, which takes seconds, in
    processes that never compile.
    """
    frames = torch._C._dynamo.eval_frame  # private, and what torch.compiler.disable's kin in torch 2.8 to 2.13 stand on
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(implementation.__code__, skip)
    return implementation
