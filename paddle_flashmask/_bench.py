"""``python -m paddle_flashmask bench``: named masks on one's own device and shape, in about two minutes.

Paddle's newest CUDA build on PyPI, 2.6.2, has no code for Hopper: there its own kernels silently do nothing.
So inputs are made and results compared by NumPy, gradients are given explicitly, and no tensor on the device
is computed with, but for the dense mask, which is left out there.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from paddle_flashmask.masks import ColumnMask, causal, full, registry, sliding_window
from paddle_flashmask.reference import attention_reference, attention_reference_backward

Array = npt.NDArray[Any]

DEFAULT_SHAPES = {"cpu": (1, 2048, 2048, 8, 8, 64, 64), "gpu": (4, 8192, 8192, 32, 32, 128, 128)}
DEFAULT_DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
COMPARED = "causal_document"  # the mask that a dense mask is tried with; that takes as long for any mask
# Masks for Sq != Sk, from both, aligned at the last query and key; the others are of one sequence's tokens.
OF_TWO_LENGTHS: dict[str, Callable[[int, int], ColumnMask]] = {
    "full": full,
    "causal": causal,
    "sliding_window": lambda seqlen_q, seqlen_k: sliding_window(seqlen_q, seqlen_k // 16, seqlen_k=seqlen_k),
}
MIN_REPETITIONS = 2
FEW_REPETITIONS = 5  # with fewer, a median says little
# Largest error of a head, relative to its rows' norms (see ``_error``): several times what rounding explains.
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "float16": 2.5e-3, "bfloat16": 2e-2}
FAILURES = (RuntimeError, MemoryError, OSError)  # what Paddle raises for kernels, memory and CUDA
CHECKED_ELEMENTS = 1 << 22  # of the scores that the oracle computes for a mask: about a second's work


@dataclass(frozen=True)
class Timing:
    """What one attention took for one mask; milliseconds are medians."""

    mask: str
    rho: float  # block sparsity
    forward: float
    backward: float
    flops: float  # of the visited tiles, both passes
    repetitions: int  # that the medians are of

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
    problems: dict[str, str]  # masks that gave wrong results or could not be checked or timed
    left: list[str]  # masks that the time was too short for

    def timing(self, mask: str) -> Timing | None:
        """A mask's; None: it was not timed."""
        return next((timing for timing in self.masks if timing.mask == mask), None)

    @property
    def verdict(self) -> str:
        """One line."""
        if self.problems:
            names = ", ".join(self.problems)
            return f"FAILED: wrong, unchecked or untimed: {names}; do not rely on them here"
        packed, bare = self.timing(COMPARED), self.timing("full")
        if packed is None:
            return self._range()
        parts = []
        if self.dense is not None:
            parts.append(f"{self.dense.total / packed.total:.1f} times as fast as Paddle's dense mask")
        if bare is not None:
            parts.append(f"{bare.total / packed.total:.1f} times{'' if parts else ' as fast as'} no mask")
        text = f"packed documents (sparsity {packed.rho:.2f}): {', '.join(parts) or 'timed alone'}"
        if bare is not None:
            slowest = min(self.masks, key=lambda timing: timing.rate)
            share = slowest.rate / bare.rate
            text += f"; least FLOP/s: {100 * share:.0f} % of no mask's ({slowest.mask})"
        return text

    def _range(self) -> str:
        """The slowest and the fastest mask beside the dense one, and beside no mask those that are one."""
        parts = []
        for base, what in ((self.dense, "Paddle's dense mask"), (self.timing("full"), "no mask")):
            others = sorted((timing for timing in self.masks if timing is not base), key=lambda t: -t.total)
            if base is not None and others:
                ends = others[:1] if len(others) == 1 else [others[0], others[-1]]
                ratios = " to ".join(f"{base.total / timing.total:.2f} ({timing.mask})" for timing in ends)
                parts.append(f"{ratios} times as fast as {what}")
        return "; ".join(parts) or "timed alone: no other mask or dense mask to compare with"


class Progress:
    """A bar on a terminal that fills with time and says how much is left; elsewhere a line for each step."""

    def __init__(self, seconds: float, stream: TextIO):
        self.seconds, self.stream = seconds, stream
        self.start, self.what, self.shown = time.monotonic(), "", ""

    def show(self, what: str | None = None) -> None:
        """Show what comes next, or that time goes by."""
        if what is not None:
            self.what = what
        left = max(0.0, self.start + self.seconds - time.monotonic())
        if not self.stream.isatty():
            if what is not None:
                self.stream.write(f"{left:4.0f} s left, {what}\n")
                self.stream.flush()
            return
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


def prepare(
    shape: tuple[int, ...], dtype: str, device: str, names: Sequence[str] | None
) -> dict[str, ColumnMask]:
    """The named masks, or the default ones, once it is known that ``measure`` can take them.

    Args:
        shape: B, Sq, Sk, Hq, Hk, D, Dv.
        dtype: of q, k and v.
        device: "cpu" or "gpu".
        names: of the masks; None: the paper's twelve, or those of ``OF_TWO_LENGTHS`` where Sq != Sk.

    Raises:
        ValueError: a size is 0, a name is unknown or its mask needs Sq = Sk, or the memory is too small.
    """
    seqlen_q, seqlen_k = shape[1:3]
    sizes = ",".join(map(str, shape))
    if min(shape) == 0:
        raise ValueError(f"--shape: expected sizes above 0, got {sizes}")
    needed = _tensor_bytes(shape, dtype)
    if needed > (there := _memory(device)):
        raise ValueError(
            f"--shape: inputs, results and gradients take at least {needed / 1e9:.1f} GB, "
            f"and there are {there / 1e9:.1f} GB{' available' if device == 'cpu' else ''}, got {sizes}"
        )
    if seqlen_q == seqlen_k:
        return {name: registry.make(name, seqlen_q) for name in names or registry.names(paper_only=True)}
    if wrong := [name for name in names or () if name not in OF_TWO_LENGTHS]:
        raise ValueError(
            f"--masks: where Sq and Sk differ, expected some of {', '.join(OF_TWO_LENGTHS)}, "
            f"got {', '.join(wrong)} with Sq = {seqlen_q} and Sk = {seqlen_k}"
        )
    return {name: OF_TWO_LENGTHS[name](seqlen_q, seqlen_k) for name in names or OF_TWO_LENGTHS}


def _itemsize(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def _tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of q, k, v, out and their gradients."""
    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v = shape
    elements = batch * (seqlen_q * heads_q + seqlen_k * heads_k) * (head_dim + head_dim_v)
    return 2 * elements * _itemsize(dtype)


def _dense_bytes(shape: tuple[int, ...], dtype: str, device: str) -> int:
    """Bytes of main memory that the dense mask and Paddle's attention with it take at their peak, at most.

    Counted by the peaks of resident memory with Paddle 3.3.1: ``_dense`` makes the mask, on a GPU too, with 8
    bytes for each of its elements in float32, 6 in float16, 10 in bfloat16 and 16 in float64, and keeps the
    bias of the dtype. On a CPU the backward holds three values for each score besides, and copies of tensors.
    """
    batch, seqlen_q, seqlen_k, heads_q = shape[:4]
    elements, itemsize = seqlen_q * seqlen_k, _itemsize(dtype)
    needed = max(10, 2 * itemsize) * elements
    if device == "cpu":
        attention = itemsize * elements * (1 + 3 * batch * heads_q) + _tensor_bytes(shape, dtype)
        needed = max(needed, attention)
    return needed + needed // 10  # malloc keeps some of what the oracle freed; and others' use changes


def _memory(device: str) -> int:
    """Bytes that a GPU has, in use or not, as too many raise an error there; those available to a CPU."""
    import paddle

    if device == "gpu":
        return int(paddle.device.cuda.get_device_properties().total_memory)
    return _available_memory()


def _available_memory(root: Path = Path("/")) -> int:
    """Bytes of main memory that can still be had: with more, Linux ends the process, and no error says so.

    The least of what the machine has left and what the limits of the process's cgroups leave, as those of a
    container. Caches of files count as left.

    Args:
        root: where proc and sys are.
    """
    found = re.search(r"^MemAvailable: *(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    left = [int(found[1]) << 10 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if controllers == "":  # cgroup v2
            limit, usage, total = "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            top /= "memory"
            limit, usage, total = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        # Limits of parents hold too. In a container the path may be that outside, and its own folder the top.
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (most := _text(folder / limit).strip()).isdigit():  # or "max"
                caches = re.findall(
                    rf"^{total}(?:in)?active_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE
                )
                left.append(int(most) - int(_text(folder / usage) or 0) + sum(map(int, caches)))
    return max(0, min(left))


def _text(file: Path) -> str:
    """What a file says; nothing if it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def measure(
    shape: tuple[int, ...],
    dtype: str,
    device: str,
    masks: Mapping[str, ColumnMask],
    seconds: float,
    stream: TextIO | None = None,
) -> Report:
    """Check and time the masks that ``prepare`` made, and Paddle's own attention with a dense mask.

    The mask that the dense one is compared with comes first and the dense one next, for what else a machine
    does changes within two minutes; the report has them in the order given.

    Args:
        shape: B, Sq, Sk, Hq, Hk, D, Dv.
        dtype: of q, k and v.
        device: "cpu" or "gpu".
        masks: by name.
        seconds: to take in all, about.
        stream: of the progress bar; None: stderr.
    """
    import paddle

    from paddle_flashmask import attention

    batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v = shape
    progress = Progress(seconds, stream or sys.stderr)
    end = time.monotonic() + seconds
    progress.show("inputs")
    paddle.set_device(device)
    rng = np.random.default_rng(0)
    sizes = [
        (seqlen_q, heads_q, head_dim),
        (seqlen_k, heads_k, head_dim),
        (seqlen_k, heads_k, head_dim_v),
        (seqlen_q, heads_q, head_dim_v),
    ]
    tensors = [_normal(rng, (batch, *size), dtype) for size in sizes]
    oracle = _Oracle.of(tensors, rng, dtype)
    full_flops = 4.0 * seqlen_q * seqlen_k * head_dim * heads_q * batch * 3.5

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
            if (needed := _dense_bytes(shape, dtype, device)) > (there := _available_memory()):
                raise MemoryError(
                    f"it takes up to {needed / 1e9:.1f} GB of main memory, "
                    f"and {there / 1e9:.1f} GB are available"
                )
            compared = registry.make(COMPARED, seqlen_q) if seqlen_q == seqlen_k else full(seqlen_q, seqlen_k)
            attend = _dense(compared, heads_q // heads_k, dtype)
            if problem := oracle.check(attend, compared):
                return None, problem
            forward, backward, count = _time(attend, tensors, device, until, progress)
        except (*FAILURES, ValueError) as error:
            return None, _in_short(error)
        return Timing("dense mask", 0.0, forward, backward, full_flops, count), ""

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
        aim = "checked"
        try:
            problem = oracle.check(attend, mask)
            if not problem:
                aim = "timed"
                forward, backward, count = _time(attend, tensors, device, until, progress)
                rho = mask.block_sparsity(128)
                timings[name] = Timing(name, rho, forward, backward, full_flops * (1 - rho), count)
        except FAILURES as error:
            problem = f"could not be {aim}: {_in_short(error)}"
        if problem:
            problems[name] = problem
        if name == COMPARED:
            dense, why_not = time_dense(share((len(order) - done + 1) / 2))
    progress.clear()
    return Report([timings[name] for name in masks if name in timings], dense, why_not, problems, left)


def _in_short(error: Exception) -> str:
    """An error's first sentence, or as many words of it as fit, without what Paddle says of its source."""
    text = " ".join(str(error).partition("[Hint:")[0].split())
    sentence = re.match(r".*?[.!](?= [A-Z]|$)", text)
    return (
        textwrap.shorten(sentence[0] if sentence else text, 200, placeholder=" ...") or type(error).__name__
    )


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

        _, seqlen_q, heads_q, _ = tensors[0].shape
        _, seqlen_k, heads_k, _ = tensors[1].shape
        group = heads_q // heads_k
        count = min(seqlen_q, max(1, CHECKED_ELEMENTS // (group * seqlen_k)))
        edges = np.arange(count + 1) * seqlen_q // count
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
) -> tuple[float, float, int]:
    """Milliseconds of forward and of backward: medians of what fits until then, after a first repetition.

    The last value says how many repetitions that were.
    """
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
    return forward, backward, len(samples) - 1


def render(report: Report) -> str:
    """The table, what its columns are, and the verdict."""
    timings = [*report.masks, *([report.dense] if report.dense is not None else [])]
    fastest = max((timing.rate for timing in timings), default=0.0)
    unit, name = (1e12, "TFLOP/s") if fastest > 2e12 else (1e9, "GFLOP/s")
    bases = {"full": report.timing("full"), "dense": report.dense}
    present = {f"speed/{what}": base.total for what, base in bases.items() if base is not None}
    lines: list[tuple[str, ...]] = [
        ("", "sparsity", "forward, ms", "backward, ms", "total, ms", name, *present)
    ]
    for timing in timings:
        own = timing is not report.dense
        lines.append(
            (
                timing.mask if own else "Paddle, dense",
                f"{timing.rho:.3f}" if own else "",
                *(f"{value:.2f}" for value in (timing.forward, timing.backward, timing.total)),
                f"{timing.rate / unit:.1f}",
                *(f"{total / timing.total:.2f}" for total in present.values()),
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    notes = [
        f"sparsity: share of 128 x 128 tiles that are skipped; {name}: of the others; times: medians",
        *(["speed/full: above 1 is faster than no mask"] if "speed/full" in present else []),
        *(["speed/dense: above 1 is faster than Paddle's dense mask"] if report.dense else []),
    ]
    text += ["", *textwrap.wrap("; ".join(notes), 110)]
    if few := [timing.mask for timing in timings if timing.repetitions < FEW_REPETITIONS]:
        text.append(
            f"rough, of fewer than {FEW_REPETITIONS} repetitions: {', '.join(few)}: --seconds gives more"
        )
    if report.why_not_dense:
        text.append(f"Paddle's attention with a dense mask is left out: {report.why_not_dense}")
    text += [f"{mask}: {problem}" for mask, problem in report.problems.items()]
    if report.left:
        text.append(f"no time for {', '.join(report.left)}: --seconds gives more")
    return "\n".join([*text, "", report.verdict])
