"""cam.init: how a process becomes a rank of a group."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cam import host, registry
from cam.config import Config
from cam.deadline import Deadline, seconds
from cam.errors import InputError
from cam.group import Group
from cam.memory.segment import Segment
from cam.native import kernels as native
from cam.native_errors import NATIVE_ERRORS, translate
from cam.peers import Links, link
from cam.rendezvous import Alone, ProcessGroupRendezvous, Rendezvous, StoreRendezvous, from_environment

if TYPE_CHECKING:  # torch.distributed has them as well, but not for type checkers
    from torch._C._distributed_c10d import ProcessGroup, Store


def init(
    process_group: "ProcessGroup | None" = None,
    *,
    store: "Store | None" = None,
    rank: int | None = None,
    world_size: int | None = None,
    config: Config | str | os.PathLike[str] | None = None,
    config_path: str | os.PathLike[str] | None = None,
    timeout: float | timedelta | None = None,
    **config_fields: Any,
) -> Group:
    """Joins a group; every rank calls it. Where the ranks come from, first wins:

    process_group: an existing torch.distributed group. store: any torch Store, with rank and world_size.
    Otherwise torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); without it, a group of one.

    config: a cam.Config, or the path of a YAML file, which config_path= says as well; config_fields: fields of
    cam.Config, which win over it.
    timeout: for joining, in seconds or as timedelta; the config's timeout_s when None.

    Raises ConfigError, InputError, Timeout (names the ranks that are late), Mismatch, GroupAborted (another
    rank failed; the message has its error).
    """
    if config_path is not None:
        if config is not None:
            raise InputError("cam.init: pass either config= or config_path=, not both")
        config = config_path
    settings = _settings(config, config_fields)
    deadline = Deadline(seconds(timeout, settings.timeout_s))
    joined = join(
        lambda: _rendezvous(process_group, store, rank, world_size, settings.name, deadline), settings, deadline
    )
    joined.process_group = process_group
    return joined


def join(find_rendezvous: Callable[[], Rendezvous], settings: Config, deadline: Deadline) -> Group:
    """cam.init for those who bring a rendezvous of their own. Raises what cam.init raises."""
    with registry.reserve(settings.name) as reservation:
        joined = _join(find_rendezvous(), settings, deadline)
        reservation.keep(joined)
    return joined


def _settings(config: Config | str | os.PathLike[str] | None, fields: dict[str, Any]) -> Config:
    if config is None:
        return Config(**fields)
    if isinstance(config, Config):
        return config.replace(**fields) if fields else config
    return Config.load(config, **fields)


def _rendezvous(
    process_group: "ProcessGroup | None",
    store: "Store | None",
    rank: int | None,
    world_size: int | None,
    name: str,
    deadline: Deadline,
) -> Rendezvous:
    if store is None and (rank is not None or world_size is not None):
        raise InputError("cam.init: rank and world_size belong to store=, which is missing")
    if process_group is not None:
        if store is not None:
            raise InputError("cam.init: pass either process_group= or store=, not both")
        return ProcessGroupRendezvous(process_group)
    if store is not None:
        if rank is None or world_size is None or not 0 <= rank < world_size:
            raise InputError(
                f"cam.init(store=...): need 0 <= rank < world_size, got rank={rank}, world_size={world_size}"
            )
        return Alone() if world_size == 1 else StoreRendezvous(store, rank, world_size, name)
    return from_environment(name, deadline.left_s) or Alone()


def _join(rendezvous: Rendezvous, settings: Config, deadline: Deadline) -> Group:
    resolved = settings

    def make_segment(local_ranks: int) -> Segment:
        nonlocal resolved
        resolved = _resolve(settings, local_ranks)
        limit = int(resolved.window_limit or 0)
        return Segment(resolved.name, native.control_bytes(rendezvous.size) + limit)

    links = link(rendezvous, make_segment, deadline)
    made: list[Group] = []
    try:
        links.agree(lambda: made.append(_open(rendezvous, resolved, links)), deadline)
        joined = made[0]
        if not links.unreachable:
            # Nobody returns before everybody is through with the rendezvous: rank 0 may be its server.
            joined.call("init", joined.endpoint.barrier, timeout=max(deadline.left_s, 0.001))
    except BaseException:
        for each in made:
            each.close()
        raise
    finally:
        links.close()
    return joined


def _open(rendezvous: Rendezvous, config: Config, links: Links) -> Group:
    rank, size = rendezvous.rank, rendezvous.size
    try:
        arena = native.Arena(links.segment.fd, size, int(config.window_limit or 0), int(config.window_retain))
        endpoint = None
        if not links.unreachable:
            endpoint = native.Endpoint(
                rank,
                arena,
                [links.handed[peer].fd if peer != rank else -1 for peer in range(size)],
                [links.handed[peer].pidfd if peer != rank else -1 for peer in range(size)],
                config.spin_us or 0,
                config.threads or 1,
                config.isa,
                int(config.nontemporal_threshold),
            )
    except NATIVE_ERRORS as error:
        raise translate(error, config.name, "init", rank) from None
    return Group(rank, size, config, links.peers, arena, endpoint, links.unreachable)


def _resolve(config: Config, local_ranks: int) -> Config:
    """Fills in what depends on the host and on how many ranks share it."""
    cores = host.usable_cores()
    limit, spin_us, threads = config.window_limit, config.spin_us, config.threads
    return config.replace(
        window_limit=host.usable_memory() // 2 // local_ranks if limit is None else limit,
        spin_us=(50 if local_ranks <= cores else 2) if spin_us is None else spin_us,
        threads=max(1, cores // local_ranks) if threads is None else threads,
    )
