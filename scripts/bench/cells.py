"""What the kernel benchmark measures, and the CSV that it is kept in. NumPy only.

A case is one mask at one shape. Its forward and backward passes are timed apart, each with all
implementations in turns; what one implementation took is a row. Rows of one run (process), case and direction
were timed in turns and are divided by each other; one mask by another only where both are of one run.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, astuple, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from paper_data import PUBLISHED, PUBLISHED_SUFFIX, published_mask

from paddle_flashmask import masks
from paddle_flashmask.masks import registry

ROOT = Path(__file__).resolve().parents[2]

# The paper's setting: so many tokens in all, heads times head dim.
TOKENS, HIDDEN = 131072, 4096
LENGTHS = (8192, 32768, 131072)
HEAD_DIMS = (64, 128)
DIRECTIONS = ("forward", "backward")
TWELVE = tuple(registry.names(paper_only=True))
ROUNDS = 10  # of warming up and of timing, at least, where they are short (measure.Clock)
# The same with the sparsities of the paper's own tables: other questions, answers and prefixes.
PUBLISHED_TWELVE = tuple(
    f"{mask}{PUBLISHED_SUFFIX}" if f"{mask}{PUBLISHED_SUFFIX}" in PUBLISHED else mask for mask in TWELVE
)

# Documents of one length that all tiles divide, of 64, 128 and 192 rows: the same work as a batch of them
# without a mask, but for finding the tiles. 20 of them are 130 K tokens at a block sparsity of exactly 95 %.
EQUAL_DOCUMENTS = "equal_documents"
EQUAL_DOCUMENT_COUNT, EQUAL_DOCUMENT_LENGTH = 20, 6528
# Every column hides HOLE rows somewhere, once or twice: of a full mask's tiles nearly all have intervals to
# mask that begin and end in them, of one slot or of two.
HOLES = {"holes": 1, "two_holes": 2}
HOLE = 32
# Ever longer sequences of one head, up to a million tokens, in 64 causal documents.
LONG_DOCUMENTS = "causal_document_64"
LONG_LENGTHS = (131072, 262144, 524288, 1048576)
# The setting of MagiAttention's published charts: one sample, grouped-query attention, work counted exactly.
MAGI_WINDOW = "sliding_window_1024"
MAGI_MASKS = ("full", "causal", "document", "causal_document", MAGI_WINDOW)
MAGI_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
MAGI_HEADS, MAGI_KV_HEADS = 64, 8


@dataclass(frozen=True)
class Case:
    """One mask, shared by all samples and heads, at one shape. ``kv_heads`` 0: as many as query heads."""

    mask: str
    seqlen: int
    head_dim: int
    batch: int
    heads: int
    seed: int = 0
    kv_heads: int = 0

    @property
    def key_heads(self) -> int:
        """How many heads k and v have."""
        return self.kv_heads or self.heads

    def build_mask(self) -> masks.ColumnMask:
        """Return the mask, of one sample and one head."""
        if self.mask == EQUAL_DOCUMENTS:
            return masks.document([EQUAL_DOCUMENT_LENGTH] * EQUAL_DOCUMENT_COUNT)
        if self.mask in HOLES:
            return _holes(self.seqlen, HOLES[self.mask], self.seed)
        if self.mask == LONG_DOCUMENTS:
            return masks.causal_document([self.seqlen // 64] * 64)
        if self.mask in PUBLISHED:
            return published_mask(self.mask, self.seqlen, self.seed)
        if self.mask == MAGI_WINDOW:
            return masks.sliding_window(self.seqlen, min(1024, self.seqlen - 1))
        return registry.make(self.mask, self.seqlen, self.seed)

    def flops(self, direction: str, rho: float) -> float:
        """Floating-point operations of the visited tiles: two products forward, five backward."""
        return self.flops_of_area(direction, self.seqlen**2 * (1 - rho))

    def flops_of_area(self, direction: str, area: float) -> float:
        """The same for so many elements of one head's attention matrix."""
        return (
            4.0 * area * self.head_dim * self.heads * self.batch * (2.5 if direction == "backward" else 1.0)
        )


def paper_case(mask: str, seqlen: int, head_dim: int, seed: int = 0) -> Case:
    """Return a case of the paper's setting."""
    return Case(mask, seqlen, head_dim, TOKENS // seqlen, HIDDEN // head_dim, seed)


def search_case(head_dim: int) -> Case:
    """Return the case that shows what finding the tiles costs."""
    return Case(
        EQUAL_DOCUMENTS, EQUAL_DOCUMENT_COUNT * EQUAL_DOCUMENT_LENGTH, head_dim, 1, HIDDEN // head_dim
    )


@cache
def is_drawn(mask: str) -> bool:
    """Whether a mask of the paper's setting hangs on the seed, as those with documents do."""
    one, other = (paper_case(mask, LENGTHS[0], HEAD_DIMS[0], seed).build_mask() for seed in (0, 1))
    return one != other


def magi_case(mask: str, seqlen: int, head_dim: int = 128, seed: int = 0) -> Case:
    """Return a case of MagiAttention's setting."""
    return Case(mask, seqlen, head_dim, 1, MAGI_HEADS, seed, MAGI_KV_HEADS)


# Masks that visit the same tiles at 8K: nearly all with elements to mask, and none (or the diagonal's).
MASKING_PAIRS = {"random_eviction": "causal"} | dict.fromkeys(HOLES, "full")


def masking_cases(head_dim: int) -> list[tuple[Case, Case]]:
    """Return the cases of MASKING_PAIRS."""
    return [
        (paper_case(partial, 8192, head_dim), paper_case(other, 8192, head_dim))
        for partial, other in MASKING_PAIRS.items()
    ]


def _holes(seqlen: int, count: int, seed: int) -> masks.ColumnMask:
    starts = np.random.default_rng(seed).integers(0, seqlen - HOLE, (1, 1, seqlen, count))
    indices = np.zeros((1, 1, seqlen, 4), np.int32)
    indices[..., 0 : 2 * count : 2] = starts
    indices[..., 1 : 2 * count : 2] = starts + HOLE
    return masks.ColumnMask.from_startend_row_indices(indices, causal=False)


def long_cases() -> list[Case]:
    """Return the cases that show how memory grows with the sequence."""
    return [Case(LONG_DOCUMENTS, seqlen, 64, 1, 1) for seqlen in LONG_LENGTHS]


# Peers, as they are called in tables.
PEER_NAMES = {"fa2": "FA2", "cudnn": "cuDNN", "flex": "Flex", "flex_flash": "Flex/FLASH", "fa4": "FA4"}
TRAINING_PEERS = tuple(PEER_NAMES)
# Forward only, in scripts/bench/inference.py.
PEER_NAMES |= {
    "flashinfer_dense": "FlashInfer, dense mask",
    "flashinfer_sparse": "FlashInfer, block-sparse",
    "flashinfer_sparse_16": "FlashInfer, block-sparse 16",
}
# Of the twelve, what those peers express that do not express all.
PACKED = {"causal_document": True, "document": False}  # sequences of several lengths; whether causal
PEER_MASKS = {
    "fa2": ("full", "causal"),
    "cudnn": ("full", "causal"),
    "fa4": ("full", "causal", "sliding_window", *PACKED),
}


def document_ends(case: Case) -> np.ndarray:
    """Where the documents of all samples of a mask of PACKED end if samples lie end to end, 0 before them.

    Returns:
        int32 ``[B * documents + 1]``: what calls for sequences of several lengths take.
    """
    lengths = registry.token_data(case.seqlen, case.seed).lengths
    return np.cumsum([0, *np.tile(lengths, case.batch)], dtype=np.int32)


def batched(kernels: str) -> str:
    """Name of our kernels on a batch of documents instead of packed ones, with idle indices."""
    return f"{kernels} batched"


def idle_indices(kernels: str) -> str:
    """Name of our kernels under causality with indices that hide nothing: kernels for any mask then run."""
    return f"{kernels} with idle indices"


def deterministic(kernels: str) -> str:
    """Name of our kernels in deterministic mode."""
    return f"{kernels} deterministic"


def plan(
    cases: Iterable[Case], is_measured: Callable[[Case, str], bool], directions: Sequence[str] = DIRECTIONS
) -> list[tuple[Case, list[str]]]:
    """What is left to measure: cases, in order, with their directions.

    Masks are judged by causal's throughput of the same run, so where any mask of a shape is left, the shape's
    causal is measured (again) too.
    """
    left = {case: [d for d in directions if not is_measured(case, d)] for case in cases}
    for case in left:
        if case.mask == "causal":
            alike = [d for other, d in left.items() if replace(other, mask="causal") == case]
            left[case] = [direction for direction in directions if any(direction in d for d in alike)]
    return [(case, remaining) for case, remaining in left.items() if remaining]


@dataclass(frozen=True)
class Run:
    """One process: what it measured, where and when."""

    started: str
    kernels: str  # our architecture: sm80, ...
    sources: str  # of our kernels, see hash_sources
    commit: str
    card: str
    driver: str
    torch: str
    command: str


@dataclass(frozen=True)
class Row:
    """What one implementation took for one case and direction. NaN: not measured."""

    run: Run
    case: Case
    direction: str
    implementation: str
    status: str  # ok, or failed: it raised, or its results were wrong, and it was not timed
    reason: str  # of failing
    rho: float  # fully masked 128 x 128 tiles / all
    visible_area: int  # exact, of one sample and head
    seconds: float  # asked for per implementation
    warmups: int = 0
    repetitions: int = 0
    milliseconds: float = math.nan  # median
    fastest: float = math.nan  # milliseconds
    slowest: float = math.nan
    tflops: float = math.nan
    matmul_tflops: float = math.nan  # of an 8192^3 bfloat16 product, timed in turns with it
    error: float = math.nan  # ||result - reference|| / ||reference||, the worst of its tensors
    mask_bytes: int = 0  # of startend_row_indices
    workspace_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether it was measured."""
        return self.status == "ok"

    @property
    def sources(self) -> str:
        """The hash of the sources of its direction's kernels."""
        return sources_of(self.run.sources, self.direction)

    @property
    def share(self) -> float:
        """Share of the matmul ceiling."""
        return self.tflops / self.matmul_tflops


COMMENT = re.compile(r"(^|\s+)//.*$", re.MULTILINE)  # with the space or line break before it
FEW_ROWS = "few_rows"  # in the names of kernels that serve calls with few query rows alone
INCLUDED = re.compile(r'^#include "([^"]+)"', re.MULTILINE)

# The columns: of the run, of the case, then the row's own.
_OWN_FIELDS = [field for field in fields(Row) if field.name not in ("run", "case")]
_FIELDS = [*fields(Run), *fields(Case), *_OWN_FIELDS]
COLUMNS = [field.name for field in _FIELDS]
_PARSE = {field.name: {"str": str, "int": int, "float": float}[str(field.type)] for field in _FIELDS}


def read_rows(path: Path) -> list[Row]:
    """Read a CSV file; no rows when there is none.

    Raises ValueError when its columns are others, or a time is none.
    """
    if not path.exists():
        return []

    def pick(line: dict[str, str], wanted: Iterable[Field[Any]]) -> dict[str, Any]:
        return {field.name: _PARSE[field.name](line[field.name]) for field in wanted}

    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        _check_header(path, reader.fieldnames)
        rows = []
        for line in reader:
            try:
                run, case = Run(**pick(line, fields(Run))), Case(**pick(line, fields(Case)))
                row = Row(run, case, **pick(line, _OWN_FIELDS))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
            if row.ok and not 0.0 < row.milliseconds < math.inf:
                raise ValueError(f"{path}, line {reader.line_num}: {row.milliseconds} milliseconds")
            rows.append(row)
        return rows


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append to a CSV file, made when there is none. Raises ValueError when its columns are others."""
    new = not path.exists()
    if not new:
        with path.open(newline="") as file:
            _check_header(path, next(csv.reader(file), None))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        for row in rows:
            own = (getattr(row, field.name) for field in _OWN_FIELDS)
            values = (*astuple(row.run), *astuple(row.case), *own)
            writer.writerow(f"{value:.6g}" if isinstance(value, float) else value for value in values)


def _check_header(path: Path, header: Sequence[str] | None) -> None:
    if list(header or ()) != COLUMNS:
        raise ValueError(f"{path}: expected the columns {', '.join(COLUMNS)}, got {', '.join(header or ())}")


def is_done(
    rows: Iterable[Row], run: Run, case: Case, direction: str, implementations: Iterable[str], seconds: float
) -> bool:
    """Whether an earlier run of the same kernels on the same card tried all of these, as long or longer.

    What failed there counts too: to try again, take its rows out of the file, or name another.
    """
    found: dict[str, set[str]] = {}
    for row in rows:
        same_cell = (row.case, row.direction) == (case, direction)
        same_run = (row.sources, row.run.card) == (sources_of(run.sources, direction), run.card)
        if same_cell and same_run and row.seconds >= seconds:
            found.setdefault(row.run.started, set()).add(row.implementation)
    return any(names >= set(implementations) for names in found.values())


def hash_sources(kernels: str, root: Path = ROOT, few_rows: bool = False) -> str:
    """Return "FORWARD-BACKWARD", short hashes of what each pass of one architecture is compiled from.

    That is its instantiations and what chooses among them, what these include, and the sources that define
    what a header of theirs declares; without comments. Kernels that serve calls with few query rows alone,
    and the lines of a table that name them, count where ``few_rows`` says so: "FORWARD-BACKWARD-FORWARD".
    """
    csrc = root / "csrc"
    families = ("sm80", "sm90") if kernels == "cuda" else (kernels,)
    units = [path for family in families for path in (csrc / "instantiations").glob(f"{family}_*")]
    without = {"forward": ("_backward_", FEW_ROWS), "backward": ("_forward_", FEW_ROWS)}
    parts = [without[direction] for direction in DIRECTIONS] + [("_backward_",)] * few_rows
    return "-".join(_hash_units(units, names, root) for names in parts)


def sources_of(sources: str, direction: str) -> str:
    """Return the part of hash_sources() that is one direction's."""
    forward, *more = sources.split("-")
    if direction == "backward":
        return more[0] if more else forward
    return more[1] if len(more) > 1 else forward


def _hash_units(units: Iterable[Path], without: Sequence[str], root: Path) -> str:
    csrc = root / "csrc"
    own = [path for path in units if not any(name in path.name for name in without)]
    digest = hashlib.sha256()
    for path in sorted(_compiled_from([csrc / "common" / "dispatch.cc", *own], csrc)):
        text = COMMENT.sub("", path.read_text())
        if path.name.endswith("_table.cc") and FEW_ROWS in without:
            text = "".join(line for line in text.splitlines(keepends=True) if FEW_ROWS not in line)
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + text.encode())
    digest.update((root / "scripts" / "kernel_sources.py").read_bytes())
    return digest.hexdigest()[:10]


def _compiled_from(pending: list[Path], csrc: Path) -> set[Path]:
    paths: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in paths:
            continue
        paths.add(path)
        named = (
            folder / name
            for name in INCLUDED.findall(path.read_text())
            for folder in (csrc, csrc / "include")
        )
        beside = (path.with_suffix(suffix) for suffix in (".cc", ".cu") if path.suffix in (".h", ".cuh"))
        pending += (other for other in (*named, *beside) if other.exists())
    return paths
