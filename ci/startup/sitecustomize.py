"""On PYTHONPATH of a counted run: every interpreter that it starts imports this first."""

import os

from ci import calls

calls.install(os.environ)
