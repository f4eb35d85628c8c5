"""Pickling between pytest and the ranks.

Plain pickle, with two differences. Tensors travel as their bytes (torch's own reductions either share memory,
which would keep a rank's window alive, or write the whole storage behind a view). Exceptions are rebuilt
without calling __init__, because an __init__ with keyword-only arguments cannot be unpickled.
"""

import io
import pickle
from typing import Any

import torch


def dumps(value: object) -> bytes:
    out = io.BytesIO()
    _Pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return out.getvalue()


loads = pickle.loads


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            flat = value.detach().contiguous().view(-1)
            data = b"" if flat.numel() == 0 else flat.view(torch.uint8).numpy().tobytes()
            return _tensor, (data, value.dtype, tuple(value.shape))
        if isinstance(value, BaseException):
            return _exception, (type(value), value.args, dict(vars(value)))
        return NotImplemented


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


def _exception(kind: type[BaseException], args: tuple[object, ...], attributes: dict[str, object]) -> BaseException:
    try:
        error = kind.__new__(kind, *args)
    except TypeError:  # several built-in bases: Python itself would use the first one's
        error = Exception.__new__(kind, *args)
    error.args = args
    for name, value in attributes.items():
        setattr(error, name, value)
    return error
