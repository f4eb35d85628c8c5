"""One training step's MoE layer (forward and backward): DeepSpeed's own on gloo and on cam, and CAM's dispatch.

    python adapters/deepspeed/benchmarks/moe.py --ranks 2 --tokens 1024 --hidden 1024 --experts 16

Same process, same routing, in turns, so that a slow moment of the machine meets all three. The time of a round is the
slowest rank's; the median of the rounds is printed, and the ratios to the first line. Experts are one linear layer
each, so that the exchange and the bookkeeping around it count; what the experts take alone is printed as the floor.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import multiprocessing, nn

VARIANTS = ("deepspeed on gloo", "deepspeed on cam", "cam")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("ranks", 2), ("tokens", 1024), ("hidden", 1024), ("experts", 16), ("k", 2), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--drop-tokens", action="store_true", help="capacity factor 1, instead of dropless")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).absolute().parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (options, folder), nprocs=options.ranks)


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    import deepspeed
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    deepspeed.init_distributed("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks)
    dtype = getattr(torch, options.dtype)
    x = torch.randn(options.tokens, options.hidden, dtype=dtype)
    layers = {name: _layer(name, options, dtype) for name in VARIANTS}
    experts = layers["cam"].deepspeed_moe.experts.deepspeed_experts
    share = torch.randn(options.tokens * options.k // len(experts), options.hidden, dtype=dtype)

    def compute_only() -> None:
        for expert in experts:
            expert(share).square().sum().backward()

    steps: dict[str, Callable[[], None]] = {name: _step(layer, x) for name, layer in layers.items()}
    steps["experts alone"] = compute_only
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(options.rounds + 3):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if round_number >= 3:  # the first rounds allocate
                times[name].append(taken.item())
    if rank == 0:
        kind = "dropping" if options.drop_tokens else "dropless"
        print(
            f"{options.ranks} ranks, {options.tokens} tokens x {options.hidden} {options.dtype} a rank, "
            f"{options.experts} experts, k = {options.k}, {kind}, {options.rounds} rounds"
        )
        base = statistics.median(times[VARIANTS[0]])
        for name, taken in times.items():
            median = statistics.median(taken)
            print(f"  {name:18} {median * 1e3:9.2f} ms  {base / median:6.2f}x")
    dist.barrier()
    deepspeed.comm.destroy_process_group()


def _layer(name: str, options: argparse.Namespace, dtype: torch.dtype) -> nn.Module:
    import torch.distributed as dist
    from deepspeed.moe.layer import MoE

    from cam_deepspeed import convert_moe

    torch.manual_seed(0)
    layer = MoE(
        options.hidden,
        nn.Linear(options.hidden, options.hidden),
        num_experts=options.experts,
        ep_size=options.ranks,
        k=options.k,
        drop_tokens=options.drop_tokens,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    ).to(dtype)
    layer.deepspeed_moe.gate.float()
    if name == "cam":
        convert_moe(layer)
    backend = "gloo" if name.endswith("gloo") else "cam"
    layer.deepspeed_moe._set_ep_group(dist.new_group(range(options.ranks), backend=backend))
    return layer


def _step(layer: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        leaf = x.clone().requires_grad_()
        out, l_aux, _ = layer(leaf)
        (out.float().square().sum() + l_aux).backward()

    return step


if __name__ == "__main__":
    main()
