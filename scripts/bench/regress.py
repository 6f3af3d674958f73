"""Compare a kernel benchmark with stored ratios of the same kernels and card; name what got slower or fails.

python scripts/bench/regress.py docs/results/kernels_sm90.csv           # fails when a ratio fell by over 3 %
python scripts/bench/regress.py docs/results/kernels_sm90.csv --store   # keeps the new ratios, and others
python scripts/bench/regress.py docs/results/kernels_sm90.csv --replace # keeps the new ratios and no others

Milliseconds differ from card to card and from day to day; what is kept are ratios within one run: our
TFLOP/s to those of the large matmul timed in turns with it and with the same peers, and our speed to each
peer's. They are in docs/results/ratios, a CSV file per kernels and card. Of the benchmark's file, the
newest version of the kernels counts, and of each of its implementations the newest row: where that is ours
and has failed (it raised, or its results were wrong), this fails too, whatever was measured before. What
was not measured again, or where the peer has failed, is counted by mask (--verbose: named) and stays as it
is; but of ratios to the matmul those beside other peers are dropped when the same is measured anew. The files
that are committed hold what the committed tables say: a new table is stored with --replace. Needs no torch.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cells import DIRECTIONS, PEER_NAMES, ROOT, Case, Row, deterministic, read_rows
from paper_data import PUBLISHED
from report import cards
from results import Results, length_name, name_in_files

TOLERANCE = 0.03
MATMUL = "matmul"
FOLDER = ROOT / "docs" / "results" / "ratios"


@dataclass(frozen=True)
class Key:
    """What a ratio is of: ours, or ours in deterministic mode, to the matmul or a peer."""

    case: Case
    direction: str
    ours: str
    against: str

    def __str__(self) -> str:
        how = "" if self.ours in ("sm80", "sm90", "cuda", "") else f" ({self.ours})"
        seed = f", seed {self.case.seed}" if self.case.seed else ""
        place = f"{self.case.mask} {self.shape}{seed} {self.direction}{how}"
        return f"{place} / {PEER_NAMES.get(self.against, self.against)}"

    @property
    def shape(self) -> str:
        """Length, head dim and heads; lengths that are no power of two to the token."""
        case = self.case
        power_of_two = case.seqlen & (case.seqlen - 1) == 0
        length = length_name(case.seqlen) if power_of_two else f"{case.seqlen:,}"
        heads = f", {case.heads}:{case.kv_heads} heads" if case.kv_heads else ""
        return f"{length} D={case.head_dim}{heads}"


def matmul_beside(peers: Sequence[str]) -> str:
    """Name the matmul by what else took turns: on a card at its power limit all set each other's clock."""
    return MATMUL if not peers else f"{MATMUL} beside {' '.join(peers)}"


Ratios = dict[Key, float]
COLUMNS = [*(field.name for field in fields(Case)), "direction", "ours", "against", "ratio"]


def ratios(results: Results) -> Ratios:
    """Return every ratio of the newest measurements; none of what failed in them."""
    found: Ratios = {}
    cases = dict.fromkeys(row.case for row in results.rows)
    for case in cases:
        for direction in DIRECTIONS:
            for ours in (results.kernels, deterministic(results.kernels)):
                if results.failed(case, direction, ours):
                    continue
                for peers, row in results.by_company(case, direction, ours).items():
                    found[Key(case, direction, ours, matmul_beside(peers))] = row.share
                for peer in PEER_NAMES:
                    if results.failed(case, direction, peer):
                        continue
                    ratio = results.ratio(case, direction, peer, ours)
                    if ratio is not None:
                        found[Key(case, direction, ours, peer)] = ratio
    return found


def path_of(kernels: str, card: str, folder: Path = FOLDER, *, published: bool = False) -> Path:
    """Return where the ratios of kernels on a card are kept; ``published``: those of that setting."""
    suffix = "_published" if published else ""
    return folder / f"{kernels}_{name_in_files(card)}{suffix}.csv"


def read(path: Path) -> Ratios:
    """Read stored ratios; none when there is no file."""
    if not path.exists():
        return {}
    found: Ratios = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            sizes = {f.name: line[f.name] if f.name == "mask" else int(line[f.name]) for f in fields(Case)}
            key = Key(Case(**sizes), line["direction"], line["ours"], line["against"])
            found[key] = float(line["ratio"])
    return found


def write(path: Path, stored: Ratios) -> None:
    """Write ratios, sorted so that a difference of two versions is small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        (*astuple(key.case), key.direction, key.ours, key.against, f"{ratio:.4f}")
        for key, ratio in stored.items()
    ]
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(sorted(lines))


def compare(stored: Ratios, measured: Ratios, tolerance: float = TOLERANCE) -> Iterator[tuple[float, str]]:
    """Return how many times as fast as before and a line, for what got slower or faster by more than that."""
    for key in stored.keys() & measured.keys():
        change = measured[key] / stored[key]
        if not 1 - tolerance <= change <= 1 + tolerance:
            word = "slower" if change < 1 else "faster"
            values = f"{stored[key]:.3f} before, {measured[key]:.3f} now"
            yield change, f"{word} by {100 * abs(change - 1):.1f} %: {key} ({values})"


def failures(stored: Ratios, results: Results) -> list[Key]:
    """Return the stored ratios of what fails now: ours of them has failed in the newest run that tried."""
    return sorted((k for k in stored if results.failed(k.case, k.direction, k.ours)), key=str)


def still_measured(stored: Ratios, measured: Ratios) -> Ratios:
    """Leave out ratios to the matmul beside other peers than those beside which the same is measured now."""
    again = {(key.case, key.direction, key.ours) for key in measured if key.against.startswith(MATMUL)}
    return {
        key: ratio
        for key, ratio in stored.items()
        if not (key.against.startswith(MATMUL) and (key.case, key.direction, key.ours) in again)
    }


def by_mask(keys: Iterable[Key]) -> Iterator[str]:
    """Return a line per mask: how many keys are of it, and of which shapes."""
    masks: dict[str, list[Key]] = {}
    for key in sorted(keys, key=lambda key: (key.case.mask, key.case.seqlen, key.case.head_dim)):
        masks.setdefault(key.case.mask, []).append(key)
    for mask, found in masks.items():
        yield f"{mask}: {len(found)} ({'; '.join(dict.fromkeys(key.shape for key in found))})"


def files_of(rows: Sequence[Row], folder: Path = FOLDER) -> Iterator[tuple[Path, Results]]:
    """Return where the ratios of each kernels and card of a benchmark are kept, and its results."""
    for kernels in dict.fromkeys(row.run.kernels for row in rows):
        for card in cards(rows, kernels):
            results = Results(rows, kernels, card)
            published = any(row.case.mask in PUBLISHED for row in results.rows)
            yield path_of(kernels, card, folder, published=published), results


def main() -> None:
    """Compare, and store if that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path, help="of scripts/bench/kernels.py")
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
        rows = read_rows(arguments.csv)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"{arguments.csv}: there are no rows")
    stores = arguments.store or arguments.replace
    slower = failed = again = 0
    for path, results in files_of(rows, arguments.ratios):
        stored, measured = read(path), ratios(results)
        changes = sorted(compare(stored, measured, arguments.tolerance))
        slower += sum(change < 1 for change, _ in changes)
        failing = failures(stored, results)
        failed += len(failing)
        missing = sorted(stored.keys() - measured.keys() - set(failing), key=str)
        compared = len(stored.keys() & measured.keys())
        again += compared
        place = f"{results.kernels} on {results.card}"
        print(f"{place}: {compared} of {len(stored)} stored ratios were measured again")
        lines = [f"FAILED: {key}" for key in failing] + [line for _, line in changes]
        named = missing if arguments.verbose else by_mask(missing)
        word = "dropped" if arguments.replace else "not measured again"
        lines += [f"{word}: {item}" for item in named]
        print(*(f"  {line}" for line in lines), sep="\n", end="\n" if lines else "")
        if not stored and not stores:
            print(f"  nothing is stored in {path} yet: --store keeps what was measured")
        if stores:
            kept = {} if arguments.replace else still_measured(stored, measured)
            write(path, kept | measured)
            print(f"stored {len(measured)} ratios in {path}")
    problems = [f"{failed} stored ratios are of kernels that fail now"] if failed else []
    if slower and not stores:
        problems.append(f"{slower} ratios fell by more than {100 * arguments.tolerance:g} %")
    if not again and not stores:
        problems.append("no stored ratio was measured again")
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
