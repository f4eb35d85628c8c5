"""torch_npu's schemas and Meta kernels, read out of the pinned wheel: it cannot be imported without CANN.

    pip download --no-deps -d build/torch_npu torch_npu==2.13.0

The wheel must never be installed beside these tests: it makes `import torch` fail where there is no NPU driver.
"""

import ast
import builtins
import re
import types
import zipfile
from pathlib import Path
from typing import Any

import torch

VERSION = "2.13.0"
FOLDER = Path(__file__).parents[2] / "build" / "torch_npu"
COMMAND = f"pip download --no-deps -d build/torch_npu torch_npu=={VERSION}"
_SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
_META = "torch_npu/op_plugin/meta/_meta_registrations.py"
_KEEP: list[Any] = []


def wheel() -> Path | None:
    """The downloaded wheel, if it is there."""
    return next(iter(sorted(FOLDER.glob(f"torch_npu-{VERSION}-*.whl"))), None)


def schemas(path: Path) -> dict[str, str]:
    """name -> schema of every operation in the namespace npu."""
    text = zipfile.ZipFile(path).read(_SCHEMAS).decode()
    found = re.findall(r"func: ((_?npu_[a-z0-9_.]+)\(.*)$", text, re.MULTILINE)
    return {name: schema for schema, name in found}


def define(names: list[str], path: Path) -> torch.library.Library:
    """Define these operations with the wheel's schemas, for implementations of the tests' own."""
    library = torch.library.Library("npu", "FRAGMENT")
    known = schemas(path)
    for name in names:
        library.define(known[name])
    return library


def load_meta(names: list[str], path: Path) -> None:
    """Define these operations and register the wheel's Meta kernels for them. Once per process."""
    _KEEP.append(define(names, path))
    tree = ast.parse(zipfile.ZipFile(path).read(_META))
    tree.body = [node for node in tree.body if _wanted(node, names)]
    namespace: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": _import}}
    exec(compile(tree, _META, "exec"), namespace)
    _KEEP.append(namespace)


def _wanted(node: ast.stmt, names: list[str]) -> bool:
    """Helpers, tables and imports; of the registered kernels only those asked for."""
    if not isinstance(node, ast.FunctionDef):
        return isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.ClassDef)
    text = " ".join(ast.unparse(each) for each in node.decorator_list)
    return not text or any(f"'{name}'" in text for name in names)


class _ErrorCodes:
    def __getattr__(self, name: str) -> str:
        return name


def _import(name: str, *arguments: Any, **keywords: Any) -> Any:
    """The imports of the Meta kernels' file, answered without torch_npu and without touching sys.modules."""
    if name != "torch_npu" and not name.startswith("torch_npu."):
        return __import__(name, *arguments, **keywords)
    return types.SimpleNamespace(
        # Enumerators that stand for types torch does not have.
        float4_e2m1fn_x2=296,
        float4_e1m2fn_x2=297,
        hifloat8=290,
        int4=285,
        float8_e8m0fnu=44,
        ErrCode=_ErrorCodes(),
        ops_error=_ops_error,
        get_cann_version=lambda *_: "8.5.0",
        get_soc_version=lambda: 220,
    )


def _ops_error(code: object) -> str:
    return f" ({code})"
