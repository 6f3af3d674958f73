"""Profile the kernels with Nsight Compute: how busy each unit is, and what warps wait for.

python scripts/build_kernels.py --cuda --targets 90 --output build
python scripts/bench/counters.py               # two minutes on an H200 by estimate
python scripts/bench/counters.py --report-only

Two samples of 8 K tokens, heads times head dim = 4096, bfloat16; a row of queries on 16 K keys.
The main kernel of each call alone, at the clock that ncu sets, caches cold; results are checked in the same
process, out of ncu's sight. Rows are appended by family of kernels and head dim; a later call leaves out what
is there. Writes counters.csv, .md and .png. Needs ncu, and torch with CUDA.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import provenance
from cells import paper_case
from provenance import Log, describe
from results import document, markdown_table, not_run

if TYPE_CHECKING:
    from kernel_calls import CudaLibrary

FAMILIES = {"sm90": (128, 64, 256), "sm80": (128, 64)}  # head dims
MASKS = ("full", "causal", "document", "random_eviction", "two_holes")
DETERMINISTIC_MASKS = ("causal", "causal_blockwise")
DECODE = "one row, 16K keys"
SEQLEN, BATCH = 8192, 2
MAIN_KERNELS = "regex:^(few_rows_)?(forward|backward)_kernel$"
OF_PEAK = ".avg.pct_of_peak_sustained_elapsed"
WAITING = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
METRICS = {  # by column
    "cycles": "gpc__cycles_elapsed.max",
    "busiest": f"sm__instruction_throughput{OF_PEAK}",  # the busiest pipe or issue slots
    "tensor": f"sm__pipe_tensor_cycles_active{OF_PEAK}",
    "xu": f"sm__inst_executed_pipe_xu{OF_PEAK}",  # exponentials
    "alu": f"sm__pipe_alu_cycles_active{OF_PEAK}",
    "issue": f"sm__inst_issued{OF_PEAK}",
    "shared": f"l1tex__data_pipe_lsu_wavefronts{OF_PEAK}",
    "memory": f"gpu__compute_memory_throughput{OF_PEAK}",
    "l2_hits": "lts__t_sector_hit_rate.pct",
    "dram": f"gpu__dram_throughput{OF_PEAK}",
    "instructions": "sm__inst_executed.sum",
    "short_scoreboard": WAITING.format("short_scoreboard"),
    "long_scoreboard": WAITING.format("long_scoreboard"),
    "barrier": WAITING.format("barrier"),
    "registers": "launch__registers_per_thread",
}
COLUMNS = ["family", "head_dim", "mask", "direction", *METRICS]
SHARES = ("tensor", "shared", "issue", "dram")  # drawn
COLORS = ("#b5273d", "#5b8db8", "#777777", "#c9c9c9")
Rows = Sequence[Mapping[str, str]]


class Call(NamedTuple):
    """What is profiled; ``direction``: forward, backward, or backward deterministic."""

    mask: str
    direction: str


def calls_of(family: str, head_dim: int) -> list[Call]:
    """Return what is profiled of a family of kernels, in the order of the calls."""
    calls = [Call(mask, direction) for mask in MASKS for direction in ("forward", "backward")]
    calls += [Call(mask, "backward deterministic") for mask in DETERMINISTIC_MASKS]
    if family == "sm90" and head_dim <= 128:
        calls.append(Call(DECODE, "forward"))
    return calls


def parse_arguments() -> tuple[argparse.Namespace, str]:
    """Return the arguments, and the command to record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    provenance.add_arguments(parser, "counters", devices=("cuda",))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    # What ncu starts: makes the calls of one family and head dim.
    parser.add_argument("--calls", nargs=2, metavar=("FAMILY", "HEAD_DIM"), help=argparse.SUPPRESS)
    return provenance.parse(parser, "counters.py")


def run(arguments: argparse.Namespace, command: str) -> None:
    """Profile what is left."""
    from experiment import Device

    ncu = shutil.which("ncu")
    if ncu is None:
        sys.exit("ncu (Nsight Compute) is not on the PATH")
    device = Device(arguments, command, few_rows=True)
    log = Log(arguments.csv, COLUMNS, device.run)
    for family in arguments.families:
        for head_dim in FAMILIES[family]:
            if log.newest(family=family, head_dim=head_dim) is not None:
                continue
            calls = calls_of(family, head_dim)
            profiled = [*zip(calls, profile(ncu, family, head_dim, arguments.binary), strict=True)]
            for call, found in profiled:  # now that each is known to have its own
                log.add({"family": family, "head_dim": head_dim, **call._asdict(), **found})
            print(f"{family}, head dim {head_dim}: {len(calls)} calls", flush=True)


def profile(ncu: str, family: str, head_dim: int, binary: Path) -> list[dict[str, float]]:
    """Let ncu watch the calls of a family and head dim; return the metrics of each by column."""
    with tempfile.NamedTemporaryFile(suffix=".csv") as log:
        command = [ncu, "--profile-from-start", "off", "--kernel-name", MAIN_KERNELS]
        command += ["--metrics", ",".join(METRICS.values()), "--csv", "--page", "raw"]
        command += ["--print-units", "base", "--force-overwrite", "--log-file", log.name]
        command += [sys.executable, __file__, "--calls", family, str(head_dim), "--library", str(binary)]
        done = subprocess.run(command, capture_output=True, text=True)
        text = Path(log.name).read_text()
    if done.returncode != 0:
        said = "".join(part[-2000:] for part in (done.stdout, done.stderr, text))
        raise RuntimeError(f"ncu ended with {done.returncode}:\n{said}")
    return list(parse_metrics(text))


def parse_metrics(text: str) -> Iterator[dict[str, float]]:
    """Yield the metrics of each kernel by column, of what ``ncu --csv --page raw`` writes.

    A line of names, one of units, then one per kernel, below lines that begin with ==. Raises ValueError
    where a metric is missing or is no number.
    """
    lines = csv.reader(line for line in text.splitlines() if line.startswith('"'))
    header = next(lines, [])
    missing = [name for name in METRICS.values() if name not in header]
    if missing:
        raise ValueError(f"ncu does not tell {', '.join(missing)}")
    next(lines)  # units
    for line in lines:
        values = dict(zip(header, line, strict=True))
        yield {column: float(values[name].replace(",", "")) for column, name in METRICS.items()}


def make_calls(family: str, head_dim: int, binary: Path) -> None:
    """Make the calls of a family and head dim, profiled one by one."""
    import torch
    from torch_attention import load

    library = load(binary, family, "cuda")
    jobs: dict[Call, Callable[[], Any]] = {}
    for call in calls_of(family, head_dim):
        if call not in jobs:  # one mask's at a time: all would not fit
            jobs = jobs_of(library, call, head_dim)
        jobs[call]()  # loads what is loaded once
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        jobs[call]()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def jobs_of(library: CudaLibrary, call: Call, head_dim: int) -> dict[Call, Callable[[], Any]]:
    """Return this call and others that share its data, checked."""
    import decode
    import torch
    from implementations import Data, own_job
    from measure import check, reference_heads

    if call.mask == DECODE:
        shapes = ((1, 1, decode.HEADS), *((1, 16_384, decode.KEY_HEADS),) * 2)
        generator = torch.Generator("cuda").manual_seed(0)
        drawn = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
        tensors = [torch.randn(*shape, head_dim, **drawn) for shape in shapes]
        job = decode.own_job(library, *tensors)
        decode.check(job(), decode.reference(*(x[-1] for x in tensors)))
        return {call: job}
    case = replace(paper_case(call.mask, SEQLEN, head_dim), batch=BATCH)
    mask, data = case.build_mask(), Data(case)
    deterministic = call.direction == "backward deterministic"
    job = own_job(library, mask, data, deterministic=deterministic)
    check(job.results, reference_heads(data.tensors, mask))
    if deterministic:
        return {call: job.directions["backward"]}
    return {Call(call.mask, direction): run for direction, run in job.directions.items()}


# The report.


def render(rows: Rows) -> str:
    """Return everything as a Markdown document."""
    parts = [
        "# Counters",
        "Written by scripts/bench/counters.py from the CSV file beside it, whose columns its METRICS name. "
        "Nsight Compute's, of the main kernel alone, at the clock that it sets, caches cold: "
        f"{BATCH} samples of {SEQLEN} tokens, heads times head dim = 4096, bfloat16; {DECODE}: 32 query and "
        "8 key heads. Results were checked in the same process. In % of the peak while the kernel runs: the "
        "busiest pipe (issue slots where they are busier), tensor cores, XU (exponentials), ALU (compares, "
        "selects), issue slots, wavefronts of loads and stores to shared memory, memory units, DRAM; hits in "
        "L2; warp instructions; warps that for each instruction issued wait for shared memory, shuffles or "
        "exponentials (short), for global memory or L2 (long), and at barriers; registers of a thread at "
        "the start.",
        describe(rows),
    ]
    for family in FAMILIES:
        ours = [row for row in rows if row["family"] == family]
        if ours:
            parts += [f"## {family}", _table(ours)]
    present = {(row["family"], int(row["head_dim"])) for row in rows}
    left = {
        family: [f"D={head_dim}" for head_dim in head_dims if (family, head_dim) not in present]
        for family, head_dims in FAMILIES.items()
    }
    return document([*parts, not_run(left)])


def _table(rows: Rows) -> str:
    header = ["D", "mask", "pass", "M cycles", "busiest", "tensor", "XU", "ALU", "issue", "shared", "memory"]
    header += ["L2 hits", "DRAM", "M instr.", "short", "long", "barrier", "registers"]
    scales = {"cycles": (1e6, 2), "instructions": (1e6, 1)}
    digits = {"short_scoreboard": 2, "long_scoreboard": 2, "barrier": 2}
    lines = []
    for row in rows:
        cells = []
        for column in METRICS:
            scale, places = scales.get(column, (1, digits.get(column, 0)))
            cells.append(f"{float(row[column]) / scale:.{places}f}")
        lines.append([row["head_dim"], row["mask"], row["direction"], *cells])
    return markdown_table(header, lines, left=3)


def draw(rows: Rows, path: Path) -> None:
    """Draw the shares of what may bind a kernel, a panel per family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    families = [family for family in FAMILIES if any(row["family"] == family for row in rows)]
    longest = max(sum(row["family"] == family for row in rows) for family in families)
    size = (7 * len(families), 1 + 0.34 * longest)
    figure, axes = pyplot.subplots(1, len(families), figsize=size, squeeze=False, layout="constrained")
    for axis, family in zip(axes[0], families, strict=True):
        ours = [row for row in rows if row["family"] == family]
        labels = [f"{row['mask']}, {row['direction']}, D={row['head_dim']}" for row in ours]
        for i, (name, color) in enumerate(zip(SHARES, COLORS, strict=True)):
            places = [at + 0.2 * (i - 1.5) for at in range(len(ours))]
            axis.barh(places, [float(row[name]) for row in ours], 0.2, label=name, color=color)
        axis.set_yticks(range(len(ours)), labels, fontsize="small")
        axis.invert_yaxis()
        axis.set(title=family, xlabel="% of the peak", xlim=(0, 100))
        axis.grid(visible=True, axis="x", alpha=0.3)
    axes[0, 0].legend(frameon=False, fontsize="small")
    figure.suptitle(rows[0]["card"], fontsize="medium")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Profile, then report."""
    arguments, command = parse_arguments()
    if arguments.calls:
        family, head_dim = arguments.calls
        make_calls(family, int(head_dim), arguments.binary)
        return
    provenance.check_ready(arguments, partial(Log, columns=COLUMNS))
    if not arguments.report_only:
        run(arguments, command)
    provenance.report(arguments, COLUMNS, render, draw)


if __name__ == "__main__":
    main()
