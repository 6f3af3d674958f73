"""Checking results against the definition, and timing jobs in turns on a GPU."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from turns import balanced_rounds, orders_of

from paddle_flashmask.masks import ColumnMask

# Rounding to bfloat16 explains 0.2 to 0.3 % of a result's norm and up to 1.1 % of a row's (measured at 4096
# tokens; a row's norm plus the typical one's, for some are nearly zero). lse is float32 and hardly rounded.
# Leaving one tile of 128 K tokens out everywhere changes a result by 2 %, in a single row its lse by 5e-4.
NORM_TOLERANCE, ROW_TOLERANCE, LSE_TOLERANCE = 0.01, 0.05, 1e-4
# A row that sees two or three keys loses more: its gradient is what is left of terms that cancel, one of them
# made from the rounded output (0.078 seen once in a million rows on an H200). A wrong tile spoils 64 or more.
FEW_ROWS, FEW_ROWS_TOLERANCE = 16, 0.25

WARMUPS = 10
MAX_REPETITIONS = 100
# Warm-ups and repetitions at least, the latter where one round of all takes longer than SLOW_ROUND seconds.
MINIMUMS, SLOW_MINIMUMS, SLOW_ROUND = (2, 5), (1, 3), 0.5
LONGEST_ROUND = 1.0  # seconds, up to which a clock's own minimum holds
FLUSH_BYTES = 1 << 28  # several times any L2
MATMUL_SIZE = 8192


class WrongResultError(RuntimeError):
    """A result differs from the reference by more than rounding explains."""


@torch.no_grad()
def reference_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    mask: ColumnMask,
    *,
    rows: int = 1024,
) -> dict[str, torch.Tensor]:
    """Attention and its gradients for one head, in float32, so many rows at a time.

    Args:
        q: and k, v, dout: ``[S, D]``.
        mask: of one sample and head.
        rows: of a chunk; it takes ``20 * rows * S`` bytes.

    Returns:
        ``o``, ``dq``, ``dk``, ``dv`` ``[S, D]`` and ``lse`` ``[S]``.
    """
    q, k, v, dout = (tensor.float() for tensor in (q, k, v, dout))
    seqlen, head_dim = q.shape
    scale = head_dim**-0.5
    o, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    lse = torch.full((seqlen,), -torch.inf, device=q.device)
    slots = [
        tuple(torch.from_numpy(bound[0, 0]).to(q.device) for bound in slot)  # masked rows, [start, end)
        for slot in (mask.lower, mask.upper)
    ]
    for begin in range(0, seqlen, rows):
        end = min(begin + rows, seqlen)
        chunk = slice(begin, end)
        dead = torch.zeros(seqlen, dtype=torch.bool, device=q.device)
        for first, last in slots:
            dead |= (first <= begin) & (last >= end)
        live = (~dead).nonzero()[:, 0]
        i = torch.arange(begin, end, device=q.device)[:, None]
        hidden = torch.zeros(end - begin, len(live), dtype=torch.bool, device=q.device)
        for first, last in slots:
            hidden |= (i >= first[live]) & (i < last[live])

        scores = (q[chunk] @ k[live].T).mul_(scale).masked_fill_(hidden, -torch.inf)
        lse[chunk] = scores.logsumexp(1)
        p = torch.exp_(scores.sub_(lse[chunk].nan_to_num(neginf=0.0)[:, None]))
        o[chunk] = p @ v[live]
        dv.index_add_(0, live, p.T @ dout[chunk])
        delta = (o[chunk] * dout[chunk]).sum(1, keepdim=True)
        ds = (dout[chunk] @ v[live].T).sub_(delta).mul_(p).mul_(scale)
        dq[chunk] = ds @ k[live]
        dk.index_add_(0, live, ds.T @ q[chunk])
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


# By name, sample and head; dk and dv are of key heads.
Reference = dict[tuple[str, int, int], torch.Tensor]


def reference_heads(tensors: list[torch.Tensor], mask: ColumnMask) -> Reference:
    """The reference for the first and the last sample and key head, with the query heads that share it.

    For very long sequences of the last one only. q and dout are [B, S, H, D], k and v [B, S, Hk, D].
    """
    q, k, v, dout = tensors
    batch, seqlen, heads, _ = q.shape
    key_heads = k.shape[2]
    chosen = {(batch - 1, key_heads - 1)} | ({(0, 0)} if seqlen <= 32768 else set())
    found: Reference = {}
    for b, key_head in sorted(chosen):
        sums = {name: torch.zeros_like(k[b, :, key_head], dtype=torch.float32) for name in ("dk", "dv")}
        group = heads // key_heads
        for h in range(key_head * group, (key_head + 1) * group):
            one = reference_head(q[b, :, h], k[b, :, key_head], v[b, :, key_head], dout[b, :, h], mask)
            for name, value in one.items():
                if name in sums:
                    sums[name] += value
                else:
                    found[name, b, h] = value
        found |= {(name, b, key_head): value for name, value in sums.items()}
    return found


@torch.no_grad()
def check(results: Mapping[str, torch.Tensor], reference: Reference) -> float:
    """Compare results, ``o``, ``dq`` [B, S, H, D], ``dk``, ``dv`` [B, S, Hk, D], perhaps ``lse`` [B, H, S].

    Returns:
        ||result - reference|| / ||reference||, the worst of the tensors but lse.

    Raises:
        WrongResultError: it is off by more than the tolerance, or rows are, or something is NaN.
    """
    worst = 0.0
    for name, result in results.items():
        if name != "lse" and not bool(result.isfinite().all()):
            raise WrongResultError(f"{name} is not finite")
        for (of, b, h), expected in reference.items():
            if of != name:
                continue
            where = f"{name}, sample {b}, head {h}"
            if name == "lse":
                _check_lse(where, result[b, h], expected)
                continue
            error = result[b, :, h].float() - expected
            norms = expected.norm(dim=1)
            typical = norms.square().mean().sqrt()
            of_all = float(error.norm() / expected.norm())
            of_rows = error.norm(dim=1) / (norms + typical)
            row = int(of_rows.argmax())
            off = int((of_rows > ROW_TOLERANCE).sum())
            if (
                not of_all <= NORM_TOLERANCE
                or off >= FEW_ROWS
                or not float(of_rows[row]) <= FEW_ROWS_TOLERANCE
            ):
                raise WrongResultError(
                    f"{where}: off by {of_all:.2g} of its norm, {off} rows by more than {ROW_TOLERANCE}, "
                    f"row {row} by {float(of_rows[row]):.2g}"
                )
            worst = max(worst, of_all)
    return worst


def _check_lse(where: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    empty = expected.isneginf()
    if not torch.equal(result.isneginf(), empty):
        raise WrongResultError(f"{where}: -inf on other rows than those without a visible key")
    error = float(torch.where(empty, 0.0, result - expected).abs().max())
    if not error <= LSE_TOLERANCE:
        raise WrongResultError(f"{where}: off by {error:.2g}")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of each repetition of one job."""

    samples: list[float]
    warmups: int

    @property
    def median(self) -> float:
        """The median, in milliseconds."""
        return statistics.median(self.samples)


class Clock:
    """Times jobs on the current device.

    ``rounds``: warm-ups (up to 10) and repetitions at least, where a round of all takes a second at most.
    """

    def __init__(self, rounds: int = 0) -> None:
        self._rounds = rounds
        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        factors = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16)
        product = torch.empty_like(factors[0])
        self._matmul = lambda: torch.mm(factors[0], factors[1], out=product)

    def take_turns(
        self, jobs: Mapping[str, Callable[[], Any]], seconds: float
    ) -> tuple[dict[str, Timing], float]:
        """Time jobs, and a large matmul, in turns; every run starts with a cold L2.

        The order changes from round to round, so that each job follows each other one as often; but where a
        round takes half a second there are too few rounds for that.

        Args:
            jobs: by name; each has run before.
            seconds: to take for warming up, and again for timing, per job. 10 warm-ups and as many
                repetitions as fit, but at least the clock's ``rounds``, or 2 and 5 (1 and 3 where a round
                takes half a second), rounded up to what balances the order.

        Returns:
            timings by name, and the matmul's TFLOP/s.
        """
        everything = {"matmul": self._matmul, **jobs}
        once = sum(sum(samples) for samples in self.run(everything, 1).values()) / 1e3
        fitting = int(seconds * len(everything) / once)
        min_warmups, min_repetitions = SLOW_MINIMUMS if once > SLOW_ROUND else MINIMUMS
        if self._rounds and once <= LONGEST_ROUND:
            min_warmups, min_repetitions = min(self._rounds, WARMUPS), self._rounds
        warmups = max(min_warmups, min(fitting, WARMUPS))
        self.run(everything, warmups - 1)  # the round above was one
        repetitions = max(min_repetitions, min(fitting, MAX_REPETITIONS))
        if once <= SLOW_ROUND:
            repetitions = balanced_rounds(len(everything), repetitions)
        samples = self.run(everything, repetitions)
        timings = {name: Timing(samples[name], warmups) for name in everything}
        return timings, 2 * MATMUL_SIZE**3 / timings.pop("matmul").median / 1e9

    def run(self, jobs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
        """Launch all rounds without waiting in between, so that no job waits for Python; milliseconds."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in jobs}
        names = list(jobs)
        for order in orders_of(len(names), rounds):
            for name in (names[i] for i in order):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._flushed.zero_()
                start.record()
                jobs[name]()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def card_and_driver() -> tuple[str, str]:
    """Return the current device's name and its driver's version."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    return torch.cuda.get_device_name(), done.stdout.split()[0]
