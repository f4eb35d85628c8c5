"""Counts calls of named functions in every Python process that a test run starts.

startup/sitecustomize.py installs this at the start of each interpreter, workers included; each call appends one line
to a file, so that a worker that is killed has still counted.
"""

import functools
import importlib.machinery
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TARGETS = "SUITE_CALL_TARGETS"
FILE = "SUITE_CALL_FILE"


def environment(targets: Sequence[str], file: Path) -> dict[str, str]:
    """What a run's environment needs so that `targets` ("module:Class.method") are counted into `file`."""
    return {TARGETS: ",".join(targets), FILE: str(file)} if targets else {}


def count(file: Path, start: int = 0, end: int | None = None) -> Counter[str]:
    """Calls by target, of the bytes start..end of the file (all)."""
    if not file.exists():
        return Counter()
    return Counter(file.read_bytes()[start:end].decode().split())


def install(variables: Mapping[str, str]) -> None:
    """Wraps the targets that `variables` names as soon as their modules are imported."""
    by_module: dict[str, list[str]] = {}
    for target in filter(None, variables.get(TARGETS, "").split(",")):
        module, _, name = target.partition(":")
        by_module.setdefault(module, []).append(name)
    if by_module:
        sys.meta_path.insert(0, _Watch(by_module, variables[FILE]))


class _Watch:
    def __init__(self, by_module: Mapping[str, Sequence[str]], file: str) -> None:
        self._by_module, self._file = dict(by_module), file

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        names = self._by_module.pop(name, None)
        if names is None:
            return None
        # Only once: without this finder's entry the ordinary finders answer.
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            for qualified in names:
                _wrap(module, qualified, f"{name}:{qualified}", self._file)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType, qualified: str, label: str, file: str) -> None:
    *owners, name = qualified.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    try:
        found = vars(owner)[name]
    except KeyError:
        raise AttributeError(f"calls of {label} cannot be counted: there is no such function") from None
    kind = type(found) if isinstance(found, (staticmethod, classmethod)) else None
    counting = _counting(found.__func__ if kind else found, f"{label}\n".encode(), file)
    setattr(owner, name, kind(counting) if kind else counting)


def _counting(function: Callable[..., Any], line: bytes, file: str) -> Callable[..., Any]:
    descriptor: list[int] = []

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not descriptor:
            descriptor.append(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.write(descriptor[0], line)  # short and O_APPEND: whole, also among processes
        return function(*arguments, **keywords)

    return call
