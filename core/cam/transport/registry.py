"""The transports by name. Each is imported when it is first asked for: some bring large libraries."""

import importlib
import threading
from collections.abc import Callable

from cam.errors import BackendUnavailable
from cam.transport.protocol import Home, Transport

Factory = Callable[[Home], Transport]

_lock = threading.Lock()
#: name -> (module, class, distribution to install)
_known: dict[str, tuple[str, str, str]] = {
    "shm": ("cam.transport.shm", "Shm", "cam-kernels"),
    "cma": ("cam.transport.cma", "Cma", "cam-kernels"),
    "nixl": ("cam.transport.nixl", "Nixl", "nixl-cu12"),
    "mooncake": ("cam.transport.mooncake", "Mooncake", "mooncake-transfer-engine-non-cuda"),
}


def register(name: str, module: str, attribute: str, distribution: str = "") -> None:
    """Adds a transport: attribute of module, called with a Home. Raises BackendUnavailable for a name taken."""
    with _lock:
        if _known.get(name, (module, attribute, distribution)) != (module, attribute, distribution):
            raise BackendUnavailable(f"transport {name!r} is registered already: {_known[name][0]}")
        _known[name] = (module, attribute, distribution)


def names() -> tuple[str, ...]:
    """All that are registered, whether they can be loaded or not."""
    with _lock:
        return tuple(_known)


def available() -> dict[str, str]:
    """Every registered transport: "" when it can be loaded here, else why it cannot. Loads them."""
    reasons = {}
    for name in names():
        try:
            _load(name)
        except BackendUnavailable as error:
            reasons[name] = str(error)
        else:
            reasons[name] = ""
    return reasons


def create(name: str, home: Home) -> Transport:
    """Raises BackendUnavailable, which lists the transports that exist and why each other cannot be loaded."""
    try:
        return _load(name)(home)
    except BackendUnavailable as error:
        raise BackendUnavailable(f"{error}; {_listing(name)}") from error


def unknown(name: str) -> BackendUnavailable:
    """The error for a name that is not registered."""
    return BackendUnavailable(f"there is no transport {name!r}; {_listing(name)}")


def _load(name: str) -> Factory:
    with _lock:
        entry = _known.get(name)
    if entry is None:
        raise BackendUnavailable(f"there is no transport {name!r}")
    module, attribute, distribution = entry
    try:
        factory: Factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, OSError, AttributeError) as error:
        hint = f" (pip install {distribution})" if distribution else ""
        raise BackendUnavailable(f"transport {name!r} cannot be loaded: {error}{hint}") from error
    return factory


def _listing(but: str) -> str:
    good, bad = [], []
    for name, reason in available().items():
        if name != but:
            bad.append(reason) if reason else good.append(name)
    text = f"these can be used: {', '.join(good) or 'none'}"
    return text + (f"; and not: {'; '.join(bad)}" if bad else "")
