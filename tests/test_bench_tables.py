"""The kernel benchmark's bookkeeping: its CSV, what is left to measure, tables, bars, the rules for Flex."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from paddle_flashmask import masks
from paddle_flashmask.masks import registry

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import cells
import counters
import decode
import end_to_end
import flex_masks
import inference
import kernels
import memory
import provenance
import report
import sparsity
from cells import (
    DIRECTIONS,
    HEAD_DIMS,
    LENGTHS,
    PACKED,
    PEER_MASKS,
    TWELVE,
    Case,
    Row,
    Run,
    document_ends,
    paper_case,
)
from paper_data import PUBLISHED
from turns import balanced_orders, balanced_rounds, orders_of

CARD = "a card"
RUN = Run("2026-01-01T00:00:00Z", "sm80", "abc", "123", CARD, "1.0", "2.11", "python kernels.py --peers fa2")
LATER = replace(RUN, started="2026-01-02T00:00:00Z")


def make_row(
    case: Case, name: str, milliseconds: float, *, run: Run = RUN, direction: str = "forward"
) -> Row:
    tflops = case.flops(direction, 0.5) / milliseconds / 1e9
    return Row(
        run=run,
        case=case,
        direction=direction,
        implementation=name,
        status="ok",
        reason="",
        rho=0.5,
        visible_area=10,
        seconds=1.0,
        milliseconds=milliseconds,
        tflops=tflops,
        matmul_tflops=2 * tflops,
        workspace_bytes=100 * case.seqlen,
    )


def failed_row(case: Case, name: str, reason: str, *, run: Run = RUN) -> Row:
    return Row(run, case, "forward", name, "failed", reason, 0.5, 10, 1.0)


def verdicts(rows: list[Row]) -> dict[str, tuple[str, str]]:
    bars = report.bars(report.Results(rows, "sm80", CARD))
    return {bar.what: (bar.verdict, bar.measured) for bar in bars}


def test_paper_setting() -> None:
    assert paper_case("causal", 8192, 128) == Case("causal", 8192, 128, batch=16, heads=32)
    assert paper_case("causal", 131072, 64) == Case("causal", 131072, 64, batch=1, heads=64)
    assert paper_case("full", 8192, 128).flops("forward", 0.0) == 4 * 8192**2 * 4096 * 16
    assert paper_case("full", 8192, 128).flops("backward", 0.5) == 1.25 * 4 * 8192**2 * 4096 * 16


@pytest.mark.parametrize(
    ("seqlen", "sparsities"),
    [(8192, (0.91, 0.86, 0.37)), (32768, (0.97, 0.95, 0.37)), (131072, (0.97, 0.95, 0.37))],
)
def test_published_masks_are_as_sparse_as_in_the_papers_tables(
    seqlen: int, sparsities: tuple[float, ...]
) -> None:
    """Share question, prefix document, prefix causal; the mean of five samples, as there."""
    for name, wanted in zip(PUBLISHED, sparsities, strict=True):
        samples = [paper_case(name, seqlen, 64, seed).build_mask().block_sparsity(128) for seed in range(5)]
        assert np.mean(samples) == pytest.approx(wanted, abs=0.03)


def test_case_that_shows_the_search_has_whole_tiles_only() -> None:
    mask = cells.search_case(64).build_mask()
    assert mask.block_sparsity(128) == pytest.approx(0.95)
    assert set(np.unique(mask.block_map(128, 128)).tolist()) == {0, 2}


def test_rows_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "rows.csv"
    case = paper_case("document", 8192, 64)
    rows = [make_row(case, "sm80", 0.125), failed_row(case, "flex", 'RuntimeError: a, "b"')]
    cells.append_rows(path, rows[:1])
    cells.append_rows(path, rows[1:])
    first, second = cells.read_rows(path)
    assert (first.run, first.case, first.milliseconds) == (RUN, case, 0.125)
    assert first.tflops == pytest.approx(rows[0].tflops, rel=1e-5)
    assert not second.ok
    assert second.reason == rows[1].reason
    assert np.isnan(second.milliseconds)
    assert cells.read_rows(tmp_path / "none.csv") == []

    path.write_text(path.read_text().replace("rho", "sparsity", 1))
    for act in (lambda: cells.read_rows(path), lambda: cells.append_rows(path, rows)):
        with pytest.raises(ValueError, match="expected the columns"):
            act()


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ([], ["images/kernels_sm80_d64.png", "results/kernels_sm80.md"]),
        (["--no-report"], []),
        (["--quick", "--csv", "docs/results/kernels_sm80.csv"], []),
        (["--csv", "elsewhere.csv"], []),
        (["--csv", "elsewhere.csv", "--markdown", "docs/x.md"], ["x.md"]),
    ],
)
def test_the_page_and_the_figures_of_the_default_file_are_written(
    options: list[str],
    written: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        make_row(paper_case("full", 8192, 64), "sm80", 1.0, direction=direction) for direction in DIRECTIONS
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    for path in ("docs/results/kernels_sm80.csv", "elsewhere.csv"):
        cells.append_rows(tmp_path / path, rows)
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--kernels", "sm80", "--report-only", *options])
    kernels.main()
    docs = tmp_path / "docs"
    found = (path.relative_to(docs).as_posix() for path in docs.rglob("*.*") if path.suffix != ".csv")
    assert sorted(found) == written
    if "images/kernels_sm80_d64.png" in written:
        link = "![kernels_sm80_d64](../images/kernels_sm80_d64.png)"
        assert (docs / written[-1]).read_text().splitlines()[2] == link
    assert "| bar | wanted | measured | verdict |" in capsys.readouterr().out


def test_part_of_the_published_setting_is_measured_but_makes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks that both settings have would fill a page of the published setting with the other's rows."""
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    path = tmp_path / "docs/results/kernels_sm80_published.csv"
    cells.append_rows(path, [make_row(paper_case("document", 8192, 64), "sm80", 1.0)])
    command = ["kernels.py", "--kernels", "sm80", "--setting", "published", "--report-only"]
    monkeypatch.setattr(sys, "argv", [*command, "--no-report"])
    kernels.main()
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="no rows of the published setting"):
        kernels.main()
    assert not path.with_suffix(".md").exists()


@pytest.mark.parametrize(
    "module", [counters, decode, end_to_end, inference, kernels, memory, sparsity], ids=lambda m: m.__name__
)
def test_what_cannot_begin_ends_with_a_sentence(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.csv"
    command = ["x.py", "--csv", str(path), "--library", "missing.so"]
    path.write_text("a,b\n1,2\n")
    monkeypatch.setattr(sys, "argv", [*command, "--report-only"])
    with pytest.raises(SystemExit, match="expected the columns"):
        module.main()
    path.unlink()
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(provenance.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="measuring needs torch"):
        module.main()
    monkeypatch.setattr(provenance.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(SystemExit, match=r"missing.so is not there: .*build_kernels.py --cuda builds it"):
        module.main()


def test_a_page_is_written_without_figures_where_none_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the machine with the GPU, which need not have matplotlib, would end with a trace."""
    monkeypatch.setattr(kernels, "ROOT", tmp_path)
    monkeypatch.setattr(provenance.importlib.util, "find_spec", lambda name: None)
    cells.append_rows(
        tmp_path / "docs/results/kernels_sm80.csv", [make_row(paper_case("full", 8192, 64), "sm80", 1.0)]
    )
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--kernels", "sm80", "--report-only"])
    kernels.main()
    assert "matplotlib is missing" in capsys.readouterr().out
    assert "kernels_sm80_d64" not in (tmp_path / "docs/results/kernels_sm80.md").read_text()


@pytest.mark.parametrize("module", [kernels, inference])
def test_what_is_written_is_no_part_of_a_recorded_command(module, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    for options in ([], ["--no-report"], ["--markdown", "x.md"]):
        monkeypatch.setattr(sys, "argv", ["x.py", "--kernels", "sm80", "--masks", "document", *options])
        commands.append(module.parse_arguments()[1])
    name = module.__name__
    assert commands == [f"python scripts/bench/{name}.py --kernels sm80 --masks document"] * 3


def test_resuming_leaves_out_what_one_run_has() -> None:
    case = paper_case("causal", 8192, 64)
    rows = [make_row(case, "sm80", 1.0), failed_row(case, "fa2", "no"), make_row(case, "fa4", 1.0, run=LATER)]

    def done(names: list[str], run: Run = LATER, seconds: float = 1.0, direction: str = "forward") -> bool:
        return cells.is_done(rows, run, case, direction, names, seconds)

    assert done(["sm80"])
    assert done(["sm80", "fa2"])
    assert done(["sm80"], run=replace(LATER, commit="other"))
    assert not done(["sm80", "fa4"])  # in two runs
    assert not done(["sm80"], run=replace(LATER, sources="changed"))
    assert not done(["sm80"], run=replace(LATER, card="another card"))
    assert not done(["sm80"], seconds=2.0)
    assert not done(["sm80"], direction="backward")


def test_causal_is_measured_again_with_any_mask_of_its_shape() -> None:
    first, causal, other = (paper_case(mask, 8192, 64) for mask in ("full", "causal", "document"))
    long = paper_case("causal", 32768, 64)
    cases = [first, causal, other, long]

    def plan(*left: tuple[Case, str]) -> list[tuple[Case, list[str]]]:
        return cells.plan(cases, lambda case, direction: (case, direction) not in left)

    assert plan() == []
    assert plan((other, "backward")) == [(causal, ["backward"]), (other, ["backward"])]
    assert plan((first, "forward"), (long, "forward")) == [
        (first, ["forward"]),
        (causal, ["forward"]),
        (long, ["forward"]),
    ]


def test_ratios_come_from_one_run() -> None:
    case = paper_case("full", 8192, 128)
    rows = [make_row(case, "sm80", 2.0), make_row(case, "fa2", 1.92), make_row(case, "sm80", 1.0, run=LATER)]
    name = "full, 8K, D=128, forward: speed relative to FA2"
    assert verdicts(rows)[name] == ("met", "0.960")
    assert verdicts([*rows, make_row(case, "fa2", 0.9, run=LATER)])[name] == ("NOT met", "0.900")
    assert verdicts([*rows, failed_row(case, "fa2", "no", run=LATER)])[name] == ("met", "0.960")
    assert verdicts([make_row(case, "sm80", 1.0, run=replace(LATER, sources="new")), *rows])[name][0] == (
        "not measured"
    )


def test_worst_of_the_twelve_is_judged() -> None:
    rows = [make_row(paper_case(mask, 32768, 64), "sm80", 1.0) for mask in cells.TWELVE]
    name = "twelve masks, 32K, D=64, forward: TFLOP/s relative to causal"
    assert verdicts(rows)[name] == ("met", "1.000 (full; 12 of 12 reach 0.9)")
    rows[5] = make_row(rows[5].case, "sm80", 2.0)
    assert verdicts(rows)[name] == ("NOT met", "0.500 (share_question; 11 of 12 reach 0.9)")
    assert verdicts(rows[:5])[name] == ("incomplete", "5 of 12 masks")


def test_search_memory_and_determinism_are_judged() -> None:
    case = cells.search_case(128)
    rows = [make_row(case, "sm80", 1.02), make_row(case, "sm80 batched", 1.0)]
    rows += [make_row(long, "sm80", 1.0) for long in cells.long_cases()]
    causal = paper_case("causal", 8192, 64)
    rows += [
        make_row(causal, name, ms, direction="backward")
        for name, ms in (("sm80", 3.0), ("sm80 deterministic", 5.0))
    ]
    found = {
        what.split(":")[0]: value for what, value in verdicts(rows).items() if value[0] != "not measured"
    }
    search = "finding the tiles, 130560 tokens at 95 % sparsity, D=128, forward"
    assert found[search] == ("met", "2.0 % more time than a batch of the same documents")
    assert "\n20 documents of 6,528 tokens, packed (rho = 0.95) and" in report.render(rows, "sm80")
    assert found["deterministic backward"] == ("NOT met", "0.600 (causal, 8K, D=64; 1 cases)")
    assert found["causal_document_64, 1 head, D=64, forward"] == ("met", "100.0, 100.0, 100.0, 100.0")

    grown = [replace(row, workspace_bytes=row.case.seqlen**2) for row in rows]
    assert ("NOT met", "131072.0, 262144.0, 524288.0, 1048576.0") in verdicts(grown).values()


def test_document_shows_peers_and_failures() -> None:
    case = paper_case("causal", 8192, 128)
    rows = [make_row(case, "sm80", 2.0), make_row(case, "fa2", 3.0), failed_row(case, "flex", "it fell over")]
    text = report.render(rows, "sm80")
    assert "| causal | 0.500 | 0.000 | 2.000 | 4398 | 0.50 | 2932 (1.50) | failed |" in text
    assert "- flex: it fell over (causal 8K D=128 forward)" in text
    assert f"## {CARD}" in text
    assert RUN.command in text
    assert report.render([], "sm80").startswith("# sm80 kernels")


def test_tables_show_ours_of_the_run_beside_peers() -> None:
    case = paper_case("causal", 8192, 128)
    rows = [make_row(case, name, 2.0, direction=d) for d in DIRECTIONS for name in ("sm80", "fa2")]
    rows += [make_row(case, "sm80", 1.0, direction=d, run=LATER) for d in DIRECTIONS]
    text = report.render(rows, "sm80")
    assert "| causal | 0.500 | 0.000 | 2.000 | 4398 | 0.50 | 4398 (1.00) |" in text
    assert "| 2.00 | 2.00 | 4.00 |" in text
    assert "| 1.00 |" not in text


def test_samples_are_in_one_table_of_totals_and_not_in_one_each() -> None:
    cases = [paper_case(mask, 8192, 128, seed) for seed in range(3) for mask in ("causal", *PUBLISHED)]
    cases = [case for case in cases if case.mask != "causal" or case.seed == 0]
    cases += [paper_case("document", 8192, 128, seed) for seed in range(3)]
    rows = [
        make_row(case, name, 2.0, direction=direction)
        for case in cases
        for name in ("sm80", "flex")
        for direction in DIRECTIONS
        if name == "sm80" or case.seed == 0
    ]
    text = report.render(rows, "sm80")
    assert text.count(", seed 0), forward") == 1
    assert "seed 1" not in text
    assert "\n| document | 0.50 | 3 | 2.00 | 2.00 | 4.00 |" in text
    assert "share_question" not in text
    text = report.render(rows, "sm80", published=True)
    assert text.startswith("# sm80 kernels, sparsities as in the paper\n")
    assert "\n| share_question | 0.50 | 3 | 2.00 | 2.00 | 4.00 |" in text
    assert "\n| causal | 0.50 | 1 |" in text
    assert "Bars" not in text
    assert "- ours: 8K D=64 forward, 8K D=64 backward" in text.partition("\n### Not run\n\n")[2]
    assert "8K D=128 forward (7 of 12 masks)" in text
    assert "--setting" not in text


def test_how_fa4_takes_documents_is_said_where_it_did() -> None:
    case = paper_case("document", 8192, 64)
    rows = [make_row(case, "sm80", 1.0), make_row(paper_case("full", 8192, 64), "fa4", 1.0)]
    assert "several lengths" not in report.render(rows, "sm80")
    assert "FA4 takes documents as sequences of several lengths" in report.render(
        [*rows, make_row(case, "fa4", 2.0)], "sm80"
    )


def test_document_keeps_what_was_not_measured_again() -> None:
    causal, full = (paper_case(mask, 8192, 128) for mask in ("causal", "full"))
    newer, newest = (replace(RUN, started=f"2027-01-0{day}", sources=f"day {day}") for day in (1, 2))
    rows = [
        make_row(causal, "sm80", 2.0),
        make_row(causal, "fa2", 3.0),
        make_row(full, "sm80", 4.0),
        make_row(full, "sm80", 5.0, direction="backward"),
        make_row(full, "sm80", 6.0, run=newer),
        make_row(causal, "sm80", 7.0, run=newest),
    ]
    now, *earlier = report.render(rows, "sm80").split(f"## {CARD}")[1:]
    assert "| causal | 0.500 | 0.000 | 7.000 " in now
    assert "| full | 0.500 | 0.000 | 5.000 " in now  # nothing newer is of that pass
    assert now.count("| full |") == 1
    assert [part.splitlines()[0] for part in earlier] == [", earlier kernels: what was not measured again"]
    assert "- forward: kernel sources day 1, commit " in earlier[0]
    assert "| full | 0.500 | 0.000 | 6.000 " in earlier[0]
    assert "| causal |" not in "".join(earlier)
    assert "not measured |" not in "".join(earlier)


def test_document_says_what_was_not_run() -> None:
    rows = [
        make_row(paper_case(mask, seqlen, head_dim), name, 1.0, direction=direction)
        for mask in TWELVE
        for seqlen in LENGTHS
        for head_dim in HEAD_DIMS
        for direction in DIRECTIONS
        for name in ("sm80", "fa2")
        if mask in PEER_MASKS.get(name, TWELVE)
    ]
    assert "- ours:" not in report.render(rows, "sm80")
    text = report.render(rows[1:], "sm80").partition("\n### Not run\n\n")[2]
    assert text.splitlines()[0] == "- ours: 8K D=64 forward (1 of 12 masks)"
    assert "- ours, deterministic: anything\n" in text
    assert "- FA2:" not in text
    assert "- cuDNN: anything\n" in text
    assert text.splitlines()[-1] == "- settings: `--setting magi`"


@pytest.mark.parametrize("commit", ["", "1234567 changed"])
def test_tables_hand_the_commit_on(commit: str, tmp_path: Path) -> None:
    """Where they are run there may be no git."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    for name, lines in (("nvidia-smi", "echo GPU 0"), ("python3", 'printf "<%s>" "$@"; echo')):
        (tmp_path / name).write_text(f"#!{bash}\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "8192_64.csv").write_text("a\n1\n")  # which kernels.py would have written
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    script = str(cells.ROOT / "scripts" / "bench" / "tables.sh")
    environment = os.environ | {"PATH": path, "COMMIT": commit}
    subprocess.run([bash, script, str(tmp_path), "8192:64"], env=environment, check=True, timeout=60)
    calls = (tmp_path / "log.txt").read_text().splitlines()
    assert [call.rsplit("<")[-1] for call in calls] == ["--prepare>", "--resume>"]
    assert all((f"<--commit><{commit}>" in call) == bool(commit) for call in calls)
    assert all(("<--commit>" in call) == bool(commit) for call in calls)


@pytest.mark.parametrize("seqlen", [256, 1000, 1500])
@pytest.mark.parametrize("name", [*cells.TWELVE, *PUBLISHED, cells.MAGI_WINDOW])
def test_flex_rules_are_the_masks(name: str, seqlen: int) -> None:
    tokens = flex_masks.token_arrays(seqlen, seed=1, published=name in PUBLISHED)
    rule = flex_masks.make_rule(name, seqlen, tokens)
    i, j = np.arange(seqlen)[:, None], np.arange(seqlen)[None]
    expected = Case(name, seqlen, 64, 1, 1, seed=1).build_mask().to_dense()[0, 0]
    np.testing.assert_array_equal(np.broadcast_to(rule(i, j), expected.shape), expected)


@pytest.mark.parametrize("name", ["share_question", "qk_sparse", "random_eviction"])
def test_reference_head_is_the_reference(name: str) -> None:
    """Needs torch, which only benchmarks do."""
    torch = pytest.importorskip("torch")
    import measure

    from paddle_flashmask.reference import attention_reference, attention_reference_backward

    mask = registry.make(name, 300)
    q, k, v, dout = torch.randn(4, 300, 16, generator=torch.Generator().manual_seed(0))
    found = measure.reference_head(q, k, v, dout, mask, rows=128)
    arrays = [x.numpy()[None, :, None] for x in (q, k, v)]
    o, lse = attention_reference(*arrays, mask.to_dense())
    gradients = attention_reference_backward(*arrays, mask.to_dense(), dout.numpy()[None, :, None])
    expected = dict(zip(("o", "dq", "dk", "dv"), (o, *gradients), strict=True))
    for key, value in expected.items():
        np.testing.assert_allclose(found[key].numpy(), value[0, :, 0], atol=1e-5)
    np.testing.assert_allclose(found["lse"].numpy(), lse[0, 0], atol=1e-5)

    results = {key: found[key][None, :, None].clone() for key in expected}
    results["lse"] = found["lse"][None, None].clone()
    reference = {(key, 0, 0): value for key, value in found.items()}
    assert measure.check(results, reference) == 0
    for key in results:
        wrong = {other: value.clone() for other, value in results.items()}
        wrong[key].view(-1, 1 if key == "lse" else 16)[-1] += 0.5
        with pytest.raises(measure.WrongResultError, match=key):
            measure.check(wrong, reference)


@pytest.mark.parametrize("count", range(1, 10))
def test_each_job_follows_each_other_equally_often(count: int) -> None:
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    neighbours = Counter(pair for order in orders for pair in pairwise(order))
    assert len(neighbours) == count * (count - 1)
    assert len(set(neighbours.values())) <= 1


@pytest.mark.parametrize("count", range(2, 8))
@pytest.mark.parametrize("wanted", [1, 5, 12, 100])
def test_balanced_rounds_are_the_next_that_balance(count: int, wanted: int) -> None:
    rounds = balanced_rounds(count, wanted)
    assert wanted <= rounds < wanted + 2 * count
    neighbours = Counter(pair for order in orders_of(count, rounds) for pair in pairwise(order))
    assert len(neighbours) == count * (count - 1)
    assert len(set(neighbours.values())) == 1


@pytest.mark.parametrize("mask", PACKED)
def test_documents_as_sequences_of_several_lengths_are_those_of_the_mask(mask: str) -> None:
    case = paper_case(mask, 32768, 64, seed=3)
    ends = document_ends(case)
    assert (ends[0], ends[-1]) == (0, case.batch * case.seqlen)
    first = ends[: int(np.flatnonzero(ends == case.seqlen)[0]) + 1]  # of the first sample
    assert getattr(masks, mask)(np.diff(first)) == case.build_mask()
    assert np.array_equal(np.diff(ends), np.tile(np.diff(first), case.batch))


def _kernels_page(kernels: str, *, published: bool = False) -> str:
    path = cells.ROOT / "docs" / "results" / f"kernels_{kernels}{'_published' if published else ''}.csv"
    return report.render(cells.read_rows(path), kernels, published=published)


def _page(module: ModuleType) -> str:
    path = cells.ROOT / "docs" / "results" / f"{module.__name__}.csv"
    text: str = module.render(provenance.newest_of(provenance.Log(path, module.COLUMNS).rows))
    return text


PAGES: dict[str, Callable[[], str]] = {
    "kernels_sm80": lambda: _kernels_page("sm80"),
    "kernels_sm90": lambda: _kernels_page("sm90"),
    "kernels_sm90_published": lambda: _kernels_page("sm90", published=True),
    "inference": lambda: inference.render(
        cells.read_rows(cells.ROOT / "docs" / "results" / "inference.csv"), "cuda"
    ),
} | {module.__name__: partial(_page, module) for module in (counters, decode, end_to_end, memory, sparsity)}


@pytest.mark.parametrize("name", PAGES)
def test_committed_pages_are_what_the_scripts_write(name: str) -> None:
    """Else they say what no script says any more. The figures below the title are taken from the page."""
    page = cells.ROOT / "docs" / "results" / f"{name}.md"
    committed = page.read_text()
    figures = [page.parent / link for link in re.findall(r"^!\[\w+\]\((.+)\)$", committed, re.MULTILINE)]
    assert all(figure.exists() for figure in figures)
    assert provenance.with_figures(PAGES[name](), page, figures) == committed
