"""The CUDA kernels on torch tensors: results and workspaces start as poison, what lies around is checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_calls import (
    BackwardParams,
    CudaLibrary,
    ForwardParams,
    Options,
    backward_params,
    classify_params,
    forward_params,
)

GRADIENTS = ("dq", "dk", "dv")
GUARD_BYTES = 4096  # keeps the 256-byte alignment that workspaces are promised
POISON = 0xFF  # NaN in every floating-point type, -1 in every signed integer
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# How a [B, S, H, D] tensor may lie in memory; rows stay contiguous and 16-byte aligned.
LAYOUTS = ("contiguous", "heads_first", "tokens_first", "padded")


class Buffer:
    """A tensor of poison between poison: reading around it, writing around it, not writing it, all show."""

    def __init__(
        self,
        shape: Iterable[int],
        dtype: torch.dtype,
        layout: str = "contiguous",
        device: torch.device | str = "cuda",
    ):
        shape = tuple(shape)
        extent, restore = _lay_out(shape, layout)
        size = torch.Size(extent).numel() * dtype.itemsize
        self._memory = torch.full(
            (GUARD_BYTES + size + GUARD_BYTES,), POISON, dtype=torch.uint8, device=device
        )
        whole = self._memory[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(extent)
        self.tensor = whole.permute(restore)[tuple(map(slice, shape))]

    def assert_intact_around(self, name: str) -> None:
        """That nothing but the tensor's own elements was written; waits for the device."""
        around = torch.cat([self._memory[:GUARD_BYTES], self._memory[-GUARD_BYTES:]])
        if self.tensor.nbytes < self._memory.nbytes - around.nbytes:  # there are gaps inside too
            values = self.tensor.clone()
            self.tensor.view(_INTEGERS[values.dtype.itemsize]).fill_(-1)
            around = self._memory.clone()
            self.tensor.copy_(values)
        assert bool((around == POISON).all()), f"{name}: memory around it was written"


def _lay_out(shape: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The extent in memory, and the permutation that brings [B, S, H, D] back."""
    identity = tuple(range(len(shape)))
    if layout == "contiguous":
        return shape, identity
    batch, seqlen, heads, dim = shape
    if layout == "heads_first":
        return (batch, heads, seqlen, dim), (0, 2, 1, 3)
    if layout == "tokens_first":
        return (seqlen, batch, heads, dim), (1, 0, 2, 3)
    assert layout == "padded", f"layout: expected one of {LAYOUTS}, got {layout}"
    return (batch, seqlen + 3, heads + 1, dim + 8), identity


def placed(values: torch.Tensor, layout: str = "contiguous") -> torch.Tensor:
    """The same values in memory laid out so, NaN in the gaps and around."""
    tensor = Buffer(values.shape, values.dtype, layout, values.device).tensor
    return tensor.copy_(values)


@dataclass(frozen=True)
class Kernels:
    """Runs both passes on torch's current stream."""

    binary: CudaLibrary

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: Options,
        *,
        layout: str = "contiguous",
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out, laid out as asked, and lse ``[B, Hq, Sq]``; or write those of ``into``, unchecked."""
        results = _Results(q.device, into)
        out = results.make("out", (*q.shape[:3], v.shape[3]), q.dtype, layout)
        lse = results.make("lse", (q.shape[0], q.shape[2], q.shape[1]), torch.float32)
        self._run(forward_params(q, k, v, out, lse, options, _stream(q)), results)
        return out, lse

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        options: Options,
        *,
        dlse: torch.Tensor | None = None,
        wanted: Iterable[str] = GRADIENTS,
        layout: str = "contiguous",
        into: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Return the wanted gradients by name, laid out as asked; or write those of ``into``, unchecked."""
        like = dict(zip(GRADIENTS, (q, k, v), strict=True))
        results = _Results(q.device, into)
        gradients = {name: results.make(name, like[name].shape, q.dtype, layout) for name in wanted}
        params = backward_params(q, k, v, out, lse, dout, dlse, gradients, options, _stream(q))
        self._run(params, results)
        return gradients

    def describe(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> str:
        """Which kernel ``forward`` would run; nothing is launched."""
        return self.binary.describe(forward_params(q, k, v, q, q, options, _stream(q)))

    def classify(
        self, seqlen_q: int, seqlen_k: int, options: Options, block_m: int, block_n: int, *, backward: bool
    ) -> torch.Tensor:
        """Return the kind of every tile, int8 ``[Bm, Hm, ceil(Sq / block_m), ceil(Sk / block_n)]``."""
        device = torch.device("cuda", torch.cuda.current_device())
        results = _Results(device, None)
        params = classify_params(seqlen_q, seqlen_k, options, torch.cuda.current_stream().cuda_stream)
        planes = (params.mask.batch, params.mask.heads)
        tiles = (-(-seqlen_q // block_m), -(-seqlen_k // block_n))
        kinds = results.make("kinds", (*planes, *tiles), torch.int8)
        size = self.binary.classify_workspace_bytes(params, block_n)
        params.workspace = results.make("workspace", (size,), torch.int8).data_ptr()
        self.binary.classify(params, block_m, block_n, backward, kinds)
        results.assert_intact_around()
        return kinds

    def _run(self, params: ForwardParams | BackwardParams, results: _Results) -> None:
        size = self.binary.workspace_bytes(params)
        workspace = results.make("workspace", (size,), torch.int8)
        assert workspace.numel() >= size, "the workspace that the caller brought is too small"
        params.workspace = workspace.data_ptr()
        self.binary.launch(params)
        results.assert_intact_around()


class HopperKernels(Kernels):
    """The sm_90 family by name: what it lacks is skipped, not left to another."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, *others: Any, **more: Any) -> Any:
        """As of Kernels."""
        if others[1].dropout_p > 0 or 0 in (*q.shape, *k.shape):
            pytest.skip("the sm_90 kernels have no dropout and take no empty tensors")
        return super().forward(q, k, *others, **more)


class _Results:
    """The buffers of one call, and the tensors that its caller brought."""

    def __init__(self, device: torch.device, given: Mapping[str, torch.Tensor] | None):
        self._device = device
        self._given = given or {}
        self._buffers: dict[str, Buffer] = {}

    def make(
        self, name: str, shape: Iterable[int], dtype: torch.dtype, layout: str = "contiguous"
    ) -> torch.Tensor:
        if name in self._given:
            return self._given[name]
        self._buffers[name] = Buffer(shape, dtype, layout, self._device)
        return self._buffers[name].tensor

    def assert_intact_around(self) -> None:
        for name, buffer in self._buffers.items():
            buffer.assert_intact_around(name)


def _stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream
