"""From clock readings on every rank to the figures of a report."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: What one rank measured in one round: nanoseconds from the start to its return, and those inside native
#: calls.
Reading = tuple[int, int | None]


@dataclass(frozen=True)
class Summary:
    """Seconds over all rounds: median, smallest, first and third quartile."""

    median: float
    min: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        if len(values) == 1:
            return cls(values[0], values[0], values[0], values[0])
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, min(values), q1, q3)


@dataclass(frozen=True)
class Measured:
    """One contender's phase. native, python: parts of `total`, where the contender tells them apart."""

    total: Summary
    native: Summary | None
    python: Summary | None

    @classmethod
    def of(cls, ranks: Sequence[Sequence[Reading]]) -> "Measured":
        """ranks[r][i]: rank r's reading of round i. The slowest rank of a round counts.

        python is the largest time that a rank spent outside native calls, native the remainder. (A rank's own
        native time also holds its wait for a peer that is still in Python; that wait belongs to python.) Ranks that
        share cores give no native time: what they wait for a core would count as Python.
        """
        totals, natives, pythons = [], [], []
        for readings in zip(*ranks, strict=True):
            total = max(reading[0] for reading in readings)
            totals.append(total / 1e9)
            outside = [reading[0] - reading[1] for reading in readings if reading[1] is not None]
            if len(outside) == len(readings):
                pythons.append(max(outside) / 1e9)
                natives.append((total - max(outside)) / 1e9)
        if len(natives) < len(totals):
            return cls(Summary.of(totals), None, None)
        return cls(Summary.of(totals), Summary.of(natives), Summary.of(pythons))
