"""Our kernels under torch's autograd: on CUDA through the C interface, on a CPU too, to try things out.

Benchmarks drive them so because no CUDA build of Paddle on PyPI has Hopper code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ckernels
import kernel_calls
import torch

from paddle_flashmask.masks import ColumnMask

WORKSPACE_ALIGNMENT = 256


def give_workspace(library: kernel_calls.CudaLibrary, params: Any, device: torch.device) -> torch.Tensor:
    """Point a call's params to a workspace of torch's; return it, to be kept until the call was launched."""
    size = library.workspace_bytes(params)
    memory = torch.empty(size + WORKSPACE_ALIGNMENT, dtype=torch.uint8, device=device)
    workspace = memory[-memory.data_ptr() % WORKSPACE_ALIGNMENT :][:size]
    params.workspace = workspace.data_ptr()
    return workspace


def load(path: Path, family: str, device: str) -> kernel_calls.CudaLibrary | ckernels.Kernels:
    """Load the library of a device's kernels."""
    return ckernels.Kernels(path) if device == "cpu" else kernel_calls.CudaLibrary(path, family)


class Attention:
    """Attention under one mask; call it with q, k, v ``[B, S, H, D]``, or change the mask by ``set_mask``."""

    def __init__(self, library: kernel_calls.CudaLibrary | ckernels.Kernels, mask: ColumnMask, device: str):
        self.binary, self.device = library, device
        self.set_mask(mask)

    def set_mask(self, mask: ColumnMask) -> None:
        """Take another mask: its indices go to the device."""
        self.indices: Any
        self.indices, self.causal = mask.to_startend_row_indices()
        if self.device != "cpu" and self.indices is not None:
            self.indices = torch.from_numpy(self.indices).to(self.device)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return o ``[B, S, H, D]``."""
        return _Function.apply(q, k, v, self)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any]:
        """Return o and lse."""
        if isinstance(self.binary, ckernels.Kernels):
            options = ckernels.Options(indices=self.indices, causal=self.causal)
            out, lse = self.binary.forward(*(x.detach().numpy() for x in (q, k, v)), options)
            return torch.from_numpy(out), torch.from_numpy(lse)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device=q.device)
        params = kernel_calls.forward_params(q, k, v, out, lse, self._options(), _stream())
        workspace = give_workspace(self.binary, params, q.device)
        self.binary.launch(params)
        del workspace
        return out, lse

    def backward(self, tensors: tuple[torch.Tensor, ...], dout: torch.Tensor) -> list[torch.Tensor]:
        """Return dq, dk, dv of what was saved: q, k, v, o, lse."""
        q, k, v, out, lse = tensors
        dout = dout.contiguous()
        if isinstance(self.binary, ckernels.Kernels):
            options = ckernels.Options(indices=self.indices, causal=self.causal)
            arrays = (x.detach().numpy() for x in (q, k, v, out, lse, dout))
            found = self.binary.backward(*arrays, options)
            return [torch.from_numpy(found[name]) for name in ("dq", "dk", "dv")]
        like = zip(("dq", "dk", "dv"), (q, k, v), strict=True)
        gradients = {name: torch.empty_like(x, memory_format=torch.contiguous_format) for name, x in like}
        params = kernel_calls.backward_params(
            *(q, k, v, out, lse, dout, None, gradients, self._options(), _stream())
        )
        workspace = give_workspace(self.binary, params, q.device)
        self.binary.launch(params)
        del workspace
        return [*gradients.values()]

    def _options(self) -> kernel_calls.Options:
        return kernel_calls.Options(indices=self.indices, causal=self.causal)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        out, lse = attention.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.attention = attention
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*ctx.attention.backward(ctx.saved_tensors, dout), None)
