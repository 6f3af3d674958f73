"""Build variants of the CUDA kernels, and time them in turns with each other, a peer and a large matmul.

A variant is the library of build/ with some of its generated sources edited: NAME:UNIT:OLD=NEW, where UNIT
is a file of csrc/instantiations without its ending and OLD, NEW are Config arguments. A name given twice
edits both units. For example, after `python scripts/build_kernels.py --cuda --targets 90 --output build`:

python scripts/bench/variants.py --masks full causal --head-dims 64 --directions forward --peers cudnn \\
    --variant "192:sm90_forward_d64_bf16:64, 3, 128, 4=64, 2, 192, 2"
python scripts/bench/variants.py --masks causal --head-dims 128 --directions backward \\
    --variant "3 stages:sm90_backward_d128_bf16:64, 2, false=64, 3, false"

Every variant's results are checked before they are timed. Prints TFLOP/s, the unedited library first. This is
how a change of tiles or schedule is decided; docs/kernel-notes.md keeps what came of it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kernel_sources
from cells import DIRECTIONS, PEER_NAMES, ROOT, TWELVE, paper_case

UNEDITED = "unedited"


@dataclass(frozen=True)
class Edit:
    """One generated source of a variant, and what is replaced in it."""

    unit: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the edited source. Raises ValueError where there is nothing to replace."""
        if self.old not in text:
            raise ValueError(f"{self.unit}: expected {self.old!r} in it")
        return text.replace(self.old, self.new)


def parse_variants(values: Iterable[str]) -> dict[str, list[Edit]]:
    """Map names to edits. Raises ValueError for what does not read NAME:UNIT:OLD=NEW."""
    variants: dict[str, list[Edit]] = {}
    for value in values:
        name, _, rest = value.partition(":")
        unit, _, replacement = rest.partition(":")
        old, equals, new = replacement.partition("=")
        if not (name and unit and old and equals) or name == UNEDITED:
            raise ValueError(f"--variant: expected NAME:UNIT:OLD=NEW, got {value!r}")
        variants.setdefault(name, []).append(Edit(unit, old, new))
    return variants


def build(name: str, edits: Iterable[Edit], build_folder: Path, target: str) -> Path:
    """Compile a variant's edited sources and link them with the build's other objects; return the library.

    Raises ValueError for an edit that does not apply, CalledProcessError where nvcc fails.
    """
    folder = build_folder / "variants" / name
    folder.mkdir(parents=True, exist_ok=True)
    nvcc = os.environ.get("NVCC", "nvcc")
    includes = [f"-I{path}" for path in kernel_sources.include_dirs()]
    objects = {path.name: path for path in (build_folder / f"objects_cuda_{target}").glob("*.o")}
    sources: dict[str, str] = {}
    for edit in edits:
        path = ROOT / "csrc" / "instantiations" / f"{edit.unit}.cu"
        sources[edit.unit] = edit.apply(sources.get(edit.unit) or path.read_text())
    for unit, text in sources.items():
        source, compiled = folder / f"{unit}.cu", folder / f"{unit}.o"
        source.write_text(text)
        flags = kernel_sources.nvcc_flags(source.name, [target])
        subprocess.run([nvcc, *flags, *includes, "-c", str(source), "-o", str(compiled)], check=True)
        matching = [object_name for object_name in objects if object_name.endswith(f"_{unit}.o")]
        if len(matching) != 1:
            raise ValueError(f"{unit}: expected one object of it in the build, got {matching}")
        objects[matching[0]] = compiled
    library = folder / "libflashmask_cuda.so"
    subprocess.run([nvcc, "-shared", *map(str, objects.values()), "-o", str(library)], check=True)
    return library


def measure(libraries: dict[str, Path], arguments: argparse.Namespace) -> None:
    """Check and time all libraries and peers, case by case, and print a line per direction."""
    import torch
    from implementations import PEERS, Data, Job, own_job
    from kernel_calls import CudaLibrary
    from measure import Clock, WrongResultError, card_and_driver, check, reference_heads

    print(*card_and_driver())
    clock = Clock()
    loaded = {name: CudaLibrary(path, arguments.kernels) for name, path in libraries.items()}
    backward = "backward" in arguments.directions
    for case in (
        paper_case(m, s, d) for d in arguments.head_dims for s in arguments.lengths for m in arguments.masks
    ):
        data, mask = Data(case), case.build_mask()
        reference = reference_heads(data.tensors, mask)
        builders = {
            name: partial(
                own_job, library, mask, data, backward=backward, deterministic=arguments.deterministic
            )
            for name, library in loaded.items()
        }
        builders |= {
            name: partial(PEERS[name].job, case, data, backward=backward)
            for name in arguments.peers
            if case.mask in PEERS[name].masks and PEERS[name].missing() is None
        }
        jobs: dict[str, Job] = {}
        for name, make in builders.items():
            try:
                job = make()
                check(job.results, reference)
            except WrongResultError as error:
                print(f"WRONG: {name}, {case.mask} S={case.seqlen} D={case.head_dim}: {error}")
            else:
                job.results.clear()
                jobs[name] = job
        rho = mask.block_sparsity(128)
        for direction in arguments.directions:
            calls = {
                name: job.directions[direction] for name, job in jobs.items() if direction in job.directions
            }
            if not calls:
                continue
            timings, matmul = clock.take_turns(calls, arguments.seconds)
            rates = {name: case.flops(direction, rho) / t.median / 1e9 for name, t in timings.items()}
            line = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
            print(
                f"{case.mask} S={case.seqlen} D={case.head_dim} {direction}: {line}, matmul {matmul:.0f}",
                flush=True,
            )
        del jobs, reference
        torch.cuda.empty_cache()


def main() -> None:
    """Parse the command line, build, measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", action="append", default=[], help="NAME:UNIT:OLD=NEW; may be repeated")
    parser.add_argument("--kernels", default="sm90", choices=["sm80", "sm90", "cuda"])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="folder of the unedited build")
    parser.add_argument("--target", default="90", help="that it was built for")
    parser.add_argument("--masks", nargs="+", default=["full", "causal"], choices=list(TWELVE))
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[128, 64])
    parser.add_argument("--directions", nargs="+", default=list(DIRECTIONS), choices=DIRECTIONS)
    parser.add_argument("--peers", nargs="*", default=[], choices=list(PEER_NAMES))
    parser.add_argument("--deterministic", action="store_true", help="time the deterministic backward")
    parser.add_argument("--seconds", type=float, default=0.1, help="per library, case and direction")
    arguments = parser.parse_args()
    try:
        variants = parse_variants(arguments.variant)
        with ThreadPoolExecutor() as pool:
            built = [
                pool.submit(build, name, edits, arguments.build, arguments.target)
                for name, edits in variants.items()
            ]
        libraries = {name: library.result() for name, library in zip(variants, built, strict=True)}
    except ValueError as error:
        parser.error(str(error))
    measure({UNEDITED: arguments.build / "libflashmask_cuda.so", **libraries}, arguments)


if __name__ == "__main__":
    main()
