"""Whether training converges alike whichever way the mask is applied: the paper's figure of training losses.

    python scripts/convergence.py [--steps 200] [--output outputs/convergence]

Each task of scripts/finetune.py (SFT, LoRA, DPO, a reward model) is trained four times from one seed:

(a) through FlashMask;
(b) through the same operator reading a dense mask and skipping nothing. Losses and final weights must be
    those of (a) bit for bit, or the script fails;
(c) through PaddleNLP's own dense attention, without this package. Its sums are in another order, so losses of
    one set of weights differ by rounding; more than `ROUNDING`, relative, fails. In training that grows;
(d) as (c), from the next greater float32 of each weight, which shows by how much any rounding grows. Ten
    times as much between (c) and (a) fails.

The SFT run of (a) is where the other tasks start. It writes convergence.md, .csv and .png to the output
folder; an interrupted run continues. About 10 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import finetune  # first: it silences PaddleNLP's imports
import numpy as np
from paddlenlp.utils.log import logger
from training.provenance import provenance
from training.report import Curves, draw_curves
from training.runs import read_curve
from training.samples import ByteTokenizer
from training.settings import ATTENTION, TASKS, parse, read_settings
from training.tasks import build_model

ROOT = Path(__file__).parents[1]
ROUNDING = 1e-5
SETTINGS = {
    "attention": list(ATTENTION),
    "max_seq_length": 512,
    "num_eval_documents": 50,
    "logging_steps": 50,
    "save_strategy": "no",
}
RUNS = (*ATTENTION, "control")  # (a) to (d)


def train_all(output: Path, steps: int) -> tuple[dict[str, Curves], dict[str, Any]]:
    """Train every task four times; the tasks' losses and report.json."""
    curves, reports = {}, {}
    for task in TASKS:
        print(f"\n=== {task}: {TASKS[task]} ===")
        directory = output / task
        settings = SETTINGS | {"max_steps": steps, "output_dir": str(directory)}
        if task != "sft":
            settings["model_name_or_path"] = str(output / "sft" / "flashmask" / "model")
        run(task, settings)
        reports[task] = json.loads((directory / "report.json").read_text())
        curves[task] = {name: read_curve(directory / name / "curve.csv") for name in ATTENTION}

        start, control = output / f"{task}_start", output / f"{task}_control"
        save_rounded_up(task, settings, start)
        changes = {"attention": ["paddle"], "model_name_or_path": str(start), "output_dir": str(control)}
        run(task, settings | changes)
        curves[task]["control"] = read_curve(control / "paddle" / "curve.csv")
    return curves, reports


def run(task: str, settings: dict[str, Any]) -> None:
    """The task's tiny configuration with these settings, unless it was run before."""
    if (Path(settings["output_dir"]) / "report.json").exists():
        print("finished before")
    else:
        finetune.run(configuration(task, settings))


def configuration(task: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The task's tiny configuration with these settings."""
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return read_settings(ROOT / "configs" / f"{task}_tiny.json", overrides)


def save_rounded_up(task: str, settings: dict[str, Any], folder: Path) -> None:
    """Save the model that a task starts from, every weight replaced by the next greater float32."""
    model = build_model(parse(configuration(task, settings)), len(ByteTokenizer()))
    for parameter in model.parameters():
        parameter.set_value(np.nextafter(parameter.numpy(), np.float32(np.inf)))
    model.save_pretrained(str(folder))


def difference(curves: Curves, one: str, other: str) -> list[float]:
    """Of each step's losses, absolute."""
    pairs = zip(curves[one], curves[other], strict=True)
    return [abs(first["loss"] - second["loss"]) for first, second in pairs]


def rounding(report: dict[str, Any]) -> float:
    """|c - a| / |a| of the evaluation loss of one set of weights, those that (a) leaves."""
    result = report["runs"]["flashmask"]
    return abs(result["eval_loss_paddle"] - result["eval_loss"]) / abs(result["eval_loss"])


def is_good(curves: Curves, report: dict[str, Any]) -> bool:
    """Whether (a) and (b) are the same and (c) differs by rounding and by what training makes of it."""
    growth = max(difference(curves, "paddle", "control"))
    return (
        all(report["identical"].values())
        and rounding(report) <= ROUNDING
        and max(difference(curves, "flashmask", "paddle")) <= max(10 * growth, ROUNDING)
    )


def write_csv(path: Path, curves: dict[str, Curves]) -> None:
    """A row for each task and step."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "step", *(f"loss_{name}" for name in RUNS)])
        for task, runs in curves.items():
            for rows in zip(*runs.values(), strict=True):
                writer.writerow([task, int(rows[0]["step"]), *(row["loss"] for row in rows)])


def draw(path: Path, curves: dict[str, Curves]) -> None:
    """For each task the three curves above, the differences below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6), layout="constrained")
    panels = figure.subplots(2, len(curves), sharex=True, height_ratios=(2, 1))
    for column, (task, runs) in enumerate(curves.items()):
        above, below = panels[:, column]
        draw_curves(above, {name: runs[name] for name in ATTENTION})
        above.set(title=TASKS[task])
        steps = [row["step"] for row in runs["flashmask"]]
        for one, label, colour in (("control", "(d)", "0.7"), ("flashmask", "(a)", "C0")):
            distances = [max(distance, 1e-8) for distance in difference(runs, one, "paddle")]
            below.semilogy(steps, distances, ".", markersize=3, color=colour, label=f"of {label} from (c)")
        below.set(xlabel="step", ylim=(5e-9, 1))
    panels[0, 0].set(ylabel="training loss")
    panels[1, 0].set(ylabel="difference")
    for panel in panels[:, 0]:
        panel.legend()
    figure.savefig(path, dpi=100)


PAGE = """# Convergence

{provenance}

Each task is trained for {steps} steps, four times from one seed: (a) through FlashMask, (b) through the same
operator with a dense mask and no tile skipped, (c) through PaddleNLP's own dense attention, without this
package, (d) as (c) from the next greater float32 of each weight. The SFT model of (a) is where the other
tasks start. Training losses are means of ten steps.

| task | first (a) | last (a) | last (c) | (a), (b): losses, weights | (a), (c) | (c), (d) | same weights |
|---|---:|---:|---:|---|---:|---:|---:|
{rows}

(a), (c) and (c), (d): the greatest difference of a step's losses, absolute. Rounding grows in training, and
(c), (d) says how much. Same weights: the difference between (a) and (c) in the evaluation loss of the weights
that (a) leaves, relative: rounding alone.

Every step's losses: [convergence.csv](convergence.csv).

![Losses of the four tasks, and how far (a) and (d) are from (c)](convergence.png)
"""


def page(command: str, curves: dict[str, Curves], reports: dict[str, Any]) -> str:
    """The table, with what it was measured on."""
    rows = []
    for task, runs in curves.items():
        a, c = ([row["loss"] for row in runs[name]] for name in ("flashmask", "paddle"))
        same = "identical bit for bit" if all(reports[task]["identical"].values()) else "DIFFERENT"
        rows.append(
            f"| {TASKS[task]} | {fmean(a[:10]):.6f} | {fmean(a[-10:]):.6f} | {fmean(c[-10:]):.6f} | {same} "
            f"| {max(difference(runs, 'flashmask', 'paddle')):.1e} "
            f"| {max(difference(runs, 'paddle', 'control')):.1e} | {rounding(reports[task]):.1e} |"
        )
    return PAGE.format(
        provenance=provenance(command),
        steps=len(curves["sft"]["flashmask"]),
        rows="\n".join(rows),
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if (a) and (b) agree bit for bit, and (c) as it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("outputs/convergence"))
    options = parser.parse_args(arguments)
    logger.set_level("ERROR")
    curves, reports = train_all(options.output, options.steps)
    write_csv(options.output / "convergence.csv", curves)
    draw(options.output / "convergence.png", curves)
    text = page(f"python scripts/convergence.py --steps {options.steps}", curves, reports)
    (options.output / "convergence.md").write_text(text)
    print("\n" + text)
    return 0 if all(is_good(curves[task], reports[task]) for task in TASKS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
