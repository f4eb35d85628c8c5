"""These tests need DeepSpeed, which `make test` does not install: `nox -s deepspeed` does."""

import importlib.util
from pathlib import Path

import pytest

from adapters.deepspeed.tests.environment import prepare

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("deepspeed") is not None:
        return
    skip = pytest.mark.skip(reason="deepspeed is not installed: nox -s deepspeed installs it and runs these")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def deepspeed_environment() -> None:
    """DeepSpeed's own op is built once, before ranks would build it under their deadlines."""
    if importlib.util.find_spec("deepspeed") is not None:
        prepare()
