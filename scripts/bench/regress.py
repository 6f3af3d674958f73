"""Compare a benchmark with stored ratios of the same kernels and card; name what got slower or fails.

python scripts/bench/regress.py docs/results/kernels_sm90.csv           # fails when a ratio fell by over 3 %
python scripts/bench/regress.py docs/results/kernels_sm90.csv --store   # keeps the new ratios, and others
python scripts/bench/regress.py docs/results/kernels_sm90.csv --replace # keeps the new ratios and no others

It takes the CSV files of kernels.py, inference.py, decode.py and end_to_end.py, and knows them by their
columns; whether rows are inference.py's, or of kernels.py's published setting, by the commands in them.
sparsity.py has no peers, and memory.py times none in turns with ours: neither is compared.

Milliseconds differ from card to card and from day to day; what is kept are ratios within one run: our speed
to each peer's (in decode.csv also to the copy's, in end_to_end.csv of tokens/s over all samples), and our
kernels' TFLOP/s to those of the large matmul timed in turns with them and with the same peers. They are in
docs/results/ratios, a CSV file per kernels or experiment and card, the published setting apart. Of the
benchmark's file, the newest version of the kernels counts, and of each of its implementations the newest row:
where that is ours and has failed (it raised, or its results were wrong), this fails too, whatever was
measured before. What was not measured again, or where the peer has failed, is counted by mask, head dim or
task (--verbose: named) and stays as it is; but of ratios to the matmul those beside other peers are dropped
when the same is measured anew. The files that are committed hold what the committed tables say: a new table
is stored with --replace. Needs no torch.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cells import ROOT
from experiment_ratios import MATMUL, Key, Ratios, Subject, measured

TOLERANCE = 0.03
FOLDER = ROOT / "docs" / "results" / "ratios"


def columns(kind: type[Subject]) -> list[str]:
    """Return the columns of a file of such ratios."""
    return [*kind._fields, "against", "ratio"]


def read(path: Path, kind: type[Subject]) -> Ratios:
    """Read stored ratios; none when there is no file.

    Raises ValueError when its columns are others, or a number is none.
    """
    if not path.exists():
        return {}
    types = get_type_hints(kind)
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if list(reader.fieldnames or ()) != columns(kind):
            raise ValueError(f"{path}: expected the columns {', '.join(columns(kind))}")
        return {_key(kind, types, line): float(line["ratio"]) for line in reader}


def _key(kind: type[Subject], types: Mapping[str, type], line: Mapping[str, str]) -> Key:
    return Key(kind._make(types[name](line[name]) for name in kind._fields), line["against"])


def write(path: Path, kind: type[Subject], stored: Ratios) -> None:
    """Write ratios, sorted so that a difference of two versions is small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns(kind))
        writer.writerows((*key.subject, key.against, f"{stored[key]:.4f}") for key in sorted(stored))


def compare(stored: Ratios, now: Ratios, tolerance: float = TOLERANCE) -> Iterator[tuple[float, str]]:
    """Return how many times as fast as before and a line, for what got slower or faster by more than that."""
    for key in stored.keys() & now.keys():
        change = now[key] / stored[key]
        if not 1 - tolerance <= change <= 1 + tolerance:
            word = "slower" if change < 1 else "faster"
            values = f"{stored[key]:.3f} before, {now[key]:.3f} now"
            yield change, f"{word} by {100 * abs(change - 1):.1f} %: {key} ({values})"


def still_measured(stored: Ratios, now: Ratios) -> Ratios:
    """Leave out ratios to the matmul beside other peers than those beside which the same is measured now."""
    again = {key.subject for key in now if key.against.startswith(MATMUL)}
    return {
        key: ratio
        for key, ratio in stored.items()
        if not (key.against.startswith(MATMUL) and key.subject in again)
    }


def by_group(keys: Iterable[Key]) -> Iterator[str]:
    """Return a line per mask, head dim or task: how many keys are of it, and of which shapes."""
    groups: dict[str, list[str]] = {}
    for key in sorted(keys):
        groups.setdefault(key.subject.group, []).append(key.subject.shape)
    for group, shapes in groups.items():
        yield f"{group}: {len(shapes)} ({'; '.join(dict.fromkeys(shapes))})"


def main() -> None:
    """Compare, and store if that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, help="of a benchmark")
    storing = parser.add_mutually_exclusive_group()
    storing.add_argument("--store", action="store_true", help="keep what was measured, beside the rest")
    storing.add_argument("--replace", action="store_true", help="keep what was measured, and nothing else")
    parser.add_argument("--verbose", action="store_true", help="name each ratio that was not measured again")
    parser.add_argument(
        "--ratios", type=Path, default=FOLDER, help="the folder; default: docs/results/ratios"
    )
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="default: %(default)s")
    arguments = parser.parse_args()
    if not 0.0 <= arguments.tolerance < 1.0:
        parser.error(f"--tolerance: expected a number from 0 to 1, got {arguments.tolerance}")
    try:
        found = [(now, read(arguments.ratios / now.file, now.kind)) for now in measured(arguments.csv)]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not found:
        parser.error(f"{arguments.csv}: there are no rows")
    stores = arguments.store or arguments.replace
    slower = failed = again = 0
    for now, stored in found:
        path = arguments.ratios / now.file
        changes = sorted(compare(stored, now.ratios, arguments.tolerance))
        slower += sum(change < 1 for change, _ in changes)
        failing = sorted((key for key in stored if key.subject in now.failed), key=str)
        failed += len(failing)
        missing = sorted(stored.keys() - now.ratios.keys() - set(failing), key=str)
        compared = len(stored.keys() & now.ratios.keys())
        again += compared
        print(f"{path.stem}: {compared} of {len(stored)} stored ratios were measured again")
        lines = [f"FAILED: {key}" for key in failing] + [line for _, line in changes]
        named = missing if arguments.verbose else by_group(missing)
        word = "dropped" if arguments.replace else "not measured again"
        lines += [f"{word}: {item}" for item in named]
        print(*(f"  {line}" for line in lines), sep="\n", end="\n" if lines else "")
        if not stored and not stores:
            print(f"  nothing is stored in {path} yet: --store keeps what was measured")
        if stores:
            kept = {} if arguments.replace else still_measured(stored, now.ratios)
            write(path, now.kind, kept | now.ratios)
            print(f"stored {len(now.ratios)} ratios in {path}")
    problems = [f"{failed} stored ratios are of kernels that fail now"] if failed else []
    if slower and not stores:
        problems.append(f"{slower} ratios fell by more than {100 * arguments.tolerance:g} %")
    if not again and not stores:
        problems.append("no stored ratio was measured again")
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
