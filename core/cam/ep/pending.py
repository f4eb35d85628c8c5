"""A call that goes on while the caller computes."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from cam.group import Group

T = TypeVar("T")


class Pending(Generic[T]):
    """The result of dispatch_async or combine_async.

    A thread of the group does the work, because on a CPU somebody has to: a sender learns where its rows go only after
    all ranks have counted, so the writes cannot just be started and left alone. The thread runs without the interpreter
    lock. Calls on one group run in the order in which they were made, asynchronous or not, so every rank must make them
    in the same order; several may be in flight. Deadlines start when a call's turn comes.
    """

    __slots__ = ("_future",)

    def __init__(self, group: Group, call: Callable[[], T]) -> None:
        # Gradient modes belong to threads: the caller's are the ones that count.
        gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def run() -> T:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return call()

        self._future: Future[T] = group.submit(run)

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._future.done()

    def wait(self) -> T:
        """The call's result, or its error. May be called again."""
        return self._future.result()
