"""The masks people use, by name.

Conventions, for every function here and nowhere else: each off-by-one is one of these five.

* Counting starts at 0; row i is a query, column j a key. A range (start, stop) holds start and leaves out
  stop.
* Causal: row i sees column j iff j <= i + Sk - Sq. A token sees itself, and the last row sees every column:

  >>> causal(3, 5).show()
  # # # . .
  # # # # .
  # # # # #

* A window of w keeps w neighbours beside the token itself: i - j <= w to the left, j - i <= w to the right.

  >>> sliding_window(5, (2, 1), causal=False).show()  # 2 before it, itself, 1 after it
  # # . . .
  # # # . .
  # # # # .
  . # # # #
  . . # # #

* A prefix, a number of global tokens or a length of n holds the first n tokens, 0 to n - 1:

  >>> prefix_lm_causal(5, 3).show()  # columns 0, 1, 2
  # # # . .
  # # # . .
  # # # . .
  # # # # .
  # # # # #

* Lengths lie end to end from token 0. What they leave of ``seqlen`` is padding: it sees nothing, nothing
  sees it.

  >>> document([2, 1], seqlen=4).show()
  # # . .
  # # . .
  . . # .
  . . . .

Every function returns a `ColumnMask`, takes sizes that no tile divides, zero included, and needs memory
linear in the tokens. Wrong types raise TypeError, wrong ranks, sizes and values ValueError, each naming the
argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._checks import (
    INT32_MAX,
    as_bool,
    as_int,
    as_integer_array,
    as_lengths,
    as_pair,
    as_range,
    as_sequence,
    describe,
    plain_integers,
)
from .column_mask import ColumnMask
from .intervals import Int32Array, causal_rows

Window = int | tuple[int, int]

# Each function says which rows do not see a column, as (start, end) pairs; what lies outside [0, Sq) is cut
# off by ColumnMask, and overlaps are joined. A causal mask has (0, causal_rows) among them.


def full(seqlen_q: int, seqlen_k: int | None = None) -> ColumnMask:
    """Every row sees every column.

    >>> full(2, 3).show()
    # # #
    # # #

    Args:
        seqlen_q: Sq.
        seqlen_k: Sk; Sq by default.
    """
    seqlen_q, seqlen_k = _two_lengths(seqlen_q, seqlen_k)
    return ColumnMask([], seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def causal(seqlen_q: int, seqlen_k: int | None = None) -> ColumnMask:
    """Row i sees column j iff j <= i + Sk - Sq.

    >>> causal(4).show()
    # . . .
    # # . .
    # # # .
    # # # #

    Args:
        seqlen_q: Sq.
        seqlen_k: Sk; Sq by default.
    """
    seqlen_q, seqlen_k = _two_lengths(seqlen_q, seqlen_k)
    return ColumnMask([(0, causal_rows(seqlen_q, seqlen_k))], seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def sliding_window(
    seqlen: int, window: Window, causal: bool = True, *, seqlen_k: int | None = None
) -> ColumnMask:
    """Row i sees column j iff 0 <= i - j <= window; with ``causal=False``, iff abs(i - j) <= window.

    >>> sliding_window(5, 2).show()
    # . . . .
    # # . . .
    # # # . .
    . # # # .
    . . # # #
    >>> sliding_window(5, 1, causal=False).show()
    # # . . .
    # # # . .
    . # # # .
    . . # # #
    . . . # #

    Args:
        seqlen: S; Sq where ``seqlen_k`` is given.
        window: neighbours on either side, or a pair (left, right): -right <= i - j <= left.
        causal: hide the right side, whatever its window.
        seqlen_k: Sk; the window then lies around i + Sk - Sq, aligned at the bottom right as causality is.
    """
    seqlen_q, seqlen_k = _two_lengths(seqlen, seqlen_k, "seqlen")
    left, right = _window(window)
    if as_bool("causal", causal):
        right = 0
    same_row = np.arange(seqlen_k, dtype=np.int64) - (seqlen_k - seqlen_q)  # of each column
    return ColumnMask(
        [(0, same_row - right), (same_row + left + 1, seqlen_q)], seqlen_q=seqlen_q, seqlen_k=seqlen_k
    )


def document(lengths: Any, seqlen: int | None = None) -> ColumnMask:
    """Row i sees column j iff both are in the same document.

    >>> document([2, 3]).show()
    # # . . .
    # # . . .
    . . # # #
    . . # # #
    . . # # #

    Args:
        lengths: tokens of each document, ``[n]``.
        seqlen: S; the sum of the lengths by default, else the rest is padding.
    """
    lengths, seqlen = as_lengths("lengths", lengths, seqlen)
    start, end = _segments(lengths, seqlen)
    return ColumnMask([(0, start), (end, seqlen)], seqlen_q=seqlen, seqlen_k=seqlen)


def causal_document(lengths: Any, seqlen: int | None = None) -> ColumnMask:
    """Row i sees column j iff both are in the same document and j <= i.

    >>> causal_document([2, 3]).show()
    # . . . .
    # # . . .
    . . # . .
    . . # # .
    . . # # #

    Args:
        lengths: tokens of each document, ``[n]``.
        seqlen: S; the sum of the lengths by default, else the rest is padding.
    """
    lengths, seqlen = as_lengths("lengths", lengths, seqlen)
    _, end = _segments(lengths, seqlen)
    return ColumnMask._causal_until(end, seqlen)


def share_question(documents: Sequence[tuple[int, Sequence[int]]], seqlen: int | None = None) -> ColumnMask:
    """Several answers share one question: j <= i, same document, and j in the question or in i's own answer.

    >>> share_question([(2, [2, 1]), (1, [1])]).show()
    # . . . . . .
    # # . . . . .
    # # # . . . .
    # # # # . . .
    # # . . # . .
    . . . . . # .
    . . . . . # #

    Args:
        documents: (tokens of the question, tokens of each answer), in the order in which they lie.
        seqlen: S; the sum of all by default, else the rest is padding.
    """
    parts, counts = _questions_and_answers(documents)
    lengths, seqlen = as_lengths("documents", parts, seqlen)
    reach = lengths.copy()  # of each part, the tokens from its first one to the end of what sees it
    if counts.size:
        questions = np.cumsum(counts) - counts
        reach[questions] = np.add.reduceat(lengths, questions)
    end = _per_token(np.cumsum(lengths) - lengths + reach, lengths, seqlen, padding=0)
    return ColumnMask._causal_until(end, seqlen)


def global_sliding_window(seqlen: int, num_global: int, window: Window) -> ColumnMask:
    """Row i sees column j iff i < num_global, or j < num_global, or abs(i - j) <= window.

    >>> global_sliding_window(6, 1, 1).show()
    # # # # # #
    # # # . . .
    # # # # . .
    # . # # # .
    # . . # # #
    # . . . # #

    Args:
        seqlen: S.
        num_global: how many tokens at the start see, and are seen by, all.
        window: neighbours on either side, or a pair (left, right): -right <= i - j <= left.
    """
    seqlen = as_int("seqlen", seqlen)
    num_global = as_int("num_global", num_global, maximum=seqlen)
    left, right = _window(window)
    column = np.arange(seqlen, dtype=np.int64)
    ordinary = column >= num_global
    above = (num_global, np.where(ordinary, column - right, 0))
    below = (np.where(ordinary, np.maximum(num_global, column + left + 1), seqlen), seqlen)
    return ColumnMask([above, below], seqlen_q=seqlen, seqlen_k=seqlen)


def causal_blockwise(lengths: Any, seqlen: int | None = None) -> ColumnMask:
    """Row i sees column j iff j <= i, and both are in the same block or i is in the last one.

    >>> causal_blockwise([2, 1, 2]).show()
    # . . . .
    # # . . .
    . . # . .
    # # # # .
    # # # # #

    Args:
        lengths: tokens of each block, ``[n]``: demonstrations, and the test example that sees them all.
        seqlen: S, the sum of the lengths. Less is refused: the padding rows below the last block would be a
            third interval (above the diagonal, between the blocks, below the last).
    """
    lengths, seqlen = as_lengths("lengths", lengths, seqlen)
    if lengths.sum() != seqlen:
        raise ValueError(
            f"lengths: expected a sum of seqlen={seqlen}, got {lengths.sum()}; "
            "causal_blockwise takes no padding, which would need 3 intervals in a column: "
            "give the rest to the last block"
        )
    _, end = _segments(lengths, seqlen)
    last_block = seqlen - int(lengths[-1]) if lengths.size else 0
    return ColumnMask([(0, causal_rows(seqlen, seqlen)), (end, last_block)], seqlen_q=seqlen, seqlen_k=seqlen)


def prefix_lm_causal(seqlen: int, prefix: int) -> ColumnMask:
    """Row i sees column j iff j <= i or j < prefix.

    >>> prefix_lm_causal(4, 2).show()
    # # . .
    # # . .
    # # # .
    # # # #

    Args:
        seqlen: S.
        prefix: how many tokens at the start all rows see.
    """
    seqlen = as_int("seqlen", seqlen)
    prefix = as_int("prefix", prefix, maximum=seqlen)
    column = np.arange(seqlen)
    return ColumnMask([(0, np.where(column < prefix, 0, column))], seqlen_q=seqlen, seqlen_k=seqlen)


def prefix_lm_document(lengths: Any, prefixes: Any, seqlen: int | None = None) -> ColumnMask:
    """Row i sees column j iff both are in the same document, and j <= i or j is in that document's prefix.

    >>> prefix_lm_document([3, 3], [2, 0]).show()
    # # . . . .
    # # . . . .
    # # # . . .
    . . . # . .
    . . . # # .
    . . . # # #

    Args:
        lengths: tokens of each document, ``[n]``.
        prefixes: of each document, how many of its first tokens all its rows see, ``[n]``; at most its
            length.
        seqlen: S; the sum of the lengths by default, else the rest is padding.
    """
    lengths, seqlen = as_lengths("lengths", lengths, seqlen)
    prefixes, _ = as_lengths("prefixes", prefixes)
    if prefixes.shape != lengths.shape or (prefixes > lengths).any():
        raise ValueError(
            f"prefixes: expected one per document, none longer than it, got {describe(prefixes.tolist())} "
            f"for lengths {describe(lengths.tolist())}"
        )
    start, end = _segments(lengths, seqlen)
    column = np.arange(seqlen)
    in_prefix = column < start + _per_token(prefixes, lengths, seqlen, padding=0)
    return ColumnMask(
        [(0, np.where(in_prefix, start, column)), (end, seqlen)], seqlen_q=seqlen, seqlen_k=seqlen
    )


def qk_sparse(seqlen: int, ranges: Any) -> ColumnMask:
    """Row i sees column j iff j <= i and no range holds both.

    >>> qk_sparse(6, [(1, 3), (4, 5)]).show()
    # . . . . .
    # . . . . .
    # . . . . .
    # # # # . .
    # # # # . .
    # # # # # #

    Args:
        seqlen: S.
        ranges: each (start, stop); they may overlap.
    """
    seqlen = as_int("seqlen", seqlen)
    start, end = _starts_and_stops("ranges", ranges, seqlen)
    # Of the ranges that hold a column, only the largest stop counts: rows up to the diagonal are hidden
    # anyway.
    starting = np.zeros(seqlen + 1, np.int64)
    np.maximum.at(starting, start, end)
    stop = np.maximum.accumulate(starting)[:seqlen]
    column = np.arange(seqlen)
    return ColumnMask([(0, causal_rows(seqlen, seqlen)), (column, stop)], seqlen_q=seqlen, seqlen_k=seqlen)


def dropped(seqlen: int, keys: Any, queries: tuple[int, int] = (0, 0)) -> ColumnMask:
    """Row i sees column j iff j <= i and neither is dropped.

    >>> dropped(6, [1], (3, 5)).show()
    # . . . . .
    # . . . . .
    # . # . . .
    . . . . . .
    . . . . . .
    # . # # # #

    Args:
        seqlen: S.
        keys: indices of the dropped columns, ``[n]``, in any order.
        queries: the dropped rows, (start, stop); none by default.
    """
    seqlen = as_int("seqlen", seqlen)
    keys = as_integer_array("keys", keys, (1,))
    if keys.size and not 0 <= int(keys.min()) <= int(keys.max()) < seqlen:
        raise ValueError(
            f"keys: expected indices in [0, {seqlen}), got {int(keys.min())} to {int(keys.max())}"
        )
    start, stop = as_range("queries", queries, seqlen)
    hidden = causal_rows(seqlen, seqlen)
    hidden[keys] = seqlen
    return ColumnMask([(0, hidden), (start, stop)], seqlen_q=seqlen, seqlen_k=seqlen)


def random_eviction(evict_at: Any) -> ColumnMask:
    """Row i sees column j iff j <= i < evict_at[j]: keys leave the cache for good.

    >>> random_eviction([4, 2, 4, 4]).show()
    # . . .
    # # . .
    # . # .
    # . # #

    Args:
        evict_at: per key the first row that no longer sees it, integers ``[S]``, ``[H, S]`` or ``[B, H,
            S]``; any values: at most j hides key j from all, S or more never evicts it.
    """
    evict_at = _by_head("evict_at", evict_at)
    seqlen = as_int("length of evict_at", evict_at.shape[-1])
    return ColumnMask._causal_until(np.clip(evict_at, 0, seqlen).astype(np.int32), seqlen)


def hash_sparse(
    query_buckets: Any, key_buckets: Any
) -> tuple[ColumnMask, NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of one hash bucket attend to each other, causally; queries and keys are sorted by bucket.

    Sorted row r is query ``query_order[r]``, sorted column c is key ``key_order[c]``; the row sees the
    column iff their buckets are equal and ``key_order[c] <= query_order[r]``. Sorting keeps the order
    within a bucket.

    >>> mask, query_order, key_order = hash_sparse([1, 0, 1, 0], [1, 1, 0, 0])
    >>> mask.show()
    . . . .
    # # . .
    . . # .
    . . # #
    >>> query_order, key_order
    (array([1, 3, 0, 2]), array([2, 3, 0, 1]))

    Args:
        query_buckets: integers ``[S]``, ``[H, S]`` or ``[B, H, S]``; any values.
        key_buckets: integers of the same shape.

    Returns:
        The mask in sorted order, and the two permutations, int64 of the shape of the buckets: attend with
        ``q[query_order]``, ``k[key_order]`` and ``v[key_order]`` (along the tokens); row r of the output
        belongs to token ``query_order[r]``.
    """
    query_buckets = _by_head("query_buckets", query_buckets)
    key_buckets = _by_head("key_buckets", key_buckets)
    if key_buckets.shape != query_buckets.shape:
        raise ValueError(
            f"key_buckets: expected the shape of query_buckets, {list(query_buckets.shape)}, "
            f"got {list(key_buckets.shape)}"
        )
    seqlen = as_int("length of query_buckets", query_buckets.shape[-1])
    query_order = np.argsort(query_buckets, axis=-1, kind="stable")
    key_order = np.argsort(key_buckets, axis=-1, kind="stable")
    first_row, last_row = np.empty_like(key_order), np.empty_like(key_order)
    for head in np.ndindex(*query_buckets.shape[:-1]):
        # Numbered by (bucket, token), sorted queries ascend; the rows that see a key are those from (its
        # bucket, itself) to the end of its bucket.
        bucket = np.unique(np.concatenate([query_buckets[head], key_buckets[head]]), return_inverse=True)[1]
        row = (bucket[:seqlen] * seqlen)[query_order[head]] + query_order[head]
        column_bucket = bucket[seqlen:][key_order[head]]
        first_row[head] = np.searchsorted(row, column_bucket * seqlen + key_order[head])
        last_row[head] = np.searchsorted(row, (column_bucket + 1) * seqlen)
    mask = ColumnMask([(0, first_row), (last_row, seqlen)], seqlen_q=seqlen, seqlen_k=seqlen)
    return mask, query_order, key_order


def _questions_and_answers(documents: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The lengths of every question and answer, in order, and how many of them each document has, int64."""
    documents = as_sequence("documents", documents, "pairs (question, [answer, ...])")
    flat: list[Any] = []
    counts: list[int] = []
    rows: list[Any] = list(documents)
    try:
        for question, answers in documents:
            flat.append(question)
            flat.extend(answers)
            counts.append(1 + len(answers))
            rows.append(answers)
        parts = plain_integers(rows, flat)
    except (TypeError, ValueError):
        parts = None
    if parts is None:
        checked = []
        for i, item in enumerate(documents):
            question, answers = as_pair(f"documents[{i}]", item, "(question, [answer, ...])")
            question = as_int(f"documents[{i}] question", question)
            checked.append([question, *as_lengths(f"documents[{i}] answers", answers)[0].tolist()])
        counts = list(map(len, checked))
        parts = np.fromiter(chain.from_iterable(checked), np.int64, sum(counts))
    return parts, np.array(counts, np.int64)


def _starts_and_stops(name: str, ranges: Any, seqlen: int) -> NDArray[np.int64]:
    """Many ranges (start, stop) with 0 <= start <= stop <= seqlen, int64 ``[2, n]``."""
    ranges = as_sequence(name, ranges, "pairs (start, stop)")
    try:
        if isinstance(ranges, np.ndarray) and ranges.ndim == 2:
            flat, sizes = plain_integers([], ranges.ravel().tolist()), {ranges.shape[1]}
        else:
            flat, sizes = plain_integers(ranges, list(chain.from_iterable(ranges))), set(map(len, ranges))
        if flat is not None and sizes <= {2}:
            start, stop = bounds = flat.reshape(-1, 2).T
            if (start <= stop).all() and (stop <= seqlen).all():
                return bounds
    except TypeError:
        pass
    checked = [as_range(f"{name}[{i}]", pair, seqlen) for i, pair in enumerate(ranges)]
    return np.array(checked, np.int64).reshape(-1, 2).T


def _two_lengths(seqlen_q: Any, seqlen_k: Any, name: str = "seqlen_q") -> tuple[int, int]:
    seqlen_q = as_int(name, seqlen_q)
    return seqlen_q, seqlen_q if seqlen_k is None else as_int("seqlen_k", seqlen_k)


def _by_head(name: str, value: Any) -> NDArray[Any]:
    """Integers ``[S]``, ``[H, S]`` or ``[B, H, S]``."""
    array = as_integer_array(name, value, (1, 2, 3))
    if 0 in array.shape[:-1]:
        raise ValueError(f"{name}: expected at least one sample and head, got shape {list(array.shape)}")
    return array


def _window(window: Any) -> tuple[int, int]:
    """(left, right), small enough that adding them to positions stays in int64."""
    left, right = (window, window) if np.ndim(window) == 0 else as_pair("window", window, "(left, right)")
    return as_int("window", left, maximum=INT32_MAX), as_int("window", right, maximum=INT32_MAX)


def _segments(lengths: NDArray[np.int64], seqlen: int) -> tuple[Int32Array, Int32Array]:
    """Per token the first token of its segment and one past the last, int32 ``[S]``.

    For padding they are (S, 0), so that masking rows [0, start) or [end, S) hides it wholly.
    """
    ends = np.cumsum(lengths)
    start = _per_token(ends - lengths, lengths, seqlen, padding=seqlen)
    return start, _per_token(ends, lengths, seqlen, padding=0)


def _per_token(
    values: NDArray[np.int64], lengths: NDArray[np.int64], seqlen: int, padding: int
) -> Int32Array:
    """Each segment's value, at most S, at each of its tokens, int32 ``[S]``, and ``padding`` after them."""
    values = np.append(values.astype(np.int32), np.int32(padding))
    return np.repeat(values, np.append(lengths, seqlen - lengths.sum()))
