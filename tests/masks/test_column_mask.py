"""What a mask is besides what it says: immutable, copyable, cheap to carry, independent of Paddle."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

from paddle_flashmask.masks import ColumnMask, causal, causal_document, full, random_eviction, sliding_window


def test_masks_do_not_import_paddle() -> None:
    code = """
import sys
import paddle_flashmask.masks.registry
sys.exit(bool({"paddle", "matplotlib"} & set(sys.modules)))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_mask_cannot_be_changed() -> None:
    mask = causal_document([2, 3])
    with pytest.raises(AttributeError, match="immutable: cannot set seqlen_q"):
        mask.seqlen_q = 7  # type: ignore[misc]
    with pytest.raises(AttributeError, match="immutable: cannot delete _slots"):
        del mask._slots
    with pytest.raises(AttributeError):
        mask.anything = 1  # type: ignore[attr-defined]
    for interval in mask._slots.intervals:
        for bound in interval:
            with pytest.raises(ValueError, match="read-only"):
                bound[...] = 0


def test_a_mask_does_not_alias_its_arguments_or_results() -> None:
    evict_at = np.array([2, 3, 3], np.int32)
    mask = random_eviction(evict_at)
    before = mask.to_dense()
    evict_at[:] = 0
    indices, _ = mask.to_startend_row_indices()
    assert indices is not None
    for array in (indices, *mask.lower, *mask.upper):
        array[...] = 0
    np.testing.assert_array_equal(mask.to_dense(), before)


@pytest.mark.parametrize("mask", [full(0), full(3, 5), causal(5, 3), sliding_window(9, (2, 1), causal=False)])
def test_copies_and_pickles_are_equal(mask: ColumnMask) -> None:
    mask.cached("place", object)
    for again in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert again == mask
        assert hash(again) == hash(mask)
        assert again.cached("place", lambda: "own") == "own"


def test_cached_makes_once_per_key() -> None:
    mask = causal(4)
    first = mask.cached("cpu", object)
    assert mask.cached("cpu", object) is first
    assert mask.cached("gpu:0", object) is not first


def test_equality_is_for_masks_of_one_shape() -> None:
    assert full(4) != full(4, 5)
    assert full(4) != full(5, 4)
    assert full(4) != ColumnMask.stack_heads([full(4), full(4)])
    assert full(4) != np.ones((4, 4), bool).tolist()
    assert {causal(4): "found"}[ColumnMask.from_dense(np.tri(4, dtype=bool))] == "found"


def test_repr_is_one_line() -> None:
    assert repr(full(2)) == "<ColumnMask [1, 1, 2, 2], full, 100% visible>"
    assert repr(causal(8192)) == "<ColumnMask [1, 1, 8192, 8192], causal, 50% visible>"
    assert repr(sliding_window(4, 1, causal=False)) == "<ColumnMask [1, 1, 4, 4], C=2, 62.5% visible>"
    assert repr(full(0)) == "<ColumnMask [1, 1, 0, 0], full, 0% visible>"
