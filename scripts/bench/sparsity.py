"""Measure latency against block sparsity: it must fall along a line.

python scripts/bench/sparsity.py                      # all of the paper's samples: 3.5 minutes by estimate
python scripts/bench/sparsity.py --repetitions 3      # 2.5 minutes by estimate
python scripts/bench/sparsity.py --per-bucket 4       # half a minute by estimate
python scripts/bench/sparsity.py --report-only

The paper's setting: bfloat16, one sample of 32 K tokens, 32 heads of 128, forward and backward, causal
documents, shared questions and documents, drawn until every bucket of 0.05 of sparsity has its samples; those
of buckets that cannot be reached go to the others. Their order is random, so that a card that slows down
bends no line. One sample per bucket is compared with the definition first. Rows are appended as they are
measured; a later call leaves out what is there. Reported are those of the newest --per-bucket, --seqlen,
--heads and --head-dim. Writes sparsity.csv, .md and .png. On a CPU it can be tried out: --device cpu
--seqlen 2048 --heads 2 --per-bucket 1
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import provenance
from paper_data import BUCKET, SPARSITY_SETTINGS, Sample, sparsity_samples
from provenance import Log, describe, oldest_first
from results import document, markdown_table

SETTING = [
    "per_bucket",
    "repetitions",
    "seqlen",
    "heads",
    "head_dim",
]  # a line is of one: samples or times differ else
COLUMNS = ["mask", *SETTING, "sample", "rho", "checked", "milliseconds"]
LINEAR_BAR = 0.99
FAILED = "failed"  # of a sample that was wrong, or raised something else, and was not timed
COLORS = {"causal_document": "#b5273d", "share_question": "#5b8db8", "document": "#e0a458"}


@dataclass(frozen=True)
class Line:
    """A line through (1 - rho, milliseconds), and how well it fits."""

    intercept: float
    slope: float
    r_squared: float
    worst: float  # residual relative to the line's value at the full mask
    worst_there: float  # relative to the line's value at the same sparsity

    def at(self, rho: float) -> float:
        """Milliseconds at a sparsity."""
        return self.intercept + self.slope * (1 - rho)


def fit(rhos: Sequence[float], milliseconds: Sequence[float]) -> Line:
    """Fit a line by least squares."""
    x, y = 1 - np.asarray(rhos), np.asarray(milliseconds)
    slope, intercept = np.polyfit(x, y, 1)
    residuals = y - (intercept + slope * x)
    r_squared = 1 - residuals.var() / y.var()
    worst = float(np.abs(residuals).max() / (intercept + slope))
    worst_there = float(np.abs(residuals / (intercept + slope * x)).max())
    return Line(float(intercept), float(slope), float(r_squared), worst, worst_there)


def parse_arguments() -> tuple[argparse.Namespace, str]:
    """Return the arguments, and the command to record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    provenance.add_arguments(parser, "sparsity")
    kinds = list(SPARSITY_SETTINGS)
    parser.add_argument("--masks", nargs="+", default=kinds, choices=kinds)
    parser.add_argument(
        "--per-bucket", type=provenance.count, help="samples; default: the paper's 182, 175, 374 in all"
    )
    parser.add_argument("--seqlen", type=provenance.count, default=32768)
    parser.add_argument("--heads", type=provenance.count, default=32)
    parser.add_argument("--head-dim", type=provenance.count, default=128)
    parser.add_argument(
        "--repetitions", type=provenance.count, default=5, help="after one warm-up; the median counts"
    )
    parser.add_argument("--retry", action="store_true", help="what failed in an earlier call too")
    return provenance.parse(parser, "sparsity.py")


def run(arguments: argparse.Namespace, command: str) -> None:
    """Measure what is left."""
    drawn = draw_samples(arguments.masks, arguments.seqlen, arguments.per_bucket)

    import measure
    import torch
    from experiment import Device, failure_reason
    from torch_attention import Attention

    device = Device(arguments, command)
    log = Log(arguments.csv, COLUMNS, device.run)
    shape = {"seqlen": arguments.seqlen, "heads": arguments.heads, "head_dim": arguments.head_dim}
    q, k, v, dout = (device.random(1, *shape.values(), seed=seed) for seed in range(4))
    setting = {"per_bucket": arguments.per_bucket or "all", "repetitions": arguments.repetitions, **shape}
    samples: list[tuple[int, Sample, bool]] = []
    for of_kind in drawn:
        seen: set[int] = set()
        for number, sample in enumerate(of_kind):
            bucket = SPARSITY_SETTINGS[sample.kind].bucket_of(sample.rho)
            samples.append((number, sample, bucket not in seen))
            seen.add(bucket)
    random.Random(0).shuffle(samples)

    def measure_sample(sample: Sample, to_check: bool) -> float:
        attention = Attention(device.binary, sample.mask, device.name)
        out, lse = attention.forward(q, k, v)
        saved = (q, k, v, out, lse)
        if to_check:
            gradients = dict(zip(("dq", "dk", "dv"), attention.backward(saved, dout), strict=True))
            reference = measure.reference_heads([q, k, v, dout], sample.mask)
            measure.check({"o": out, "lse": lse, **gradients}, reference)

        def both() -> None:
            attention.forward(q, k, v)
            attention.backward(saved, dout)

        return statistics.median(device.time(both, arguments.repetitions))

    for count, (number, sample, to_check) in enumerate(samples):
        key = {"mask": sample.kind, "sample": number, "rho": sample.rho, **setting}
        newest = log.newest(**key)
        if newest and not (arguments.retry and newest["checked"].startswith(FAILED)):
            continue
        try:
            total = measure_sample(sample, to_check)
        except Exception as failure:
            log.add({**key, "checked": f"{FAILED}: {failure_reason(failure)}"})
            print(f"{sample.kind} rho {sample.rho:.3f} {FAILED}: {failure_reason(failure)}", flush=True)
            if device.name != "cpu":
                torch.cuda.synchronize()  # raises where the device itself is lost: the run ends
            continue
        log.add({**key, "checked": "yes" if to_check else "", "milliseconds": total})
        if count % 20 == 0:
            print(
                f"{count + 1} of {len(samples)}: {sample.kind} rho {sample.rho:.3f} {total:.2f} ms",
                flush=True,
            )


def draw_samples(kinds: Sequence[str], seqlen: int, per_bucket: int | None) -> list[list[Sample]]:
    """Draw the samples of each kind, each in a process of its own: 2 seconds at 32 K tokens."""
    with ProcessPoolExecutor(len(kinds)) as pool:
        return [*pool.map(partial(samples_of, seqlen=seqlen, per_bucket=per_bucket), kinds)]


def samples_of(kind: str, seqlen: int, per_bucket: int | None) -> list[Sample]:
    """Draw the samples of one kind; ``per_bucket`` None: the paper's number in all.

    The paper's ten documents, for one, cannot hide more than 0.9 of a document mask; what such buckets leave
    is spread evenly over the others.
    """
    setting = SPARSITY_SETTINGS[kind]
    found = sparsity_samples(kind, seqlen, per_bucket)
    limit = -(-setting.samples // setting.buckets)
    while per_bucket is None and len(found) < setting.samples and limit < setting.samples:
        limit *= 2
        found = sparsity_samples(kind, seqlen, limit)
    if per_bucket is not None or len(found) <= setting.samples:
        return found
    buckets = [setting.bucket_of(sample.rho) for sample in found]
    room = spread(setting.samples, [buckets.count(bucket) for bucket in range(setting.buckets)])
    chosen = []
    for sample, bucket in zip(found, buckets, strict=True):
        if room[bucket]:
            room[bucket] -= 1
            chosen.append(sample)
    return chosen


def spread(wanted: int, available: Sequence[int]) -> list[int]:
    """Return how many to take of each so that they are as many as wanted, or all, as evenly as can be."""
    taken = [0] * len(available)
    left = min(wanted, sum(available))
    while left:
        for place, most in enumerate(available):
            if left and taken[place] < most:
                taken[place] += 1
                left -= 1
    return taken


def empty_buckets(kind: str, rhos: Sequence[float]) -> str:
    """Name the buckets of a kind that no sample fell into; neighbours together."""
    setting = SPARSITY_SETTINGS[kind]
    filled = {setting.bucket_of(rho) for rho in rhos}
    ranges: list[list[int]] = []
    for bucket in range(setting.buckets):
        if bucket in filled:
            continue
        if ranges and ranges[-1][1] == bucket:
            ranges[-1][1] += 1
        else:
            ranges.append([bucket, bucket + 1])
    edges = [[f"{setting.lowest + edge * BUCKET:.2f}" for edge in pair] for pair in ranges]
    return ", ".join(f"{low} to {high}" for low, high in edges) or "none"


Rows = Sequence[Mapping[str, str]]


def of_newest_setting(rows: Rows) -> list[Mapping[str, str]]:
    """Return the rows measured as the newest one was, of each sample the newest."""
    rows = oldest_first(rows)
    newest, found = rows[-1], {}
    for row in rows:
        if all(row[name] == newest[name] for name in SETTING):
            found[row["mask"], row["sample"]] = row
    return [*found.values()]


def render(rows: Rows) -> str:
    """Return the newest setting's lines as a Markdown document."""
    rows = of_newest_setting(rows)
    timed = by_mask(rows)
    table = []
    for kind, of_kind in timed.items():
        rhos = [float(row["rho"]) for row in of_kind]
        line = fit(rhos, [float(row["milliseconds"]) for row in of_kind])
        checked = sum(row["checked"] == "yes" for row in of_kind)
        formula = f"{line.intercept:.2f} + {line.slope:.2f} (1 - rho)"
        cells = [kind, str(len(of_kind)), str(SPARSITY_SETTINGS[kind].samples)]
        cells += [
            f"{min(rhos):.2f} to {max(rhos):.2f}",
            empty_buckets(kind, rhos),
            formula,
            f"{line.r_squared:.5f}",
        ]
        cells += [f"{100 * line.worst:.2f} %", f"{100 * line.worst_there:.2f} %", str(checked)]
        few = rows[0]["per_bucket"] == "all" and len(of_kind) < SPARSITY_SETTINGS[kind].samples
        verdict = "NOT met" if line.r_squared <= LINEAR_BAR else "samples missing" if few else "met"
        table.append([*cells, verdict])
    header = [
        "mask",
        "samples",
        "paper's",
        "rho",
        "empty buckets",
        "milliseconds",
        "R²",
        "worst residual",
        "of the line there",
        "checked",
    ]
    first = rows[0]
    text = (
        "Written by scripts/bench/sparsity.py from the CSV file beside it. Forward and backward of one "
        f"sample of {first['seqlen']} tokens, {first['heads']} heads of {first['head_dim']}, what is done "
        "with the mask included, each repetition with a cold L2. The worst residual is relative to the "
        "line's value at rho = 0, then to its value at the same rho. The checked samples, one per bucket of "
        "0.05, were compared with the definition first. Buckets that the paper's numbers of documents hardly "
        "reach have few samples or none; what they lack is spread over the others."
    )
    table_text = markdown_table([*header, f"R² > {LINEAR_BAR}"], table)
    parts = ["# Latency against sparsity", text, describe(rows), table_text]
    failed = [row for row in rows if row["checked"].startswith(FAILED)]
    parts += [f"NOT timed, {row['mask']}, rho {float(row['rho']):.3f}: {row['checked']}" for row in failed]
    absent = ", ".join(kind for kind in SPARSITY_SETTINGS if kind not in timed)
    parts += [f"NOT fitted, for fewer than three samples: {absent}"] if absent else []
    return document(parts)


def by_mask(rows: Rows) -> dict[str, list[Mapping[str, str]]]:
    """Return the timed rows of each mask that has at least three."""
    found: dict[str, list[Mapping[str, str]]] = {}
    for row in rows:
        if row["checked"].startswith(FAILED):
            continue
        found.setdefault(row["mask"], []).append(row)
    return {kind: found[kind] for kind in SPARSITY_SETTINGS if len(found.get(kind, [])) > 2}


def draw(rows: Rows, path: Path) -> None:
    """Draw the newest setting's samples and lines, and residuals below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = of_newest_setting(rows)
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 7), height_ratios=(3, 1), sharex=True, layout="constrained"
    )
    for kind, of_kind in by_mask(rows).items():
        rhos = np.array([float(row["rho"]) for row in of_kind])
        times = np.array([float(row["milliseconds"]) for row in of_kind])
        line = fit(rhos, times)
        ends = np.array([rhos.min(), rhos.max()])
        fitted = line.intercept + line.slope * (1 - rhos)
        label = f"{kind}: R² = {line.r_squared:.4f}, {len(rhos)} samples"
        top.plot(rhos, times, ".", color=COLORS[kind], label=label, alpha=0.6)
        top.plot(ends, [line.at(rho) for rho in ends], color=COLORS[kind], linewidth=1)
        bottom.plot(rhos, times - fitted, ".", color=COLORS[kind], alpha=0.6)
    top.set_ylabel("forward + backward, ms")
    top.set_ylim(bottom=0)
    if top.has_data():
        top.legend(frameon=False)
    bottom.axhline(0, color="black", linewidth=0.5)
    bottom.set_ylabel("residual, ms")
    bottom.set_xlabel("block sparsity")
    top.set_title(f"{rows[0]['card']}: {rows[0]['seqlen']} tokens, {rows[0]['heads']} heads", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Measure, then report."""
    arguments, command = parse_arguments()
    provenance.check_ready(arguments, partial(Log, columns=COLUMNS))
    if not arguments.report_only:
        run(arguments, command)
    provenance.report(arguments, COLUMNS, render, draw)


if __name__ == "__main__":
    main()
