"""A transformer trained data-parallel with CAM's training API.

    torchrun --nproc-per-node 2 core/examples/data_parallel.py             # CAM
    torchrun --nproc-per-node 2 core/examples/data_parallel.py --ddp       # the same model in torch's DDP over gloo

Both print the same losses: bit for bit with two ranks, where a sum has one order only.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody writes it

import cam

VOCABULARY, WIDTH, LENGTH, BATCH = 64, 48, 24, 8


class Transformer(nn.Module):
    """A small causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [B, L] int64. Returns logits, [B, L, VOCABULARY]."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def batch(step: int, rank: int) -> torch.Tensor:
    """Each rank's own text: counting with a random stride, [BATCH, LENGTH + 1]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def train_with_cam(group: cam.Group, steps: int) -> list[float]:
    """Returns this rank's losses."""
    torch.manual_seed(group.rank)  # even if every rank began elsewhere ...
    model = Transformer()
    cam.broadcast(model.parameters(), root=0, group=group)  # ... all now have rank 0's parameters
    parameters = list(model.parameters())
    # Gradients live in the window from the beginning: backward adds to them there, and nothing is flattened.
    for parameter, gradient in zip(parameters, cam.buffers(group).gradient.like(parameters), strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(step, group.rank))
        loss.backward()
        cam.all_reduce_batch([p.grad for p in parameters], group=group, op="avg")
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        losses.append(float(loss.detach()))
    return losses


def train_with_ddp(process_group: dist.ProcessGroup, steps: int) -> list[float]:
    """The same with torch's DistributedDataParallel."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Transformer(), process_group=process_group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        loss = loss_of(model, batch(step, dist.get_rank(process_group)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--ddp", action="store_true", help="train with torch's DDP over gloo instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.ddp:
        dist.init_process_group("gloo")
        rank, losses = dist.get_rank(), train_with_ddp(dist.group.WORLD, options.steps)
        dist.destroy_process_group()
    else:
        with cam.init() as group:
            rank, losses = group.rank, train_with_cam(group, options.steps)
    if rank == 0:
        for step in range(0, options.steps, max(1, options.steps // 10)):
            print(f"step {step:3d}  loss {losses[step]:.6f}")


if __name__ == "__main__":
    main()
