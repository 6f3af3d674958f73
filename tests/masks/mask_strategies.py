"""Random masks for hypothesis, each beside its dense boolean, which comes straight from the definition."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from helpers import dense_from_indices
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paddle_flashmask.masks import ColumnMask

INT32 = (-(2**31), 2**31 - 1)

lengths = st.integers(0, 20)


class Drawn(NamedTuple):
    """A mask and what it must say."""

    mask: ColumnMask
    dense: np.ndarray  # bool [B, H, Sq, Sk]


@st.composite
def indices(draw: Any, seqlen_q: int, seqlen_k: int) -> tuple[np.ndarray, bool]:
    """Any startend_row_indices and ``causal``; neighbouring columns are often alike, as in real masks."""
    causal = draw(st.booleans())
    shape = (*draw(st.tuples(st.integers(1, 2), st.integers(1, 2))), seqlen_k)
    bound = st.one_of(st.integers(-1, seqlen_q + 1), st.sampled_from([0, seqlen_q, *INT32]))
    changes = arrays(np.bool_, seqlen_k, elements=st.booleans())

    def column() -> np.ndarray:
        values = draw(arrays(np.int32, shape, elements=bound))
        held = np.maximum.accumulate(np.where(draw(changes), np.arange(seqlen_k), 0))
        moving = draw(st.sampled_from([0, 1])) * np.arange(seqlen_k)
        return np.clip(values[..., held].astype(np.int64) + moving, *INT32).astype(np.int32)

    bounds = draw(st.sampled_from([1, 2] if causal else [2, 4]))
    return np.stack([column() for _ in range(bounds)], axis=-1), causal


@st.composite
def masks(draw: Any, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Drawn:
    """A mask of any form, B and H of 1 or 2."""
    seqlen_q = draw(lengths) if seqlen_q is None else seqlen_q
    seqlen_k = draw(lengths) if seqlen_k is None else seqlen_k
    drawn, causal = draw(indices(seqlen_q, seqlen_k))
    mask = ColumnMask.from_startend_row_indices(drawn, causal, seqlen_q)
    return Drawn(mask, dense_from_indices(drawn, causal, seqlen_q, seqlen_k))


@st.composite
def mask_pairs(draw: Any) -> tuple[Drawn, Drawn]:
    """Two masks of equal lengths."""
    seqlen_q, seqlen_k = draw(lengths), draw(lengths)
    return draw(masks(seqlen_q, seqlen_k)), draw(masks(seqlen_q, seqlen_k))


def masked_runs(visible_column: np.ndarray) -> list[tuple[int, int]]:
    """The masked intervals [start, end) of one column, by walking down it."""
    runs: list[tuple[int, int]] = []
    for row, visible in enumerate(visible_column.tolist()):
        if not visible:
            if runs and runs[-1][1] == row:
                runs[-1] = (runs[-1][0], row + 1)
            else:
                runs.append((row, row + 1))
    return runs


def first_impossible_column(dense: np.ndarray) -> str | None:
    """The error that a dense mask must raise, or None where two intervals are enough."""
    for b, h in np.ndindex(dense.shape[:2]):
        for j in range(dense.shape[3]):
            runs = masked_runs(dense[b, h, :, j])
            if len(runs) > 2:
                place = f"column {j}" if dense.shape[:2] == (1, 1) else f"batch {b}, head {h}, column {j}"
                text = " ".join(f"[{start},{end})" for start, end in runs)
                return f"{place} needs {len(runs)} intervals: {text}"
    return None
