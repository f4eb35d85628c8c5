"""What torch.distributed's asynchronous calls return."""

import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cam.errors import Timeout

_Work: Any = dist.Work

_NO_LIMIT = timedelta(0)


def _seconds(timeout: timedelta | None) -> float | None:
    return None if timeout is None or timeout <= _NO_LIMIT else timeout.total_seconds()


class Done(_Work):  # type: ignore[misc]  # torch's class is not typed
    """A call that is over, with the tensors that it wrote."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def synchronize(self) -> None:
        pass

    def block_current_stream(self) -> None:
        pass

    def get_future(self) -> "torch.futures.Future[Any]":
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class Submitted(_Work):  # type: ignore[misc]
    """A call that the group's progress thread does, in the order of submission."""

    def __init__(self, name: str, future: "futures.Future[None]", tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._name, self._future, self._tensors = name, future, list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises the call's error, or Timeout when it is not over in time; it then goes on."""
        limit = _seconds(timeout)
        try:
            self._future.result(limit)
        except futures.TimeoutError:
            if self._future.done():  # the call's own cam.Timeout is a TimeoutError too
                raise
            raise Timeout(
                f"{self._name}: not finished after {limit} s of waiting", operation=self._name, waited_s=limit or 0.0
            ) from None
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        return self._future.exception() if self._future.done() else None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def get_future(self) -> "torch.futures.Future[Any]":
        return _torch_future(self._future, self._tensors)


class Receiving(_Work):  # type: ignore[misc]
    """A receive that was posted. Messages are taken from the sender's window by whoever waits or asks."""

    def __init__(
        self, poll: Callable[[], int], wait: Callable[[float | None], int], finish: Callable[[], None]
    ) -> None:
        """poll, wait: give the source rank once the message is here; poll gives -1 until then."""
        super().__init__()
        self._poll, self._wait, self._finish = poll, wait, finish
        self._lock = threading.Lock()
        self._over = False
        self._source = -1
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._end(lambda: self._wait(_seconds(timeout)))
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        self._end(self._poll)
        return self._over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def _source_rank(self) -> int:
        return self._source

    def source_rank(self) -> int:
        return self._source

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> "torch.futures.Future[Any]":
        """Waits in a thread of its own, since nobody else may."""
        future: futures.Future[None] = futures.Future()

        def run() -> None:
            try:
                self.wait()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        threading.Thread(target=run, name="cam-recv", daemon=True).start()
        return _torch_future(future, [])

    def _end(self, ask: Callable[[], int]) -> None:
        with self._lock:
            if self._over:
                return
            try:
                source = ask()
                if source < 0:
                    return
                self._source = source
                self._finish()
            except BaseException as error:
                self._error = error
            self._over = True


def _torch_future(future: "futures.Future[Any]", tensors: list[torch.Tensor]) -> "torch.futures.Future[Any]":
    """A torch future with the same end. Only an error raised in then() is one for C++ as well (DDP waits there)."""
    first: torch.futures.Future[None] = torch.futures.Future()

    def end(_: "torch.futures.Future[None]") -> list[torch.Tensor]:
        future.result()
        return tensors

    second = first.then(end)
    future.add_done_callback(lambda _: first.set_result(None))
    return second
