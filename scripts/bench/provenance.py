"""Where numbers come from, a CSV of them that grows row by row, and experiments' command line. No torch."""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import importlib.metadata
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cells import ROOT, Run, hash_sources

RESULTS, OUTPUTS = ROOT / "docs" / "results", ROOT / "outputs"
UNRECORDED = ("csv", "markdown", "figure", "charts", "resume", "commit", "binary", "prepare", "no_report")
RUN_COLUMNS = [field.name for field in fields(Run)]
AnyRow = TypeVar("AnyRow", bound=Mapping[str, str])


def git_commit() -> str:
    """Return the commit of the checkout, marked when files differ from it; "unknown" without git."""
    try:
        git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
        changed = git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout
        return git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip() + (" changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def recorded_command(script: str, parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """Return the command that repeats a measurement, without options that do not change it."""
    command = ["python", f"scripts/bench/{script}"]
    for name, value in vars(arguments).items():
        if name not in UNRECORDED and value != parser.get_default(name):
            values = [] if isinstance(value, bool) else value if isinstance(value, list) else [value]
            command += [f"--{'no-' if value is False else ''}{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(command)


def versions() -> str:
    """Return torch's version and those of what it runs and is compared with, of what is installed."""
    import torch

    found = []
    for name in ("numpy", "triton", "nvidia-cudnn-cu13", "flash-attn-4", "flashinfer-python"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return f"{torch.__version__} ({', '.join(found)})"


def make_run(
    kernels: str,
    card: str,
    driver: str,
    torch: str,
    command: str,
    commit: str | None,
    few_rows: bool = False,
) -> Run:
    """Return this process's provenance; git is asked for the commit when there is none.

    ``few_rows``: whether it measures calls with few query rows, see `hash_sources`.
    """
    now = datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None)
    return Run(
        # Milliseconds: rows belong together by it, and several GPUs may start at once.
        started=now.isoformat(timespec="milliseconds") + "Z",
        kernels=kernels,
        sources=hash_sources(kernels, few_rows=few_rows),
        commit=commit or git_commit(),
        card=card,
        driver=driver,
        torch=torch,
        command=command,
    )


class Log:
    """A CSV file: a run's provenance, then columns of one's own, all text. Each row is on disk at once.

    ``run`` None: for reading only. Raises ValueError when the file has other columns.
    """

    def __init__(self, path: Path, columns: Sequence[str], run: Run | None = None):
        self.path, self.columns, self.run = path, list(columns), run
        self.rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                if list(reader.fieldnames or ()) != RUN_COLUMNS + self.columns:
                    expected = ", ".join(RUN_COLUMNS + self.columns)
                    raise ValueError(f"{path}: expected the columns {expected}")
                self.rows = list(reader)

    def newest(self, **wanted: Any) -> dict[str, str] | None:
        """Return the newest row with these values, of the run's sources and card; None: there is none."""
        assert self.run is not None, "see Log"
        wanted = {**wanted, "sources": self.run.sources, "card": self.run.card}
        texts = {name: _text(value) for name, value in wanted.items()}
        found = [row for row in self.rows if all(row[name] == text for name, text in texts.items())]
        return oldest_first(found)[-1] if found else None

    def add(self, values: Mapping[str, Any]) -> None:
        """Append a row; columns without a value stay empty."""
        assert self.run is not None, "see Log"
        unknown = set(values) - set(self.columns)
        assert not unknown, f"no such columns: {unknown}"
        new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        row = dict.fromkeys(RUN_COLUMNS + self.columns, "")
        row |= {name: _text(value) for name, value in {**asdict(self.run), **values}.items()}
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
        self.rows.append(row)


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def oldest_first(rows: Iterable[AnyRow]) -> list[AnyRow]:
    """Return rows by when their run started, however files were merged; those of one run as they came."""
    return sorted(rows, key=lambda row: row["started"])


def newest_of(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the rows of the newest card and sources."""
    if not rows:
        return []
    newest = oldest_first(rows)[-1]
    return [row for row in rows if (row["card"], row["sources"]) == (newest["card"], newest["sources"])]


def describe(rows: Sequence[Mapping[str, str]]) -> str:
    """Return where rows come from as a Markdown list."""

    def distinct(name: str) -> str:
        return ", ".join(dict.fromkeys(row[name] for row in rows))

    lines = [f"- {distinct('card')}, driver {distinct('driver')}, torch {distinct('torch')}"]
    lines += [f"- kernels {distinct('kernels')}, sources {distinct('sources')}, commit {distinct('commit')}"]
    starts = sorted(row["started"] for row in rows)
    lines += [f"- runs of {' to '.join(dict.fromkeys((starts[0], starts[-1])))}"]
    lines += [f"- `{command}`" for command in dict.fromkeys(row["command"] for row in rows)]
    return "\n".join(lines)


def count(text: str) -> int:
    """Parse a number of things, 1 at least, from the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text}")
    return number


def add_arguments(
    parser: argparse.ArgumentParser, name: str, devices: Sequence[str] = ("cuda", "cpu")
) -> None:
    """Add the options that every experiment has; results are called ``name``."""
    tryout = "cpu: to try it out" if "cpu" in devices else None
    parser.add_argument("--device", default="cuda", choices=devices, help=tryout)
    parser.add_argument("--kernels", default="cuda", choices=["sm80", "sm90", "cuda"], help="cuda: the best")
    parser.add_argument("--library", dest="binary", type=Path, help="default: build/libflashmask_<device>.so")
    parser.add_argument("--commit", help="recorded with the rows; by default git is asked")
    parser.add_argument(
        "--csv", type=Path, help=f"default: docs/results/{name}.csv, on a CPU outputs/{name}.csv"
    )
    parser.set_defaults(experiment=name)
    parser.add_argument("--markdown", type=Path, help="default: the CSV file's name, .md")
    parser.add_argument(
        "--figure", type=Path, help="default: docs/images/<name>.png for the default CSV file"
    )
    parser.add_argument("--report-only", action="store_true", help="measure nothing")
    parser.add_argument(
        "--no-report", action="store_true", help="measure, and leave the rest to --report-only"
    )


def parse(parser: argparse.ArgumentParser, script: str) -> tuple[argparse.Namespace, str]:
    """Return the arguments, with paths filled in, and the command to record."""
    arguments = parser.parse_args()
    command = recorded_command(script, parser, arguments)
    arguments.binary = arguments.binary or ROOT / "build" / f"libflashmask_{arguments.device}.so"
    default = (RESULTS if arguments.device == "cuda" else OUTPUTS) / f"{arguments.experiment}.csv"
    arguments.csv = arguments.csv or default
    in_docs = arguments.csv.parent.resolve() == RESULTS.resolve()
    images = ROOT / "docs" / "images" if in_docs else arguments.csv.parent
    arguments.figure = arguments.figure or images / arguments.csv.with_suffix(".png").name
    arguments.markdown = arguments.markdown or arguments.csv.with_suffix(".md")
    return arguments, command


def check_ready(arguments: argparse.Namespace, read: Callable[[Path], Any]) -> None:
    """End with a message where a script cannot begin: a trace would say no more, and at greater length.

    Args:
        arguments: csv, report_only and, of what measures, binary; device where it is not always a GPU.
        read: raises ValueError where the CSV file is another script's.
    """
    try:
        read(arguments.csv)
    except ValueError as error:
        sys.exit(str(error))
    if arguments.report_only:
        return
    if importlib.util.find_spec("torch") is None:
        sys.exit("measuring needs torch, which is not installed; --report-only does not")
    if not arguments.binary.exists():
        device = getattr(arguments, "device", "cuda")
        sys.exit(f"{arguments.binary} is not there: python scripts/build_kernels.py --{device} builds it")


def report(
    arguments: argparse.Namespace,
    columns: Sequence[str],
    render: Callable[..., str],
    draw: Callable[..., None],
) -> None:
    """Write the rows of the newest card and sources to the document and the figure; print them."""
    if arguments.no_report:
        return
    every = Log(arguments.csv, columns).rows
    rows = newest_of(every)
    if len(rows) < len(every):
        print(f"{len(every) - len(rows)} rows of other cards or sources than the newest one's are left out")
    if not rows:
        sys.exit(f"{arguments.csv}: nothing was measured, nothing is written")
    text = render(rows)
    print(text)
    if can_draw(arguments.figure):
        arguments.figure.parent.mkdir(parents=True, exist_ok=True)
        draw(rows, arguments.figure)
        text = with_figures(text, arguments.markdown, [arguments.figure])
    arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
    arguments.markdown.write_text(text)


def can_draw(figure: Path) -> bool:
    """Return whether matplotlib is there, as on machines with GPUs it may not be; print that it is not."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        print(f"{figure} was not drawn: matplotlib is missing; --report-only draws it elsewhere")
    return found


def with_figures(text: str, document: Path, figures: Sequence[Path]) -> str:
    """Return a document's text with its figures below the title."""
    title, rest = text.split("\n", 1)
    links = [f"![{path.stem}]({os.path.relpath(path, document.parent)})" for path in figures]
    return "\n\n".join([title, *links]) + "\n" + rest
