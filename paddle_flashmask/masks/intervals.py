"""Arithmetic of masked row intervals, and the choice of the two slots that hold them.

Everything a mask says is: query rows [start, end) do not see key column j. Arrays are int32 ``[B, H, Sk]``;
the empty interval is {INT32_MAX, INT32_MIN}, as in csrc/common/column_mask.h, so that minima and maxima
over columns mean here what they mean to the kernels.

The slots
---------
The kernels see two slots per column, lower and upper, and decide about whole tiles from each slot's least and
greatest bounds over the tile's columns. That works when a slot means the same in neighbouring columns. So
the slots are chosen by role, by `assign_slots`, as a pure function of what is visible:

* masks that are causal, with at most one more interval per column: upper is the causal triangle in every
  column, as the kernels have it from ``causal=True``; lower is the other interval, and reaches up to row 0
  where it would touch the triangle anyway (its rows are masked either way, and it then covers more tiles).
* else, what holds row 0 is upper and what holds the last row is lower, and a wholly masked column fills
  both slots;
* an interval that holds neither end and is alone in its column takes the slot of the interval most like it
  in the nearest column with two; it takes the lower one where no column has two.

Equal masks therefore have equal slots, in whatever way they were made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]

EMPTY_START = np.int32(2**31 - 1)
EMPTY_END = np.int32(-(2**31))


class Interval(NamedTuple):
    """Masked rows [start, end) of each column, int32 ``[B, H, Sk]``, clamped to [0, Sq] or empty."""

    start: Int32Array
    end: Int32Array

    @property
    def nonempty(self) -> NDArray[np.bool_]:
        """Bool ``[B, H, Sk]``."""
        return self.start < self.end

    def where(self, condition: NDArray[np.bool_]) -> Interval:
        """This interval where the condition holds, empty elsewhere."""
        return Interval(
            np.where(condition, self.start, EMPTY_START), np.where(condition, self.end, EMPTY_END)
        )

    def intersect(self, other: Interval) -> Interval:
        """The rows in both."""
        return _or_empty(np.maximum(self.start, other.start), np.minimum(self.end, other.end))


class Slots(NamedTuple):
    """The two slots of every column, and the smallest form of startend_row_indices that holds them.

    ``bounds`` is C, 0 where no indices are needed; ``causal`` says whether upper is the causal triangle and
    left to the kernels' causal test.
    """

    lower: Interval
    upper: Interval
    bounds: int
    causal: bool

    @property
    def intervals(self) -> tuple[Interval, Interval]:
        """Lower and upper."""
        return self.lower, self.upper


def clamp(start: Any, end: Any, seqlen_q: int) -> Interval:
    """Integers of any width as an interval of rows in [0, Sq], or the empty one."""
    low, high = np.broadcast_arrays(
        np.clip(start, 0, seqlen_q).astype(np.int32), np.clip(end, 0, seqlen_q).astype(np.int32)
    )
    return _or_empty(low, high)


def _or_empty(start: Int32Array, end: Int32Array) -> Interval:
    return Interval(start, end).where(start < end)


def causal_rows(seqlen_q: int, seqlen_k: int) -> Int32Array:
    """Per column how many rows, the first ones, are above the diagonal; int32 ``[Sk]``."""
    first_visible = np.arange(seqlen_k, dtype=np.int64) - (seqlen_k - seqlen_q)
    return np.clip(first_visible, 0, seqlen_q).astype(np.int32)


def merge(intervals: list[Interval], limit: int) -> tuple[list[Interval], NDArray[np.bool_]]:
    """The union of the intervals as disjoint ones, in order, touching ones joined.

    Args:
        intervals: any number of them.
        limit: how many of the disjoint ones to find.

    Returns:
        ``limit`` intervals, and where the columns are that need more, bool ``[B, H, Sk]``.
    """
    starts = np.stack([interval.start for interval in intervals])
    ends = np.stack([interval.end for interval in intervals])
    pieces = []
    for _ in range(limit):
        start = starts.min(axis=0)
        end = np.where(start == EMPTY_START, EMPTY_END, start)
        for _ in intervals:  # each turn joins at least one that touches, or there is none left
            end = np.maximum(end, np.where(starts <= end, ends, EMPTY_END).max(axis=0))
        pieces.append(Interval(start, end))
        starts[starts <= end] = EMPTY_START
    return pieces, (starts != EMPTY_START).any(axis=0)


def assign_slots(first: Interval, second: Interval, seqlen_q: int) -> Slots:
    """Choose the slots (see the module's docstring) for at most two intervals per column, from `merge`."""
    empty = first.where(np.zeros((), np.bool_))
    one, two = first.nonempty, second.nonempty
    if not one.any():
        return Slots(empty, empty, bounds=0, causal=False)

    triangle_end = causal_rows(seqlen_q, first.start.shape[-1])
    above = triangle_end > 0
    in_triangle = ~above | (one & (first.start == 0) & (first.end >= triangle_end))
    more = one & (first.end > triangle_end)  # rows of the first interval that are below the diagonal
    single = one & ~two
    top, bottom = one & (first.start == 0), np.where(two, second.end, first.end) == seqlen_q

    if in_triangle.all() and not (more & two).any():
        lower = Interval(np.where(two, second.start, first.start), np.where(two, second.end, first.end))
        lower = lower.where(two | more)
        triangle = Interval(np.zeros_like(triangle_end), triangle_end).where(above)
        upper = Interval(*(np.broadcast_to(bound, first.start.shape) for bound in triangle))
        if not lower.nonempty.any():
            return Slots(lower, upper, bounds=0, causal=True)
        if (bottom | ~lower.nonempty).all():
            return Slots(lower, upper, bounds=1, causal=True)
        if not ((top | ~two) & (bottom | ~two) & (top | bottom | ~one)).all():
            return Slots(lower, upper, bounds=2, causal=True)

    middle = single & ~top & ~bottom
    to_upper = two | top
    if middle.any():
        to_upper |= middle & _like_first_of_two(first, second)
    lower = Interval(np.where(two, second.start, first.start), np.where(two, second.end, first.end))
    lower = lower.where(two | (single & (bottom | ~to_upper)))
    upper = first.where(to_upper)
    anchored = ~lower.nonempty | (lower.end == seqlen_q)
    anchored &= ~upper.nonempty | (upper.start == 0)
    return Slots(lower, upper, bounds=2 if anchored.all() else 4, causal=False)


def _like_first_of_two(first: Interval, second: Interval) -> NDArray[np.bool_]:
    """Whether a first interval is more like the first than the second of the nearest column with two."""
    two = second.nonempty
    columns = np.arange(two.shape[-1])
    far = 4 * columns.size
    left = np.maximum.accumulate(np.where(two, columns, -far), axis=-1)
    right = np.minimum.accumulate(np.where(two, columns, far)[..., ::-1], axis=-1)[..., ::-1]
    nearest = np.where(columns - left <= right - columns, left, right)
    exists = two.any(axis=-1, keepdims=True)
    nearest = np.where(exists, nearest, 0)

    def distance(like: Interval) -> NDArray[np.int64]:
        gaps = (
            np.take_along_axis(a, nearest, axis=-1).astype(np.int64) - b
            for a, b in zip(like, first, strict=True)
        )
        return np.abs(next(gaps)) + np.abs(next(gaps))

    return exists & (distance(first) <= distance(second))
