"""python -m cam_kernels.ascend: look at kernels and at what checks say about them.

tools                         which compilers are here, and how to get those that are not
list                          the declared variants
check [KERNEL]                compile for all targets and apply the rules; exit code 1 when one is broken
show KERNEL [--stage STAGE] [--target TARGET]
                              the IR of a kernel's first declared variant. STAGE: linalg, portable (what upstream
                              MLIR gets), hivm (default). TARGET: A2, A3 (default), A5
"""

from __future__ import annotations

import argparse
import sys

from cam_kernels.ascend import toolchain
from cam_kernels.ascend.errors import AscendError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cam_kernels.ascend", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tools")
    commands.add_parser("list")
    commands.add_parser("check").add_argument("kernel", nargs="?")
    show = commands.add_parser("show")
    show.add_argument("kernel")
    show.add_argument("--stage", choices=("linalg", "portable", "hivm"), default="hivm")
    show.add_argument("--target", choices=("A2", "A3", "A5"), default="A3")
    given = parser.parse_args(arguments)
    try:
        if given.command == "tools":
            return _tools()
        if given.command == "list":
            return _list()
        if given.command == "check":
            return _check(given.kernel)
        return _show(given.kernel, given.stage, given.target)
    except AscendError as error:
        print(error, file=sys.stderr)
        return 1


def _tools() -> int:
    for status in toolchain.report():
        print(f"{'yes' if status.usable else 'no ':3}  {status.tool:22}{status.detail}")
    return 0 if toolchain.usable() else 1


def _list() -> int:
    from cam_kernels.ascend.catalogue import declared

    for each in declared():
        print(each)
    return 0


def _check(kernel: str | None) -> int:
    from cam_kernels.ascend import hivm, linalg
    from cam_kernels.ascend.catalogue import declared
    from cam_kernels.ascend.hivm_check import check

    broken = 0
    chosen = [each for each in declared() if kernel in (None, each.variant.name)]
    for each in chosen:
        for target in hivm.TARGETS:
            report = check(hivm.compile_hivm(linalg.lower(each.variant), target), each.expected)
            for finding in report.findings:
                print(f"{each} for {target}: {finding}")
            broken += bool(report.findings)
    print(f"{len(chosen)} variants for {len(hivm.TARGETS)} targets, {broken} with findings")
    return 1 if broken or not chosen else 0


def _show(kernel: str, stage: str, target: str) -> int:
    from cam_kernels.ascend import hivm, linalg, native
    from cam_kernels.ascend.catalogue import declared

    variants = {each.variant.name: each.variant for each in reversed(declared())}
    if kernel not in variants:
        print(f"no kernel {kernel!r}; there are {', '.join(sorted(variants))}", file=sys.stderr)
        return 1
    module = linalg.lower(variants[kernel])
    if stage == "linalg":
        print(module.text)
    elif stage == "portable":
        print(native.portable(module))
    else:
        name = {"A2": hivm.A2, "A3": hivm.A3, "A5": hivm.A5}[target]
        print(hivm.compile_hivm(module, name).text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
