"""Benchmark the CPU kernel: beside other attentions, against its own full mask, and against visited tiles.

    bash scripts/setup_env.sh bench
    .venv-bench/bin/python scripts/bench/cpu.py [--threads 2] [--repetitions 5] [--output docs/results]

float32, B = 1, S = 4096, 8 heads, D = 64, forward + backward. Every implementation gets the same tensors and
the same number of threads; results are compared before anything is timed; implementations take turns within
each repetition, so that whatever else the machine does falls on all of them. Needs paddlepaddle and torch,
the latter for this benchmark alone. Writes cpu.md and cpu.csv (all samples).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import build_kernels
import numpy as np
from cells import ROOT
from ckernels import Kernels, Options
from provenance import RESULTS, git_commit
from results import document, markdown_table

from paddle_flashmask import masks
from paddle_flashmask._processor import processor_fields

SEQLEN, HEADS, HEAD_DIM = 4096, 8, 64
TILE = 64  # the kernel's own tiles, block_m = block_n

SET_UP = "bash scripts/setup_env.sh bench"
RUN = ".venv-bench/bin/python scripts/bench/cpu.py"

# What the kernel has to reach; see the issue that founded it and docs/cpu-kernel.md.
BAR_FULL_VS_TORCH = 0.8
BAR_DOCUMENT_VS_FULL = 5.0
BAR_R_SQUARED = 0.98

OURS, TORCH, PADDLE = "paddle_flashmask", "torch SDPA", "Paddle's dense attention"
PADDLE_REPETITIONS = 2  # it takes several times as long
COLUMNS = ["table", "name", "tiles", "repetition", "forward_ms", "backward_ms"]


@dataclass(frozen=True)
class Timing:
    """Seconds of each repetition of one job; forward and backward apart."""

    name: str
    forward: list[float]
    backward: list[float]

    @property
    def total(self) -> float:
        """Median of forward + backward, seconds."""
        return float(np.median(np.add(self.forward, self.backward)))


# A job runs both passes once, returns the seconds of each and its results, arrays [S, H, D] by name.
Job = Callable[[], tuple[float, float, dict[str, np.ndarray]]]


class Data:
    """The tensors of the benchmark, ``[1, S, H, D]`` float32."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shape = (1, SEQLEN, HEADS, HEAD_DIM)
        self.q, self.k, self.v, self.dout = (rng.standard_normal(shape, np.float32) for _ in range(4))


def own_job(kernels: Kernels, data: Data, mask: masks.ColumnMask, threads: int) -> Job:
    """This package's kernel, through the C interface."""
    indices, causal = mask.to_startend_row_indices()
    options = Options(indices=indices, causal=causal, num_threads=threads)

    def run() -> tuple[float, float, dict[str, np.ndarray]]:
        start = time.perf_counter()
        out, lse = kernels.forward(data.q, data.k, data.v, options)
        middle = time.perf_counter()
        gradients = kernels.backward(data.q, data.k, data.v, out, lse, data.dout, options)
        end = time.perf_counter()
        return middle - start, end - middle, {"o": out[0], **{n: g[0] for n, g in gradients.items()}}

    return run


def torch_job(data: Data, dense: np.ndarray | None, threads: int) -> Job:
    """torch's scaled_dot_product_attention on the CPU; ``dense`` is a boolean mask [S, S]."""
    import torch

    torch.set_num_threads(threads)
    q, k, v, dout = (
        torch.from_numpy(np.ascontiguousarray(array.transpose(0, 2, 1, 3)))
        for array in (data.q, data.k, data.v, data.dout)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = None if dense is None else torch.from_numpy(dense)

    def run() -> tuple[float, float, dict[str, np.ndarray]]:
        for x in inputs:
            x.grad = None
        start = time.perf_counter()
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
        middle = time.perf_counter()
        out.backward(dout)
        end = time.perf_counter()
        results = {"o": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
        return middle - start, end - middle, {n: x.numpy()[0].transpose(1, 0, 2) for n, x in results.items()}

    return run


def paddle_job(data: Data) -> Job:
    """Paddle's own dense attention on the CPU; its threads follow OMP_NUM_THREADS."""
    import paddle

    paddle.set_device("cpu")
    q, k, v, dout = (paddle.to_tensor(array) for array in (data.q, data.k, data.v, data.dout))
    for x in (q, k, v):
        x.stop_gradient = False

    def run() -> tuple[float, float, dict[str, np.ndarray]]:
        for x in (q, k, v):
            x.clear_gradient()
        start = time.perf_counter()
        out = paddle.nn.functional.scaled_dot_product_attention(q, k, v)
        middle = time.perf_counter()
        out.backward(dout)
        end = time.perf_counter()
        results = {"o": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
        return middle - start, end - middle, {n: x.numpy()[0] for n, x in results.items()}

    return run


def time_jobs(jobs: dict[str, Job], repetitions: int) -> dict[str, Timing]:
    """Run the jobs in turns, each once more at first, which is not counted."""
    timings = {name: Timing(name, [], []) for name in jobs}
    for repetition in range(repetitions + 1):
        for name, job in jobs.items():
            forward, backward, _ = job()
            if repetition > 0:
                timings[name].forward.append(forward)
                timings[name].backward.append(backward)
    return timings


def check(reference: Job, others: dict[str, Job]) -> float:
    """Raise AssertionError unless all jobs agree; return the largest relative difference."""
    _, _, expected = reference()
    worst = 0.0
    for name, job in others.items():
        _, _, results = job()
        for key, values in expected.items():
            difference = float(np.abs(results[key] - values).max() / np.abs(values).max())
            assert difference < 1e-4, f"{name}: {key} differs by {difference:.1e}"
            worst = max(worst, difference)
    return worst


def sparse_documents() -> dict[str, masks.ColumnMask]:
    """Return the documents that the bars are about."""
    return {
        "causal_document, 4 x 1024": masks.causal_document([1024] * 4),
        "causal_document, 6 uneven": masks.causal_document([1300, 900, 700, 600, 400, 196]),
    }


def document_series() -> dict[str, masks.ColumnMask]:
    """Causal documents of ever more, and ever less even, lengths; full and causal at the dense end."""
    rng = np.random.default_rng(1)
    series = {"full": masks.full(SEQLEN), "causal": masks.causal(SEQLEN)}
    for count in (2, 2, 3, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32):
        cuts = np.sort(rng.choice(np.arange(1, SEQLEN), count - 1, replace=False))
        lengths = np.diff(np.concatenate([[0], cuts, [SEQLEN]]))
        series[f"causal_document {len(series)} ({count} documents)"] = masks.causal_document(lengths)
    for count in (2, 3, 4, 6, 9):
        lengths = np.diff(np.linspace(0, SEQLEN, count + 1).astype(int))
        series[f"document ({count} documents)"] = masks.document(lengths)
    return series


def visited_tiles(mask: masks.ColumnMask) -> int:
    """Tiles of TILE x TILE that hold a visible element."""
    return int((mask.block_map(TILE, TILE) != 0).sum())


def fit_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Least squares: slope, intercept and R squared."""
    slope, intercept = np.polyfit(x, y, 1)
    residual = y - (slope * x + intercept)
    return float(slope), float(intercept), float(1 - residual.var() / y.var())


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{seconds * 1e3:.1f}"


def timing_row(timing: Timing) -> list[str]:
    """Cells: forward, backward, both (medians) and the fastest and slowest of both, milliseconds."""
    both = np.add(timing.forward, timing.backward)
    values = (np.median(timing.forward), np.median(timing.backward), np.median(both), both.min(), both.max())
    return [milliseconds(float(value)) for value in values]


def cpu_model() -> str:
    """Return the processor's name and the number of processors this run may use."""
    fields = processor_fields()
    name = fields.get("model name", platform.processor() or platform.machine())
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def require_peers() -> None:
    """End the run, saying how to get them, where the packages compared with are missing."""
    for name in ("paddle", "torch"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            sys.exit(
                f"scripts/bench/cpu.py compares with {name}, which cannot be imported ({error}). Run: "
                f"{SET_UP}, then: {RUN}"
            )


@dataclass(frozen=True)
class Measured:
    """Timings by name, of the implementations and of the series of masks, and how far results differed."""

    difference: float  # the largest, relative
    timings: dict[str, Timing]
    series: dict[str, Timing]


def measure(kernels: Kernels, threads: int, repetitions: int) -> Measured:
    """Compare all results, then time."""
    data, documents = Data(), sparse_documents()
    for name, mask in documents.items():
        assert mask.block_sparsity(128) >= 0.85, f"{name}: {mask.block_sparsity(128)}"

    full = own_job(kernels, data, masks.full(SEQLEN), threads)
    peers = {TORCH: torch_job(data, None, threads), PADDLE: paddle_job(data)}
    document_jobs = {name: own_job(kernels, data, mask, threads) for name, mask in documents.items()}
    first = next(iter(documents))
    torch_document = torch_job(data, documents[first].to_dense()[0, 0], threads)
    difference = max(check(full, peers), check(document_jobs[first], {"torch": torch_document}))

    jobs = {OURS: full, **document_jobs, TORCH: peers[TORCH], f"{TORCH}, boolean mask": torch_document}
    timings = time_jobs(jobs, repetitions)
    timings |= time_jobs({f"{OURS} (again)": full, PADDLE: peers[PADDLE]}, PADDLE_REPETITIONS)
    series = {name: own_job(kernels, data, mask, threads) for name, mask in document_series().items()}
    return Measured(difference, timings, time_jobs(series, repetitions))


def describe(kernels: Kernels, arguments: argparse.Namespace) -> str:
    """Return where and how it was measured as a Markdown list."""
    import paddle
    import torch

    options = f"--threads {arguments.threads} --repetitions {arguments.repetitions}"
    lines = [
        f"- machine: {cpu_model()}; kernel's instruction set: {kernels.isa()}",
        f"- date: {datetime.date.today()}; commit: {git_commit()}",
        f"- versions: Python {platform.python_version()}, NumPy {np.__version__}, torch "
        f"{torch.__version__}, paddlepaddle {paddle.__version__}",
        f"- command: `{SET_UP}`, then `{RUN} {options}`",
    ]
    return "\n".join(lines)


def render(measured: Measured, threads: int, repetitions: int, described: str) -> str:
    """Return everything as a Markdown document."""
    series, timings = document_series(), measured.timings
    tiles = {name: visited_tiles(mask) for name, mask in series.items()}
    x = np.array([tiles[name] for name in series], float)
    y = np.array([measured.series[name].total for name in series])
    slope, intercept, r_squared = fit_line(x, y)
    times = [[name, *timing_row(timing)] for name, timing in timings.items()]
    lines = [
        [
            name,
            str(tiles[name]),
            f"{mask.block_sparsity(128):.3f}",
            milliseconds(measured.series[name].total),
            milliseconds(slope * tiles[name] + intercept),
        ]
        for name, mask in series.items()
    ]
    parts = [
        "# CPU kernel",
        f"float32, B = 1, S = {SEQLEN}, {HEADS} heads, D = {HEAD_DIM}; {threads} threads for all; "
        f"medians of {repetitions} interleaved repetitions (Paddle's: of {PADDLE_REPETITIONS}), "
        f"milliseconds. Results agreed to {measured.difference:.0e} of the largest value before timing. "
        "Written by scripts/bench/cpu.py; all samples are in cpu.csv.",
        described,
        "## Bars",
        bars_table(timings, len(series), r_squared),
        "## Times",
        markdown_table(["", "forward", "backward", "both", "fastest", "slowest"], times),
        f"## Time against visited {TILE}x{TILE} tiles",
        f"Forward + backward, all heads: {slope * 1e6:.2f} µs per tile of the mask + "
        f"{intercept * 1e3:.2f} ms; R² = {r_squared:.4f}.",
        markdown_table(["mask", "tiles", "rho", "ms", "line"], lines),
    ]
    return document(parts)


def bars_table(timings: dict[str, Timing], mask_count: int, r_squared: float) -> str:
    """Return what the kernel has to reach, and what it does."""
    full = timings[OURS].total

    def line(what: str, wanted: float, measured: float, digits: int = 2) -> list[str]:
        verdict = "met" if measured >= wanted else "NOT met"
        return [what, f">= {wanted}", f"{measured:.{digits}f}", verdict]

    lines = [line("full mask, speed relative to torch SDPA", BAR_FULL_VS_TORCH, timings[TORCH].total / full)]
    for name, mask in sparse_documents().items():
        what = f"{name} (rho {mask.block_sparsity(128):.3f}), speed relative to our full mask"
        lines.append(line(what, BAR_DOCUMENT_VS_FULL, full / timings[name].total))
    lines.append(line(f"R² of time against visited tiles ({mask_count} masks)", BAR_R_SQUARED, r_squared, 4))
    return markdown_table(["bar", "wanted", "measured", ""], lines)


def write_samples(path: Path, measured: Measured) -> None:
    """Write every repetition to a CSV file."""
    tiles = {name: visited_tiles(mask) for name, mask in document_series().items()}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for table, group in (("times", measured.timings), ("tiles", measured.series)):
            for name, timing in group.items():
                for i, seconds in enumerate(zip(timing.forward, timing.backward, strict=True)):
                    row = [table, name, tiles.get(name, ""), i]
                    writer.writerow([*row, *(f"{1e3 * value:.3f}" for value in seconds)])


def parse_arguments() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--library", dest="binary", type=Path, help="built by scripts/build_kernels.py; built if not given"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Measure and write the tables."""
    arguments = parse_arguments()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch and Paddle are imported
    require_peers()
    kernels = Kernels(arguments.binary or build_kernels.build_cpu(ROOT / "build"))
    measured = measure(kernels, arguments.threads, arguments.repetitions)
    text = render(measured, arguments.threads, arguments.repetitions, describe(kernels, arguments))
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "cpu.md").write_text(text)
    write_samples(arguments.output / "cpu.csv", measured)
    print(text)


if __name__ == "__main__":
    main()
