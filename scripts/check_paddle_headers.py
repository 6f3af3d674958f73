"""Compile the operators as a CUDA build of Paddle would, against the headers of the Paddle installed here.

PyPI has CUDA builds of Paddle 2.6 alone, but the headers of its CPU builds know PADDLE_WITH_CUDA too. Needs a
C++ compiler, no nvcc and no GPU; CUDA's headers come from PyPI (7 MB) and are kept in a folder.

    python scripts/check_paddle_headers.py temp/cuda-headers
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernel_sources

# The CUDA runtime's headers, what they include of the compiler's, and Thrust's.
WHEELS = ("nvidia-cuda-runtime==13.5.37", "nvidia-cuda-crt==13.5.37", "nvidia-cuda-cccl==13.3.5.0.6")


def cuda_includes(cache: Path) -> list[str]:
    """Return the flags for CUDA's header folders, downloaded into ``cache`` unless they are there."""
    include = cache / "nvidia/cu13/include"
    if not include.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(cache)]
        subprocess.run([*pip, *WHEELS], check=True)
    return [f"-I{include}", f"-I{include / 'cccl'}"]


def paddle_include() -> Path:
    """Return the folder of the installed Paddle's headers, without importing it."""
    spec = importlib.util.find_spec("paddle")
    if spec is None or spec.origin is None:
        sys.exit("no Paddle is installed here: pip install paddlepaddle")
    return Path(spec.origin).parent / "include"


def main() -> None:
    """Compile; the compiler's exit status is this script's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", type=Path, help="folder of CUDA's headers, filled when empty")
    cache = parser.parse_args().cache
    begin = time.monotonic()
    command = [
        *shlex.split(os.environ.get("CXX", "g++")),
        *kernel_sources.operator_flags(paddle_include(), with_cuda=True),
        *(f"-I{folder}" for folder in kernel_sources.include_dirs()),
        *cuda_includes(cache),
        *("-fsyntax-only", str(kernel_sources.ROOT / kernel_sources.OPERATOR_SOURCE)),
    ]
    status = subprocess.run(command, check=False).returncode
    if status == 0:
        version = importlib.metadata.version(importlib.metadata.packages_distributions()["paddle"][0])
        print(f"compiles with CUDA against Paddle {version}, in {time.monotonic() - begin:.0f} s")
    sys.exit(status)


if __name__ == "__main__":
    main()
