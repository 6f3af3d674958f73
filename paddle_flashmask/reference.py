"""Dense float64 attention in NumPy: the oracle that every kernel is tested against.

Slow and plain on purpose. It states the semantics once: a row that sees no key gives o = 0, lse = -inf and
zero gradients; grouped query heads share a key head; dropout depends on (seed, offset, b, h, i, j) alone, by
the same Philox bits as ``csrc/common/philox.h``. Rows are taken in chunks, so that 16K tokens fit in memory.

Shapes, as everywhere: q ``[B, Sq, Hq, D]``, k ``[B, Sk, Hk, D]``, v ``[B, Sk, Hk, Dv]``,
out ``[B, Sq, Hq, Dv]``, lse ``[B, Hq, Sq]``, with ``Hq % Hk == 0``.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_flashmask.masks._checks import as_array, as_int, describe

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

# Elements of one chunk of scores, [B, Hq, rows, Sk] in float64 (32 MB); a handful of them live at a time.
_CHUNK_ELEMENTS = 1 << 22


def attention_reference(
    q: Array,
    k: Array,
    v: Array,
    visible: Any = None,
    *,
    softmax_scale: float | None = None,
    dropout_keep: Bool | None = None,
    dropout_p: float = 0.0,
) -> tuple[Float64, Float64]:
    """Exact attention in float64.

    Args:
        q: ``[B, Sq, Hq, D]``, integers or floats (converted to float64), as are ``k`` and ``v``.
        k: ``[B, Sk, Hk, D]``.
        v: ``[B, Sk, Hk, Dv]``.
        visible: which row sees which column: bool broadcastable to ``[B, Hm, Sq, Sk]`` with Hm in
            {1, Hk, Hq}, or anything with a ``to_dense()`` that returns one (a ``ColumnMask``). None: all rows
            see all columns.
        softmax_scale: multiplies q k^T; None is 1 / sqrt(D).
        dropout_keep: ``[B, Hq, Sq, Sk]`` bool, the probabilities that survive (see ``dropout_keep_mask``).
        dropout_p: the probability of being dropped, in [0, 1); what survives is divided by ``1 - dropout_p``.
            Above 0 it goes with ``dropout_keep``.

    Returns:
        out ``[B, Sq, Hq, Dv]`` and lse ``[B, Hq, Sq]`` (natural log, before dropout), both float64.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: shapes that do not belong together, or a value out of range.
    """
    problem = _Problem.of(q, k, v, visible, softmax_scale, dropout_keep, dropout_p)
    out = np.zeros(problem.q.shape[:3] + problem.v.shape[3:])
    lse = np.full(problem.q.shape[:3], -np.inf)
    for rows in problem.row_chunks():
        scores = problem.scores(rows)
        row_max = scores.max(axis=-1, keepdims=True, initial=-np.inf)
        row_max[np.isneginf(row_max)] = 0.0  # an empty row: exp(-inf - 0) = 0, never exp(-inf + inf)
        exponentials = np.exp(scores - row_max)
        row_sum = exponentials.sum(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse[:, :, rows] = (row_max + np.log(row_sum))[..., 0]
        row_sum[row_sum == 0.0] = 1.0
        out[:, :, rows] = problem.drop(exponentials / row_sum, rows) @ problem.v
    return out.transpose(0, 2, 1, 3), lse


def attention_reference_backward(
    q: Array,
    k: Array,
    v: Array,
    visible: Any,
    dout: Array,
    dlse: Array | None = None,
    *,
    softmax_scale: float | None = None,
    dropout_keep: Bool | None = None,
    dropout_p: float = 0.0,
) -> tuple[Float64, Float64, Float64]:
    """Gradients of ``sum(dout * out) + sum(dlse * lse)``; arguments as for ``attention_reference``.

    Args:
        q: ``[B, Sq, Hq, D]``.
        k: ``[B, Sk, Hk, D]``.
        v: ``[B, Sk, Hk, Dv]``.
        visible: as for ``attention_reference``.
        dout: gradient of out, ``[B, Sq, Hq, Dv]``. In rows that see no key it is of no effect, even if it is
            not finite.
        dlse: gradient of lse, ``[B, Hq, Sq]``; None is zero. Of no effect in the same rows.
        softmax_scale: as for ``attention_reference``.
        dropout_keep: as for ``attention_reference``.
        dropout_p: as for ``attention_reference``.

    Returns:
        dq, dk, dv, float64, shaped as q, k, v.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: shapes that do not belong together, or a value out of range.
    """
    problem = _Problem.of(q, k, v, visible, softmax_scale, dropout_keep, dropout_p)
    out, lse = attention_reference(
        q, k, v, visible, softmax_scale=softmax_scale, dropout_keep=dropout_keep, dropout_p=dropout_p
    )
    dout = _as_float64("dout", dout, out.shape).transpose(0, 2, 1, 3)
    empty = np.isneginf(lse)
    dout[empty] = 0.0  # a copy's: out and lse are constant there, and 0 * NaN must not reach other rows
    delta = (dout * out.transpose(0, 2, 1, 3)).sum(axis=-1)  # [B, Hq, Sq]: sum over keys of p * dp
    if dlse is not None:
        delta -= _as_float64("dlse", dlse, lse.shape)
    delta[empty] = lse[empty] = 0.0

    dq, dk, dv = np.zeros_like(problem.q), np.zeros_like(problem.k), np.zeros_like(problem.v)
    for rows in problem.row_chunks():
        p = np.exp(problem.scores(rows) - lse[:, :, rows, None])
        dp = problem.drop(dout[:, :, rows] @ problem.v.swapaxes(-1, -2), rows)
        ds = p * (dp - delta[:, :, rows, None]) * problem.scale
        dq[:, :, rows] = ds @ problem.k
        dk += ds.swapaxes(-1, -2) @ problem.q[:, :, rows]
        dv += problem.drop(p, rows).swapaxes(-1, -2) @ dout[:, :, rows]

    heads_k = k.shape[2]
    return (
        dq.transpose(0, 2, 1, 3),
        _sum_groups(dk, heads_k).transpose(0, 2, 1, 3),
        _sum_groups(dv, heads_k).transpose(0, 2, 1, 3),
    )


def expand_heads(x: Array, heads: int, axis: int = 1) -> Array:
    """Repeats each head of ``x`` along ``axis`` so that there are ``heads``: head h reads head h // group.

    Raises:
        ValueError: ``heads`` is not a multiple of ``x.shape[axis]``.
    """
    present = x.shape[axis]
    if present == 0 or heads % present != 0:
        raise ValueError(f"heads: expected a multiple of the {present} heads of x, got {heads}")
    return x if present == heads else np.repeat(x, heads // present, axis=axis)


class _Problem(NamedTuple):
    """Checked inputs, heads first and expanded to Hq: q ``[B, Hq, Sq, D]``, k, v ``[B, Hq, Sk, .]``."""

    q: Float64
    k: Float64
    v: Float64
    visible: Bool  # broadcastable to [B, Hq, Sq, Sk]
    scale: float
    keep: Bool | None  # [B, Hq, Sq, Sk]
    keep_scale: float

    @staticmethod
    def of(
        q: Array, k: Array, v: Array, visible: Any, scale: float | None, keep: Bool | None, dropout_p: float
    ) -> _Problem:
        for name, array in (("q", q), ("k", k), ("v", v)):
            _check_array(name, array, "iuf", "integers or floats")
            if array.ndim != 4:
                raise ValueError(f"{name}: expected 4 dimensions [B, S, H, D], got shape {array.shape}")
        batch, seqlen_q, heads_q, head_dim = q.shape
        _, seqlen_k, heads_k, head_dim_v = v.shape
        q64 = _as_float64("q", q, q.shape)
        k64 = _as_float64("k", k, (batch, seqlen_k, heads_k, head_dim))
        v64 = _as_float64("v", v, (batch, seqlen_k, heads_k, head_dim_v))
        if heads_k == 0 or heads_q % heads_k != 0:
            raise ValueError(f"q: expected a multiple of the {heads_k} heads of k and v, got {heads_q} heads")
        if head_dim == 0 and scale is None:
            raise ValueError("softmax_scale: expected a number where D is 0, got None")
        shape = (batch, heads_q, seqlen_q, seqlen_k)
        dropout_p = _as_probability("dropout_p", dropout_p)
        if keep is not None:
            _check_array("dropout_keep", keep, "b", "bool")
            if keep.shape != shape:
                raise ValueError(f"dropout_keep: expected shape {shape}, got {keep.shape}")
        elif dropout_p > 0.0:
            raise ValueError(f"dropout_keep: expected an array with dropout_p={dropout_p}, got None")
        return _Problem(
            q64.transpose(0, 2, 1, 3),
            expand_heads(k64, heads_q, axis=2).transpose(0, 2, 1, 3),
            expand_heads(v64, heads_q, axis=2).transpose(0, 2, 1, 3),
            _expand_visible(visible, shape, heads_k),
            head_dim**-0.5 if scale is None else _as_number("softmax_scale", scale, "a finite number"),
            keep,
            1.0 / (1.0 - dropout_p),
        )

    def row_chunks(self) -> Iterator[slice]:
        batch, heads, seqlen_q, _ = self.q.shape
        per_row = max(1, batch * heads * self.k.shape[2])
        step = max(1, _CHUNK_ELEMENTS // per_row)
        return (slice(start, min(start + step, seqlen_q)) for start in range(0, seqlen_q, step))

    def scores(self, rows: slice) -> Float64:
        """Scaled scores of some rows, -inf where masked, ``[B, Hq, rows, Sk]``."""
        scores = (self.q[:, :, rows] @ self.k.swapaxes(-1, -2)) * self.scale
        return np.where(self.visible[:, :, rows], scores, -np.inf)

    def drop(self, p: Float64, rows: slice) -> Float64:
        return p if self.keep is None else np.where(self.keep[:, :, rows], p * self.keep_scale, 0.0)


def _expand_visible(visible: Any, shape: tuple[int, int, int, int], heads_k: int) -> Bool:
    batch, heads_q, seqlen_q, seqlen_k = shape
    if visible is None:
        return np.broadcast_to(np.True_, shape)
    given = as_array("visible", visible.to_dense() if hasattr(visible, "to_dense") else visible)
    if given.dtype != np.bool_:
        raise TypeError(f"visible: expected bool, got {given.dtype}")
    dense = given[(None,) * (4 - given.ndim)]
    sizes = ((1, batch), (1, heads_k, heads_q), (1, seqlen_q), (1, seqlen_k))
    if dense.ndim != 4 or any(n not in allowed for n, allowed in zip(dense.shape, sizes, strict=True)):
        raise ValueError(
            f"visible: expected a shape that broadcasts to {shape} (or {heads_k} heads), got {given.shape}"
        )
    mask_heads = dense.shape[1]
    # Heads of 1 are left to broadcast: repeating them would cost memory, not save any.
    return np.broadcast_to(dense if mask_heads == 1 else expand_heads(dense, heads_q), shape)


def _sum_groups(x: Float64, heads_k: int) -> Float64:
    """Sums ``[B, Hq, S, D]`` over the query heads that share a key head: ``[B, Hk, S, D]``."""
    grouped: Float64 = x.reshape(x.shape[0], heads_k, x.shape[1] // heads_k, *x.shape[2:])
    return grouped.sum(axis=2)


def _check_array(name: str, value: Any, kinds: str, meaning: str) -> None:
    """Raises TypeError unless ``value`` is an array whose dtype is of one of NumPy's ``kinds``."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name}: expected a NumPy array, got {describe(value)}")
    if value.dtype.kind not in kinds:
        raise TypeError(f"{name}: expected {meaning}, got dtype {value.dtype}")


def _as_float64(name: str, array: Any, shape: tuple[int, ...]) -> Float64:
    """A copy of an array of integers or floats."""
    _check_array(name, array, "iuf", "integers or floats")
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    copy: Float64 = array.astype(np.float64)
    return copy


def _as_number(name: str, value: Any, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected {expected}, got {describe(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected {expected}, got {describe(value)}")
    return number


def _as_probability(name: str, value: Any) -> float:
    """A probability of dropping something: all cannot be dropped."""
    probability = _as_number(name, value, "a number in [0, 1)")
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1), got {probability}")
    return probability


def dropout_keep_mask(
    seed: int, offset: int, batch: int, heads: int, seqlen_q: int, seqlen_k: int, p: float
) -> Bool:
    """Which probabilities survive dropout, ``[batch, heads, seqlen_q, seqlen_k]`` bool: see philox.h.

    Args:
        seed: 64 bits; a negative int64 stands for its two's complement. So does ``offset``.
        offset: 64 bits.
        batch: B.
        heads: Hq.
        seqlen_q: Sq.
        seqlen_k: Sk.
        p: probability of being dropped, in [0, 1), rounded to 1/65536.

    Raises:
        TypeError: an argument that is not a number, or not an integer.
        ValueError: a value out of range.
    """
    seed, offset = (
        as_int(name, value, minimum=-(2**63), maximum=2**64 - 1)
        for name, value in (("seed", seed), ("offset", offset))
    )
    batch, heads, seqlen_q, seqlen_k = (
        as_int(name, value)
        for name, value in (
            ("batch", batch),
            ("heads", heads),
            ("seqlen_q", seqlen_q),
            ("seqlen_k", seqlen_k),
        )
    )
    keep = np.empty((batch * heads, seqlen_q, seqlen_k), np.bool_)
    threshold = int(_as_probability("p", p) * 65536.0 + 0.5)
    for head in range(batch * heads):
        keep[head] = _dropout_bits(seed, offset, head, seqlen_q, seqlen_k) >= threshold
    return keep.reshape(batch, heads, seqlen_q, seqlen_k)


def _dropout_bits(seed: int, offset: int, head: int, seqlen_q: int, seqlen_k: int) -> Array:
    """The 16 bits of every element of one head, ``[seqlen_q, seqlen_k]`` uint16.

    A 16x16 block is served by 32 lanes of four words each. Lane 4 * r + c holds rows {r, r + 8} and columns
    {2c, 2c + 1, 2c + 8, 2c + 9}; word 2 * (column >= 8) + (row >= 8); low half for even columns.
    """
    row_blocks, column_blocks = -(-seqlen_q // 16), -(-seqlen_k // 16)
    counter = np.arange(column_blocks * 32, dtype=np.uint32)[None, :]
    row_block = np.arange(row_blocks, dtype=np.uint32)[:, None]
    words = philox4x32_10(
        (counter, row_block, np.uint32(head), np.uint32(offset & 0xFFFFFFFF)),
        (seed & 0xFFFFFFFF, (seed >> 32 ^ offset >> 32) & 0xFFFFFFFF),
    )
    halves = np.stack([words & 0xFFFF, words >> 16], axis=-1).astype(np.uint16)
    # [column >= 8, row >= 8, row block, column block, row % 8, column pair, parity]
    halves = halves.reshape(2, 2, row_blocks, column_blocks, 8, 4, 2)
    by_row_and_column = halves.transpose(2, 1, 4, 3, 0, 5, 6)
    return by_row_and_column.reshape(row_blocks * 16, column_blocks * 16)[:seqlen_q, :seqlen_k]


def philox4x32_10(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> Array:
    """Philox4x32-10 of Salmon et al. (SC11) over counters that broadcast: uint32 ``[4, ...]``."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    k0, k1 = key
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0 = p1 >> np.uint64(32) ^ c1 ^ np.uint64(k0)
        c2 = p0 >> np.uint64(32) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & low, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)
