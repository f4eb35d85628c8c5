"""These tests need DeepSpeed, which `make test` does not install: `nox -s deepspeed` does."""

import pytest

from adapters.deepspeed.tests import environment


@pytest.fixture(scope="session", autouse=True)
def deepspeed_environment() -> None:
    """DeepSpeed's own op is built once, before ranks would build it under their deadlines."""
    environment.prepare()
