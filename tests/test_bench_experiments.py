"""The experiments beside the kernel tables: data, files, what they conclude, and small runs on a CPU."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import cells
import end_to_end
import inference
import memory
import paper_data
import prepare
import provenance
import regress
import sparsity
import stale
from cells import ROOT, Row, Run, hash_sources
from provenance import Log
from results import Results

RUN = Run("2026-01-01T00:00:00Z", "sm90", "abc", "123", "NVIDIA H200", "1.0", "2.11", "python x.py")
PROVENANCE = {"card": "a card", "sources": "abc", "commit": "1", "kernels": "sm90", "driver": "1"}
PROVENANCE |= {"torch": "2", "started": "2026-01-01", "command": "python x.py"}


# Data


@pytest.mark.parametrize("kind", paper_data.SPARSITY_SETTINGS)
def test_sparsity_samples_fill_their_buckets(kind: str) -> None:
    setting = paper_data.SPARSITY_SETTINGS[kind]
    samples = paper_data.sparsity_samples(kind, seqlen=8192, per_bucket=1)
    found = sorted(int((sample.rho - setting.lowest) / paper_data.BUCKET) for sample in samples)
    assert len(found) == len(set(found)) >= 0.7 * setting.buckets
    for sample in samples:
        assert sum(question + sum(answers) for question, answers in sample.documents) == 8192
        assert sample.rho == sample.mask.block_sparsity(128)
        assert sample.hidden == pytest.approx(sample.rho, abs=0.06)
        assert sample.rho <= sample.hidden + 1e-3
        low, high = setting.documents
        assert low <= len(sample.documents) <= high
        if kind == "share_question":
            assert all(2 <= len(answers) <= 6 for _, answers in sample.documents)


@pytest.mark.parametrize("kind", paper_data.SPARSITY_SETTINGS)
@pytest.mark.parametrize("seqlen", [1, 127, 900, 1024])
def test_the_sparsity_of_a_sample_is_its_masks(kind: str, seqlen: int, rng: np.random.Generator) -> None:
    for count in (1, 3, 12):
        lengths = paper_data.cut(rng, seqlen, min(count, seqlen))
        parts = [paper_data.cut(rng, length, min(3, length)) for length in lengths]
        sample = paper_data.Sample(kind, tuple((part[0], tuple(part[1:])) for part in parts))
        assert sample.rho == sample.mask.block_sparsity(128)


def test_drawing_ends_where_nothing_is_filled_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    cut = paper_data.cut
    monkeypatch.setattr(paper_data, "cut", lambda *a: drawn.append(a) or cut(*a))
    monkeypatch.setattr(paper_data, "IDLE_DRAWS", 50)
    assert len(paper_data.sparsity_samples("document", 128, 3)) == 3  # of one tile: nothing is hidden
    assert len(drawn) == 53


def test_samples_of_buckets_out_of_reach_go_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sparsity.spread(10, [9, 0, 9, 1]) == [5, 0, 4, 1]
    assert sparsity.spread(10, [1, 0, 2]) == [1, 0, 2]
    setting = replace(paper_data.SPARSITY_SETTINGS["document"], samples=60)
    monkeypatch.setitem(paper_data.SPARSITY_SETTINGS, "document", setting)
    assert len(paper_data.sparsity_samples("document", 4096)) < 60
    samples = sparsity.samples_of("document", 4096, None)
    assert len(samples) == len({sample.documents for sample in samples}) == 60
    counts = Counter(setting.bucket_of(sample.rho) for sample in samples)
    assert 12 < len(counts) < 20
    assert max(counts.values()) <= 6
    rhos = [sample.rho for sample in samples]
    assert sparsity.empty_buckets("document", rhos) == "0.85 to 1.00"
    assert sparsity.empty_buckets("document", np.linspace(0.01, 0.99, 99).tolist()) == "none"
    assert sparsity.samples_of("document", 4096, 1) == paper_data.sparsity_samples("document", 4096, 1)


@pytest.mark.parametrize(("name", "answers", "most"), [("sft", 1, 10), ("dpo", 2, 10), ("rm", 6, 3)])
def test_training_samples_are_the_papers(name: str, answers: int, most: int) -> None:
    task = paper_data.TASKS[name]
    samples = paper_data.training_samples(name, 4096)
    assert len(samples) == 240
    for sample in samples:
        assert sum(question + sum(sizes) for question, sizes in sample.documents) == 4096
        *documents, last = sample.documents if not sample.documents[-1][1] else (*sample.documents, (0, ()))
        assert last[0] <= task.padding
        assert 1 <= len(documents) <= most
        for question, sizes in documents:
            assert len(sizes) == answers
            assert question + sum(sizes) >= task.minimum
            assert all(0.08 * question < size < 0.22 * question for size in sizes if question > 100)
    bins = paper_data.binned(samples)
    assert len(bins) <= 10
    assert sum(weight for _, weight in bins) == 240
    assert [sample.hidden for sample, _ in bins] == sorted(sample.hidden for sample, _ in bins)


@pytest.mark.parametrize("kind", ["causal_document", "share_question", "document"])
def test_rules_are_the_masks(kind: str) -> None:
    sample = paper_data.Sample(kind, ((5, (3, 2)), (7, (1,)), (6, ())))
    rule = paper_data.make_rule(kind, paper_data.token_arrays(sample))
    i, j = np.arange(24)[:, None], np.arange(24)[None]
    np.testing.assert_array_equal(rule(i, j), sample.mask.to_dense()[0, 0])


# Files


def test_log_survives_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log.csv"
    log = Log(path, ["mask", "value"], RUN)
    log.add({"mask": "a, b", "value": 0.123456789})
    log.add({"mask": "c"})
    again = Log(path, ["mask", "value"], replace(RUN, started="later"))
    assert again.newest(mask="a, b")["value"] == "0.123457"
    assert again.newest(mask="c", value="") is not None
    assert again.newest(mask="d") is None
    assert Log(path, ["mask", "value"], replace(RUN, sources="new")).newest(mask="c") is None
    assert Log(path, ["mask", "value"], replace(RUN, card="another")).newest(mask="c") is None
    with pytest.raises(ValueError, match="expected the columns"):
        Log(path, ["mask"], RUN)
    later = Log(path, ["mask", "value"], replace(RUN, started="2027", sources="new"))
    later.add({"mask": "e"})
    assert [row["mask"] for row in provenance.newest_of(Log(path, ["mask", "value"]).rows)] == ["e"]


def test_recorded_command_names_what_matters() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", nargs="+", type=int, default=[1])
    parser.add_argument("--per-bucket", type=int)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--flex", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--bars", action="store_true")
    arguments = parser.parse_args(["--per-bucket", "3", "--csv", "x.csv", "--lengths", "1"])
    command = provenance.recorded_command("x.py", parser, arguments)
    assert command == "python scripts/bench/x.py --per-bucket 3"
    arguments = parser.parse_args(["--no-flex", "--bars"])
    command = provenance.recorded_command("x.py", parser, arguments)
    assert command == "python scripts/bench/x.py --no-flex --bars"


# Conclusions


def sparsity_rows(noise: float) -> list[dict[str, str]]:
    rng = np.random.default_rng(0)
    rows = []
    for kind in paper_data.SPARSITY_SETTINGS:
        for number, rho in enumerate(np.linspace(0.52, 0.92, 9)):
            milliseconds = 2 + 10 * (1 - rho) + noise * rng.standard_normal()
            row = {"mask": kind, "seqlen": "32768", "heads": "32", "head_dim": "128", "checked": ""}
            row |= {"per_bucket": "1", "repetitions": "5", "sample": str(number)}
            rows.append(PROVENANCE | row | {"rho": str(rho), "milliseconds": str(milliseconds)})
    return rows


def test_latency_is_fitted_by_a_line(tmp_path: Path) -> None:
    line = sparsity.fit([0.0, 0.5, 1.0], [12.0, 7.0, 2.0])
    assert (line.intercept, line.slope, line.r_squared) == pytest.approx((2.0, 10.0, 1.0))
    assert line.at(0.5) == pytest.approx(7.0)
    bent = sparsity.fit([0.0, 0.5, 1.0], [12.0, 10.0, 2.0])
    assert bent.r_squared < 0.95
    assert bent.worst == pytest.approx(2 / 13)
    assert sparsity.render(sparsity_rows(0.0)).count("| met |") == 3
    assert sparsity.render(sparsity_rows(1.0)).count("| NOT met |") == 3
    few = [row | {"per_bucket": "all"} for row in sparsity_rows(0.0)]  # of 182, 175 and 374
    assert sparsity.render(few).count("| samples missing |") == 3
    assert "NOT fitted, for fewer than three samples: share_question" in sparsity.render(
        [row for row in few if row["mask"] != "share_question"]
    )
    pytest.importorskip("matplotlib")
    sparsity.draw(sparsity_rows(0.1), tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def test_a_line_is_of_the_newest_setting_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = [row | {"started": "2026-03", "per_bucket": "4"} for row in sparsity_rows(0.0)]
    others = sparsity_rows(1.0)
    others += [row | {"started": "2026-02", "per_bucket": "4", "heads": "2"} for row in sparsity_rows(1.0)]
    failed = others[0] | {"milliseconds": "", "checked": "failed: o is not finite"}
    again = [row | {"started": "2026-01", "per_bucket": "4"} for row in sparsity_rows(1.0)]  # same samples
    text = sparsity.render([failed, *others, *newest, *again])
    assert text == sparsity.render(newest)
    assert text.count("| 9 |") == text.count("| met |") == 3
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    sparsity.draw(others + newest, tmp_path / "x.png")
    assert [text.get_text()[-9:] for text in drawn[0].axes[0].get_legend().get_texts()] == ["9 samples"] * 3


def test_samples_with_wrong_results_are_named_and_not_fitted(tmp_path: Path) -> None:
    rows = sparsity_rows(0.0)
    rows[0] |= {"milliseconds": "", "checked": "failed: o is not finite"}
    text = sparsity.render(rows)
    assert "NOT timed, causal_document, rho 0.520: failed: o is not finite" in text
    samples = "| causal_document | 8 | 182 | 0.57 to 0.92 | 0.50 to 0.55, 0.95 to 1.00 |"
    assert f"{samples} 2.00 + 10.00 (1 - rho) | 1.00000 | 0.00 % | 0 | met |" in text
    pytest.importorskip("matplotlib")
    sparsity.draw(rows, tmp_path / "x.png")
    sparsity.draw(rows[:1], tmp_path / "x.png")


@pytest.mark.parametrize("fault", ["another head is not finite", "a row is zero", "all is 1.5 % too large"])
def test_what_norms_alone_would_not_show_is_refused(fault: str) -> None:
    torch = pytest.importorskip("torch")
    import experiment
    import measure

    sample = paper_data.Sample("causal_document", ((300, ()), (212, ())))
    tensors = [torch.randn(1, 512, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    heads = [measure.reference_head(*(x[0, :, h] for x in tensors), sample.mask)["o"] for h in range(2)]
    out = torch.stack(heads, 1)[None]
    experiment.compare({"o": out}, tensors, sample)
    if fault == "another head is not finite":
        out[0, 5, 0, 0] = torch.nan
    elif fault == "a row is zero":
        out[0, 500, 1] = 0.0
    else:
        out *= 1.015
    with pytest.raises(measure.WrongResultError):
        experiment.compare({"o": out}, tensors, sample)


@pytest.mark.parametrize("part", memory.PARTS)
def test_each_part_of_memory_is_written_down_alone(part: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = memory_row(
        part, "ours", 4096, {"mask": "causal_document", "batch": "new mask"}.get(part, "peak"), 1.0
    )
    for rows in ([row], [memory_row(part, "ours", 4096, "", 0, "out of memory")]):
        assert memory.render(rows).startswith("# Memory")
        memory.draw(rows, tmp_path / "x.png")


def memory_row(
    part: str, name: str, seqlen: int, quantity: str, value: float, note: str = ""
) -> dict[str, str]:
    row = {"part": part, "name": name, "seqlen": str(seqlen), "quantity": quantity, "value": str(value)}
    return PROVENANCE | row | {"unit": "", "status": "failed" if note else "ok", "note": note}


def test_memory_is_written_down(tmp_path: Path) -> None:
    rows = [
        memory_row("mask", "ours", 4096, "causal_document", 2**14),
        memory_row("mask", "flex", 4096, "causal_document", 2**20),
        memory_row("peak", "ours", 4096, "peak", 2**25),
        memory_row("peak", "ours", 4096, "time", 1.5),
        memory_row("peak", "dense", 4096, "", 0, "out of memory"),
        memory_row("batch", "ours", 4096, "new mask", 0.25),
        memory_row("batch", "ours", 4096, "first call", 7.5),
        memory_row("layer", "ours", 4096, "parameters of a layer", 2**28),
        memory_row("layer", "ours", 4096, "input of a layer", 2**25),
        memory_row("layer", "ours", 4096, "peak of a layer", 2**30),
    ]
    text = memory.render(rows)
    assert "| 4K | 0.0156 |  |  |  | 16 | 32 | 1 |" in text
    assert "| 4K | 32 | out of memory |  |" in text
    assert "| 4K | 1.50 | out of memory |  |" in text
    assert "| 4K | 0.25 |  |" in text
    assert "| 4K | 8.00 | 1.00 |  |  | 1.00 | 10.00 |" in text
    assert "nan" not in text
    assert "- peak, dense: 8K, 16K, 32K, 64K, 128K, 256K, 1M\n- peak, flex: 4K, 8K," in text
    assert "- layer, ours: 8K, 16K, 32K, 64K, 128K, 256K\n" in text
    assert "## Failures\n\n- peak, dense: out of memory (4K)\n" in text
    mended = [memory_row("peak", "flex", 4096, "", 0, "no"), memory_row("peak", "flex", 4096, "peak", 1.0)]
    assert "Failures" not in memory.render(mended)
    reason = [memory_row("peak", "flex", 4096, "", 0, "RuntimeError: a | b")]
    assert "| 4K |  |  | RuntimeError: a / b |" in memory.render(reason)
    every = [
        memory_row(part, name, n, "", 0, "no room")
        for part in memory.PARTS
        for n in memory.LENGTHS
        for name in memory.NAMES_OF[part]
    ]
    text = memory.render(every)
    assert "Not run" not in text
    assert "| 4K | no room | no room | no room | no room | 16 | 32 | no room |" in text
    assert "| 4K |  |  | no room |  | no room |  |" in text
    pytest.importorskip("matplotlib")
    memory.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


def step_row(
    method: str, seconds: float, weight: int, number: int = 0, note: str = "", **others: str
) -> dict[str, str]:
    row = {"task": "sft", "seqlen": "4096", "layers": "2", "method": method, "weight": str(60 * weight)}
    row |= {"status": "failed" if note else "ok", "note": note, "bins": "2", "bin": str(number)}
    row["loss"] = "" if note else "2.5"
    return PROVENANCE | row | {"seconds": str(seconds), "peak_bytes": str(2**31)} | others


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
    titles = [axis.get_title() for axis in drawn[0].axes]
    assert titles == ["sft, 2 layers", "sft, 8 layers", "", ""]
    assert "2 layers" not in drawn[0].get_suptitle()


def test_as_many_layers_are_run_as_fit() -> None:
    """2-byte weights: 4 times 202 M elements of a layer of Llama-2-7B make 1.6 GB."""
    pytest.importorskip("torch")
    from llama import Shape

    def fit(gigabytes: float, seqlen: int = 4096, *, lora: bool = False) -> int:
        return end_to_end.layers_that_fit(Shape(), seqlen, lora=lora, free=int(gigabytes * 1e9), itemsize=2)

    assert fit(80) == fit(80, 32768) == 8
    assert fit(80, lora=True) == fit(80, 32768, lora=True) == 32
    assert fit(1) == fit(1, lora=True) == 1
    assert fit(10) == 4  # 9 GB less 1.4 GB of activations, at 1.65 GB
    assert 1 < fit(80, 131072, lora=True) < 32


def test_the_layers_are_printed_and_recorded(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_to_end, "MOST_LAYERS", 3)
    files = ["--csv", str(tmp_path / "x.csv"), "--library", str(library), "--commit", "1", "--no-report"]
    options = ["--lengths", "256", "--bins", "1", "--tasks", "sft", "--methods", "ours"]
    for layers, more in (("3", []), ("1", ["--layers", "1"])):
        monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files, *more])
        end_to_end.main()
        assert f"sft 256: {layers} layers\n" in capsys.readouterr().out
        row = Log(tmp_path / "x.csv", end_to_end.COLUMNS).rows[-1]
        assert (row["layers"], row["status"]) == (layers, "ok")


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


def kernel_row(name: str, milliseconds: float, *, direction: str = "forward", share: float = 0.5) -> Row:
    case = inference.inference_case("document", 8192)
    tflops = case.flops(direction, 0.75) / milliseconds / 1e9
    timing = {"milliseconds": milliseconds, "tflops": tflops, "matmul_tflops": tflops / share}
    return Row(RUN, case, direction, name, "ok", "", rho=0.75, visible_area=1, seconds=1.0, **timing)


def test_inference_tables_are_the_papers() -> None:
    rows = [kernel_row("sm90", 0.5), kernel_row("flashinfer_sparse", 1.0)]
    rows.append(replace(kernel_row("flex", 1.0), status="failed", reason="no"))
    text = inference.render(rows, "sm90")
    assert "### document" in text
    assert "| FlashInfer, block-sparse | 8K | 64 | 0.7500 | 1.000 | 0.2749 | 274.9 | 2.00 |" in text
    assert "| Flex | 8K |  |  | failed |  |  |  |" in text
    assert "### Failures\n\n- flex: no (document 8K D=128 forward)\n" in text
    assert "- FlashInfer, dense mask: causal_document 8K, causal_document 32K," in text
    assert "| paddle_flashmask | 8K |  | 0.7500 | 0.500 | 0.2749 | 549.8 |  |" in text


def test_the_kernel_benchmarks_runner_takes_inferences_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from runner import Bench

    monkeypatch.setattr(sys, "argv", ["inference.py", "--kernels", "sm90"])
    arguments, _ = inference.parse_arguments()
    bench = Bench.__new__(Bench)  # its constructor needs a GPU
    bench.arguments, bench.peers = arguments, ["flex"]
    for direction in arguments.directions:
        case = inference.inference_case("document", 8192)
        assert bench.implementations(case, direction) == ["sm90", "flex"]


def test_what_got_slower_is_named(tmp_path: Path) -> None:
    def measured(milliseconds: float, share: float) -> regress.Ratios:
        rows = [kernel_row("sm90", milliseconds, share=share), kernel_row("flex", 2.0)]
        return regress.ratios(Results(rows, "sm90", RUN.card))

    before = measured(1.0, 0.80)
    path = regress.path_of("sm90", RUN.card, tmp_path)
    assert path.name == "sm90_nvidia_h200.csv"
    assert regress.read(path) == {}
    regress.write(path, before)
    stored = regress.read(path)
    assert stored == before
    assert [*regress.compare(stored, measured(1.02, 0.79))] == []
    changes = sorted(regress.compare(stored, measured(1.25, 0.90)))
    case = "document 8K D=128, 32:8 heads forward"
    assert [line for _, line in changes] == [
        f"slower by 20.0 %: {case} / Flex (2.000 before, 1.600 now)",
        f"faster by 12.5 %: {case} / matmul beside flex (0.800 before, 0.900 now)",
    ]
    assert [*regress.compare(stored, {})] == []


@pytest.mark.parametrize("store", [False, True])
def test_what_fails_or_was_left_out_is_no_pass(
    store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = "document 8K D=128, 32:8 heads"
    before = [kernel_row(name, 1.0, direction=way) for name in ("sm90", "flex") for way in cells.DIRECTIONS]
    before += [replace(row, case=replace(row.case, mask="causal")) for row in before]
    path = regress.path_of("sm90", RUN.card, tmp_path)
    stored = regress.ratios(Results(before, "sm90", RUN.card))
    assert len(stored) == 8
    regress.write(path, stored)

    def call(rows: list[Row]) -> str:
        (tmp_path / "x.csv").unlink(missing_ok=True)
        cells.append_rows(tmp_path / "x.csv", rows)
        regress.main()
        return capsys.readouterr().out

    options = ["--ratios", str(tmp_path), *(["--store"] if store else [])]
    monkeypatch.setattr(sys, "argv", ["regress.py", str(tmp_path / "x.csv"), *options])
    assert "8 of 8 stored ratios were measured again\n" in call(before)
    out = call([row for row in before if row.case.mask == "document"])
    assert "4 of 8" in out
    assert out.count("  not measured again: causal 8K") == 4
    # An older row of the same kernels was right: the newest counts.
    later = replace(RUN, started="2027-01-01T00:00:00Z")
    wrong = replace(before[0], run=later, status="failed", reason="wrong")
    with pytest.raises(SystemExit, match="2 stored ratios are of kernels that fail now"):
        call([*before, wrong])
    out = capsys.readouterr().out
    assert "6 of 8" in out
    assert f"  FAILED: {case} forward / Flex\n  FAILED: {case} forward / matmul beside flex\n" in out
    assert regress.read(path) == stored
    # A peer's failure is not ours, and is no measurement either.
    out = call([*before, replace(wrong, implementation="flex")])
    assert f"7 of 8 stored ratios were measured again\n  not measured again: {case} forward / Flex\n" in out
    # What was mended counts again.
    assert "8 of 8" in call([*before, wrong, replace(before[0], run=replace(later, started="2028"))])


def test_sources_are_what_an_architecture_is_compiled_from(tmp_path: Path) -> None:
    texts = {
        "scripts/kernel_sources.py": "",
        "csrc/common/dispatch.cc": '#include "common/table.h"\n',
        "csrc/common/table.h": "",
        "csrc/common/order.cuh": "",
        "csrc/common/prepass.h": '#include "flashmask/params.h"\n',
        "csrc/common/prepass.cu": '#include "common/prepass.h"\n',
        "csrc/common/only_for_tests.cu": "",
        "csrc/include/flashmask/params.h": "",
        "csrc/sm80/kernel.cuh": '#include "common/prepass.h"\n#include "common/order.cuh"\n',
        "csrc/sm90/kernel.cuh": '#include "sm80/rows.cuh"\n#include "common/prepass.h"\n',
        "csrc/sm80/rows.cuh": "",
        "csrc/instantiations/sm80_d64.cu": '#include "sm80/kernel.cuh"\n',
        "csrc/instantiations/sm90_d64.cu": '#include "sm90/kernel.cuh"\n',
    }

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def changed_by(name: str) -> list[str]:
        write(name, texts[name] + "// another\n")
        changed = [kernels for kernels, old in before.items() if hash_sources(kernels, tmp_path) != old]
        write(name, texts[name])
        return changed

    for name, text in texts.items():
        write(name, text)
    before = {kernels: hash_sources(kernels, tmp_path) for kernels in ("sm80", "sm90", "cuda")}
    sm80, sm90 = ["sm80", "cuda"], ["sm90", "cuda"]
    assert {name: changed_by(name) for name in texts} == {name: list(before) for name in texts} | {
        "csrc/common/order.cuh": sm80,
        "csrc/common/only_for_tests.cu": [],
        "csrc/sm80/kernel.cuh": sm80,
        "csrc/sm90/kernel.cuh": sm90,
        "csrc/sm80/rows.cuh": sm90,
        "csrc/instantiations/sm80_d64.cu": sm80,
        "csrc/instantiations/sm90_d64.cu": sm90,
    }


def test_results_of_other_sources_are_stale(tmp_path: Path) -> None:
    run = replace(RUN, sources=hash_sources("sm90"))
    Log(tmp_path / "a.csv", ["mask"], RUN).add({"mask": "full"})
    assert stale.state(tmp_path / "a.csv") == (
        True,
        "a.csv: NVIDIA H200, 2026-01-01, sm90 at 123, other sources than now",
    )
    Log(tmp_path / "a.csv", ["mask"], replace(run, started="2027-01-01T00:00:00Z")).add({"mask": "full"})
    assert stale.state(tmp_path / "a.csv")[0] is False
    (tmp_path / "b.csv").write_text("a,b\n1,2\n")
    assert stale.state(tmp_path / "b.csv") is None


# Small runs, where torch is


@pytest.fixture(scope="module")
def library() -> Path:
    """The operators' own library has the C interface too."""
    pytest.importorskip("torch")
    pytest.importorskip("paddle")  # what it is linked to
    path = ROOT / "paddle_flashmask" / "_C.so"
    if not path.exists():
        pytest.skip("the operators are not built")
    return path


def test_torch_attention_has_the_gradients_of_the_definition(library: Path) -> None:
    import measure
    import torch
    from torch_attention import Attention, load

    sample = paper_data.Sample("share_question", ((40, (20, 10)), (30, (15,))))
    q, k, v, dout = torch.randn(4, 1, 115, 2, 16, generator=torch.Generator().manual_seed(0))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = Attention(load(library, "cuda", "cpu"), sample.mask, "cpu")(*inputs)
    gradients = torch.autograd.grad(out, inputs, dout.expand_as(out))
    expected = measure.reference_head(*(x.detach()[0, :, 1] for x in (*inputs, dout)), sample.mask)
    for name, found in zip(("o", "dq", "dk", "dv"), (out, *gradients), strict=True):
        torch.testing.assert_close(found.detach()[0, :, 1], expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("module", "options", "says"),
    [
        (sparsity, ["--seqlen", "1024", "--heads", "1", "--head-dim", "16", "--per-bucket", "1"], "R²"),
        (memory, ["--lengths", "256", "--names", "ours", "dense", "no mask"], "Bytes of a mask"),
        (
            end_to_end,
            ["--lengths", "256", "--bins", "2", "--tasks", "lora", "--methods", "ours", "vanilla"],
            "| 256 |",
        ),
    ],
)
def test_experiments_run_and_resume(module, options, says, library, tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    files = ["--csv", str(tmp_path / "x.csv"), "--library", str(library), "--commit", "1"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files])
    module.main()
    document = (tmp_path / "x.md").read_text()
    assert says in document
    assert document.splitlines()[2] == "![x](x.png)"
    assert (tmp_path / "x.png").exists()
    measured = (tmp_path / "x.csv").read_text()
    assert "failed" not in measured
    module.main()
    assert (tmp_path / "x.csv").read_text() == measured
    (tmp_path / "x.md").unlink()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--no-report"])
    module.main()
    assert not (tmp_path / "x.md").exists()
    monkeypatch.setattr(sys, "argv", ["x.py", "--report-only", *files[:2]])
    module.main()
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["", "o", "dq", "dk", "dv"])
@pytest.mark.parametrize("seqlen", [300, 70000])
def test_memory_counts_right_results_and_gradients_only(
    wrong: str, seqlen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    import experiment
    import measure

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        doubled = [x + (x - x.detach()) * (wrong == name) for name, x in zip("qkv", inputs, strict=True)]
        gradients_only = sum(((x - x.detach()) for x in doubled), torch.zeros(()))
        return gradients_only + (1.1 if wrong == "o" else 1.0)

    wrong = wrong.removeprefix("d")
    # In place of the definition, so that long sequences take no time: o is 1, and so are its gradients.
    tensors = [torch.ones(1, seqlen, 1, 1).requires_grad_() for _ in range(3)] + [torch.ones(1, seqlen, 1, 1)]
    head = torch.ones(seqlen, 1)
    expected = dict.fromkeys(("o", "dq", "dk", "dv"), head)
    monkeypatch.setattr(measure, "reference_head", lambda *args: expected)
    sample = memory.documents(seqlen)
    if not wrong:
        experiment.check(attend, sample, tensors)
        return
    name = wrong if wrong == "o" else f"d{wrong}"
    with pytest.raises(measure.WrongResultError, match=f"^{name}: off by"):
        experiment.check(attend, sample, tensors)


def test_lengths_are_those_of_the_paper_and_up_to_a_million_tokens() -> None:
    items = memory.items_of(memory.PARTS, memory.NAMES, None)
    lengths = {key: [n for *of, n in items if of == [*key]] for key in {item[:2] for item in items}}
    assert lengths.keys() == {(part, name) for part in memory.PARTS for name in memory.NAMES_OF[part]}
    for (part, name), found in lengths.items():
        assert found[0] == (8192 if part == "batch" else 4096)
        assert found[-1] == (262144 if part == "layer" else 2**20)
        steps = {longer // shorter for shorter, longer in pairwise(found)}
        assert steps <= ({4, 8} if (part, name) == ("batch", "flex") else {2, 4})
    names = [name for _, name, _ in items]
    assert "flex" not in names[: -names.count("flex")]  # what compiles comes last
    assert memory.items_of(["batch"], ["flex"], [512]) == [("batch", "flex", 512)]


def test_of_memory_what_is_asked_for_and_left_is_measured(tmp_path: Path) -> None:
    log = Log(tmp_path / "x.csv", memory.COLUMNS, RUN)

    def wanted(*names: str, retry: bool = False) -> list[str]:
        experiment = memory.Experiment(None, log, retry=retry)
        items = memory.items_of(["peak"], names, [4096])
        return [name for part, name, seqlen in items if experiment.is_wanted(part, name, seqlen)]

    key = {"part": "peak", "seqlen": 4096}
    assert wanted(*memory.NAMES) == ["ours", "dense", "flex"]
    assert wanted("flex") == ["flex"]
    log.add({**key, "name": "ours", "status": "ok"})
    log.add({**key, "name": "flex", "status": "failed"})
    assert wanted("ours", "flex", "dense") == ["dense"]
    assert wanted("ours", "flex", "dense", retry=True) == ["dense", "flex"]
    log.add({**key, "name": "flex", "status": "ok"})
    assert wanted("flex", retry=True) == []
    # What failed and was mended is written as what it is now; of failures, the last.
    rows = [memory_row("peak", "flex", 4096, "", 0, note) for note in ("no", "never")]
    assert "| 4K |  |  | never |" in memory.render(rows)
    assert "| 4K |  |  | 2 |" in memory.render([*rows, memory_row("peak", "flex", 4096, "peak", 2**21)])


class DyingWorker(memory.Worker):
    """Loses its process with all that is dense."""

    def __call__(self, item: memory.Item) -> None:
        import paddle  # noqa: F401  # the library is linked to it

        if item[1] == "dense":
            os._exit(3)
        super().__call__(item)


def test_of_memory_a_lost_process_is_a_row_and_the_rest_is_measured(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "Worker", DyingWorker)
    files = ["--csv", str(tmp_path / "x.csv"), "--library", str(library), "--commit", "1", "--no-report"]
    options = ["--parts", "peak", "batch", "--names", "ours", "dense", "--lengths", "256", "--limit", "200"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files])
    memory.main()
    rows = Log(tmp_path / "x.csv", memory.COLUMNS).rows
    assert [(row["part"], row["name"]) for row in rows if row["status"] == "ok"] == [
        *[("peak", "ours")] * 2,
        *[("batch", "ours")] * 3,
    ]
    [row] = [row for row in rows if row["status"] == "failed"]
    assert (row["name"], row["note"]) == ("dense", "its process ended with exit code 3")
    memory.main()  # nothing is left
    assert Log(tmp_path / "x.csv", memory.COLUMNS).rows == rows


def test_peaks_are_without_what_libraries_keep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first matrix product of a process leaves a workspace behind."""
    torch = pytest.importorskip("torch")
    import experiment
    import measure

    kept = [0]
    reference = measure.reference_head

    def reference_head(*arguments: object) -> dict[str, torch.Tensor]:
        kept[0] = 2**25
        return reference(*arguments)

    def peak_memory(self: experiment.Device, job: Callable[[], object]) -> int:
        job()
        return kept[0] + 1000

    monkeypatch.setattr(measure, "reference_head", reference_head)
    monkeypatch.setattr(experiment.Device, "allocated", lambda self: kept[0])
    monkeypatch.setattr(experiment.Device, "peak_memory", peak_memory)
    monkeypatch.setattr(experiment, "load", lambda *arguments: None)
    files = ["--csv", str(tmp_path / "x.csv"), "--commit", "1", "--no-report"]
    options = ["--parts", "peak", "--names", "dense", "--lengths", "256"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files])
    memory.main()
    [peak, _] = Log(tmp_path / "x.csv", memory.COLUMNS).rows
    assert (peak["quantity"], peak["value"]) == ("peak", "1000")


@pytest.mark.parametrize("part", ["peak", "batch", "layer"])
def test_no_part_of_memory_counts_wrong_results(
    part: str, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch_attention

    forward = torch_attention.Attention.forward
    monkeypatch.setattr(torch_attention.Attention, "forward", lambda *a: tuple(x + 0.1 for x in forward(*a)))
    files = ["--csv", str(tmp_path / "x.csv"), "--library", str(library), "--commit", "1", "--no-report"]
    monkeypatch.setattr(
        sys,
        "argv",
        ["x.py", "--device", "cpu", "--names", "ours", "--parts", part, "--lengths", "256", *files],
    )
    memory.main()
    [row] = [row for row in Log(tmp_path / "x.csv", memory.COLUMNS).rows if row["name"] == "ours"]
    assert row["status"] == "failed"
    assert row["note"].startswith("WrongResultError: o: off by")


def test_a_layer_without_a_mask_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import experiment

    monkeypatch.setattr(experiment, "load", lambda *arguments: None)
    files = ["--csv", str(tmp_path / "x.csv"), "--commit", "1", "--no-report"]
    options = ["--names", "no mask", "--lengths", "256"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files, "--retry"])
    sdpa = experiment.sdpa
    monkeypatch.setattr(experiment, "sdpa", lambda *tensors, **options: sdpa(*tensors, **options) * 1.1)
    memory.main()
    monkeypatch.setattr(experiment, "sdpa", sdpa)
    memory.main()
    failed, *rows = Log(tmp_path / "x.csv", memory.COLUMNS).rows
    assert failed["note"].startswith("WrongResultError: o: off by")
    assert [row["status"] for row in rows] == ["ok"] * 3


def test_a_batch_prepares_later_masks_with_what_was_compiled_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something compiled without gradients is compiled again where they are wanted."""
    torch = pytest.importorskip("torch")
    import experiment

    modes = []
    block_mask = memory.Experiment.block_mask

    def recorded(self: memory.Experiment, sample: paper_data.Sample) -> object:
        modes.append(torch.is_grad_enabled())
        return block_mask(self, sample)

    monkeypatch.setattr(memory.Experiment, "block_mask", recorded)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(experiment, "load", lambda *arguments: None)
    files = ["--csv", str(tmp_path / "x.csv"), "--commit", "1", "--no-report"]
    options = ["--names", "flex", "--parts", "batch", "--lengths", "256"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files])
    memory.main()
    rows = Log(tmp_path / "x.csv", memory.COLUMNS).rows
    assert [row["quantity"] for row in rows] == ["first mask", "first call", "new mask"]
    assert modes == [False] * 4


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
    monkeypatch.setattr(end_to_end, "time_limit", lambda: prepare.time_limit(5))
    rows = end_to_end_rows(tmp_path / "x.csv", library, monkeypatch, "dense", "vanilla")
    assert [(row["method"], row["status"], row["note"]) for row in rows] == [
        ("dense", "failed", "TimeoutError: took longer than 5 s"),
        ("vanilla", "ok", ""),
    ]


def test_a_device_holds_no_memory_that_counts_in_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs to empty L2 is made when it is wanted; here, without a GPU, that would raise."""
    pytest.importorskip("torch")
    import experiment
    import measure

    monkeypatch.setattr(measure, "card_and_driver", lambda: ("a card", "1"))
    monkeypatch.setattr(experiment, "load", lambda *a: None)
    arguments = argparse.Namespace(device="cuda", binary=None, kernels="cuda", commit="1")
    assert experiment.Device(arguments, "").run.card == "a card"


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
