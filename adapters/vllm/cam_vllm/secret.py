"""What both sides of a transfer must know: the content of a file that only their user can read."""

import os
import secrets
import stat
from pathlib import Path

from cam.errors import ConfigError

_BYTES = 32


def load(file: str | None) -> bytes:
    """The secret in `file`; None: this user's own, made now if there is none. Raises ConfigError."""
    return _read(Path(file)) if file else _own(_own_path())


def _own_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "cam" / "kv-secret"


def _own(path: Path) -> bytes:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(path)
    except OSError as error:
        raise ConfigError(f"no secret can be kept in {path}: {error}; name one with secret_file") from None
    return _read(path)


def _create(path: Path) -> None:
    """Whole or not at all, also when several servers start at once: the first one's link wins."""
    if path.exists():
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(_BYTES).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        content = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"secret_file {path} cannot be read: {error}") from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"secret_file {path} is open to others (mode {stat.S_IMODE(status.st_mode):o}); chmod 600 it")
    if len(content) < 16:
        raise ConfigError(f"secret_file {path} holds {len(content)} bytes; 16 are the least")
    return content
