"""Who is measured in the benchmark of collectives: each turns a case into one call on buffers that are ready."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import cam
from cam.bench.collectives import BATCH, Case

Call = Callable[[], object]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Buffers:
    """A case's tensors on one rank. Values are small whole numbers, so that every order of additions is exact."""

    def __init__(self, case: Case, rank: int) -> None:
        dtype, world = _DTYPES[case.dtype], case.ranks
        elements = case.nbytes // dtype.itemsize // world * world
        share = elements // world
        sizes = {
            "all_reduce": (elements, elements),
            "broadcast": (elements, elements),
            "reduce_scatter": (elements, share),
            "all_gather": (share, elements),
            "all_to_all": (elements, elements),
        }
        inputs, outputs = sizes[case.operation]
        self.in_place = case.operation in ("all_reduce", "broadcast")
        self.given = (torch.arange(inputs) % 5 + rank % 3).to(dtype)
        self.input = self.given.clone()
        self.output = self.input if self.in_place else torch.zeros(outputs, dtype=dtype)

    def reset(self) -> None:
        self.input.copy_(self.given)
        if not self.in_place:
            self.output.zero_()


def torch_call(case: Case, buffers: Buffers, group: Any) -> Call:
    """Through torch.distributed, as programs call it."""
    x, y = buffers.input, buffers.output
    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "broadcast": lambda: dist.broadcast(x, 0, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, x, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(y, x, group=group),
        "all_to_all": lambda: dist.all_to_all_single(y, x, group=group),
    }
    return calls[case.operation]


def native_call(case: Case, buffers: Buffers, group: cam.Group) -> Call:
    """CAM's kernels alone: addresses in, nothing checked in Python."""
    endpoint, world, dtype = group.endpoint, case.ranks, case.dtype
    algorithm, piece = group.config.collective_algorithm, int(group.config.collective_piece)
    tail = (algorithm, piece, 60.0)
    x, y = buffers.input.data_ptr(), buffers.output.data_ptr()
    size = buffers.input.element_size()
    total = max(buffers.input.numel(), buffers.output.numel())
    share = total // world * size
    at_x, at_y = ([base + share * rank for rank in range(world)] for base in (x, y))
    shares = [share] * world
    elements = [total // world] * world
    calls: dict[str, Call] = {
        "all_reduce": lambda: endpoint.all_reduce([(x, x, total)], dtype, "sum", 1.0, *tail),
        "broadcast": lambda: endpoint.broadcast(x, total * size, 0, *tail),
        "reduce_scatter": lambda: endpoint.reduce_scatter(at_x, elements, y, dtype, "sum", 1.0, *tail),
        "all_gather": lambda: endpoint.all_gather(x, shares, at_y, *tail),
        "all_to_all": lambda: endpoint.all_to_all(at_x, shares, at_y, shares, *tail),
    }
    return calls[case.operation]


def mpi_call(case: Case, buffers: Buffers) -> Call | None:
    """mpi4py on the same memory; None for what MPI cannot do (it has no bfloat16 to reduce)."""
    from mpi4py import MPI

    comm: Any = MPI.COMM_WORLD
    reduces = case.operation in ("all_reduce", "reduce_scatter")
    if reduces and case.dtype != "float32":
        return None
    kind = MPI.FLOAT if reduces else MPI.BYTE

    def memory(tensor: torch.Tensor) -> list[Any]:
        nbytes = tensor.numel() * tensor.element_size()
        view = MPI.buffer.fromaddress(tensor.data_ptr(), nbytes)
        return [view, tensor.numel() if reduces else nbytes, kind]

    x, y = memory(buffers.input), memory(buffers.output)
    share = min(x[1], y[1]) if case.operation != "all_to_all" else x[1] // case.ranks
    each_x, each_y = [x[0], share, kind], [y[0], share, kind]  # MPI's counts are those for one rank
    calls: dict[str, Call] = {
        "all_reduce": lambda: comm.Allreduce(MPI.IN_PLACE, x),
        "broadcast": lambda: comm.Bcast(x, 0),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(each_x, y),
        "all_gather": lambda: comm.Allgather(x, each_y),
        "all_to_all": lambda: comm.Alltoall(each_x, each_y),
    }
    return calls[case.operation]


def gradients(rank: int) -> list[torch.Tensor]:
    """The batch: BATCH tensors of 1 to 4 KiB."""
    return [torch.full((256 + 256 * (i % 4),), float(rank + i % 7)) for i in range(BATCH)]


def batch_calls(rank: int, gloo: Any, group: Any | None) -> dict[str, tuple[Call, list[torch.Tensor]]]:
    """By contender: the call, and the tensors that it reduces."""
    contenders: dict[str, tuple[Call, list[torch.Tensor]]] = {}

    def loop(tensors: list[torch.Tensor], each: Any) -> Call:
        def run() -> None:
            for tensor in tensors:
                dist.all_reduce(tensor, group=each)

        return run

    theirs = gradients(rank)
    contenders["gloo"] = loop(theirs, gloo), theirs
    if group is not None:
        mine, batch = gradients(rank), gradients(rank)
        contenders["cam loop"] = loop(mine, group), mine
        contenders["cam"] = (lambda: cam.all_reduce_batch(batch, group=group.group)), batch
    return contenders


def ddp_calls(gloo: Any, group: Any | None) -> dict[str, Call]:
    """One backward pass of a small transformer: without communication, and in DDP over each backend."""
    torch.manual_seed(0)
    x = torch.randn(4, 32, 128)

    def step(net: nn.Module, sync: bool = True) -> Call:
        def run() -> None:
            net.zero_grad(set_to_none=False)
            net(x).square().mean().backward()

        def alone() -> None:
            with net.no_sync():  # type: ignore[operator]
                run()

        return run if sync else alone

    def wrapped(each: Any) -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        return nn.parallel.DistributedDataParallel(nn.TransformerEncoder(layer, 4), process_group=each)

    net = wrapped(gloo)
    calls = {"gloo": step(net), "alone": step(net, sync=False)}
    if group is not None:
        calls["cam"] = step(wrapped(group))
    return calls
