"""Whether training converges alike whichever way the mask is applied: the paper's figure of training losses.

    python scripts/convergence.py [--steps 200] [--output outputs/convergence]

Each task of scripts/finetune.py (SFT, LoRA, DPO, a reward model) is trained three times from one seed:

(a) through FlashMask;
(b) through the same operator reading a dense mask and skipping nothing. Losses and final weights must be
    those of (a) bit for bit, or the script fails;
(c) through PaddleNLP's own dense attention, without this package. Its sums are in another order, so losses of
    the same weights differ by rounding (more than `ROUNDING` fails), and losses of a training by what that
    makes of it (more than `DRIFT` at any step fails).

The SFT run of (a) is where the other tasks start. It writes convergence.md, .csv and .png to the output
folder; an interrupted run continues. About 10 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import finetune  # first: it silences PaddleNLP's imports
from paddlenlp.utils.log import logger
from training.report import Curves, draw_curves
from training.runs import read_curve
from training.settings import ATTENTION, TASKS, read_settings

ROOT = Path(__file__).parents[1]
ROUNDING = 1e-5  # relative
DRIFT = 5e-3  # absolute
SETTINGS = {
    "attention": list(ATTENTION),
    "max_seq_length": 512,
    "num_eval_documents": 50,
    "logging_steps": 50,
    "save_strategy": "no",
}


def train_all(output: Path, steps: int) -> dict[str, Any]:
    """Every task through every attention; the tasks' report.json."""
    reports = {}
    for task in TASKS:
        print(f"\n=== {task}: {TASKS[task]} ===")
        directory = output / task
        if (directory / "report.json").exists():
            print("finished before")
        else:
            settings = SETTINGS | {"max_steps": steps, "output_dir": str(directory)}
            if task != "sft":
                settings["model_name_or_path"] = str(output / "sft" / "flashmask" / "model")
            overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
            finetune.run(read_settings(ROOT / "configs" / f"{task}_tiny.json", overrides))
        reports[task] = json.loads((directory / "report.json").read_text())
    return reports


def drift(curves: Curves) -> list[float]:
    """|c - a| of each step's losses."""
    return [abs(c["loss"] - a["loss"]) for a, c in zip(curves["flashmask"], curves["paddle"], strict=True)]


def rounding(report: dict[str, Any]) -> float:
    """|c - a| / |a| of the evaluation loss of one set of weights, those that (a) leaves."""
    result = report["runs"]["flashmask"]
    return abs(result["eval_loss_paddle"] - result["eval_loss"]) / abs(result["eval_loss"])


def write_csv(path: Path, curves: dict[str, Curves]) -> None:
    """A row for each task and step."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "step", *(f"loss_{name}" for name in ATTENTION)])
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
        draw_curves(above, runs)
        above.set(title=TASKS[task])
        steps = [row["step"] for row in runs["flashmask"]]
        below.semilogy(steps, [max(d, 1e-8) for d in drift(runs)], ".", markersize=3, color="C2")
        below.set(xlabel="step", ylim=(5e-9, 1))
    panels[0, 0].set(ylabel="training loss")
    panels[1, 0].set(ylabel="difference of (c)")
    panels[0, 0].legend()
    figure.savefig(path, dpi=100)


PAGE = """# Convergence

    {command}

- date: {date}; commit: {commit}
- machine: {machine}
- versions: Python {python}, {versions}

Each task is trained for {steps} steps, three times from one seed: (a) through FlashMask, (b) through the same
operator with a dense mask and no tile skipped, (c) through PaddleNLP's own dense attention, without this
package. The SFT model of (a) is where the other tasks start. Training losses are means of ten steps.

The last three columns say how far (c) is from (a): greatest and median difference of a step's losses,
absolute; and of the evaluation loss of one set of weights, those that (a) leaves, relative.

| task | first (a) | last (a) | last (c) | (a), (b): losses, weights | greatest | median | same weights |
|---|---:|---:|---:|---|---:|---:|---:|
{rows}

Every step's losses: [convergence.csv](convergence.csv).

![Losses of the four tasks and how far (c) is from (a)](convergence.png)
"""


def page(command: str, curves: dict[str, Curves], reports: dict[str, Any]) -> str:
    """The table, with what it was measured on."""
    rows = []
    for task, runs in curves.items():
        a, c = ([row["loss"] for row in runs[name]] for name in ("flashmask", "paddle"))
        same = "identical bit for bit" if all(reports[task]["identical"].values()) else "DIFFERENT"
        rows.append(
            f"| {TASKS[task]} | {fmean(a[:10]):.6f} | {fmean(a[-10:]):.6f} | {fmean(c[-10:]):.6f} | {same} "
            f"| {max(drift(runs)):.1e} | {median(drift(runs)):.1e} | {rounding(reports[task]):.1e} |"
        )
    git = ("git", "-C", str(ROOT))
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return PAGE.format(
        command=command,
        date=date.today().isoformat(),
        commit=_output(*git, "rev-parse", "--short", "HEAD") + (" and changes" if changed else ""),
        machine=_machine(),
        python=platform.python_version(),
        versions=", ".join(f"{name} {version(name)}" for name in ("paddlepaddle", "paddlenlp")),
        steps=len(curves["sft"]["flashmask"]),
        rows="\n".join(rows),
    )


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _machine() -> str:
    """How many processors this process may use, and their model."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in cpus if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    return (
        f"{len(os.sched_getaffinity(0))} cores, {fields.get('model name', platform.machine())} "
        f"(family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"
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
    reports = train_all(options.output, options.steps)
    curves: dict[str, Any] = {
        task: {name: read_curve(options.output / task / name / "curve.csv") for name in ATTENTION}
        for task in TASKS
    }
    write_csv(options.output / "convergence.csv", curves)
    draw(options.output / "convergence.png", curves)
    text = page(f"python scripts/convergence.py --steps {options.steps}", curves, reports)
    (options.output / "convergence.md").write_text(text)
    print("\n" + text)
    good = all(
        all(reports[task]["identical"].values())
        and rounding(reports[task]) <= ROUNDING
        and max(drift(curves[task])) <= DRIFT
        for task in TASKS
    )
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
