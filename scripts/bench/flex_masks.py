"""The masks as rules (i, j) -> visible, as FlexAttention takes them.

A rule uses only indexing, comparisons and `&`, `|`, `~`, so it works on torch tensors under vmap and on NumPy
arrays alike; its test compares it with the masks themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from paper_data import PUBLISHED, PUBLISHED_SUFFIX, published_data, published_prefix

from paddle_flashmask.masks import registry

Rule = Callable[[Any, Any], Any]


def token_arrays(seqlen: int, seed: int = 0, *, published: bool = False) -> dict[str, np.ndarray]:
    """What the rules know about each token, int32 ``[S]``; ``published``: for masks of paper_data.PUBLISHED.

    Returns:
        ``document``: the number of its document; ``answer``: of the answer it is in, 0 in the question;
        ``prefix_end``: where the prefix of its document ends; ``evict_at``: the first row that no longer sees
        it.
    """
    data = (published_data if published else registry.token_data)(seqlen, seed)
    count = len(data.lengths)
    prefix_ends = np.cumsum(data.lengths) - data.lengths + data.prefixes
    parts = [
        np.repeat(np.arange(len(answers) + 1), [question, *answers]) for question, answers in data.documents
    ]
    arrays = {
        "document": np.repeat(np.arange(count), data.lengths),
        "answer": np.concatenate(parts),
        "prefix_end": np.repeat(prefix_ends, data.lengths),
        "evict_at": data.evict_at,
    }
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def make_rule(name: str, seqlen: int, tokens: Mapping[str, Any]) -> Rule:
    """Return the rule of a mask.

    Args:
        name: of the mask, one of the paper's, of paper_data.PUBLISHED, or sliding_window_1024.
        seqlen: S.
        tokens: what `token_arrays` returned, as NumPy arrays or torch tensors.
    """
    document, answer = tokens["document"], tokens["answer"]
    prefix_end, evict_at = tokens["prefix_end"], tokens["evict_at"]
    last = int(document[-1])
    window, few = seqlen // 16, seqlen // 32
    prefix = published_prefix(seqlen) if name in PUBLISHED else int(seqlen * 0.14)
    low, high = int(seqlen * 0.3), int(seqlen * 0.34)

    def same(i: Any, j: Any) -> Any:
        return document[i] == document[j]

    def dropped(x: Any) -> Any:
        return (x >= low) & (x < high)

    rules: dict[str, Rule] = {
        "full": lambda i, j: (i >= 0) & (j >= 0),
        "causal": lambda i, j: j <= i,
        "sliding_window": lambda i, j: (j <= i) & (i - j <= window),
        "causal_document": lambda i, j: same(i, j) & (j <= i),
        "document": same,
        "share_question": lambda i, j: same(i, j) & (j <= i) & ((answer[j] == 0) | (answer[i] == answer[j])),
        "global_sliding_window": lambda i, j: (
            (i < few) | (j < few) | ((i - j <= window // 2) & (j - i <= window // 2))
        ),
        "causal_blockwise": lambda i, j: (j <= i) & (same(i, j) | (document[i] == last)),
        "prefix_lm_document": lambda i, j: same(i, j) & ((j <= i) | (j < prefix_end[i])),
        "prefix_lm_causal": lambda i, j: (j <= i) | (j < prefix),
        "qk_sparse": lambda i, j: (j <= i) & ~dropped(i) & ~dropped(j),
        "random_eviction": lambda i, j: (j <= i) & (i < evict_at[j]),
        "sliding_window_1024": lambda i, j: (j <= i) & (i - j <= 1024),
    }
    return rules[name.removesuffix(PUBLISHED_SUFFIX)]
