"""CAM's operations as torch.library ops: schema, shapes for tracing, gradients, and the kernels of each device.

One module per job. A schema is the contract; `*_cpu.py` implements it over the native kernels; other devices register
their own implementation under their dispatch key. Ops name their group by a string, as torch's own functional
collectives do, so that a traced graph can be compiled and stored.
"""
