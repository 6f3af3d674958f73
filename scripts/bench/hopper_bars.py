"""What the Hopper kernels have to reach, beside peers of the same run and beside anchors. No torch.

Anchors (anchors.csv, TFLOP/s) were measured earlier, on one NVIDIA H200 with torch 2.11+cu130, on the same
masks and data: "v3" is upstream's FlashMask V3, "best" the fastest of FA4 4.0.0b36, FlexAttention (Triton and
FLASH), cuDNN, FA2 and V3, each direction by itself. An 8192^3 matmul ran at 796 to 807 TFLOP/s there. Cards
differ, so an anchor is compared as a share of the matmul's rate, theirs of that card and ours of its run.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from cells import DIRECTIONS, LENGTHS, PEER_MASKS, PEER_NAMES, TWELVE, Case, deterministic, paper_case
from results import Bar, Results, at_least, length_name, markdown_table

ANCHOR_MATMUL = 801.5  # TFLOP/s, the middle

# By direction where the passes differ; MUST is a bar, AIM what is hoped for beyond it.
FA4_MUST = {"forward": 0.95, "backward": 0.92}
DENSE_AIM = {"forward": 1.05, "backward": 1.03}  # of the best of FA4 and cuDNN; D = 64: of FA4
MATMUL_AIM = 0.88  # full, D = 128, forward
WIDE_MUST = {"forward": 0.9, "backward": 1.0}  # D = 256, of FA4
WIDE_AIM = {"forward": 1.0, "backward": 1.2}
BLOCK_SPARSE = ("fa4", "flex_flash")
FLEX_MUST, FLEX_AIM_128K = 1.3, 1.5
MASK_AIM, HARD_MASK_AIM = 1.1, 1.2
HARD_MASKS = ("random_eviction", "share_question", "sliding_window", "global_sliding_window")
BEST_AIM_128K = 1.05
CAUSAL_MUST, CAUSAL_AIM, EVICTION_AIM = 0.75, 0.93, 0.88
DETERMINISTIC_MUST, DETERMINISTIC_AIM = 0.75, 0.85

Ratios = Mapping[str, float]  # by mask


@cache
def anchors() -> dict[tuple[str, Case, str], float]:
    """Return the anchors' TFLOP/s by "v3" or "best", case and direction."""
    found = {}
    with (Path(__file__).parent / "anchors.csv").open(newline="") as file:
        for line in csv.DictReader(file):
            case = paper_case(line["mask"], int(line["seqlen"]), int(line["head_dim"]))
            for direction in DIRECTIONS:
                found[line["which"], case, direction] = float(line[direction])
    return found


def bars(results: Results) -> Iterator[Bar]:
    """Judge what there is a target for."""
    for direction in DIRECTIONS:
        for head_dim in (128, 64):
            for seqlen in LENGTHS[:2]:
                for mask in ("full", "causal"):
                    yield from _dense_bars(results, paper_case(mask, seqlen, head_dim), direction)
                yield from _mask_bars(results, head_dim, seqlen, direction)
        yield from _long_bars(results, direction)
        for head_dim in (128, 64):
            for seqlen in LENGTHS[1:]:
                yield _causal_bar(results, head_dim, seqlen, direction)
        for mask in ("full", "causal") if direction == "backward" else ("full",):
            case = paper_case(mask, LENGTHS[0], 256)
            ratio = results.ratio(case, direction, "fa4")
            aim = _aim(WIDE_AIM[direction], ratio)
            yield at_least(
                _what(case, direction, "speed relative to FA4"), WIDE_MUST[direction], ratio, aim=aim
            )
    yield _deterministic_bar(results)


def _what(case: Case, direction: str, of: str) -> str:
    return f"{case.mask}, {length_name(case.seqlen)}, D={case.head_dim}, {direction}: {of}"


def _aim(wanted: float, measured: float | None, of: str = "") -> str:
    """Say an aim, and whether it is reached if that was measured."""
    verdict = "" if measured is None else f": {measured:.3f}, {'yes' if measured >= wanted else 'no'}"
    return f"{wanted:g}{of}{verdict}"


def _dense_bars(results: Results, case: Case, direction: str) -> Iterator[Bar]:
    names = ("fa4", "cudnn") if case.head_dim == 128 else ("fa4",)
    best = best_ratio(results, case, direction, names)
    aim = _aim(DENSE_AIM[direction], best, f" of the best of {', '.join(names)}")
    ratio = results.ratio(case, direction, "fa4")
    yield at_least(_what(case, direction, "speed relative to FA4"), FA4_MUST[direction], ratio, aim=aim)
    if (case.mask, case.head_dim, direction) == ("full", 128, "forward"):
        row = results.in_company(case, direction)
        share = None if row is None else results.of_ceiling(row)
        measured = "" if share is None else f"{share:.3f}"
        met = None if share is None else True  # there is only an aim
        what = _what(case, direction, "share of the matmul's best rate")
        yield Bar(what, "", measured, met, _aim(MATMUL_AIM, share))


def _mask_bars(results: Results, head_dim: int, seqlen: int, direction: str) -> Iterator[Bar]:
    shape = f"{length_name(seqlen)}, D={head_dim}, {direction}"
    must = FA4_MUST[direction]

    def aim(mask: str) -> float:
        return HARD_MASK_AIM if mask in HARD_MASKS else MASK_AIM

    def of_best(case: Case) -> float | None:
        ratio = best_ratio(results, case, direction, BLOCK_SPARSE)
        fails = ratio is not None and ratio < must  # one peer is enough for that
        return ratio if fails or is_complete(results, case, direction, BLOCK_SPARSE) else None

    cases = {mask: paper_case(mask, seqlen, head_dim) for mask in TWELVE}
    ratios = _per_mask(cases, of_best)
    yield _worst(f"twelve masks, {shape}: of the best of FA4, Flex/FLASH", must, TWELVE, ratios, aim)
    cells = [mask for mask, case in cases.items() if ("v3", case, direction) in anchors()]
    if cells:
        ratios = _per_mask(cases, lambda case: anchor_ratio(results, case, direction, "v3"))
        yield _worst(f"twelve masks, {shape}: of V3's anchor", must, cells, ratios)
    ratios = _per_mask(cases, lambda case: results.ratio(case, direction, "flex"))
    yield _worst(f"twelve masks, {shape}: of Flex", FLEX_MUST, TWELVE, ratios)


def _long_bars(results: Results, direction: str) -> Iterator[Bar]:
    cases = {mask: paper_case(mask, LENGTHS[2], 128) for mask in TWELVE}
    shape = f"{length_name(LENGTHS[2])}, D=128, {direction}"
    ratios = _per_mask(cases, lambda case: results.ratio(case, direction, "flex"))
    yield _worst(f"twelve masks, {shape}: of Flex", FLEX_MUST, TWELVE, ratios, lambda mask: FLEX_AIM_128K)
    ratios = _per_mask(cases, lambda case: anchor_ratio(results, case, direction, "best"))
    what = f"twelve masks, {shape}: of the best anchor"
    yield _worst(what, FA4_MUST[direction], TWELVE, ratios, lambda mask: BEST_AIM_128K)


def _causal_bar(results: Results, head_dim: int, seqlen: int, direction: str) -> Bar:
    cases = {mask: paper_case(mask, seqlen, head_dim) for mask in TWELVE}
    ratios = _per_mask(cases, lambda case: causal_ratio(results, case, direction))
    what = f"twelve masks, {length_name(seqlen)}, D={head_dim}, {direction}: TFLOP/s of our causal"
    return _worst(
        what,
        CAUSAL_MUST,
        TWELVE,
        ratios,
        lambda mask: EVICTION_AIM if mask == "random_eviction" else CAUSAL_AIM,
    )


def _deterministic_bar(results: Results) -> Bar:
    case = paper_case("causal", LENGTHS[0], 128)
    ratio = results.ratio(case, "backward", results.kernels, ours=deterministic(results.kernels))
    what = _what(case, "backward", "deterministic relative to free")
    return at_least(what, DETERMINISTIC_MUST, ratio, aim=_aim(DETERMINISTIC_AIM, ratio))


def best_ratio(results: Results, case: Case, direction: str, names: Sequence[str]) -> float | None:
    """How many times as fast as the fastest of these ours is; None: none of them was measured beside it."""
    ratios = [ratio for name in names if (ratio := results.ratio(case, direction, name)) is not None]
    return min(ratios, default=None)


def is_complete(results: Results, case: Case, direction: str, names: Sequence[str]) -> bool:
    """Whether all of these that express the mask were measured beside ours, or failed."""
    return all(
        results.ratio(case, direction, name) is not None or results.failed(case, direction, name)
        for name in names
        if case.mask in PEER_MASKS.get(name, TWELVE)
    )


def anchor_ratio(results: Results, case: Case, direction: str, which: str) -> float | None:
    """Our share of the matmul's best rate relative to an anchor's; None: not measured, or no anchor."""
    row = results.in_company(case, direction)
    cell = anchors().get((which, case, direction))
    return None if row is None or cell is None else results.of_ceiling(row) / (cell / ANCHOR_MATMUL)


def causal_ratio(results: Results, case: Case, direction: str) -> float | None:
    """Our TFLOP/s relative to those of our causal mask, in one run; None: not measured."""
    causal = paper_case("causal", case.seqlen, case.head_dim, case.seed)
    found = results.find(*((c, direction, results.kernels) for c in (case, causal)), in_company=True)
    return found[0].tflops / found[1].tflops if found else None


def _per_mask(cases: Mapping[str, Case], ratio: Callable[[Case], float | None]) -> dict[str, float]:
    return {mask: found for mask, case in cases.items() if (found := ratio(case)) is not None}


def _worst(
    what: str,
    must: float,
    wanted: Sequence[str],
    ratios: Ratios,
    aim: Callable[[str], float] | None = None,
) -> Bar:
    """The bar of the worst of the wanted masks: not met as soon as one is below, met when none is missing."""
    if not ratios:
        return at_least(what, must, None)
    worst = min(ratios, key=lambda mask: ratios[mask])
    below = sum(ratio < must for ratio in ratios.values())
    note = f"{ratios[worst]:.3f} ({worst}; {len(ratios)} of {len(wanted)} measured"
    note += f", {below} below)" if below else ")"
    met = False if below else True if len(ratios) == len(wanted) else None
    reached = ""
    if aim is not None:
        aims = sorted({aim(mask) for mask in ratios})
        count = sum(ratio >= aim(mask) for mask, ratio in ratios.items())
        reached = f"{count} of {len(ratios)} reach {' or '.join(f'{value:g}' for value in aims)}"
    return Bar(what, f">= {must:g}", note, met, reached)


def mask_ratios(results: Results) -> Iterator[str]:
    """Return, per shape that was measured, a table of what the bars of the twelve masks are made of."""
    shapes = {(row.case.head_dim, row.case.seqlen) for row in results.rows if _is_paper_case(row.case)}
    for head_dim, seqlen in sorted(shapes):
        cases = {mask: paper_case(mask, seqlen, head_dim) for mask in TWELVE}
        columns = _columns(results, cases, "forward", "fw") | _columns(results, cases, "backward", "bw")
        columns = {name: ratios for name, ratios in columns.items() if ratios}
        lines = [
            [mask, *(f"{ratios[mask]:.2f}" if mask in ratios else "" for ratios in columns.values())]
            for mask in TWELVE
            if any(mask in ratios for ratios in columns.values())
        ]
        if lines:
            title = f"### Ratios, D = {head_dim}, S = {length_name(seqlen)}"
            note = (
                "Ours relative to a peer of the same run; to an anchor (V3, best) as a share of each one's "
                "fastest matmul; to our own causal mask. fw: forward, bw: backward."
            )
            yield f"{title}\n\n{note}\n\n{markdown_table(['mask', *columns], lines)}"


def _columns(
    results: Results, cases: Mapping[str, Case], direction: str, short: str
) -> dict[str, dict[str, float]]:
    def to_peer(name: str) -> dict[str, float]:
        return _per_mask(cases, lambda case: results.ratio(case, direction, name))

    def to_anchor(which: str) -> dict[str, float]:
        return _per_mask(cases, lambda case: anchor_ratio(results, case, direction, which))

    peers = {f"{short} / {label}": to_peer(name) for name, label in PEER_NAMES.items()}
    to_anchors = {f"{short} / V3": to_anchor("v3"), f"{short} / best": to_anchor("best")}
    to_causal = _per_mask(cases, lambda case: causal_ratio(results, case, direction))
    return peers | to_anchors | {f"{short} / causal": to_causal}


def _is_paper_case(case: Case) -> bool:
    return case.mask in TWELVE and case == paper_case(case.mask, case.seqlen, case.head_dim)
