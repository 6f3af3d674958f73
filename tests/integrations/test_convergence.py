"""scripts/convergence.py, shortened: four tasks, three attentions, one table."""

import csv
import importlib
from pathlib import Path

import pytest

pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")
pytest.importorskip("matplotlib")

# PaddleNLP calls what Paddle 3.3 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::paddle.utils.deprecated.VisibleDeprecationWarning")
RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def convergence():
    return importlib.import_module("convergence")


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_few_steps(convergence, tmp_path, monkeypatch, capsys):
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_eval_documents": 8}
    monkeypatch.setattr(convergence, "SETTINGS", convergence.SETTINGS | small | {"max_seq_length": 256})
    assert convergence.main(["--steps=3", f"--output={tmp_path}"]) == 0
    losses = rows(tmp_path / "convergence.csv")
    assert [(row["task"], row["step"]) for row in losses] == [
        (task, str(step)) for task in convergence.TASKS for step in (1, 2, 3)
    ]
    for row in losses:
        flashmask, dense_mask, paddle = (float(row[f"loss_{name}"]) for name in convergence.ATTENTION)
        assert flashmask == dense_mask
        assert paddle == pytest.approx(flashmask, rel=1e-5)
    page = (tmp_path / "convergence.md").read_text()
    assert page in capsys.readouterr().out
    assert page.count("identical bit for bit") == 4
    assert (tmp_path / "convergence.png").exists()

    # A second call trains nothing again; losses that are not the same fail it.
    curve = tmp_path / "rm" / "flashmask" / "curve.csv"
    values = rows(curve)
    values[2]["loss"] = str(float(values[2]["loss"]) + 0.01)
    with curve.open("w", newline="") as file:
        writer = csv.DictWriter(file, values[0])
        writer.writeheader()
        writer.writerows(values)
    assert convergence.main(["--steps=3", f"--output={tmp_path}"]) == 1
    assert "| 1.0e-02 |" in (tmp_path / "convergence.md").read_text()


def test_the_published_losses_are_of_200_steps_and_agree(convergence):
    """What docs/results says of its own table."""
    losses = rows(RESULTS / "convergence.csv")
    for task in convergence.TASKS:
        own = [row for row in losses if row["task"] == task]
        assert [int(row["step"]) for row in own] == list(range(1, len(own) + 1))
        assert len(own) >= 200
        for row in own:
            flashmask, dense_mask, paddle = (float(row[f"loss_{name}"]) for name in convergence.ATTENTION)
            assert flashmask == dense_mask
            assert paddle == pytest.approx(flashmask, rel=0.02, abs=0.02)
    assert (RESULTS / "convergence.md").read_text().count("identical bit for bit") == 4
