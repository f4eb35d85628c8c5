"""The golden runs in pytest's process beside ranks that use all cores: one thread is enough for its small tensors."""

import torch

torch.set_num_threads(1)
