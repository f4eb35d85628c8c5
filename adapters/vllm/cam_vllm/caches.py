"""vLLM's KV caches as the engine sees them: where they lie, and how."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from cam import kv
from cam.errors import CamError, InputError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(f"vllm.{__name__}")


def place(engine: kv.Engine, wish: str, caches: Mapping[str, torch.Tensor], holders: Mapping[str, object]) -> str:
    """Moves the caches into memory that peers map, if wished and possible. Returns where they lie: "cam" or "vllm".

    vLLM allocates them in private memory, and asks for a place (get_mem_pool_context) only on GPUs. Here they have been
    bound to the layers, but not been used: the tensors themselves are moved (Tensor.set_), so that every holder sees
    the new memory. `holders`: the model's attention layers, which may hold views of their own.
    """
    size = sum(storage.nbytes() for storage in _storages(caches))
    try:
        if wish == "vllm":
            raise InputError("kv_memory is 'vllm'")
        tensors = [*caches.values(), *_views(caches, holders)]
        engine.adopt(tensors)
        outside = [name for name, tensor in caches.items() if not engine.holds(tensor)]
        if outside:
            raise InputError(f"the caches of {', '.join(outside[:3])} could not be moved")
    except CamError as error:
        if wish == "cam":
            raise
        told = logger.info if wish == "vllm" else logger.warning
        told(
            "cam: the KV cache (%d MiB, %d layers) stays where vLLM put it: %s. Peers of this host read it with "
            "process_vm_readv (cma)",
            size >> 20, len(caches), error,
        )  # fmt: skip
        return "vllm"
    logger.info(
        "cam: the KV cache (%d MiB, %d layers) lies in CAM memory: peers of this host map it (shm)",
        size >> 20, len(caches),
    )  # fmt: skip
    return "cam"


def layers(caches: Mapping[str, torch.Tensor], config: "KVCacheConfig", total_heads: int) -> list[kv.Layer]:
    """The caches for Engine.register. Raises InputError for a layout that is not known.

    vLLM on a CPU: [blocks, KV heads, block size, 2 * head size]; inside a (block, head) K and V lie in chunks that the
    attention kernel chose, so that only whole blocks can move. MLA: [blocks, block size, width].
    """
    specs = {name: group.kv_cache_spec for group in config.kv_cache_groups for name in group.layer_names}
    described = []
    for name, tensor in caches.items():
        spec = specs.get(name)
        heads = getattr(spec, "num_kv_heads", None)
        size = getattr(spec, "block_size", None)
        if tensor.ndim == 4 and tuple(tensor.shape[1:3]) == (heads, size) and tensor.device.type == "cpu":
            described.append(kv.Layer(name, tensor, "bhtd", total_heads=total_heads, opaque=True))
        elif tensor.ndim == 3 and tensor.shape[1] == size:
            described.append(kv.Layer(name, tensor, "btd", total_heads=1))
        else:
            raise InputError(
                f"the KV cache of {name} has shape {tuple(tensor.shape)} on {tensor.device} with {heads} KV heads and "
                f"blocks of {size} tokens ({type(spec).__name__}): cam-vllm knows [blocks, heads, tokens, 2 * size] on "
                "a CPU and MLA's [blocks, tokens, width]"
            )
    return described


def _views(caches: Mapping[str, torch.Tensor], holders: Mapping[str, object]) -> list[torch.Tensor]:
    """Tensors that the layers hold on the caches' storages. Raises InputError for one that would be left behind."""
    known = {storage.data_ptr() for storage in _storages(caches)}
    ours = {id(tensor) for tensor in caches.values()}
    found: list[torch.Tensor] = []
    for name, layer in holders.items():
        for owner in (layer, getattr(layer, "impl", None)):
            for attribute, value in vars(owner).items() if owner is not None and hasattr(owner, "__dict__") else ():
                for tensor in value if isinstance(value, (list, tuple)) else (value,):
                    if not isinstance(tensor, torch.Tensor) or tensor.untyped_storage().data_ptr() not in known:
                        continue
                    if tensor.requires_grad:
                        raise InputError(f"{name}.{attribute} is a view of the KV cache that needs gradients")
                    if id(tensor) not in ours:
                        ours.add(id(tensor))
                        found.append(tensor)
    return found


def _storages(caches: Mapping[str, torch.Tensor]) -> list[torch.UntypedStorage]:
    return list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in caches.values()}.values())
