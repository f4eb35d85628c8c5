"""These tests need the Ascend compilers and an environment of their own: `nox -s ascend`.

Elsewhere only test_environment.py is collected, and says so. What cannot be imported here must not be collected.
"""

from cam_kernels.ascend import toolchain

collect_ignore_glob = [] if toolchain.usable() else ["test_[!e]*.py"]
