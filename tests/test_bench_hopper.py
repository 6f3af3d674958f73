"""The Hopper bars, the anchors, and tables and charts laid out as published ones, from made-up rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import cells
import charts
import hopper_bars
import paper_tables
import report
from cells import DIRECTIONS, PEER_MASKS, TWELVE, Case, Row, Run, magi_case, paper_case
from results import Bar, Results

from paddle_flashmask.masks.block_map import MASKED, PARTIAL

RUN = Run("2026-01-01T00:00:00Z", "sm90", "abc", "123", "NVIDIA H200", "1.0", "2.11", "python kernels.py")


def make_row(case: Case, name: str, milliseconds: float, direction: str = "forward") -> Row:
    tflops = case.flops(direction, 0.5) / milliseconds / 1e9
    shape = {"rho": 0.5, "visible_area": case.seqlen**2 // 4, "seconds": 1.0}
    timing = {"milliseconds": milliseconds, "tflops": tflops, "matmul_tflops": 800.0}
    return Row(RUN, case, direction, name, "ok", "", **shape, **timing)


def judge(rows: Iterable[Row]) -> dict[str, Bar]:
    return {bar.what: bar for bar in report.bars(Results(rows, "sm90", RUN.card))}


def test_anchors_are_complete() -> None:
    for head_dim, seqlen in ((128, 8192), (128, 32768), (128, 131072), (64, 8192)):
        for mask in TWELVE:
            for direction in DIRECTIONS:
                case = paper_case(mask, seqlen, head_dim)
                best = hopper_bars.anchors()["best", case, direction]
                assert best >= hopper_bars.anchors()["v3", case, direction] > 100
    full = paper_case("full", 8192, 128)
    assert [hopper_bars.anchors()["best", full, d] for d in DIRECTIONS] == [671, 617]


def test_which_kernels_are_judged_as_hopper_ones() -> None:
    assert report.is_hopper(Results([], "sm90", "any"))
    assert report.is_hopper(Results([], "cuda", "NVIDIA H100 80GB HBM3"))
    assert not report.is_hopper(Results([], "cuda", "NVIDIA A100-SXM4-80GB"))
    assert not report.is_hopper(Results([], "sm80", "NVIDIA H200"))


def test_full_and_causal_are_judged_by_fa4_and_aim_at_the_best() -> None:
    case = paper_case("causal", 8192, 128)
    rows = [make_row(case, "sm90", 1.0), make_row(case, "fa4", 0.96), make_row(case, "cudnn", 0.9)]
    bar = judge(rows)["causal, 8K, D=128, forward: speed relative to FA4"]
    assert (bar.met, bar.measured, bar.aim) == (
        True,
        "0.960",
        "1.05 of the best of fa4, cudnn: 0.900, no",
    )
    slower = [*rows[:1], make_row(case, "fa4", 0.94)]
    assert judge(slower)["causal, 8K, D=128, forward: speed relative to FA4"].met is False
    assert judge([])["causal, 8K, D=128, forward: speed relative to FA4"].met is None


def test_worst_mask_beside_the_best_peer_is_judged() -> None:
    cases = [paper_case(mask, 32768, 64) for mask in TWELVE]
    own = [make_row(case, "sm90", 1.0, "backward") for case in cases]
    peers = [make_row(case, "flex_flash", 1.15, "backward") for case in cases]
    name = "twelve masks, 32K, D=64, backward: of the best of FA4, Flex/FLASH"
    assert judge(own + peers)[name].met is None  # some of them FA4 can do too
    peers += [make_row(case, "fa4", 1.3, "backward") for case in cases if case.mask in PEER_MASKS["fa4"]]
    bar = judge(own + peers)[name]
    assert (bar.met, bar.aim) == (True, "8 of 12 reach 1.1 or 1.2")
    assert bar.measured == "1.150 (full; 12 of 12 measured)"
    assert judge(own + peers[:5])[name].met is None  # so far
    with_fa4 = [*own, *peers[:12], *peers[13:], make_row(cases[0], "fa4", 0.9, "backward")]
    bar = judge(with_fa4)[name]
    assert (bar.met, bar.measured) == (False, "0.900 (full; 12 of 12 measured, 1 below)")
    assert judge([*own[:2], *peers[:2], with_fa4[-1]])[name].met is False  # one is enough


@pytest.mark.parametrize(
    ("what", "mask", "seqlen", "head_dim", "direction", "other", "must"),
    [
        ("full, 8K, D=256, forward: speed relative to FA4", "full", 8192, 256, "forward", "fa4", 0.9),
        ("causal, 8K, D=256, backward: speed relative to FA4", "causal", 8192, 256, "backward", "fa4", 1.0),
        ("twelve masks, 8K, D=64, forward: of Flex", "document", 8192, 64, "forward", "flex", 1.3),
        ("twelve masks, 32K, D=128, backward: of Flex", "qk_sparse", 32768, 128, "backward", "flex", 1.3),
        ("twelve masks, 128K, D=128, forward: of Flex", "document", 131072, 128, "forward", "flex", 1.3),
        (
            "causal, 8K, D=128, backward: deterministic relative to free",
            "causal",
            8192,
            128,
            "backward",
            "",
            0.75,
        ),
    ],
)
def test_each_bar_fails_a_little_below_what_it_asks_for(
    what: str, mask: str, seqlen: int, head_dim: int, direction: str, other: str, must: float
) -> None:
    for share, met in ((1.01, True), (0.99, False)):
        rows = []
        for name in TWELVE if "twelve" in what else (mask,):
            case = paper_case(name, seqlen, head_dim)
            speed = must * share if name == mask else 2.0  # ours, relative to the other's
            if other:
                rows += [make_row(case, "sm90", 1.0, direction), make_row(case, other, speed, direction)]
            else:
                rows += [make_row(case, "sm90", 1.0, direction)]
                rows += [make_row(case, cells.deterministic("sm90"), 1.0 / speed, direction)]
        assert judge(rows)[what].met is met


@pytest.mark.parametrize("seqlen", [32768, 131072])
def test_each_mask_keeps_three_quarters_of_causals_rate(seqlen: int) -> None:
    for share, met in ((0.76, True), (0.74, False)):
        rows = []
        for mask in TWELVE:
            milliseconds = 1.0 if mask != "random_eviction" else 1.0 / share
            rows.append(make_row(paper_case(mask, seqlen, 64), "sm90", milliseconds))
        length = "32K" if seqlen == 32768 else "128K"
        assert judge(rows)[f"twelve masks, {length}, D=64, forward: TFLOP/s of our causal"].met is met


def test_the_ceiling_is_the_fastest_matmul_of_a_run() -> None:
    case, other = paper_case("full", 8192, 128), paper_case("document", 8192, 128)
    row = replace(make_row(case, "sm90", 1.0), tflops=640.0, matmul_tflops=700.0)
    results = Results([row, replace(make_row(other, "sm90", 1.0), matmul_tflops=800.0)], "sm90", RUN.card)
    assert results.of_ceiling(row) == pytest.approx(0.8)
    bars = {bar.what: bar for bar in hopper_bars.bars(results)}
    bar = bars["full, 8K, D=128, forward: share of the matmul's best rate"]
    assert (bar.measured, bar.aim) == ("0.800", "0.88: 0.800, no")


def test_anchors_are_compared_as_shares_of_the_matmul() -> None:
    case = paper_case("document", 8192, 128)
    cell = hopper_bars.anchors()["v3", case, "forward"]
    row = replace(make_row(case, "sm90", 1.0), tflops=0.5 * cell, matmul_tflops=0.5 * 801.5)
    results = Results([row], "sm90", RUN.card)
    assert hopper_bars.anchor_ratio(results, case, "forward", "v3") == pytest.approx(1.0)
    assert hopper_bars.anchor_ratio(results, case, "backward", "v3") is None
    bar = judge([row])["twelve masks, 8K, D=128, forward: of V3's anchor"]
    assert (bar.met, bar.measured) == (None, "1.000 (document; 1 of 12 measured)")
    [table] = hopper_bars.mask_ratios(results)
    assert "| mask | fw / V3 | fw / best |" in table
    assert "| document | 1.00 | 0.81 |" in table


def test_a_later_run_without_peers_changes_no_ratio() -> None:
    """A run of --bars, say, in which the card's clock is another."""
    causal, eviction = (paper_case(mask, 8192, 128) for mask in ("causal", "random_eviction"))
    rows = [
        *(make_row(causal, "sm90", 1.0), make_row(causal, "fa4", 1.1)),
        *(make_row(eviction, "sm90", 1.25), make_row(eviction, "flex_flash", 2.0)),
    ]
    before = list(hopper_bars.mask_ratios(Results(rows, "sm90", RUN.card)))
    alone = replace(RUN, started="2026-01-02T00:00:00Z")
    rows += [replace(make_row(causal, "sm90", 0.9), run=alone)]
    rows += [replace(make_row(eviction, "sm90", 1.3), run=alone)]
    assert list(hopper_bars.mask_ratios(Results(rows, "sm90", RUN.card))) == before
    assert "| random_eviction | 1.60 |" in before[0]
    assert before[0].rstrip().endswith("| 0.80 |")


def test_a_later_run_without_peers_stays_out_of_the_grouped_table() -> None:
    case = magi_case("full", 1024)
    rows = [make_row(case, "sm90", 1.0), make_row(case, "fa4", 1.0)]
    [before, *_] = paper_tables.magi_tables(Results(rows, "sm90", RUN.card))
    alone = replace(make_row(case, "sm90", 0.5), run=replace(RUN, started="2026-01-02T00:00:00Z"))
    [after, *_] = paper_tables.magi_tables(Results([*rows, alone], "sm90", RUN.card))
    assert after == before


def test_not_run_names_other_head_dims_and_settings() -> None:
    rows = [make_row(paper_case("full", 8192, 256), name, 1.0) for name in ("sm90", "flex")]
    rows += [make_row(magi_case("full", 1024), "sm90", 1.0), make_row(magi_case("full", 1024), "fa4", 1.0)]
    missing = report.left_out(Results(rows, "sm90", RUN.card))
    assert "8K D=256 forward (11 of 12 masks)" in missing["ours"]
    assert "8K D=256 backward" in missing["Flex"]
    assert "`--setting magi`" in missing["Flex"]
    assert "`--setting magi`" not in missing["ours"]
    assert "`--setting magi` forward (5 of 5 masks)" in missing["ours"]  # lengths are missing
    of_both = [(mask, length) for mask in cells.MAGI_MASKS for length in cells.MAGI_LENGTHS]
    rows += [make_row(magi_case(*item), "sm90", 1.0, d) for item in of_both for d in DIRECTIONS]
    rows += [make_row(magi_case("full", n), "fa4", 1.0) for n in cells.MAGI_LENGTHS]
    missing = report.left_out(Results(rows, "sm90", RUN.card))
    assert not any("magi" in place for place in missing["ours"])
    assert "`--setting magi` forward (4 of 5 masks)" in missing["FA4"]


def test_not_run_names_shapes_in_order_however_sets_are_hashed() -> None:
    shapes = [(head_dim, seqlen) for head_dim in (96, 192, 256) for seqlen in (8192, 32768, 131072)]
    rows = [make_row(paper_case("full", n, head_dim), "sm90", 1.0) for head_dim, n in reversed(shapes)]
    missing = report.left_out(Results(rows, "sm90", RUN.card))["ours"]
    others = [place for place in missing if "forward (11" in place]
    assert others == [f"{n // 1024}K D={head_dim} forward (11 of 12 masks)" for head_dim, n in shapes]


def test_the_grouped_setting_has_a_figure_of_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    rows = [make_row(magi_case("causal", n), "sm90", 0.01) for n in (1024, 4096)]
    rows += [make_row(magi_case("causal", 1024), "fa4", 0.02)]
    [path] = charts.draw(Results(rows, "sm90", RUN.card), tmp_path)
    assert path.name == "kernels_sm90_d128_magi.png"
    [forward, backward] = drawn[0].axes
    ours, fa4 = (line.get_xydata().tolist() for line in forward.lines)
    assert ours == [[n, 4 * (n**2 // 4) * 128 * 64 / 0.01 / 1e9] for n in (1024, 4096)]
    assert fa4 == [[1024, ours[0][1] / 2]]
    assert not backward.lines


def test_figures_of_two_cards_differ(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [make_row(paper_case("full", 8192, 64), "sm90", 1.0, direction) for direction in DIRECTIONS]
    results = Results(rows, "sm90", RUN.card)
    [first], [second] = (list(charts.draw(results, tmp_path, suffix)) for suffix in ("", "_nvidia_h100"))
    assert [path.name for path in (first, second)] == [
        "kernels_sm90_d64.png",
        "kernels_sm90_d64_nvidia_h100.png",
    ]


def test_totals_are_summed_over_passes_and_samples() -> None:
    case = paper_case("causal", 8192, 128)
    rows = []
    for seed, factor in ((0, 1.0), (1, 3.0)):
        sample = replace(case, seed=seed)
        for direction, milliseconds in zip(DIRECTIONS, (1.0, 2.0), strict=True):
            rows.append(make_row(sample, "sm90", factor * milliseconds, direction))
            rows.append(make_row(sample, "flex", 1.5 * factor * milliseconds, direction))
    rows.append(make_row(replace(case, seed=2), "sm90", 1.0))  # no backward: no total
    results = Results(rows, "sm90", RUN.card)
    found = paper_tables.total(results, case, "flex")
    assert found is not None
    assert found.samples == 2
    assert found.milliseconds == {"forward": 6.0, "backward": 12.0}
    assert found.gain == pytest.approx(1.5)
    flops = 2 * sum(case.flops(direction, 0.5) for direction in DIRECTIONS)
    assert found.rate(*DIRECTIONS) == pytest.approx(flops / 18.0 / 1e9)
    assert "(+50 %)" in next(paper_tables.total_tables(results))


def test_grouped_setting_counts_the_visible_area() -> None:
    case = magi_case("causal", 1024)
    assert (case.heads, case.key_heads, case.batch) == (64, 8, 1)
    [table] = paper_tables.magi_tables(Results([make_row(case, "sm90", 0.01)], "sm90", RUN.card))
    rate = 4 * (1024**2 // 4) * 128 * 64 / 0.01 / 1e9
    assert f"| causal | 128 | 1K | {rate:.0f} |" in table
    assert not [*paper_tables.total_tables(Results([make_row(case, "sm90", 0.01)], "sm90", RUN.card))]
    assert magi_case(cells.MAGI_WINDOW, 2048).build_mask().to_dense()[0, 0, 2047].sum() == 1025


def test_document_and_charts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import charts

    rows = [
        make_row(paper_case(mask, 8192, 64), name, 1.0, direction)
        for mask in TWELVE[:2]
        for name in ("sm90", "flex")
        for direction in DIRECTIONS
    ]
    [path] = charts.draw(Results(rows, "sm90", RUN.card), tmp_path)
    assert path.name == "kernels_sm90_d64.png"
    assert path.stat().st_size > 1000
    text = report.render(rows, "sm90")
    for title in ("### Bars", "### Ratios, D = 64, S = 8K", "### Forward and backward, D = 64, S = 8K"):
        assert title in text


def test_charts_take_the_papers_sparsities_where_they_were_measured() -> None:
    rows = []
    for seqlen, masks in ((8192, ("causal", "share_question", "share_question_published")), (32768, TWELVE)):
        for mask in masks:
            for direction in DIRECTIONS:
                milliseconds = 1.0 if mask.endswith("_published") else 2.0
                rows.append(make_row(paper_case(mask, seqlen, 128), "sm90", milliseconds, direction))
                if mask == "share_question":  # of another mask than the one that is drawn, at 8 K
                    rows.append(make_row(paper_case(mask, seqlen, 128), "flex", 3.0, direction))
    results = Results(rows, "sm90", RUN.card)
    short, long = paper_tables.paper_shapes(results)
    assert charts.masks_of(results, short)["share_question"] == "share_question_published"
    assert charts.masks_of(results, short)["prefix_lm_causal"] == "prefix_lm_causal"
    assert charts.masks_of(results, long) == dict(zip(TWELVE, TWELVE, strict=True))
    totals = charts._totals(results, short)
    assert {mask: sum(sums.milliseconds.values()) for mask, sums in totals["sm90"].items()} == {
        "causal": 4.0,
        "share_question": 2.0,
    }
    assert "flex" not in totals
    assert charts._totals(results, long)["flex"].keys() == {"share_question"}


def test_reference_of_grouped_heads_sums_their_key_gradients() -> None:
    torch = pytest.importorskip("torch")
    import measure

    from paddle_flashmask import masks

    generator = torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, 1, 40, 4, 8, generator=generator)
    k, v = torch.randn(2, 1, 40, 2, 8, generator=generator)
    mask = masks.causal(40)
    reference = measure.reference_heads([q, k, v, dout], mask)
    repeated = [x.repeat_interleave(2, dim=2) for x in (k, v)]
    alone = [
        measure.reference_head(q[0, :, h], repeated[0][0, :, h], repeated[1][0, :, h], dout[0, :, h], mask)
        for h in range(4)
    ]
    assert {(name, h) for name, _, h in reference if name == "dk"} == {("dk", 0), ("dk", 1)}
    torch.testing.assert_close(reference["dv", 0, 1], alone[2]["dv"] + alone[3]["dv"])
    torch.testing.assert_close(reference["dq", 0, 3], alone[3]["dq"])


def test_a_partial_tile_may_take_a_third_more_time() -> None:
    partial, other = cells.masking_cases(64)[0]
    assert partial.flops("forward", 0.5) == other.flops("forward", 0.5)
    beside = [make_row(other, "sm90", 0.96), make_row(other, cells.idle_indices("sm90"), 1.0)]
    what = "a partial tile (random eviction), D=64, forward: time, relative to another"
    bar = judge([make_row(partial, "sm90", 1.2), *beside])[what]
    measured = "1.200, 1.250 of one without indices"
    assert (bar.met, bar.measured, bar.aim) == (True, measured, "<= 1.14: no")
    assert judge([make_row(partial, "sm90", 1.3), *beside])[what].met is False  # of one without
    assert judge([make_row(partial, "sm90", 1.2), beside[1]])[what].met is None
    assert judge([])[what].met is None


@pytest.mark.parametrize(("partial", "other"), cells.masking_cases(128), ids=lambda case: case.mask)
def test_masked_tiles_are_as_many_as_unmasked_ones(partial: cells.Case, other: cells.Case) -> None:
    """Of 64 keys and 192 rows, as the Hopper forward's are."""
    kinds, others = (
        np.asarray(case.build_mask().block_map(192, 64, "minmax")).reshape(-1, 128)
        for case in (partial, other)
    )
    assert abs((kinds == MASKED).mean() - (others == MASKED).mean()) < 0.01
    assert (kinds == PARTIAL).sum() > 0.9 * (others != MASKED).sum()
    assert (others == PARTIAL).sum() < 0.1 * others.size
    if partial.mask == "holes":
        assert partial.build_mask().visible_area() == 8192 * (8192 - cells.HOLE)
    if partial.mask == "two_holes":
        hidden = 8192**2 - partial.build_mask().visible_area()
        assert 1.98 * 8192 * cells.HOLE < hidden <= 2 * 8192 * cells.HOLE  # some overlap
