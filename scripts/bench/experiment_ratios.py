"""The ratios in a benchmark's CSV file: ours to peers within one run. Needs no torch.

What is compared is a named tuple, whose fields are columns of the file where regress.py keeps ratios of its
kind: the place of a measurement, and which of our implementations it is.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import decode
import end_to_end
from cells import COLUMNS, DIRECTIONS, PEER_NAMES, Case, Row, deterministic, read_rows
from provenance import RUN_COLUMNS, Log, newest_of
from results import Results, length_name, name_in_files

MATMUL = "matmul"


class KernelCase(NamedTuple):
    """Kernels, deterministic or not, at a case of kernels.py or inference.py."""

    mask: str
    seqlen: int
    head_dim: int
    batch: int
    heads: int
    seed: int
    kv_heads: int
    direction: str
    ours: str

    @classmethod
    def of(cls, case: Case, direction: str, ours: str) -> KernelCase:
        """Return it of a case, whose fields come first."""
        return cls._make((*astuple(case), direction, ours))

    @property
    def group(self) -> str:
        """What summaries count by."""
        return self.mask

    @property
    def shape(self) -> str:
        """Length, head dim and heads; lengths that are no power of two to the token."""
        power_of_two = self.seqlen & (self.seqlen - 1) == 0
        length = length_name(self.seqlen) if power_of_two else f"{self.seqlen:,}"
        heads = f", {self.heads}:{self.kv_heads} heads" if self.kv_heads else ""
        return f"{length} D={self.head_dim}{heads}"

    def __str__(self) -> str:
        how = "" if self.ours in ("sm80", "sm90", "cuda", "") else f" ({self.ours})"
        seed = f", seed {self.seed}" if self.seed else ""
        return f"{self.mask} {self.shape}{seed} {self.direction}{how}"


class DecodeShape(NamedTuple):
    """Kernels at a shape of decode.py."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    ours: str

    @property
    def group(self) -> str:
        """What summaries count by."""
        return f"D={self.head_dim}"

    @property
    def shape(self) -> str:
        """Samples, query rows and keys."""
        return str(decode.Shape(self.batch, self.seqlen_q, self.seqlen_k))

    def __str__(self) -> str:
        return f"{self.shape} {self.group}{'' if self.ours == 'ours' else f' ({self.ours})'}"


class TrainingSteps(NamedTuple):
    """Steps of end_to_end.py. ``bins``: into so many the samples were divided; other bins, other samples."""

    task: str
    seqlen: int
    layers: int
    bins: int
    ours: str

    @property
    def group(self) -> str:
        """What summaries count by."""
        return self.task

    @property
    def shape(self) -> str:
        """Length, layers and bins."""
        return f"{length_name(self.seqlen)}, {self.layers} layers, {self.bins} bins"

    def __str__(self) -> str:
        return f"{self.task} {self.shape}"


Subject: TypeAlias = KernelCase | DecodeShape | TrainingSteps


class Key(NamedTuple):
    """What a ratio is of: ours, and the peer or the matmul that it is divided by."""

    subject: Subject
    against: str

    def __str__(self) -> str:
        return f"{self.subject} / {PEER_NAMES.get(self.against, self.against)}"


Ratios = dict[Key, float]


@dataclass(frozen=True)
class Measured:
    """What a benchmark says of one setting, our kernels and a card."""

    file: str  # the name of the file where such ratios are kept
    kind: type[Subject]
    ratios: Ratios  # of the newest measurements; none of what failed in them
    failed: set[Subject]  # ours, in the newest run that tried


def measured(path: Path) -> list[Measured]:
    """Return what a benchmark's CSV file says. Which benchmark's it is, its columns say.

    Raises OSError when it cannot be read, ValueError when it is of another script or a time is none.
    """
    with path.open(newline="") as file:
        header = next(csv.reader(file), [])
    if header == COLUMNS:
        return of_kernels(read_rows(path))
    for name, experiment in EXPERIMENTS.items():
        if header == RUN_COLUMNS + experiment.columns:
            return _of_experiment(path, name, experiment)
    scripts = ", ".join(f"{name}.py" for name in ("kernels", "inference", *EXPERIMENTS))
    raise ValueError(f"{path}: expected the columns of one of {scripts}")


def file_name(kernels: str, card: str, *, experiment: str = "", published: bool = False) -> str:
    """Name the file of ratios of kernels on a card; ``published``: of kernels.py's setting of that name.

    An experiment's has the kernels' name too where they are not those that the card gets by itself.
    """
    named = "" if experiment and kernels == "cuda" else kernels
    parts = (experiment, named, name_in_files(card), "published" if published else "")
    return "_".join(filter(None, parts)) + ".csv"


# kernels.py and inference.py


def of_kernels(rows: Iterable[Row]) -> list[Measured]:
    """Return what rows say, each setting's apart, whatever is mixed in one file."""
    by_file: dict[str, list[Row]] = {}
    for row in rows:
        # The command says it: not every mask of the published setting is of that setting alone.
        experiment = "inference" if "scripts/bench/inference.py" in row.run.command else ""
        published = "--setting published" in row.run.command
        name = file_name(row.run.kernels, row.run.card, experiment=experiment, published=published)
        by_file.setdefault(name, []).append(row)
    return [_of_results(name, Results(f, f[0].run.kernels, f[0].run.card)) for name, f in by_file.items()]


def _of_results(file: str, results: Results) -> Measured:
    found = Measured(file, KernelCase, {}, set())
    for case in dict.fromkeys(row.case for row in results.rows):
        for direction in DIRECTIONS:
            for ours in (results.kernels, deterministic(results.kernels)):
                subject = KernelCase.of(case, direction, ours)
                if results.failed(case, direction, ours):
                    found.failed.add(subject)
                    continue
                for peers, row in results.by_company(case, direction, ours).items():
                    found.ratios[Key(subject, matmul_beside(peers))] = row.share
                for peer in PEER_NAMES:
                    ratio = results.ratio(case, direction, peer, ours)
                    if ratio is not None and not results.failed(case, direction, peer):
                        found.ratios[Key(subject, peer)] = ratio
    return found


def matmul_beside(peers: Sequence[str]) -> str:
    """Name the matmul by what else took turns: on a card at its power limit all set each other's clock."""
    return MATMUL if not peers else f"{MATMUL} beside {' '.join(peers)}"


# decode.py and end_to_end.py

Rows = Sequence[Mapping[str, str]]
Place = tuple[str | int, ...]
Speeds = dict[tuple[Place, str], float | None]  # of one run, by place and implementation; None: it failed


@dataclass(frozen=True)
class Experiment:
    """How ratios come from an experiment's file."""

    kind: type[Subject]
    columns: list[str]  # behind those of the run
    time: str  # the column of it
    ours: Sequence[str]
    peers: Sequence[str]
    speeds: Callable[[Rows], Speeds]


def _decode_speeds(rows: Rows) -> Speeds:
    """Return calls per millisecond."""
    found: Speeds = {}
    for row in rows:
        place = tuple(int(row[name]) for name in ("batch", "seqlen_q", "seqlen_k", "head_dim"))
        ok = row["status"] == decode.OK
        found[place, row["implementation"]] = 1 / float(row["milliseconds"]) if ok else None
    return found


def _step_speeds(rows: Rows) -> Speeds:
    """Return tokens/s; what this run has only some of the steps of is left out."""
    found: Speeds = {}
    # One where the whole matrix is computed, as many as was asked for everywhere else.
    bins = max(int(row["bins"]) for row in rows)
    for task, layers, method in dict.fromkeys((r["task"], int(r["layers"]), r["method"]) for r in rows):
        for seqlen, (rate, _) in end_to_end.rates(rows, task, layers, method).items():
            found[(task, seqlen, layers, bins), method] = rate
    for row in end_to_end.current(rows):
        if row["status"] == "failed":
            found[(row["task"], int(row["seqlen"]), int(row["layers"]), bins), row["method"]] = None
    return found


EXPERIMENTS = {
    "decode": Experiment(
        *(DecodeShape, decode.COLUMNS, "milliseconds"),
        ours=("ours", "portable"),
        peers=("FA2", "cuDNN", decode.COPY),
        speeds=_decode_speeds,
    ),
    "end_to_end": Experiment(
        *(TrainingSteps, end_to_end.COLUMNS, "seconds"),
        ours=("ours",),
        peers=[method for method in end_to_end.METHODS if method != "ours"],
        speeds=_step_speeds,
    ),
}


def _of_experiment(path: Path, name: str, experiment: Experiment) -> list[Measured]:
    """Return what the rows of the newest sources say, by kernels and card.

    Raises ValueError when the time of a row is none.
    """
    by_card: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for number, row in enumerate(Log(path, experiment.columns).rows, 1):
        if row["status"] == "ok":
            _check_time(f"{path}, row {number}: {experiment.time}", row[experiment.time])
        by_card.setdefault((row["kernels"], row["card"]), []).append(row)
    found = []
    for (kernels, card), rows in by_card.items():
        runs: dict[str, list[Mapping[str, str]]] = {}  # the newest first
        for newest in sorted(newest_of(rows), key=lambda row: row["started"], reverse=True):
            runs.setdefault(newest["started"], []).append(newest)
        speeds = [experiment.speeds(run) for run in runs.values()]
        found.append(_of_speeds(file_name(kernels, card, experiment=name), experiment, speeds))
    return found


def _check_time(place: str, text: str) -> None:
    """Raise ValueError where a text is no time."""
    try:
        valid = 0.0 < float(text) < math.inf
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"{place}: expected a time, got {text!r}")


def _of_speeds(file: str, experiment: Experiment, runs: Sequence[Speeds]) -> Measured:
    """Return the ratios of each place from the newest run in which ours and the peer succeeded."""
    found = Measured(file, experiment.kind, {}, set())
    for place, ours in dict.fromkeys(key for run in runs for key in run if key[1] in experiment.ours):
        subject = experiment.kind._make((*place, ours))
        if _failed(runs, (place, ours)):
            found.failed.add(subject)
            continue
        for peer in experiment.peers:
            pairs = ((run.get((place, ours)), run.get((place, peer))) for run in runs)
            ratio = next((own / other for own, other in pairs if own and other), None)
            if ratio is not None and not _failed(runs, (place, peer)):
                found.ratios[Key(subject, peer)] = ratio
    return found


def _failed(runs: Sequence[Speeds], key: tuple[Place, str]) -> bool:
    """Whether it failed in the newest run that tried."""
    return next((run[key] is None for run in runs if key in run), False)
