"""Runs of one configuration beside each other: printed, as CSV and JSON, and drawn."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path
from statistics import median
from typing import Any

from .runs import read_curve
from .settings import ATTENTION

Curves = dict[str, list[dict[str, Any]]]  # the rows of each run, by attention


def report(directory: Path, results: dict[str, dict[str, Any]]) -> bool:
    """Print and write the runs of `directory`; False if FlashMask and the dense mask differ in a bit.

    It writes losses.csv, report.json and, where there is matplotlib, losses.png.
    """
    curves = {name: read_curve(directory / name / "curve.csv") for name in results}
    speed = {name: median(row["tokens"] / row["seconds"] for row in rows) for name, rows in curves.items()}
    same = identical(curves, results)
    print_table(curves, results, speed, same)
    write_csv(directory / "losses.csv", curves)
    summary = {"runs": results, "tokens_per_second": speed, "identical": same}
    (directory / "report.json").write_text(json.dumps(summary, indent=2) + "\n")
    drawn = draw(directory / "losses.png", curves)
    print(f"\nwritten to {directory}: losses.csv, report.json" + (", losses.png" if drawn else ""))
    return all(same.values())


def identical(curves: Curves, results: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """What is the same bit for bit between FlashMask and the dense mask; empty if one of them did not run."""
    if not {"flashmask", "dense_mask"} <= set(results):
        return {}
    losses = [[row["loss"] for row in curves[name]] for name in ("flashmask", "dense_mask")]
    flash, dense = results["flashmask"], results["dense_mask"]
    return {
        "losses": losses[0] == losses[1],
        "evaluation loss": flash["eval_loss"] == dense["eval_loss"],
        "final weights": flash["weights_sha256"] == dense["weights_sha256"],
    }


def print_table(
    curves: Curves,
    results: dict[str, dict[str, Any]],
    speed: dict[str, float],
    same: dict[str, bool],
) -> None:
    """A column for each run."""
    print("\n" + " " * 25 + "".join(f"{ATTENTION[name]:>16}" for name in results))
    steps = len(next(iter(curves.values())))
    for rows in zip(*curves.values(), strict=True):
        step = int(rows[0]["step"])
        if step in (1, steps) or step % max(1, steps // 10) == 0:
            print(f"{'loss at step':>20} {step:4d}" + "".join(f"{row['loss']:16.6f}" for row in rows))
    for label, values, format_ in (
        ("evaluation loss", [result["eval_loss"] for result in results.values()], ".6f"),
        ("tokens/s (median step)", speed.values(), ",.0f"),
        ("bytes of mask per batch", [result["mask_bytes"] for result in results.values()], ",d"),
    ):
        print(f"{label:25}" + "".join(f"{value:>16{format_}}" for value in values))
    for label, equal in same.items():
        print(f"{label:25}{'identical bit for bit' if equal else 'DIFFERENT':>32}")


def write_csv(path: Path, curves: Curves) -> None:
    """A row for each step, columns for each run."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = [f"{column}_{name}" for name in curves for column in ("loss", "accuracy", "seconds")]
        writer.writerow(["step", "tokens", *columns])
        for rows in zip(*curves.values(), strict=True):
            values = [row[column] for row in rows for column in ("loss", "accuracy", "seconds")]
            writer.writerow([int(rows[0]["step"]), int(rows[0]["tokens"]), *values])


def draw(path: Path, curves: Curves) -> bool:
    """Draw the loss curves in one picture; False without matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    draw_curves(axes, curves)
    axes.set(xlabel="step", ylabel="training loss")
    axes.legend()
    figure.savefig(path, dpi=120)
    return True


def draw_curves(axes: Any, curves: Curves) -> None:
    """The loss curves in one set of axes, in styles that show where they coincide."""
    for (name, rows), style, width in zip(curves.items(), ("-", "--", ":"), (1.5, 1.5, 2.5), strict=False):
        axes.plot(
            [row["step"] for row in rows],
            [row["loss"] for row in rows],
            style,
            linewidth=width,
            label=ATTENTION[name],
        )
