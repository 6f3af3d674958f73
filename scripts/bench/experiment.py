"""The device of the experiments beside the kernel tables: its kernels, clock and memory. Needs torch."""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import measure
import torch
from cells import Run
from paper_data import Sample
from provenance import make_run, versions
from torch_attention import load

VANILLA_TOLERANCE = 0.02  # of the norm: its scores are rounded too


class Device:
    """The device of a run: its kernels, its provenance, its clock.

    ``few_rows``: whether calls with few query rows are among what is measured.
    """

    def __init__(self, arguments: argparse.Namespace, command: str, few_rows: bool = False):
        self.name = arguments.device
        self.dtype = torch.float32 if self.name == "cpu" else torch.bfloat16
        preparing = getattr(arguments, "prepare", None) is not None
        # Letting peers compile takes no kernels of ours.
        self.binary = None if preparing else load(arguments.binary, arguments.kernels, self.name)
        if self.name == "cpu":
            card, driver = platform.processor() or platform.machine(), "none"
        else:
            card, driver = measure.card_and_driver()
        kernels = "cpu" if self.name == "cpu" else arguments.kernels
        self.run: Run = make_run(
            kernels, card, driver, versions(), command, arguments.commit, few_rows=few_rows
        )

    @cached_property
    def _flushed(self) -> torch.Tensor:
        """What is written to empty L2; made when it is needed, for it would count in peaks."""
        return torch.empty(measure.FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.name != "cpu":
            torch.cuda.synchronize()

    def time(self, job: Callable[[], Any], repetitions: int, warmups: int = 1) -> list[float]:
        """Return milliseconds of each repetition, each with a cold L2."""
        for _ in range(warmups):
            job()
        if self.name == "cpu":
            return [self.time_once(job) for _ in range(repetitions)]
        pairs = []
        for _ in range(repetitions):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flushed.zero_()
            start.record()
            job()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]

    def time_once(self, job: Callable[[], Any]) -> float:
        """Return the milliseconds that a user waits for a job, what Python does included."""
        self.synchronize()
        start = time.perf_counter()
        job()
        self.synchronize()
        return 1e3 * (time.perf_counter() - start)

    def allocated(self) -> int:
        """Return how many bytes torch holds now (CPU: 0)."""
        return 0 if self.name == "cpu" else torch.cuda.memory_allocated()

    def peak_memory(self, job: Callable[[], Any]) -> int:
        """Run a job; return how many bytes torch held at most meanwhile (CPU: 0)."""
        if self.name == "cpu":
            job()
            return 0
        torch.cuda.reset_peak_memory_stats()
        job()
        return torch.cuda.max_memory_allocated()

    def time_and_peak(self, job: Callable[[], Any]) -> tuple[float, int]:
        """Run a job once; return its milliseconds and how many bytes torch held at most."""
        milliseconds: list[float] = []
        peak = self.peak_memory(lambda: milliseconds.append(self.time_once(job)))
        return milliseconds[0], peak

    def random(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Return normal values."""
        generator = torch.Generator(self.name).manual_seed(seed)
        return torch.randn(*shape, generator=generator, device=self.name, dtype=self.dtype)

    def attention_tensors(self, seqlen: int, heads: int, head_dim: int) -> list[torch.Tensor]:
        """Return q, k, v ``[1, S, H, D]`` with gradients, and dout."""
        made = [self.random(1, seqlen, heads, head_dim, seed=seed) for seed in range(4)]
        return [x.requires_grad_() for x in made[:3]] + made[3:]


def check(
    attend: Callable[..., torch.Tensor],
    sample: Sample,
    tensors: list[torch.Tensor],
    tolerance: float = measure.NORM_TOLERANCE,
) -> None:
    """Compare o, dq, dk, dv of q, k, v and dout with the definition, as ``compare`` does."""
    *inputs, dout = tensors
    out = attend(*inputs)
    gradients = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, inputs, dout), strict=True))
    compare({"o": out.detach(), **gradients}, tensors, sample, tolerance)


def compare(
    found: Mapping[str, torch.Tensor],
    tensors: list[torch.Tensor],
    sample: Sample,
    tolerance: float = measure.NORM_TOLERANCE,
) -> None:
    """Compare results ``[1, S, H, D]`` with the definition; raises WrongResultError.

    All must be finite. The last head's may be off by ``tolerance`` of their norm, and in a row by what a row
    of few keys may be: those before it must have been stepped over; one is enough at a million tokens.
    """
    expected = measure.reference_head(*(x.detach()[0, :, -1] for x in tensors), sample.mask)
    for name, result in found.items():
        if not result.isfinite().all():
            raise measure.WrongResultError(f"{name}: not finite")
        difference, norms = result[0, :, -1].float() - expected[name], expected[name].norm(dim=-1)
        error = float(difference.norm() / norms.norm())
        if not error <= tolerance:
            raise measure.WrongResultError(f"{name}: off by {error:.2g} of its norm")
        worst = float((difference.norm(dim=-1) / (norms + norms.square().mean().sqrt())).max())
        if not worst <= measure.FEW_ROWS_TOLERANCE:
            raise measure.WrongResultError(f"{name}: off by {worst:.2g} in a row")


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """torch's attention of ``[B, S, H, D]``, by the kernel that it chooses; masks must have 4 dimensions."""
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)


def failure_reason(failure: Exception) -> str:
    """Return an exception in a line; for one of memory, "out of memory"."""
    if isinstance(failure, torch.OutOfMemoryError):
        return "out of memory"
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
