"""The two attention calls: ``attention``, and ``flashmask_attention`` with Paddle's signature.

(The module is not called ``attention``: importing a submodule of that name would replace the function in
the package.)
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import paddle
from paddle.autograd import PyLayer
from paddle.base import core, framework

from paddle_flashmask import _ops
from paddle_flashmask._checks import (
    check_device,
    check_flag,
    check_indices,
    check_number,
    check_one_dtype,
    check_place,
    check_probability,
    check_qkv,
    check_tensor,
    dtype_name,
    fail,
    same_size,
)
from paddle_flashmask._window import combine_window, parse_window
from paddle_flashmask.masks import ColumnMask

try:  # Paddle 3
    from paddle.jit.marker import unified as traced_as_written
except ImportError:  # Paddle 2.6
    from paddle.jit import not_to_static as traced_as_written

    # That is for one whole program. Where it traces piece by piece, it would rewrite our Python frame by
    # frame, and it mistakes some of it (keyword arguments get lost): ours runs as it is between two pieces.
    core.eval_frame_skip_file_prefix((str(Path(__file__).parent) + os.sep,))

__all__ = ["attention", "flashmask_attention"]


@overload
def attention(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    *,
    mask: ColumnMask | None = None,
    startend_row_indices: paddle.Tensor | None = None,
    causal: bool | None = None,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    deterministic: bool | None = None,
    return_lse: Literal[False] = False,
) -> paddle.Tensor: ...


@overload
def attention(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    *,
    mask: ColumnMask | None = None,
    startend_row_indices: paddle.Tensor | None = None,
    causal: bool | None = None,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    deterministic: bool | None = None,
    return_lse: Literal[True],
) -> tuple[paddle.Tensor, paddle.Tensor]: ...


@traced_as_written
def attention(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    *,
    mask: ColumnMask | None = None,
    startend_row_indices: paddle.Tensor | None = None,
    causal: bool | None = None,
    softmax_scale: float | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> paddle.Tensor | tuple[paddle.Tensor, paddle.Tensor]:
    """softmax(softmax_scale * q k^T, masked) v, exactly, in memory linear in the lengths.

    Tiles that the mask hides whole are never computed, forward or backward (Algorithms 1 and 2 of
    "FlashMask: Efficient and Rich Mask Extension of FlashAttention", Wang et al., 2024). A row that sees
    no key gives zeros, lse -inf and zero gradients.

    On a CPU it takes as many threads as the process may use processors, or as FLASHMASK_NUM_THREADS says, or
    an OMP_NUM_THREADS that the process was started with.

    Args:
        q: ``[B, Sq, Hq, D]``, float16, bfloat16, float32 or float64.
        k: ``[B, Sk, Hk, D]``, of q's dtype. Hq is a multiple of Hk; head h of q reads head h // (Hq / Hk).
        v: ``[B, Sk, Hk, Dv]``, of q's dtype.
        mask: a ``ColumnMask`` of q's and k's lengths, for 1 or B samples and 1, Hk or Hq heads. It keeps
            one tensor per device; a traced program (``to_static``) keeps it as a constant.
        startend_row_indices: int32 ``[Bm, Hm, Sk, C]``, Bm in {1, B}, Hm in {1, Hk, Hq}: the rows of each
            key column that are masked. Causal: C = 1 is [LTS, Sq), C = 2 is [LTS, LTE). Otherwise: C = 2
            is [LTS, Sq) and [0, UTE), C = 4 is [LTS, LTE) and [UTS, UTE). Any values are safe.
        causal: row i sees column j only if j <= i + Sk - Sq. None is False.
        softmax_scale: None is D ** -0.5.
        dropout_p: probability in [0, 1) of dropping an attention weight; kept ones grow by 1 / (1 -
            dropout_p). The mask follows from a seed drawn from Paddle's generator, so ``paddle.seed`` and
            recompute repeat it.
        training: dropout is for training only.
        deterministic: the backward pass is bit-identical from run to run. None follows
            ``FLAGS_cudnn_deterministic`` where Paddle has it. The CPU always is.
        return_lse: also return the log of each row's sum of exp(softmax_scale * q k^T) over the keys it
            sees, ``[B, Hq, Sq]``, float32 (float64 for float64), differentiable.

    Returns:
        out ``[B, Sq, Hq, Dv]`` of q's dtype, or (out, lse). Under AMP (O1, O2) float inputs are cast to
        its dtype.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a rank, size, device or value is wrong, or two arguments exclude each other.
    """
    names = ("q", "k", "v")
    check_qkv(names, q, k, v)
    q, k, v = _amp_cast(q, k, v)
    check_one_dtype(names, q, k, v)
    check_device(names, q, v)
    for name, flag in (("training", training), ("return_lse", return_lse)):
        check_flag(name, flag)
    for name, optional_flag in (("causal", causal), ("deterministic", deterministic)):
        if optional_flag is not None:
            check_flag(name, optional_flag)
    dropout_p = check_probability("dropout_p", dropout_p)
    if mask is not None:
        if startend_row_indices is not None:
            fail(ValueError, "mask", "mask or startend_row_indices", "both")
        if causal is not None:
            fail(ValueError, "mask", "mask or causal (a ColumnMask has its own causality)", "both")
        _check_mask(mask, q, k)
        startend_row_indices, causal = _mask_tensor(mask, q)
    elif startend_row_indices is not None:
        check_indices(names, startend_row_indices, bool(causal), q, k)
    seed_offset = _draw_seed_offset(q) if training and dropout_p > 0.0 else None
    out, lse = _attend(
        q,
        k,
        v,
        startend_row_indices,
        causal=bool(causal),
        softmax_scale=_softmax_scale(softmax_scale, q),
        dropout_p=dropout_p,
        seed_offset=seed_offset,
        deterministic=_deterministic_flag() if deterministic is None else bool(deterministic),
    )
    return (out, lse) if return_lse else out


@traced_as_written
def flashmask_attention(
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    startend_row_indices: paddle.Tensor | None = None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
    window_size: int | tuple[int, int] | None = None,
    return_softmax_lse: bool = False,
    return_seed_offset: bool = False,
    fixed_seed_offset: paddle.Tensor | None = None,
    rng_name: str = "",
    training: bool = True,
    name: str | None = None,
    softmax_scale: float | None = None,
    block_mask: paddle.Tensor | None = None,
) -> Any:
    """``paddle.nn.functional.flashmask_attention`` of Paddle 3.3.1, wherever this package has kernels.

    Shapes and indices are those of ``attention``. It differs from Paddle's only so: lse is ``[B, Hq, Sq]``
    and -inf on rows that see no key; ``window_size`` together with indices masks what either masks;
    windows are bottom-right aligned when Sq != Sk; with ``causal`` the right window counts for nothing;
    batch 1 of the indices serves every sample; ``block_mask`` is refused.

    Args:
        query: ``[B, Sq, Hq, D]``.
        key: ``[B, Sk, Hk, D]``.
        value: ``[B, Sk, Hk, Dv]``.
        startend_row_indices: int32 ``[Bm, Hm, Sk, C]``.
        dropout: probability in [0, 1) of dropping an attention weight.
        causal: row i sees column j only if j <= i + Sk - Sq.
        window_size: w or (left, right): row i sees column j only if -left <= j - (i + Sk - Sq) <= right.
            Negative ones are no exception, so that (3, -1) keeps a row's own key from it: -1 is not "no
            limit".
        return_softmax_lse: also return lse.
        return_seed_offset: also return the int64 ``[2]`` seed and offset of the dropout mask (zeros
            without dropout).
        fixed_seed_offset: int64 ``[2]``: take the dropout mask of these instead of drawing.
        rng_name: draw from the generator registered under this name. Not in a traced program.
        training: dropout is for training only.
        name: nothing; there for Paddle's signature.
        softmax_scale: None is D ** -0.5.
        block_mask: must be None.

    Returns:
        out, or the list [out, lse?, seed_offset?] of what was asked for.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: a rank, size, device or value is wrong; or window and indices (C = 4) together mask
            more than two intervals of some column.
        NotImplementedError: ``block_mask`` was given.
    """
    names = ("query", "key", "value")
    check_qkv(names, query, key, value)
    query, key, value = _amp_cast(query, key, value)
    check_one_dtype(names, query, key, value)
    check_device(names, query, value)
    for flag_name, flag in (
        ("causal", causal),
        ("return_softmax_lse", return_softmax_lse),
        ("return_seed_offset", return_seed_offset),
        ("training", training),
    ):
        check_flag(flag_name, flag)
    dropout = check_probability("dropout", dropout)
    if not isinstance(rng_name, str):
        fail(TypeError, "rng_name", "a str", f"{rng_name!r}")
    if block_mask is not None:
        raise NotImplementedError("block_mask: expected None (it is not supported), got a block mask")
    window = None if window_size is None else parse_window(window_size)
    if startend_row_indices is not None:
        check_indices(names, startend_row_indices, bool(causal), query, key)
    if window is not None:
        startend_row_indices = combine_window(window, startend_row_indices, bool(causal), query, key)
    if fixed_seed_offset is not None:
        _check_seed_offset(fixed_seed_offset, query)
    seed_offset = None
    if training and dropout > 0.0:
        seed_offset = _draw_seed_offset(query, rng_name) if fixed_seed_offset is None else fixed_seed_offset
    out, lse = _attend(
        query,
        key,
        value,
        startend_row_indices,
        causal=bool(causal),
        softmax_scale=_softmax_scale(softmax_scale, query),
        dropout_p=dropout,
        seed_offset=seed_offset,
        deterministic=_deterministic_flag(),
    )
    outputs = [out]
    if return_softmax_lse:
        outputs.append(lse)
    if return_seed_offset:
        if seed_offset is None:
            seed_offset = _ops.to_device_of(query, paddle.zeros([2], dtype="int64"))
        outputs.append(seed_offset)
    return outputs if len(outputs) > 1 else out


def _attend(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    indices: paddle.Tensor | None,
    *,
    causal: bool,
    softmax_scale: float,
    dropout_p: float,
    seed_offset: paddle.Tensor | None,
    deterministic: bool,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Checked arguments in: an answer for empty inputs, the operator for all others."""
    if 0 in q.shape or 0 in k.shape:
        attend = _AttendEmpty.apply if paddle.in_dynamic_mode() else _AttendEmpty.results
        return attend(q, k, v)
    return _ops.flashmask(
        q,
        k,
        v,
        indices,
        causal=causal,
        softmax_scale=softmax_scale,
        dropout_p=0.0 if seed_offset is None else dropout_p,
        seed_offset=seed_offset,
        deterministic=deterministic,
    )


class _AttendEmpty(PyLayer):
    """No sample, row or key, so nothing for a kernel to do; but out and lse have shapes, and gradients."""

    @staticmethod
    def results(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        batch, seqlen_q, heads_q, _ = q.shape
        out = paddle.zeros([batch, seqlen_q, heads_q, v.shape[3]], dtype=q.dtype)
        lse_dtype = "float64" if dtype_name(q) == "float64" else "float32"
        lse = paddle.full([batch, heads_q, seqlen_q], float("-inf"), dtype=lse_dtype)
        return _ops.to_device_of(q, out), _ops.to_device_of(q, lse)

    @staticmethod
    def forward(
        ctx: Any, q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor
    ) -> tuple[paddle.Tensor, paddle.Tensor]:
        ctx.inputs = [tensor for tensor in (q, k, v) if not tensor.stop_gradient]
        return _AttendEmpty.results(q, k, v)

    @staticmethod
    def backward(ctx: Any, dout: paddle.Tensor, dlse: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        return tuple(_ops.to_device_of(x, paddle.zeros(x.shape, dtype=x.dtype)) for x in ctx.inputs)


def amp_dtype() -> str | None:
    """The dtype of auto_cast at O1 or O2, where attention belongs to the operators of low precision."""
    state = core._get_amp_attrs() if _ops.in_pir_mode() else framework._dygraph_tracer()
    if state is None or state._amp_level not in (core.AmpLevel.O1, core.AmpLevel.O2):
        return None
    return state._amp_dtype


def _amp_cast(
    q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor
) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
    """Paddle casts by its lists of operators, which a custom one cannot join; float64 stays, as there."""
    dtype = amp_dtype()

    def cast(tensor: paddle.Tensor) -> paddle.Tensor:
        return tensor if dtype is None or dtype_name(tensor) in ("float64", dtype) else tensor.astype(dtype)

    return cast(q), cast(k), cast(v)


def _softmax_scale(softmax_scale: float | None, q: paddle.Tensor) -> float:
    if softmax_scale is None:
        return float(q.shape[3]) ** -0.5
    return check_number("softmax_scale", softmax_scale, "a finite number or None")


_DETERMINISTIC = "FLAGS_cudnn_deterministic"


@functools.cache
def _has_deterministic_flag() -> bool:
    try:
        paddle.get_flags([_DETERMINISTIC])
    except ValueError:  # a Paddle without CUDA does not know it
        return False
    return True


def _deterministic_flag() -> bool:
    return _has_deterministic_flag() and bool(paddle.get_flags([_DETERMINISTIC])[_DETERMINISTIC])


def _check_seed_offset(seed_offset: Any, q: paddle.Tensor) -> None:
    check_tensor("fixed_seed_offset", seed_offset, 1, ("int64",), "[2]")
    if seed_offset.shape[0] not in (2, -1):
        fail(ValueError, "fixed_seed_offset", "shape [2]", f"shape {list(seed_offset.shape)}")
    check_place("fixed_seed_offset", seed_offset, "query", q)


def _named_generator(rng_name: str) -> Any:
    try:
        return core.get_random_seed_generator(rng_name)
    except RuntimeError:
        fail(ValueError, "rng_name", "the name of a registered generator", f"{rng_name!r}")


def _draw_seed_offset(q: paddle.Tensor, rng_name: str = "") -> paddle.Tensor:
    """An int64 ``[2]`` from the framework's generator (recompute restores that one) or from a named one."""
    if not rng_name:
        seed_offset = paddle.randint(0, 2**31 - 1, [2], dtype="int64")
    elif not paddle.in_dynamic_mode():
        fail(
            ValueError,
            "rng_name",
            "'' in a traced program, which would keep one draw forever",
            f"{rng_name!r}",
        )
    else:
        seed_offset = paddle.to_tensor([_named_generator(rng_name).random() % 2**63, 0], dtype="int64")
    return _ops.to_device_of(q, seed_offset)


def _check_mask(mask: Any, q: paddle.Tensor, k: paddle.Tensor) -> None:
    if not isinstance(mask, ColumnMask):
        hint = "; a tensor goes to startend_row_indices" if hasattr(mask, "shape") else ""
        fail(TypeError, "mask", "a paddle_flashmask.masks.ColumnMask", type(mask).__name__ + hint)
    for what, length, name, tensor in (("rows", mask.seqlen_q, "q", q), ("columns", mask.seqlen_k, "k", k)):
        if tensor.shape[1] != length:  # -1 fits no mask: it is a constant of one length
            fail(ValueError, "mask", f"{tensor.shape[1]} {what}, the length of {name}", length)
    if mask.batch != 1 and not same_size(mask.batch, q.shape[0]):
        fail(ValueError, "mask", f"a batch of 1 or that of q, {q.shape[0]}", mask.batch)
    if mask.heads not in (1, k.shape[2], q.shape[2]):
        fail(ValueError, "mask", f"1 head, or those of k, {k.shape[2]}, or of q, {q.shape[2]}", mask.heads)


def _mask_tensor(mask: ColumnMask, q: paddle.Tensor) -> tuple[paddle.Tensor | None, bool]:
    """The mask's indices where q is, one tensor per place, or as a constant of the traced program; causal."""
    traced = not paddle.in_dynamic_mode()

    def make() -> tuple[paddle.Tensor | None, bool]:
        indices, causal = mask.to_startend_row_indices()
        if indices is None:
            return None, causal
        return _constant(indices) if traced else paddle.to_tensor(indices, place=q.place), causal

    return make() if traced else mask.cached(("startend_row_indices", str(q.place)), make)


def _constant(indices: np.ndarray) -> paddle.Tensor:
    """An array as a constant of the traced program; in pieces, since Paddle 2.6 takes 2**20 values each."""
    flat = indices.reshape(-1)
    pieces = [paddle.assign(flat[start : start + 2**20]) for start in range(0, flat.size, 2**20)]
    return paddle.concat(pieces).reshape(list(indices.shape))
