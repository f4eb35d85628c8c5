"""One name for a new group, the same on all its ranks and new in each of their processes."""

import secrets
from datetime import timedelta
from typing import TYPE_CHECKING

from cam.errors import Timeout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def agree_on_name(store: "Store", rank: int, size: int, timeout: timedelta) -> str:
    """Rank 0 makes the name, the others learn it through the store. Raises Timeout.

    Ranks belong to different groups, so a count of groups would differ between them. A store may serve several groups
    one after another: each rank counts its own, which tells the generations apart.
    """
    if size == 1:
        return f"torch-{secrets.token_hex(4)}"
    key = f"cam-name/chosen/{store.add(f'cam-name/begun/{rank}', 1)}"
    if rank == 0:
        name = f"torch-{secrets.token_hex(4)}"
        store.set(key, name)
        return name
    try:
        store.wait([key], timeout)
    except RuntimeError as error:
        raise Timeout(
            f"init_process_group: rank 0 did not arrive within {timeout.total_seconds():.0f} s: {error}",
            operation="init",
            phase="name",
            ranks=[0],
            waited_s=timeout.total_seconds(),
        ) from None
    return bytes(store.get(key)).decode()
