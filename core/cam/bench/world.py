"""What launcher and ranks say to each other: the specification on the way in, marked lines on the way out."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from cam.bench.plan import Case, Plan

#: Starts each line of rank 0's standard output that is an event (JSON); libraries may print other lines.
EVENT_MARK = "@cam-bench "


@dataclass(frozen=True)
class WorldSpec:
    """What the launcher tells the ranks of one group. directory: for the rendezvous and the start line."""

    ranks: int
    directory: str
    cases: tuple[Case, ...]
    plan: Plan
    mpi: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "WorldSpec":
        plan: dict[str, Any] = {
            field.name: tuple(value) if isinstance(value := data["plan"][field.name], list) else value
            for field in fields(Plan)
        }
        cases = tuple(Case(**case) for case in data["cases"])
        return cls(data["ranks"], data["directory"], cases, Plan(**plan), data["mpi"])
