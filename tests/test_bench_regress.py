"""The gate: which ratios a benchmark's file has, where they are kept, and what got slower or fails."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import cells
import decode
import end_to_end
import inference
import provenance
import regress
from bench_rows import RUN, decode_row, kernel_row, step_row
from cells import Row
from experiment_ratios import (
    DecodeShape,
    KernelCase,
    Key,
    Measured,
    Ratios,
    TrainingSteps,
    file_name,
    measured,
    of_kernels,
)

STORED = "sm90_nvidia_h200.csv"


def kernel_ratios(rows: Iterable[Row]) -> Ratios:
    [found] = of_kernels(rows)
    return found.ratios


def write_log(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, provenance.RUN_COLUMNS + list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def call(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> None:
    """Run it with ratios kept beside the file."""
    monkeypatch.setattr(sys, "argv", ["regress.py", str(path), "--ratios", str(path.parent), *options])
    regress.main()


def test_what_got_slower_is_named(tmp_path: Path) -> None:
    def now(milliseconds: float, share: float) -> Ratios:
        return kernel_ratios([kernel_row("sm90", milliseconds, share=share), kernel_row("flex", 2.0)])

    before, path = now(1.0, 0.80), tmp_path / STORED
    assert regress.read(path, KernelCase) == {}
    regress.write(path, KernelCase, before)
    stored = regress.read(path, KernelCase)
    assert stored == before
    assert [*regress.compare(stored, now(1.02, 0.79))] == []
    changes = sorted(regress.compare(stored, now(1.25, 0.90)))
    case = "document 8K D=128, 32:8 heads forward"
    assert [line for _, line in changes] == [
        f"slower by 20.0 %: {case} / Flex (2.000 before, 1.600 now)",
        f"faster by 12.5 %: {case} / matmul beside flex (0.800 before, 0.900 now)",
    ]
    assert [*regress.compare(stored, {})] == []


def test_no_two_ratios_have_one_name() -> None:
    case = inference.inference_case("document", 131072)
    cases = [case, replace(case, seed=3), replace(case, seqlen=133120), replace(case, kv_heads=0)]
    subjects = [KernelCase.of(case, "forward", "sm90") for case in cases]
    keys = [Key(subject, "fa4") for subject in subjects]
    keys += [
        Key(subjects[0]._replace(ours="sm90 deterministic"), "fa4"),
        Key(subjects[0], "matmul beside fa4"),
    ]
    assert [*map(str, keys)] == [
        "document 128K D=128, 32:8 heads forward / FA4",
        "document 128K D=128, 32:8 heads, seed 3 forward / FA4",
        "document 133,120 D=128, 32:8 heads forward / FA4",
        "document 128K D=128 forward / FA4",
        "document 128K D=128, 32:8 heads forward (sm90 deterministic) / FA4",
        "document 128K D=128, 32:8 heads forward / matmul beside fa4",
    ]
    other = Key(subjects[0]._replace(mask="causal"), "fa4")
    assert [*regress.by_group([*keys[:3], other])] == [
        "causal: 1 (128K D=128, 32:8 heads)",
        "document: 3 (128K D=128, 32:8 heads; 133,120 D=128, 32:8 heads)",
    ]


def test_a_file_of_ratios_is_of_one_experiment_kernels_and_card() -> None:
    assert file_name("sm90", RUN.card) == STORED
    assert file_name("sm90", RUN.card, published=True) == "sm90_nvidia_h200_published.csv"
    assert file_name("cuda", RUN.card, experiment="decode") == "decode_nvidia_h200.csv"
    assert file_name("sm80", RUN.card, experiment="decode") == "decode_sm80_nvidia_h200.csv"


def test_stored_ratios_are_those_of_the_committed_tables() -> None:
    experiments = [provenance.RESULTS / f"{name}.csv" for name in ("inference", "decode", "end_to_end")]
    tables = [*provenance.RESULTS.glob("kernels_*.csv"), *experiments]
    found = [now for table in tables for now in measured(table)]
    assert len({now.file for now in found}) == len(tables) == 6
    assert {path.name for path in regress.FOLDER.iterdir()} == {now.file for now in found}
    for now in found:
        stored = regress.read(regress.FOLDER / now.file, now.kind)
        assert stored == pytest.approx(now.ratios, abs=1e-4)
        assert len({*map(str, stored)}) == len(stored) > 0


def test_the_command_says_which_setting_rows_are_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the published setting may have no mask that is of it alone."""
    published = replace(RUN, command="python scripts/bench/kernels.py --setting published --masks document")
    rows = [kernel_row(name, time) for name, time in (("sm90", 1.0), ("flex", 2.0))]
    part = [replace(row, run=published) for row in (kernel_row("sm90", 1.0), kernel_row("flex", 3.0))]
    in_inference = replace(RUN, command="python scripts/bench/inference.py", kernels="cuda")
    others = [replace(row, run=in_inference) for row in (kernel_row("cuda", 1.0), kernel_row("flex", 4.0))]
    path = tmp_path / "x.csv"
    cells.append_rows(path, [row for three in zip(rows, part, others, strict=True) for row in three])
    call(monkeypatch, path, "--store")
    stored = {
        file.name: [ratio for key, ratio in regress.read(file, KernelCase).items() if key.against == "flex"]
        for file in tmp_path.glob("*_h200*.csv")
    }
    assert stored == {
        STORED: [2.0],
        "sm90_nvidia_h200_published.csv": [3.0],
        "inference_nvidia_h200.csv": [4.0],
    }


@pytest.mark.parametrize("milliseconds", ["nan", "0", "inf", "", "x"])
def test_a_time_that_is_none_is_refused(milliseconds: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    cells.append_rows(path, [kernel_row("sm90", 1.5)])
    path.write_text(path.read_text().replace(",1.5,", f",{milliseconds},", 1))
    with pytest.raises(ValueError, match=r"x\.csv, line 2: "):
        cells.read_rows(path)
    rows = [decode_row(decode.SHAPES[0], name, 1.5) for name in ("ours", "FA2")]
    write_log(path, decode.COLUMNS, [rows[0], rows[1] | {"milliseconds": milliseconds}])
    with pytest.raises(ValueError, match=r"x\.csv, row 2: milliseconds: expected a time"):
        measured(path)


@pytest.mark.parametrize("name", ["memory", "sparsity", "nothing"])
def test_files_that_have_no_ratios_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch, provenance.RESULTS / f"{name}.csv")
    said = (
        "No such file"
        if name == "nothing"
        else "expected the columns of one of kernels.py, inference.py, dec"
    )
    assert said in capsys.readouterr().err


def test_ratios_of_another_kind_are_refused(tmp_path: Path) -> None:
    regress.write(tmp_path / "x.csv", DecodeShape, {})
    with pytest.raises(
        ValueError, match="expected the columns task, seqlen, layers, bins, ours, against, ra"
    ):
        regress.read(tmp_path / "x.csv", TrainingSteps)


@pytest.mark.parametrize("store", [False, True])
def test_what_fails_or_was_left_out_is_no_pass(
    store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = "document 8K D=128, 32:8 heads"
    before = [kernel_row(name, 1.0, direction=way) for name in ("sm90", "flex") for way in cells.DIRECTIONS]
    before += [replace(row, case=replace(row.case, mask="causal")) for row in before]
    path = tmp_path / STORED
    stored = kernel_ratios(before)
    assert len(stored) == 8
    regress.write(path, KernelCase, stored)

    def out_of(rows: list[Row], *more: str) -> str:
        (tmp_path / "x.csv").unlink(missing_ok=True)
        cells.append_rows(tmp_path / "x.csv", rows)
        call(monkeypatch, tmp_path / "x.csv", *(["--store"] if store else []), *more)
        return capsys.readouterr().out

    assert "8 of 8 stored ratios were measured again\n" in out_of(before)
    out = out_of([row for row in before if row.case.mask == "document"])
    assert "4 of 8" in out
    assert "  not measured again: causal: 4 (8K D=128, 32:8 heads)\n" in out
    out = out_of([row for row in before if row.case.mask == "document"], "--verbose")
    assert out.count("  not measured again: causal 8K") == 4
    # An older row of the same kernels was right: the newest counts.
    later = replace(RUN, started="2027-01-01T00:00:00Z")
    wrong = replace(before[0], run=later, status="failed", reason="wrong")
    with pytest.raises(SystemExit, match="2 stored ratios are of kernels that fail now"):
        out_of([*before, wrong])
    out = capsys.readouterr().out
    assert "6 of 8" in out
    assert f"  FAILED: {case} forward / Flex\n  FAILED: {case} forward / matmul beside flex\n" in out
    assert regress.read(path, KernelCase) == stored
    # A peer's failure is not ours, and is no measurement either.
    out = out_of([*before, replace(wrong, implementation="flex")])
    assert "7 of 8 stored ratios were measured again\n  not measured again: document: 1 (8K" in out
    # What was mended counts again.
    assert "8 of 8" in out_of([*before, wrong, replace(before[0], run=replace(later, started="2028"))])


def test_replacing_keeps_nothing_but_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [kernel_row(name, 1.0) for name in ("sm90", "flex")]
    path, now = tmp_path / STORED, kernel_ratios(rows)
    retired = Key(KernelCase.of(replace(rows[0].case, seqlen=133120), "forward", "sm90"), "flex")
    cells.append_rows(tmp_path / "x.csv", rows)
    for option, kept in (("--store", {**now, retired: 2.0}), ("--replace", now)):
        regress.write(path, KernelCase, {**now, retired: 2.0})
        call(monkeypatch, tmp_path / "x.csv", option)
        assert regress.read(path, KernelCase) == kept
    assert "  dropped: document: 1 (133,120 D=128, 32:8 heads)\n" in capsys.readouterr().out


def test_ratios_beside_other_peers_are_dropped_when_the_same_is_measured_anew() -> None:
    """Else they would be named as not measured again for ever."""

    def now(*peers: str) -> Ratios:
        return kernel_ratios([kernel_row(name, 1.0) for name in ("sm90", *peers)])

    old, new = now("flex"), now("flex", "fa4")
    kept = regress.still_measured(old, new) | new
    assert sorted(key.against for key in kept) == ["fa4", "flex", "matmul beside flex fa4"]
    assert regress.still_measured(old, {}) == old


# decode.csv and end_to_end.csv


def measured_log(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Measured:
    write_log(path, columns, rows)
    [found] = measured(path)
    return found


def test_ratios_of_decoding_are_of_one_run(tmp_path: Path) -> None:
    shape, path = decode.SHAPES[0], tmp_path / "x.csv"
    times = {"ours": 0.04, "portable": 0.05, "FA2": 0.06, "cuDNN": None, "copy": 0.02}
    rows = [decode_row(shape, name, time) for name, time in times.items()]
    ours = DecodeShape(*shape, 128, "ours")
    expected = {
        Key(ours, "FA2"): 1.5,
        Key(ours, "copy"): 0.5,
        Key(ours._replace(ours="portable"), "FA2"): 1.2,
        Key(ours._replace(ours="portable"), "copy"): 0.4,
    }
    assert [*map(str, expected)][1:3] == [f"{shape} D=128 / copy", f"{shape} D=128 (portable) / FA2"]
    found = measured_log(path, decode.COLUMNS, rows)
    assert (found.file, found.kind, found.failed) == ("decode_sm90_a_card.csv", DecodeShape, set())
    assert found.ratios == pytest.approx(expected)
    # Of a later run alone, of an older one wherever it stands, of other sources: not divided by this one's.
    others = [decode_row(shape, "ours", 0.01, started="2027"), decode_row(shape, "FA2", 0.09, started="2025")]
    others += [decode_row(shape, name, 0.07, started="2024", sources="old") for name in ("ours", "cuDNN")]
    assert measured_log(path, decode.COLUMNS, [*rows, *others]).ratios == pytest.approx(expected)
    # A later run of both counts.
    both = [decode_row(shape, name, time, started="2027") for name, time in (("ours", 0.03), ("FA2", 0.06))]
    expected[Key(ours, "FA2")] = 2.0
    assert measured_log(path, decode.COLUMNS, [*both, *rows]).ratios == pytest.approx(expected)
    # What fails last has no ratio.
    wrong = [*rows, *(decode_row(shape, name, None, started="2027") for name in ("ours", "copy"))]
    found = measured_log(path, decode.COLUMNS, wrong)
    assert found.failed == {ours}
    assert [*map(str, found.ratios)] == [f"{shape} D=128 (portable) / FA2"]


def test_each_cards_ratios_are_apart(tmp_path: Path) -> None:
    rows = [decode_row(decode.SHAPES[0], name, 1.0) for name in ("ours", "FA2")]
    rows += [row | {"card": "another", "kernels": "cuda", "sources": "b"} for row in rows]
    write_log(tmp_path / "x.csv", decode.COLUMNS, rows)
    files = {now.file: len(now.ratios) for now in measured(tmp_path / "x.csv")}
    assert files == {"decode_sm90_a_card.csv": 1, "decode_another.csv": 1}


def test_ratios_of_steps_weigh_samples_as_their_bins(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = [step_row("ours", 1.0, 3), step_row("ours", 5.0, 1, 1), step_row("flex", 4.0, 4, bins="1")]
    rows += [step_row("dense", 1.0, 3), step_row("dense", 0.0, 1, 1, "out of memory")]
    rows += [step_row("vanilla", 1.0, 3)]  # a bin is missing
    steps = TrainingSteps("sft", 4096, 2, 2, "ours")
    found = measured_log(path, end_to_end.COLUMNS, rows)
    assert (found.file, found.kind, found.failed) == ("end_to_end_sm90_a_card.csv", TrainingSteps, set())
    assert found.ratios == {Key(steps, "flex"): 2.0}
    assert [*map(str, found.ratios)] == ["sft 4K, 2 layers, 2 bins / Flex"]
    # A bin of another run does not make up for the one that is missing, nor one that was run again alone.
    more = [step_row("vanilla", 1.0, 1, 1, started="2027"), step_row("ours", 9.0, 3, started="2027")]
    assert measured_log(path, end_to_end.COLUMNS, [*rows, *more]).ratios == found.ratios
    # Fewer bins are other samples.
    fewer = [step_row(name, 4.0, 4, bins="1", started="2027") for name in ("ours", "flex")]
    assert measured_log(path, end_to_end.COLUMNS, [*rows, *fewer]).ratios == {
        Key(steps, "flex"): 2.0,
        Key(steps._replace(bins=1), "flex"): 1.0,
    }
    failing = [*rows, step_row("ours", 0.0, 1, 1, "out of memory", started="2027")]
    found = measured_log(path, end_to_end.COLUMNS, failing)
    assert (found.ratios, found.failed) == ({}, {steps})


def test_an_experiment_is_compared_as_kernels_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, shape = tmp_path / "x.csv", decode.SHAPES[0]

    def rows(milliseconds: float | None) -> list[dict[str, str]]:
        return [decode_row(shape, "ours", milliseconds), decode_row(shape, "FA2", 2.0)]

    write_log(path, decode.COLUMNS, [*rows(1.0), *(row | {"head_dim": "64"} for row in rows(1.0))])
    call(monkeypatch, path, "--replace")
    assert (tmp_path / "decode_sm90_a_card.csv").read_text().splitlines() == [
        "batch,seqlen_q,seqlen_k,head_dim,ours,against,ratio",
        *(f"1,1,1024,{head_dim},ours,FA2,2.0000" for head_dim in (64, 128)),
    ]
    write_log(path, decode.COLUMNS, rows(1.25))
    with pytest.raises(SystemExit, match="1 ratios fell by more than 3 %"):
        call(monkeypatch, path)
    assert capsys.readouterr().out.endswith(
        "decode_sm90_a_card: 1 of 2 stored ratios were measured again\n"
        "  slower by 20.0 %: B=1 Sq=1 Sk=1K D=128 / FA2 (2.000 before, 1.600 now)\n"
        "  not measured again: D=64: 1 (B=1 Sq=1 Sk=1K)\n"
    )
    write_log(path, decode.COLUMNS, rows(None))
    with pytest.raises(SystemExit, match="1 stored ratios are of kernels that fail now"):
        call(monkeypatch, path)
    write_log(path, decode.COLUMNS, [])
    with pytest.raises(SystemExit):
        call(monkeypatch, path)
    assert "there are no rows" in capsys.readouterr().err
