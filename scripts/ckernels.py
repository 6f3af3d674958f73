"""The kernels' C interface (csrc/include/flashmask) from Python, on NumPy arrays: for tests and benchmarks.

Arrays are ``q [B, Sq, Hq, D]``, ``k [B, Sk, Hk, D]``, ``v [B, Sk, Hk, Dv]``, of any strides whose last is one
element; bfloat16, which NumPy lacks, travels as uint16 with ``dtype="bfloat16"``. Nothing is checked beyond
what would crash: the callers are tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
VISITS = {"skip": 0, "all": 1, "dense": 2}


class ShapeStruct(ctypes.Structure):
    """flashmask::Shape."""

    _fields_ = [
        ("batch", ctypes.c_int64),
        ("seqlen_q", ctypes.c_int64),
        ("seqlen_k", ctypes.c_int64),
        ("heads_q", ctypes.c_int32),
        ("heads_k", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("head_dim_v", ctypes.c_int32),
    ]


class TensorStruct(ctypes.Structure):
    """flashmask::Tensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("stride_batch", ctypes.c_int64),
        ("stride_seq", ctypes.c_int64),
        ("stride_head", ctypes.c_int64),
    ]


class MaskStruct(ctypes.Structure):
    """flashmask::Mask."""

    _fields_ = [
        ("indices", ctypes.c_void_p),
        ("dense", ctypes.c_void_p),
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("bounds", ctypes.c_int32),
        ("causal", ctypes.c_int32),
    ]


class DropoutStruct(ctypes.Structure):
    """flashmask::Dropout."""

    _fields_ = [("seed_offset", ctypes.c_void_p), ("probability", ctypes.c_double)]


class ForwardParams(ctypes.Structure):
    """flashmask::ForwardParams."""

    _fields_ = [
        ("shape", ShapeStruct),
        ("dtype", ctypes.c_int32),
        ("visit", ctypes.c_int32),
        ("q", TensorStruct),
        ("k", TensorStruct),
        ("v", TensorStruct),
        ("o", TensorStruct),
        ("lse", ctypes.c_void_p),
        ("mask", MaskStruct),
        ("dropout", DropoutStruct),
        ("softmax_scale", ctypes.c_double),
        ("workspace", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class BackwardParams(ctypes.Structure):
    """flashmask::BackwardParams."""

    _fields_ = [
        ("shape", ShapeStruct),
        ("dtype", ctypes.c_int32),
        ("visit", ctypes.c_int32),
        *((name, TensorStruct) for name in ("q", "k", "v", "o", "dout", "dq", "dk", "dv")),
        ("lse", ctypes.c_void_p),
        ("dlse", ctypes.c_void_p),
        ("mask", MaskStruct),
        ("dropout", DropoutStruct),
        ("softmax_scale", ctypes.c_double),
        ("workspace", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("num_threads", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
    ]


class KernelError(RuntimeError):
    """A kernel reported that it cannot run; the message is its own."""


@dataclass(frozen=True)
class Options:
    """What a call takes besides its tensors. ``softmax_scale=None`` is ``D ** -0.5``."""

    indices: np.ndarray | None = None  # int32 [Bm, Hm, Sk, C], C-contiguous
    dense: np.ndarray | None = None  # bool [Bm, Hm, Sq, Sk], C-contiguous; read with visit="dense" only
    causal: bool = False
    softmax_scale: float | None = None
    dropout_p: float = 0.0
    seed_offset: Sequence[int] = (0, 0)  # used when dropout_p > 0
    visit: str = "skip"
    num_threads: int = 0
    dtype: str | None = None  # of the storage; None: the arrays' own
    _keep_alive: list[Any] = field(default_factory=list, repr=False, compare=False)

    def mask(self) -> MaskStruct:
        """Return the mask struct; it points into ``indices`` and ``dense``."""
        shaped = self.indices if self.indices is not None else self.dense
        batch, heads = (1, 1) if shaped is None else shaped.shape[:2]
        for array, dtype in ((self.indices, np.int32), (self.dense, np.bool_)):
            assert array is None or (array.flags.c_contiguous and array.dtype == dtype), "see Options"
        return MaskStruct(
            None if self.indices is None else self.indices.ctypes.data,
            None if self.dense is None else self.dense.ctypes.data,
            batch,
            heads,
            0 if self.indices is None else self.indices.shape[3],
            int(self.causal),
        )

    def dropout(self) -> DropoutStruct:
        """Return the dropout struct; the seed it points to lives as long as these options."""
        if self.dropout_p == 0:
            return DropoutStruct(None, 0.0)
        seed_offset = np.array(self.seed_offset, np.int64)
        self._keep_alive.append(seed_offset)
        return DropoutStruct(seed_offset.ctypes.data, self.dropout_p)


def _tensor(array: np.ndarray | None) -> TensorStruct:
    if array is None:
        return TensorStruct(None, 0, 0, 0)
    size = array.itemsize
    assert array.size == 0 or array.shape[3] == 1 or array.strides[3] == size, "the last dim is contiguous"
    return TensorStruct(array.ctypes.data, *(stride // size for stride in array.strides[:3]))


def _shape(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> ShapeStruct:
    batch, seqlen_q, heads_q, head_dim = q.shape
    return ShapeStruct(batch, seqlen_q, k.shape[1], heads_q, k.shape[2], head_dim, v.shape[3])


class Kernels:
    """The functions of a library built by scripts/build_kernels.py."""

    def __init__(self, library: Path | str):
        self.binary = ctypes.CDLL(str(library))
        self.binary.flashmask_cpu_isa.restype = ctypes.c_char_p

    def isa(self) -> str:
        """Return the instruction set the CPU kernel chose."""
        return self.binary.flashmask_cpu_isa().decode()

    def exp(self, values: np.ndarray) -> np.ndarray:
        """Return exp(values) by the CPU kernel's own exponential; float32 or float64, any shape."""
        result = np.array(values, order="C")
        self.binary.flashmask_cpu_exp(
            DTYPES[result.dtype.name], ctypes.c_void_p(result.ctypes.data), ctypes.c_int64(result.size)
        )
        return result

    def forward(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        options: Options,
        *,
        out: np.ndarray | None = None,
        lse: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Run the forward pass into ``out`` and ``lse``, or new arrays; return both."""
        dtype = options.dtype or q.dtype.name
        shape = _shape(q, k, v)
        if out is None:
            out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
        if lse is None:
            lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), lse_dtype(dtype))
        scale = q.shape[3] ** -0.5 if options.softmax_scale is None else options.softmax_scale
        params = ForwardParams(
            shape=shape,
            dtype=DTYPES[dtype],
            visit=VISITS[options.visit],
            q=_tensor(q),
            k=_tensor(k),
            v=_tensor(v),
            o=_tensor(out),
            lse=lse.ctypes.data,
            mask=options.mask(),
            dropout=options.dropout(),
            softmax_scale=scale,
            num_threads=options.num_threads,
        )
        self._call(self.binary.flashmask_cpu_forward, params)
        return out, lse

    def backward(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        o: np.ndarray,
        lse: np.ndarray,
        dout: np.ndarray,
        options: Options,
        *,
        dlse: np.ndarray | None = None,
        wanted: Sequence[str] = ("dq", "dk", "dv"),
        into: dict[str, np.ndarray] | None = None,
    ) -> dict[str, np.ndarray]:
        """Run the backward pass; return the wanted gradients by name, in the arrays of ``into`` if given."""
        like = {"dq": q, "dk": k, "dv": v}
        into = into or {}
        gradients = {name: into.get(name, np.empty(like[name].shape, q.dtype)) for name in wanted}
        scale = q.shape[3] ** -0.5 if options.softmax_scale is None else options.softmax_scale
        params = BackwardParams(
            shape=_shape(q, k, v),
            dtype=DTYPES[options.dtype or q.dtype.name],
            visit=VISITS[options.visit],
            q=_tensor(q),
            k=_tensor(k),
            v=_tensor(v),
            o=_tensor(o),
            dout=_tensor(dout),
            dq=_tensor(gradients.get("dq")),
            dk=_tensor(gradients.get("dk")),
            dv=_tensor(gradients.get("dv")),
            lse=lse.ctypes.data,
            dlse=None if dlse is None else dlse.ctypes.data,
            mask=options.mask(),
            dropout=options.dropout(),
            softmax_scale=scale,
            num_threads=options.num_threads,
        )
        self._call(self.binary.flashmask_cpu_backward, params)
        return gradients

    @staticmethod
    def _call(function: Any, params: ctypes.Structure) -> None:
        message = ctypes.create_string_buffer(1024)
        if function(ctypes.byref(params), message, ctypes.c_size_t(len(message))):
            raise KernelError(message.value.decode())


def lse_dtype(dtype: str) -> type[np.floating]:
    """Return the dtype of lse for tensors of ``dtype``."""
    return np.float64 if dtype == "float64" else np.float32


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Return float values rounded to bfloat16 (to nearest, ties to even), as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    """Return the float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
