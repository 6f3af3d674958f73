"""Arithmetic of masked row intervals, and the choice of the two slots that hold them.

Everything a mask says is: query rows [start, end) do not see key column j. Arrays are int32 ``[B, H, Sk]``;
the empty interval is {INT32_MAX, INT32_MIN}, as in csrc/common/column_mask.h, so that minima and maxima
over columns mean here what they mean to the kernels.

The slots
---------
The kernels see two slots per column, lower and upper, and decide about whole tiles from each slot's least and
greatest bounds over the tile's columns. That finds masked tiles only if a slot means the same thing in
neighbouring columns. So `assign_slots` chooses the slots by role, as a pure function of what is visible
(equal masks have equal slots, however they were made), in one of these forms. The one with the smallest C
is taken, at C = 2 rather the second than the first:

1. Causal, and at most one more interval in each column: upper is the causal triangle, as the kernels have it
   from ``causal=True``; lower is the other interval. One that touches the triangle reaches up to row 0.
2. Every interval holds the first or the last row: what holds the first is upper, what holds the last is
   lower, and a wholly masked column fills both.
3. Anything else: as in 2; of two intervals the first is upper; one that is alone and holds neither end takes
   the slot of the interval most like it in the nearest column with two.

Where a form leaves the bounds free (1 with C = 2, and 3), an empty slot takes what its column masks anyway of
the rows that the nearest filled one holds: more tiles are then covered by one slot alone.
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
    low, high = (np.clip(bound, 0, seqlen_q).astype(np.int32, copy=False) for bound in (start, end))
    return _or_empty(low, high)


def _or_empty(start: Int32Array, end: Int32Array) -> Interval:
    return Interval(start, end).where(start < end)


def causal_rows(seqlen_q: int, seqlen_k: int) -> Int32Array:
    """Per column how many rows, the first ones, are above the diagonal; int32 ``[Sk]``."""
    first_visible = np.arange(seqlen_q - seqlen_k, seqlen_q, dtype=np.int32)
    return first_visible if seqlen_q >= seqlen_k else np.maximum(first_visible, 0)


def merge(intervals: list[Interval], limit: int) -> tuple[list[Interval], NDArray[np.bool_]]:
    """The union of the intervals as disjoint ones, in order, touching ones joined.

    Args:
        intervals: any number of them.
        limit: how many of the disjoint ones to find.

    Returns:
        ``limit`` intervals, and where the columns are that need more, bool ``[B, H, Sk]``.
    """
    if len(intervals) == limit == 2:  # most masks, in fewer passes
        return _merge_two(*intervals)
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


def _merge_two(one: Interval, other: Interval) -> tuple[list[Interval], NDArray[np.bool_]]:
    swapped = other.start < one.start
    first_end = np.where(swapped, other.end, one.end)
    second = Interval(np.maximum(one.start, other.start), np.where(swapped, one.end, other.end))
    touch = second.start <= first_end
    joined_end = np.where(touch, np.maximum(first_end, second.end), first_end)
    first = Interval(np.minimum(one.start, other.start), joined_end)
    return [first, second.where(~touch)], np.zeros_like(touch)


def assign_slots(first: Interval, second: Interval, seqlen_q: int) -> Slots:
    """Choose the slots (see the module's docstring) for at most two intervals per column, from `merge`."""
    one, two = first.nonempty, second.nonempty
    last = Interval(np.where(two, second.start, first.start), np.where(two, second.end, first.end))
    top, bottom = one & (first.start == 0), one & (last.end == seqlen_q)  # holds row 0, the last row
    anchored = np.where(two, top & bottom, top | bottom | ~one).all()

    triangle_end = causal_rows(seqlen_q, one.shape[-1])
    triangle = Interval(np.zeros_like(triangle_end), triangle_end).where(triangle_end > 0)
    triangle = Interval(*(np.broadcast_to(bound, one.shape) for bound in triangle))
    below = one & (first.end > triangle_end)  # the first interval has rows below the diagonal
    in_triangle = (triangle_end == 0) | (top & (first.end >= triangle_end))

    if not one.any():
        return Slots(first, second, bounds=0, causal=False)
    if in_triangle.all() and not (below & two).any():
        lower = last.where(two | below)
        if (bottom | ~lower.nonempty).all():
            return Slots(lower, triangle, bounds=int(lower.nonempty.any()), causal=True)
        if not anchored:
            return Slots(_fill(lower, first), triangle, bounds=2, causal=True)
    if anchored:
        return Slots(last.where(bottom), first.where(top), bounds=2, causal=False)
    middle = one & ~two & ~top & ~bottom
    like_first = middle & _like_first_of_two(first, second)
    lower = last.where(two | bottom | (middle & ~like_first))
    upper = first.where(two | top | like_first)
    return Slots(_fill(lower, first), _fill(upper, first), bounds=4, causal=False)


def causal_slots(end: Int32Array, seqlen: int) -> Slots:
    """What `assign_slots` chooses where row i sees column j iff j <= i < end[j], int32 ``[B, H, S]``."""
    rows = np.int32(seqlen)
    triangle_end = causal_rows(seqlen, seqlen)
    lower_start = np.where(end < rows, end, EMPTY_START)
    lower_start[end <= triangle_end] = 0  # what touches the triangle reaches up to row 0
    hidden = lower_start != EMPTY_START
    triangle_start = np.zeros_like(triangle_end)
    if seqlen:  # the first column has no triangle
        triangle_start[0], triangle_end[0] = EMPTY_START, EMPTY_END
    bounds = int(hidden.any())
    return Slots(
        lower=Interval(lower_start, np.where(hidden, rows, EMPTY_END)),
        upper=Interval(np.broadcast_to(triangle_start, end.shape), np.broadcast_to(triangle_end, end.shape)),
        bounds=bounds,
        causal=bool(bounds) or seqlen > 1,
    )


def _fill(slot: Interval, single: Interval) -> Interval:
    """The slot, and where it is empty what the nearest column with it filled shares with ``single`` here."""
    shared = _at_nearest(slot.nonempty, slot).intersect(single)
    return Interval(*(np.where(slot.nonempty, *bounds) for bounds in zip(slot, shared, strict=True)))


def _like_first_of_two(first: Interval, second: Interval) -> NDArray[np.bool_]:
    """Whether a first interval is more like the first than the second of the nearest column with two."""

    def distance(interval: Interval) -> NDArray[np.int64]:
        like = _at_nearest(second.nonempty, interval)
        start, end = (a.astype(np.int64) - b for a, b in zip(like, first, strict=True))
        return np.abs(start) + np.abs(end)

    return distance(first) <= distance(second)


def _at_nearest(where: NDArray[np.bool_], interval: Interval) -> Interval:
    """The interval of the nearest column where the condition holds, left before right, else of column 0."""
    columns = np.arange(where.shape[-1])
    far = 3 * columns.size
    left = np.maximum.accumulate(np.where(where, columns, -far), axis=-1)
    right = np.minimum.accumulate(np.where(where, columns, far)[..., ::-1], axis=-1)[..., ::-1]
    nearest = np.where(columns - left <= right - columns, left, right)
    nearest[~where.any(axis=-1)] = 0
    return Interval(*(np.take_along_axis(bound, nearest, axis=-1) for bound in interval))
