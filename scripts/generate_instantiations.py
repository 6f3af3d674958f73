"""Turn configs/kernels.toml into csrc/instantiations/: a source per pass, head dims and dtype, and a table.

python scripts/generate_instantiations.py            # write
python scripts/generate_instantiations.py --check    # print a diff; exit with 1 if out of date

Needs Python 3.11 (tomllib) or the package tomli. Anything unexpected in the file is an error.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "kernels.toml"
OUTPUT = ROOT / "csrc" / "instantiations"

DTYPES = {"bf16": ("__nv_bfloat16", "DType::kBFloat16"), "fp16": ("__half", "DType::kFloat16")}
# In the order of the Config template's parameters.
TILES = {
    ("sm80", "few_rows_forward"): ("warps", "row_groups"),
    ("sm80", "forward"): ("block_m", "block_n", "warps"),
    ("sm80", "backward"): (
        *("block_m", "block_n", "warps", "score_rows", "grad_rows", "query_rows", "stages"),
    ),
    ("sm90", "few_rows_forward"): ("warps", "row_groups"),
    ("sm90", "forward"): ("consumers", "block_n", "stages"),
    ("sm90", "backward"): ("block_m", "q_stages"),
    ("sm90", "wide_backward"): ("block_m", "stages"),
}
FLAGS = {
    ("sm80", "few_rows_forward"): ("dense",),
    ("sm80", "forward"): ("dropout", "dense"),
    ("sm80", "backward"): ("dropout", "deterministic", "dense"),
    ("sm90", "few_rows_forward"): ("dense",),
    ("sm90", "forward"): ("dense", "split", "bare"),
    ("sm90", "backward"): ("deterministic", "dense"),
    ("sm90", "wide_backward"): ("deterministic", "dense"),
}
# Kernel types, and the passes that are of each, the preferred one of equals first.
TYPES = {"Forward": ("few_rows_forward", "forward"), "Backward": ("backward",)}
KINDS = tuple(kind for kinds in TYPES.values() for kind in kinds)
ARCHITECTURES = ("sm80", "sm90")
NOTE = "// Written by scripts/generate_instantiations.py from configs/kernels.toml; edit that.\n"


@dataclass(frozen=True)
class Unit:
    """One generated source: all kernels of a pass, of head dims and of a dtype."""

    architecture: str
    kind: str
    head_dims: tuple[int, int]
    dtype: str

    @property
    def name(self) -> str:
        """The name of the source and, within the architecture's namespace, of its array."""
        d, dv = self.head_dims
        return f"{self.kind}_d{d}_{self.dtype}" if d == dv else f"{self.kind}_d{d}_{dv}_{self.dtype}"

    @property
    def path(self) -> str:
        """The source's file name."""
        return f"{self.architecture}_{self.name}.cu"


def template_of(architecture: str, kind: str, head_dims: tuple[int, int]) -> tuple[str, str]:
    """Which Config template a kernel is made of, a key of TILES: Hopper's backward has two."""
    wide = (architecture, kind) == ("sm90", "backward") and max(head_dims) > 128
    return architecture, f"wide_{kind}" if wide else kind


def flags_of(key: tuple[str, str], variant: str) -> tuple[str, ...]:
    """The Config template's boolean arguments for a variant such as ``dropout+deterministic``."""
    wanted = set() if variant == "plain" else set(variant.split("+"))
    unknown = wanted - set(FLAGS[key])
    if unknown:
        raise ValueError(f"{key}: unknown variant {variant!r}; known: plain and {', '.join(FLAGS[key])}")
    return tuple("true" if flag in wanted else "false" for flag in FLAGS[key])


def entries(config: dict[str, Any]) -> dict[Unit, list[str]]:
    """Map each unit to its kernels' Config arguments, element type first, in the file's order."""
    units: dict[Unit, list[str]] = {}
    dtypes = config["dtypes"]
    known = {"dtypes", "subsets", *ARCHITECTURES}
    if set(config) != known:
        raise ValueError(f"the file has {', '.join(sorted(known))}; got {', '.join(sorted(config))}")
    for architecture in ARCHITECTURES:
        kinds = config[architecture]
        if set(kinds) != set(KINDS):
            raise ValueError(
                f"{architecture}: kernels are {', '.join(KINDS)}; got {', '.join(sorted(kinds))}"
            )
        for kind, kernels in kinds.items():
            for kernel in kernels:
                if set(kernel) != {"head_dim", "tiles", "variants"}:
                    raise ValueError(
                        f"{architecture}.{kind}: keys are head_dim, tiles, variants; got {sorted(kernel)}"
                    )
                d, dv = kernel["head_dim"]
                key = template_of(architecture, kind, (d, dv))
                if set(kernel["tiles"]) != set(TILES[key]):
                    raise ValueError(f"{key}: tiles are {TILES[key]}; got {sorted(kernel['tiles'])}")
                numbers = [d, dv, *(kernel["tiles"][name] for name in TILES[key])]
                if not all(type(number) is int for number in numbers):
                    raise ValueError(f"{key}: head dims and tiles are whole numbers; got {numbers}")
                for dtype in dtypes:
                    unit = units.setdefault(Unit(architecture, kind, (d, dv), dtype), [])
                    for variant in kernel["variants"]:
                        arguments = [DTYPES[dtype][0], *map(str, numbers), *flags_of(key, variant)]
                        if kind == "few_rows_forward":  # one template, two tables
                            arguments.insert(0, architecture.removeprefix("sm"))
                        unit.append(", ".join(arguments))
    return units


def source(unit: Unit, kernels: list[str]) -> str:
    """The text of one unit."""
    title = next(title for title, kinds in TYPES.items() if unit.kind in kinds)
    _, template = template_of(unit.architecture, unit.kind, unit.head_dims)
    config = f"{template.title().replace('_', '')}Config"
    lines = [
        f"    describe_{unit.kind}<{config}<{kernel}>>({DTYPES[unit.dtype][1]}),\n" for kernel in kernels
    ]
    return (
        f'{NOTE}#include "{unit.architecture}/{unit.kind}_launch.cuh"\n\n'
        f"namespace flashmask::{unit.architecture} {{\n\n"
        f"extern const {title}Kernel {unit.name}[{len(kernels)}];\n"
        f"const {title}Kernel {unit.name}[{len(kernels)}] = {{\n{''.join(lines)}}};\n\n"
        f"}}  // namespace flashmask::{unit.architecture}\n"
    )


def table(architecture: str, units: dict[Unit, list[str]]) -> str:
    """The text of an architecture's kernel_table()."""
    declarations, lists = [], []
    for title, kinds in TYPES.items():
        mine = [(u, k) for kind in kinds for u, k in units.items() if u.kind == kind]
        declarations += [f"extern const {title}Kernel {u.name}[{len(k)}];\n" for u, k in mine]
        appends = "".join(f"    append(all, {u.name});\n" for u, _ in mine)
        lists.append(
            f"  static const auto {title.lower()} = [] {{\n    std::vector<{title}Kernel> all;\n{appends}"
            f"    return all;\n  }}();\n"
        )
    return (
        f'{NOTE}#include <vector>\n\n#include "common/kernel_table.h"\n\n'
        f"namespace flashmask::{architecture} {{\n\n{''.join(declarations)}\n"
        "namespace {\n\n"
        "template <class Kernel, int kCount>\n"
        "void append(std::vector<Kernel>& all, const Kernel (&some)[kCount]) {\n"
        "  all.insert(all.end(), some, some + kCount);\n}\n\n"
        "}  // namespace\n\n"
        f"KernelTable kernel_table() {{\n{''.join(lists)}"
        "  return {forward.data(), static_cast<int>(forward.size()), backward.data(), "
        "static_cast<int>(backward.size())};\n}\n\n"
        f"}}  // namespace flashmask::{architecture}\n"
    )


def load_config(subset: str | None = None) -> dict[str, Any]:
    """Read configs/kernels.toml, or what one of its named subsets leaves of it."""
    config = tomllib.loads(CONFIG.read_text())
    if subset is not None:
        if subset not in config["subsets"]:
            raise ValueError(f"unknown subset {subset!r}; known: {', '.join(config['subsets'])}")
        wanted = config["subsets"][subset]
        config["dtypes"] = [dtype for dtype in config["dtypes"] if dtype in wanted["dtypes"]]
        for architecture in ARCHITECTURES:
            for kind, kernels in config[architecture].items():
                config[architecture][kind] = [k for k in kernels if k["head_dim"] in wanted["head_dims"]]
    return config


def generate(config: dict[str, Any]) -> dict[str, str]:
    """Map file names to their texts."""
    units = entries(config)
    files = {unit.path: source(unit, kernels) for unit, kernels in units.items()}
    for architecture in sorted({unit.architecture for unit in units}):
        mine = {unit: kernels for unit, kernels in units.items() if unit.architecture == architecture}
        files[f"{architecture}_table.cc"] = table(architecture, mine)
    return files


def main() -> int:
    """Write or check the files; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail when out of date")
    check = parser.parse_args().check
    files = generate(load_config())
    there = {path.name: path.read_text() for path in OUTPUT.glob("*.c[cu]")}
    if check:
        for name in sorted(files.keys() | there.keys()):
            old, new = there.get(name, ""), files.get(name, "")
            diff = difflib.unified_diff(old.splitlines(), new.splitlines(), name, name, lineterm="", n=0)
            sys.stdout.writelines(f"{line}\n" for line in diff)
        return int(files != there)
    OUTPUT.mkdir(exist_ok=True)
    for name in there.keys() - files.keys():
        (OUTPUT / name).unlink()
    for name, text in files.items():
        if there.get(name) != text:
            (OUTPUT / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
