"""Measured rows by what they measured, bars, and how both are written down. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cells import PEER_NAMES, Case, Row

Key = tuple[Case, str, str]  # case, direction, implementation


class Results:
    """What was measured on one card with one architecture's kernels: the newest version of each pass."""

    def __init__(self, rows: Iterable[Row], kernels: str, card: str):
        rows = [row for row in rows if (row.run.kernels, row.run.card) == (kernels, card)]
        newest: dict[str, str] = {}  # sources by direction
        for row in sorted(rows, key=lambda row: row.run.started, reverse=True):
            newest.setdefault(row.direction, row.sources)
        self.kernels, self.card = kernels, card
        self.rows = [row for row in rows if row.sources == newest[row.direction]]
        self._runs: dict[str, dict[Key, Row]] = {}  # the newest run first
        for row in sorted(self.rows, key=lambda row: row.run.started, reverse=True):
            run = self._runs.setdefault(row.run.started, {})
            run[row.case, row.direction, row.implementation] = row

    def find(self, *keys: Key, in_company: bool = False) -> list[Row]:
        """Return the rows of these keys from the newest run in which all succeeded; none if there is none.

        ``in_company``: from the one with the most peers beside the first key, of those the newest.
        """
        runs = self._runs.values()
        if in_company:
            runs = sorted(runs, key=lambda run: -len(_company(run, *keys[0][:2])))
        for run in runs:
            found = [run[key] for key in keys if key in run and run[key].ok]
            if len(found) == len(keys):
                return found
        return []

    def in_company(self, case: Case, direction: str) -> Row | None:
        """Return our row of the run beside the most peers, the newest such: what tables show beside them."""
        return next(iter(self.find((case, direction, self.kernels), in_company=True)), None)

    def ratio(self, case: Case, direction: str, other: str, ours: str | None = None) -> float | None:
        """How many times as fast as another implementation ours is, in one run; None: not measured."""
        found = self.find((case, direction, ours or self.kernels), (case, direction, other))
        return found[1].milliseconds / found[0].milliseconds if found else None

    def of_ceiling(self, row: Row) -> float:
        """Return a row's share of the fastest that the large matmul was in its run.

        Beside a heavy kernel the matmul is slower too, on a card at its power limit by a fifth.
        """
        run = self._runs[row.run.started].values()
        return row.tflops / max(other.matmul_tflops for other in run if other.ok)

    def by_company(self, case: Case, direction: str, implementation: str) -> dict[tuple[str, ...], Row]:
        """Return the newest row for each set of peers that it was timed in turns with."""
        found: dict[tuple[str, ...], Row] = {}
        for run in self._runs.values():
            row = run.get((case, direction, implementation))
            if row is not None and row.ok:
                found.setdefault(_company(run, case, direction), row)
        return found

    def failed(self, case: Case, direction: str, implementation: str) -> bool:
        """Whether it failed in the newest run that tried."""
        key = (case, direction, implementation)
        return next((not run[key].ok for run in self._runs.values() if key in run), False)


def _company(run: Mapping[Key, Row], case: Case, direction: str) -> tuple[str, ...]:
    """Return the peers that were timed in a run."""
    keys = ((case, direction, name) for name in PEER_NAMES)
    return tuple(key[2] for key in keys if key in run and run[key].ok)


def name_in_files(card: str) -> str:
    """Return a card's name as file names have it."""
    return re.sub(r"[^a-z0-9]+", "_", card.lower()).strip("_")


@dataclass(frozen=True)
class Bar:
    """Something that is wanted, and what came; ``met`` is None when it was not measured.

    ``aim`` says what is hoped for beyond it, and how near that is.
    """

    what: str
    wanted: str
    measured: str
    met: bool | None
    aim: str = ""

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.met is None:
            return "incomplete" if self.measured else "not measured"
        if not self.wanted:
            return "only an aim"
        return "met" if self.met else "NOT met"


def at_least(what: str, wanted: float, measured: float | None, note: str = "", aim: str = "") -> Bar:
    """Return the bar of a number, None where it was not measured, that must not be less than another."""
    if measured is None:
        return Bar(what, f">= {wanted:g}", note, None, aim)
    return Bar(what, f">= {wanted:g}", f"{measured:.3f}{note and f' {note}'}", measured >= wanted, aim)


def length_name(seqlen: int) -> str:
    """Return a length as tables name it: 8K."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if seqlen % size == 0:
            return f"{seqlen // size}{unit}"
    return str(seqlen)


def not_run(places: Mapping[str, Sequence[str]], level: int = 2) -> str:
    """Return a section, its title of this level, that says where what was not run; "" where all was."""
    lines = [f"- {name}: {', '.join(where)}" for name, where in places.items() if where]
    return f"{'#' * level} Not run\n\n" + "\n".join(lines) if lines else ""


def failures(found: Iterable[tuple[str, str, str]], level: int = 2) -> str:
    """Return a section that says what failed, why and where; "" where nothing did."""
    places: dict[tuple[str, str], list[str]] = {}
    for name, reason, place in found:
        places.setdefault((name, reason), []).append(place)
    lines = [
        f"- {name}: {reason} ({', '.join(dict.fromkeys(where))})" for (name, reason), where in places.items()
    ]
    return f"{'#' * level} Failures\n\n" + "\n".join(lines) if lines else ""


def brief(reason: str) -> str:
    """Return the start of a reason, for a table's cell."""
    return reason[:40].replace("|", "/")


def document(parts: Iterable[str]) -> str:
    """Return a Markdown document of its parts; empty ones are left out."""
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_table(header: list[str], lines: list[list[str]], left: int = 1) -> str:
    """Return a Markdown table; so many columns are aligned to the left."""
    rules = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rules, *lines))
