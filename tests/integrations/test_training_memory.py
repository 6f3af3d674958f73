"""scripts/training_memory.py at one short length, and the table that it gave docs/training.md."""

import csv
import importlib
from pathlib import Path

import pytest

pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")

DOCS = Path(__file__).parents[2] / "docs"
MIB = 2**20


@pytest.fixture(scope="module")
def training_memory():
    return importlib.import_module("training_memory")


def read(path):
    """The rows of training_memory.csv, with numbers where there are some."""
    with path.open(newline="") as file:
        return [
            {name: value if name == "attention" else float(value) for name, value in row.items()}
            for row in csv.DictReader(file)
        ]


def test_one_short_length(training_memory, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # to be as it was after the test
    assert training_memory.main(["--lengths", "512", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "training_memory.md").read_text()
    assert page in capsys.readouterr().out
    assert "python scripts/training_memory.py --lengths 512\n" in page
    rows = read(tmp_path / "training_memory.csv")
    assert [row["attention"] for row in rows[:: training_memory.STEPS]] == list(training_memory.ATTENTION)
    assert all(row["seconds"] > 0 for row in rows)
    # A float32 [S, S] for each of 4 heads, which only Paddle's attention keeps, is 4 MiB in each of 2 layers.
    flashmask, paddle = (
        training_memory.memory([row for row in rows if row["attention"] == name])
        for name in ("flashmask", "paddle")
    )
    assert 0 < flashmask < paddle - 8 * MIB
    # The process of a case starts anew: the parent's memory, or another case's, does not count.
    assert max(row["bytes_before"] for row in rows) < 1.1 * min(row["bytes_before"] for row in rows)


@pytest.mark.parametrize(
    ("attention", "error", "good"),
    [
        ("dense_mask", 1e-7, False),
        ("paddle", 1e-7, True),
        ("paddle", 1e-4, False),
        ("paddle", float("nan"), False),
    ],
)
def test_losses_that_differ_fail(training_memory, attention, error, good):
    rows = [{"tokens": 8, "attention": "flashmask", "loss": 1.0}]
    rows.append({"tokens": 8, "attention": attention, "loss": 1.0 + error})
    assert training_memory.agree(rows) is good


def test_the_published_numbers_agree(training_memory):
    """docs/results with itself, and docs/training.md with it."""
    rows = read(DOCS / "results" / "training_memory.csv")
    assert len(rows) == len(training_memory.LENGTHS) * len(training_memory.ATTENTION) * training_memory.STEPS
    assert training_memory.agree(rows)
    for row in rows:
        row |= {name: int(row[name]) for name in ("tokens", "documents")}
    table = training_memory.table(rows)
    assert table in (DOCS / "results" / "training_memory.md").read_text(encoding="utf-8")
    users_page = (DOCS / "training.md").read_text(encoding="utf-8")
    for line in table.splitlines()[2:]:
        cells = line.split(" | ")  # without what is skipped and the dense mask's
        assert " | ".join([*cells[:2], *cells[3:5], *cells[7:]]) in users_page
