"""The CUDA kernels' C interface for device tensors of any library: structs filled, entries called, no torch.

A device tensor here is anything with ``data_ptr()``, ``stride(dim)``, ``shape`` and ``dtype`` (a torch dtype
or its name). Nothing is checked: the callers are tests (tests/gpu) and benchmarks (scripts/bench/kernels.py).
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckernels
from ckernels import (
    BackwardParams,
    DropoutStruct,
    ForwardParams,
    KernelError,
    MaskStruct,
    ShapeStruct,
    TensorStruct,
)

ROOT = Path(__file__).resolve().parent.parent
BUILD = "python scripts/build_kernels.py --cuda --targets 90 --output build"


def library_path() -> Path:
    """The library under test: $FLASHMASK_CUDA_LIBRARY, or the one in build/."""
    path = Path(os.environ.get("FLASHMASK_CUDA_LIBRARY", ROOT / "build" / "libflashmask_cuda.so"))
    if not path.exists():
        raise FileNotFoundError(f"{path}: build it with `{BUILD}` or set FLASHMASK_CUDA_LIBRARY")
    return path


@dataclass(frozen=True)
class Options:
    """What a call takes besides its tensors. ``softmax_scale=None`` is ``D ** -0.5``."""

    indices: Any = None  # int32 [Bm, Hm, Sk, C], contiguous
    dense: Any = None  # one byte an element, [Bm, Hm, Sq, Sk], contiguous; with visit="dense" only
    causal: bool = False
    softmax_scale: float | None = None
    dropout_p: float = 0.0
    seed_offset: Any = None  # int64 [2] on the device; with dropout_p > 0
    visit: str = "skip"
    deterministic: bool = False

    def mask(self) -> MaskStruct:
        """Return the mask struct; it points into ``indices`` and ``dense``."""
        shaped = self.indices if self.indices is not None else self.dense
        batch, heads = (1, 1) if shaped is None else shaped.shape[:2]
        return MaskStruct(
            None if self.indices is None else self.indices.data_ptr(),
            None if self.dense is None else self.dense.data_ptr(),
            batch,
            heads,
            0 if self.indices is None else self.indices.shape[3],
            int(self.causal),
        )

    def dropout(self) -> DropoutStruct:
        """Return the dropout struct; it points into ``seed_offset``."""
        if self.dropout_p == 0:
            return DropoutStruct(None, 0.0)
        return DropoutStruct(self.seed_offset.data_ptr(), self.dropout_p)

    def scale(self, head_dim: int) -> float:
        """Return the softmax scale of a call with this head dim."""
        return head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale


def forward_params(
    q: Any, k: Any, v: Any, out: Any, lse: Any, options: Options, stream: int
) -> ForwardParams:
    """Return a forward call's params, but for the workspace."""
    return ForwardParams(
        shape=_shape(q, k, v),
        dtype=_dtype(q),
        visit=ckernels.VISITS[options.visit],
        q=_tensor(q),
        k=_tensor(k),
        v=_tensor(v),
        o=_tensor(out),
        lse=lse.data_ptr(),
        mask=options.mask(),
        dropout=options.dropout(),
        softmax_scale=options.scale(q.shape[3]),
        stream=stream,
    )


def backward_params(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
    gradients: dict[str, Any],
    options: Options,
    stream: int,
) -> BackwardParams:
    """Return a backward call's params, but for the workspace; ``gradients`` holds the wanted ones by name."""
    return BackwardParams(
        shape=_shape(q, k, v),
        dtype=_dtype(q),
        visit=ckernels.VISITS[options.visit],
        q=_tensor(q),
        k=_tensor(k),
        v=_tensor(v),
        o=_tensor(out),
        dout=_tensor(dout),
        dq=_tensor(gradients.get("dq")),
        dk=_tensor(gradients.get("dk")),
        dv=_tensor(gradients.get("dv")),
        lse=lse.data_ptr(),
        dlse=None if dlse is None else dlse.data_ptr(),
        mask=options.mask(),
        dropout=options.dropout(),
        softmax_scale=options.scale(q.shape[3]),
        stream=stream,
        deterministic=int(options.deterministic),
    )


def classify_params(seqlen_q: int, seqlen_k: int, options: Options, stream: int) -> ForwardParams:
    """Of a forward call only what flashmask_cuda_classify reads."""
    return ForwardParams(
        shape=ShapeStruct(seqlen_q=seqlen_q, seqlen_k=seqlen_k),
        visit=ckernels.VISITS[options.visit],
        mask=options.mask(),
        stream=stream,
    )


# Of csrc/include/flashmask/c_api.h.
FAMILIES = {"cuda": 0, "sm80": 80, "sm90": 90}


class CudaLibrary:
    """The functions of a library built by scripts/build_kernels.py --cuda.

    ``family`` is sm80, sm90, or cuda: the best that the device can run.
    """

    def __init__(self, path: Path | str, family: str = "cuda"):
        self._library = ctypes.CDLL(str(path))
        self._library.flashmask_cuda_classify_workspace.restype = ctypes.c_int64
        self._family = FAMILIES[family]

    def workspace_bytes(self, params: ForwardParams | BackwardParams) -> int:
        """How much device memory a call needs; raises KernelError."""
        size = ctypes.c_int64()
        self._call(f"{_pass_of(params)}_workspace", ctypes.byref(params), ctypes.byref(size))
        return size.value

    def launch(self, params: ForwardParams | BackwardParams) -> None:
        """Launch the pass that the params are for; raises KernelError."""
        self._call(_pass_of(params), ctypes.byref(params))

    def describe(self, params: ForwardParams) -> str:
        """Return which kernel a forward call would launch, and how it would divide the work."""
        message = ctypes.create_string_buffer(1024)
        size = ctypes.c_size_t(len(message))
        describe = self._library.flashmask_cuda_forward_describe
        missing = describe(self._family, ctypes.byref(params), message, size)
        text = message.value.decode()
        if missing:
            raise KernelError(text)
        return text

    def classify_workspace_bytes(self, params: ForwardParams, block_n: int) -> int:
        """Return how much device memory a classification needs."""
        return self._library.flashmask_cuda_classify_workspace(ctypes.byref(params), block_n)

    def classify(self, params: ForwardParams, block_m: int, block_n: int, backward: bool, kinds: Any) -> None:
        """Launch the classification into ``kinds``; raises KernelError."""
        error = self._library.flashmask_cuda_classify(
            ctypes.byref(params), block_m, block_n, int(backward), ctypes.c_void_p(kinds.data_ptr())
        )
        if error:
            raise KernelError(f"flashmask_cuda_classify: CUDA error {error}")

    def _call(self, name: str, *arguments: Any) -> None:
        message = ctypes.create_string_buffer(1024)
        function = getattr(self._library, f"flashmask_cuda_{name}")
        if function(self._family, *arguments, message, ctypes.c_size_t(len(message))):
            raise KernelError(message.value.decode())


def _pass_of(params: ForwardParams | BackwardParams) -> str:
    return "forward" if isinstance(params, ForwardParams) else "backward"


def _dtype(tensor: Any) -> int:
    return ckernels.DTYPES[str(tensor.dtype).removeprefix("torch.")]


def _shape(q: Any, k: Any, v: Any) -> ShapeStruct:
    batch, seqlen_q, heads_q, head_dim = q.shape
    return ShapeStruct(batch, seqlen_q, k.shape[1], heads_q, k.shape[2], head_dim, v.shape[3])


def _tensor(tensor: Any) -> TensorStruct:
    if tensor is None:
        return TensorStruct(None, 0, 0, 0)
    return TensorStruct(tensor.data_ptr(), *(tensor.stride(dim) for dim in range(3)))
