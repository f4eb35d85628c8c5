"""The same training in one process."""

from typing import Any

import torch

from cam.demo.moe import Shape, Weights, WholeMoE, loss_of, make_batch


def run_whole(shape: Shape) -> list[dict[str, Any]]:
    """Per step: loss, output, and gradients of input, router and experts."""
    torch.set_num_threads(1)
    model = WholeMoE(shape, Weights.make(shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=shape.learning_rate)
    batch, target = make_batch(shape)
    steps = []
    for _ in range(shape.steps):
        x = batch.clone().requires_grad_()
        optimizer.zero_grad(set_to_none=True)
        out = model(x)
        loss = loss_of(out, target, shape)
        loss.backward()  # type: ignore[no-untyped-call]
        steps.append(
            {
                "loss": loss.detach(),
                "out": out.detach(),
                "input": x.grad,
                **{name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None},
            }
        )
        optimizer.step()
    return steps
