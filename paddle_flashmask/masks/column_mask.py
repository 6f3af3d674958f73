"""`ColumnMask`: which query rows see which key columns, in O(N) memory."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import block_map as _block_map
from . import render as _render
from ._checks import as_array, as_bool, as_int, as_integer_array, as_pair, as_sequence, check_rank, describe
from .intervals import Int32Array, Interval, Slots, assign_slots, causal_slots, clamp, merge

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")


class ColumnMask:
    """A mask in which the rows that may not see a column form at most two intervals. Immutable.

    Row i is a query, column j a key. A mask is made by the functions of `paddle_flashmask.masks`, by `&`
    (visible in both) and `|` (visible in either), from a dense boolean, from indices, or directly from
    masked rows:

    >>> mask = ColumnMask([(0, [0, 1, 2]), ([2, 3, 4], 4)], seqlen_q=4, seqlen_k=3)
    >>> mask
    <ColumnMask [1, 1, 4, 3], C=2, 50% visible>
    >>> mask.show()
    # . .
    # # .
    . # #
    . . #

    Args:
        masked: pairs (start, end) of integers or integer arrays that broadcast to [B, H, Sk]: rows [start,
            end) do not see the column. Any number of pairs, any values; they may overlap.
        seqlen_q: Sq, the number of rows.
        seqlen_k: Sk, the number of columns.

    Raises:
        TypeError, ValueError: a wrong type, rank or size.
        ValueError: ``column 17 needs 3 intervals: [3,5) [9,12) [20,24)``.
    """

    __slots__ = ("_cache", "_hash", "_seqlen_q", "_slots")
    _cache: dict[Hashable, Any]
    _hash: int | None
    _seqlen_q: int
    _slots: Slots

    def __init__(self, masked: Sequence[tuple[Any, Any]], *, seqlen_q: int, seqlen_k: int) -> None:
        seqlen_q, seqlen_k = as_int("seqlen_q", seqlen_q), as_int("seqlen_k", seqlen_k)
        bounds = [
            as_integer_array(f"masked[{i}]", bound, (0, 1, 2, 3))
            for i, pair in enumerate(as_sequence("masked", masked, "pairs (start, end)"))
            for bound in as_pair(f"masked[{i}]", pair, "(start, end)")
        ]
        shape: tuple[int, ...] = (1, 1, seqlen_k)
        try:
            shape = np.broadcast_shapes(shape, *(bound.shape for bound in bounds))
        except ValueError:
            shape = (0,)
        if len(shape) != 3 or shape[2] != seqlen_k or 0 in shape[:2]:
            came = ", ".join(str(list(bound.shape)) for bound in bounds)
            raise ValueError(f"masked: expected shapes that broadcast to [B, H, {seqlen_k}], got {came}")
        intervals = [clamp(*pair, seqlen_q) for pair in zip(bounds[::2], bounds[1::2], strict=True)]
        self._set_masked(intervals or [clamp(0, 0, seqlen_q)], seqlen_q, shape)

    def _set_masked(self, intervals: list[Interval], seqlen_q: int, shape: tuple[int, ...]) -> None:
        """Everything the mask is; intervals as `clamp` gives them, broadcast to ``shape``, [B, H, Sk]."""
        intervals = [
            Interval(*(np.broadcast_to(bound, shape) for bound in interval)) for interval in intervals
        ]
        (first, second), needs_more = merge(intervals, limit=2)
        if needs_more.any():
            _raise_needs_more(intervals, needs_more)
        self._set_slots(assign_slots(first, second, seqlen_q), seqlen_q)

    def _set_slots(self, slots: Slots, seqlen_q: int) -> None:
        for bound in (*slots.lower, *slots.upper):
            bound.flags.writeable = False
        for name, value in (("_seqlen_q", seqlen_q), ("_slots", slots), ("_hash", None), ("_cache", {})):
            object.__setattr__(self, name, value)

    @classmethod
    def _from_clamped(cls, intervals: list[Interval], seqlen_q: int, shape: tuple[int, ...]) -> ColumnMask:
        mask = cls.__new__(cls)
        mask._set_masked(intervals, seqlen_q, shape)
        return mask

    @classmethod
    def _causal_until(cls, end: Int32Array, seqlen: int) -> ColumnMask:
        """Row i sees column j iff j <= i < end[j]; in fewer passes than `__init__` takes.

        Args:
            end: int32 ``[S]``, ``[H, S]`` or ``[B, H, S]``.
        """
        mask = cls.__new__(cls)
        mask._set_slots(causal_slots(end.reshape((1,) * (3 - end.ndim) + end.shape), seqlen), seqlen)
        return mask

    @classmethod
    def from_dense(cls, dense: Any) -> ColumnMask:
        """The mask that a dense boolean says, exactly.

        Args:
            dense: bool, true where visible: ``[Sq, Sk]``, ``[H, Sq, Sk]`` or ``[B, H, Sq, Sk]``.

        Raises:
            TypeError, ValueError: not boolean, or of another rank.
            ValueError: a column needs three intervals or more; the error names it and them.
        """
        visible = as_array("dense", dense)
        if visible.dtype != np.bool_:
            raise TypeError(f"dense: expected booleans, got dtype {visible.dtype}")
        check_rank("dense", visible, (2, 3, 4))
        if 0 in visible.shape[:-2]:
            raise ValueError(f"dense: expected at least one sample and head, got shape {list(visible.shape)}")
        visible = visible.reshape((1,) * (4 - visible.ndim) + visible.shape)
        batch, heads, seqlen_q, seqlen_k = map(int, visible.shape)
        if not seqlen_q:
            return cls([(0, np.zeros((batch, heads, seqlen_k), np.int32))], seqlen_q=0, seqlen_k=seqlen_k)
        edge = np.ones((batch, heads, 1, seqlen_k), np.bool_)
        padded = np.concatenate([edge, visible, edge], axis=2)
        starts = padded[:, :, :-1] & ~padded[:, :, 1:]  # at row 0, ..., Sq
        ends = ~padded[:, :, :-1] & padded[:, :, 1:]
        count = starts.sum(axis=2)
        if (count > 2).any():
            b, h, j = np.unravel_index(int((count > 2).argmax()), count.shape)
            pieces = zip(starts[b, h, :, j].nonzero()[0], ends[b, h, :, j].nonzero()[0], strict=True)
            raise ValueError(_needs_message((batch, heads), (b, h, j), list(pieces)))

        def last(edges: NDArray[np.bool_]) -> NDArray[Any]:
            return seqlen_q - edges[:, :, ::-1].argmax(axis=2)

        masked = count > 0
        first_run = (starts.argmax(axis=2), np.where(masked, ends.argmax(axis=2), 0))
        last_run = (last(starts), np.where(masked, last(ends), 0))
        return cls([first_run, last_run], seqlen_q=seqlen_q, seqlen_k=seqlen_k)

    @classmethod
    def from_startend_row_indices(
        cls, startend_row_indices: Any, causal: bool, seqlen_q: int | None = None
    ) -> ColumnMask:
        """The mask that a pair (startend_row_indices, causal) says; any values are allowed.

        Args:
            startend_row_indices: int32 ``[B, H, Sk, C]``. Causal: C=1 masks rows [LTS, Sq), C=2 [LTS, LTE).
                Not causal: C=2 masks [LTS, Sq) and [0, UTE), C=4 [LTS, LTE) and [UTS, UTE).
            causal: whether row i sees only columns j <= i + Sk - Sq.
            seqlen_q: Sq; Sk by default.
        """
        indices = as_integer_array("startend_row_indices", startend_row_indices, (4,))
        causal = as_bool("causal", causal)
        batch, heads, seqlen_k, bounds = indices.shape
        if bounds not in ((1, 2) if causal else (2, 4)):
            raise ValueError(
                f"startend_row_indices: expected a last dimension of {'1 or 2' if causal else '2 or 4'} "
                f"with causal={causal}, got shape {list(indices.shape)}"
            )
        if not batch or not heads:
            raise ValueError(
                f"startend_row_indices: expected at least one sample and head, "
                f"got shape {list(indices.shape)}"
            )
        seqlen_q = seqlen_k if seqlen_q is None else as_int("seqlen_q", seqlen_q)
        column = [indices[..., i] for i in range(bounds)]
        masked: list[tuple[Any, Any]] = [(column[0], seqlen_q if bounds == 1 else column[1])]
        if causal:
            masked.append((0, np.arange(seqlen_k, dtype=np.int64) - (seqlen_k - seqlen_q)))
        else:
            masked = (
                [(column[0], seqlen_q), (0, column[1])] if bounds == 2 else [*masked, (column[2], column[3])]
            )
        return cls(masked, seqlen_q=seqlen_q, seqlen_k=seqlen_k)

    # What it says.

    @property
    def batch(self) -> int:
        """B of the mask: 1 where all samples share it."""
        return int(self._slots.lower.start.shape[0])

    @property
    def heads(self) -> int:
        """H of the mask: 1 where all heads share it."""
        return int(self._slots.lower.start.shape[1])

    @property
    def seqlen_q(self) -> int:
        """Sq, the number of query rows."""
        return self._seqlen_q

    @property
    def seqlen_k(self) -> int:
        """Sk, the number of key columns."""
        return int(self._slots.lower.start.shape[2])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, Sq, Sk)."""
        return self.batch, self.heads, self.seqlen_q, self.seqlen_k

    @property
    def lower(self) -> tuple[Int32Array, Int32Array]:
        """Start and end of the lower slot (LTS, LTE), int32 ``[B, H, Sk]``; (Sq, Sq) where empty."""
        start, end = self._slots.lower
        empty = start > end
        return np.where(empty, np.int32(self.seqlen_q), start), np.where(empty, np.int32(self.seqlen_q), end)

    @property
    def upper(self) -> tuple[Int32Array, Int32Array]:
        """Start and end of the upper slot (UTS, UTE), int32 ``[B, H, Sk]``; (0, 0) where empty."""
        start, end = self._slots.upper
        empty = start > end
        return np.where(empty, np.int32(0), start), np.where(empty, np.int32(0), end)

    def to_startend_row_indices(self) -> tuple[Int32Array | None, bool]:
        """The pair (startend_row_indices, causal) with the fewest values per column that says the same.

        Returns:
            int32 ``[B, H, Sk, C]`` with C of 1, 2 or 4, or None where ``causal`` alone says it. The slots
            are the mask's own, so that the kernels classify tiles as ``block_map(rule="minmax")`` does.
        """
        bounds, causal = self._slots.bounds, self._slots.causal
        if bounds == 0:
            return None, causal
        if bounds == 1:
            start = self._slots.lower.start  # EMPTY_START where nothing is masked
            return np.ascontiguousarray(np.minimum(start, np.int32(self.seqlen_q))[..., None]), causal
        if bounds == 2:
            columns: tuple[Int32Array, ...] = self.lower if causal else (self.lower[0], self.upper[1])
        else:
            columns = (*self.lower, *self.upper)
        return np.ascontiguousarray(np.stack(columns, axis=-1)), causal

    def to_dense(self) -> NDArray[np.bool_]:
        """Bool ``[B, H, Sq, Sk]``, true where visible. Sq * Sk memory: for tests and small masks."""
        rows = np.arange(self.seqlen_q, dtype=np.int32)[:, None]
        visible = np.ones(self.shape, np.bool_)
        for start, end in self._slots.intervals:
            visible &= (rows < start[:, :, None]) | (rows >= end[:, :, None])
        return visible

    def visible_area(self) -> int:
        """The exact number of visible elements over the mask's own samples and heads, in O(N)."""
        batch, heads, seqlen_q, seqlen_k = self.shape
        masked = sum(
            int((piece.end.astype(np.int64) - piece.start).sum(where=piece.nonempty))
            for piece in self._disjoint()
        )
        return batch * heads * seqlen_q * seqlen_k - masked

    def _disjoint(self) -> list[Interval]:
        """The masked rows as two disjoint intervals per column."""
        return merge(list(self._slots.intervals), limit=2)[0]

    # Tiles.

    def block_map(self, block_m: int, block_n: int, rule: str = "exact") -> NDArray[np.int8]:
        """What each tile of block_m rows and block_n columns is: 0 fully masked, 1 partial, 2 unmasked.

        Args:
            block_m: rows of a tile.
            block_n: columns of a tile. Only rows and columns in range count at the ends.
            rule: "exact" is the truth. "minmax" is what the kernels find from each slot's least and greatest
                bounds over a tile's columns (the pre-pass of the paper's Algorithm 1, line 4): it may call
                a masked or an unmasked tile partial, and never errs otherwise.

        Returns:
            int8 ``[B, H, ceil(Sq / block_m), ceil(Sk / block_n)]``.
        """
        block_m = as_int("block_m", block_m, minimum=1)
        block_n = as_int("block_n", block_n, minimum=1)
        if rule == "exact":
            return _block_map.exact(self._disjoint(), self.seqlen_q, block_m, block_n)
        if rule == "minmax":
            return _block_map.minmax(self._slots, self.seqlen_q, block_m, block_n)
        raise ValueError(f'rule: expected "exact" or "minmax", got {describe(rule)}')

    def block_sparsity(self, block: int = 128) -> float:
        """The paper's rho: fully masked tiles of ``block`` x ``block`` / all tiles; 0.0 without tiles.

        Memory is linear in the columns, as no tile is kept.
        """
        block = as_int("block", block, minimum=1)
        masked, tiles = _block_map.count_masked(self._disjoint(), self.seqlen_q, block, block)
        return masked / tiles if tiles else 0.0

    # Algebra.

    def __and__(self, other: Any) -> ColumnMask:
        """Visible in both. B and H of 1 broadcast."""
        if not isinstance(other, ColumnMask):
            return NotImplemented
        shape = self._common_shape(other, "&")
        return self._from_clamped([*self._slots.intervals, *other._slots.intervals], self.seqlen_q, shape)

    def __or__(self, other: Any) -> ColumnMask:
        """Visible in either. B and H of 1 broadcast."""
        if not isinstance(other, ColumnMask):
            return NotImplemented
        shape = self._common_shape(other, "|")
        both = [mine.intersect(its) for mine in self._slots.intervals for its in other._slots.intervals]
        return self._from_clamped(both, self.seqlen_q, shape)

    def _common_shape(self, other: ColumnMask, symbol: str) -> tuple[int, ...]:
        if self.shape[2:] == other.shape[2:]:
            try:
                return np.broadcast_shapes(
                    (*self.shape[:2], self.seqlen_k), (*other.shape[:2], other.seqlen_k)
                )
            except ValueError:
                pass
        raise ValueError(
            f"{symbol}: expected masks of equal [Sq, Sk] whose [B, H] broadcast, "
            f"got [B, H, Sq, Sk] of {list(self.shape)} and {list(other.shape)}"
        )

    @staticmethod
    def stack_heads(masks: Sequence[ColumnMask]) -> ColumnMask:
        """One mask with the heads of all of them, in order; B of 1 broadcasts, Sq and Sk are equal."""
        return _stack("stack_heads", masks, axis=1)

    @staticmethod
    def stack_batch(masks: Sequence[ColumnMask]) -> ColumnMask:
        """One mask with the samples of all of them, in order; H of 1 broadcasts, Sq and Sk are equal."""
        return _stack("stack_batch", masks, axis=0)

    def __eq__(self, other: Any) -> bool:
        """Whether shapes are equal and the same elements are visible, however the masks were made."""
        if not isinstance(other, ColumnMask):
            return NotImplemented
        bounds, others = (
            [bound for interval in mask._slots.intervals for bound in interval] for mask in (self, other)
        )
        # Equal masks have equal slots.
        return self.shape == other.shape and all(map(np.array_equal, bounds, others))

    def __hash__(self) -> int:
        """Equal masks have equal hashes; computed once."""
        if self._hash is None:
            digest = hashlib.blake2b(repr(self.shape).encode(), digest_size=8)
            for bound in (*self._slots.lower, *self._slots.upper):
                digest.update(np.ascontiguousarray(bound).data)
            object.__setattr__(self, "_hash", hash(digest.digest()))
        assert self._hash is not None
        return self._hash

    def __bool__(self) -> NoReturn:
        """A mask has no truth value: `and` and `or` would silently pick one of two masks."""
        raise TypeError(
            "a ColumnMask has no truth value: combine masks with & and |, not with `and` and `or`, "
            "and test for a missing one with `is None`"
        )

    # Looks.

    def show(self, max_cells: int = 32, batch: int = 0, head: int = 0) -> None:
        """Print the mask as text: ``#`` visible, ``+`` partly visible, ``.`` masked.

        Args:
            max_cells: the most cells along a side; larger masks are shown by square blocks.
            batch: which sample.
            head: which head.
        """
        print(_render.draw(self, max_cells, batch, head))

    def plot(self, ax: Axes | None = None, max_cells: int = 256, batch: int = 0, head: int = 0) -> Axes:
        """Draw the mask with matplotlib (``pip install paddle-flashmask[plot]``).

        Args:
            ax: where to; a new figure by default.
            max_cells: the most cells along a side; larger masks are drawn by square blocks.
            batch: which sample.
            head: which head.

        Returns:
            The axes.
        """
        return _render.plot(self, ax, max_cells, batch, head)

    def __repr__(self) -> str:
        bounds, causal = self._slots.bounds, self._slots.causal
        form = [*(["causal"] if causal else []), *([f"C={bounds}"] if bounds else [])] or ["full"]
        elements = max(1, self.batch * self.heads * self.seqlen_q * self.seqlen_k)
        visible = f"{100 * self.visible_area() / elements:.3g}% visible"
        return f"<ColumnMask {list(self.shape)}, {', '.join(form)}, {visible}>"

    # Immutability, copies, and what others may keep with a mask.

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returned when first asked for under ``key``; it lives as long as the mask.

        Attention keeps the mask's device tensors so, one per place. Copies and pickles do not carry it.
        """
        try:
            return self._cache[key]
        except KeyError:
            return self._cache.setdefault(key, make())

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a ColumnMask is immutable: cannot set {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a ColumnMask is immutable: cannot delete {name}")

    def __reduce__(self) -> tuple[Any, ...]:
        masked = [tuple(interval) for interval in self._slots.intervals]
        return functools.partial(ColumnMask, seqlen_q=self.seqlen_q, seqlen_k=self.seqlen_k), (masked,)


def _stack(name: str, masks: Sequence[ColumnMask], axis: int) -> ColumnMask:
    masks = as_sequence(name, masks, "masks")
    if not masks:
        raise ValueError(f"{name}: expected at least one mask, got none")
    for mask in masks:
        if not isinstance(mask, ColumnMask):
            raise TypeError(f"{name}: expected masks, got {describe(mask)}")
    other = 1 - axis
    common = max(mask.shape[other] for mask in masks)
    for mask in masks:
        if mask.shape[2:] != masks[0].shape[2:] or mask.shape[other] not in (1, common):
            shapes = ", ".join(str(list(mask.shape)) for mask in masks)
            raise ValueError(
                f"{name}: expected masks of equal [Sq, Sk] whose other dimension is 1 or {common}, "
                f"got [B, H, Sq, Sk] of {shapes}"
            )

    def join(slot: int, bound: int) -> Int32Array:
        parts = []
        for mask in masks:
            part = mask._slots.intervals[slot][bound]
            shape = list(part.shape)
            shape[other] = common
            parts.append(np.broadcast_to(part, shape))
        return np.concatenate(parts, axis=axis)

    intervals = [Interval(join(slot, 0), join(slot, 1)) for slot in (0, 1)]
    return ColumnMask._from_clamped(intervals, masks[0].seqlen_q, intervals[0].start.shape)


def _raise_needs_more(intervals: list[Interval], needs_more: NDArray[np.bool_]) -> NoReturn:
    where = np.unravel_index(int(needs_more.argmax()), needs_more.shape)
    column = [Interval(interval.start[where][None], interval.end[where][None]) for interval in intervals]
    pieces, _ = merge(column, limit=len(column))
    shown = [(piece.start[0], piece.end[0]) for piece in pieces if piece.nonempty[0]]
    raise ValueError(_needs_message(needs_more.shape[:2], where, shown))


def _needs_message(
    batch_and_heads: tuple[int, ...], where: tuple[Any, ...], pieces: list[tuple[Any, Any]]
) -> str:
    place = (
        f"column {where[2]}"
        if batch_and_heads == (1, 1)
        else f"batch {where[0]}, head {where[1]}, column {where[2]}"
    )
    text = " ".join(f"[{start},{end})" for start, end in pieces)
    return f"{place} needs {len(pieces)} intervals: {text}"
