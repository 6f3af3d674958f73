"""The named masks: their data is the benchmarks', and each obeys its rule on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paddle_flashmask.masks import registry
from paddle_flashmask.masks.registry import TokenData

TWELVE = [
    "full",
    "causal",
    "sliding_window",
    "causal_document",
    "document",
    "share_question",
    "global_sliding_window",
    "causal_blockwise",
    "prefix_lm_document",
    "prefix_lm_causal",
    "qk_sparse",
    "random_eviction",
]


def dense_rules(seqlen: int, data: TokenData) -> dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]]:
    """(i, j) to visible, per name, from token arrays: nothing of `masks` in it."""
    document = np.repeat(np.arange(len(data.lengths)), data.lengths)
    answer = np.concatenate(
        [np.repeat(np.arange(len(answers) + 1), [question, *answers]) for question, answers in data.documents]
    )
    prefix_end = np.repeat(np.cumsum(data.lengths) - data.lengths + data.prefixes, data.lengths)
    window, few, prefix = seqlen // 16, seqlen // 32, int(seqlen * 0.14)
    low, high = int(seqlen * 0.3), int(seqlen * 0.34)
    last = len(data.lengths) - 1

    def hidden(x: np.ndarray) -> np.ndarray:
        return (x >= low) & (x < high)

    def same(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return document[i] == document[j]

    return {
        "full": lambda i, j: (i >= 0) & (j >= 0),
        "causal": lambda i, j: j <= i,
        "sliding_window": lambda i, j: (j <= i) & (i - j <= window),
        "causal_document": lambda i, j: same(i, j) & (j <= i),
        "document": same,
        "share_question": lambda i, j: same(i, j) & (j <= i) & ((answer[j] == 0) | (answer[i] == answer[j])),
        "global_sliding_window": lambda i, j: (i < few) | (j < few) | (abs(i - j) <= window // 2),
        "causal_blockwise": lambda i, j: (j <= i) & (same(i, j) | (document[i] == last)),
        "prefix_lm_document": lambda i, j: same(i, j) & ((j <= i) | (j < prefix_end[j])),
        "prefix_lm_causal": lambda i, j: (j <= i) | (j < prefix),
        "qk_sparse": lambda i, j: (j <= i) & ~hidden(i) & ~hidden(j),
        "random_eviction": lambda i, j: (j <= i) & (i < data.evict_at[j]),
        "two_sided_window": lambda i, j: abs(i - j) <= window,
        "document_window": lambda i, j: same(i, j) & (j <= i) & (i - j <= window),
    }


@pytest.mark.parametrize("seqlen", [1, 7, 100, 333, 1024])
def test_named_masks_obey_their_rules(seqlen: int) -> None:
    i, j = np.arange(seqlen)[:, None], np.arange(seqlen)[None]
    for seed in (0, 3):
        for name, rule in dense_rules(seqlen, registry.token_data(seqlen, seed)).items():
            dense = registry.make(name, seqlen, seed).to_dense()[0, 0]
            np.testing.assert_array_equal(dense, np.broadcast_to(rule(i, j), dense.shape), err_msg=name)


def test_the_twelve_come_first_and_every_name_builds() -> None:
    assert registry.names(paper_only=True) == TWELVE
    assert registry.names()[:12] == TWELVE
    assert {"hash_sparse", "qk_sparse_ranges"} < set(registry.names())
    for name in registry.names():
        for seqlen in (0, 1, 2, 50, 129, 4096):
            mask = registry.make(name, seqlen, seed=5)
            assert mask.shape == (1, 1, seqlen, seqlen)
            assert mask == registry.make(name, seqlen, seed=5)


@pytest.mark.parametrize(
    ("seqlen", "lengths", "prefixes", "answers", "evicted_first", "evicted_sum"),
    [
        (
            8192,
            [384, 256, 1536, 256, 1536, 768, 3456],
            [222, 65, 498, 94, 558, 322, 1732],
            [4, 4, 6, 6, 3, 6, 2],
            [226, 6865, 4410, 6698],
            50398944,
        ),
        (
            32768,
            [640, 768, 1024, 3200, 2944, 1152, 6272],
            [371, 197, 332, 1181, 1070, 483, 3144],
            [4, 4, 6, 6, 3, 6, 2],
            [2033, 9190, 16328, 15901],
            805563645,
        ),
        (
            131072,
            [2176, 3200, 4480, 13056, 12160, 4864, 25984],
            [1262, 824, 1454, 4821, 4422, 2042, 13028],
            [4, 4, 6, 6, 3, 6, 2],
            [36754, 15329, 128548, 98188],
            12879280768,
        ),
    ],
)
def test_data_is_that_of_the_published_benchmarks(
    seqlen: int,
    lengths: list[int],
    prefixes: list[int],
    answers: list[int],
    evicted_first: list[int],
    evicted_sum: int,
) -> None:
    """Seed 0. Results are only comparable on the same data, so it must never change."""
    data = registry.token_data(seqlen, 0)
    assert data.lengths[: len(lengths)].tolist() == lengths
    assert data.lengths.sum() == seqlen
    assert data.prefixes[: len(prefixes)].tolist() == prefixes
    assert [len(tokens) for _, tokens in data.documents[: len(answers)]] == answers
    assert data.evict_at[:4].tolist() == evicted_first
    assert data.evict_at.sum() == evicted_sum
    for length, (question, tokens) in zip(data.lengths, data.documents, strict=True):
        assert question + sum(tokens) == length
