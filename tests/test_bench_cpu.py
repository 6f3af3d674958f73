"""The CPU benchmark's command line; what it measures is written to docs/results."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import cpu

ROOT = Path(__file__).resolve().parents[1]


def test_the_committed_samples_make_the_committed_page(tmp_path):
    groups = {"times": {}, "tiles": {}}
    with (ROOT / "docs/results/cpu.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            timing = groups[row["table"]].setdefault(row["name"], cpu.Timing(row["name"], [], []))
            timing.forward.append(float(row["forward_ms"]) / 1e3)
            timing.backward.append(float(row["backward_ms"]) / 1e3)
    measured = cpu.Measured(4e-6, groups["times"], groups["tiles"])
    cpu.write_samples(tmp_path / "cpu.csv", measured)
    assert (tmp_path / "cpu.csv").read_text() == (ROOT / "docs/results/cpu.csv").read_text()

    number = re.compile(r"\d+(?:\.\d+)?")
    page = (ROOT / "docs/results/cpu.md").read_text()
    text = cpu.render(measured, 2, 7, page.split("\n\n")[2])
    assert number.sub("1", text) == number.sub("1", page)
    # The samples of the file are rounded to microseconds.
    numbers, expected = ([float(n) for n in number.findall(x.split("## Bars")[1])] for x in (text, page))
    assert numbers == pytest.approx(expected, rel=1e-3, abs=0.11)


def test_what_falls_short_of_a_bar_is_said():
    def timing(name, seconds):
        return cpu.Timing(name, [seconds / 2] * 3, [seconds / 2] * 3)

    documents = dict(zip(cpu.sparse_documents(), (0.2, 0.25), strict=True))
    times = {cpu.OURS: 1.0, cpu.TORCH: 0.79, **documents}
    lines = cpu.bars_table({name: timing(name, t) for name, t in times.items()}, 21, 0.98).splitlines()
    assert [line.split(" | ")[1:] for line in lines[2:]] == [
        [">= 0.8", "0.79", "NOT met |"],
        [">= 5.0", "5.00", "met |"],
        [">= 5.0", "4.00", "NOT met |"],
        [">= 0.98", "0.9800", "met |"],
    ]


@pytest.mark.parametrize("missing", ["paddle", "torch"])
def test_a_missing_package_is_named_with_what_to_do(missing):
    # A stand-in for the other one: the environments of the tests have no torch.
    code = (
        "import sys, types, runpy; sys.path.insert(0, 'scripts/bench'); "
        "sys.modules.update({name: types.ModuleType(name) for name in ('paddle', 'torch')}); "
        f"sys.modules[{missing!r}] = None; "
        "sys.argv = ['cpu.py']; runpy.run_path('scripts/bench/cpu.py', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"scripts/bench/cpu.py compares with {missing}, which cannot be imported")
    assert "bash scripts/setup_env.sh bench, then: .venv-bench/bin/python scripts/bench/cpu.py" in done.stderr
    assert (ROOT / "requirements" / "bench.txt").exists()
