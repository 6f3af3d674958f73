"""The measured rows as Markdown: tables beside peers, and the bars with their verdicts. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import median_low

import hopper_bars
from cells import (
    DIRECTIONS,
    EQUAL_DOCUMENT_COUNT,
    EQUAL_DOCUMENT_LENGTH,
    HEAD_DIMS,
    LENGTHS,
    LONG_DOCUMENTS,
    MAGI_LENGTHS,
    MAGI_MASKS,
    MAGI_WINDOW,
    PACKED,
    PEER_MASKS,
    PEER_NAMES,
    PUBLISHED_TWELVE,
    TRAINING_PEERS,
    TWELVE,
    Case,
    Row,
    batched,
    deterministic,
    idle_indices,
    long_cases,
    magi_case,
    masking_cases,
    paper_case,
    search_case,
)
from paper_data import PUBLISHED_SUFFIX
from paper_tables import magi_tables, total_tables
from results import Bar, Results, at_least, document, failures, length_name, markdown_table, not_run

FA2_BAR, CAUSAL_BAR, CAUSAL_AIM, DETERMINISTIC_BAR, SEARCH_BAR = 0.95, 0.75, 0.9, 0.75, 0.03
HOPPER_SEARCH_BAR = 0.02
MASKING_BAR, MASKING_AIM = 1.33, 1.14  # time of a masked tile, relative to one that is not
LINEAR_BAR = 1.01  # bytes per token at a million tokens, relative to those at 128 K


def bars(results: Results) -> Iterator[Bar]:
    """Judge whatever there is a target for."""
    if is_hopper(results):
        yield from hopper_bars.bars(results)
        yield from _search_bars(results, HOPPER_SEARCH_BAR)
        yield from _masking_bars(results)
    else:
        yield from _peer_bars(results)
        yield from _mask_bars(results)
        yield _deterministic_bar(results)
        yield from _search_bars(results, SEARCH_BAR)
    yield from _memory_bars(results)


def is_hopper(results: Results) -> bool:
    """Whether these are the Hopper kernels: sm90, or the best ones on a Hopper card."""
    on_hopper = any(name in results.card for name in ("H100", "H200", "H800", "H20", "GH200"))
    return results.kernels == "sm90" or (results.kernels == "cuda" and on_hopper)


def _peer_bars(results: Results) -> Iterator[Bar]:
    for head_dim in HEAD_DIMS:
        for mask in ("full", "causal"):
            case = paper_case(mask, 8192, head_dim)
            for direction in DIRECTIONS:
                what = f"{mask}, {length_name(8192)}, D={head_dim}, {direction}: speed relative to FA2"
                yield at_least(what, FA2_BAR, results.ratio(case, direction, "fa2"))


def _mask_bars(results: Results) -> Iterator[Bar]:
    for seqlen in LENGTHS:
        for head_dim in HEAD_DIMS:
            for direction in DIRECTIONS:
                ratios = {}
                for mask in TWELVE:
                    cases = [paper_case(name, seqlen, head_dim) for name in (mask, "causal")]
                    keys = ((case, direction, results.kernels) for case in cases)
                    found = results.find(*keys, in_company=True)
                    if found:
                        ratios[mask] = found[0].tflops / found[1].tflops
                shape = f"{length_name(seqlen)}, D={head_dim}, {direction}"
                what = f"twelve masks, {shape}: TFLOP/s relative to causal"
                if len(ratios) < len(TWELVE):
                    note = f"{len(ratios)} of {len(TWELVE)} masks" if ratios else ""
                    yield at_least(what, CAUSAL_BAR, None, note)
                    continue
                worst = min(ratios, key=lambda mask: ratios[mask])
                aim = sum(ratio >= CAUSAL_AIM for ratio in ratios.values())
                note = f"({worst}; {aim} of {len(TWELVE)} reach {CAUSAL_AIM:g})"
                yield at_least(what, CAUSAL_BAR, ratios[worst], note)


def _deterministic_bar(results: Results) -> Bar:
    name = deterministic(results.kernels)
    ratios = {
        case: ratio
        for case in dict.fromkeys(row.case for row in results.rows)
        if (ratio := results.ratio(case, "backward", results.kernels, ours=name)) is not None
    }
    what = "deterministic backward: speed relative to the free one, the worst of all"
    if not ratios:
        return at_least(what, DETERMINISTIC_BAR, None)
    worst = min(ratios, key=lambda case: ratios[case])
    place = f"{worst.mask}, {length_name(worst.seqlen)}, D={worst.head_dim}"
    return at_least(what, DETERMINISTIC_BAR, ratios[worst], f"({place}; {len(ratios)} cases)")


def _search_bars(results: Results, limit: float) -> Iterator[Bar]:
    """The same tiles, once to be found among 1,040 x 1,040, once as a batch with idle indices."""
    for head_dim in HEAD_DIMS:
        case = search_case(head_dim)
        for direction in DIRECTIONS:
            what = f"finding the tiles, {case.seqlen} tokens at 95 % sparsity, D={head_dim}, {direction}"
            speed = results.ratio(case, direction, batched(results.kernels))
            cost = None if speed is None else 1 / speed - 1
            measured = (
                "" if cost is None else f"{100 * cost:.1f} % more time than a batch of the same documents"
            )
            wanted = f"< {100 * limit:g} %"
            yield Bar(what, wanted, measured, None if cost is None else cost < limit)


def _masking_bars(results: Results) -> Iterator[Bar]:
    """Masks against others of the same tiles, partial or not.

    The other once with idle indices, which is through the same kernels, and once without any, for which
    others may be faster. Neither may be beaten by more than the bar.
    """
    for head_dim in HEAD_DIMS:
        for (partial, other), direction in product(masking_cases(head_dim), DIRECTIONS):
            mask = partial.mask.replace("_", " ")
            what = f"a partial tile ({mask}), D={head_dim}, {direction}: time, relative to another"
            costs = []
            for name in (idle_indices(results.kernels), results.kernels):
                found = results.find((partial, direction, results.kernels), (other, direction, name))
                costs += [found[0].milliseconds / found[1].milliseconds] if found else []
            complete = len(costs) == 2
            aim = f"<= {MASKING_AIM:g}: {'yes' if max(costs) <= MASKING_AIM else 'no'}" if complete else ""
            measured = f"{costs[0]:.3f}, {costs[1]:.3f} of one without indices" if complete else ""
            yield Bar(
                what, f"<= {MASKING_BAR:g}", measured, max(costs) <= MASKING_BAR if complete else None, aim
            )


def _memory_bars(results: Results) -> Iterator[Bar]:
    cases = long_cases()
    for direction in DIRECTIONS:
        rows = results.find(*((case, direction, results.kernels) for case in cases))
        what = f"{LONG_DOCUMENTS}, 1 head, D=64, {direction}"
        longest = (cases[-1], direction, results.kernels)
        runs = False if results.failed(*longest) else True if results.find(longest) else None
        measured = {True: "yes", False: "no", None: ""}[runs]
        yield Bar(f"{what}: {cases[-1].seqlen} tokens run, results checked", "yes", measured, runs)
        for name in ("mask_bytes", "workspace_bytes"):
            per_token = [getattr(row, name) / row.case.seqlen for row in rows]
            text = ", ".join(f"{value:.1f}" for value in per_token)
            lengths = " to ".join(length_name(case.seqlen) for case in (cases[0], cases[-1]))
            yield Bar(
                f"{what}: {name.replace('_', ' ')} per token from {lengths}",
                f"grows <= {100 * (LINEAR_BAR - 1):g} %",
                text,
                None if not rows else per_token[-1] <= LINEAR_BAR * per_token[0],
            )


def cards(rows: Iterable[Row], kernels: str) -> list[str]:
    """Return the cards that one architecture's kernels were measured on."""
    return list(dict.fromkeys(row.run.card for row in rows if row.run.kernels == kernels))


def render(rows: Sequence[Row], kernels: str, *, published: bool = False) -> str:
    """Return everything that was measured with one architecture's kernels as a Markdown document.

    ``published``: the rows are those of that setting, of which there are the tables of totals alone.
    """
    parts = [
        f"# {kernels} kernels{', sparsities as in the paper' if published else ''}",
        "Written by scripts/bench/kernels.py from the CSV file beside it. bfloat16; q, k, v are normal; "
        "one mask for all samples and heads. Times are medians of runs (how many, after how many "
        "warm-ups: in that file) with a cold L2, in turns with peers and with a large matmul, masks one "
        "after the other; ours include what the device does with the index vectors, and neither making those "
        f"nor FlexAttention's block mask is timed (memory.md has both). {_packed(rows, kernels)}Results were "
        "checked before timing. "
        "TFLOP/s = 4 S² D H B (1 - rho) / time forward, 2.5 times that backward; rho = fully masked "
        "128x128 tiles / all; area = visible elements / all; `of matmul` = share of an 8192³ bfloat16 "
        "product's TFLOP/s. In brackets: how many times as fast as that peer ours is. On a card at its power "
        "limit the clock follows what all that take turns need: rates of the same kernels differ by a tenth "
        "and more between runs beside different peers, and a matmul beside them can be slower than alone. So "
        "ratios are of one run each (in tables of totals of one run for each pass), and rates are to be "
        "compared within a run.",
    ]
    for card in cards(rows, kernels):
        results = Results(rows, kernels, card)
        parts += [f"## {card}", origin(results.rows)]
        if published:
            parts += [*total_tables(results, PUBLISHED_TWELVE), failures_of(results)]
            parts.append(not_run(left_out(results, PUBLISHED_TWELVE), level=3))
            continue
        parts += ["### Bars", render_bars(results), *_tables(results)]
        parts.append(not_run(left_out(results), level=3))
        for earlier in not_measured_again(rows, results):
            parts += [
                f"## {card}, earlier kernels: what was not measured again",
                *(origin(earlier.rows), "### Bars", render_bars(earlier, measured_only=True)),
                *_tables(earlier),
            ]
    return document(parts)


def _packed(rows: Sequence[Row], kernels: str) -> str:
    """Return how FA4 takes documents, where it did."""
    did = any(
        (row.run.kernels, row.implementation) == (kernels, "fa4") and row.case.mask in PACKED for row in rows
    )
    return "FA4 takes documents as sequences of several lengths, one after the other. " if did else ""


def not_measured_again(rows: Sequence[Row], results: Results) -> Iterator[Results]:
    """Yield what the card's earlier kernel sources were measured at and later ones were not, newest first."""
    while results.rows:
        again = {(row.case, row.direction) for row in results.rows}
        rows = [row for row in rows if row not in results.rows and (row.case, row.direction) not in again]
        results = Results(rows, results.kernels, results.card)
        if results.rows:
            yield results


def _tables(results: Results) -> list[str]:
    tables = hopper_bars.mask_ratios(results) if is_hopper(results) else []
    return [
        *(*tables, *total_tables(results), *magi_tables(results), *mask_tables(results)),
        *(_search_table(results), _long_table(results), failures_of(results)),
    ]


def left_out(results: Results, twelve: Sequence[str] = TWELVE) -> dict[str, list[str]]:
    """Return, by implementation, where which of the twelve masks were not run; and other settings."""
    tried = {(row.implementation, row.case, row.direction) for row in results.rows}
    names = {results.kernels: "ours", deterministic(results.kernels): "ours, deterministic"}
    names |= {name: PEER_NAMES[name] for name in TRAINING_PEERS}
    places: dict[str, list[str]] = {}
    others = {  # such as D = 256 at 8 K
        (case.head_dim, case.seqlen)
        for _, case, _ in tried
        if case.mask in twelve and case == paper_case(case.mask, case.seqlen, case.head_dim, case.seed)
    }
    shapes = dict.fromkeys([*product(HEAD_DIMS, LENGTHS), *sorted(others)])
    grouped = {name for name, case, _ in tried if case.kv_heads}
    for name, label in names.items():
        known = PEER_MASKS.get(name, TWELVE)
        masks = [mask for mask in twelve if mask.removesuffix(PUBLISHED_SUFFIX) in known]
        if not any(name == row.implementation and row.case.mask in masks for row in results.rows):
            places[label] = ["anything"]
            continue
        places[label] = []
        directions = ["backward"] if name == deterministic(results.kernels) else DIRECTIONS
        for (head_dim, seqlen), direction in product(shapes, directions):
            count = sum((name, paper_case(mask, seqlen, head_dim), direction) in tried for mask in masks)
            if count < len(masks):
                part = f" ({len(masks) - count} of {len(masks)} masks)" if count else ""
                places[label].append(f"{length_name(seqlen)} D={head_dim} {direction}{part}")
        if grouped and name not in grouped:
            places[label].append("`--setting magi`")
        elif grouped:
            places[label] += _left_out_of_magi(tried, name, known, directions)
    magi = any(row.case.kv_heads for row in results.rows) or twelve is not TWELVE
    places["settings"] = [] if magi else ["`--setting magi`"]
    return places


def _left_out_of_magi(
    tried: Collection[tuple[str, Case, str]], name: str, known: Sequence[str], directions: Sequence[str]
) -> Iterator[str]:
    """Yield the passes in MagiAttention's setting of which an implementation lacks masks that it knows."""
    window = "sliding_window" in known  # the setting has one of its own
    masks = [mask for mask in MAGI_MASKS if mask in known or (window and mask == MAGI_WINDOW)]
    cases = [magi_case(mask, seqlen) for mask in masks for seqlen in MAGI_LENGTHS]
    for direction in directions:
        missing = {case.mask for case in cases if (name, case, direction) not in tried}
        if missing:
            yield f"`--setting magi` {direction} ({len(missing)} of {len(masks)} masks)"


def render_bars(results: Results, *, measured_only: bool = False) -> str:
    """Return the bars as a table."""
    judged = [bar for bar in bars(results) if bar.measured or not measured_only]
    lines = [[bar.what, bar.wanted, bar.measured, bar.verdict] for bar in judged]
    header = ["bar", "wanted", "measured", "verdict"]
    if any(bar.aim for bar in judged):
        header.append("aim")
        lines = [[*line, bar.aim] for line, bar in zip(lines, judged, strict=True)]
    return markdown_table(header, lines, left=len(header))


def origin(rows: list[Row]) -> str:
    """Return where rows come from as a Markdown list."""

    def distinct(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    starts = [row.run.started for row in rows]
    timed = [row for row in rows if row.ok]
    lines = [
        f"- driver {distinct(row.run.driver for row in rows)}",
        f"- torch {distinct(row.run.torch for row in rows)}",
        *(
            f"- {direction}: kernel sources {distinct(row.sources for row in own)}, "
            f"commit {distinct(row.run.commit for row in own)}"
            for direction in DIRECTIONS
            if (own := [row for row in rows if row.direction == direction])
        ),
        f"- runs of {' to '.join(dict.fromkeys((min(starts), max(starts))))}",
        *(
            [
                f"- a time is the median of {_spread(row.repetitions for row in timed)} runs, after "
                f"{_spread(row.warmups for row in timed)} that warm up"
            ]
            if timed
            else []
        ),
        *(f"- `{command}`" for command in dict.fromkeys(row.run.command for row in rows)),
    ]
    return "\n".join(lines)


def _spread(counts: Iterable[int]) -> str:
    every = sorted(counts)
    if every[0] == every[-1]:
        return str(every[0])
    return f"{every[0]} to {every[-1]} (half of them {median_low(every)} or more)"


def mask_tables(results: Results) -> Iterator[str]:
    """Return a table per head dim, length and direction: of the lowest seed, for totals are of all."""
    shapes = sorted(
        {
            replace(row.case, mask="")
            for row in results.rows
            if row.case.mask in TWELVE and not row.case.kv_heads
        },
        key=lambda case: (case.head_dim, case.seqlen, case.seed),
    )
    first = {replace(shape, seed=0): shape for shape in reversed(shapes)}
    for shape in (shape for shape in shapes if shape in first.values()):
        for direction in DIRECTIONS:
            cases = [replace(shape, mask=mask) for mask in TWELVE]
            table = _mask_table(results, cases, direction)
            if table:
                sizes = f"B = {shape.batch}, H = {shape.heads}, seed {shape.seed}"
                title = f"### D = {shape.head_dim}, S = {length_name(shape.seqlen)} ({sizes}), {direction}"
                yield f"{title}\n\n{table}"


def _mask_table(results: Results, cases: list[Case], direction: str) -> str:
    present = {row.implementation for row in results.rows if row.case in cases and row.direction == direction}
    others = {name: label for name, label in PEER_NAMES.items() if name in present}
    if deterministic(results.kernels) in present:
        others[deterministic(results.kernels)] = "deterministic"
    lines = []
    for case in cases:
        row = results.in_company(case, direction)
        if row is None:
            if results.failed(case, direction, results.kernels):
                lines.append([case.mask, *["failed"] * (5 + len(others))])
            continue
        area = row.visible_area / case.seqlen**2
        ours = [f"{row.milliseconds:.3f}", f"{row.tflops:.0f}", f"{row.share:.2f}"]
        lines.append([case.mask, f"{row.rho:.3f}", f"{area:.3f}", *ours])
        lines[-1] += (_peer_cell(results, case, direction, name) for name in others)
    header = ["mask", "rho", "area", "ms", "TFLOP/s", "of matmul", *others.values()]
    return markdown_table(header, lines) if lines else ""


def _peer_cell(results: Results, case: Case, direction: str, name: str) -> str:
    found = results.find((case, direction, results.kernels), (case, direction, name))
    if found:
        ours, other = found
        return f"{other.tflops:.0f} ({other.milliseconds / ours.milliseconds:.2f})"
    return "failed" if results.failed(case, direction, name) else ""


def _search_table(results: Results) -> str:
    lines = []
    for head_dim in HEAD_DIMS:
        case = search_case(head_dim)
        for direction in DIRECTIONS:
            names = (results.kernels, batched(results.kernels))
            found = results.find(*((case, direction, name) for name in names))
            if found:
                packed, batch = (row.milliseconds for row in found)
                cost = f"{100 * (packed / batch - 1):.1f} %"
                lines.append([str(head_dim), direction, f"{packed:.3f}", f"{batch:.3f}", cost])
    documents = f"{EQUAL_DOCUMENT_COUNT} documents of {EQUAL_DOCUMENT_LENGTH:,} tokens"
    title = (
        f"### What finding the tiles costs\n\n{documents}, packed (rho = {1 - 1 / EQUAL_DOCUMENT_COUNT:g}) "
        "and as a batch with indices that hide nothing: the same tiles of the same data by the same kernels. "
        "So packing costs what it takes to prepare the longer mask and to find the tiles.\n\n"
    )
    return (
        title + markdown_table(["D", "", "packed, ms", "batch, ms", "cost"], lines, left=2) if lines else ""
    )


def _long_table(results: Results) -> str:
    lines = []
    for case in long_cases():
        for direction in DIRECTIONS:
            for row in results.find((case, direction, results.kernels)):
                sizes = [f"{size / 2**20:.2f}" for size in (row.mask_bytes, row.workspace_bytes)]
                speed = [f"{row.milliseconds:.3f}", f"{row.tflops:.0f}"]
                lines.append([length_name(case.seqlen), direction, *speed, *sizes])
    title = "### Long sequences: 64 causal documents, one head, D = 64\n\n"
    header = ["tokens", "", "ms", "TFLOP/s", "mask, MiB", "workspace, MiB"]
    return title + markdown_table(header, lines, left=2) if lines else ""


def failures_of(results: Results) -> str:
    """Return a section that says why what failed did; "" where nothing did."""
    found = []
    for row in results.rows:
        if not row.ok:
            place = f"{row.case.mask} {length_name(row.case.seqlen)} D={row.case.head_dim} {row.direction}"
            found.append((row.implementation, row.reason, place))
    return failures(found, level=3)
