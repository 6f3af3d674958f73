"""Measure training steps of Llama-2-7B's decoder layers on the paper's synthetic data, beside dense masks.

python scripts/bench/end_to_end.py --prepare    # lets FlexAttention compile on all cores first
python scripts/bench/end_to_end.py --layers 4   # then some 6 minutes on an H200 by estimate, else 45
python scripts/bench/end_to_end.py --layers 4 --methods ours flex --lengths 65536 131072
python scripts/bench/end_to_end.py --report-only

As many layers as fit into free memory (at most the model's 32; --layers: so many) stand for the model, by an
estimate that is the same for all methods: random weights, bfloat16, full recompute, AdamW; sft, dpo and rm
train all weights, lora thin ones. dpo and rm run one sequence of questions with their answers per step,
without the reference model or the losses of those tasks. A step takes a new mask, and making it ready counts:
our indices, FlexAttention's blocks, the dense ones' matrix. Of each task's 240 samples one per bin of
sparsity is run, and counts as often as its bin has samples; where the whole matrix is computed, whatever the
mask, one stands for all. Per task, length and method attention is compared with the definition first, and
the loss of a first step with ours of the same weights and batch. FlexAttention compiles 25 to 30 s for each
length and kind of mask, 8 of them by default, one after the other unless --prepare did so in several
processes before. Rows are appended as they are measured; a later call leaves out what is there. What runs out
of memory is a row too, and so is what else fails: --retry runs it again, and the newest row of a step counts.
Writes end_to_end.csv, .md and .png. On a CPU it can be tried out: --device cpu --lengths 512 --bins 2
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import provenance
from limits import time_limit
from paper_data import TASKS, TRAINING_SAMPLES, Sample, binned, make_rule, token_arrays, training_samples
from prepare import add_prepare_argument, compile_apart, share_compiled
from provenance import Log, describe, oldest_first
from results import brief, document, failures, length_name, markdown_table, not_run

if TYPE_CHECKING:
    import torch
    from experiment import Device
    from llama import Attend, Shape

METHODS = ("ours", "flex", "dense", "vanilla")  # ours first: others' losses are compared with its
BLIND = ("dense", "vanilla")  # compute the whole matrix: a step takes the same time whatever the mask
LABELS = {
    "ours": "paddle_flashmask",
    "flex": "FlexAttention",
    "dense": "SDPA, dense mask",
    "vanilla": "vanilla attention",
}
COLORS = {"ours": "#b5273d", "flex": "#5b8db8", "dense": "#777777", "vanilla": "#c9c9c9"}
LENGTHS = [2**n for n in range(12, 20)]
DEFAULT_LENGTHS = LENGTHS[:4]  # from there on dense masks take minutes
COLUMNS = ["task", "seqlen", "layers", "method", "bins", "bin", "rho", "weight"]
COLUMNS += ["seconds", "repetitions", "peak_bytes", "loss", "status", "note"]
MODEL_LAYERS = 32
# Elements per token that one layer's backward pass holds at most, in hidden and in feed-forward sizes: what
# the layer computed again, and gradients of it; the loss in float32 is less.
HELD_HIDDEN, HELD_INTERMEDIATE = 20, 8
MARGIN = 0.9  # of free memory, for what the allocator cannot use and the masks of ours
SERIES = ("task", "seqlen", "layers", "method")  # steps of which one number is made
REPETITIONS, STEP_SECONDS = 3, 2.0  # of a step: at most so many, none begun after so many seconds of it
WARM_UPS = 2  # the first one compiles and makes the optimizer's state, after which memory is divided anew
# Of the loss of a first step. Rounding to bfloat16 explains 6e-5 (four layers, 1024 tokens, on a CPU);
# documents that see each other change it by 0.1 there, at 32 K tokens by 0.01 (estimated).
LOSS_TOLERANCE = 5e-4
Rows = Sequence[Mapping[str, str]]


def parse_arguments() -> tuple[argparse.Namespace, str]:
    """Return the arguments, and the command to record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    provenance.add_arguments(parser, "end_to_end")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--lengths", nargs="+", type=provenance.count, default=DEFAULT_LENGTHS)
    parser.add_argument("--layers", type=provenance.count, default=0, help="default: as many as fit")
    parser.add_argument(
        "--bins", type=provenance.count, default=10, help="of sparsity; one step of each is run"
    )
    parser.add_argument("--retry", action="store_true", help="what failed in an earlier call too")
    add_prepare_argument(parser)
    return provenance.parse(parser, "end_to_end.py")


class Methods:
    """Attention q, k, v ``[B, S, H, D]`` to o under a new mask per step, in four ways, at one length."""

    def __init__(self, device: Device, seqlen: int, kind: str):
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        self.device, self.seqlen = device, seqlen
        # The rule reads the same tensors all the time: nothing is compiled anew for a new mask.
        self.tokens = {
            name: torch.zeros(seqlen, dtype=torch.int32, device=device.name)
            for name in ("document", "answer")
        }
        rule = make_rule(kind, self.tokens)
        self.rule = rule
        self.mask_mod = lambda b, h, i, j: rule(i, j)
        self.flex = torch.compile(flex_attention, dynamic=False)

    def make(self, name: str, sample: Sample) -> Attend:
        """Prepare a mask; return the attention under it."""
        import torch
        from experiment import sdpa
        from torch_attention import Attention

        if name == "ours":
            return Attention(self.device.binary, sample.mask, self.device.name)
        for key, array in token_arrays(sample).items():
            self.tokens[key].copy_(torch.from_numpy(array))
        if name == "flex":
            return self._make_flex()
        index = torch.arange(self.seqlen, device=self.device.name)
        visible = self.rule(index[:, None], index)
        if name == "dense":
            return partial(sdpa, attn_mask=visible[None, None])
        return self._make_vanilla(visible)

    def _make_flex(self) -> Attend:
        from torch.nn.attention.flex_attention import create_block_mask

        block_mask = create_block_mask(
            *(self.mask_mod, None, None, self.seqlen, self.seqlen),
            device=self.device.name,
            _compile=self.device.name != "cpu",  # uncompiled, it would hold the dense mask
        )

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in tensors)
            return self.flex(q, k, v, block_mask=block_mask).transpose(1, 2)

        return attend

    def _make_vanilla(self, visible: torch.Tensor) -> Attend:
        import torch

        bias = torch.zeros(visible.shape, dtype=self.device.dtype, device=self.device.name)
        bias.masked_fill_(~visible, -torch.inf)

        def attend(*tensors: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in tensors)
            scores = (q @ k.transpose(2, 3)).mul_(q.shape[3] ** -0.5)
            return (torch.softmax(scores + bias, -1) @ v).transpose(1, 2)

        return attend


def compiled_items(tasks: Sequence[str], lengths: Sequence[int]) -> list[tuple[str, int]]:
    """Return a task and a length of all that FlexAttention compiles: tasks of one kind of mask share it."""
    of_kind: dict[str, str] = {}
    for task in tasks:
        of_kind.setdefault(TASKS[task].kind, task)
    return [(task, seqlen) for seqlen in lengths for task in of_kind.values()]


def compile_flex(item: tuple[str, int], arguments: argparse.Namespace) -> None:
    """Let FlexAttention compile for a task and a length, and check it, as it is before it is timed."""
    import torch
    from experiment import Device, check

    device = Device(arguments, "")
    task, seqlen = item
    shape = model_shape(device)
    [sample] = training_samples(task, seqlen, 1)
    try:
        attend = Methods(device, seqlen, sample.kind).make("flex", sample)
        check(attend, sample, device.attention_tensors(seqlen, shape.heads, shape.head_dim))
    finally:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def model_shape(device: Device) -> Shape:
    """Return Llama-2-7B's sizes; on a CPU ones to try things out with."""
    from llama import Shape

    return Shape.tiny() if device.name == "cpu" else Shape()


def layers_that_fit(shape: Shape, seqlen: int, *, lora: bool, free: int, itemsize: int) -> int:
    """Estimate how many layers fit into so many bytes, one at least and no more than the model has.

    A layer takes its weights, gradients and AdamW's two moments of those that are trained, and its input;
    one layer at a time is computed again, and holds its activations.
    """
    import torch
    from llama import DecoderLayer

    with torch.device("meta"):
        parameters = [*DecoderLayer(shape, lora).parameters()]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    per_layer = sum(p.numel() for p in parameters) + 3 * trained + seqlen * shape.hidden
    held = seqlen * (HELD_HIDDEN * shape.hidden + HELD_INTERMEDIATE * shape.intermediate)
    fitting = int(MARGIN * free / itemsize - held) // per_layer
    return max(1, min(fitting, MODEL_LAYERS))


def free_memory(device: Device) -> int:
    """Return how many bytes are free on the device, what torch holds for reuse included."""
    import torch

    if device.name == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


class Trainer:
    """A few layers and their optimizer."""

    def __init__(self, device: Device, shape: Shape, layers: int, seqlen: int, lora: bool):
        import torch
        from llama import DecoderLayer, rotary_tables

        torch.manual_seed(0)
        self.device = device
        with torch.device(device.name):
            self.layers = [DecoderLayer(shape, lora).to(device.dtype) for _ in range(layers)]
        weights = [p for layer in self.layers for p in layer.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)
        self.tables = rotary_tables(seqlen, shape.head_dim, device.name, device.dtype)
        self.x = device.random(1, seqlen, shape.hidden).requires_grad_()

    def step(self, methods: Methods, method: str, sample: Sample) -> torch.Tensor:
        """One step with a new mask; return its loss."""
        from llama import recomputed

        attend = methods.make(method, sample)
        x = self.x
        for layer in self.layers:
            x = recomputed(layer, x, self.tables, attend)
        loss = x.float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.x.grad = None
        return loss.detach()


def run(arguments: argparse.Namespace, command: str) -> None:
    """Measure what is left."""
    import torch
    from experiment import Device

    device = Device(arguments, command)
    log = Log(arguments.csv, COLUMNS, device.run)
    shape = model_shape(device)
    free = free_memory(device)  # once: all methods get the same layers
    for seqlen in arguments.lengths:
        for kind in dict.fromkeys(TASKS[task].kind for task in arguments.tasks):
            # Tasks of one kind of mask share what is compiled for it.
            torch._dynamo.reset()
            methods = Methods(device, seqlen, kind)
            for task in (task for task in arguments.tasks if TASKS[task].kind == kind):
                drawn = training_samples(task, seqlen)
                layers = arguments.layers or layers_that_fit(
                    shape, seqlen, lora=task == "lora", free=free, itemsize=device.dtype.itemsize
                )
                print(f"{task} {length_name(seqlen)}: {layers_name(layers)}", flush=True)
                for method in (method for method in METHODS if method in arguments.methods):
                    key = {"task": task, "seqlen": seqlen, "layers": layers, "method": method}
                    key["bins"] = 1 if method in BLIND else arguments.bins
                    samples = binned(drawn, key["bins"])
                    left = bins_left(log, key, len(samples), retry=arguments.retry)
                    if left:
                        [(first, _)] = binned(drawn, 1)  # the same for all methods
                        steps = [(number, *samples[number]) for number in left]
                        _measure(device, shape, methods, log, key, first, steps)
                    gc.collect()
                    if device.name != "cpu":
                        torch.cuda.empty_cache()


def bins_left(log: Log, key: Mapping[str, Any], bins: int, *, retry: bool) -> list[int]:
    """Return the bins of a method that are to be run; none where the last one failed, but for a retry."""
    last = log.newest(**key)
    if last is not None and last["status"] == "failed" and not retry:
        return []
    newest = ((number, log.newest(**key, bin=number)) for number in range(bins))
    return [number for number, row in newest if row is None or row["status"] == "failed"]


def _measure(
    device: Device,
    shape: Shape,
    methods: Methods,
    log: Log,
    key: Mapping[str, Any],
    first: Sample,
    steps: list[tuple[int, Sample, int]],
) -> None:
    """Check and warm up one method on a first sample, and time its steps; what is raised ends it with a row.

    Steps are a bin's number, its sample, and how many samples it stands for.
    """
    import torch
    from experiment import VANILLA_TOLERANCE, check, failure_reason
    from measure import NORM_TOLERANCE

    number, sample, weight = steps[0]
    where = f"{key['task']} {length_name(key['seqlen'])} {key['method']}"
    try:
        with time_limit():
            check(
                methods.make(key["method"], first),
                first,
                device.attention_tensors(key["seqlen"], shape.heads, shape.head_dim),
                VANILLA_TOLERANCE if key["method"] == "vanilla" else NORM_TOLERANCE,
            )
            trainer = Trainer(device, shape, key["layers"], key["seqlen"], lora=key["task"] == "lora")
            losses = [float(trainer.step(methods, key["method"], first)) for _ in range(WARM_UPS)]
        check_loss(losses[0], own_loss(log, key))
        gc.collect()  # what the check left would count in peaks
        for number, sample, weight in steps:
            step = partial(trainer.step, methods, key["method"], sample)
            milliseconds, peak, repetitions = time_step(partial(device.time_and_peak, step))
            values = {"bin": number, "rho": sample.rho, "weight": weight, "status": "ok", "loss": losses[0]}
            values |= {"seconds": milliseconds / 1e3, "repetitions": repetitions}
            log.add({**key, **values, "peak_bytes": peak})
            print(f"{where}, rho {sample.rho:.2f}: {milliseconds:.0f} ms, {peak / 2**30:.1f} GiB", flush=True)
    except Exception as failure:
        values = {"bin": number, "rho": sample.rho, "weight": weight, "status": "failed"}
        log.add({**key, **values, "note": failure_reason(failure)})
        print(f"{where}: {failure_reason(failure)}", flush=True)
        if device.name != "cpu":
            torch.cuda.synchronize()  # raises where the device itself is lost: the run ends


def time_step(run: Callable[[], tuple[float, int]]) -> tuple[float, int, int]:
    """Return the median milliseconds, the highest peak and the number of a step's runs; ``run`` gives one's.

    Not the first one alone says whether there are more: where something else held it up, it would be the one
    that counts.
    """
    runs = [run()]
    while len(runs) < REPETITIONS and sum(time for time, _ in runs) <= 1e3 * STEP_SECONDS:
        runs.append(run())
    return statistics.median(time for time, _ in runs), max(peak for _, peak in runs), len(runs)


def own_loss(log: Log, key: Mapping[str, Any]) -> float | None:
    """Return the loss of our first step of the same task, length and layers; None: it was not run."""
    shared = {name: key[name] for name in ("task", "seqlen", "layers")}
    row = log.newest(**shared, method="ours", status="ok")
    return None if row is None else float(row["loss"])


def check_loss(loss: float, own: float | None) -> None:
    """Raise WrongResultError where a loss is not finite, or differs from ours by more than rounding does."""
    from measure import WrongResultError

    if not math.isfinite(loss):
        raise WrongResultError(f"loss: {loss}")
    if own is not None and not abs(loss / own - 1) <= LOSS_TOLERANCE:
        raise WrongResultError(f"loss: {loss:.6g}, of ours {own:.6g}")


def current(rows: Rows) -> list[Mapping[str, str]]:
    """Return the newest row of each step; of a task, length, layers and method those of most bins only."""
    steps: dict[tuple[str, ...], Mapping[str, str]] = {}
    for row in oldest_first(rows):
        steps[tuple(row[name] for name in (*SERIES, "bins", "bin"))] = row
    most: dict[tuple[str, ...], int] = {}
    for step, row in steps.items():
        series = step[: len(SERIES)]
        most[series] = max(most.get(series, 0), int(row["bins"]))
    return [row for step, row in steps.items() if int(row["bins"]) == most[step[: len(SERIES)]]]


def rates(rows: Rows, task: str, layers: int, method: str) -> dict[int, tuple[float, float]]:
    """Return tokens/s, samples weighted as their bins, and the highest peak in GiB, by length.

    Lengths some of whose bins failed or are missing are left out: others' times are of all samples.
    """
    found: dict[int, tuple[float, float]] = {}
    rows = [r for r in current(rows) if (r["task"], int(r["layers"]), r["method"]) == (task, layers, method)]
    for seqlen in sorted({int(row["seqlen"]) for row in rows}):
        ours = [row for row in rows if int(row["seqlen"]) == seqlen]
        weights = [int(row["weight"]) for row in ours]
        if sum(weights) == TRAINING_SAMPLES and all(row["status"] == "ok" for row in ours):
            seconds = sum(w * float(row["seconds"]) for w, row in zip(weights, ours, strict=True))
            peak = max(int(row["peak_bytes"]) for row in ours)
            found[seqlen] = (seqlen * sum(weights) / seconds, peak / 2**30)
    return found


def layer_counts(rows: Rows, task: str) -> list[int]:
    """Return the numbers of layers that a task was run with."""
    return sorted({int(row["layers"]) for row in rows if row["task"] == task})


def layers_name(layers: int) -> str:
    """Return "1 layer", or "32 layers"."""
    return f"{layers} layer{'s' * (layers != 1)}"


def render(rows: Rows) -> str:
    """Return everything as a Markdown document."""
    parts = [
        "# End to end",
        "Written by scripts/bench/end_to_end.py from the CSV file beside it; its --help says what a step is. "
        "bfloat16, one sequence a step, full recompute. Our kernels are driven from torch, like the others: "
        "no CUDA build of Paddle on PyPI has Hopper code. In brackets: how many times as fast ours is. "
        "Of a task's 240 samples one step per bin of sparsity was run, which counts as often as its bin has "
        f"samples; {LABELS['dense']} and {LABELS['vanilla']} compute the whole matrix, so one step of theirs "
        f"stands for all. {_repetitions(rows)}Tokens/s are those of so many layers, not of the whole model: "
        "the fewer there are, the more of a step making the mask ready takes. The figure has what was run at "
        "several lengths.",
        _losses(rows),
        describe(rows),
    ]
    for task in TASKS:
        for layers in layer_counts(rows, task):
            how = "LoRA" if task == "lora" else "all weights"
            parts += [
                f"## {task}, {layers_name(layers)} of Llama-2-7B, {how}",
                _task_table(rows, task, layers),
            ]
    tried = {(row["task"], int(row["layers"]), row["method"], int(row["seqlen"])) for row in rows}
    lengths = [n for n in LENGTHS if any(n == seqlen for *_, seqlen in tried)]
    left_out = {"everything": [length_name(n) for n in LENGTHS if n not in lengths]}
    for task in TASKS:
        for layers in layer_counts(rows, task):
            place = f"{task}, {layers_name(layers)}"
            here = [n for n in lengths if any((task, layers, method, n) in tried for method in METHODS)]
            left_out[place] = [length_name(n) for n in lengths if n not in here]
            for method in METHODS:
                without = [length_name(n) for n in here if (task, layers, method, n) not in tried]
                left_out[f"{place}, {LABELS[method]}"] = without
    failed = (
        (LABELS[row["method"]], row["note"], f"{row['task']} {length_name(int(row['seqlen']))}")
        for row in current(rows)
        if row["status"] == "failed"
    )
    return document([*parts, failures(failed), not_run(left_out)])


def _losses(rows: Rows) -> str:
    """Return a sentence about how far losses are from ours."""
    losses = {tuple(r[n] for n in SERIES): float(r["loss"]) for r in current(rows) if r["status"] == "ok"}
    found, alone = [], []
    for (*shared, method), loss in losses.items():
        own = losses.get((*shared, "ours"))
        if own is not None and method != "ours":
            found.append(abs(loss / own - 1))
        elif own is None:
            alone.append(f"{shared[0]} {length_name(int(shared[1]))} {LABELS[method]}")
    said = [f"differ from ours by at most {100 * max(found):.4f} %"] if found else []
    said += [f"were not compared with ours: {', '.join(alone)}"] if alone else []
    return f"Losses of a first step, of the same weights and batch, {'; '.join(said)}." if said else ""


def _repetitions(rows: Rows) -> str:
    counts = sorted({int(row["repetitions"]) for row in current(rows) if row["status"] == "ok"})
    many = " to ".join(dict.fromkeys(map(str, counts[:1] + counts[-1:])))
    return f"A step's time is the median of {many} runs of it. " if many else ""


def _task_table(rows: Rows, task: str, layers: int) -> str:
    rows = [row for row in current(rows) if (row["task"], int(row["layers"])) == (task, layers)]
    by_method = {method: rates(rows, task, layers, method) for method in METHODS}
    lines = []
    for seqlen in sorted({int(row["seqlen"]) for row in rows}):
        cells = [length_name(seqlen)]
        own = by_method["ours"].get(seqlen)
        for method in METHODS:
            found = by_method[method].get(seqlen)
            if found is None:
                here = [r for r in rows if (r["method"], int(r["seqlen"])) == (method, seqlen)]
                ran = f"{len(here)} steps of {here[0]['bins']} bins" if here else "not run"
                cells += [next((brief(r["note"]) for r in here if r["note"]), ran), ""]
                continue
            gain = f" ({own[0] / found[0]:.2f})" if own and method != "ours" else ""
            cells += [f"{found[0]:,.0f}{gain}", f"{found[1]:.1f}"]
        lines.append(cells)
    header = ["tokens"]
    for method in METHODS:
        header += [f"{LABELS[method]}, tokens/s", "peak GiB"]
    return markdown_table(header, lines)


def draw(rows: Rows, path: Path) -> None:
    """Draw tokens/s and peak memory against the length, a column per task and number of layers.

    What was run at one length alone is left out beside what was run at several: the tables have it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [(task, layers) for task in TASKS for layers in layer_counts(rows, task)]
    lengths = {(row["task"], int(row["layers"]), row["seqlen"]) for row in rows}
    curves = [column for column in columns if sum(length[:2] == column for length in lengths) > 1]
    columns = curves or columns
    figure, axes = pyplot.subplots(
        *(2, len(columns)), figsize=(3.4 * len(columns), 6), squeeze=False, sharex=True, layout="constrained"
    )
    for column, (task, layers) in enumerate(columns):
        for method in METHODS:
            found = rates(rows, task, layers, method)
            for line, axis in enumerate(axes[:, column]):
                if found:
                    heights = [values[line] for values in found.values()]
                    axis.plot(list(found), heights, ".-", color=COLORS[method], label=LABELS[method])
        axes[0, column].set_title(f"{task}, {layers_name(layers)}")
        axes[1, column].set_xscale("log", base=2)
        axes[1, column].set_xlabel("tokens")
        for axis in axes[:, column]:
            axis.set_ylim(bottom=0)
    axes[0, 0].set_ylabel("tokens/s")
    axes[1, 0].set_ylabel("peak memory, GiB")
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        labels = list(handles)
        figure.legend(
            [*handles.values()],
            labels,
            ncols=len(labels),
            fontsize=8,
            frameon=False,
            loc="outside lower center",
        )
    figure.suptitle(f"{rows[0]['card']}, layers of Llama-2-7B", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Measure, then report."""
    arguments, command = parse_arguments()
    share_compiled()
    if arguments.prepare is not None:
        items = compiled_items(arguments.tasks, arguments.lengths)
        compile_apart(
            partial(compile_flex, arguments=arguments),
            items,
            lambda item: f"{TASKS[item[0]].kind} {length_name(item[1])} flex",
            arguments.prepare,
        )
        return
    provenance.check_ready(arguments, partial(Log, columns=COLUMNS))
    if not arguments.report_only:
        run(arguments, command)
    provenance.report(arguments, COLUMNS, render, draw)


if __name__ == "__main__":
    main()
