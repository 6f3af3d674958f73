"""Measure what masks cost in memory and time as sequences grow, beside dense masks and FlexAttention.

python scripts/bench/memory.py --names ours dense "no mask"  # some two minutes by estimate
python scripts/bench/memory.py --prepare                     # FlexAttention compiles on all cores: a minute
python scripts/bench/memory.py                               # what is left: 3.5 minutes by estimate
python scripts/bench/memory.py --report-only

Four parts. mask: bytes of a mask, 4 K to 1 M tokens. peak: how much attention, forward and backward,
allocates beyond its inputs (8 heads of 128), its mask included. batch: what a new batch's mask costs until
attention can start, and what the first of a length costs, and its first call (for FlexAttention:
compilation), from 8 K tokens. layer: a Llama-2-7B decoder layer with full recompute, attention without a mask
beside ours, as in the paper's table of memory, to 256 K. Up to 64 causal documents per sequence. But for a
mask's bytes, one head's output and gradients (batch: its output) are compared with the definition before
anything counts, at all lengths. All is measured in another process, so that what hangs, or loses the device,
is a row that says so, and a new process goes on. Rows are appended as they are measured; a later call leaves
out what is there. What fails is a row too: --retry runs it again. Writes memory.csv, .md and .png. On a CPU
it can be tried out: --device cpu --lengths 512 1024

FlexAttention compiles something small before batch's first length, for what a process does once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import provenance
from cells import TWELVE
from limits import READY_SECONDS, apart
from paper_data import Sample, make_rule, token_arrays
from prepare import add_prepare_argument, compile_apart, share_compiled
from provenance import Log, describe, oldest_first
from results import brief, document, failures, length_name, markdown_table, not_run

from paddle_flashmask.masks import registry

if TYPE_CHECKING:
    import torch
    from experiment import Device

NAMES = ("ours", "dense", "flex", "no mask")  # of implementations; not every part has all
NAMES_OF = {
    "mask": ("ours", "flex"),
    "peak": ("ours", "dense", "flex"),
    "batch": ("ours", "flex"),
    "layer": ("no mask", "ours"),
}
PARTS = tuple(NAMES_OF)
LENGTHS = [2**power for power in range(12, 21)]
HEADS, HEAD_DIM = 8, 128
COLUMNS = ["part", "name", "seqlen", "quantity", "value", "unit", "status", "note"]
WARM_TOKENS = 128  # enough for what libraries allocate once and keep
FEW_TOKENS = 1024  # for which FlexAttention takes the kernel that it takes for many
LAYERS = 32  # of Llama-2-7B
# FlexAttention compiles as long for one length as for another: of a batch it is measured at these only.
COLD_LENGTHS = [2**power for power in (13, 15, 17, 19, 20)]
LONGEST_LAYER = 262144  # the paper's; beyond it a layer without a mask takes half a minute and then fails
SHOWN_MASKS = ("causal_document", "share_question", "document", "global_sliding_window")
Rows = Sequence[Mapping[str, str]]


def documents(seqlen: int) -> Sample:
    """Return up to 64 causal documents of equal length."""
    count = max(1, min(64, seqlen // 1024))
    lengths = [seqlen // count] * count
    lengths[-1] += seqlen - sum(lengths)
    return Sample("causal_document", tuple((length, ()) for length in lengths))


def parse_arguments() -> tuple[argparse.Namespace, str]:
    """Return the arguments, and the command to record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    provenance.add_arguments(parser, "memory")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument(
        "--lengths", nargs="+", type=provenance.count, help="default: 4 K to 1 M, fewer where it says so"
    )
    parser.add_argument("--names", nargs="+", default=list(NAMES), choices=NAMES, help="implementations")
    parser.add_argument("--retry", action="store_true", help="what failed in an earlier call too")
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="for one measurement; longer ones and those that end their process fail; 0: all in this process "
        f"(default: {READY_SECONDS:g}, on a CPU 0)",
    )
    add_prepare_argument(parser)
    arguments, command = provenance.parse(parser, "memory.py")
    if arguments.limit is None:
        arguments.limit = 0 if arguments.device == "cpu" else READY_SECONDS
    return arguments, command


Found = Mapping[str, tuple[float, str]]  # value and unit by quantity
Item = tuple[str, str, int]  # part, implementation, tokens


def items_of(parts: Sequence[str], names: Sequence[str], lengths: Sequence[int] | None) -> list[Item]:
    """Return what to measure; what compiles comes last, so that it delays nothing else."""
    found = [
        (part, name, seqlen)
        for part in parts
        for seqlen in lengths or LENGTHS
        for name in NAMES_OF[part]
        if name in names and (lengths or is_planned(part, name, seqlen))
    ]
    return sorted(found, key=lambda item: item[1] == "flex")


def is_planned(part: str, name: str, seqlen: int) -> bool:
    """Whether one of LENGTHS is measured unless others are asked for."""
    if part == "batch":
        return seqlen in COLD_LENGTHS if name == "flex" else seqlen >= min(COLD_LENGTHS)
    return part != "layer" or seqlen <= LONGEST_LAYER


class Experiment:
    """Measures one thing after another; what fails leaves a row that says why."""

    def __init__(self, device: Device, log: Log, *, retry: bool):
        self.device, self.log, self.retry = device, log, retry

    def measure(self, part: str, name: str, seqlen: int) -> None:
        """Add rows, value and unit by quantity. Whatever is raised is a row too."""
        import torch
        from experiment import failure_reason

        key = {"part": part, "name": name, "seqlen": seqlen}
        if name == "flex":
            torch._dynamo.reset()  # else it gives up compiling after a few lengths
        try:
            for quantity, (value, unit) in getattr(self, part)(name, seqlen).items():
                self.log.add({**key, "quantity": quantity, "value": value, "unit": unit, "status": "ok"})
        except Exception as failure:
            self.log.add({**key, "status": "failed", "note": failure_reason(failure)})
            if self.device.name != "cpu":
                torch.cuda.synchronize()  # raises where the device itself is lost: the process ends
        row = self.log.rows[-1]
        found = (row[column] for column in ("quantity", "value", "unit", "note"))
        print(part, name, length_name(seqlen), *found, flush=True)
        gc.collect()
        if self.device.name != "cpu":
            torch.cuda.empty_cache()

    def is_wanted(self, part: str, name: str, seqlen: int) -> bool:
        """Whether there are no rows yet; after a failure, with --retry."""
        newest = self.log.newest(part=part, name=name, seqlen=seqlen)
        return newest is None or (newest["status"] == "failed" and self.retry)

    def mask(self, name: str, seqlen: int) -> Found:
        """Bytes of masks."""
        if name == "ours":
            sizes = {}
            for kind in TWELVE:
                indices, _ = registry.make(kind, seqlen).to_startend_row_indices()
                sizes[kind] = (0 if indices is None else indices.nbytes, "bytes")
            return sizes
        # And of the tokens' document numbers, which its rule reads.
        block_mask, tokens = self.block_mask(documents(seqlen))
        found = [value for value in vars(block_mask).values() if hasattr(value, "element_size")]
        size = sum(x.element_size() * x.numel() for x in [*found, tokens["document"]])
        return {"causal_document": (size, "bytes")}

    def block_mask(self, sample: Sample) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return FlexAttention's block mask and what its rule reads."""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask

        tokens = {name: torch.from_numpy(a).to(self.device.name) for name, a in token_arrays(sample).items()}
        rule = make_rule(sample.kind, tokens)
        seqlen = len(tokens["document"])
        compiled = self.device.name != "cpu"  # uncompiled, it would hold the dense mask
        return create_block_mask(
            lambda b, h, i, j: rule(i, j),
            None,
            None,
            seqlen,
            seqlen,
            device=self.device.name,
            _compile=compiled,
        ), tokens

    def attention(self, name: str, sample: Sample) -> Callable[..., torch.Tensor]:
        """Return a function from q, k, v [1, S, H, D] to o."""
        import torch
        from experiment import sdpa
        from torch.nn.attention.flex_attention import flex_attention
        from torch_attention import Attention

        if name == "ours":
            return Attention(self.device.binary, sample.mask, self.device.name)
        if name == "dense":
            document = torch.from_numpy(token_arrays(sample)["document"]).to(self.device.name)
            visible = (document[:, None] == document).tril_()
            return partial(sdpa, attn_mask=visible[None, None])
        block_mask, _ = self.block_mask(sample)
        compiled = torch.compile(flex_attention, dynamic=False)

        def flex(*tensors: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in tensors)
            return compiled(q, k, v, block_mask=block_mask).transpose(1, 2)

        return flex

    def peak(self, name: str, seqlen: int) -> Found:
        """Memory of attention, forward and backward."""
        import torch
        from experiment import check

        sample = documents(seqlen)
        self.settle()
        *inputs, dout = self.device.attention_tensors(seqlen, HEADS, HEAD_DIM)
        before = self.device.allocated()
        attend = self.attention(name, sample)
        check(attend, sample, [*inputs, dout])  # compiles what has to be compiled

        def run() -> None:
            torch.autograd.grad(attend(*inputs), inputs, dout)

        peak = self.device.peak_memory(run) - before
        milliseconds = statistics.median(self.device.time(run, 3, 0))
        return {"peak": (peak, "bytes"), "time": (milliseconds, "ms")}

    def settle(self) -> None:
        """Let cuBLAS take the workspace that it keeps, so that nobody's peak has it."""
        import measure

        tensors = self.device.attention_tensors(WARM_TOKENS, 1, HEAD_DIM)
        measure.reference_head(*(x.detach()[0, :, 0] for x in tensors), documents(WARM_TOKENS).mask)

    def batch(self, name: str, seqlen: int) -> Found:
        """What a new batch costs before attention can start, and with the first call."""
        import torch
        from experiment import compare

        q, k, v = (self.device.random(1, seqlen, 1, HEAD_DIM, seed=seed) for seed in range(3))
        cold: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if name == "ours":

            def prepare() -> Any:
                return self.attention("ours", documents(seqlen))

            def call(attend: Any) -> torch.Tensor:
                return attend(q, k, v)

        else:
            from torch._inductor.utils import fresh_inductor_cache
            from torch.nn.attention.flex_attention import flex_attention

            # What a process does once, such as starting those that compile, is not counted.
            torch.compile(lambda x: x + 1)(torch.ones(1, device=self.device.name))
            compiled = torch.compile(flex_attention, dynamic=False)
            # Nor are imports, for which both are compiled for another length, and forgotten.
            few = self.device.random(1, 1, FEW_TOKENS, HEAD_DIM)
            with fresh_inductor_cache(), torch.no_grad():
                compiled(few, few, few, block_mask=self.block_mask(documents(FEW_TOKENS))[0])
            torch._dynamo.reset()
            heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
            cold = fresh_inductor_cache()  # without what was compiled for other parts or by earlier runs

            def prepare() -> Any:
                return self.block_mask(documents(seqlen))[0]

            def call(block_mask: Any) -> torch.Tensor:
                return compiled(*heads_first, block_mask=block_mask).transpose(1, 2)

        made: list[Any] = []
        with cold, torch.no_grad():
            first = self.device.time_once(lambda: made.append(prepare()))
            called = self.device.time_once(lambda: made.append(call(made[0])))
            # Here too: outside no_grad it would be compiled again.
            later = statistics.median(self.device.time_once(prepare) for _ in range(3))
        compare({"o": made.pop()}, [q, k, v, torch.zeros_like(q)], documents(seqlen))
        found = {"first mask": first, "first call": called, "new mask": later}
        return {quantity: (milliseconds, "ms") for quantity, milliseconds in found.items()}

    def layer(self, name: str, seqlen: int) -> Found:
        """One decoder layer with full recompute: parameters, its input, its peak."""
        import torch
        from experiment import check, sdpa
        from llama import DecoderLayer, Shape, recomputed, rotary_tables

        shape = Shape.tiny() if self.device.name == "cpu" else Shape()

        def tables_of(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
            return rotary_tables(tokens, shape.head_dim, self.device.name, self.device.dtype)

        with torch.device(self.device.name):
            layer = DecoderLayer(shape).to(self.device.dtype)
        unmasked = partial(sdpa, is_causal=True)
        few = self.device.random(1, WARM_TOKENS, shape.hidden).requires_grad_()
        recomputed(layer, few, tables_of(WARM_TOKENS), unmasked).mean().backward()
        layer.zero_grad()
        tables = tables_of(seqlen)
        x = self.device.random(1, seqlen, shape.hidden).requires_grad_()
        before = self.device.allocated()
        sample = documents(seqlen) if name == "ours" else Sample("causal_document", ((seqlen, ()),))
        attend = self.attention("ours", sample) if name == "ours" else unmasked
        check(attend, sample, self.device.attention_tensors(seqlen, shape.heads, shape.head_dim))
        peak = self.device.peak_memory(lambda: recomputed(layer, x, tables, attend).mean().backward())
        parameters = sum(p.numel() * p.element_size() for p in layer.parameters())
        return {
            "parameters of a layer": (parameters, "bytes"),
            "input of a layer": (x.numel() * x.element_size(), "bytes"),
            "peak of a layer": (peak - before, "bytes"),
        }


class Worker:
    """Measures items, in a process of its own where it is called there."""

    def __init__(self, arguments: argparse.Namespace, command: str):
        self.arguments, self.command = arguments, command

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment, of the process that asks first."""
        from experiment import Device

        device = Device(self.arguments, self.command)
        log = Log(self.arguments.csv, COLUMNS, device.run)
        return Experiment(device, log, retry=self.arguments.retry)

    def __call__(self, item: Item) -> None:
        """Measure an item; where that costs the device, end the process."""
        experiment = self.experiment
        try:
            experiment.measure(*item)
        except Exception as failure:
            raise SystemExit(f"{item}: {failure}") from failure

    def compile(self, seqlen: int) -> None:
        """Leave what FlexAttention compiles for a length in the caches on disk."""
        import torch

        *inputs, dout = self.experiment.device.attention_tensors(seqlen, HEADS, HEAD_DIM)
        try:
            out = self.experiment.attention("flex", documents(seqlen))(*inputs)
            torch.autograd.grad(out, inputs, dout)
        finally:
            torch._dynamo.reset()  # as before each measurement


def run(arguments: argparse.Namespace, command: str) -> None:
    """Measure what is left, in another process where there is a limit."""
    worker = Worker(arguments, command)  # in this process: a missing library or card ends the run here
    left = [
        item
        for item in items_of(arguments.parts, arguments.names, arguments.lengths)
        if worker.experiment.is_wanted(*item)
    ]
    if not arguments.limit:
        for item in left:
            worker(item)
        return
    log = worker.experiment.log
    earlier = {item: len(rows_of(log.rows, *item)) for item in left}
    for item, _, reason in apart(Worker(arguments, command), left, 1, arguments.limit):
        if reason and len(rows_of(Log(arguments.csv, COLUMNS).rows, *item)) == earlier[item]:
            part, name, seqlen = item
            log.add({"part": part, "name": name, "seqlen": seqlen, "status": "failed", "note": reason})
            print(part, name, length_name(seqlen), reason, flush=True)


def rows_of(rows: Rows, part: str, name: str, seqlen: int) -> list[Mapping[str, str]]:
    """Return the rows of an item."""
    return [row for row in rows if (row["part"], row["name"], row["seqlen"]) == (part, name, str(seqlen))]


def table_of(rows: Rows, part: str, quantity: str, show: Callable[[float], str]) -> str:
    """Return lengths against implementations for one quantity; what failed says why."""
    found = {name: values(rows, part, name, quantity) for name in NAMES_OF[part]}
    lines = []
    for n in lengths_of(rows, part):
        cells = [show(of[n]) if n in of else failure_of(rows, part, name, n) for name, of in found.items()]
        lines.append([length_name(n), *cells])
    return markdown_table(["tokens", *found], lines) if lines else ""


def lengths_of(rows: Rows, part: str) -> list[int]:
    """Return the lengths at which something of a part was tried."""
    return sorted({int(row["seqlen"]) for row in rows if row["part"] == part})


def failure_of(rows: Rows, part: str, name: str, seqlen: int) -> str:
    """Return why something failed last, shortened; "" where it did not or was not tried."""
    key = (part, name, str(seqlen), "failed")
    failed = [r for r in rows if (r["part"], r["name"], r["seqlen"], r["status"]) == key]
    return brief(oldest_first(failed)[-1]["note"]) if failed else ""


def size_name(value: float) -> str:
    """Bytes with three digits and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def values(rows: Rows, part: str, name: str, quantity: str) -> dict[int, float]:
    """Return one quantity of one implementation by length; the newest row counts."""
    key = (part, name, quantity)
    found = (row for row in rows if (row["part"], row["name"], row["quantity"]) == key)
    return {int(row["seqlen"]): float(row["value"]) for row in oldest_first(found)}


def render(rows: Rows) -> str:
    """Return everything as a Markdown document."""
    parts = [
        "# Memory and the cost of a mask",
        "Written by scripts/bench/memory.py from the CSV file beside it; peak memory is what torch's "
        "allocator held at most, in bfloat16. Sequences are up to 64 causal documents of equal length, but "
        "for the masks of the first table.",
        describe(rows),
    ]
    lengths = lengths_of(rows, "mask")
    if lengths:
        by_mask = {name: values(rows, "mask", "ours", name) for name in TWELVE}
        flex = values(rows, "mask", "flex", "causal_document")
        lines = []
        for n in lengths:
            ours, theirs = (failure_of(rows, "mask", name, n) for name in NAMES_OF["mask"])
            cells = [size_name(by_mask[name][n]) if n in by_mask[name] else ours for name in SHOWN_MASKS]
            cells += [size_name(n * n), size_name(2 * n * n)]
            lines.append([length_name(n), *cells, size_name(flex[n]) if n in flex else theirs])
        header = ["tokens", *SHOWN_MASKS, "dense boolean", "dense bfloat16", "FlexAttention's blocks"]
        text = "Dense masks are computed: one or two bytes per element. causal and full need no indices."
        parts += ["## Bytes of a mask", text, markdown_table(header, lines)]
    table = table_of(rows, "peak", "peak", size_name)
    if table:
        text = f"One sample, {HEADS} heads of {HEAD_DIM}; beyond q, k, v and the output's gradient. dense: "
        text += "torch's scaled_dot_product_attention with a boolean mask, by the kernel that torch chooses."
        parts += ["## Peak memory of attention, forward and backward", text, table]
        parts += ["Milliseconds, with a cold L2; the calls come from Python:"]
        parts += [table_of(rows, "peak", "time", "{:.2f}".format)]
    table = table_of(rows, "batch", "new mask", "{:.2f}".format)
    if table:
        text = "Milliseconds from document lengths to a mask on the device: ours, indices made by NumPy and "
        text += "copied; FlexAttention's, create_block_mask, compiled before, at "
        text += f"{', '.join(map(length_name, COLD_LENGTHS))}."
        parts += [
            "## A new batch",
            text,
            table,
            "The first mask of a length, with what create_block_mask compiles:",
            table_of(rows, "batch", "first mask", "{:.1f}".format),
            "The first forward call of a length, of one head, with what FlexAttention compiles:",
            table_of(rows, "batch", "first call", "{:.1f}".format),
        ]
    newest = {(row["part"], row["name"], row["seqlen"]): row for row in oldest_first(rows)}
    failed = (
        (f"{part}, {name}", row["note"], length_name(int(seqlen)))
        for (part, name, seqlen), row in sorted(newest.items(), key=lambda item: int(item[0][2]))
        if row["status"] == "failed"
    )
    return document([*parts, layer_table(rows), failures(failed), not_run(left_out(rows))])


def left_out(rows: Rows) -> dict[str, list[str]]:
    """Return the lengths that nothing was tried at, by part and implementation."""
    tried = {(row["part"], row["name"], int(row["seqlen"])) for row in rows}
    return {
        f"{part}, {name}": [
            length_name(n) for n in LENGTHS if (part, name, n) not in tried and is_planned(part, name, n)
        ]
        for part, names in NAMES_OF.items()
        for name in names
    }


def layer_table(rows: Rows) -> str:
    """Return the paper's table: parameters, activations, one layer's peak, their sum for 32 layers; GiB."""
    lines = []
    plain, ours = (values(rows, "layer", name, "peak of a layer") for name in ("no mask", "ours"))
    sizes = [
        values(rows, "layer", "ours", what) | values(rows, "layer", "no mask", what)
        for what in ("parameters of a layer", "input of a layer")
    ]
    for n in lengths_of(rows, "layer"):
        parts = [LAYERS * size[n] for size in sizes if n in size]
        cells = [length_name(n)]
        cells += [f"{LAYERS * size[n] / 2**30:.2f}" if n in size else "" for size in sizes]
        for name, peaks in zip(NAMES_OF["layer"], (plain, ours), strict=True):
            if n in peaks:
                total = f"{(sum(parts) + peaks[n]) / 2**30:.2f}" if len(parts) == len(sizes) else ""
                cells += [f"{peaks[n] / 2**30:.2f}", total]
            else:
                cells += [failure_of(rows, "layer", name, n), ""]
        lines.append(cells)
    if not lines:
        return ""
    header = ["tokens", "parameters", "activations", "peak of a layer, no mask", "total, no mask"]
    header += ["peak of a layer, ours", "total, ours"]
    text = (
        "## Memory of Llama-2-7B's decoder layers, GiB\n\nOne layer was run, with full recompute; parameters "
        "(bfloat16, without gradients or optimizer) and activations (the layers' inputs) are those of 32. "
        "The paper spreads them over 32 cards. A peak is beyond the parameters and the layer's input, with "
        "gradients and our mask."
    )
    return f"{text}\n\n{markdown_table(header, lines)}"


def draw(rows: Rows, path: Path) -> None:
    """Draw mask bytes, peak memory and the cost of a batch against the length, all axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {"ours": "#b5273d", "dense": "#777777", "flex": "#5b8db8"}
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    lengths = sorted({int(row["seqlen"]) for row in rows})
    axes[0].plot(lengths, [n * n for n in lengths], color=colors["dense"], label="dense, boolean (computed)")
    panels = [
        ("mask", "causal_document", "bytes of a mask"),
        ("peak", "peak", f"peak bytes of attention, {HEADS} heads"),
        ("batch", "new mask", "ms for a new batch's mask"),
    ]
    for axis, (part, quantity, title) in zip(axes, panels, strict=True):
        for name in ("ours", "dense", "flex"):
            found = values(rows, part, name, quantity)
            if found:
                axis.plot(*zip(*sorted(found.items()), strict=True), ".-", color=colors[name], label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("tokens")
        if axis.has_data():
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", nonpositive="clip")
            axis.legend(frameon=False, fontsize=8)
    figure.suptitle(rows[0]["card"], fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Measure, then report."""
    arguments, command = parse_arguments()
    if arguments.prepare is not None:
        share_compiled()  # no further: a batch's compilation is timed with the threads that users have
        lengths = arguments.lengths or LENGTHS
        compile_apart(Worker(arguments, command).compile, lengths, length_name, arguments.prepare)
        return
    provenance.check_ready(arguments, partial(Log, columns=COLUMNS))
    if not arguments.report_only:
        run(arguments, command)
    provenance.report(arguments, COLUMNS, render, draw)


if __name__ == "__main__":
    main()
