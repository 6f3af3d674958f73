"""The CPU benchmark's command line; what it measures is written to docs/results."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("missing", ["paddle", "torch"])
def test_a_missing_package_is_named_with_what_to_do(missing):
    # A stand-in for the other one: the environments of the tests have no torch.
    code = (
        "import sys, types, runpy; "
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
