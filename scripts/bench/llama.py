"""Llama-2's decoder layers in torch, full or by LoRA, with full recompute; weights are random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q, k, v [B, S, H, D] to o
Tables = tuple[torch.Tensor, torch.Tensor]
LORA_RANK = 8


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; Llama-2-7B's."""

    hidden: int = 4096
    heads: int = 32
    intermediate: int = 11008

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden // self.heads

    @staticmethod
    def tiny() -> Shape:
        """Sizes to try things out with."""
        return Shape(hidden=64, heads=2, intermediate=128)


class Linear(nn.Module):
    """A projection without bias; with LoRA its weight is frozen and a product of two thin ones is trained."""

    def __init__(self, inputs: int, outputs: int, lora: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * inputs**-0.5, requires_grad=not lora)
        self.down = nn.Parameter(torch.randn(LORA_RANK, inputs) * inputs**-0.5) if lora else None
        self.up = nn.Parameter(torch.zeros(outputs, LORA_RANK)) if lora else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project the last dim."""
        y = functional.linear(x, self.weight)
        if self.down is None:
            return y
        return y + functional.linear(functional.linear(x, self.down), self.up)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual around it."""

    def __init__(self, shape: Shape, lora: bool = False):
        super().__init__()
        self.shape = shape
        hidden, wide = shape.hidden, shape.intermediate
        self.q, self.k, self.v, self.o = (Linear(hidden, hidden, lora) for _ in range(4))
        self.gate, self.up = (Linear(hidden, wide, lora) for _ in range(2))
        self.down = Linear(wide, hidden, lora)
        self.norms = nn.ParameterList(
            nn.Parameter(torch.ones(hidden), requires_grad=not lora) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, tables: Tables, attend: Attend) -> torch.Tensor:
        """Return the layer's output for its input ``[B, S, hidden]``."""
        y = functional.rms_norm(x, (self.shape.hidden,), self.norms[0], 1e-5)
        q, k, v = (
            project(y).unflatten(-1, (self.shape.heads, self.shape.head_dim))
            for project in (self.q, self.k, self.v)
        )
        x = x + self.o(attend(rotate(q, tables), rotate(k, tables), v).flatten(-2))
        y = functional.rms_norm(x, (self.shape.hidden,), self.norms[1], 1e-5)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def rotary_tables(seqlen: int, head_dim: int, device: str, dtype: torch.dtype) -> Tables:
    """Return cosines and sines ``[S, 1, D / 2]`` of the rotary positions."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(seqlen, device=device)[:, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, tables: Tables) -> torch.Tensor:
    """Apply the rotary positions to ``[B, S, H, D]``."""
    cosine, sine = tables
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def recomputed(layer: DecoderLayer, x: torch.Tensor, tables: Tables, attend: Attend) -> torch.Tensor:
    """Run a layer and keep nothing but its input; backward runs it again."""
    return checkpoint(layer, x, tables, attend, use_reentrant=False)
