"""The native module, or, where it does not load, the reason why.

`import cam` works without it, so that `cam doctor` can say what is wrong; the first use raises BackendUnavailable.
"""

from typing import TYPE_CHECKING, NoReturn

from cam.errors import BackendUnavailable

__all__ = ["LOADED", "kernels"]


class _Missing:
    def __init__(self, why: ImportError) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise BackendUnavailable(
            f"no kernels are available; cpu (cam_kernels) could not be loaded: {self._why}. "
            "Install cam-kernels of the same version as cam"
        ) from self._why


if TYPE_CHECKING:
    import cam_kernels as kernels

    LOADED = True
else:
    try:
        import cam_kernels as kernels

        LOADED = True
    except ImportError as error:
        kernels = _Missing(error)
        LOADED = False
