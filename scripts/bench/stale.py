"""Name the results in docs/results that were measured with other kernel sources than the tree has.

python scripts/bench/stale.py            # a line per CSV file; fails when one is stale

Of each CSV file with the columns "kernels" and "sources" (see cells.hash_sources), all rows are looked at but
those whose like was measured anew with other sources, which no page shows any more. Where rows are of one
pass, its sources alone count. Only kernel sources are looked at: neither how masks and their indices are made
nor the scripts, which a page can hang on too.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cells import ROOT, hash_sources, sources_of
from provenance import oldest_first

# What a row is of, of any file's columns. Of one run are all implementations of a cell and all quantities.
PLACE = ("kernels", "card", "direction", "mask", "seqlen", "head_dim", "batch", "heads", "seed", "kv_heads")
PLACE += ("family", "seqlen_q", "seqlen_k", "task", "layers", "method", "bins", "bin", "part", "name")
PLACE += ("per_bucket", "sample")
Row = dict[str, str]


def state(path: Path) -> tuple[bool, str] | None:
    """Return whether a CSV file is stale, and a line about it; None: it names no kernel sources."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"kernels", "sources", "commit", "card", "started"} <= rows[0].keys():
        return None
    rows = in_force(rows)
    now = {key: hash_sources(key[0], few_rows=key[1]) for key in set(map(_counted, rows))}
    stale = sum(_sources(row) != _sources({**row, "sources": now[_counted(row)]}) for row in rows)
    row = oldest_first(rows)[-1]
    verdict = f"{stale} of {len(rows)} rows of other sources than now" if stale else "the sources as they are"
    return (
        stale > 0,
        f"{path.name}: {row['card']}, {row['started'][:10]}, {row['kernels']} at {row['commit']}, {verdict}",
    )


def place_of(row: Row) -> tuple[str | None, ...]:
    """Return what a row is of."""
    return tuple(row.get(name) for name in PLACE)


def in_force(rows: Sequence[Row]) -> list[Row]:
    """Leave out rows of other sources than the newest of the same place."""
    newest = {place_of(row): _sources(row) for row in oldest_first(rows)}
    return [row for row in rows if _sources(row) == newest[place_of(row)]]


def _counted(row: Row) -> tuple[str, bool]:
    """Return what a row's sources are of: which kernels, and whether those for few query rows count."""
    return row["kernels"], row["sources"].count("-") == 2


def _sources(row: Row) -> str:
    """Return the hash of a row's sources, where it is of one pass that pass's."""
    direction, _, _ = row.get("direction", "").partition(" ")  # from "deterministic"
    return sources_of(row["sources"], direction) if direction else row["sources"]


def main() -> None:
    """Print a line per file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "results")
    folder = parser.parse_args().folder
    found = [state(path) for path in sorted(folder.glob("*.csv"))]
    if not found:
        parser.error(f"{folder}: there are no CSV files")
    known = [item for item in found if item is not None]
    print(*(line for _, line in known), sep="\n")
    unknown = len(found) - len(known)
    print(f"{unknown} files say nothing of kernel sources: their pages name a commit")
    print("only kernel sources were looked at, not how masks are made, nor the scripts")
    if any(stale for stale, _ in known):
        sys.exit("some are stale")


if __name__ == "__main__":
    main()
