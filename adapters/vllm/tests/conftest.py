"""Tests that need vLLM skip themselves where it is not installed; `make test-vllm` runs all."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
