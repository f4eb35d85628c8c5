"""Tensors of other devices: "cpu:cam,npu:hccl" names one backend for each.

Torch replaces its whole process group by ours as soon as it has made it, and makes no backend for the devices that come
after. So this makes them, when a tensor of such a device first comes: all ranks do so in the same call.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from cam.errors import BackendUnavailable, InputError

F = TypeVar("F", bound=Callable[..., Any])

_OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def by_device(method: F) -> F:
    """A method of the process group that gives calls with tensors of other devices to their backend."""
    name = method.__name__

    @wraps(method)
    def chosen(self: Any, *arguments: Any, **options: Any) -> Any:
        tensor = _first_tensor(arguments)
        if tensor is None or tensor.device.type == "cpu":
            return method(self, *arguments, **options)
        backend = self.others.of(tensor.device)
        known = getattr(backend, name, None) or getattr(backend, _OLDER_NAMES.get(name, name))
        return known(*arguments, **options)

    return chosen  # type: ignore[return-value]


def _first_tensor(arguments: Any) -> torch.Tensor | None:
    for each in arguments:
        if isinstance(each, torch.Tensor):
            return each
        if isinstance(each, (list, tuple)):
            found = _first_tensor(each)
            if found is not None:
                return found
    return None


class OtherDevices:
    """The backends of a process group's other devices. find_config: gives torch's text, such as "cpu:cam,npu:hccl"."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, ranks: list[int], find_config: Callable[[], str]
    ) -> None:
        self._store, self._rank, self._size, self._timeout, self._ranks = store, rank, size, timeout, ranks
        self._find_config = find_config
        self._backends: dict[str, Any] = {}

    def of(self, device: torch.device) -> Any:
        """Raises InputError where the group has no backend for the device, BackendUnavailable where torch lacks it."""
        found = self._backends.get(device.type)
        if found is None:
            found = self._backends[device.type] = self._make(device)
        return found

    def shutdown(self) -> None:
        for backend in self._backends.values():
            backend.shutdown()
        self._backends.clear()

    def _make(self, device: torch.device) -> Any:
        names = c10d.BackendConfig(dist.Backend(self._find_config())).get_device_backend_map()
        name = names.get(device.type)
        if name is None or str(name) == "cam":
            raise InputError(
                f"dense CPU tensors are needed, got one on {device}: this group's backends are "
                f"{self._find_config()}; name another as in init_process_group('cpu:cam,{device.type}:...')"
            )
        store = dist.PrefixStore(f"{device.type}/", self._store)  # type: ignore[attr-defined]
        plugin = dist.Backend._plugins.get(str(name).upper())
        if plugin is None:
            return self._make_built_in(str(name), store)
        if not plugin.extended_api:
            return plugin.creator_fn(store, self._rank, self._size, self._timeout)
        options = c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
        options.store, options.timeout = store, self._timeout
        options.group_rank, options.group_size = self._rank, self._size
        options.group_id, options.global_ranks_in_group = f"{device.type}", self._ranks
        return plugin.creator_fn(options, None)

    def _make_built_in(self, name: str, store: Any) -> Any:
        if name == "gloo":
            return dist.ProcessGroupGloo(store, self._rank, self._size, self._timeout)
        if name == "nccl" and dist.is_nccl_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, self._rank, self._size, options)
        known = ", ".join(sorted(["gloo", *map(str.lower, dist.Backend._plugins)]))
        raise BackendUnavailable(f"backend {name!r} cannot be made beside cam; this torch has: {known}")
