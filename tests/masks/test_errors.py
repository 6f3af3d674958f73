"""Every argument of every function of `masks` with a wrong type, rank, size or value: the error names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paddle_flashmask import masks
from paddle_flashmask.masks import ColumnMask, causal, full, registry

INDICES = np.zeros((1, 1, 4, 2), np.int32)

WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # Lengths of sequences.
    (lambda: masks.full(1.5), TypeError, r"seqlen_q: expected an integer, got float 1.5"),
    (lambda: masks.full(True), TypeError, r"seqlen_q: expected an integer, got bool True"),
    (lambda: masks.full(-1), ValueError, r"seqlen_q: expected an integer in \[0, 2147483647\], got -1"),
    (lambda: masks.full(4, 2**31), ValueError, r"seqlen_k: expected .* got 2147483648"),
    (lambda: masks.causal("4"), TypeError, r"seqlen_q: expected an integer, got str '4'"),
    (lambda: masks.causal(4, [4]), TypeError, r"seqlen_k: expected an integer, got list"),
    (lambda: masks.sliding_window(None, 1), TypeError, r"seqlen: expected an integer, got NoneType"),
    (lambda: masks.prefix_lm_causal(4.0, 1), TypeError, r"seqlen: expected an integer, got float"),
    (lambda: masks.global_sliding_window(-4, 1, 1), ValueError, r"seqlen: expected .* got -4"),
    (lambda: masks.qk_sparse("x", []), TypeError, r"seqlen: expected an integer"),
    (lambda: masks.dropped([4], []), TypeError, r"seqlen: expected an integer"),
    # Windows, prefixes, numbers of tokens.
    (lambda: masks.sliding_window(4, -1), ValueError, r"window: expected .* got -1"),
    (lambda: masks.sliding_window(4, 1.0), TypeError, r"window: expected an integer, got float"),
    (
        lambda: masks.sliding_window(4, (1, 2, 3)),
        ValueError,
        r"window: expected a pair \(left, right\), got 3",
    ),
    (lambda: masks.sliding_window(4, (1, -2)), ValueError, r"window: expected .* got -2"),
    (lambda: masks.sliding_window(4, {1, 2}), TypeError, r"window: expected an integer, got set"),
    (lambda: masks.sliding_window(4, 1, causal=1), TypeError, r"causal: expected True or False, got int 1"),
    (lambda: masks.sliding_window(4, 1, seqlen_k=-1), ValueError, r"seqlen_k: expected .* got -1"),
    (lambda: masks.global_sliding_window(4, 5, 1), ValueError, r"num_global: expected .*\[0, 4\], got 5"),
    (lambda: masks.global_sliding_window(4, 1, "1"), TypeError, r"window: expected an integer, got str"),
    (lambda: masks.prefix_lm_causal(4, 5), ValueError, r"prefix: expected an integer in \[0, 4\], got 5"),
    (lambda: masks.prefix_lm_causal(4, None), TypeError, r"prefix: expected an integer, got NoneType"),
    # Lengths of documents and blocks.
    *(
        case
        for build in (masks.document, masks.causal_document, masks.causal_blockwise)
        for case in (
            (lambda b=build: b(4), ValueError, r"lengths: expected 1 dimensions, got shape \[\]"),
            (lambda b=build: b([[4]]), ValueError, r"lengths: expected 1 dimensions, got shape \[1, 1\]"),
            (lambda b=build: b([4.0]), TypeError, r"lengths: expected integers .* got dtype float64"),
            (lambda b=build: b([True]), TypeError, r"lengths: expected integers .* got dtype bool"),
            (lambda b=build: b("4"), TypeError, r"lengths: expected integers .* got dtype <U1"),
            (lambda b=build: b([2, [3]]), ValueError, r"lengths: expected an array, got list with rows"),
            (lambda b=build: b(np.array([4], np.uint64)), TypeError, r"lengths: .* got dtype uint64"),
            (lambda b=build: b([3, -1]), ValueError, r"lengths: expected lengths in \[0, .* got -1 to 3"),
            (lambda b=build: b([3, 4], seqlen=6), ValueError, r"lengths: .* at most seqlen=6, got 7"),
            (lambda b=build: b([3, 4], seqlen=7.5), TypeError, r"seqlen: expected an integer, got float"),
            (lambda b=build: b([2**30, 2**30]), ValueError, r"sum of lengths: expected .* got 2147483648"),
        )
    ),
    (lambda: masks.prefix_lm_document([3, 4], [1]), ValueError, r"prefixes: expected one per document"),
    (lambda: masks.prefix_lm_document([3, 4], [1, 5]), ValueError, r"prefixes: .*none longer"),
    (lambda: masks.prefix_lm_document([3, 4], [1, -1]), ValueError, r"prefixes: expected lengths in"),
    (lambda: masks.prefix_lm_document([3, 4], [1, 0.5]), TypeError, r"prefixes: expected integers"),
    (lambda: masks.prefix_lm_document([3.0], [1]), TypeError, r"lengths: expected integers"),
    (lambda: masks.share_question(5), TypeError, r"documents: expected a sequence of pairs .* got int 5"),
    (lambda: masks.share_question([5]), TypeError, r"documents\[0\]: expected a pair .* got int 5"),
    (lambda: masks.share_question([(5, [1]), (5,)]), ValueError, r"documents\[1\]: expected a pair .* got 1"),
    (lambda: masks.share_question([("a", [1])]), TypeError, r"documents\[0\] question: expected an integer"),
    (lambda: masks.share_question([(5, 1)]), ValueError, r"documents\[0\] answers: expected 1 dimensions"),
    (lambda: masks.share_question([(5, [-1])]), ValueError, r"documents\[0\] answers: expected lengths"),
    (lambda: masks.share_question([(5, 1), 7]), ValueError, r"documents\[0\] answers: expected 1 dimensions"),
    (
        lambda: masks.share_question([(1, [1]), "ab"]),
        TypeError,
        r"documents\[1\]: expected a pair .* got str 'ab'",
    ),
    (
        lambda: masks.share_question([(1, [1]), {1: 2, 3: 4}]),
        TypeError,
        r"documents\[1\]: expected a pair .* dict",
    ),
    (
        lambda: masks.share_question([(1, [1]), (True, [1])]),
        TypeError,
        r"documents\[1\] question: .* got bool True",
    ),
    (
        lambda: masks.share_question([(2**40, [1])]),
        ValueError,
        r"documents\[0\] question: expected an integer in",
    ),
    (
        lambda: masks.share_question([(1, []), (1, "ab")]),
        TypeError,
        r"documents\[1\] answers: expected integers",
    ),
    (
        lambda: masks.share_question([(1, []), (1, [1.0])]),
        TypeError,
        r"documents\[1\] answers: expected integers",
    ),
    (
        lambda: masks.share_question([(1, []), (1, [[1]])]),
        ValueError,
        r"documents\[1\] answers: expected 1 dim",
    ),
    (
        lambda: masks.share_question([(1, []), (1, [2**70])]),
        TypeError,
        r"documents\[1\] answers: expected integers",
    ),
    (
        lambda: masks.share_question([(5, [1])], seqlen=5),
        ValueError,
        r"documents: .* at most seqlen=5, got 6",
    ),
    # Ranges and indices.
    (lambda: masks.qk_sparse(4, 3), TypeError, r"ranges: expected a sequence of pairs .* got int 3"),
    (lambda: masks.qk_sparse(4, [3]), TypeError, r"ranges\[0\]: expected a pair \(start, stop\), got int 3"),
    (lambda: masks.qk_sparse(4, [(1, 5)]), ValueError, r"ranges\[0\]: .* start <= stop <= 4, got \(1, 5\)"),
    (lambda: masks.qk_sparse(4, [(3, 1)]), ValueError, r"ranges\[0\]: .* got \(3, 1\)"),
    (lambda: masks.qk_sparse(4, [(-1, 1)]), ValueError, r"ranges\[0\] start: expected .* got -1"),
    (lambda: masks.qk_sparse(4, [(0, 1.0)]), TypeError, r"ranges\[0\] stop: expected an integer"),
    (lambda: masks.qk_sparse(4, [(0, 1), (0, True)]), TypeError, r"ranges\[1\] stop: .* got bool True"),
    (
        lambda: masks.qk_sparse(4, [(0, 1), (0, 2**70)]),
        ValueError,
        r"ranges\[1\] stop: expected an integer in",
    ),
    (
        lambda: masks.qk_sparse(4, [(0, 1), (0,), (1, 2, 3)]),
        ValueError,
        r"ranges\[1\]: expected a pair .* got 1",
    ),
    (lambda: masks.qk_sparse(4, [(0, 1), "01"]), TypeError, r"ranges\[1\]: expected a pair .* got str"),
    (lambda: masks.qk_sparse(4, np.array([1, 2])), TypeError, r"ranges\[0\]: expected a pair"),
    (lambda: masks.dropped(4, [4]), ValueError, r"keys: expected indices in \[0, 4\), got 4 to 4"),
    (lambda: masks.dropped(4, [-1]), ValueError, r"keys: expected indices in \[0, 4\), got -1 to -1"),
    (lambda: masks.dropped(4, [0.5]), TypeError, r"keys: expected integers"),
    (lambda: masks.dropped(4, np.zeros(4, bool)), TypeError, r"keys: expected integers .* dtype bool"),
    (lambda: masks.dropped(4, [[1]]), ValueError, r"keys: expected 1 dimensions"),
    (lambda: masks.dropped(4, [1], (0, 5)), ValueError, r"queries: .* got \(0, 5\)"),
    (lambda: masks.dropped(4, [1], 2), TypeError, r"queries: expected a pair"),
    (lambda: masks.random_eviction(3), ValueError, r"evict_at: expected 1 or 2 or 3 dimensions"),
    (lambda: masks.random_eviction([0.5]), TypeError, r"evict_at: expected integers"),
    (lambda: masks.random_eviction(np.zeros((1, 1, 1, 1), int)), ValueError, r"evict_at: .*\[1, 1, 1, 1\]"),
    (lambda: masks.random_eviction(np.zeros((0, 4), int)), ValueError, r"evict_at: expected at least one"),
    (
        lambda: masks.hash_sparse([0, 1], [0]),
        ValueError,
        r"key_buckets: expected the shape .*\[2\], got \[1\]",
    ),
    (lambda: masks.hash_sparse([0.0], [0]), TypeError, r"query_buckets: expected integers"),
    (lambda: masks.hash_sparse([0], ["a"]), TypeError, r"key_buckets: expected integers"),
    (lambda: masks.hash_sparse(np.zeros((0, 4), int), np.zeros((0, 4), int)), ValueError, r"query_buckets: "),
    # The class itself.
    (lambda: ColumnMask([], seqlen_q=1.0, seqlen_k=1), TypeError, r"seqlen_q: expected an integer"),
    (lambda: ColumnMask([], seqlen_q=1, seqlen_k=-1), ValueError, r"seqlen_k: expected an integer in"),
    (lambda: ColumnMask(3, seqlen_q=1, seqlen_k=1), TypeError, r"masked: expected a sequence of pairs"),
    (lambda: ColumnMask([3], seqlen_q=1, seqlen_k=1), TypeError, r"masked\[0\]: expected a pair"),
    (lambda: ColumnMask([(0, 1.5)], seqlen_q=1, seqlen_k=1), TypeError, r"masked\[0\]: expected integers"),
    (
        lambda: ColumnMask([(0, [1, 2])], seqlen_q=1, seqlen_k=3),
        ValueError,
        r"masked: expected shapes that broadcast to \[B, H, 3\], got \[\], \[2\]",
    ),
    (lambda: ColumnMask([(0, [1, 2])], seqlen_q=1, seqlen_k=1), ValueError, r"masked: .*\[B, H, 1\], got"),
    (lambda: ColumnMask.from_dense([[1, 0]]), TypeError, r"dense: expected booleans, got dtype int64"),
    (lambda: ColumnMask.from_dense([True]), ValueError, r"dense: expected 2 or 3 or 4 dimensions"),
    (lambda: ColumnMask.from_dense([[True], []]), ValueError, r"dense: expected an array, got list with"),
    (lambda: ColumnMask.from_dense(np.ones((0, 2, 2), bool)), ValueError, r"dense: .* \[0, 2, 2\]"),
    (lambda: ColumnMask.from_startend_row_indices(INDICES[0], True), ValueError, r"_indices: expected 4 dim"),
    (lambda: ColumnMask.from_startend_row_indices(INDICES * 0.5, True), TypeError, r"_indices: .*float64"),
    (lambda: ColumnMask.from_startend_row_indices(INDICES, None), TypeError, r"causal: expected True or"),
    (
        lambda: ColumnMask.from_startend_row_indices(INDICES.repeat(2, -1), True),
        ValueError,
        r"startend_row_indices: .* last dimension of 1 or 2 with causal=True, got shape \[1, 1, 4, 4\]",
    ),
    (
        lambda: ColumnMask.from_startend_row_indices(INDICES[..., :1], False),
        ValueError,
        r"startend_row_indices: .* last dimension of 2 or 4 with causal=False, got shape \[1, 1, 4, 1\]",
    ),
    (lambda: ColumnMask.from_startend_row_indices(INDICES[:0], True), ValueError, r"at least one sample"),
    (lambda: ColumnMask.from_startend_row_indices(INDICES, True, -1), ValueError, r"seqlen_q: expected"),
    (lambda: full(4).block_map(0, 1), ValueError, r"block_m: expected an integer in \[1, .* got 0"),
    (lambda: full(4).block_map(1, 2.0), TypeError, r"block_n: expected an integer, got float"),
    (
        lambda: full(4).block_map(1, 1, "max"),
        ValueError,
        r'rule: expected "exact" or "minmax", got str \'max\'',
    ),
    (lambda: full(4).block_sparsity(0), ValueError, r"block: expected an integer in \[1, .* got 0"),
    (lambda: full(4).show(0), ValueError, r"max_cells: expected an integer in \[1,"),
    (lambda: full(4).show(batch=1), ValueError, r"batch: expected an integer in \[0, 0\], got 1"),
    (lambda: full(4).plot(head=1), ValueError, r"head: expected an integer in \[0, 0\], got 1"),
    # Combining.
    (
        lambda: full(4) & full(5),
        ValueError,
        r"&: expected masks of equal .*\[1, 1, 4, 4\] and \[1, 1, 5, 5\]",
    ),
    (lambda: full(4) | masks.random_eviction([[1] * 5]), ValueError, r"\|: expected masks of equal"),
    (
        lambda: masks.random_eviction([[1]] * 2) & masks.random_eviction([[1]] * 3),
        ValueError,
        r"&: expected masks of .* broadcast, got .*\[1, 2, 1, 1\] and \[1, 3, 1, 1\]",
    ),
    (lambda: full(4) & np.ones((4, 4), bool), TypeError, r"unsupported operand"),
    (lambda: full(4) | None, TypeError, r"unsupported operand"),
    (lambda: ColumnMask.stack_heads([]), ValueError, r"stack_heads: expected at least one mask, got none"),
    (lambda: ColumnMask.stack_heads(full(4)), TypeError, r"stack_heads: expected a sequence of masks"),
    (lambda: ColumnMask.stack_batch([full(4), 3]), TypeError, r"stack_batch: expected masks, got int 3"),
    (lambda: ColumnMask.stack_batch([full(4), full(5)]), ValueError, r"stack_batch: expected masks of equal"),
    (
        lambda: ColumnMask.stack_batch([masks.random_eviction([[1]] * n) for n in (2, 3)]),
        ValueError,
        r"stack_batch: .* 1 or 3, got .*\[1, 2, 1, 1\], \[1, 3, 1, 1\]",
    ),
    (lambda: bool(causal(4)), TypeError, r"no truth value: combine masks with & and \|"),
    (lambda: causal(4) and full(4), TypeError, r"not with `and` and `or`"),
    # The registry.
    (
        lambda: registry.make("cauusal", 4),
        ValueError,
        r"name: expected one of full, causal, .*got str 'cauusal'",
    ),
    (lambda: registry.make("causal", -4), ValueError, r"seqlen: expected an integer"),
    (lambda: registry.make("causal", 4, 0.5), TypeError, r"seed: expected an integer, got float"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_wrong_arguments_are_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
