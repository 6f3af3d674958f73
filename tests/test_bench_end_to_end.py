"""Training steps: which are run, what is written down of them and what is refused."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import end_to_end
import limits
import paper_data
from bench_rows import RUN, step_row
from provenance import Log


def test_tokens_per_second_weigh_samples_as_their_bins(tmp_path: Path) -> None:
    rows = [step_row("ours", 1.0, 3), step_row("ours", 5.0, 1, 1), step_row("flex", 4.0, 4)]
    rows += [step_row("dense", 1.0, 3), step_row("dense", 0.0, 1, 1, "out of memory")]
    assert end_to_end.rates(rows, "sft", 2, "ours") == {4096: (4096 * 4 / 8, 2.0)}
    assert end_to_end.rates(rows, "sft", 2, "dense") == {}
    assert end_to_end.rates(rows[:1], "sft", 2, "ours") == {}  # a bin is missing
    assert "| 4K | 1 steps of 2 bins |" in end_to_end.render(rows[:1])
    text = end_to_end.render(rows)
    assert "| 4K | 2,048 | 2.0 | 1,024 (2.00) | 2.0 | out of memory |  | not run |  |" in text
    assert "- SDPA, dense mask: out of memory (sft 4K)\n" in text
    missing = end_to_end.render([*rows, step_row("ours", 1.0, 4, layers="8", seqlen="8192")])
    assert "\n- sft, 2 layers: 8K\n- sft, 2 layers, vanilla attention: 4K\n- sft, 8 layers: 4K\n" in missing
    assert "driven from torch" in text
    pytest.importorskip("matplotlib")
    end_to_end.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def test_losses_are_written_down_beside_ours() -> None:
    rows = [
        step_row("ours", 1.0, 3),
        step_row("ours", 5.0, 1, 1),
        step_row("vanilla", 4.0, 4, loss="2.50025"),
    ]
    assert "batch, differ from ours by at most 0.0100 %.\n" in end_to_end.render(rows)
    assert "Losses" not in end_to_end.render(rows[:2])
    alone = end_to_end.render([*rows, step_row("flex", 1.0, 4, layers="8")])
    assert "0.0100 %; were not compared with ours: sft 4K FlexAttention.\n" in alone


def test_a_reason_does_not_break_the_table() -> None:
    text = end_to_end.render([step_row("flex", 0.0, 4, 0, "RuntimeError: a | b")])
    assert "| 4K | not run |  | RuntimeError: a / b |  |" in text
    assert "- FlexAttention: RuntimeError: a | b (sft 4K)\n" in text


def test_methods_that_only_later_tasks_have_are_in_the_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    rows = [step_row("ours", 1.0, 4, task="rm"), step_row("flex", 1.0, 4, task="dpo")]
    end_to_end.draw([*rows, step_row("dense", 1.0, 4, 0, "no")], tmp_path / "x.png")
    [legend] = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["FlexAttention", "paddle_flashmask"]


def test_steps_of_other_layers_bins_and_older_runs_are_not_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [step_row("ours", 9.0, 3, 0, "no", started="2026-02"), step_row("ours", 5.0, 1, 1)]
    rows += [step_row("ours", 1.0, 3, started="2026-03")]  # this one counts, and the failure before does not
    rows += [step_row("ours", 7.0, 3)]  # older, though it stands below
    rows += [step_row("ours", 99.0, 4, bins="1", started="2026-04")]
    rows += [step_row("ours", 2.0, 4, layers="8"), step_row("ours", 3.0, 4, layers="8", seqlen="8192")]
    assert end_to_end.rates(rows, "sft", 2, "ours") == {4096: (4096 * 4 / 8, 2.0)}
    assert end_to_end.rates(rows, "sft", 8, "ours") == {4096: (2048.0, 2.0), 8192: (8192 / 3, 2.0)}
    newer = [*rows, step_row("ours", 0.0, 3, 0, "out of memory", started="2027")]
    assert end_to_end.rates(newer, "sft", 2, "ours") == {}
    text = end_to_end.render(rows)
    assert text.count("## sft, 2 layers") == text.count("## sft, 8 layers") == 1
    assert "| 4K | 2,048 | 2.0 |" in text.split("8 layers")[0]
    assert "| no |" not in text
    assert "| out of memory |" in end_to_end.render(newer)
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    end_to_end.draw(rows, tmp_path / "x.png")
    end_to_end.draw([row for row in rows if row["seqlen"] == "4096"], tmp_path / "x.png")
    curves, points = ([axis.get_title() for axis in figure.axes] for figure in drawn)
    assert curves == ["sft, 8 layers", ""]  # one length alone is no curve
    assert points == ["sft, 2 layers", "sft, 8 layers", "", ""]
    assert "2 layers" not in drawn[0].get_suptitle()


def test_as_many_layers_are_run_as_fit() -> None:
    """2-byte weights: 4 times 202 M elements of a layer of Llama-2-7B make 1.6 GB."""
    pytest.importorskip("torch")
    from llama import Shape

    def fit(gigabytes: float, seqlen: int = 4096, *, lora: bool = False) -> int:
        return end_to_end.layers_that_fit(Shape(), seqlen, lora=lora, free=int(gigabytes * 1e9), itemsize=2)

    assert fit(100) == fit(100, 32768) == fit(80, 32768, lora=True) == 32  # all of the model's
    assert fit(1) == fit(1, lora=True) == 1
    assert fit(10) == 4  # 9 GB less 1.4 GB of activations, at 1.65 GB
    assert 1 < fit(80, 131072, lora=True) < 32


def test_the_layers_are_printed_and_recorded(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_to_end, "MODEL_LAYERS", 3)
    files = ["--csv", str(tmp_path / "x.csv"), "--library", str(library), "--commit", "1", "--no-report"]
    options = ["--lengths", "256", "--bins", "1", "--tasks", "sft", "--methods", "ours"]
    for layers, named, more in (("3", "3 layers", []), ("1", "1 layer", ["--layers", "1"])):
        monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files, *more])
        end_to_end.main()
        assert f"sft 256: {named}\n" in capsys.readouterr().out
        row = Log(tmp_path / "x.csv", end_to_end.COLUMNS).rows[-1]
        assert (row["layers"], row["status"]) == (layers, "ok")


@pytest.mark.parametrize(
    ("milliseconds", "expected"),
    [
        ([400, 400, 400], (400, 3, 3)),
        ([900, 400, 500], (500, 3, 3)),  # what held the first one up does not count
        ([900, 1200], (1050, 2, 2)),
        ([3000], (3000, 1, 1)),
    ],
)
def test_steps_are_repeated_within_their_seconds(
    milliseconds: list[float], expected: tuple[float, int, int]
) -> None:
    left = list(enumerate(milliseconds, 1))

    def run() -> tuple[float, int]:
        peak, taken = left.pop(0)
        return taken, peak

    assert end_to_end.time_step(run) == expected
    assert not left


def test_flex_compiles_once_per_length_and_kind_of_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = ["dpo", "sft", "rm", "lora"]
    assert end_to_end.compiled_items(tasks, [4096, 512]) == [
        *(("dpo", 4096), ("sft", 4096)),
        *(("dpo", 512), ("sft", 512)),
    ]
    called = []
    monkeypatch.setattr(end_to_end, "compile_apart", lambda *args: called.append(args))
    monkeypatch.setattr(sys, "argv", ["x.py", "--prepare", "3", "--tasks", "rm", "--lengths", "8192"])
    end_to_end.main()  # and measures nothing
    [(act, items, name, workers)] = called
    assert (act.func, items, workers) == (end_to_end.compile_flex, [("rm", 8192)], 3)
    assert name(items[0]) == "share_question 8K flex"


def test_preparing_makes_and_checks_flex_attention(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import experiment
    import torch

    def make_flex(
        methods: end_to_end.Methods, *, causal: bool = False
    ) -> object:  # it has no backward on CPUs
        index = torch.arange(methods.seqlen)
        visible = index[:, None] >= index if causal else methods.rule(index[:, None], index)
        return partial(experiment.sdpa, attn_mask=visible[None, None])

    arguments = argparse.Namespace(device="cpu", binary=library, kernels="cuda", commit="1")
    monkeypatch.setattr(end_to_end.Methods, "_make_flex", make_flex)
    end_to_end.compile_flex(("dpo", 256), arguments)
    monkeypatch.setattr(end_to_end.Methods, "_make_flex", lambda methods: make_flex(methods, causal=True))
    with pytest.raises(Exception, match="off by"):
        end_to_end.compile_flex(("dpo", 256), arguments)


def test_a_failed_step_is_run_again_if_asked_and_then_forgotten(tmp_path: Path) -> None:
    log = Log(tmp_path / "x.csv", end_to_end.COLUMNS, RUN)
    key = {"task": "sft", "method": "flex"}

    def left(*, retry: bool = False) -> list[int]:
        return end_to_end.bins_left(log, key, 3, retry=retry)

    assert left() == [0, 1, 2]
    log.add({**key, "bin": 0, "status": "ok"})
    assert left() == left(retry=True) == [1, 2]
    log.add({**key, "bin": 1, "status": "failed"})
    assert left() == []
    assert left(retry=True) == [1, 2]
    log.add({**key, "bin": 1, "status": "ok"})
    assert left() == [2]  # an interrupted retry


def end_to_end_rows(
    path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, *methods: str
) -> list[dict[str, str]]:
    """Run sft at 256 tokens and two bins on the CPU; return all rows."""
    files = ["--csv", str(path), "--library", str(library), "--commit", "1", "--no-report"]
    options = ["--lengths", "256", "--bins", "2", "--layers", "1", "--tasks", "sft", "--methods", *methods]
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files])
    end_to_end.main()
    return Log(path, end_to_end.COLUMNS).rows


def test_one_step_stands_for_all_where_the_whole_matrix_is_computed(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = end_to_end_rows(tmp_path / "x.csv", library, monkeypatch, "vanilla", "ours")
    assert [(row["method"], row["bins"], row["status"]) for row in rows] == [
        *[("ours", "2", "ok")] * 2,  # first, though it was named last
        ("vanilla", "1", "ok"),
    ]
    assert rows[2]["weight"] == str(paper_data.TRAINING_SAMPLES)
    losses = [float(row["loss"]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert {*end_to_end.rates(rows, "sft", 1, "vanilla")} == {256}


def test_a_loss_that_is_not_ours_is_not_timed(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, step = tmp_path / "x.csv", end_to_end.Trainer.step
    end_to_end_rows(path, library, monkeypatch, "ours")
    wrong = 1 + 2 * end_to_end.LOSS_TOLERANCE
    monkeypatch.setattr(end_to_end.Trainer, "step", lambda *a: step(*a) * wrong)
    row = end_to_end_rows(path, library, monkeypatch, "vanilla")[-1]  # ours is of the call before
    assert (row["method"], row["status"], row["seconds"]) == ("vanilla", "failed", "")
    assert row["note"].startswith("WrongResultError: loss: ")
    with pytest.raises(Exception, match="loss: nan"):
        end_to_end.check_loss(float("nan"), None)


def test_a_method_that_hangs_becomes_a_row(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = end_to_end.Methods.make
    monkeypatch.setattr(
        end_to_end.Methods, "make", lambda *a: time.sleep(60) if a[1] == "dense" else make(*a)
    )
    monkeypatch.setattr(end_to_end, "time_limit", lambda: limits.time_limit(5))
    rows = end_to_end_rows(tmp_path / "x.csv", library, monkeypatch, "dense", "vanilla")
    assert [(row["method"], row["status"], row["note"]) for row in rows] == [
        ("dense", "failed", "TimeoutError: took longer than 5 s"),
        ("vanilla", "ok", ""),
    ]


def test_wrong_results_are_not_timed(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    import torch_attention

    forward = torch_attention.Attention.forward
    monkeypatch.setattr(torch_attention.Attention, "forward", lambda *a: tuple(x + 0.1 for x in forward(*a)))
    files = ["--csv", str(tmp_path / "x.csv"), "--library", str(library), "--commit", "1"]
    options = ["--lengths", "256", "--bins", "1", "--tasks", "sft", "--methods", "ours"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files])
    end_to_end.main()
    [row] = Log(tmp_path / "x.csv", end_to_end.COLUMNS).rows
    assert row["status"] == "failed"
    assert row["note"].startswith("WrongResultError: ")
    assert row["seconds"] == ""
