"""One environment for each version or framework that CAM promises to work with: `nox -l` lists them.

`make test` is the everyday command; this is for the breadth.
"""

import shlex
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
TEST_TOOLS = ("pytest>=8", "pytest-timeout", "hypothesis", "numpy", "matplotlib")


def install(session: nox.Session, *first: str) -> None:
    """Installs `first` (a framework brings its own torch), then this tree's distributions."""
    session.install(*first)
    install_cam(session, "./core[bench,nixl,mooncake]", *TEST_TOOLS, *_adapter_folders())


def install_cam(session: nox.Session, *what: str) -> None:
    """The kernels' wheel, which the Makefile builds once for all environments, and `what`."""
    session.run("make", "--no-print-directory", "build/wheels/built", external=True)
    wheels = [str(wheel) for wheel in sorted(ROOT.glob("build/wheels/cam_kernels-*.whl"))]
    session.install("--no-deps", "--force-reinstall", *wheels)
    session.install(*what)


def make(session: nox.Session, target: str, variable: str) -> None:
    """`make target`, with what was given after -- in `variable`."""
    session.run("make", "--no-print-directory", target, f"{variable}={shlex.join(session.posargs)}", external=True)


@nox.session
@nox.parametrize("torch", ["2.8.0", "2.13.0"])
def tests(session: nox.Session, torch: str) -> None:
    """The whole suite with the oldest and the newest torch."""
    install(session, f"torch=={torch}")
    session.run("python", "-m", "pytest", "tests", *_adapters(), *session.posargs)


# The frameworks' environments belong to the Makefile, which `make demo` shares; here they have their names only.


@nox.session(venv_backend="none")
def vllm(session: nox.Session) -> None:
    """cam-vllm's own tests, with real vLLM engines."""
    make(session, "test-vllm", "PYTEST_ARGS")


@nox.session(venv_backend="none")
def suite_vllm(session: nox.Session) -> None:
    """vLLM's own test suite, as it is and with CAM in place. Options: those of `python -m ci`."""
    make(session, "suite-vllm", "SUITE_ARGS")


@nox.session(venv_backend="none")
def deepspeed(session: nox.Session) -> None:
    """cam-deepspeed's own tests, with DeepSpeed."""
    make(session, "test-deepspeed", "PYTEST_ARGS")


@nox.session(venv_backend="none")
def suite_deepspeed(session: nox.Session) -> None:
    """DeepSpeed's own tests, as they are and with CAM: `nox -s suite_deepspeed -- --source /path/to/DeepSpeed`."""
    make(session, "suite-deepspeed", "SUITE_ARGS")


@nox.session
def ascend(session: nox.Session) -> None:
    """The Ascend kernels from their Ascend IR, and their HIVM. Needs Debian's mlir-19-tools and llvm-19.

    An environment of its own: triton-ascend owns the import name `triton`. Versions as in cam_kernels.ascend.toolchain.
    """
    session.install("torch==2.13.0", "numpy==1.26.4", "pybind11", "setuptools", "attrs")
    session.install("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0")
    install_cam(session, "./core", "pytest>=8", "pytest-timeout", "hypothesis")
    session.run("python", "-m", "pytest", "tests/ascend", *session.posargs)
    # The conformance suite once more, with these kernels behind cam.ep.Buffer.
    session.run("python", "-m", "pytest", "tests/conformance", "-k", "ascend-ir", *session.posargs)


@nox.session
def npu(session: nox.Session) -> None:
    """The NPU backend of core against torch_npu's schemas and Meta kernels. The wheel is read, never installed."""
    install(session, "torch==2.13.0")
    if not list(ROOT.glob("build/torch_npu/torch_npu-2.13.0-*.whl")):
        session.run("python", "-m", "pip", "download", "--no-deps", "-d", "build/torch_npu", "torch_npu==2.13.0")
    session.run("python", "-m", "pytest", "tests/npu", *session.posargs)


@nox.session
def c10d(session: nox.Session) -> None:
    """PyTorch's own tests of torch.distributed, with cam as the backend."""
    install(session, "torch==2.13.0")
    own = "tests/core/collectives/torch_own.py"
    session.run("python", "-m", "pytest", own, "--timeout=600", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Wheels of all distributions, into dist/."""
    session.install("build")
    for folder in ("kernels", "core", *_adapter_folders()):
        session.run("python", "-m", "build", "--wheel", "--outdir", "dist", folder)


def _adapters() -> tuple[str, ...]:
    return ("adapters",) if (ROOT / "adapters").is_dir() else ()


def _adapter_folders() -> tuple[str, ...]:
    return tuple(str(path.parent.relative_to(ROOT)) for path in sorted(ROOT.glob("adapters/*/pyproject.toml")))
