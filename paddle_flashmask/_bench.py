"""``python -m paddle_flashmask bench``: named masks on one's own device and shape, in about two minutes.

Paddle's newest CUDA build on PyPI, 2.6.2, has no code for Hopper: there its own kernels silently do nothing.
So inputs are made and results compared by NumPy, gradients are given explicitly, and no tensor on the device
is computed with, but for the dense mask, which is left out there.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from paddle_flashmask.masks import ColumnMask, registry
from paddle_flashmask.reference import attention_reference, attention_reference_backward

Array = npt.NDArray[Any]

DEFAULT_SHAPES = {"cpu": (1, 2048, 2048, 8, 8, 64, 64), "gpu": (4, 8192, 8192, 32, 32, 128, 128)}
DEFAULT_DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
COMPARED = "causal_document"  # the mask that a dense mask is tried with; that takes as long for any mask
MIN_REPETITIONS = 2
# Largest error of a head, relative to its rows' norms (see ``_error``): several times what rounding explains.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 2.5e-3, "bfloat16": 2e-2}
CHECKED_ELEMENTS = 1 << 22  # of the scores that the oracle computes for a mask: about a second's work


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
    """Everything that was measured. ``dense``: Paddle's attention with a dense mask; None: left out."""

    masks: list[Timing]
    dense: Timing | None
    why_not_dense: str
    problems: dict[str, str]  # masks that gave wrong results or could not be checked; they are not timed
    left: list[str]  # masks that the time was too short for

    @property
    def verdict(self) -> str:
        """One line."""
        if self.problems:
            return f"FAILED: wrong or unchecked results of {', '.join(self.problems)}"
        by_name = {timing.mask: timing for timing in self.masks}
        if COMPARED not in by_name:
            return f"no verdict without {COMPARED}"
        packed = by_name[COMPARED]
        parts = []
        if self.dense is not None:
            parts.append(f"{self.dense.total / packed.total:.1f} times as fast as Paddle's dense mask")
        if "full" in by_name:
            parts.append(f"{by_name['full'].total / packed.total:.1f} times no mask")
        text = f"packed documents (sparsity {packed.rho:.2f}): {', '.join(parts) or 'timed alone'}"
        if "full" in by_name and len(self.masks) > 1:
            slowest = min(self.masks, key=lambda timing: timing.rate)
            share = slowest.rate / by_name["full"].rate
            text += f"; least FLOP/s: {100 * share:.0f} % of no mask's ({slowest.mask})"
        return text


class Progress:
    """A bar on a terminal that fills with time and says how much is left; nothing elsewhere."""

    def __init__(self, seconds: float, stream: TextIO):
        self.seconds, self.stream = seconds, stream
        self.start, self.what, self.shown = time.monotonic(), "", ""

    def show(self, what: str | None = None) -> None:
        """Show what comes next, or that time goes by."""
        if what is not None:
            self.what = what
        if not self.stream.isatty():
            return
        left = max(0.0, self.start + self.seconds - time.monotonic())
        filled = 30 - round(30 * left / self.seconds) if self.seconds > 0 else 30
        text = f"\r[{'#' * filled}{'.' * (30 - filled)}] {left:4.0f} s left, {self.what:<28}"
        if text != self.shown:
            self.shown = text
            self.stream.write(text)
            self.stream.flush()

    def clear(self) -> None:
        """Remove the bar."""
        if self.stream.isatty():
            self.stream.write("\r" + " " * (len(self.shown) - 1) + "\r")
            self.stream.flush()


def measure(
    shape: tuple[int, ...],
    dtype: str,
    device: str,
    names: Sequence[str],
    seconds: float,
    stream: TextIO | None = None,
) -> Report:
    """Check and time named masks, and Paddle's own attention with a dense mask.

    The mask that the dense one is compared with comes first and the dense one next, for what else a machine
    does changes within two minutes; the report has them in the order given.

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
    progress = Progress(seconds, stream or sys.stderr)
    end = time.monotonic() + seconds
    progress.show("inputs")
    paddle.set_device(device)
    rng = np.random.default_rng(0)
    sizes = [(heads_q, head_dim), (heads_k, head_dim), (heads_k, head_dim_v), (heads_q, head_dim_v)]
    tensors = [_normal(rng, (batch, seqlen, *size), dtype) for size in sizes]
    oracle = _Oracle.of(tensors, rng, dtype)
    full_flops = 4.0 * seqlen**2 * head_dim * heads_q * batch * 3.5

    def share(of: float) -> float:
        """When one of so many equal parts of the time that is left ends."""
        now = time.monotonic()
        return now + (end - now) / of

    def time_dense(until: float) -> tuple[Timing | None, str]:
        """Paddle's own attention, or why not."""
        progress.show("a dense mask")
        try:
            if not _paddle_computes():
                raise RuntimeError("this build of Paddle has no kernels of its own for this device")
            compared = registry.make(COMPARED, seqlen)
            attend = _dense(compared, heads_q // heads_k, dtype)
            if problem := oracle.check(attend, compared):
                return None, problem
            times = _time(attend, tensors, device, until, progress)
        except (RuntimeError, MemoryError, ValueError, NotImplementedError) as error:
            return None, _in_short(error)
        return Timing("dense mask", 0.0, *times, full_flops), ""

    timings: dict[str, Timing] = {}
    problems: dict[str, str] = {}
    left: list[str] = []
    order = sorted(masks, key=lambda name: name != COMPARED)
    if COMPARED not in masks:
        dense, why_not = time_dense(share(len(order) + 2))
    for done, name in enumerate(order):
        if time.monotonic() > end and done > 0:
            left.append(name)
            continue
        progress.show(name)
        mask = masks[name]
        # The dense mask, which follows the one that it is compared with, takes as long as two.
        until = share(len(order) - done + (2 if name == COMPARED else 0))
        attend = lambda q, k, v, mask=mask: attention(q, k, v, mask=mask)  # noqa: E731
        try:
            problem = oracle.check(attend, mask)
        except (RuntimeError, MemoryError) as error:
            problem = f"could not be checked: {_in_short(error)}"
        if problem:
            problems[name] = problem
        else:
            forward, backward = _time(attend, tensors, device, until, progress)
            rho = mask.block_sparsity(128)
            timings[name] = Timing(name, rho, forward, backward, full_flops * (1 - rho))
        if name == COMPARED:
            dense, why_not = time_dense(share((len(order) - done + 1) / 2))
    progress.clear()
    return Report([timings[name] for name in masks if name in timings], dense, why_not, problems, left)


def _in_short(error: Exception) -> str:
    return " ".join(str(error).split())[:100] or type(error).__name__


def _paddle_computes() -> bool:
    """Whether Paddle's own kernels do anything on this device."""
    import paddle

    return bool((_to_host(paddle.ones([1024], "float32") + 1) == 2).all())


def _to_device(x: Array, dtype: str) -> Any:
    """A tensor of values in float32 (float64 for "float64"); those of bfloat16 are cut off, not rounded."""
    import paddle

    x = (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x.astype(dtype, copy=False)
    return paddle.to_tensor(x, dtype=dtype)


def _to_host(tensor: Any) -> Array:
    """A tensor's values; those of bfloat16 as their bits."""
    return np.asarray(tensor.numpy())


def _float64(x: Array) -> Array:
    """The values in what ``_to_host`` returns."""
    return ((x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x).astype(np.float64)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    return _to_device(rng.standard_normal(shape, np.float64 if dtype == "float64" else np.float32), dtype)


def _leaves(tensors: Sequence[Any]) -> list[Any]:
    """New leaves for q, k and v, so that no gradient is added to an older one."""
    leaves = [tensor.detach() for tensor in tensors[:3]]
    for leaf in leaves:
        leaf.stop_gradient = False
    return leaves


class _Oracle(NamedTuple):
    """Checks out and gradients of the query heads of the last sample that share the last key head.

    The gradient of out is zero but in a few rows spread over all tiles. So dk and dv are sums over these rows
    alone, and the float64 reference need compute no others.
    """

    tensors: list[Any]  # q, k, v and that gradient
    head: list[Array]  # the same in float64: [1, rows, group, D], [1, S, 1, D], [1, S, 1, Dv] and as out's
    rows: npt.NDArray[np.intp]
    tolerance: float

    @staticmethod
    def of(tensors: Sequence[Any], rng: np.random.Generator, dtype: str) -> _Oracle:
        """For q, k, v and out's gradient."""
        import paddle

        _, seqlen, heads_q, _ = tensors[0].shape
        group = heads_q // tensors[1].shape[2]
        count = min(seqlen, max(1, CHECKED_ELEMENTS // (group * seqlen)))
        edges = np.arange(count + 1) * seqlen // count
        rows = rng.integers(edges[:-1], edges[1:])  # one at random of each of ``count`` parts
        q, k, v, dout = (_to_host(tensor) for tensor in tensors)
        few = np.zeros_like(dout)
        few[:, rows] = dout[:, rows]
        head = [q[-1:, rows, -group:], k[-1:, :, -1:], v[-1:, :, -1:], dout[-1:, rows, -group:]]
        return _Oracle(
            [*tensors[:3], paddle.to_tensor(few, dtype=dtype)],
            [_float64(x) for x in head],
            rows,
            TOLERANCES[dtype],
        )

    def check(self, attend: Callable[..., Any], mask: ColumnMask) -> str:
        """What is wrong with the results; empty if nothing is."""
        leaves = _leaves(self.tensors)
        out = attend(*leaves)
        out.backward(self.tensors[3])
        visible = np.ones((len(self.rows), mask.seqlen_k), np.bool_)
        for start, end in (mask.lower, mask.upper):
            visible &= (self.rows[:, None] < start[0, 0]) | (self.rows[:, None] >= end[0, 0])
        q, k, v, dout = self.head
        expected = [
            attention_reference(q, k, v, visible)[0],
            *attention_reference_backward(q, k, v, visible, dout),
        ]
        wrong = []
        for name, tensor, reference in zip(
            ("out", "dq", "dk", "dv"), (out, *(leaf.grad for leaf in leaves)), expected, strict=True
        ):
            result = _to_host(tensor)[-1:, :, -reference.shape[2] :]
            error = _error(_float64(result if name in ("dk", "dv") else result[:, self.rows]), reference)
            if not error <= self.tolerance:
                wrong.append(f"{name} is off by {error:.2g}")
        return f"wrong results: {', '.join(wrong)} of its norm" if wrong else ""


def _error(result: Array, reference: Array) -> float:
    """Root mean square of the rows' errors, each relative to its own norm plus the median row's.

    Without the median, rows that are zero but for rounding would count; with a norm of all rows, those that
    see few keys and so are large would alone count. The rest is for results that are zero throughout.
    """
    norms = np.linalg.norm(reference, axis=-1)
    typical = np.median(norms) + 0.1 * reference.shape[-1] ** 0.5 / reference.shape[1]
    return float(np.sqrt(np.mean((np.linalg.norm(result - reference, axis=-1) / (norms + typical)) ** 2)))


def _dense(mask: ColumnMask, group: int, dtype: str) -> Callable[..., Any]:
    """Paddle's own attention under a dense mask, a bias that is -inf where it hides."""
    import paddle

    float_type = np.float64 if dtype == "float64" else np.float32
    bias = _to_device(np.where(mask.to_dense(), float_type(0), float_type(-np.inf)), dtype)

    def attend(q: Any, k: Any, v: Any) -> Any:
        if group > 1:
            k, v = (paddle.repeat_interleave(x, group, axis=2) for x in (k, v))
        return paddle.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    return attend


def _time(
    attend: Callable[..., Any], tensors: Sequence[Any], device: str, until: float, progress: Progress
) -> tuple[float, float]:
    """Milliseconds of forward and of backward: medians of what fits until then, after a first repetition."""
    import paddle

    def now() -> float:
        if device == "gpu":
            paddle.device.cuda.synchronize()
        return time.perf_counter()

    samples: list[tuple[float, float]] = []
    while len(samples) <= MIN_REPETITIONS or time.monotonic() < until:
        progress.show()
        leaves = _leaves(tensors)
        start = now()
        out = attend(*leaves)
        middle = now()
        out.backward(tensors[3])
        stop = now()
        samples.append((1e3 * (middle - start), 1e3 * (stop - middle)))
    forward, backward = (statistics.median(values) for values in zip(*samples[1:], strict=True))
    return forward, backward


def render(report: Report) -> str:
    """The table and the verdict."""
    timings = [*report.masks, *([report.dense] if report.dense is not None else [])]
    fastest = max((timing.rate for timing in timings), default=0.0)
    unit, name = (1e12, "TFLOP/s") if fastest > 2e12 else (1e9, "GFLOP/s")
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
        text.append(f"Paddle's attention with a dense mask is left out: {report.why_not_dense}")
    text += [f"{mask}: {problem}" for mask, problem in report.problems.items()]
    if report.left:
        text.append(f"no time for {', '.join(report.left)}: --seconds gives more")
    return "\n".join([*text, "", report.verdict])
