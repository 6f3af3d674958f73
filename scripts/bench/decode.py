"""Benchmark decoding and chunked prefill: few query rows against many keys, in turns with torch's attentions.

python scripts/build_kernels.py --cuda --targets 90 --subset benchmark --output build
python scripts/bench/decode.py                 # 12 s on an H200
python scripts/bench/decode.py --report-only

32 query and 8 key heads, bfloat16, no mask (causality hides next to nothing here), a cold L2. A copy of K and
V, in the same turns, says what the memory gives. Results are checked before timing. Rows are appended as they
are measured; a later call leaves out what is there. Writes decode.csv, .md and .png. Needs torch with CUDA.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import provenance
from provenance import Log, describe, oldest_first
from results import document, failures, length_name, markdown_table, not_run

if TYPE_CHECKING:
    import torch
    from kernel_calls import CudaLibrary

HEADS, KEY_HEADS = 32, 8
ELEMENT = 2  # bytes of a bfloat16
LABELS = {"ours": "paddle_flashmask", "portable": "its portable kernels", "FA2": "FA2", "cuDNN": "cuDNN"}
COLORS = {"ours": "#b5273d", "portable": "#e09aa5", "FA2": "#5b8db8", "cuDNN": "#777777"}
COPY = "copy"  # of K and V
COLUMNS = ["batch", "seqlen_q", "seqlen_k", "head_dim", "implementation"]
COLUMNS += ["status", "milliseconds", "warmups", "repetitions"]
OK, FAILED = "ok", "failed"
TOLERANCE = 0.02  # of the norm: by estimate rounding to bfloat16 explains 0.004


class Shape(NamedTuple):
    """Samples, query rows and keys of each."""

    batch: int
    seqlen_q: int
    seqlen_k: int

    def kv_bytes(self, head_dim: int) -> int:
        """Bytes of K and V."""
        return 2 * self.batch * self.seqlen_k * KEY_HEADS * head_dim * ELEMENT

    def __str__(self) -> str:
        return f"B={self.batch} Sq={self.seqlen_q} Sk={length_name(self.seqlen_k)}"


SHAPES = [
    *(Shape(1, 1, seqlen_k) for seqlen_k in (1024, 4096, 16_384, 131_072)),
    *(Shape(1, seqlen_q, 16_384) for seqlen_q in (7, 16, 64, 128, 300, 1024)),
    *(Shape(batch, 1, 16_384) for batch in (4, 20, 64)),
]
Rows = Sequence[Mapping[str, str]]


def parse_arguments() -> tuple[argparse.Namespace, str]:
    """Return the arguments, and the command to record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    provenance.add_arguments(parser, "decode", devices=("cuda",))
    parser.add_argument("--head-dim", type=provenance.count, default=128)
    parser.add_argument("--seconds", type=float, default=0.05, help="per implementation and shape")
    return provenance.parse(parser, "decode.py")


def run(arguments: argparse.Namespace, command: str) -> None:
    """Measure what is left."""
    from experiment import Device
    from measure import Clock
    from torch_attention import load

    device = Device(arguments, command, few_rows=True)
    libraries = {"ours": device.binary, "portable": load(arguments.binary, "sm80", device.name)}
    log, clock = Log(arguments.csv, COLUMNS, device.run), Clock()
    for shape in SHAPES:
        place = {**shape._asdict(), "head_dim": arguments.head_dim}
        newest = log.newest(**place, implementation="ours")
        if newest and newest["status"] == OK:
            continue
        found = measure_shape(shape, arguments, libraries, clock)
        for name, values in found.items():
            log.add({**place, "implementation": name, **values})
        times = (f"{name} {values.get('milliseconds', FAILED)}" for name, values in found.items())
        print(f"{shape}: {', '.join(times)}", flush=True)


def measure_shape(
    shape: Shape, arguments: argparse.Namespace, libraries: Mapping[str, CudaLibrary], clock: Any
) -> dict[str, dict[str, Any]]:
    """Return what to record of each implementation at a shape; those that fail or err are not timed."""
    import torch
    from experiment import failure_reason
    from torch.nn.attention import SDPBackend

    generator = torch.Generator(arguments.device).manual_seed(0)

    def normal(seqlen: int, heads: int) -> torch.Tensor:
        size = (shape.batch, seqlen, heads, arguments.head_dim)
        return torch.randn(size, generator=generator, device=arguments.device, dtype=torch.bfloat16)

    q = normal(shape.seqlen_q, HEADS)
    k, v = (normal(shape.seqlen_k, KEY_HEADS) for _ in range(2))
    backends = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    makers: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {
        **{name: partial(own_job, library, q, k, v) for name, library in libraries.items()},
        **{name: partial(torch_job, backend, q, k, v) for name, backend in backends.items()},
    }
    expected = reference(q[-1], k[-1], v[-1])
    found: dict[str, dict[str, Any]] = {}
    jobs: dict[str, Callable[[], Any]] = {}
    for name, make in makers.items():
        try:
            job = make()
            check(job(), expected)
        except Exception as failure:  # a peer may raise anything: the others are still to be timed
            found[name] = {"status": f"{FAILED}: {failure_reason(failure)}"}
        else:
            jobs[name] = job
    jobs[COPY] = torch.stack([k, v]).clone
    for name, timing in clock.take_turns(jobs, arguments.seconds)[0].items():
        found[name] = {
            "status": OK,
            "milliseconds": timing.median,
            "warmups": timing.warmups,
            "repetitions": len(timing.samples),
        }
    return found


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise WrongResultError where the last sample's attention is not the expected one, [Sq, H, D]."""
    from measure import WrongResultError

    error = float((out[-1].float() - expected).norm() / expected.norm())
    if not error <= TOLERANCE:  # NaN is not
        raise WrongResultError(f"off by {error:.2g} of the norm")


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return one sample's attention in float32, by the definition: [Sq, H, D]."""
    import torch

    group = HEADS // KEY_HEADS
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for head in range(HEADS):  # one head's scores at a time
        keys, values = (x[:, head // group].float() for x in (k, v))
        scores = q[:, head].float() @ keys.T * q.shape[-1] ** -0.5
        out[:, head] = scores.softmax(dim=-1) @ values
    return out


def own_job(
    library: CudaLibrary, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Return a call of our kernels."""
    import torch
    from kernel_calls import Options, forward_params
    from torch_attention import give_workspace

    out = torch.full_like(q, torch.nan)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), device=q.device)
    params = forward_params(q, k, v, out, lse, Options(), torch.cuda.current_stream().cuda_stream)
    workspace = give_workspace(library, params, q.device)

    def job(_kept: tuple[torch.Tensor, ...] = (lse, workspace)) -> torch.Tensor:
        library.launch(params)
        return out

    return job


def torch_job(backend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call of one of torch's attentions."""
    from experiment import sdpa
    from torch.nn.attention import sdpa_kernel

    def job() -> torch.Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, enable_gqa=True)

    return job


# The report.


def newest_by_place(rows: Rows) -> dict[tuple[int, Shape, str], Mapping[str, str]]:
    """Return the newest row of each head dim, shape and implementation."""
    return {
        (int(row["head_dim"]), Shape(*(int(row[name]) for name in Shape._fields)), row["implementation"]): row
        for row in oldest_first(rows)
    }


def times_of(rows: Rows) -> dict[int, dict[Shape, dict[str, float]]]:
    """Return milliseconds by head dim, shape and implementation; the newest row counts."""
    found: dict[int, dict[Shape, dict[str, float]]] = {}
    for (head_dim, shape, name), row in newest_by_place(rows).items():
        times = found.setdefault(head_dim, {}).setdefault(shape, {})
        if row["status"] == OK:
            times[name] = float(row["milliseconds"])
    return found


def render(rows: Rows) -> str:
    """Return everything as a Markdown document."""
    counts = sorted(int(row["repetitions"]) for row in newest_by_place(rows).values() if row["status"] == OK)
    runs = " to ".join(dict.fromkeys(map(str, counts[:1] + counts[-1:])))
    parts = [
        "# Decoding and chunked prefill",
        f"Written by scripts/bench/decode.py from the CSV file beside it. Forward, bfloat16, {HEADS} query "
        f"and {KEY_HEADS} key heads, no mask, a cold L2, all in turns; milliseconds are medians"
        f"{f' of {runs} runs' if runs else ''}. In brackets: how many times as fast as that "
        "ours is. TB/s: K and V, read once, over the time of ours, and what a copy of them reads and writes "
        "in the same turns. Results were checked before timing.",
        describe(rows),
    ]
    for head_dim, by_shape in sorted(times_of(rows).items()):
        header = ["samples", "Sq", "Sk", *LABELS.values(), "TB/s of ours", "of the copy"]
        lines = [_line(shape, by_shape[shape], head_dim) for shape in SHAPES if shape in by_shape]
        parts += [f"## Head dim {head_dim}", markdown_table(header, lines)]
        parts.append(not_run({"shapes": [str(shape) for shape in SHAPES if shape not in by_shape]}, level=3))
    parts.append(
        failures(
            (name, row["status"], str(shape))
            for (_, shape, name), row in newest_by_place(rows).items()
            if row["status"] != OK
        )
    )
    return document(parts)


def _line(shape: Shape, times: Mapping[str, float], head_dim: int) -> list[str]:
    ours = times.get("ours")

    def cell(name: str) -> str:
        if name not in times:
            return FAILED
        ratio = "" if ours is None or name == "ours" else f" ({times[name] / ours:.2f})"
        return f"{times[name]:.4f}{ratio}"

    def rate(name: str, passes: int) -> str:
        return f"{passes * shape.kv_bytes(head_dim) / times[name] / 1e9:.2f}" if name in times else ""

    return [
        *(str(shape.batch), str(shape.seqlen_q), length_name(shape.seqlen_k)),
        *map(cell, LABELS),
        *(rate("ours", 1), rate(COPY, 2)),
    ]


def draw(rows: Rows, path: Path) -> None:
    """Draw the times of one sample's token against keys, and of 16 K keys against query rows and samples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    head_dim, by_shape = max(times_of(rows).items())
    panels = {
        ("one token", "keys"): lambda shape: shape.seqlen_k if shape[:2] == (1, 1) else None,
        ("16K keys", "query rows"): lambda shape: shape.seqlen_q if shape[::2] == (1, 16_384) else None,
        ("16K keys, a token each", "samples"): lambda shape: (
            shape.batch if shape[1:] == (1, 16_384) else None
        ),
    }
    series = {place: _points(by_shape, position) for place, position in panels.items()}
    drawn = {place: by_name for place, by_name in series.items() if by_name}
    size = max(1, len(drawn))  # where nothing ran the figure is empty
    figure, axes = pyplot.subplots(1, size, figsize=(13, 3.8), squeeze=False, layout="constrained")
    for axis, ((title, label), by_name) in zip(axes[0], drawn.items(), strict=False):
        for name, points in by_name.items():
            axis.plot(*zip(*points, strict=True), "o-", label=LABELS[name], color=COLORS[name])
        axis.set(title=title, xlabel=label, xscale="log", yscale="log")
        places = sorted({at for points in by_name.values() for at, _ in points})
        axis.set_xticks(places, [length_name(at) for at in places])
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        for direction in (axis.xaxis, axis.yaxis):
            direction.set_minor_locator(ticker.NullLocator())
        axis.grid(visible=True, alpha=0.3)
    axes[0, 0].set_ylabel("ms")
    axes[0, 0].legend(frameon=False, fontsize="small")
    figure.suptitle(f"{rows[0]['card']}, head dim {head_dim}", fontsize="medium")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _points(
    by_shape: Mapping[Shape, Mapping[str, float]], position: Callable[[Shape], int | None]
) -> dict[str, list[tuple[int, float]]]:
    """Return by implementation where shapes lie on an axis, and their milliseconds; others lie nowhere."""
    found: dict[str, list[tuple[int, float]]] = {}
    for shape, times in by_shape.items():
        at = position(shape)
        for name in LABELS:
            if at is not None and name in times:
                found.setdefault(name, []).append((at, times[name]))
    return {name: sorted(points) for name, points in found.items()}


def main() -> None:
    """Measure, then report."""
    arguments, command = parse_arguments()
    provenance.check_ready(arguments, partial(Log, columns=COLUMNS))
    if not arguments.report_only:
        run(arguments, command)
    provenance.report(arguments, COLUMNS, render, draw)


if __name__ == "__main__":
    main()
