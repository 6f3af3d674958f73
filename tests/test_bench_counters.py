"""What Nsight Compute says of the kernels, as rows and as a page: from what a made-up ncu writes."""

from __future__ import annotations

import argparse
import itertools
import re
import stat
import sys
from pathlib import Path

import pytest
from bench_rows import PROVENANCE, RUN

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import counters
from provenance import Log

NAMES = ["ID", "Kernel Name", *counters.METRICS.values()]


def ncu_text(kernels: int) -> str:
    """What ncu writes of so many kernels: value i + 1000 k of the k-th metric of kernel i."""
    lines = [NAMES, ["", "", *["%"] * len(counters.METRICS)]]
    lines += [
        [str(i), "void forward_kernel<a, b>(c)", *(f"{i + 1000 * k:,}" for k in range(len(counters.METRICS)))]
        for i in range(kernels)
    ]
    quoted = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    return f"==PROF== Connected to process 1\n{quoted}\n==PROF== Disconnected\n"


def test_the_kernels_that_attend_are_profiled() -> None:
    """And those not that a call starts beside them, which prepare or add up."""
    root = Path(__file__).resolve().parents[1]
    sources = "".join(path.read_text() for path in (root / "csrc").rglob("*.cuh"))
    kernels = re.findall(r"__global__[^;{]*?(\w+_kernel)\(", sources)
    pattern = re.compile(counters.MAIN_KERNELS.removeprefix("regex:"))
    profiled = {name for name in kernels if pattern.search(name)}
    assert profiled == {"forward_kernel", "backward_kernel", "few_rows_forward_kernel"}


def test_metrics_are_read_by_name() -> None:
    first, second = counters.parse_metrics(ncu_text(2))
    assert list(first) == list(counters.METRICS)
    assert (first["cycles"], second["cycles"], second["busiest"], second["tensor"]) == (0, 1, 1001, 2001)


def test_a_metric_that_ncu_does_not_tell_raises() -> None:
    text = ncu_text(1).replace(counters.METRICS["xu"], "another")
    with pytest.raises(ValueError, match="sm__inst_executed_pipe_xu"):
        list(counters.parse_metrics(text))
    with pytest.raises(ValueError, match="does not tell"):
        list(counters.parse_metrics("==ERROR== no permission\n"))
    with pytest.raises(ValueError, match="no data"):
        list(counters.parse_metrics(ncu_text(1).replace('"2,000"', '"no data"')))


@pytest.fixture
def fake_ncu(tmp_path: Path) -> Path:
    """Write the --log-file that lies beside it; fail where there is none."""
    path = tmp_path / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport shutil, sys\n"
        f"shutil.copy({str(tmp_path / 'log')!r}, sys.argv[sys.argv.index('--log-file') + 1])\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_every_call_gets_its_row(tmp_path: Path, fake_ncu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counters.calls_of("sm80", 64)
    (tmp_path / "log").write_text(ncu_text(len(calls)))
    monkeypatch.setenv("PATH", str(tmp_path))
    device = argparse.Namespace(run=RUN)
    monkeypatch.setitem(sys.modules, "experiment", argparse.Namespace(Device=lambda *_, **__: device))
    arguments = argparse.Namespace(csv=tmp_path / "x.csv", families=["sm80"], binary=Path("x.so"))
    counters.run(arguments, "python x.py")
    rows = Log(arguments.csv, counters.COLUMNS).rows
    assert [row["head_dim"] for row in rows] == ["128"] * len(calls) + ["64"] * len(calls)
    assert [counters.Call(row["mask"], row["direction"]) for row in rows[len(calls) :]] == calls
    assert [row["cycles"] for row in rows[: len(calls)]] == [str(i) for i in range(len(calls))]
    (tmp_path / "log").unlink()
    counters.run(arguments, "python x.py")  # nothing is left to do
    with pytest.raises(RuntimeError, match="ncu ended with 1"):
        counters.run(argparse.Namespace(**{**vars(arguments), "families": ["sm90"]}), "python x.py")
    (tmp_path / "log").write_text(ncu_text(3))  # fewer kernels than calls
    with pytest.raises(ValueError, match="shorter"):
        counters.run(argparse.Namespace(**{**vars(arguments), "families": ["sm90"]}), "python x.py")
    assert len(Log(arguments.csv, counters.COLUMNS).rows) == len(rows)  # none of them: which is whose?


def test_calls_of_the_same_data_follow_each_other() -> None:
    """A mask's data and reference are made once for both passes."""
    for family, head_dims in counters.FAMILIES.items():
        for head_dim in head_dims:
            calls = counters.calls_of(family, head_dim)
            assert len(set(calls)) == len(calls)
            for forward, backward in itertools.pairwise(calls):
                if backward.direction == "backward":
                    assert forward == counters.Call(backward.mask, "forward")


def test_the_page_names_what_was_not_profiled(tmp_path: Path) -> None:
    rows = [
        {
            **PROVENANCE,
            "family": "sm90",
            "head_dim": "128",
            **call._asdict(),
            **dict.fromkeys(counters.METRICS, "50"),
        }
        for call in counters.calls_of("sm90", 128)
    ]
    text = counters.render(rows)
    assert f"| 128 | {counters.DECODE} | forward | 0.00 | 50 |" in text
    assert "- sm90: D=64, D=256\n- sm80: D=128, D=64" in text
    pytest.importorskip("matplotlib")
    counters.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 0
