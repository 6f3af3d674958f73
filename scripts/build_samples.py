"""Write samples made of Python's docstrings as JSONL files, in the form that scripts/finetune.py reads.

python scripts/build_samples.py DIRECTORY       # sft.jsonl, dpo.jsonl and rm.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from training.samples import build_rows


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args(arguments).directory
    directory.mkdir(parents=True, exist_ok=True)
    for task in ("sft", "dpo", "rm"):
        rows = list(build_rows(task))
        path = directory / f"{task}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows):,} samples")


if __name__ == "__main__":
    main()
