"""These tests need the Ascend compilers and an environment of their own: `make test-ascend`.

Elsewhere only test_environment.py is collected, and says so. What cannot be imported here must not be collected.
"""

from pathlib import Path

from cam_kernels.ascend import toolchain

collect_ignore = []
if not toolchain.usable():
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.stem != "test_environment"]
