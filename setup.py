"""Builds the operators, paddle_flashmask/_C.so, against the Paddle that this Python finds.

With a CUDA build of Paddle the CUDA kernels are built too, by nvcc ($NVCC, or the one on PATH). They take
long, all of them an hour on a few cores; the environment says what is wanted:

    FLASHMASK_CUDA_TARGETS   GPU architectures, some of kernel_sources.CUDA_TARGETS ("80 90", which serves all
                             from Ampere on); empty: no CUDA kernels
    FLASHMASK_SUBSET         a subset named in configs/kernels.toml (every kernel)

Paddle's own ``cpp_extension.setup`` would replace the package's ``__init__.py`` by a generated stub and
turn a compile error into a later link error, so this is plain setuptools: a shared library that Paddle
loads, not a Python extension module. Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import build_kernels  # noqa: E402
import kernel_sources  # noqa: E402

try:
    import paddle
except ImportError as error:
    sys.exit(
        f"paddle_flashmask is built against an installed Paddle, and there is none here ({error}). Install "
        "paddlepaddle first, then: pip install . --no-build-isolation"
    )

COMPILER = shlex.split(os.environ.get("CXX", "g++"))
NVCC = os.environ.get("NVCC", "nvcc")


def cuda_targets() -> list[str]:
    """What the CUDA kernels are built for; nothing where Paddle has no CUDA."""
    if not paddle.is_compiled_with_cuda():
        return []
    known = kernel_sources.CUDA_TARGETS
    default = kernel_sources.DEFAULT_CUDA_TARGETS
    targets = os.environ.get("FLASHMASK_CUDA_TARGETS", " ".join(default)).split()
    if not set(targets) <= set(known):
        sys.exit(f"FLASHMASK_CUDA_TARGETS: expected some of {' '.join(known)}, got {' '.join(targets)}")
    if targets and shutil.which(NVCC) is None:
        sys.exit(
            f"Paddle is a CUDA build, but there is no {NVCC} to compile the CUDA kernels: install the CUDA "
            "toolkit, or name it by NVCC=, or build the CPU kernel alone by FLASHMASK_CUDA_TARGETS="
        )
    return targets


def paddle_libraries() -> list[str]:
    """Paddle's shared libraries; they are loaded when ours is, so no path to them is recorded."""
    root = Path(paddle.__file__).parent
    parts = sorted(path for name in ("phi", "common") for path in (root / "libs").glob(f"lib{name}*.so"))
    return [str(root / "base/libpaddle.so"), *map(str, parts)]


def operator_command(targets: list[str]) -> list[str]:
    """The compiler of the one source that includes Paddle's headers, and its flags."""
    include = Path(paddle.sysconfig.get_include())
    flags = kernel_sources.operator_flags(include, with_cuda=bool(targets))
    # nvcc hands a C++ source to the host's compiler, and knows where CUDA's headers are.
    return [NVCC, "-Xcompiler=-fPIC,-w", *flags] if targets else [*COMPILER, "-fPIC", *flags]


def link_command(targets: list[str]) -> list[str]:
    """The linker and its flags; a symbol that nobody defines fails here, not when the package is imported."""
    if not targets:
        return [*COMPILER, "-shared", *kernel_sources.link_flags(), "-Wl,--no-undefined"]
    # nvcc links its own CUDA runtime statically, whatever Paddle's is: the two must not mix, so it is hidden.
    options = ("--no-undefined", "--exclude-libs=ALL")
    host = [f"-Xcompiler={flag}" for flag in kernel_sources.link_flags()]
    return [NVCC, "-shared", *host, *(f"-Xlinker={option}" for option in options)]


class BuildOperators(build_ext):
    """Compiles what changed, with each source's own flags, links, and records what that was built for."""

    def get_ext_filename(self, fullname: str) -> str:
        """``paddle_flashmask/_C.so``: no Python tag, as it is no Python module."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        """Nothing: there is no ``PyInit__C``."""
        return []

    def build_extension(self, ext: Extension) -> None:
        """Compile, link, and write ``_build_info.py`` beside the library."""
        build = f"{paddle.__version__} (CUDA {paddle.version.cuda()})"
        # One folder of objects per Paddle, as the same tree may be built for several.
        objects = Path(self.build_temp) / build.replace(" ", "-").translate(str.maketrans("", "", "()"))
        if self.force:
            shutil.rmtree(objects, ignore_errors=True)
        targets = cuda_targets()
        operator = ROOT / kernel_sources.OPERATOR_SOURCE
        compiled = build_kernels.compile_changed(
            [operator, *(ROOT / name for name in kernel_sources.cpu_sources())],
            [*kernel_sources.headers(), "setup.py"],
            objects / ("host_with_cuda" if targets else "host"),
            lambda source: (
                operator_command(targets)
                if source == operator
                else [*COMPILER, *kernel_sources.compile_flags()]
            ),
            jobs=self.parallel,
        )
        generated: list[Path] = []
        if targets:
            subset = os.environ.get("FLASHMASK_SUBSET")
            generated = build_kernels.instantiations(subset, objects / f"instantiations_{subset}")
            compiled += build_kernels.compile_changed(
                [*(ROOT / name for name in kernel_sources.cuda_sources()), *generated],
                kernel_sources.cuda_headers(),
                objects / f"cuda_{'_'.join(targets)}",
                lambda source: [NVCC, *kernel_sources.nvcc_flags(source.name, targets)],
                jobs=self.parallel,
            )
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        inputs = [*map(str, compiled), *paddle_libraries()]
        subprocess.run([*link_command(targets), *inputs, "-o", str(library)], check=True)
        kernels = tuple(path.stem for path in generated if path.suffix == ".cu")
        library.with_name("_build_info.py").write_text(
            '"""What _C.so was built for. Written by setup.py."""\n\n'
            f"PADDLE_BUILD = {build!r}\n"
            f"CUDA_TARGETS = {tuple(targets)!r}  # GPU architectures\n"
            f"CUDA_KERNELS = {kernels!r}  # architecture, pass, largest head dims, dtype\n"
        )

    def copy_extensions_to_source(self) -> None:
        """For in-place and editable builds: ``_build_info.py`` goes with the library."""
        super().copy_extensions_to_source()
        package = Path(self.get_ext_filename(self.extensions[0].name)).parent
        self.copy_file(str(Path(self.build_lib) / package / "_build_info.py"), str(ROOT / package))


setup(
    license="Apache-2.0",
    ext_modules=[
        Extension(
            "paddle_flashmask._C",
            sources=[kernel_sources.OPERATOR_SOURCE, *kernel_sources.cpu_sources()],
            depends=kernel_sources.headers(),
        )
    ],
    cmdclass={"build_ext": BuildOperators},
)
