"""What a suite declares: one TOML file, read into frozen dataclasses. Unknown keys are errors."""

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomllib

SUITES = Path(__file__).parent / "suites"


class BadDeclaration(Exception):
    """A suite's TOML file has an unknown key, a wrong type or a contradiction."""


@dataclass(frozen=True)
class Source:
    """Where the framework's tests come from. kind "sdist": from PyPI. kind "checkout": a folder given by path
    (--source, or the variable SUITE_SOURCE_<NAME>), or a clone of `repository` at `revision` with --clone."""

    kind: Literal["sdist", "checkout"]
    version: str
    """Version of the package, or the revision (tag, commit) of the repository."""
    take: tuple[str, ...]
    """What is copied out of the source: the tests, never the package itself, which would shadow the installed one."""
    package: str = ""
    repository: str = ""
    build_requires: tuple[str, ...] = ()
    """What pip needs to read the sdist's metadata; installed into a folder of its own."""
    build_environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind == "sdist" and not self.package:
            raise BadDeclaration('a source of kind "sdist" names its package')
        if self.kind == "checkout" and not self.repository:
            raise BadDeclaration('a source of kind "checkout" names its repository, if only for the reader')


@dataclass(frozen=True)
class Phase:
    """How pytest is started: for the baseline, and on top of that for the run with CAM."""

    environment: dict[str, str] = field(default_factory=dict)
    """`{work}` in a value stands for the suite's working folder."""
    arguments: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class TestSet:
    """Files that run in one pytest process."""

    __test__ = False  # pytest: not a test class

    name: str
    files: tuple[str, ...]
    passed: int
    """How many tests pass in the baseline. Another number means that the suite is not what was declared."""
    cam: bool = True
    """Whether the set runs again with CAM in place. If not, `why` says why."""
    why: str = ""
    calls: tuple[str, ...] = ()
    """"module:Class.method" of CAM, each of which the CAM run must have called: proof that CAM was tested."""
    select: str = ""
    """pytest's -k"""
    long: bool = False
    """Only runs with --long."""
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.cam and not self.calls:
            raise BadDeclaration(f"set {self.name!r} runs with CAM, but names no calls that would prove it")
        if not self.cam and not self.why:
            raise BadDeclaration(f"set {self.name!r} does not run with CAM, and does not say why")


@dataclass(frozen=True)
class Exclusion:
    """Tests left out, by the beginning of their node ids (relative to the source), with the reason."""

    tests: tuple[str, ...]
    reason: str
    phase: Literal["both", "cam"] = "both"


@dataclass(frozen=True)
class Suite:
    name: str
    title: str
    source: Source
    requires: dict[str, str]
    """Distributions that the environment must have; a value pins the version, "" takes any."""
    sets: tuple[TestSet, ...]
    folder: str = "."
    """Where pytest starts, relative to the copy of the source."""
    prepare: str = ""
    """"module:function", called with the working folder before the first run: models, snapshots, caches."""
    baseline: Phase = Phase()
    with_cam: Phase = Phase()
    exclusions: tuple[Exclusion, ...] = ()

    def __post_init__(self) -> None:
        names = [item.name for item in self.sets]
        if len(set(names)) != len(names):
            raise BadDeclaration(f"two sets have the same name: {names}")


def load(file: Path) -> Suite:
    """The suite that `file` declares. Raises BadDeclaration with the file's name."""
    try:
        suite: Suite = _build(Suite, tomllib.loads(file.read_text()), "")
        return suite
    except (OSError, tomllib.TOMLDecodeError, BadDeclaration) as error:
        raise BadDeclaration(f"{file}: {error}") from None


def declared() -> list[str]:
    return sorted(path.stem for path in SUITES.glob("*.toml"))


def _build(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build_table(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        _expect(isinstance(value, list), where, "a list", value)
        return tuple(_build(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if origin is dict:
        _expect(isinstance(value, dict), where, "a table", value)
        return {key: _build(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal:
        _expect(value in arguments, where, f"one of {arguments}", value)
        return value
    if kind is float:
        _expect(isinstance(value, (int, float)) and not isinstance(value, bool), where, "a number", value)
        return float(value)
    _expect(type(value) is kind, where, kind.__name__, value)
    return value


def _build_table(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where or "the file", "a table", value)
    hints = typing.get_type_hints(kind)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    for key in value:
        _expect(key in fields, f"{where}.{key}".strip("."), f"one of {', '.join(fields)}", key)
    for item in fields.values():
        needed = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if needed and item.name not in value:
            raise BadDeclaration(f"{where}.{item.name}".strip(".") + " is missing")
    return kind(**{key: _build(hints[key], item, f"{where}.{key}".strip(".")) for key, item in value.items()})


def _expect(holds: bool, where: str, wanted: str, found: object) -> None:
    if not holds:
        raise BadDeclaration(f"{where}: expected {wanted}, found {found!r}")
