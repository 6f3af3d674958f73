"""``python -m paddle_flashmask bench``: named masks on one's own device and shape, in about a minute."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from paddle_flashmask.masks import ColumnMask, registry

DEFAULT_SHAPES = {"cpu": (1, 2048, 2048, 8, 8, 64, 64), "gpu": (4, 8192, 8192, 32, 32, 128, 128)}
DEFAULT_DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
COMPARED = "causal_document"  # the mask that a dense mask is tried with; that takes as long for any mask
MIN_REPETITIONS, MAX_REPETITIONS = 2, 20
# Largest difference of two results, relative to the largest value: rounding explains a fraction of it.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}


@dataclass(frozen=True)
class Timing:
    """What one attention took for one mask; milliseconds are medians."""

    mask: str
    rho: float  # block sparsity
    forward: float
    backward: float
    flops: float  # of the visited tiles, both passes

    @property
    def total(self) -> float:
        """Milliseconds of both passes."""
        return self.forward + self.backward

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.flops / self.total * 1e3


@dataclass(frozen=True)
class Report:
    """Everything that was measured. ``dense``: Paddle's attention with a dense mask; None: it did not run."""

    masks: list[Timing]
    dense: Timing | None
    why_not_dense: str
    difference: float  # of our result to that one, relative
    tolerance: float
    left: list[str]  # masks that the time was too short for

    @property
    def verdict(self) -> str:
        """One line."""
        by_name = {timing.mask: timing for timing in self.masks}
        if self.dense is not None and not self.difference <= self.tolerance:
            return f"WRONG RESULTS: they differ from Paddle's attention by {self.difference:.2g}"
        if COMPARED not in by_name:
            return f"no verdict without {COMPARED}"
        packed = by_name[COMPARED]
        parts = []
        if self.dense is not None:
            parts.append(f"{self.dense.total / packed.total:.1f} times as fast as Paddle's dense mask")
        if "full" in by_name:
            parts.append(f"{by_name['full'].total / packed.total:.1f} times as fast as no mask")
        text = f"packed documents (block sparsity {packed.rho:.2f}) run {' and '.join(parts) or 'alone'}"
        if "full" in by_name and len(self.masks) > 1:
            slowest = min(self.masks, key=lambda timing: timing.rate)
            share = slowest.rate / by_name["full"].rate
            text += f"; the least rate is {100 * share:.0f} % of the full mask's ({slowest.mask})"
        return text


class Progress:
    """A bar on a terminal; nothing elsewhere."""

    def __init__(self, steps: int, stream: TextIO):
        self.steps, self.done, self.stream = steps, 0, stream

    def show(self, what: str) -> None:
        """Show what comes next."""
        if self.stream.isatty():
            filled = 30 * self.done // self.steps
            self.stream.write(f"\r[{'#' * filled}{'.' * (30 - filled)}] {what:<28}")
            self.stream.flush()
        self.done += 1

    def clear(self) -> None:
        """Remove the bar."""
        if self.stream.isatty():
            self.stream.write("\r" + " " * 62 + "\r")
            self.stream.flush()


def measure(
    shape: tuple[int, ...],
    dtype: str,
    device: str,
    names: Sequence[str],
    seconds: float,
    stream: TextIO | None = None,
) -> Report:
    """Measure named masks, and Paddle's own attention with a dense mask.

    Args:
        shape: B, Sq, Sk, Hq, Hk, D, Dv with Sq = Sk.
        dtype: of q, k and v.
        device: "cpu" or "gpu".
        names: of the masks.
        seconds: to take in all, about.
        stream: of the progress bar; None: stderr.

    Raises:
        ValueError: Sq and Sk differ, a size is 0, or a name is unknown.
    """
    import paddle

    from paddle_flashmask import attention

    batch, seqlen, seqlen_k, heads_q, heads_k, head_dim, head_dim_v = shape
    if seqlen != seqlen_k or min(shape) == 0:
        raise ValueError(f"shape: expected Sq = Sk and sizes above 0, got {','.join(map(str, shape))}")
    masks = {name: registry.make(name, seqlen) for name in names}
    paddle.set_device(device)
    paddle.seed(0)
    sizes = [(heads_q, head_dim), (heads_k, head_dim), (heads_k, head_dim_v), (heads_q, head_dim_v)]
    tensors = [
        paddle.randn([batch, seqlen, *size], "float32").astype(dtype)  # on the device
        for size in sizes
    ]
    end = time.monotonic() + seconds
    share = seconds / (len(masks) + 3)  # a dense mask takes longer
    progress = Progress(len(masks) + 1, stream or sys.stderr)
    full_flops = 4.0 * seqlen**2 * head_dim * heads_q * batch * 3.5

    def time_one(name: str, attend: Callable[..., Any], rho: float, seconds: float) -> Timing:
        forward, backward = _time(attend, tensors, device, seconds)
        return Timing(name, rho, forward, backward, full_flops * (1 - rho))

    timings: list[Timing] = []
    left: list[str] = []
    for name, mask in masks.items():
        if time.monotonic() > end and timings:
            left.append(name)
            continue
        progress.show(name)
        attend = lambda q, k, v, mask=mask: attention(q, k, v, mask=mask)  # noqa: E731
        timings.append(time_one(name, attend, mask.block_sparsity(128), share))
    dense, difference, why_not = None, 0.0, ""
    progress.show("a dense mask")
    try:
        compared = registry.make(COMPARED, seqlen)
        attend_dense = _dense(compared, heads_q // heads_k)
        own = attention(*tensors[:3], mask=compared).astype("float32")
        other = attend_dense(*tensors[:3]).astype("float32")
        difference = float((own - other).abs().max() / other.abs().max())
        dense = time_one("dense mask", attend_dense, 0.0, share)
    except (RuntimeError, MemoryError, ValueError, NotImplementedError) as error:
        why_not = " ".join(str(error).split())[:100] or type(error).__name__
    progress.clear()
    return Report(timings, dense, why_not, difference, TOLERANCES[dtype], left)


def _dense(mask: ColumnMask, group: int) -> Callable[..., Any]:
    """Paddle's own attention under a dense mask, a bias that is -inf where it hides."""
    import paddle

    visible = paddle.to_tensor(mask.to_dense())
    biases: dict[str, Any] = {}

    def attend(q: Any, k: Any, v: Any) -> Any:
        if not biases:
            hidden = paddle.full(visible.shape, float("-inf"), dtype=q.dtype)
            biases["bias"] = paddle.where(visible, paddle.zeros_like(hidden), hidden)
        if group > 1:
            k, v = (paddle.repeat_interleave(x, group, axis=2) for x in (k, v))
        return paddle.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=biases["bias"])

    return attend


def _time(
    attend: Callable[..., Any], tensors: Sequence[Any], device: str, seconds: float
) -> tuple[float, float]:
    """Milliseconds of forward and of backward: medians of as many repetitions as fit, after a first one."""
    import paddle

    def now() -> float:
        if device == "gpu":
            paddle.device.cuda.synchronize()
        return time.perf_counter()

    inputs = [tensor.detach() for tensor in tensors[:3]]
    for tensor in inputs:
        tensor.stop_gradient = False
    samples: list[tuple[float, float]] = []
    repetitions = 1
    while len(samples) <= repetitions:
        for tensor in inputs:
            tensor.clear_gradient()
        start = now()
        out = attend(*inputs)
        middle = now()
        out.backward(tensors[3])
        stop = now()
        samples.append((1e3 * (middle - start), 1e3 * (stop - middle)))
        if len(samples) == 1:
            fitting = int(seconds / (stop - start)) - 1
            repetitions = max(MIN_REPETITIONS, min(fitting, MAX_REPETITIONS))
    forward, backward = (statistics.median(values) for values in zip(*samples[1:], strict=True))
    return forward, backward


def render(report: Report) -> str:
    """The table and the verdict."""
    timings = [*report.masks, *([report.dense] if report.dense is not None else [])]
    unit, name = (1e12, "TFLOP/s") if max(timing.rate for timing in timings) > 2e12 else (1e9, "GFLOP/s")
    full = next((timing for timing in report.masks if timing.mask == "full"), None)
    lines: list[tuple[str, ...]] = [("", "sparsity", "forward", "backward", "total, ms", name, "times full")]
    for timing in timings:
        own = timing is not report.dense
        lines.append(
            (
                timing.mask if own else "Paddle, dense",
                f"{timing.rho:.3f}" if own else "",
                *(f"{value:.2f}" for value in (timing.forward, timing.backward, timing.total)),
                f"{timing.rate / unit:.1f}",
                "" if full is None else f"{full.total / timing.total:.2f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    if report.why_not_dense:
        text.append(f"Paddle's attention with a dense mask did not run: {report.why_not_dense}")
    if report.left:
        text.append(f"no time for {', '.join(report.left)}: --seconds gives more")
    return "\n".join([*text, "", report.verdict])
