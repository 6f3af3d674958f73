"""Name the results in docs/results that were measured with other kernel sources than the tree has.

python scripts/bench/stale.py            # a line per CSV file; fails when one is stale

Of each CSV file with the columns "kernels" and "sources" (see cells.hash_sources), the newest row counts;
where rows are of one pass, the newest of each.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cells import ROOT, hash_sources, sources_of


def state(path: Path) -> tuple[bool, str] | None:
    """Return whether a CSV file is stale, and a line about it; None: it names no kernel sources."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"kernels", "sources", "commit", "card", "started"} <= rows[0].keys():
        return None
    newest = {row.get("direction", ""): row for row in sorted(rows, key=lambda row: row["started"])}
    stale = any(not _is_current(row) for row in newest.values())
    row = max(newest.values(), key=lambda row: row["started"])
    verdict = "other sources than now" if stale else "the sources as they are"
    return (
        stale,
        f"{path.name}: {row['card']}, {row['started'][:10]}, {row['kernels']} at {row['commit']}, {verdict}",
    )


def _is_current(row: dict[str, str]) -> bool:
    now = hash_sources(row["kernels"])
    if "direction" not in row:
        return row["sources"] == now
    return sources_of(row["sources"], row["direction"]) == sources_of(now, row["direction"])


def main() -> None:
    """Print a line per file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs" / "results")
    found = [state(path) for path in sorted(parser.parse_args().folder.glob("*.csv"))]
    known = [item for item in found if item is not None]
    print(*(line for _, line in known), sep="\n")
    unknown = len(found) - len(known)
    print(f"{unknown} files say nothing of kernel sources: their pages name a commit")
    if any(stale for stale, _ in known):
        sys.exit("some are stale")


if __name__ == "__main__":
    main()
