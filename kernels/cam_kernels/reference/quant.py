"""Quantisation of rows. Scales are what a quantised value is multiplied with to get back."""

import torch
from torch import Tensor

#: Channels that share one fp8 scale (DeepEP's format).
FP8_GROUP = 128
#: Largest finite float8_e4m3fn.
FP8_MAX = 448.0
#: DeepEP's floor under a group's largest magnitude.
FP8_FLOOR = 1e-4


def quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per row: s = amax(|row|) / 127, q = round-half-even(x / s).

    x [T, H] floating -> q int8 [T, H], s float32 [T].
    A zero row gives q = 0, s = 0; so does a row so small that amax / 127 is not a positive float32. Near that
    limit s has few bits and x / s can exceed 127: q saturates.
    NaN or infinity in a row becomes its scale, for the receiver to see; q is 0 where x / s is NaN.
    """
    x = x.float()
    amax = x.abs().amax(dim=1) if x.shape[1] else x.new_zeros(x.shape[0])
    scale = amax / 127.0
    q = torch.where(scale[:, None] > 0, x / scale[:, None], 0.0)
    return torch.round(q).clamp(-127, 127).nan_to_num(0.0).to(torch.int8), scale


def dequant_int8(q: Tensor, scale: Tensor) -> Tensor:
    """q int8 [T, H], scale float32 [T] -> float32 [T, H]."""
    return q.float() * scale[:, None]


def quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per row and group of 128 channels: s = max(|x|, 1e-4) / 448, q = e4m3(x / s), to even, at most +-448.

    x [T, H] floating -> q float8_e4m3fn [T, H], s float32 [T, ceil(H / 128)].
    """
    groups = [x[:, at : at + FP8_GROUP].float() for at in range(0, x.shape[1], FP8_GROUP)]
    values, scales = (
        [x.new_empty(x.shape[0], 0, dtype=torch.float8_e4m3fn)],
        [x.new_empty(x.shape[0], 0).float()],
    )
    for group in groups:
        scale = group.abs().amax(dim=1).clamp(min=FP8_FLOOR) / FP8_MAX
        values.append((group / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn))
        scales.append(scale[:, None])
    # Concatenated as bytes: older torch has no cat for float8.
    return torch.cat([v.view(torch.uint8) for v in values], 1).view(torch.float8_e4m3fn), torch.cat(scales, 1)


def dequant_fp8(q: Tensor, scale: Tensor) -> Tensor:
    """q float8_e4m3fn [T, H], scale float32 [T, ceil(H / 128)] -> float32 [T, H]."""
    return q.float() * scale.repeat_interleave(FP8_GROUP, dim=1)[:, : q.shape[1]]
