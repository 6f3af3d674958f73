"""Build the kernels, without Paddle, as a plain shared library with the C interface of flashmask/c_api.h.

python scripts/build_kernels.py --cpu --output build/
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernel_sources

CPU_LIBRARY = "libflashmask_cpu.so"


def build_cpu(output: Path, *, compiler: str | None = None, jobs: int | None = None) -> Path:
    """Compile what changed and link it; return the library's path. Raises CalledProcessError on failure."""
    compiler = compiler or os.environ.get("CXX", "g++")
    objects_dir = output / "objects"
    objects_dir.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{folder}" for folder in kernel_sources.include_dirs()]
    headers = [kernel_sources.ROOT / name for name in kernel_sources.headers()]
    newest_header = max(path.stat().st_mtime for path in (*headers, Path(kernel_sources.__file__)))

    def compile_one(name: str) -> Path:
        source = kernel_sources.ROOT / name
        target = objects_dir / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < max(newest_header, source.stat().st_mtime):
            command = [
                compiler,
                *kernel_sources.compile_flags(),
                *includes,
                "-c",
                str(source),
                "-o",
                str(target),
            ]
            subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, kernel_sources.cpu_sources()))
    library = output / CPU_LIBRARY
    command = [compiler, "-shared", *map(str, objects), *kernel_sources.link_flags(), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="build the CPU kernel")
    parser.add_argument("--output", type=Path, default=Path("build"), help="folder of the library")
    arguments = parser.parse_args()
    if not arguments.cpu:
        parser.error("nothing to build: pass --cpu")
    print(build_cpu(arguments.output))


if __name__ == "__main__":
    main()
