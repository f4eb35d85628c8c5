"""Compiled artefacts on disk, found by the hash of everything they were made from.

Entries are immutable and appear atomically (written beside, then renamed); nothing is ever edited in place, and
removing the directory is safe while nothing compiles.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def default_directory() -> Path:
    """$XDG_CACHE_HOME/cam-kernels/ascend, or the same under ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "cam-kernels" / "ascend"


def content_key(*parts: str) -> str:
    """A name for what is made from `parts`, which must include every version and option that matters."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:32]


class ArtefactCache:
    """A directory of files named by content hash."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_directory()

    def get(self, key: str, suffix: str, make: Callable[[], bytes]) -> Path:
        """The file for `key`; `make` runs only when it is not there yet."""
        path = self.directory / key[:2] / f"{key}{suffix}"
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks start together and want the same kernels: one compiles, the others wait for it. The lock goes with its
        # holder, however it ends.
        with (path.parent / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                self._store(path, suffix, make())
        return path

    def _store(self, path: Path, suffix: str, content: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=suffix)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
