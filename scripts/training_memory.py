"""Measure what a training step takes in memory and time on a CPU, by sequence length and attention.

    python scripts/training_memory.py [--lengths 1024 2048 4096 8192] [--output outputs/training_memory]

Model and samples are those of configs/sft_tiny.json, the attentions those that scripts/finetune.py knows. A
step is forward and backward of one packed sequence, without an optimizer, and each case has a process of its
own. Its memory is by how much the process grows in `STEPS` steps, at most, when it has built the model and
taken a step of `WARM_UP` tokens: activations, the mask and what making it takes count; weights, their
gradients and libraries do not. Its seconds are the median of all steps but the first, mask ready. Everything
may use every processor, by OMP_NUM_THREADS: by itself Paddle takes one and FlashMask's operator all.

Losses through FlashMask and the dense mask must be the same bit for bit, and Paddle's within `ROUNDING`
(relative), or the script fails. It writes training_memory.csv and .md to the output folder. Linux only. About
3 minutes on 2 cores, and 5 GiB for Paddle's dense attention at 8,192 tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import multiprocessing
import os
import shlex
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import finetune  # first: it silences PaddleNLP's imports
import numpy as np
import paddle
from numpy.typing import NDArray
from paddlenlp.utils.log import logger
from training.provenance import provenance
from training.runs import VISITS
from training.samples import ByteTokenizer
from training.settings import ATTENTION, parse, read_settings
from training.tasks import build_model, dense_collate

from paddle_flashmask.integrations import paddlenlp as integration
from paddle_flashmask.masks import ColumnMask

CONFIG = Path(__file__).parents[1] / "configs" / "sft_tiny.json"
LENGTHS = (1024, 2048, 4096, 8192)
WARM_UP = 64  # tokens
STEPS = 4
ROUNDING = 1e-5
MIB = 2**20

Row = dict[str, Any]
Sample = dict[str, NDArray[Any]]


def measure_all(lengths: list[int]) -> Iterator[Row]:
    """A row for each length, attention and step, as they are measured."""
    for length in lengths:
        settings = read_settings(CONFIG, [f"max_seq_length={length}"])
        packed, _ = finetune.load_data(parse(settings), ByteTokenizer())
        mask = ColumnMask.from_startend_row_indices(packed.startend_row_indices[:1], causal=True)
        case = {"tokens": length, "documents": len(packed.documents[0]), "skipped": mask.block_sparsity()}
        for attention in ATTENTION:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                rows = process.submit(measure, attention, settings, integration.features(packed)[0]).result()
            for row in rows:
                yield case | {"attention": attention} | row
            print(
                f"  {ATTENTION[attention]:16}{memory(rows) / MIB:8,.1f} MiB {seconds(rows):8.3f} s",
                flush=True,
            )


def measure(attention: str, settings: dict[str, Any], sample: Sample) -> list[Row]:
    """Take the steps of one case, in a process that has done nothing else.

    Each row has the resident bytes before any of them, the most since then beyond those, the step's seconds
    and its loss.
    """
    logger.set_level("ERROR")
    visit = VISITS.get(attention)
    parsed = parse(settings | {"use_flash_attention": visit is not None})
    collate = integration.collate if visit else dense_collate
    with integration.enable(visit) if visit else contextlib.nullcontext():
        model = build_model(parsed, len(ByteTokenizer()))
        take_step(model, tensors(collate([{name: values[..., :WARM_UP] for name, values in sample.items()}])))
        # Not getrusage's ru_maxrss: it starts with the parent's peak, and keeps that of imports.
        Path("/proc/self/clear_refs").write_text("5")  # the peak, VmHWM, starts anew
        before = resident_bytes("VmRSS")
        batch = tensors(collate([sample]))
        rows = []
        for step in range(STEPS):
            started = time.perf_counter()
            loss = take_step(model, batch)
            rows.append({"step": step, "seconds": time.perf_counter() - started, "loss": loss})
            rows[-1] |= {"bytes_before": before, "bytes": resident_bytes("VmHWM") - before}
    return rows


def tensors(batch: Sample) -> dict[str, paddle.Tensor]:
    """The batch as a model takes it."""
    return {name: paddle.to_tensor(values) for name, values in batch.items()}


def take_step(model: Any, batch: dict[str, paddle.Tensor]) -> float:
    """Forward and backward; the loss."""
    loss = model(**batch)[0]
    loss.backward()
    model.clear_gradients()
    return float(loss)


def resident_bytes(key: str) -> int:
    """What /proc/self/status says of this process: "VmRSS" now, "VmHWM" at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def memory(rows: list[Row]) -> int:
    """Bytes of a case."""
    return max(row["bytes"] for row in rows)


def seconds(rows: list[Row]) -> float:
    """Seconds of a case: the first step also touches its memory for the first time."""
    return median(row["seconds"] for row in rows if row["step"])


def agree(rows: list[Row]) -> bool:
    """Whether the steps of each length have the losses that they must have."""
    for row in rows:
        loss = next(other["loss"] for other in rows if other["tokens"] == row["tokens"])  # FlashMask's
        tolerance = ROUNDING if row["attention"] == "paddle" else 0.0
        if not math.isclose(row["loss"], loss, rel_tol=tolerance):
            return False
    return True


PAGE = """# Memory and time of a training step

{provenance}

Forward and backward of one packed sequence through the model of
[configs/sft_tiny.json](../../configs/sft_tiny.json), float32, by the sequence's length and by attention, each
in a process of its own (OMP_NUM_THREADS={threads}).

- MiB: by how much the process grows at most, from {before:.0f} MiB with the model built and a short step
  taken. Activations, the mask and what making it takes count, weights and libraries do not.
- s: the median of {repetitions} steps after a first one, mask ready.
- documents: how many the sequence holds; skipped: the share of its 128 x 128 tiles that the mask hides whole.

{table}

"Dense mask" is FlashMask's operator in its test mode: it reads a boolean mask and computes every tile.
"Paddle's dense" is PaddleNLP's attention without this package, which is given a boolean mask. The first two
have the same losses bit for bit, those of the third differ by at most {difference:.1e}, relative.

Every step: [training_memory.csv](training_memory.csv).
"""


def page(command: str, rows: list[Row]) -> str:
    """The table, with what it was measured on."""
    losses = {(row["tokens"], row["attention"]): row["loss"] for row in rows}
    return PAGE.format(
        provenance=provenance(command),
        before=np.mean([row["bytes_before"] for row in rows]) / MIB,
        threads=processors(),
        repetitions=STEPS - 1,
        table=table(rows),
        difference=max(abs(loss / losses[tokens, "flashmask"] - 1) for (tokens, _), loss in losses.items()),
    )


def table(rows: list[Row]) -> str:
    """A line for each length; MiB and seconds of each attention."""
    names = [f"{ATTENTION[name]}, {unit}" for name in ATTENTION for unit in ("MiB", "s")]
    lines = [
        "| " + " | ".join(["tokens", "documents", "skipped", *names]) + " |",
        "|" + "---:|" * (3 + len(names)),
    ]
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        own = [row for row in rows if row["tokens"] == tokens]
        cells = [f"{tokens:,}", str(own[0]["documents"]), f"{own[0]['skipped']:.0%}"]
        for name in ATTENTION:
            case = [row for row in own if row["attention"] == name]
            cells += [f"{memory(case) / MIB:,.0f}", f"{seconds(case):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if the losses agree as they must."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--output", type=Path, default=Path("outputs/training_memory"))
    options = parser.parse_args(arguments)
    logger.set_level("ERROR")
    os.environ["OMP_NUM_THREADS"] = str(processors())  # for the processes to come
    rows = list(measure_all(options.lengths))
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / "training_memory.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    command = ["python", "scripts/training_memory.py"]
    if options.lengths != list(LENGTHS):
        command += ["--lengths", *map(str, options.lengths)]
    text = page(shlex.join(command), rows)
    (options.output / "training_memory.md").write_text(text)
    print("\n" + text)
    if not agree(rows):
        print("FAILED: losses differ")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
