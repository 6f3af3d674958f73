"""The bridge to and from startend_row_indices, and that the kernels see what `block_map` says they see."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import dense_from_indices
from hypothesis import given
from hypothesis import strategies as st
from mask_strategies import INT32, Drawn, masked_runs, masks

from paddle_flashmask.masks import ColumnMask, causal, causal_document, full, registry

blocks = st.integers(1, 8)


@given(masks())
def test_indices_say_the_same(drawn: Drawn) -> None:
    mask = drawn.mask
    indices, is_causal = mask.to_startend_row_indices()
    _, _, seqlen_q, seqlen_k = mask.shape
    if indices is None:
        again = causal(seqlen_q, seqlen_k) if is_causal else full(seqlen_q, seqlen_k)
        assert (drawn.dense == again.to_dense()).all()
    else:
        assert indices.dtype == np.int32
        assert indices.flags.c_contiguous
        assert indices.shape[:3] == (mask.batch, mask.heads, seqlen_k)
        np.testing.assert_array_equal(dense_from_indices(indices, is_causal, seqlen_q, seqlen_k), drawn.dense)
        assert ColumnMask.from_startend_row_indices(indices, is_causal, seqlen_q) == mask


@given(masks())
def test_no_smaller_number_of_bounds_would_do(drawn: Drawn) -> None:
    indices, _ = drawn.mask.to_startend_row_indices()
    assert (0 if indices is None else indices.shape[-1]) == _smallest_bounds(drawn.dense)


def _smallest_bounds(dense: np.ndarray) -> int:
    """C by the definition of each form, tried on every column."""
    seqlen_q, seqlen_k = dense.shape[2:]
    causal_1 = causal_2 = only_causal = ends_only = True
    for b, h, j in np.ndindex(dense.shape[0], dense.shape[1], seqlen_k):
        runs = masked_runs(dense[b, h, :, j])
        ends_only &= all(start == 0 or end == seqlen_q for start, end in runs)
        diagonal = min(max(j - (seqlen_k - seqlen_q), 0), seqlen_q)
        rest = masked_runs(dense[b, h, diagonal:, j])
        hides_the_triangle = not dense[b, h, :diagonal, j].any()
        only_causal &= hides_the_triangle and not rest
        causal_1 &= hides_the_triangle and (
            not rest or (len(rest) == 1 and rest[0][1] == seqlen_q - diagonal)
        )
        causal_2 &= hides_the_triangle and len(rest) <= 1
    if dense.all() or only_causal:
        return 0
    return 1 if causal_1 else 2 if causal_2 or ends_only else 4


@given(masks(), blocks, blocks)
def test_kernels_classify_as_minmax_says(drawn: Drawn, block_m: int, block_n: int) -> None:
    mask = drawn.mask
    indices, is_causal = mask.to_startend_row_indices()
    kinds = kernel_block_map(indices, is_causal, mask.shape, block_m, block_n)
    np.testing.assert_array_equal(mask.block_map(block_m, block_n, rule="minmax"), kinds)


@pytest.mark.parametrize("name", registry.names())
def test_kernels_classify_named_masks_as_minmax_says(name: str) -> None:
    mask = registry.make(name, 333)
    indices, is_causal = mask.to_startend_row_indices()
    kinds = kernel_block_map(indices, is_causal, mask.shape, 16, 24)
    np.testing.assert_array_equal(mask.block_map(16, 24, rule="minmax"), kinds)


def kernel_block_map(
    indices: np.ndarray | None, is_causal: bool, shape: tuple[int, ...], block_m: int, block_n: int
) -> np.ndarray:
    """load_column() and classify() of csrc/common/column_mask.h, one number at a time."""
    batch, heads, seqlen_q, seqlen_k = shape
    rows, columns = range(0, seqlen_q, block_m), range(0, seqlen_k, block_n)
    kinds = np.empty((batch, heads, len(rows), len(columns)), np.int8)
    diagonal = seqlen_k - seqlen_q
    for b, h, r, c in np.ndindex(kinds.shape):
        row_begin, row_end = rows[r], min(rows[r] + block_m, seqlen_q)
        column_begin, column_end = columns[c], min(columns[c] + block_n, seqlen_k)
        tile = [] if indices is None else indices[b, h, column_begin:column_end].tolist()
        slots = [_load_column(column, is_causal, seqlen_q) for column in tile]
        covered = is_causal and column_begin > row_end - 1 + diagonal
        touched = is_causal and column_end - 1 > row_begin + diagonal
        for slot in zip(*slots, strict=True):
            starts, ends = zip(*slot, strict=True)
            covered |= max(starts) <= row_begin and min(ends) >= row_end
            touched |= min(starts) < row_end and max(ends) > row_begin
        kinds[b, h, r, c] = 0 if covered else 1 if touched else 2
    return kinds


def _load_column(column: list[int], is_causal: bool, seqlen_q: int) -> list[tuple[int, int]]:
    """Lower and upper slot."""
    if len(column) == 1:
        bounds = [(column[0], seqlen_q)]
    elif len(column) == 2:
        bounds = [(column[0], column[1])] if is_causal else [(column[0], seqlen_q), (0, column[1])]
    else:
        bounds = [(column[0], column[1]), (column[2], column[3])]
    clamped = [(max(start, 0), min(end, seqlen_q)) for start, end in bounds]
    return [(start, end) if start < end else (INT32[1], INT32[0]) for start, end in clamped]


@given(masks())
def test_slots_are_rows_and_say_what_is_masked(drawn: Drawn) -> None:
    mask = drawn.mask
    rows = np.arange(mask.seqlen_q)[:, None]
    visible = np.ones(mask.shape, np.bool_)
    for empty, (start, end) in ((mask.seqlen_q, mask.lower), (0, mask.upper)):
        assert start.dtype == end.dtype == np.int32
        assert ((start < end) | ((start == empty) & (end == empty))).all()
        assert (start >= 0).all()
        assert (end <= mask.seqlen_q).all()
        visible &= (rows < start[:, :, None]) | (rows >= end[:, :, None])
    np.testing.assert_array_equal(visible, drawn.dense)
    wholly_masked = ~drawn.dense.any(axis=2)
    if mask.seqlen_q and not mask.to_startend_row_indices()[1]:  # with causal=True, upper is the triangle
        for start, end in (mask.lower, mask.upper):
            assert (start[wholly_masked] == 0).all()
            assert (end[wholly_masked] == mask.seqlen_q).all()


def test_extreme_values_and_lengths_do_not_overflow() -> None:
    low, high = INT32
    column = [[low, high, high, low], [high, low, low, 1], [3, high, low, 2], [low, low, high, high]]
    mask = ColumnMask.from_startend_row_indices(np.array([[column]], np.int32), causal=False, seqlen_q=4)
    assert mask.to_dense()[0, 0].T.astype(int).tolist() == [
        [0, 0, 0, 0],
        [0, 1, 1, 1],
        [0, 0, 1, 0],
        [1, 1, 1, 1],
    ]
    long = causal(INT32[1], 3) & ColumnMask([(0, [5, 6, 7])], seqlen_q=INT32[1], seqlen_k=3)
    assert long.visible_area() == 3 + 2 + 1
    assert long.block_map(2**30, 2, "exact").shape == long.block_map(2**30, 2, "minmax").shape == (1, 1, 2, 2)
    wide = ColumnMask([(np.array([-(2**63), 2**63 - 1]), 2**63 - 1)], seqlen_q=2, seqlen_k=2)
    assert wide.visible_area() == 2


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64])
def test_any_integer_dtype_is_understood(dtype: type) -> None:
    indices = np.full((1, 1, 300, 1), 100, dtype)
    mask = ColumnMask.from_startend_row_indices(indices, causal=True)
    assert mask == ColumnMask.from_startend_row_indices(indices.astype(np.int32), causal=True)


def test_seqlen_q_is_seqlen_k_by_default() -> None:
    indices = np.array([4, 4, 4, 4], np.int32).reshape(1, 1, 4, 1)
    assert ColumnMask.from_startend_row_indices(indices, causal=True) == causal(4)
    assert ColumnMask.from_startend_row_indices(indices, causal=True, seqlen_q=3) == causal(3, 4)


def test_the_forms_that_people_expect() -> None:
    indices, is_causal = causal_document([2, 3], seqlen=6).to_startend_row_indices()
    assert is_causal
    assert indices is not None
    assert indices[0, 0, :, 0].tolist() == [2, 2, 5, 5, 5, 0]  # padding columns are masked from row 0
    assert full(3, 5).to_startend_row_indices() == (None, False)
    assert causal(3, 5).to_startend_row_indices() == (None, True)
    assert causal(1, 5).to_startend_row_indices() == (None, False)
