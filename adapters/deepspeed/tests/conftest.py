"""These tests need DeepSpeed, which has an environment of its own: `make test-deepspeed` runs them."""

import pytest

from adapters.deepspeed.tests import environment


@pytest.fixture(scope="session", autouse=True)
def deepspeed_environment() -> None:
    """DeepSpeed's own op is built once, before ranks would build it under their deadlines."""
    environment.prepare()
