"""The experiments beside the kernel tables: data, files, what they conclude, and small runs on a CPU."""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import decode
import end_to_end
import inference
import memory
import paper_data
import provenance
import sparsity
import stale
from bench_rows import PROVENANCE, RUN, decode_row, kernel_row
from cells import DIRECTIONS, hash_sources, sources_of
from provenance import Log

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


def test_the_newest_row_is_the_newest_run_s_wherever_it_stands(tmp_path: Path) -> None:
    """Files of several machines are merged out of order."""
    later, path = replace(RUN, started="2027-01-01T00:00:00Z"), tmp_path / "log.csv"
    for run, value in ((later, "new"), (RUN, "old"), (RUN, "older, its last")):
        Log(path, ["mask", "value"], run).add({"mask": "full", "value": value})
    log = Log(path, ["mask", "value"], RUN)
    assert log.newest(mask="full")["value"] == "new"
    assert log.newest(mask="full", started=RUN.started)["value"] == "older, its last"
    assert [row["value"] for row in provenance.oldest_first(log.rows)] == ["old", "older, its last", "new"]


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
    assert bent.worst_there == pytest.approx(1 / 3)
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
    assert f"{samples} 2.00 + 10.00 (1 - rho) | 1.00000 | 0.00 % | 0.00 % | 0 | met |" in text
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
    assert arguments.rounds == 10


def test_a_clock_keeps_to_its_rounds_where_they_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from measure import Clock

    def times(milliseconds: float, rounds: int, seconds: float = 0.01) -> tuple[int, int]:
        """Warm-ups and repetitions of a job that takes so long, the matmul beside it."""
        clock = Clock.__new__(Clock)  # its constructor needs a GPU
        clock._rounds, clock._matmul = rounds, lambda: None
        monkeypatch.setattr(
            clock, "run", lambda jobs, count: {name: [milliseconds / 2] * count for name in jobs}
        )
        timing = clock.take_turns({"ours": lambda: None}, seconds)[0]["ours"]
        return timing.warmups, len(timing.samples)

    assert times(600, 0) == (1, 3)
    assert times(100, 0) == (2, 6)
    assert times(600, 10) == (10, 10)
    assert times(1100, 10) == (1, 3)
    assert times(100, 10) == (10, 10)
    assert times(1, 10) == (10, 20)


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
        "csrc/sm90/backward.cuh": '#include "sm90/kernel.cuh"\n',
        "csrc/instantiations/sm80_table.cc": "",
        "csrc/instantiations/sm90_table.cc": "",
        "csrc/instantiations/sm80_forward_d64.cu": '#include "sm80/kernel.cuh"\n',
        "csrc/instantiations/sm80_backward_d64.cu": '#include "sm80/kernel.cuh"\n',
        "csrc/instantiations/sm90_forward_d64.cu": '#include "sm90/kernel.cuh"\n',
        "csrc/instantiations/sm90_backward_d64.cu": '#include "sm90/backward.cuh"\n',
        "csrc/instantiations/sm90_few_rows_forward_d64.cu": '#include "sm90/few.cuh"\n',
        "csrc/sm90/few.cuh": "int x;\n",
    }

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def hashes() -> set[tuple[str, str, str]]:
        sources = {kernels: hash_sources(kernels, tmp_path) for kernels in ("sm80", "sm90", "cuda")}
        return {(k, d, sources_of(of_both, d)) for k, of_both in sources.items() for d in DIRECTIONS}

    def changed_by(name: str, more: str = "int y;\n") -> set[tuple[str, str]]:
        write(name, texts[name] + more)
        changed = {(kernels, direction) for kernels, direction, _ in before - hashes()}
        write(name, texts[name])
        return changed

    for name, text in texts.items():
        write(name, text)
    before = hashes()
    sm80, sm90 = ({(k, d) for k in (family, "cuda") for d in DIRECTIONS} for family in ("sm80", "sm90"))
    of_pass = {direction: {("sm90", direction), ("cuda", direction)} for direction in DIRECTIONS}
    assert {name: changed_by(name) for name in texts} == dict.fromkeys(texts, sm80 | sm90) | {
        "csrc/common/order.cuh": sm80,
        "csrc/common/only_for_tests.cu": set(),
        "csrc/sm80/kernel.cuh": sm80,
        "csrc/sm90/kernel.cuh": sm90,
        "csrc/sm80/rows.cuh": sm90,
        "csrc/sm90/backward.cuh": of_pass["backward"],
        "csrc/instantiations/sm80_table.cc": sm80,
        "csrc/instantiations/sm90_table.cc": sm90,
        "csrc/instantiations/sm80_forward_d64.cu": {("sm80", "forward"), ("cuda", "forward")},
        "csrc/instantiations/sm80_backward_d64.cu": {("sm80", "backward"), ("cuda", "backward")},
        "csrc/instantiations/sm90_forward_d64.cu": of_pass["forward"],
        "csrc/instantiations/sm90_backward_d64.cu": of_pass["backward"],
        "csrc/instantiations/sm90_few_rows_forward_d64.cu": set(),
        "csrc/sm90/few.cuh": set(),
    }
    # What serves few query rows alone counts where that is measured.
    few_rows = hash_sources("sm90", tmp_path, few_rows=True)
    write("csrc/sm90/few.cuh", "int y;\n")
    assert hash_sources("sm90", tmp_path, few_rows=True).split("-")[:2] == few_rows.split("-")[:2]
    assert sources_of(hash_sources("sm90", tmp_path, few_rows=True), "forward") != few_rows.split("-")[2]
    write("csrc/instantiations/sm90_table.cc", "extern Kernel few_rows_forward_d64;\n")
    assert hash_sources("sm90", tmp_path) == "-".join(few_rows.split("-")[:2])
    assert not changed_by("csrc/sm90/backward.cuh", "// said\n    // of it\n")
    assert changed_by("csrc/sm90/backward.cuh", "int y;  // said of it\n") == of_pass["backward"]


def test_results_of_other_sources_are_stale(tmp_path: Path) -> None:
    run = replace(RUN, sources=hash_sources("sm90"))
    Log(tmp_path / "a.csv", ["mask"], RUN).add({"mask": "full"})
    assert stale.state(tmp_path / "a.csv") == (
        True,
        "a.csv: NVIDIA H200, 2026-01-01, sm90 at 123, 1 of 1 rows of other sources than now",
    )
    Log(tmp_path / "a.csv", ["mask"], replace(run, started="2027-01-01T00:00:00Z")).add({"mask": "full"})
    assert stale.state(tmp_path / "a.csv")[0] is False
    later = Log(tmp_path / "c.csv", ["direction"], replace(run, sources="old-" + run.sources.split("-")[1]))
    later.add({"direction": "backward"})
    assert stale.state(tmp_path / "c.csv")[0] is False
    later.add({"direction": "backward deterministic"})
    assert stale.state(tmp_path / "c.csv")[0] is False
    later.add({"direction": "forward"})
    assert stale.state(tmp_path / "c.csv")[0] is True
    (tmp_path / "b.csv").write_text("a,b\n1,2\n")
    assert stale.state(tmp_path / "b.csv") is None


def test_a_folder_without_results_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As "nothing is stale" would be said of a folder that is not there."""
    monkeypatch.setattr(sys, "argv", ["stale.py", str(tmp_path / "missing")])
    with pytest.raises(SystemExit, match="2"):
        stale.main()
    assert "missing: there are no CSV files" in capsys.readouterr().err


def test_older_rows_that_nothing_was_measured_in_place_of_are_stale(tmp_path: Path) -> None:
    path, columns = tmp_path / "x.csv", ["mask", "direction", "implementation", "milliseconds"]
    now = replace(RUN, sources=hash_sources("sm90"), started="2027-01-01T00:00:00Z", commit="456")
    for direction in DIRECTIONS:
        Log(path, columns, now).add({"mask": "full", "direction": direction, "implementation": "sm90"})
    for name in ("sm90", "flex"):  # merged into the file behind the others
        for mask in ("full", "causal"):
            row = {"mask": mask, "direction": "forward", "implementation": name, "milliseconds": 1.0}
            Log(path, columns, RUN).add(row)
    assert stale.state(path) == (
        True,
        "x.csv: NVIDIA H200, 2027-01-01, sm90 at 456, 2 of 4 rows of other sources than now",
    )
    again = {"mask": "causal", "direction": "forward", "implementation": "sm90"}
    Log(path, columns, now).add(again)
    assert stale.state(path) == (
        False,
        "x.csv: NVIDIA H200, 2027-01-01, sm90 at 456, the sources as they are",
    )
    Log(path, columns, replace(RUN, card="another")).add(again)
    assert stale.state(path)[1].endswith(", 1 of 4 rows of other sources than now")


@pytest.mark.parametrize("path", sorted(provenance.RESULTS.glob("*.csv")), ids=lambda path: path.name)
def test_what_rows_are_of_is_known_of_every_file(path: Path) -> None:
    """Else a row would seem to be measured anew by another's."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if "started" not in rows[0]:
        assert stale.state(path) is None
        return
    of_one_run = ("started", "implementation", "quantity")
    found = Counter((*stale.place_of(row), *(row.get(name) for name in of_one_run)) for row in rows)
    assert max(found.values()) == 1


# Small runs, where torch is


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


# Decoding


def test_the_decode_page_says_how_fast_what_failed_and_what_is_missing(tmp_path: Path) -> None:
    shape = decode.Shape(2, 1, 16_384)
    assert shape.kv_bytes(128) == 2 * 2 * 16_384 * 8 * 128 * 2
    shapes = decode.SHAPES[0], decode.SHAPES[5]
    times = {"ours": 0.04, "portable": 0.05, "FA2": 0.05, "cuDNN": None, "copy": 0.02}
    rows = [decode_row(shape, name, time) for shape in shapes for name, time in times.items()]
    text = decode.render(rows)
    keys = shapes[0].seqlen_k
    read = 2 * keys * 8 * 128 * 2 / 0.04e-3 / 1e12
    line = f"| 1 | 1 | 1K | 0.0400 | 0.0500 (1.25) | 0.0500 (1.25) | failed | {read:.2f} | {4 * read:.2f} |"
    assert line in text
    assert "medians of 50 runs. In brackets" in text
    assert "medians. In brackets" in decode.render([decode_row(shape, "cuDNN", None)])
    assert "cuDNN: failed: no such kernel (B=1 Sq=1 Sk=1K, B=1 Sq=16 Sk=16K)" in text
    missing = text.split("Not run")[1].split("##")[0]
    assert f"shapes: {decode.SHAPES[1]}, " in missing
    assert str(shapes[1]) not in missing
    pytest.importorskip("matplotlib")
    decode.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_the_newest_row_of_a_decode_shape_counts() -> None:
    shape = decode.SHAPES[0]
    rows = [decode_row(shape, "ours", 0.05), decode_row(shape, "ours", 0.04), decode_row(shape, "FA2", 0.05)]
    assert decode.times_of(rows) == {128: {shape: {"ours": 0.04, "FA2": 0.05}}}
    assert decode.times_of([*rows, decode_row(shape, "FA2", None)]) == {128: {shape: {"ours": 0.04}}}
    older = decode_row(shape, "ours", 0.03, started="2025-12-31")  # merged into the file behind the others
    assert decode.times_of([*rows, older]) == decode.times_of(rows)


def test_only_right_results_are_timed() -> None:
    torch = pytest.importorskip("torch")

    class Clock:
        def take_turns(self, jobs: dict, seconds: float) -> tuple[dict, float]:
            from measure import Timing

            return {name: Timing([1.0, 2.0, 4.0], 10) for name in jobs}, 0.0

    arguments = argparse.Namespace(device="cpu", head_dim=64, seconds=0.1)
    found = decode.measure_shape(decode.Shape(2, 3, 40), arguments, {}, Clock())
    assert found["FA2"] == {"status": "ok", "milliseconds": 2.0, "warmups": 10, "repetitions": 3}
    assert found["cuDNN"]["status"].startswith("failed: ")  # needs a GPU
    attend = torch.nn.functional.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.nn.functional, "scaled_dot_product_attention", lambda *a, **b: 1.1 * attend(*a, **b)
        )
        wrong = decode.measure_shape(decode.Shape(2, 3, 40), arguments, {}, Clock())
    assert wrong["FA2"]["status"].startswith("failed: WrongResultError: off by 0.1")
