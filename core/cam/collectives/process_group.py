"""torch.distributed's face of CAM: the ProcessGroup behind `init_process_group("cam")`.

One cam.Group per process group. A call that torch marks as synchronous runs in the calling thread; any other goes to
the group's progress thread, which keeps the order of submission. torch 2.13 renamed methods (all_gather_single for
_allgather_base, ...): both names are here, because C++ and older versions look for theirs.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import cam
from cam import host
from cam.collectives.devices import OtherDevices, by_device
from cam.collectives.engine import Engine
from cam.collectives.messages import ANY_SOURCE, messages_of
from cam.collectives.naming import agree_on_name
from cam.collectives.reductions import reduction
from cam.collectives.work import Done, Receiving, Submitted
from cam.config import Config
from cam.errors import InputError

_ProcessGroup: Any = dist.ProcessGroup
_SUM = dist.ReduceOp.SUM

Tensors = Sequence[torch.Tensor]


class ProcessGroup(_ProcessGroup):  # type: ignore[misc]  # torch's class is not typed
    """group: the cam.Group that carries it. Torch keeps one of these per process group and calls its methods."""

    def __init__(self, store: Any, rank: int, size: int, group: cam.Group, ranks: list[int]) -> None:
        super().__init__(rank, size)  # the constructor with a store cannot make a subclass
        self.group, self._store = group, store
        config = group.config
        self._engine = Engine(group, algorithm=config.collective_algorithm, piece=int(config.collective_piece))
        self._group_name, self._group_desc = group.name, "cam"
        self._calls = 0
        timeout = timedelta(seconds=config.timeout_s)
        self.others = OtherDevices(store, rank, size, timeout, ranks, self._backend_config)
        _open.add(self)

    def getBackendName(self) -> str:  # noqa: N802  # torch's
        return "cam"

    def name(self) -> str:
        return "cam"

    # --- how calls run ------------------------------------------------------------------------------------------

    def _run(self, name: str, options: Any, call: Callable[[], None], tensors: Tensors) -> Any:
        self._calls += 1
        if options is not None and not options.asyncOp:
            call()
            return Done(tensors)
        return Submitted(name, self.group.submit(call), tensors)

    # --- reductions ---------------------------------------------------------------------------------------------

    @by_device
    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        tensors = _as_list(tensors)
        op, options = _op_of(opts)
        call = self._engine.all_reduce(tensors, reduction(op), _limit(options, timeout))
        return self._run("all_reduce", options, call, tensors)

    @by_device
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        op, options = _op_of(opts)
        groups = _by_dtype(tensors)
        calls = [self._engine.all_reduce(each, reduction(op), _limit(options)) for each in groups]
        return self._run("all_reduce", options, _in_order(calls), tensors)

    @by_device
    def reduce(self, tensors: Any, opts: Any = None, op: Any = _SUM, timeout: timedelta | None = None) -> Any:
        tensors = _as_list(tensors)
        if isinstance(opts, int):
            call = self._engine.reduce(tensors, opts, reduction(op), _limit(None, timeout))
            return self._run("reduce", None, call, tensors)
        call = self._engine.reduce(tensors, opts.rootRank, reduction(opts.reduceOp), _limit(opts))
        return self._run("reduce", opts, call, tensors)

    @by_device
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        outputs, inputs = _as_list(outputs), _as_lists(inputs)
        op, options = _op_of(opts)
        chosen, limit = reduction(op), _limit(options, timeout)
        calls = [
            self._engine.reduce_scatter(output, parts, chosen, limit)
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        return self._run("reduce_scatter", options, _in_order(calls), outputs)

    @by_device
    def reduce_scatter_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        op, options = _op_of(opts)
        call = self._engine.reduce_scatter_single(output, own, reduction(op), _limit(options))
        return self._run("reduce_scatter", options, call, [output])

    @by_device
    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        op, options = _op_of(opts)
        chosen, limit = reduction(op), _limit(options)
        calls = [
            self._engine.reduce_scatter_single(output, own, chosen, limit)
            for output, own in zip(outputs, inputs, strict=True)
        ]
        return self._run("reduce_scatter", options, _in_order(calls), outputs)

    # --- moves --------------------------------------------------------------------------------------------------

    @by_device
    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        tensors = _as_list(tensors)
        options, root = (None, opts) if isinstance(opts, int) else (opts, opts.rootRank)
        call = self._engine.broadcast(tensors, root, _limit(options, timeout))
        return self._run("broadcast", options, call, tensors)

    @by_device
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        outputs, inputs = _as_lists(outputs), _as_list(inputs)
        limit = _limit(opts, timeout)
        calls = [self._engine.all_gather(parts, own, limit) for parts, own in zip(outputs, inputs, strict=True)]
        return self._run("all_gather", opts, _in_order(calls), [each for parts in outputs for each in parts])

    @by_device
    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        limit = _limit(opts)
        calls = [
            self._engine.all_gather([of_rank[index] for of_rank in output_lists], own, limit)
            for index, own in enumerate(inputs)
        ]
        return self._run("all_gather", opts, _in_order(calls), [each for parts in output_lists for each in parts])

    @by_device
    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        call = self._engine.all_gather_single(output, own, _limit(opts))
        return self._run("all_gather", opts, call, [output])

    @by_device
    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        limit = _limit(opts)
        calls = [
            self._engine.all_gather_single(output, own, limit) for output, own in zip(outputs, inputs, strict=True)
        ]
        return self._run("all_gather", opts, _in_order(calls), outputs)

    @by_device
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        options, root = (None, opts) if isinstance(opts, int) else (opts, opts.rootRank)
        parts = _only(outputs)
        call = self._engine.gather(parts, _as_list(inputs)[0], root, _limit(options, timeout))
        return self._run("gather", options, call, parts)

    @by_device
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> Any:
        options, root = (None, opts) if isinstance(opts, int) else (opts, opts.rootRank)
        outputs = _as_list(outputs)
        call = self._engine.scatter(outputs[0], _only(inputs), root, _limit(options, timeout))
        return self._run("scatter", options, call, outputs)

    @by_device
    def all_to_all_single(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Any:
        limit = _limit(opts, timeout)
        call = self._engine.all_to_all_single(output, own, output_splits, input_splits, limit)
        return self._run("all_to_all", opts, call, [output])

    @by_device
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        call = self._engine.all_to_all(outputs, inputs, _limit(opts))
        return self._run("all_to_all", opts, call, outputs)

    # --- meeting ------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        limit = _limit(opts, timeout)
        return self._run("barrier", opts, lambda: self.group.barrier(limit), [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the late ranks: all of them, whatever wait_all_ranks says."""
        self.group.barrier(_limit(None, timeout))

    # --- messages between two ranks -------------------------------------------------------------------------------

    @by_device
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:
        self._calls += 1
        messages_of(self.group).send(tensors[0], dst, tag)
        return Done(tensors)

    @by_device
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Any:
        self._calls += 1
        target = tensors[0]
        plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
        memory = target if plain else torch.empty(target.shape, dtype=target.dtype)
        channel = messages_of(self.group)
        receive = channel.post(memory, src, tag)

        def finish() -> None:
            if memory is not target:
                target.detach().copy_(memory)

        return Receiving(lambda: channel.poll(receive), lambda limit: channel.wait(receive, limit), finish)

    @by_device
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        return self.recv(tensors, ANY_SOURCE, tag)

    # --- what torch asks of any process group ---------------------------------------------------------------------

    # Names: torch's own class keeps them in its C++ backends, of which there is none here.

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._group_desc = text

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    def get_group_store(self) -> Any:
        return self._store

    def _backend_config(self) -> str:
        return str(c10d._world.pg_backend_config.get(self, "cam"))

    def _get_backend(self, device: torch.device) -> Any:
        return self if torch.device(device).type == "cpu" else self.others.of(torch.device(device))

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_splitting(self) -> bool:
        return False

    def _start_coalescing(self, device: torch.device) -> None:
        """Nothing to do: calls are already asynchronous and ordered."""

    def _end_coalescing(self, device: torch.device) -> Any:
        """Ends when everything submitted so far has ended."""
        return Submitted("coalesced calls", self.group.submit(lambda: None), [])

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._set_default_timeout(timeout)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.group.set_timeout(timeout)

    def abort(self) -> None:
        """Ends waits here and at the peers with GroupAborted."""
        self.group.abort(f"rank {self.group.rank} called abort on the process group")

    def shutdown(self) -> None:
        _open.discard(self)
        self.others.shutdown()
        self.group.close()


for _new, _old in (
    ("all_gather_single", "_allgather_base"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
    ("all_to_all_single", "alltoall_base"),
    ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
):
    setattr(ProcessGroup, _old, getattr(ProcessGroup, _new))


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """What torch calls to make a process group's backend; all its ranks do. Raises what cam.init raises, and
    NotReachable where ranks do not share this host's memory."""
    if backend_options is not None:
        raise InputError(f"the backend cam takes no pg_options, got {type(backend_options).__name__}")
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    config = Config(timeout_s=timeout.total_seconds())
    if config.spin_us is None and dist.is_initialized() and dist.get_world_size() > host.usable_cores():
        # The ranks of this group are few, but all of the job's share the cores.
        config = config.replace(spin_us=2)
    name = agree_on_name(store, rank, size, timeout)
    group = cam.init(store=store, rank=rank, world_size=size, config=config, name=name)
    try:
        group.endpoint  # noqa: B018  # raises NotReachable now, not in the middle of a training step
        return ProcessGroup(store, rank, size, group, list(options.global_ranks_in_group))
    except BaseException:
        group.close()
        raise


#: Those that were not shut down.
_open: "weakref.WeakSet[ProcessGroup]" = weakref.WeakSet()


def _abort_all() -> None:
    """The process ends with calls in flight: the interpreter would wait for their thread, and the peers for us."""
    for each in list(_open):
        each.group.abandon(f"rank {each.group.rank} has ended its program")


# Runs before the interpreter waits for its threads, which atexit does not.
threading._register_atexit(_abort_all)  # type: ignore[attr-defined]


# --- arguments: torch has several ways to call each method ------------------------------------------------------------


def _as_list(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _as_lists(lists: Any) -> list[Tensors]:
    lists = list(lists)
    return [lists] if lists and isinstance(lists[0], torch.Tensor) else lists


def _only(lists: Any) -> Tensors:
    """The one list in a list of lists; empty where there is none."""
    lists = _as_lists(lists)
    return lists[0] if lists else []


def _op_of(opts: Any) -> tuple[Any, Any]:
    """The reduction and the options object, of either an options object or a bare reduction."""
    if opts is None:
        return _SUM, None
    op = getattr(opts, "reduceOp", None)
    return (opts, None) if op is None else (op, opts)


def _limit(options: Any, timeout: timedelta | None = None) -> timedelta | None:
    """The call's own time limit; torch says "none" with a negative one."""
    limit = timeout if options is None else options.timeout
    return limit if limit is not None and limit > timedelta(0) else None


def _by_dtype(tensors: Tensors) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _in_order(calls: Sequence[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return calls[0] if len(calls) == 1 else run
