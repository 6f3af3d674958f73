"""What each tile of a mask is: 0 fully masked, 1 partial, 2 unmasked.

Tiles of all samples and heads are treated alike, as one row of column tiles, in chunks of bounded size:
beside the result, memory is linear in the columns. `count_masked` has no other result than a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .intervals import Interval, Slots

MASKED, PARTIAL, UNMASKED = np.int8(0), np.int8(1), np.int8(2)

_CHUNK = 2**18  # tiles, and columns, that are worked on at once


class _Grid(NamedTuple):
    """The tiles of a mask ``[B, H, Sq, Sk]``; column tiles are numbered through all samples and heads."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    block_m: int
    block_n: int

    @classmethod
    def of(cls, columns: Interval, seqlen_q: int, block_m: int, block_n: int) -> _Grid:
        """The tiles of the mask that has these columns."""
        batch, heads, seqlen_k = columns.start.shape
        return cls(batch, heads, seqlen_q, seqlen_k, block_m, block_n)

    @property
    def row_tiles(self) -> int:
        return -(-self.seqlen_q // self.block_m)

    @property
    def column_tiles(self) -> int:
        """Of one sample and head."""
        return -(-self.seqlen_k // self.block_n)

    @property
    def row_ends(self) -> NDArray[np.int64]:
        """One past each row tile's last row."""
        tiles = np.arange(1, self.row_tiles + 1, dtype=np.int64)
        return np.minimum(tiles * self.block_m, self.seqlen_q)

    @property
    def column_starts(self) -> NDArray[np.int64]:
        """Each numbered column tile's first column, counted through all samples and heads, and the end."""
        first = np.arange(self.column_tiles, dtype=np.int64) * self.block_n
        mask_starts = np.arange(self.batch * self.heads, dtype=np.int64)[:, None] * self.seqlen_k
        return np.append((mask_starts + first).ravel(), self.batch * self.heads * self.seqlen_k)

    def chunks(self, row_tiles: int | None = None) -> Iterator[slice]:
        """Ranges of numbered column tiles, for work on so many row tiles of each (all of them)."""
        tiles = self.batch * self.heads * self.column_tiles
        row_tiles = self.row_tiles if row_tiles is None else row_tiles
        step = max(1, _CHUNK // max(row_tiles, self.block_n))
        return (slice(begin, min(begin + step, tiles)) for begin in range(0, tiles, step))

    def result(self) -> NDArray[np.int8]:
        """Where `chunks` write: [numbered column tile, row tile]."""
        return np.empty((self.batch * self.heads * self.column_tiles, self.row_tiles), np.int8)

    def finish(self, result: NDArray[np.int8]) -> NDArray[np.int8]:
        """[B, H, row tile, column tile]."""
        shaped = result.reshape(self.batch, self.heads, self.column_tiles, self.row_tiles)
        return np.ascontiguousarray(shaped.swapaxes(2, 3))


def exact(disjoint: list[Interval], seqlen_q: int, block_m: int, block_n: int) -> NDArray[np.int8]:
    """The truth, from the number of masked elements of every tile.

    Args:
        disjoint: masked rows, each row of a column in at most one of the intervals.
        seqlen_q: Sq.
        block_m: rows of a tile.
        block_n: columns of a tile.
    """
    grid = _Grid.of(disjoint[0], seqlen_q, block_m, block_n)
    kinds, starts = grid.result(), grid.column_starts
    columns, rows = np.diff(starts), np.diff(grid.row_ends, prepend=0)
    bounds = [
        (np.where(piece.nonempty, bound, 0).reshape(-1), sign)
        for piece in disjoint
        for bound, sign in ((piece.end, 1), (piece.start, -1))
    ]
    width = grid.row_tiles + 2
    for chunk in grid.chunks():
        size = chunk.stop - chunk.start
        within = slice(starts[chunk.start], starts[chunk.stop])
        tile = np.repeat(np.arange(size) * width, columns[chunk])
        # Of the rows below x, tile r holds block_m if r < q, x % block_m if r = q, none if r > q, where
        # q = x // block_m. Interval [start, end) adds that of its end and takes off that of its start.
        # Written as differences along r, each bound touches two cells (block_m at r = 0 cancels between the
        # two bounds).
        places, weights = [], []
        for bound, sign in bounds:
            quotient, remainder = np.divmod(bound[within], block_m)
            places += [tile + quotient, tile + quotient + 1]
            weights += [sign * (remainder - np.float64(block_m)), -sign * remainder.astype(np.float64)]
        steps = np.bincount(np.concatenate(places), np.concatenate(weights), minlength=size * width)
        masked = steps.reshape(size, width)[:, : grid.row_tiles].cumsum(axis=1)
        area = columns[chunk, None] * rows[None, :].astype(np.float64)
        kinds[chunk] = PARTIAL + (masked == 0).view(np.int8) - (masked == area).view(np.int8)
    return grid.finish(kinds)


def count_masked(disjoint: list[Interval], seqlen_q: int, block_m: int, block_n: int) -> tuple[int, int]:
    """How many tiles `exact` would call masked, and how many there are, without a tile in memory.

    Of a column tile, only the row tiles that a bound falls into, and those right after, begin something new;
    all between two such are alike. So the work is O(N log N) for N columns, however many tiles there are.
    Arguments as for `exact`.
    """
    grid = _Grid.of(disjoint[0], seqlen_q, block_m, block_n)
    starts = grid.column_starts
    columns = np.diff(starts)
    # Rows after the last one are nobody's: counted as masked with it, they make the last row tile whole.
    padded = grid.row_tiles * block_m
    bounds = []
    for piece in disjoint:
        if piece.nonempty.any():
            start, end = (np.where(piece.nonempty, bound, 0).reshape(-1) for bound in piece)
            bounds += [(np.where(end == seqlen_q, np.int64(padded), end), 1), (start, -1)]
    masked, width = 0, grid.row_tiles + 2
    for chunk in grid.chunks(1) if bounds else ():
        size = chunk.stop - chunk.start
        within = slice(starts[chunk.start], starts[chunk.stop])
        tile = np.repeat(np.arange(size) * width, columns[chunk])
        places, weights = [], []
        for bound, sign in bounds:  # the steps of `exact`
            quotient, remainder = np.divmod(bound[within], block_m)
            places += [tile + quotient, tile + quotient + 1]
            weights += [sign * (remainder - block_m), -sign * remainder]
        place = np.concatenate(places)
        order = np.argsort(place)
        place = place[order]
        rows = np.concatenate(weights)[order].cumsum()  # a column tile's steps add up to 0
        whole = rows[:-1] == columns[chunk][place[:-1] // width] * block_m
        masked += int(np.diff(place)[whole].sum())
    return masked, columns.size * grid.row_tiles


def minmax(slots: Slots, seqlen_q: int, block_m: int, block_n: int) -> NDArray[np.int8]:
    """What the kernels decide (csrc/common/column_mask.h) from the extremes of each slot over a tile."""
    grid = _Grid.of(slots.lower, seqlen_q, block_m, block_n)
    kinds, starts = grid.result(), grid.column_starts[:-1]
    if not kinds.size:
        return grid.finish(kinds)
    row_end = grid.row_ends.astype(np.int32)
    row_begin = np.append(np.int32(0), row_end[:-1])
    extremes = [
        [
            reduce(bound.reshape(-1), starts)[:, None]
            for bound in slot
            for reduce in (np.minimum.reduceat, np.maximum.reduceat)
        ]
        for slot in slots.intervals
    ]
    for chunk in grid.chunks():
        covered = np.zeros((chunk.stop - chunk.start, grid.row_tiles), np.bool_)
        touched = np.zeros_like(covered)
        for start_min, start_max, end_min, end_max in extremes:
            covered |= (start_max[chunk] <= row_begin) & (end_min[chunk] >= row_end)
            touched |= (start_min[chunk] < row_end) & (end_max[chunk] > row_begin)
        kinds[chunk] = np.where(covered, MASKED, np.where(touched, PARTIAL, UNMASKED))
    return grid.finish(kinds)
