"""One load under way: open the instance, read, and be told of once."""

import threading
from concurrent.futures import Future

from cam import kv
from cam.errors import CamError
from cam_vllm.metadata import Load


class Loading:
    """Begins at once. Steps of its life happen in the worker's thread and in the one that opened the instance."""

    def __init__(self, engine: kv.Engine, load: Load, remote: "Future[kv.Remote]", timeout_s: float) -> None:
        self.load = load
        self._engine, self._timeout_s = engine, timeout_s
        self._lock = threading.Lock()
        self._cancelled = False
        self._failed: CamError | None = None
        self.transfer: kv.Transfer | None = None
        remote.add_done_callback(self._read)

    def cancel(self) -> None:
        """The request is gone: the blocks are wanted back. Idempotent."""
        with self._lock:
            self._cancelled = True
            transfer = self.transfer
        if transfer is not None:
            transfer.cancel()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def done(self) -> bool:
        """Nothing touches the local blocks any more."""
        return self._failed is not None or (self.transfer is not None and self.transfer.done())

    @property
    def error(self) -> CamError | None:
        """Once done: why not all of the blocks can be trusted."""
        return self._failed or (self.transfer.error if self.transfer is not None else None)

    @property
    def failed_blocks(self) -> tuple[int, ...]:
        """Once done, with an error: local blocks that hold no KV of this request."""
        failed = self.transfer.failed_blocks if self.transfer is not None else ()
        return failed or self.load.blocks

    def _read(self, opened: "Future[kv.Remote]") -> None:
        try:
            remote = opened.result()
            with self._lock:
                # A cancelled one still tells the prefill side that it may free its blocks.
                self.transfer = self._post(remote, self.load.blocks if not self._cancelled else ())
        except CamError as error:
            self._failed = error
        except BaseException as error:  # also CancelledError: an error that nobody sees would leave the request waiting
            self._failed = CamError(f"{type(error).__name__}: {error}")

    def _post(self, remote: kv.Remote, local: tuple[int, ...]) -> kv.Transfer:
        offer, load = self.load.offer, self.load
        if not local:
            return self._engine.read(remote, (), (), lease=offer.lease, timeout=self._timeout_s)
        size = remote.block_size
        first = load.first_token // size
        theirs = offer.blocks[first : -(-(load.first_token + load.tokens) // size)]
        if len(theirs) == len(local) and load.first_token % size == 0:
            return self._engine.read(remote, theirs, local, lease=offer.lease, timeout=self._timeout_s)
        return self._engine.read(
            remote,
            theirs,
            local,
            tokens=load.tokens,
            remote_start=load.first_token - first * size,
            local_start=0,
            lease=offer.lease,
            timeout=self._timeout_s,
        )
