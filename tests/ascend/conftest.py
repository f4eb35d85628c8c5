"""These tests need the Ascend compilers and an environment of their own (`nox -s ascend`); elsewhere they are skipped."""

import pytest

pytest.importorskip("triton", reason="needs triton-ascend: run `nox -s ascend`")

from cam_kernels.ascend import toolchain  # noqa: E402
from cam_kernels.ascend.errors import MissingTool  # noqa: E402

try:
    toolchain.require_triton()
except MissingTool as error:
    pytest.skip(f"{error}; or run `nox -s ascend`", allow_module_level=True)
