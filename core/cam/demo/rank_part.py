"""What each of the demo's processes does: train its share of the model, and move tokens about for exact
checks.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cam
from cam.demo.moe import Shape, SpreadMoE, Weights, choose, loss_of, make_batch


def run_rank(rank: int, shape: Shape, directory: str) -> None:
    """Leaves its results in directory/rank-N.pt: {"steps": one dict per training step, "moved": see _move}."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", shape.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=shape.ranks, timeout=timedelta(seconds=60))
    with cam.init(dist.group.WORLD) as group:
        results = {"steps": _train(group, shape), "moved": _move(group, shape)}
    torch.save(results, Path(directory) / f"rank-{rank}.pt")
    dist.destroy_process_group()


def _train(group: cam.Group, shape: Shape) -> list[dict[str, Any]]:
    """Per step: this rank's share of the loss, its output, and gradients of input, router and own experts."""
    model = SpreadMoE(shape, Weights.make(shape), cam.ep.Buffer(group, shape.experts))
    optimizer = torch.optim.SGD(model.parameters(), lr=shape.learning_rate)
    x, target = (torch.split(part, list(shape.tokens))[group.rank] for part in make_batch(shape))
    steps = []
    for _ in range(shape.steps):
        mine = x.clone().requires_grad_()
        optimizer.zero_grad(set_to_none=True)
        out = model(mine)
        loss = loss_of(out, target, shape)
        loss.backward()  # type: ignore[no-untyped-call]
        # Every rank has the whole router and sees its own tokens only. (Experts have seen everybody's.)
        dist.all_reduce(model.router.grad)
        steps.append(
            {
                "loss": loss.detach(),
                "out": out.detach().clone(),
                "input": mine.grad,
                **{name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None},
            }
        )
        optimizer.step()
    return steps


def _move(group: cam.Group, shape: Shape) -> dict[str, torch.Tensor]:
    """Tokens sent to their experts and back, untouched on the way: by layout and precision."""
    x = torch.split(make_batch(shape)[0], list(shape.tokens))[group.rank].bfloat16()
    experts, weights = choose(x.float(), Weights.make(shape).router, shape.topk)
    moved = {"x": x, "experts": experts, "weights": weights}
    with torch.no_grad():
        for layout in ("expert", "rank"):
            buffer = cam.ep.Buffer(group, shape.experts, layout=layout)
            received, handle = buffer.dispatch(x, experts, weights)
            moved[layout] = buffer.combine(received.x, handle).clone()
        buffer = cam.ep.Buffer(group, shape.experts, quant="int8")
        received, handle = buffer.dispatch(x, experts, weights)
        if received.scales is not None:
            moved["int8"] = buffer.combine(received.x * received.scales[:, None], handle).clone()
    return moved
