"""A call that goes on while the caller computes."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch
from torch import Tensor

from cam.errors import CamError
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

    def __init__(self, group: Group, call: Callable[[], T], carrier: Callable[[T], Tensor]) -> None:
        """carrier: the tensor of call's result that leads to the collective in the autograd graph."""
        # Gradient modes belong to threads: the caller's are the ones that count.
        gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        place = _place_in_program() if gradients else 0

        def run() -> T:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                result = call()
            node = carrier(result).grad_fn
            if node is not None:
                node._set_sequence_nr(place)  # type: ignore[attr-defined]  # missing from the stub
            return result

        self._future: Future[T] = group.submit(run)

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._future.done()

    def wait(self) -> T:
        """The call's result, or its error. May be called again."""
        return self._future.result()


def _place_in_program() -> int:
    """A sequence number that lies between those of the autograd nodes before and after it in this thread.

    The backward pass runs what is ready in descending order of these numbers. They are counted per thread: those of the
    group's thread say nothing about the program, and ranks whose experts differ would enter their backward collectives
    in different orders.
    """
    node = torch.empty(0).requires_grad_().view(0).grad_fn
    if node is None:
        raise CamError("autograd is on but made no node")
    return node._sequence_nr()
