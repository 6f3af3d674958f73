"""Builds the operators, paddle_flashmask/_C.so, against the Paddle that this Python finds.

Paddle's own ``cpp_extension.setup`` would replace the package's ``__init__.py`` by a generated stub and
turn a compile error into a later link error, so this is plain setuptools: a shared library that Paddle
loads, not a Python extension module. Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import kernel_sources  # noqa: E402

try:
    import paddle
except ImportError as error:
    sys.exit(
        f"paddle_flashmask is built against an installed Paddle, and there is none here ({error}). Install "
        "paddlepaddle first, then: pip install . --no-build-isolation"
    )

OPERATOR_SOURCE = "csrc/paddle/flashmask_op.cc"


def paddle_includes() -> list[str]:
    """Paddle's header folders, Python's apart: the operators use none of it."""
    include = Path(paddle.sysconfig.get_include())
    folders = (include, include / "third_party", include / "paddle/phi/api/include/compat")
    return [str(folder) for folder in folders if folder.is_dir()]


def paddle_libraries() -> list[str]:
    """Paddle's shared libraries; they are loaded when ours is, so no path to them is recorded."""
    root = Path(paddle.__file__).parent
    parts = sorted(path for name in ("phi", "common") for path in (root / "libs").glob(f"lib{name}*.so"))
    return [str(root / "base/libpaddle.so"), *map(str, parts)]


def operator_flags() -> list[str]:
    """Flags of the one source that includes Paddle's headers; its symbols stay visible for Paddle."""
    # -w: Paddle's headers warn by the thousand. PADDLE_NO_PYTHON: it compiles in a third of the time.
    return [
        *("-std=c++17", "-O2", "-fPIC", "-w", "-D_GLIBCXX_USE_CXX11_ABI=1"),
        *("-DPADDLE_WITH_CUSTOM_KERNEL", "-DPADDLE_NO_PYTHON"),
    ]


class BuildOperators(build_ext):
    """Compiles what changed, with each source's own flags, links, and records what Paddle that was for."""

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
        newest_header = max(path.stat().st_mtime for path in (*map(Path, ext.depends), Path(__file__)))

        def compile_one(source: str) -> str:
            (target,) = self.compiler.object_filenames([source], output_dir=str(objects))
            newest = max(newest_header, Path(source).stat().st_mtime)
            if self.force or not Path(target).exists() or Path(target).stat().st_mtime < newest:
                binding = source == OPERATOR_SOURCE
                self.compiler.compile(
                    [source],
                    output_dir=str(objects),
                    include_dirs=kernel_sources.include_dirs() + (paddle_includes() if binding else []),
                    extra_postargs=operator_flags() if binding else kernel_sources.compile_flags(),
                )
            return target

        with ThreadPoolExecutor(self.parallel or os.cpu_count()) as pool:
            targets = list(pool.map(compile_one, ext.sources))
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        self.compiler.link_shared_object(
            targets,
            str(library),
            # A symbol that nobody defines fails here, not when the package is imported.
            extra_postargs=[*kernel_sources.link_flags(), "-Wl,--no-undefined", *paddle_libraries()],
            target_lang="c++",
        )
        library.with_name("_build_info.py").write_text(
            f'"""What _C.so was built against. Written by setup.py."""\n\nPADDLE_BUILD = {build!r}\n'
        )

    def copy_extensions_to_source(self) -> None:
        """For in-place and editable builds: ``_build_info.py`` goes with the library."""
        super().copy_extensions_to_source()
        package = Path(self.get_ext_filename(self.extensions[0].name)).parent
        self.copy_file(str(Path(self.build_lib) / package / "_build_info.py"), str(ROOT / package))


setup(
    ext_modules=[
        Extension(
            "paddle_flashmask._C",
            sources=[OPERATOR_SOURCE, *kernel_sources.cpu_sources()],
            depends=[*kernel_sources.headers(), "scripts/kernel_sources.py"],
        )
    ],
    cmdclass={"build_ext": BuildOperators},
)
