"""The compiled operators: loading them, and the one call into them, eager and traced."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import paddle
from paddle.base import core, framework

__all__ = [
    "Visit",
    "cpu_threads",
    "cuda_kernels",
    "cuda_targets",
    "describe_cuda_kernel",
    "flashmask",
    "load_operators",
    "to_device_of",
]

Visit = Literal["skip", "all", "dense"]

_DTYPES = ("float16", "bfloat16", "float32", "float64")  # flashmask::DType

_LIBRARY = Path(__file__).with_name("_C.so")
_REBUILD = "pip install --force-reinstall --no-deps --no-build-isolation (--editable) PATH_OF_ITS_SOURCES"


def paddle_build() -> str:
    """The Paddle that runs, as the build records it: a binary is good for one version and one CUDA
    alone."""
    return f"{paddle.__version__} (CUDA {paddle.version.cuda()})"


def _check_build() -> None:
    if not _LIBRARY.exists():
        raise ImportError(f"paddle_flashmask's operators are not built: no {_LIBRARY}; run {_REBUILD}")
    from paddle_flashmask import _build_info

    if paddle_build() != _build_info.PADDLE_BUILD:
        raise ImportError(
            f"paddle_flashmask was built against Paddle {_build_info.PADDLE_BUILD}, but this is Paddle "
            f"{paddle_build()}; run {_REBUILD}"
        )


@functools.cache
def cuda_kernels() -> tuple[str, ...]:
    """The CUDA kernels of this build: architecture, pass, largest head dims and dtype of each."""
    _check_build()
    from paddle_flashmask import _build_info

    return _build_info.CUDA_KERNELS


def cuda_targets() -> tuple[str, ...]:
    """The GPU architectures that they were compiled for, such as "80"."""
    _check_build()
    from paddle_flashmask import _build_info

    return _build_info.CUDA_TARGETS


class _Shape(ctypes.Structure):
    """flashmask::Shape."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "seqlen_q", "seqlen_k")),
        *((name, ctypes.c_int32) for name in ("heads_q", "heads_k", "head_dim", "head_dim_v")),
    ]


def describe_cuda_kernel(
    dtype: str,
    shape: Sequence[int],
    *,
    backward: bool,
    bounds: int = 1,
    dropout: bool = False,
    deterministic: bool = False,
) -> tuple[bool, str]:
    """Whether the current CUDA device has a kernel for these, and which and why it, or why not.

    Args:
        dtype: of q, k and v.
        shape: B, Sq, Sk, Hq, Hk, D, Dv.
        backward: the backward pass, else forward.
        bounds: C of startend_row_indices; 0 without.
        dropout: with dropout.
        deterministic: backward in its deterministic mode.
    """
    load_operators()
    text = ctypes.create_string_buffer(512)
    missing = ctypes.CDLL(str(_LIBRARY)).flashmask_cuda_describe(
        0,  # the best family
        *(int(backward), _DTYPES.index(dtype), ctypes.byref(_Shape(*shape))),
        *(bounds, int(dropout), int(deterministic)),
        *(text, ctypes.c_size_t(len(text))),
    )
    return not missing, text.value.decode()


def cpu_threads() -> int:
    """How many threads an attention call on the CPU takes at most; 0 if FLASHMASK_NUM_THREADS is wrong."""
    load_operators()
    return ctypes.CDLL(str(_LIBRARY)).flashmask_cpu_threads()


@functools.cache
def load_operators() -> None:
    """Registers the operators with Paddle, once per process.

    Any attention call does this by itself. Call it before ``paddle.jit.load`` or an inference predictor in
    a process that calls no attention of this package, since Paddle must know the operators that a saved
    program names.

    Raises:
        ImportError: the operators are not built, or were built against another Paddle.
    """
    _check_build()
    from paddle.utils.cpp_extension import load_op_meta_info_and_register_op

    load_op_meta_info_and_register_op(str(_LIBRARY))


def _double_bits(value: float) -> int:
    """The bits of a double as an int64: Paddle has no double attribute that works in all its versions."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def flashmask(
    q: paddle.Tensor,
    k: paddle.Tensor,
    v: paddle.Tensor,
    indices: paddle.Tensor | None,
    *,
    causal: bool,
    softmax_scale: float,
    dropout_p: float = 0.0,
    seed_offset: paddle.Tensor | None = None,
    dense_mask: paddle.Tensor | None = None,
    visit: Visit = "skip",
    deterministic: bool = False,
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The operator itself: no defaults, no casts, no check of what the operator checks.

    Args:
        q: ``[B, Sq, Hq, D]``.
        k: ``[B, Sk, Hk, D]``.
        v: ``[B, Sk, Hk, Dv]``.
        indices: int32 ``[Bm, Hm, Sk, C]`` or None. The operator takes C = 4 with ``causal`` too (both
            intervals and the diagonal), which no public call does.
        causal: row i sees column j iff j <= i + Sk - Sq, on top of ``indices``.
        softmax_scale: factor of q k^T, kept in double precision.
        dropout_p: probability of dropping an element, in [0, 1).
        seed_offset: int64 ``[2]``, iff ``dropout_p`` > 0. A tensor, so that a traced program redraws it.
        dense_mask: bool ``[Bm, Hm, Sq, Sk]``, True = visible, iff ``visit`` is "dense".
        visit: which tiles are computed: "skip" all but the masked ones; the test modes "all" and "dense"
            every one, masked by element from the indices or from ``dense_mask``.
        deterministic: backward is bit-identical from run to run.

    Returns:
        out ``[B, Sq, Hq, Dv]`` and lse ``[B, Hq, Sq]``.
    """
    load_operators()
    if paddle.in_dynamic_mode() and not paddle.is_grad_enabled():
        # Paddle records custom operators under no_grad too, and would keep their inputs alive.
        q, k, v = q.detach(), k.detach(), v.detach()
    inputs = (q, k, v, indices, dense_mask, seed_offset)
    attributes = {
        "causal": causal,
        "softmax_scale": _double_bits(softmax_scale),
        "dropout_p": _double_bits(dropout_p),
        "visit": get_args(Visit).index(visit),
        "deterministic": deterministic,
        # The backward operator is not told which gradients are asked for.
        "needs_dq": not q.stop_gradient,
        "needs_dk": not k.stop_gradient,
        "needs_dv": not v.stop_gradient,
    }
    if paddle.in_dynamic_mode():
        return tuple(core.eager._run_custom_op("flashmask", *inputs, *attributes.values()))
    if in_pir_mode():
        return tuple(paddle._C_ops._run_custom_op("flashmask", *inputs, *attributes.values()))
    return _append_op(q, inputs, attributes)


def in_pir_mode() -> bool:
    """Whether a program of Paddle 3 is being traced."""
    return hasattr(framework, "in_pir_mode") and framework.in_pir_mode()


def to_device_of(like: paddle.Tensor, tensor: paddle.Tensor) -> paddle.Tensor:
    """A new tensor, which Paddle makes on its current device, on that of ``like``; a traced program has
    none yet."""
    if not paddle.in_dynamic_mode() or str(tensor.place) == str(like.place):
        return tensor
    return tensor._copy_to(like.place, True)


def _append_op(
    q: paddle.Tensor, inputs: Sequence[paddle.Tensor | None], attributes: dict[str, bool | int]
) -> tuple[paddle.Tensor, paddle.Tensor]:
    """The call in a program of Paddle 2.6, whose ``_run_custom_op`` cannot be traced."""
    from paddle.base.layer_helper import LayerHelper

    names = ("Q", "K", "V", "StartendRowIndices@OPTIONAL", "DenseMask@OPTIONAL", "SeedOffset@OPTIONAL")
    helper = LayerHelper("flashmask")
    out = helper.create_variable_for_type_inference(q.dtype)
    lse = helper.create_variable_for_type_inference(
        paddle.float64 if q.dtype == paddle.float64 else paddle.float32
    )
    helper.append_op(
        type="flashmask",
        inputs={name: value for name, value in zip(names, inputs, strict=True) if value is not None},
        outputs={"Out": out, "Lse": lse},
        attrs=attributes,
    )
    return out, lse
