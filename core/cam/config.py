"""The configuration of a group: one typed object.

Where a value comes from, first wins: arguments, then CAM_<FIELD> environment variables, then the YAML file
that the caller or CAM_CONFIG names, then the default. Keys that do not exist are errors that name the near
miss, wherever they come from: a misspelt CAM_TIMOUT_S that is silently ignored costs an afternoon.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ByteSize, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from cam.errors import ConfigError

_PREFIX = "CAM_"
_FILE_VARIABLE = "CAM_CONFIG"


def _auto(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() in ("auto", "none", "") else value


#: A size in bytes: an int, or text such as "4GB" (10^9) or "512MiB" (2^20).
Bytes = Annotated[ByteSize, Field(gt=0)]


class Config(BaseSettings):
    """Settings of a group. Immutable; `Config.load` reads a file, `replace` makes a changed copy."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, extra="forbid", frozen=True, validate_default=True, env_ignore_empty=True
    )

    name: str = Field("cam", min_length=1, max_length=100)
    """Name of the group: unique among the open groups of a process, the same on all ranks."""

    timeout_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    """Deadline of every wait, in seconds. Each call can set its own."""

    window_limit: Annotated[Bytes | None, BeforeValidator(_auto)] = None
    """Most window memory this rank may hold, in bytes. None or "auto": half of the memory this process may
    use (its cgroup's limit counts), divided by the ranks on this host."""

    window_retain: Annotated[ByteSize, Field(ge=0)] = ByteSize(1 << 30)
    """Freed window memory kept for reuse, in bytes. What exceeds it goes back to the operating system."""

    spin_us: Annotated[int | None, Field(ge=0), BeforeValidator(_auto)] = None
    """Microseconds that a wait spins before it sleeps. None or "auto": 50 when every rank of this host has a
    core, else 2, because a spinning rank then keeps the rank it waits for from running."""

    threads: Annotated[int | None, Field(ge=1, le=1024), BeforeValidator(_auto)] = None
    """Threads that copy rows in this rank. None or "auto": usable cores / ranks on this host, at least 1."""

    isa: Literal["auto", "avx512", "avx2", "portable"] = "auto"
    """Instruction set of the CPU kernels; "auto" takes the best that this machine has."""

    ep_kernels: Literal["auto", "ascend"] = "auto"
    """Kernels of expert parallelism. auto: C++ for CPU tensors, the vendor's for NPU tensors. ascend: CAM's own Ascend
    kernels, on CPU tensors run from their Ascend IR (slow: for developing and testing them). The same on all ranks."""

    nontemporal_threshold: Annotated[ByteSize, Field(ge=0)] = ByteSize(1 << 20)
    """Calls that move more bytes than this write around the caches: the receiver reads them later anyway, and
    a normal store would first read each line that it overwrites."""

    collective_algorithm: Literal["auto", "flat", "direct"] = "auto"
    """How reductions are done. flat: every rank reduces everything, in one round. direct: each rank reduces its
    share and the others fetch it. The same on all ranks."""

    collective_piece: Annotated[ByteSize, Field(ge=0)] = ByteSize(0)
    """Bytes of a tensor that a rank stages for its peers at once; 0 means chosen. The same on all ranks."""

    gradient_buffer: Annotated[Bytes | None, BeforeValidator(_auto)] = None
    parameter_buffer: Annotated[Bytes | None, BeforeValidator(_auto)] = None
    temporary_buffer: Annotated[Bytes | None, BeforeValidator(_auto)] = None
    """Window memory that cam.buffers sets aside for gradients, parameters and temporaries, in bytes. None: as much as
    the first use needs. Together at most window_limit."""

    buffer_reuse: Literal["keep", "release"] = "keep"
    """What becomes of a buffer's memory when it is reset: kept for the next step, or given back."""

    def __init__(self, **fields: Any) -> None:
        _refuse_unknown(fields, "argument")
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None
        self._check_buffers()

    def _check_buffers(self) -> None:
        wanted = {
            name: getattr(self, name) or 0 for name in ("gradient_buffer", "parameter_buffer", "temporary_buffer")
        }
        if self.window_limit is not None and sum(wanted.values()) > self.window_limit:
            told = ", ".join(f"{name} {int(size)}" for name, size in wanted.items())
            raise ConfigError(f"{told}: together more than window_limit {int(self.window_limit)} (bytes)")

    @classmethod
    def load(cls, file: str | os.PathLike[str], **fields: Any) -> "Config":
        """The configuration of a YAML file, below `fields` and CAM_* variables. Raises ConfigError."""
        path = Path(file)
        below = _read_yaml(path)
        given = {name.upper() for name, value in os.environ.items() if value}
        try:
            below = {key: value for key, value in below.items() if _variable(key) not in given}
            return cls(**(below | fields))
        except ConfigError as error:
            raise ConfigError(f"{error} (with {path})") from None

    def replace(self, **fields: Any) -> "Config":
        """A copy with some fields changed, validated like any other."""
        return type(self)(**(self.model_dump() | fields))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        _refuse_unknown_variables(os.environ)
        return init_settings, env_settings, _FileNamedByEnvironment(settings_cls)


class _FileNamedByEnvironment(PydanticBaseSettingsSource):
    """The lowest source: the YAML file that CAM_CONFIG names, if any."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        name = os.environ.get(_FILE_VARIABLE)
        return _read_yaml(Path(name)) if name else {}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"configuration file {path} must hold `key: value` lines, found {content!r}")
    _refuse_unknown(content, f"key in {path}")
    return content


def _variable(field: str) -> str:
    return _PREFIX + field.upper()


def _refuse_unknown(keys: Iterable[object], kind: str) -> None:
    allowed = list(Config.model_fields)
    for key in keys:
        if key not in allowed:
            raise ConfigError(f"unknown configuration {kind} {key!r}{_near_miss(str(key), allowed)}")


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    allowed = [_FILE_VARIABLE, *map(_variable, Config.model_fields)]
    # Case-insensitive, as pydantic-settings reads them.
    unknown = [name for name in environment if name.upper().startswith(_PREFIX) and name.upper() not in allowed]
    if unknown:
        allowed += _variables_of_other_distributions()
    for name in unknown:
        if name.upper() not in allowed:
            raise ConfigError(f"unknown environment variable {name}{_near_miss(name.upper(), allowed)}")


def _variables_of_other_distributions() -> list[str]:
    """CAM_* variables that installed adapters read, announced as entry points of the group cam.variables."""
    return [point.name for point in entry_points(group="cam.variables")]


def _near_miss(key: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1)
    return f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(allowed))}"


def _explain(error: ValidationError) -> str:
    """One line per wrong value: field, value found, what is allowed, and the variable that also sets it."""
    return "; ".join(
        f"{field} = {item['input']!r} ({_variable(field)}): {item['msg']}"
        for item in error.errors(include_url=False)
        for field in [str(item["loc"][0]) if item["loc"] else "?"]
    )
