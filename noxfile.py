"""One environment for each version or framework that CAM promises to work with: `nox -l` lists them.

`make test` is the everyday command; this is for the breadth.
"""

from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
TEST_TOOLS = ("pytest>=8", "pytest-timeout", "hypothesis", "numpy", "matplotlib")


def install(session: nox.Session, *first: str) -> None:
    """Installs `first` (a framework brings its own torch), then this tree's distributions."""
    session.install(*first)
    session.install("./kernels", "./core[bench]", *TEST_TOOLS)
    for adapter in _adapter_folders():
        session.install(adapter)


@nox.session
@nox.parametrize("torch", ["2.8.0", "2.13.0"])
def tests(session: nox.Session, torch: str) -> None:
    """The whole suite with the oldest and the newest torch."""
    install(session, f"torch=={torch}")
    session.run("python", "-m", "pytest", "tests", *_adapters(), *session.posargs)


@nox.session
def ascend(session: nox.Session) -> None:
    """The Ascend kernels from their Ascend IR, and their HIVM. Needs Debian's mlir-19-tools and llvm-19.

    An environment of its own: triton-ascend owns the import name `triton`. Versions as in cam_kernels.ascend.toolchain.
    """
    session.install("torch==2.13.0", "numpy==1.26.4", "pybind11", "setuptools", "attrs")
    session.install("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0")
    session.install("./kernels", "pytest>=8", "pytest-timeout", "hypothesis")
    session.run("python", "-m", "pytest", "tests/ascend", *session.posargs)


@nox.session
def npu(session: nox.Session) -> None:
    """The NPU backend of core against torch_npu's schemas and Meta kernels. The wheel is read, never installed."""
    install(session, "torch==2.13.0")
    if not list(ROOT.glob("build/torch_npu/torch_npu-2.13.0-*.whl")):
        session.run("python", "-m", "pip", "download", "--no-deps", "-d", "build/torch_npu", "torch_npu==2.13.0")
    session.run("python", "-m", "pytest", "tests/npu", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Wheels of all distributions, into dist/."""
    session.install("build")
    for folder in ("kernels", "core", *_adapter_folders()):
        session.run("python", "-m", "build", "--wheel", "--outdir", "dist", folder)


DEEPSPEED = "0.19.8"


def _install_deepspeed(session: nox.Session) -> None:
    # Its requirements must not bring another torch than the one that it is built beside.
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("torch==2.13.0\n")
    environment = {
        "PIP_CONSTRAINT": str(constraints.absolute()),
        "DS_BUILD_OPS": "0",
        "DS_ACCELERATOR": "cpu",
    }
    session.install("torch", "numpy", "setuptools", "wheel", "ninja", env=environment)
    session.install(f"deepspeed=={DEEPSPEED}", "--no-build-isolation", env=environment)
    install(session, "pytest>=8")


@nox.session
def deepspeed(session: nox.Session) -> None:
    """The tests of adapters/deepspeed."""
    _install_deepspeed(session)
    session.run("python", "-m", "pytest", "adapters/deepspeed", *session.posargs)


@nox.session
def suite_deepspeed(session: nox.Session) -> None:
    """DeepSpeed's own tests, on gloo and on cam: `nox -s suite_deepspeed -- --source /path/to/DeepSpeed`."""
    _install_deepspeed(session)
    session.run("python", "-m", "ci", "deepspeed", *session.posargs)


def _adapters() -> tuple[str, ...]:
    return ("adapters",) if (ROOT / "adapters").is_dir() else ()


def _adapter_folders() -> tuple[str, ...]:
    return tuple(str(path.parent.relative_to(ROOT)) for path in sorted(ROOT.glob("adapters/*/pyproject.toml")))
