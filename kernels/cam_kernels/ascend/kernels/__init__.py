"""The Triton-Ascend kernels, one family to a file. Host code that runs them is one floor up."""
