"""The one list of kernel sources and flags: setup.py and scripts/build_kernels.py build from it.

For setup.py: add ``cpu_sources()``, ``include_dirs()``, ``compile_flags()`` and ``link_flags()`` to the
extension. The CPU kernel needs no library beyond the C++ standard library and threads: its tile products are
its own (docs/cpu-kernel.md says why), so there is nothing to preload and no rpath to set.
"""

from __future__ import annotations

from collections.abc import Iterable
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


OPERATOR_SOURCE = "csrc/paddle/flashmask_op.cc"


def operator_flags(paddle_include: Path, *, with_cuda: bool) -> list[str]:
    """Return the C++ compiler's flags for OPERATOR_SOURCE, the one that includes Paddle's headers.

    Python's headers are not needed, and without them it compiles in a third of the time. Its symbols stay
    visible for Paddle. With CUDA, whose headers the caller adds, it stays a host source: all that Paddle's
    headers take from Thrust is a complex number.
    """
    defines = ["_GLIBCXX_USE_CXX11_ABI=1", "PADDLE_WITH_CUSTOM_KERNEL", "PADDLE_NO_PYTHON"]
    if with_cuda:
        defines += ["PADDLE_WITH_CUDA", "THRUST_DEVICE_SYSTEM=THRUST_DEVICE_SYSTEM_CPP"]
    folders = (
        paddle_include,
        paddle_include / "third_party",
        paddle_include / "paddle/phi/api/include/compat",
    )
    return [
        *("-std=c++17", "-O2", "-w"),  # -w: Paddle's headers warn by the thousand
        *(f"-D{define}" for define in defines),
        *(f"-I{folder}" for folder in folders if folder.is_dir()),
    ]


# What the CUDA kernels can be compiled for. Code for 8.0 also runs on 8.6 and 8.9, PTX on what follows 9.0.
# 80-on-90 is for tests: what the portable kernels are on cards before Hopper, as code that a Hopper runs.
CUDA_TARGETS = {
    "80": "-gencode=arch=compute_80,code=sm_80",
    "86": "-gencode=arch=compute_86,code=sm_86",
    "89": "-gencode=arch=compute_89,code=sm_89",
    "90": "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    "80-on-90": "-gencode=arch=compute_80,code=sm_90",
}
DEFAULT_CUDA_TARGETS = ("80", "90")
HOPPER_TARGET = "-gencode=arch=compute_90a,code=sm_90a"


def cuda_sources() -> list[str]:
    """Return the sources of the CUDA kernels but for the generated ones, relative to the root."""
    return [
        *("csrc/common/c_api.cc", "csrc/common/dispatch.cc"),
        *("csrc/common/classify.cu", "csrc/common/mask_prepass.cu", "csrc/common/merge_splits.cu"),
        "csrc/sm90/tensor_map.cc",
    ]


def cuda_instantiations() -> list[str]:
    """Return the generated sources of the CUDA kernels, relative to the root."""
    folder = ROOT / "csrc" / "instantiations"
    return sorted(path.relative_to(ROOT).as_posix() for path in folder.glob("*.c[cu]"))


def cuda_headers() -> list[str]:
    """Return every header the CUDA sources may include, relative to the root."""
    folders = [ROOT / name for name in ("csrc/include", "csrc/common", "csrc/sm80", "csrc/sm90")]
    paths = (path for folder in folders for path in folder.rglob("*") if path.suffix in (".h", ".cuh"))
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def nvcc_flags(source: str, targets: Iterable[str] = DEFAULT_CUDA_TARGETS) -> list[str]:
    """Return nvcc's flags for a source, by its file name, and some of CUDA_TARGETS.

    ptxas schedules the backward kernels best at its lowest level: above it, it fetches operands so early that
    the accumulators' registers spill (measured on an H200: docs/kernel-notes.md).
    """
    level = ["-Xptxas", "-O1"] if Path(source).name.startswith("sm80_backward") else []
    host = ["-Xcompiler", "-fPIC,-fvisibility=hidden"]
    # The Hopper kernels use what only sm_90a has.
    hopper = Path(source).name.startswith("sm90_")
    # What the families share waits on a Hopper for kernels before it, as only code for 9.0 does: KernelChain.
    if not Path(source).name.startswith("sm80_"):
        targets = dict.fromkeys("90" if target == "80-on-90" else target for target in targets)
    code = [HOPPER_TARGET] if hopper else [CUDA_TARGETS[target] for target in targets]
    return ["-std=c++17", "-O3", *host, *level, *code]
