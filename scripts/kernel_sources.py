"""The one list of kernel sources and flags: setup.py and scripts/build_kernels.py build from it.

For setup.py: add ``cpu_sources()``, ``include_dirs()``, ``compile_flags()`` and ``link_flags()`` to the
extension. The CPU kernel needs no library beyond the C++ standard library and threads: its tile products are
its own (docs/cpu-kernel.md says why), so there is nothing to preload and no rpath to set.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cpu_sources() -> list[str]:
    """Return the C++ sources of the CPU kernel, relative to the root as setuptools wants them."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc" / "cpu").glob("*.cc"))


def headers() -> list[str]:
    """Return every header the sources may include, relative to the root: for sdists and rebuild checks."""
    folders = ("csrc/include", "csrc/common", "csrc/cpu")
    return sorted(p.relative_to(ROOT).as_posix() for folder in folders for p in (ROOT / folder).rglob("*.h"))


def include_dirs() -> list[str]:
    """Return the include directories as absolute paths."""
    return [str(ROOT / "csrc"), str(ROOT / "csrc" / "include")]


def compile_flags() -> list[str]:
    """Return the C++ compiler's flags.

    No instruction set is named: the sources themselves hold one instance per instruction set and choose at
    run time, so that the binary runs on any machine of its architecture.
    """
    return ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi"]


def link_flags() -> list[str]:
    """Return the linker's flags."""
    return ["-pthread"]
