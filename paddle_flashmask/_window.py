"""A sliding window on top of any startend_row_indices, by tensor operations, so that it can be traced."""

from __future__ import annotations

from typing import Any

import paddle

from paddle_flashmask._checks import fail
from paddle_flashmask._ops import to_device_of

_FAR = 2**31 - 1


def parse_window(window: Any) -> tuple[int, int]:
    """``window_size`` as (left, right): a row sees from ``left`` keys before to ``right`` after its own."""
    pair = (window, window) if isinstance(window, int) else window
    expected = "an int, or a pair (left, right) of them"
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        fail(TypeError, "window_size", expected, f"{window!r}")
    if any(isinstance(side, bool) or not isinstance(side, int) for side in pair):
        fail(TypeError, "window_size", expected, f"{window!r}")
    left, right = (max(-_FAR, min(side, _FAR)) for side in pair)
    return left, right


def _length(tensor: paddle.Tensor, axis: int) -> Any:
    """A size as an int64 tensor ``[1]``; a traced program may learn it only when it runs."""
    size = tensor.shape[axis]
    if size == -1:
        return paddle.shape(tensor)[axis : axis + 1].astype("int64")
    return paddle.full([1], size, dtype="int64")


def combine_window(
    window: tuple[int, int], indices: paddle.Tensor | None, causal: bool, q: paddle.Tensor, k: paddle.Tensor
) -> paddle.Tensor:
    """Indices that mask what ``indices`` mask and what lies outside the window, for the operator.

    With d = Sk - Sq (bottom-right aligned), row i sees column j of the window iff -left <= j - i - d <=
    right. In column j that masks the rows from ``below`` = j - d + left + 1 on and the rows before
    ``above`` = j - d - right. With ``causal`` the right side counts for nothing.

    Args:
        window: (left, right), of any signs.
        indices: int32 ``[Bm, Hm, Sk, C]`` or None.
        causal: as the caller gave it; it stays as it is.
        q: ``[B, Sq, Hq, D]``, for its length.
        k: ``[B, Sk, Hk, D]``, for its length.

    Returns:
        int32 ``[Bm, Hm, Sk, C']``. Causal C = 2 becomes C' = 4, which the operator takes with ``causal``
        too.

    Raises:
        ValueError: not causal, C = 4, and a column then needs more than two intervals. (A traced program
            checks this when it runs.)
    """
    seqlen_q, seqlen_k = _length(q, 1), _length(k, 1)
    column = paddle.arange(0, k.shape[1] if k.shape[1] != -1 else seqlen_k, dtype="int64") - (
        seqlen_k - seqlen_q
    )
    rows = seqlen_q.astype("int32").reshape([1, 1, 1, 1])

    def clamp(bound: paddle.Tensor) -> paddle.Tensor:
        bound = paddle.minimum(paddle.maximum(bound, paddle.zeros_like(seqlen_q)), seqlen_q)
        return bound.astype("int32").reshape([1, 1, -1, 1])

    below = clamp(column + (window[0] + 1))
    above = clamp(column - window[1])
    if indices is None:
        return to_device_of(q, below if causal else paddle.concat([below, above], axis=-1))
    below, above, rows = (to_device_of(q, x) for x in (below, above, rows))
    if causal and indices.shape[-1] == 1:
        return paddle.minimum(indices, below)
    if causal:
        spread = paddle.zeros_like(indices[..., :1])
        return paddle.concat([indices, below + spread, rows + spread], axis=-1)
    if indices.shape[-1] == 2:
        start, end = paddle.split(indices, 2, axis=-1)
        return paddle.concat([paddle.minimum(start, below), paddle.maximum(end, above)], axis=-1)
    return _combine_two_intervals(indices, below, above, rows, paddle.zeros_like(rows))


def _combine_two_intervals(
    indices: paddle.Tensor,
    below: paddle.Tensor,
    above: paddle.Tensor,
    rows: paddle.Tensor,
    nothing: paddle.Tensor,
) -> paddle.Tensor:
    """[LTS, LTE) and [UTS, UTE) with the window's [below, Sq) and [0, above): four intervals in two slots.

    What touches the window's intervals is absorbed by them; what is left over must fit the slots they
    leave free.
    """
    bounds = paddle.minimum(paddle.maximum(indices, nothing), rows)
    lts, lte, uts, ute = paddle.split(bounds, 4, axis=-1)
    for start, end in (
        (lts, lte),
        (uts, ute),
        (lts, lte),
    ):  # the first again: the second may have bridged a gap
        above = paddle.where(start <= above, paddle.maximum(above, end), above + paddle.zeros_like(end))
        below = paddle.where(end >= below, paddle.minimum(below, start), below + paddle.zeros_like(end))
    has_prefix, has_suffix = above > nothing, below < rows

    def left_over(start: paddle.Tensor, end: paddle.Tensor) -> paddle.Tensor:
        return paddle.logical_and(start < end, paddle.logical_and(end > above, start < below))

    lower, upper = left_over(lts, lte), left_over(uts, ute)
    zeros = paddle.zeros_like(lts)
    full = zeros + rows
    start = paddle.minimum(paddle.where(lower, lts, full), paddle.where(upper, uts, full))
    end = paddle.maximum(paddle.where(lower, lte, zeros), paddle.where(upper, ute, zeros))
    apart = paddle.logical_and(paddle.logical_and(lower, upper), paddle.logical_or(lts > ute, uts > lte))
    either, both = paddle.logical_or(has_prefix, has_suffix), paddle.logical_and(has_prefix, has_suffix)
    too_many = paddle.logical_or(
        paddle.logical_and(both, paddle.logical_or(lower, upper)), paddle.logical_and(either, apart)
    )
    _refuse(too_many)
    return paddle.concat(
        [
            paddle.where(has_suffix, below, paddle.where(has_prefix, start, lts)),
            paddle.where(has_suffix, full, paddle.where(has_prefix, end, lte)),
            paddle.where(has_prefix, zeros, paddle.where(has_suffix, start, uts)),
            paddle.where(has_prefix, above, paddle.where(has_suffix, end, ute)),
        ],
        axis=-1,
    )


def _refuse(too_many: paddle.Tensor) -> None:
    if not paddle.in_dynamic_mode():
        fine = paddle.logical_not(paddle.any(too_many))
        paddle.static.nn.control_flow.Assert(fine, [too_many.astype("int32")], summarize=8)
    elif bool(paddle.any(too_many)):
        column = paddle.nonzero(too_many)[0].tolist()[2]
        raise ValueError(
            "window_size: expected a window that leaves at most two intervals of masked rows in each column "
            f"of startend_row_indices, got more in column {column}"
        )
