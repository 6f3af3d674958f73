"""Build the kernels, without Paddle, as plain shared libraries with the C interface of flashmask/c_api.h.

python scripts/build_kernels.py --cpu --output build/
python scripts/build_kernels.py --cuda --output build/      # everything in configs/kernels.toml
python scripts/build_kernels.py --cuda --subset ci --targets 90 --no-spills
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernel_sources

CPU_LIBRARY = "libflashmask_cpu.so"
CUDA_LIBRARY = "libflashmask_cuda.so"
SPILL = re.compile(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores", re.DOTALL)


class SpillError(RuntimeError):
    """A kernel keeps some of its registers in memory."""


def compile_changed(
    sources: Iterable[Path],
    headers: Iterable[str],
    folder: Path,
    command: Callable[[Path], list[str]],
    *,
    jobs: int | None,
    inspect: Callable[[Path, str], None] = lambda source, log: None,
) -> list[Path]:
    """Compile sources that are newer than their objects or whose command changed; return all objects' paths.

    ``command`` gives a source's compiler and flags; ``inspect`` is called with a source and what its compiler
    printed, now or when its object was made: the log beside each object, below the command. Raises
    CalledProcessError on failure.
    """
    folder.mkdir(parents=True, exist_ok=True)
    watched = [*(kernel_sources.ROOT / name for name in headers), Path(kernel_sources.__file__)]
    newest_header = max(path.stat().st_mtime for path in watched)
    includes = [f"-I{path}" for path in kernel_sources.include_dirs()]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        log = target.with_suffix(".log")
        making = target.with_suffix(".making.o")  # an interrupted compiler leaves no object
        build = [*command(source), *includes, "-c", str(source), "-o", str(making)]
        first_line = f"{shlex.join(build)}\n"
        newest = max(newest_header, source.stat().st_mtime)
        is_made = target.exists() and log.exists() and target.stat().st_mtime >= newest
        if not (is_made and log.read_text().startswith(first_line)):
            done = subprocess.run(
                build, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
            if done.returncode:
                sys.stderr.write(done.stdout)
                done.check_returncode()
            making.replace(target)
            log.write_text(first_line + done.stdout)
        inspect(source, log.read_text().removeprefix(first_line))
        return target

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        return list(pool.map(compile_one, sources))


def build_cpu(output: Path, *, compiler: str | None = None, jobs: int | None = None) -> Path:
    """Compile what changed and link it; return the library's path. Raises CalledProcessError on failure."""
    compiler = compiler or os.environ.get("CXX", "g++")
    objects = compile_changed(
        [kernel_sources.ROOT / name for name in kernel_sources.cpu_sources()],
        kernel_sources.headers(),
        output / "objects",
        lambda source: [compiler, *kernel_sources.compile_flags()],
        jobs=jobs,
    )
    library = output / CPU_LIBRARY
    command = [compiler, "-shared", *map(str, objects), *kernel_sources.link_flags(), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def instantiations(subset: str | None, folder: Path) -> list[Path]:
    """Return the generated sources: all, or those of a subset of configs/kernels.toml, put into folder."""
    if subset is None:
        return [kernel_sources.ROOT / name for name in kernel_sources.cuda_instantiations()]
    import generate_instantiations  # here, as it needs a TOML parser, which Python 3.10 lacks

    folder.mkdir(parents=True, exist_ok=True)
    files = generate_instantiations.generate(generate_instantiations.load_config(subset))
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return [folder / name for name in files]


def build_cuda(
    output: Path,
    *,
    subset: str | None = None,
    targets: Iterable[str] = kernel_sources.DEFAULT_CUDA_TARGETS,
    no_spills: bool = False,
    jobs: int | None = None,
) -> Path:
    """Compile what changed of the CUDA kernels, or of a named subset, and link it; return the library's path.

    Raises CalledProcessError on failure; with ``no_spills`` SpillError where a kernel spills registers.
    """
    nvcc = os.environ.get("NVCC", "nvcc")
    if shutil.which(nvcc) is None:
        sys.exit(f"{nvcc}: not found; the CUDA kernels need nvcc ($NVCC names it)")
    targets = list(targets)
    generated = instantiations(subset, output / f"instantiations_{subset}")

    def find_spills(source: Path, log: str) -> None:
        spilling = [f"{kernel} spills {size} bytes" for kernel, size in SPILL.findall(log) if int(size)]
        if no_spills and spilling:
            raise SpillError(f"{source.name}: {'; '.join(spilling)}")

    objects = compile_changed(
        [*(kernel_sources.ROOT / name for name in kernel_sources.cuda_sources()), *generated],
        kernel_sources.cuda_headers(),
        output / f"objects_cuda_{'_'.join(targets)}",
        lambda source: [nvcc, *kernel_sources.nvcc_flags(source.name, targets), "-Xptxas", "-v"],
        jobs=jobs,
        inspect=find_spills,
    )
    library = output / CUDA_LIBRARY
    subprocess.run([nvcc, "-shared", *map(str, objects), "-o", str(library)], check=True)
    return library


def _count(text: str) -> int:
    """Parse a number of things, 1 at least."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return count


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="build the CPU kernel")
    parser.add_argument("--cuda", action="store_true", help="build the CUDA kernels; needs nvcc ($NVCC)")
    parser.add_argument("--subset", help="of configs/kernels.toml; all when not given")
    parser.add_argument(
        "--targets",
        nargs="+",
        default=list(kernel_sources.DEFAULT_CUDA_TARGETS),
        choices=list(kernel_sources.CUDA_TARGETS),
        help="GPU architectures",
    )
    parser.add_argument("--no-spills", action="store_true", help="fail when a kernel spills registers")
    parser.add_argument("--jobs", type=_count, help="compilers at once; default: one per core")
    parser.add_argument("--output", type=Path, default=Path("build"), help="folder of the libraries")
    arguments = parser.parse_args()
    if not arguments.cpu and not arguments.cuda:
        parser.error("nothing to build: pass --cpu or --cuda")
    if arguments.cpu:
        print(build_cpu(arguments.output, jobs=arguments.jobs))
    if arguments.cuda:
        try:
            print(
                build_cuda(
                    arguments.output,
                    subset=arguments.subset,
                    targets=arguments.targets,
                    no_spills=arguments.no_spills,
                    jobs=arguments.jobs,
                )
            )
        except SpillError as error:
            sys.exit(f"registers spilled:\n{error}")


if __name__ == "__main__":
    main()
