"""Which of my layers and heads meet which remote rank's, worked out once when an instance is opened."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cam.errors import InputError, Mismatch
from cam.kv.geometry import Geometry, disagreement
from cam.kv.messages import Description
from cam.kv.planner import read_sources, write_targets
from cam.transport.pieces import Int64s


@dataclass(frozen=True, eq=False)
class Mine:
    """This engine's layers: names, geometries and addresses, in order of registration."""

    names: tuple[str, ...]
    geometries: tuple[Geometry, ...]
    addresses: tuple[int, ...]
    tp_rank: int
    tp_size: int


@dataclass(frozen=True, eq=False)
class Lane:
    """Layers that share everything a plan depends on: geometries of both sides, heads, and the remote rank.

    part: position of the remote rank. layers: positions in Mine, ascending; theirs: positions at the remote rank;
    my_bases, their_bases: int64 [layers], addresses as a Batch takes them.
    """

    part: int
    mine: Geometry
    theirs: Geometry
    heads: range
    layers: tuple[int, ...]
    their_layers: tuple[int, ...]
    my_bases: Int64s
    their_bases: Int64s

    def only(self, layers: frozenset[int]) -> "Lane | None":
        """The lane with these layers alone; None when it has none of them."""
        which = [i for i, layer in enumerate(self.layers) if layer in layers]
        if len(which) == len(self.layers):
            return self
        if not which:
            return None
        return Lane(
            self.part,
            self.mine,
            self.theirs,
            self.heads,
            tuple(self.layers[i] for i in which),
            tuple(self.their_layers[i] for i in which),
            self.my_bases[which],
            self.their_bases[which],
        )


def compare(mine: Mine, parts: Sequence[Description]) -> None:
    """Raises Mismatch, with the field and both values, unless blocks can go between all paired layers."""
    sizes = {part.who.tp_size for part in parts}
    if len(sizes) > 1:
        raise InputError(f"the descriptions are not of one instance: tp_size {' and '.join(map(str, sorted(sizes)))}")
    if len({part.who.engine_id for part in parts}) != len(parts):
        raise InputError("the same engine was given twice")
    for part in parts:
        theirs = {layer.name: part.geometries[layer.geometry] for layer in part.layers}
        for name, geometry in zip(mine.names, mine.geometries, strict=True):
            other = theirs.get(name)
            found = None if other is None else disagreement(geometry, other)
            if found is not None:
                field, here, there = found
                raise Mismatch(
                    f"open: {field} of layer {name!r} is {here} here and {there} at {part.who.name} "
                    f"({part.who.engine_id}, rank {part.who.tp_rank} of {part.who.tp_size})",
                    field=field,
                    mine=here,
                    rank=part.who.tp_rank,
                    theirs=there,
                )


def lanes(
    mine: Mine, parts: Sequence[Description], direction: str, translate: Callable[[int, Int64s], Int64s]
) -> list[Lane]:
    """All lanes of "read" or "write". translate(part, addresses): what the part's channel needs instead.

    Raises Mismatch for a layer or head that no part has.
    """
    where = [{layer.name: position for position, layer in enumerate(part.layers)} for part in parts]
    found: dict[tuple[int, Geometry, Geometry, range], list[tuple[int, int]]] = {}
    for position, (name, geometry) in enumerate(zip(mine.names, mine.geometries, strict=True)):
        theirs = [
            parts[i].geometries[parts[i].layers[at[name]].geometry] if name in at else None
            for i, at in enumerate(where)
        ]
        heads = [None if other is None else other.heads for other in theirs]
        try:
            if direction == "read":
                routes = read_sources(geometry.heads, heads, mine.tp_rank)
            else:
                routes = write_targets(geometry.heads, mine.tp_rank, mine.tp_size, heads)
        except InputError as error:
            names = ", ".join(part.who.name for part in parts)
            held = "nothing of it" if not any(heads) else "other heads"
            raise Mismatch(f"open: layer {name!r}: {error} ({names})", field="layers", mine=name, theirs=held) from None
        for part, run in routes:
            other = theirs[part]
            if other is not None:
                found.setdefault((part, geometry, other, run), []).append((position, where[part][name]))
    result = []
    for (part, geometry, other, run), pairs in found.items():
        layers, their_layers = zip(*pairs, strict=True)
        addresses = np.array([parts[part].layers[i].address for i in their_layers], np.int64)
        result.append(
            Lane(
                part,
                geometry,
                other,
                run,
                layers,
                their_layers,
                np.array([mine.addresses[i] for i in layers], np.int64),
                translate(part, addresses),
            )
        )
    return result
