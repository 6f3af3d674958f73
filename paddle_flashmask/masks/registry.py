"""The one registry of named masks, which tests, benchmarks and the docs gallery share.

Each name stands for a mask over random data of a given length, the same for the same seed. The data is that
of the paper's kernel benchmarks: documents of whole multiples of 128 tokens (less where the length has no
room for them), one question and 2 to 6 equal answers in each, a prefix of 20 to 60 % of each, and a row at
which each key is evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import constructors as masks
from ._checks import as_int, describe
from .column_mask import ColumnMask

# How many documents a sequence of the paper's lengths holds, at least and at most; other lengths take the
# first.
_DOCUMENT_COUNTS = {8192: (3, 7), 32768: (10, 14), 131072: (11, 15)}


@dataclass(frozen=True)
class TokenData:
    """Random data about the tokens of one sequence of S tokens.

    Attributes:
        lengths: tokens of each document, int64 ``[n]``.
        documents: tokens of each document's question and of its answers, as `share_question` takes them.
        prefixes: tokens of each document's prefix, int64 ``[n]``.
        evict_at: per key the first row that no longer sees it, int64 ``[S]``.
    """

    lengths: NDArray[np.int64]
    documents: tuple[tuple[int, tuple[int, ...]], ...]
    prefixes: NDArray[np.int64]
    evict_at: NDArray[np.int64]


@lru_cache(maxsize=8)
def token_data(seqlen: int, seed: int = 0) -> TokenData:
    """The data of a sequence of ``seqlen`` tokens, the same for the same seed."""
    seqlen, seed = as_int("seqlen", seqlen), as_int("seed", seed, maximum=2**63)
    lengths = _document_lengths(seqlen, np.random.default_rng(seed))
    rng = np.random.default_rng(seed + 1)
    documents, prefixes = [], []
    for length in lengths.tolist():
        drawn = int(rng.integers(2, 7))
        tokens = max(1, int(length * 0.15 / (1 + 0.15 * drawn)))  # of an answer: 15 % of the question
        answers = min(drawn, length)
        documents.append((length - answers * tokens, (tokens,) * answers))
        prefixes.append(int(length * rng.uniform(0.2, 0.6)))
    evict_at = rng.integers(np.arange(1, seqlen + 1), seqlen + 1)
    return TokenData(lengths, tuple(documents), np.array(prefixes, np.int64), evict_at)


def _document_lengths(seqlen: int, rng: np.random.Generator) -> NDArray[np.int64]:
    low, high = _DOCUMENT_COUNTS.get(seqlen, _DOCUMENT_COUNTS[8192])
    count = min(int(rng.integers(low, high + 1)), max(seqlen, 1))
    unit = 128
    while unit > 1 and seqlen // unit <= count:  # short sequences: no room for that many cuts
        unit //= 2
    cuts = np.sort(rng.choice(np.arange(1, -(-seqlen // unit)), count - 1, replace=False)) * unit
    return np.diff(np.concatenate([[0], cuts, [seqlen]])).astype(np.int64)


@dataclass(frozen=True)
class NamedMask:
    """One entry of the registry.

    Attributes:
        name: what it is called.
        rule: when row i sees column j, for people.
        build: (seqlen, seed) to the mask.
        paper: whether it is one of the paper's twelve.
    """

    name: str
    rule: str
    build: Callable[[int, int], ColumnMask]
    paper: bool


REGISTRY: dict[str, NamedMask] = {}


def names(*, paper_only: bool = False) -> list[str]:
    """The names, the paper's twelve first."""
    return [entry.name for entry in REGISTRY.values() if entry.paper or not paper_only]


def make(name: str, seqlen: int, seed: int = 0) -> ColumnMask:
    """The mask of that name over ``seqlen`` tokens.

    Raises:
        ValueError: an unknown name; the error lists the known ones.
    """
    if name not in REGISTRY:
        raise ValueError(f"name: expected one of {', '.join(REGISTRY)}, got {describe(name)}")
    return REGISTRY[name].build(as_int("seqlen", seqlen), as_int("seed", seed, maximum=2**63))


def _register(name: str, rule: str, *, paper: bool = True) -> Callable[[Any], Any]:
    def add(build: Callable[[int, int], ColumnMask]) -> Callable[[int, int], ColumnMask]:
        REGISTRY[name] = NamedMask(name, rule, build, paper)
        return build

    return add


@_register("full", "both exist")
def _full(seqlen: int, seed: int) -> ColumnMask:
    return masks.full(seqlen)


@_register("causal", "j <= i")
def _causal(seqlen: int, seed: int) -> ColumnMask:
    return masks.causal(seqlen)


@_register("sliding_window", "0 <= i - j <= S/16")
def _sliding_window(seqlen: int, seed: int) -> ColumnMask:
    return masks.sliding_window(seqlen, seqlen // 16)


@_register("causal_document", "same document and j <= i")
def _causal_document(seqlen: int, seed: int) -> ColumnMask:
    return masks.causal_document(token_data(seqlen, seed).lengths)


@_register("document", "same document")
def _document(seqlen: int, seed: int) -> ColumnMask:
    return masks.document(token_data(seqlen, seed).lengths)


@_register("share_question", "same document, j <= i, and j in the question or in i's own answer")
def _share_question(seqlen: int, seed: int) -> ColumnMask:
    return masks.share_question(token_data(seqlen, seed).documents)


@_register("global_sliding_window", "i < S/32, or j < S/32, or |i - j| <= S/32")
def _global_sliding_window(seqlen: int, seed: int) -> ColumnMask:
    return masks.global_sliding_window(seqlen, seqlen // 32, seqlen // 16 // 2)


@_register("causal_blockwise", "j <= i, and same block or i in the last block")
def _causal_blockwise(seqlen: int, seed: int) -> ColumnMask:
    return masks.causal_blockwise(token_data(seqlen, seed).lengths)


@_register("prefix_lm_document", "same document, and j <= i or j in its prefix")
def _prefix_lm_document(seqlen: int, seed: int) -> ColumnMask:
    data = token_data(seqlen, seed)
    return masks.prefix_lm_document(data.lengths, data.prefixes)


@_register("prefix_lm_causal", "j <= i or j < 0.14 S")
def _prefix_lm_causal(seqlen: int, seed: int) -> ColumnMask:
    return masks.prefix_lm_causal(seqlen, int(seqlen * 0.14))


@_register("qk_sparse", "j <= i, and neither i nor j in [0.30 S, 0.34 S): the constructor `dropped`")
def _qk_sparse(seqlen: int, seed: int) -> ColumnMask:
    start, stop = int(seqlen * 0.3), int(seqlen * 0.34)
    return masks.dropped(seqlen, np.arange(start, stop), (start, stop))


@_register("random_eviction", "j <= i < evict_at[j]")
def _random_eviction(seqlen: int, seed: int) -> ColumnMask:
    return masks.random_eviction(token_data(seqlen, seed).evict_at)


@_register("hash_sparse", "same of 8 buckets and original j <= original i, in sorted order", paper=False)
def _hash_sparse(seqlen: int, seed: int) -> ColumnMask:
    buckets = np.random.default_rng(seed + 2).integers(0, 8, (2, seqlen))
    return masks.hash_sparse(*buckets)[0]


@_register(
    "qk_sparse_ranges", "j <= i, and no third of the sequence, less its first token, holds both", paper=False
)
def _qk_sparse_ranges(seqlen: int, seed: int) -> ColumnMask:
    cuts = [seqlen * i // 3 for i in range(4)]
    return masks.qk_sparse(seqlen, [(min(a + 1, b), b) for a, b in pairwise(cuts)])


@_register("two_sided_window", "|i - j| <= S/16", paper=False)
def _two_sided_window(seqlen: int, seed: int) -> ColumnMask:
    return masks.sliding_window(seqlen, seqlen // 16, causal=False)


@_register("document_window", "same document and 0 <= i - j <= S/16, by `&`", paper=False)
def _document_window(seqlen: int, seed: int) -> ColumnMask:
    return masks.document(token_data(seqlen, seed).lengths) & masks.sliding_window(seqlen, seqlen // 16)
