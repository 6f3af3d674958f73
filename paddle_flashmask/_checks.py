"""Checks of the arguments of attention: each error names the argument, what was expected, and what came."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import paddle
from paddle.base import core, framework

from paddle_flashmask._ops import cuda_kernels

_TENSORS: Any = tuple(
    kind
    for kind in (core.eager.Tensor, framework.Variable, getattr(getattr(paddle, "pir", None), "Value", None))
    if kind is not None
)

FLOATS = ("float16", "bfloat16", "float32", "float64")
CUDA_FLOATS = ("float16", "bfloat16")


def fail(error: type[Exception], name: str, expected: str, got: object) -> NoReturn:
    """Raises ``error`` in the one form that every message has."""
    raise error(f"{name}: expected {expected}, got {got}")


def dtype_name(tensor: paddle.Tensor) -> str:
    """``"float32"`` and the like, whatever kind of dtype object this Paddle and this mode use."""
    return _name_of(tensor.dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("paddle.")


def same_size(a: int, b: int) -> bool:
    """Whether two sizes may be equal; -1 is a size that a traced program does not know yet."""
    return a == b or a == -1 or b == -1


def check_tensor(
    name: str, value: Any, rank: int | tuple[int, ...], dtypes: Sequence[str], layout: str
) -> None:
    """A Paddle tensor (eager or traced) of this rank, or one of these, and of one of these dtypes."""
    if not isinstance(value, _TENSORS):
        fail(TypeError, name, "a paddle.Tensor", type(value).__name__)
    ranks = (rank,) if isinstance(rank, int) else rank
    if len(value.shape) not in ranks:
        expected = f"rank {' or '.join(map(str, ranks))} {layout}"
        fail(ValueError, name, expected, f"shape {list(value.shape)}")
    if dtype_name(value) not in dtypes:
        fail(TypeError, name, " or ".join(dtypes), dtype_name(value))


def check_place(name: str, tensor: paddle.Tensor, of_name: str, of: paddle.Tensor) -> None:
    """Both tensors on one device; a traced program has none yet."""
    if paddle.in_dynamic_mode() and str(tensor.place) != str(of.place):
        fail(ValueError, name, f"the device of {of_name}, {of.place}", tensor.place)


def check_flag(name: str, value: Any) -> None:
    """A bool."""
    if not isinstance(value, (bool, np.bool_)):
        fail(TypeError, name, "a bool", f"{value!r}")


def check_number(name: str, value: Any, expected: str) -> float:
    """A finite real number, as a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        fail(TypeError, name, expected, type(value).__name__)
    try:
        number = float(value)
    except OverflowError:
        fail(ValueError, name, expected, "more than a float64 holds")
    if not math.isfinite(number):
        fail(ValueError, name, expected, number)
    return number


def check_probability(name: str, value: Any) -> float:
    """A probability of dropping something, as a float: all cannot be dropped."""
    expected = "a number in [0, 1)"
    probability = check_number(name, value, expected)
    if not 0.0 <= probability < 1.0:
        fail(ValueError, name, expected, probability)
    return probability


def check_qkv(names: tuple[str, str, str], q: Any, k: Any, v: Any) -> None:
    """q ``[B, Sq, Hq, D]``, k ``[B, Sk, Hk, D]``, v ``[B, Sk, Hk, Dv]``, floats, on one device."""
    layouts = ("[B, Sq, Hq, D]", "[B, Sk, Hk, D]", "[B, Sk, Hk, Dv]")
    for name, tensor, layout in zip(names, (q, k, v), layouts, strict=True):
        check_tensor(name, tensor, 4, FLOATS, layout)
        if 0 in tensor.shape[2:]:
            fail(
                ValueError,
                name,
                f"{layout} with at least one head and one dim",
                f"shape {list(tensor.shape)}",
            )
    name_q, name_k, name_v = names
    for name, tensor, axes, of_name, of in (
        (name_k, k, (0,), name_q, q),
        (name_v, v, (0, 1, 2), name_k, k),
        (name_k, k, (3,), name_q, q),
    ):
        if not all(same_size(tensor.shape[axis], of.shape[axis]) for axis in axes):
            what = ", ".join(("batch", "length", "heads", "head dim")[axis] for axis in axes)
            expected = f"the {what} of {of_name} {list(of.shape)}"
            fail(ValueError, name, expected, f"shape {list(tensor.shape)}")
    heads_q, heads_k = q.shape[2], k.shape[2]
    if heads_q > 0 and heads_k > 0 and heads_q % heads_k != 0:
        fail(ValueError, name_k, f"a number of heads that divides the {heads_q} of {name_q}", heads_k)
    for name, tensor in ((name_k, k), (name_v, v)):
        check_place(name, tensor, name_q, q)


def check_one_dtype(names: tuple[str, str, str], q: Any, k: Any, v: Any) -> None:
    """One dtype for q, k and v, once AMP has cast them."""
    for name, tensor in zip(names[1:], (k, v), strict=True):
        if dtype_name(tensor) != dtype_name(q):
            fail(TypeError, name, f"the dtype of {names[0]}, {dtype_name(q)}", dtype_name(tensor))


def check_device(names: tuple[str, str, str], q: Any, v: Any) -> None:
    """A device that there are kernels for, and what those of CUDA do not take. (A traced program has no
    device yet: the operator checks when it runs.)"""
    if not paddle.in_dynamic_mode():
        return
    place = str(q.place)
    if place == "Place(cpu)":
        return
    name_q, _, name_v = names
    if not place.startswith("Place(gpu:"):
        fail(ValueError, name_q, "a tensor on a CPU or a CUDA device", q.place)
    if not cuda_kernels():
        fail(ValueError, name_q, "a tensor on the CPU, as no CUDA kernels were built", q.place)
    if dtype_name(q) not in CUDA_FLOATS:
        fail(TypeError, name_q, f"{' or '.join(CUDA_FLOATS)} on CUDA", dtype_name(q))
    for name, tensor in ((name_q, q), (name_v, v)):
        if tensor.shape[3] % 8 != 0 or tensor.shape[3] > 256:
            fail(
                ValueError,
                name,
                "a head dim that is a multiple of 8 and at most 256 on CUDA",
                f"shape {list(tensor.shape)}",
            )


def check_indices(names: tuple[str, str, str], indices: Any, causal: bool, q: Any, k: Any) -> None:
    """startend_row_indices: int32 ``[Bm, Hm, Sk, C]`` that fit q and k."""
    name = "startend_row_indices"
    check_tensor(name, indices, 4, ("int32",), "[Bm, Hm, Sk, C]")
    batch, heads, seqlen_k, bounds = indices.shape
    if not (same_size(batch, q.shape[0]) or batch == 1):
        fail(
            ValueError,
            name,
            f"a batch of 1 or that of {names[0]}, {q.shape[0]}",
            f"shape {list(indices.shape)}",
        )
    heads_allowed = sorted({1, k.shape[2], q.shape[2]})
    if not any(same_size(heads, allowed) for allowed in heads_allowed):
        expected = f"1 head, or those of {names[1]}, {k.shape[2]}, or of {names[0]}, {q.shape[2]}"
        fail(ValueError, name, expected, f"shape {list(indices.shape)}")
    if not same_size(seqlen_k, k.shape[1]):
        fail(ValueError, name, f"the length of {names[1]}, {k.shape[1]}", f"shape {list(indices.shape)}")
    bounds_allowed = (1, 2) if causal else (2, 4)
    if bounds not in bounds_allowed:
        expected = f"a last dim of {bounds_allowed[0]} or {bounds_allowed[1]} with causal={bool(causal)}"
        fail(ValueError, name, expected, f"shape {list(indices.shape)}")
    check_place(name, indices, names[0], q)
