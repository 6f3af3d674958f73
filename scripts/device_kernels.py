"""The CUDA kernels' C interface (csrc/include/flashmask) on torch tensors: for tests and benchmarks.

Tensors are ``q [B, Sq, Hq, D]``, ``k [B, Sk, Hk, D]``, ``v [B, Sk, Hk, Dv]`` on the current device, float16
or bfloat16, of any strides whose last is one element. Nothing is checked beyond what would crash. Paddle is
not needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ckernels import (
    DTYPES,
    VISITS,
    BackwardParams,
    DropoutStruct,
    ForwardParams,
    KernelError,
    MaskStruct,
    ShapeStruct,
    TensorStruct,
)

WORKSPACE_ALIGNMENT = 256


@dataclass(frozen=True)
class Options:
    """What a call takes besides its tensors. ``softmax_scale=None`` is ``D ** -0.5``."""

    indices: torch.Tensor | None = None  # int32 [Bm, Hm, Sk, C], contiguous
    dense: torch.Tensor | None = None  # bool [Bm, Hm, Sq, Sk], contiguous; read with visit="dense" only
    causal: bool = False
    softmax_scale: float | None = None
    dropout_p: float = 0.0
    seed_offset: torch.Tensor | None = None  # int64 [2]; given when dropout_p > 0
    visit: str = "skip"

    def mask(self) -> MaskStruct:
        """Return the mask struct; it points into ``indices`` and ``dense``."""
        shaped = self.indices if self.indices is not None else self.dense
        batch, heads = (1, 1) if shaped is None else shaped.shape[:2]
        for tensor, dtype in ((self.indices, torch.int32), (self.dense, torch.bool)):
            assert tensor is None or (tensor.is_contiguous() and tensor.dtype == dtype), "see Options"
        return MaskStruct(
            _address(self.indices),
            _address(self.dense),
            batch,
            heads,
            0 if self.indices is None else self.indices.shape[3],
            int(self.causal),
        )

    def dropout(self) -> DropoutStruct:
        """Return the dropout struct; it points into ``seed_offset``."""
        if self.dropout_p == 0:
            return DropoutStruct(None, 0.0)
        assert self.seed_offset is not None, "see Options"
        return DropoutStruct(_address(self.seed_offset), self.dropout_p)

    def scale(self, head_dim: int) -> float:
        """Return the softmax scale for this head dim."""
        return head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale


class Call:
    """A launch made ready: calling it launches once more, into the same ``results`` and ``workspace``."""

    def __init__(
        self,
        library: ctypes.CDLL,
        entry: str,
        params: ctypes.Structure,
        results: dict[str, torch.Tensor],
        keep_alive: tuple[Any, ...],
    ):
        self.results = results
        self._function = getattr(library, entry)
        self._params: Any = params
        self._keep_alive = keep_alive  # q, and whatever else `params` points into
        size = ctypes.c_int64()
        _check(getattr(library, f"{entry}_workspace"), ctypes.byref(params), ctypes.byref(size))
        self.workspace_bytes = size.value
        # All ones: a kernel that reads what it has not written meets NaN.
        self.workspace = _aligned(size.value, device=keep_alive[0].device).fill_(0xFF)
        self._params.workspace = _address(self.workspace)

    def __call__(self) -> dict[str, torch.Tensor]:
        """Launch on torch's current stream; return ``results``. Raises KernelError."""
        self._params.stream = torch.cuda.current_stream().cuda_stream
        _check(self._function, ctypes.byref(self._params))
        return self.results


class DeviceKernels:
    """The functions of a library built by ``scripts/build_kernels.py --cuda``, for one architecture."""

    def __init__(self, library: Path | str, architecture: str = "sm80"):
        self.library = ctypes.CDLL(str(library))
        self.library.flashmask_cuda_classify_workspace.restype = ctypes.c_int64
        self.architecture = architecture

    def prepare_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Options,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> Call:
        """Make a forward launch ready; results ``o`` and ``lse``, new ones (NaN before it) if not given."""
        if out is None:
            out = _nan((*q.shape[:3], v.shape[3]), q)
        if lse is None:
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("nan"), device=q.device)
        params = ForwardParams(
            shape=_shape(q, k, v),
            dtype=_dtype(q),
            visit=VISITS[options.visit],
            q=_tensor(q),
            k=_tensor(k),
            v=_tensor(v),
            o=_tensor(out),
            lse=_address(lse),
            mask=options.mask(),
            dropout=options.dropout(),
            softmax_scale=options.scale(q.shape[3]),
        )
        entry = f"flashmask_{self.architecture}_forward"
        return Call(self.library, entry, params, {"o": out, "lse": lse}, (q, k, v, options))

    def prepare_backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        options: Options,
        *,
        dlse: torch.Tensor | None = None,
        wanted: Sequence[str] = ("dq", "dk", "dv"),
        into: dict[str, torch.Tensor] | None = None,
        deterministic: bool = False,
    ) -> Call:
        """Make a backward launch ready; results are the wanted gradients, those of ``into`` or new ones."""
        like = {"dq": q, "dk": k, "dv": v}
        into = into or {}
        gradients = {
            name: into[name] if name in into else _nan(like[name].shape, like[name]) for name in wanted
        }
        params = BackwardParams(
            shape=_shape(q, k, v),
            dtype=_dtype(q),
            visit=VISITS[options.visit],
            q=_tensor(q),
            k=_tensor(k),
            v=_tensor(v),
            o=_tensor(o),
            dout=_tensor(dout),
            dq=_tensor(gradients.get("dq")),
            dk=_tensor(gradients.get("dk")),
            dv=_tensor(gradients.get("dv")),
            lse=_address(lse),
            dlse=_address(dlse),
            mask=options.mask(),
            dropout=options.dropout(),
            softmax_scale=options.scale(q.shape[3]),
            deterministic=int(deterministic),
        )
        entry = f"flashmask_{self.architecture}_backward"
        return Call(self.library, entry, params, gradients, (q, k, v, o, lse, dout, dlse, options))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, **results: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward pass; return ``(o, lse)``. Keywords are those of `prepare_forward`."""
        done = self.prepare_forward(q, k, v, options, **results)()
        return done["o"], done["lse"]

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        options: Options,
        **keywords: Any,
    ) -> dict[str, torch.Tensor]:
        """Run the backward pass; return the gradients by name. Keywords are those of `prepare_backward`."""
        return self.prepare_backward(q, k, v, o, lse, dout, options, **keywords)()

    def classify(
        self,
        options: Options,
        *,
        seqlen_q: int,
        seqlen_k: int,
        block_m: int,
        block_n: int,
        backward: bool = False,
        device: str = "cuda",
    ) -> torch.Tensor:
        """What forward's scan, or backward's row runs, say of every tile.

        Returns:
            int8 ``[Bm, Hm, ceil(Sq / block_m), ceil(Sk / block_n)]``, as ``ColumnMask.block_map`` has it.
        """
        mask = options.mask()
        params = ForwardParams(
            shape=ShapeStruct(mask.batch, seqlen_q, seqlen_k, mask.heads, mask.heads, 0, 0),
            visit=VISITS[options.visit],
            mask=mask,
            stream=torch.cuda.current_stream().cuda_stream,
        )
        size = self.library.flashmask_cuda_classify_workspace(ctypes.byref(params), ctypes.c_int32(block_n))
        workspace = _aligned(size, device=device)
        params.workspace = _address(workspace)
        tiles = (-(-seqlen_q // block_m), -(-seqlen_k // block_n))
        kinds = torch.full((mask.batch, mask.heads, *tiles), -1, dtype=torch.int8, device=device)
        error = self.library.flashmask_cuda_classify(
            ctypes.byref(params),
            *(ctypes.c_int32(value) for value in (block_m, block_n, backward)),
            ctypes.c_void_p(_address(kinds)),
        )
        if error:
            raise KernelError(f"classify: cudaError_t {error}")
        torch.cuda.current_stream().synchronize()  # the workspace ends with this call
        return kinds


def _check(function: Any, *arguments: Any) -> None:
    message = ctypes.create_string_buffer(1024)
    if function(*arguments, message, ctypes.c_size_t(len(message))):
        raise KernelError(message.value.decode())


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _tensor(tensor: torch.Tensor | None) -> TensorStruct:
    if tensor is None:
        return TensorStruct(None, 0, 0, 0)
    assert tensor.numel() == 0 or tensor.shape[3] == 1 or tensor.stride(3) == 1, "the last dim is contiguous"
    return TensorStruct(tensor.data_ptr(), *tensor.stride()[:3])


def _shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ShapeStruct:
    batch, seqlen_q, heads_q, head_dim = q.shape
    return ShapeStruct(batch, seqlen_q, k.shape[1], heads_q, k.shape[2], head_dim, v.shape[3])


def _dtype(tensor: torch.Tensor) -> int:
    return DTYPES[str(tensor.dtype).removeprefix("torch.")]


def _nan(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.full(tuple(shape), float("nan"), dtype=like.dtype, device=like.device)


def _aligned(size: int, *, device: torch.device | str) -> torch.Tensor:
    """Uninitialised bytes whose address is a multiple of WORKSPACE_ALIGNMENT."""
    buffer = torch.empty(size + WORKSPACE_ALIGNMENT, dtype=torch.uint8, device=device)
    return buffer[-buffer.data_ptr() % WORKSPACE_ALIGNMENT :][:size]
