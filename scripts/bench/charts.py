"""Bar charts of the kernel benchmark, laid out as the paper's: a figure per head dim, a panel per length.

MagiAttention's setting has a figure of curves, a panel per mask and direction.

A mask with the sparsity of the paper's tables stands for the registry's of that name where it was measured.
Needs matplotlib, and no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cells import DIRECTIONS, MAGI_MASKS, PEER_NAMES, PUBLISHED_TWELVE, TWELVE, Case, Row
from paper_tables import Total, exact_rate, magi_rows, paper_shapes, total
from results import Results, length_name

if TYPE_CHECKING:
    from matplotlib.artist import Artist

COLORS = {"flex": "#9aa5b1", "flex_flash": "#5b8db8", "fa4": "#e0a458", "cudnn": "#7fb069", "fa2": "#b8b8b8"}
OURS = "#b5273d"


def draw(results: Results, folder: Path, suffix: str = "") -> Iterator[Path]:
    """Draw total TFLOP/s of forward and backward into PNG files; return their paths.

    ``suffix`` ends their names, so that those of several cards differ.
    """
    shapes = paper_shapes(results)
    for head_dim in sorted({shape.head_dim for shape in shapes}):
        panels = [shape for shape in shapes if shape.head_dim == head_dim]
        totals = {shape: _totals(results, shape) for shape in panels}
        totals = {shape: found for shape, found in totals.items() if found}
        if totals:
            folder.mkdir(parents=True, exist_ok=True)
            published = any(_is_published(masks_of(results, shape)) for shape in totals)
            setting = "_published" if published else ""
            path = folder / f"kernels_{results.kernels}_d{head_dim}{setting}{suffix}.png"
            _draw_panels(results, totals, path)
            yield path
    for head_dim in sorted({row.case.head_dim for row in results.rows if row.case.kv_heads}):
        path = folder / f"kernels_{results.kernels}_d{head_dim}_magi{suffix}.png"
        if _draw_magi(results, head_dim, path):
            yield path


def _draw_magi(results: Results, head_dim: int, path: Path) -> bool:
    """Draw TFLOP/s of the visible area against the length; return whether there was anything to draw."""
    rows: dict[str, dict[Case, dict[str, Row]]] = {}
    for direction in DIRECTIONS:
        measured = magi_rows(results, direction)
        rows[direction] = {case: found for case, found in measured.items() if case.head_dim == head_dim}
    present = [
        mask for mask in MAGI_MASKS if any(case.mask == mask for found in rows.values() for case in found)
    ]
    if not present:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(
        *(len(DIRECTIONS), len(present)),
        figsize=(3.1 * len(present), 6),
        squeeze=False,
        sharex=True,
        sharey="row",
        layout="constrained",
    )
    handles: dict[str, Artist] = {}
    for line, direction in enumerate(DIRECTIONS):
        for mask, axis in zip(present, axes[line], strict=True):
            by_length = {case.seqlen: found for case, found in rows[direction].items() if case.mask == mask}
            for name in (results.kernels, *reversed(PEER_NAMES)):
                rates = {n: exact_rate(found[name]) for n, found in by_length.items() if name in found}
                if rates:
                    own = name == results.kernels
                    label = "paddle_flashmask" if own else PEER_NAMES[name]
                    color = OURS if own else COLORS.get(name)
                    [handles[label]] = axis.plot(list(rates), list(rates.values()), ".-", color=color)
            axis.set_title(f"{mask}, {direction}", fontsize=9)
            axis.set_xscale("log", base=2)
            axis.set_xticks(lengths := sorted(by_length), [length_name(n) for n in lengths], fontsize=8)
            axis.set_ylim(bottom=0)
        axes[line, 0].set_ylabel("TFLOP/s of the visible area")
    figure.legend(
        handles.values(), handles, ncols=len(handles), fontsize=9, loc="outside lower center", frameon=False
    )
    shape = next(case for found in rows.values() for case in found)
    heads = f"{shape.heads}:{shape.kv_heads} heads of {head_dim}"
    figure.suptitle(f"{results.card}; one sample, {heads}, bfloat16", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _totals(results: Results, shape: Case) -> dict[str, dict[str, Total]]:
    """By implementation and mask, as TWELVE names it, ours first."""
    found: dict[str, dict[str, Total]] = {}
    masks = masks_of(results, shape)
    for name in (results.kernels, *reversed(PEER_NAMES)):
        by_mask = {
            mask: sums
            for mask, measured in masks.items()
            if (sums := total(results, replace(shape, mask=measured), name)) is not None
        }
        if by_mask:
            found[name] = by_mask
    return found


def masks_of(results: Results, shape: Case) -> dict[str, str]:
    """Return the masks to draw at a shape by their names in TWELVE, the same for all implementations."""

    def measured(mask: str) -> bool:
        return total(results, replace(shape, mask=mask), results.kernels) is not None

    pairs = zip(TWELVE, PUBLISHED_TWELVE, strict=True)
    return {mask: published if measured(published) else mask for mask, published in pairs}


def _is_published(masks: dict[str, str]) -> bool:
    return any(mask != drawn for mask, drawn in masks.items())


def _draw_panels(results: Results, totals: dict[Case, dict[str, dict[str, Total]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(totals), 1, figsize=(13, 3.4 * len(totals)), squeeze=False, layout="constrained"
    )
    for axis, (shape, by_name) in zip(axes[:, 0], totals.items(), strict=True):
        width = 0.84 / len(by_name)
        for place, (name, by_mask) in enumerate(by_name.items()):
            own = name == results.kernels
            x = [TWELVE.index(mask) + (place - (len(by_name) - 1) / 2) * width for mask in by_mask]
            axis.bar(
                x,
                [sums.rate(*DIRECTIONS) for sums in by_mask.values()],
                width,
                label="paddle_flashmask" if own else PEER_NAMES[name],
                color=OURS if own else COLORS.get(name),
            )
        for mask, sums in by_name.get("flex", {}).items():
            highest = max(found[mask].rate(*DIRECTIONS) for found in by_name.values() if mask in found)
            axis.annotate(
                f"{100 * (sums.gain - 1):+.0f} %",
                (TWELVE.index(mask), highest),
                ha="center",
                va="bottom",
                fontsize=8,
            )
        axis.set_xticks(range(len(TWELVE)), [mask.replace("_", "\n", 1) for mask in TWELVE], fontsize=8)
        axis.set_xlim(-0.6, len(TWELVE) - 0.4)
        axis.set_ylabel("TFLOP/s")
        title = f"{length_name(shape.seqlen)}, head dim {shape.head_dim}, forward + backward, bfloat16"
        published = ", sparsities as in the paper" if _is_published(masks_of(results, shape)) else ""
        axis.set_title(f"{title}{published}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    first = max(totals, key=lambda shape: len(totals[shape]))
    legend = axes[list(totals).index(first), 0].get_legend_handles_labels()
    figure.legend(*legend, ncols=6, fontsize=9, loc="outside lower center", frameon=False)
    beside_flex = any("flex" in found for found in totals.values())
    note = f"; % is ours over {PEER_NAMES['flex']} (FlexAttention on Triton)" if beside_flex else ""
    figure.suptitle(f"{results.card}{note}", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
