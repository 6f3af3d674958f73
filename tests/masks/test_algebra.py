"""`&`, `|`, stacking, from_dense, equality and hash, each against dense booleans."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from mask_strategies import Drawn, first_impossible_column, mask_pairs, masks

from paddle_flashmask.masks import ColumnMask, causal, causal_document, document, full, sliding_window

dense_masks = array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=6).flatmap(
    lambda shape: arrays(np.bool_, shape)
)


@given(masks())
def test_to_dense_says_what_the_indices_say(drawn: Drawn) -> None:
    assert drawn.mask.shape == drawn.dense.shape
    np.testing.assert_array_equal(drawn.mask.to_dense(), drawn.dense)


@given(masks())
def test_visible_area_counts_the_visible_elements(drawn: Drawn) -> None:
    assert drawn.mask.visible_area() == drawn.dense.sum()


@given(mask_pairs(), st.sampled_from("&|"))
def test_and_or(pair: tuple[Drawn, Drawn], symbol: str) -> None:
    a, b = pair
    dense = a.dense & b.dense if symbol == "&" else a.dense | b.dense

    def combined() -> ColumnMask:
        return a.mask & b.mask if symbol == "&" else a.mask | b.mask

    assert_says_or_raises(combined, dense)


@given(dense_masks)
def test_from_dense_is_exact_or_names_the_column(dense: np.ndarray) -> None:
    full_rank = dense.reshape((1,) * (4 - dense.ndim) + dense.shape)
    assert_says_or_raises(lambda: ColumnMask.from_dense(dense), full_rank)


def assert_says_or_raises(make: Callable[[], ColumnMask], dense: np.ndarray) -> None:
    """The mask says ``dense``; or an error names the first column that no mask can say."""
    error = first_impossible_column(dense)
    if error is None:
        np.testing.assert_array_equal(make().to_dense(), dense)
    else:
        with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
            make()


@given(masks())
def test_from_dense_undoes_to_dense(drawn: Drawn) -> None:
    assert ColumnMask.from_dense(drawn.dense) == drawn.mask


@given(mask_pairs())
def test_equality_and_hash_are_by_visibility(pair: tuple[Drawn, Drawn]) -> None:
    a, b = pair
    assert (a.mask == b.mask) == (a.dense.shape == b.dense.shape and bool((a.dense == b.dense).all()))
    again = ColumnMask.from_dense(a.dense)
    assert again == a.mask
    assert hash(again) == hash(a.mask)


@given(mask_pairs(), st.booleans())
def test_stacking(pair: tuple[Drawn, Drawn], by_heads: bool) -> None:
    axis = 1 if by_heads else 0
    common = np.broadcast_shapes(*(drawn.dense.shape[1 - axis : 2 - axis] for drawn in pair))[0]
    parts = []
    for drawn in pair:
        shape = list(drawn.dense.shape)
        shape[1 - axis] = common
        parts.append(np.broadcast_to(drawn.dense, shape))
    stack = ColumnMask.stack_heads if by_heads else ColumnMask.stack_batch
    mask = stack([drawn.mask for drawn in pair])
    np.testing.assert_array_equal(mask.to_dense(), np.concatenate(parts, axis=axis))


@given(masks())
def test_algebraic_laws(drawn: Drawn) -> None:
    mask = drawn.mask
    everything = full(mask.seqlen_q, mask.seqlen_k)
    assert mask & mask == mask == mask | mask
    assert mask & everything == mask
    assert (mask | everything).visible_area() == drawn.dense.size


def test_composition_is_the_constructor() -> None:
    lengths = [3, 5, 1, 7]
    assert causal(16) & document(lengths) == causal_document(lengths)
    assert causal(16) & sliding_window(16, 3, causal=False) == sliding_window(16, 3)
    assert causal(16) | document(lengths) != causal(16)


def test_a_column_that_needs_three_intervals_is_named() -> None:
    def hidden(*intervals: tuple[int, int]) -> ColumnMask:
        in_17 = [
            (np.where(np.arange(20) == 17, a, 0), np.where(np.arange(20) == 17, b, 0)) for a, b in intervals
        ]
        return ColumnMask(in_17, seqlen_q=30, seqlen_k=20)

    both = hidden((3, 5), (9, 10)), hidden((10, 12), (20, 24))
    with pytest.raises(ValueError, match=r"^column 17 needs 3 intervals: \[3,5\) \[9,12\) \[20,24\)$"):
        both[0] & both[1]
    two_heads = ColumnMask.stack_heads([full(30, 20), both[0]])
    with pytest.raises(ValueError, match=r"^batch 0, head 1, column 17 needs 3 intervals: \[3,5\) "):
        two_heads & both[1]
    with pytest.raises(ValueError, match=r"^column 17 needs 4 intervals: "):
        hidden((3, 5), (9, 10), (12, 13), (20, 24))
