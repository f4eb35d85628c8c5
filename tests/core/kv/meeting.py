"""How the processes of one test find each other: over the launcher's store, under names that no other test uses."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cam import kv
from tests.core.kv.oracle import Shape
from tests.launcher import RankEnv

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Meeting:
    env: RankEnv
    name: str

    def put(self, key: str, value: bytes = b"") -> None:
        self.env.store.set(f"{self.name}/{key}", value)

    def get(self, key: str) -> bytes:
        """Waits for it."""
        return bytes(self.env.store.get(f"{self.name}/{key}"))

    def together(self, label: str) -> None:
        """Nobody goes on before everybody is here."""
        self.put(f"{label}/{self.env.rank}")
        for rank in range(self.env.world_size):
            self.get(f"{label}/{rank}")


def make(
    name: str, shape: Shape, layers: int, *, shared: bool, fill: Callable[[torch.Tensor, int], None], **options: object
) -> tuple[kv.Engine, list[torch.Tensor]]:
    """An engine with registered layers "layer.0" ... shared: in CAM memory. fill(tensor, layer)."""
    given = kv.Options(**{"timeout_s": TIMEOUT_S, **options})  # type: ignore[arg-type]
    engine = kv.Engine(name, tp_rank=shape.tp_rank, tp_size=shape.tp_size, options=given)
    tensors = []
    for index in range(layers):
        allocate = engine.empty if shared else torch.empty
        tensor = allocate(shape.sizes(), dtype=shape.dtype)
        fill(tensor, index)
        tensors.append(tensor)
    engine.register([shape.layer(f"layer.{index}", tensor) for index, tensor in enumerate(tensors)])
    return engine, tensors


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
