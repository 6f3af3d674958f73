"""Tables as published ones are laid out: the paper's (forward, backward and total) and MagiAttention's.

No torch. A total adds medians of the two passes; what is divided was measured in turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cells import (
    DIRECTIONS,
    MAGI_HEADS,
    MAGI_KV_HEADS,
    MAGI_MASKS,
    PEER_NAMES,
    TWELVE,
    Case,
    Row,
)
from paper_data import PUBLISHED, PUBLISHED_SUFFIX
from results import Results, length_name, markdown_table


@dataclass(frozen=True)
class Total:
    """Both passes of one implementation, summed over the samples (seeds) that were measured."""

    milliseconds: dict[str, float]  # by direction
    flops: dict[str, float]
    ours: float  # milliseconds of both passes of ours, measured beside it
    samples: int
    rho: float  # the samples' mean

    def rate(self, *directions: str) -> float:
        """TFLOP/s of these directions together."""
        flops = sum(self.flops[direction] for direction in directions)
        return flops / sum(self.milliseconds[direction] for direction in directions) / 1e9

    @property
    def gain(self) -> float:
        """How many times as fast as this one ours is, both passes together."""
        return sum(self.milliseconds.values()) / self.ours


def total(results: Results, case: Case, name: str) -> Total | None:
    """Return both passes of an implementation over all samples of a case; None: a pass was not measured."""
    seeds = sorted({row.case.seed for row in results.rows if replace(row.case, seed=case.seed) == case})
    milliseconds, flops = (dict.fromkeys(DIRECTIONS, 0.0) for _ in range(2))
    ours, rhos = 0.0, []
    for seed in seeds:
        sample = replace(case, seed=seed)
        pairs = [_beside_ours(results, sample, direction, name) for direction in DIRECTIONS]
        if not all(pairs):
            continue
        rhos.append(pairs[0][0].rho)
        for direction, (own, other) in zip(DIRECTIONS, pairs, strict=True):
            ours += own.milliseconds
            milliseconds[direction] += other.milliseconds
            flops[direction] += sample.flops(direction, other.rho)
    if not rhos:
        return None
    return Total(milliseconds, flops, ours, len(rhos), sum(rhos) / len(rhos))


def _beside_ours(results: Results, case: Case, direction: str, name: str) -> list[Row]:
    """Return ours and the other's row of one run; ours twice where it is ours. Empty: not measured."""
    if name == results.kernels:
        row = results.in_company(case, direction)
        return [] if row is None else [row, row]
    return results.find((case, direction, results.kernels), (case, direction, name))


def paper_shapes(results: Results) -> list[Case]:
    """Return the shapes of the paper's setting that were measured, as cases of no mask, seed 0."""
    shapes = {
        replace(row.case, mask="", seed=0)
        for row in results.rows
        if row.case.mask in (*TWELVE, *PUBLISHED) and not row.case.kv_heads
    }
    return sorted(shapes, key=lambda case: (case.head_dim, case.seqlen))


def total_tables(results: Results, masks: Sequence[str] = TWELVE) -> Iterator[str]:
    """Return the paper's table for each shape: both passes and their total, and the gain over each peer."""
    for shape in paper_shapes(results):
        lines, peers = [], []
        for mask in masks:
            found = {
                name: sums
                for name in (results.kernels, *PEER_NAMES)
                if (sums := total(results, replace(shape, mask=mask), name)) is not None
            }
            own = found.pop(results.kernels, None)
            if own is None:
                continue
            times = [own.milliseconds[d] / own.samples for d in DIRECTIONS]
            flops = [own.flops[d] / own.samples / 1e12 for d in DIRECTIONS]
            cells = [mask.removesuffix(PUBLISHED_SUFFIX), f"{own.rho:.2f}", str(own.samples)]
            cells += [f"{time:.2f}" for time in (*times, sum(times))]
            cells += [f"{count:.2f}" for count in (*flops, sum(flops))]
            cells += [f"{own.rate(*which):.0f}" for which in (*zip(DIRECTIONS), DIRECTIONS)]
            lines.append((cells, found))
            peers += [name for name in found if name not in peers]
        if not lines:
            continue
        peers = [name for name in PEER_NAMES if name in peers]
        header = [
            "mask",
            "rho",
            "samples",
            "FW ms",
            "BW ms",
            "total ms",
            "FW TFLOP",
            "BW TFLOP",
            "total TFLOP",
        ]
        header += ["FW TFLOP/s", "BW TFLOP/s", "total TFLOP/s"]
        header += [f"{PEER_NAMES[name]} total TFLOP/s (gain)" for name in peers]
        table = [cells + [_gain(found.get(name)) for name in peers] for cells, found in lines]
        sizes = f"B = {shape.batch}, H = {shape.heads}"
        title = f"### Forward and backward, D = {shape.head_dim}, S = {length_name(shape.seqlen)} ({sizes})"
        yield f"{title}\n\n{markdown_table(header, table)}"


def _gain(other: Total | None) -> str:
    return "" if other is None else f"{other.rate(*DIRECTIONS):.0f} ({100 * (other.gain - 1):+.0f} %)"


def magi_tables(results: Results) -> Iterator[str]:
    """Return TFLOP/s in MagiAttention's setting, a table per direction; work is counted exactly."""
    for direction in DIRECTIONS:
        table = magi_rows(results, direction)
        names = [results.kernels, *PEER_NAMES]
        present = [name for name in names if any(name in found for found in table.values())]
        lines = [
            [case.mask, str(case.head_dim), length_name(case.seqlen)]
            + [f"{exact_rate(found[name]):.0f}" if name in found else "" for name in present]
            for case, found in table.items()
        ]
        if lines:
            title = (
                f"### One sample, {MAGI_HEADS}:{MAGI_KV_HEADS} heads, {direction}\n\nTFLOP/s of the visible "
                "area, in MagiAttention's setting but for its documents, which are ours."
            )
            header = ["mask", "D", "S", *(PEER_NAMES.get(name, name) for name in present)]
            yield f"{title}\n\n{markdown_table(header, lines)}"


def magi_rows(results: Results, direction: str) -> dict[Case, dict[str, Row]]:
    """Return by implementation what was measured in MagiAttention's setting, cases by mask and length."""
    cases = {
        row.case
        for row in results.rows
        if row.case.kv_heads and row.case.mask in MAGI_MASKS and row.direction == direction
    }
    ordered = sorted(cases, key=lambda case: (MAGI_MASKS.index(case.mask), case.head_dim, case.seqlen))
    return {case: _beside_most(results, case, direction) for case in ordered}


def exact_rate(row: Row) -> float:
    """TFLOP/s of the visible area."""
    return row.case.flops_of_area(row.direction, row.visible_area) / row.milliseconds / 1e9


def _beside_most(results: Results, case: Case, direction: str) -> dict[str, Row]:
    """Return our row of the run beside the most peers, and theirs of runs that have both, such first."""
    own = (case, direction, results.kernels)
    found = {row.implementation: row for row in results.find(own, in_company=True)}
    for name in PEER_NAMES:
        rows = results.find(own, (case, direction, name), in_company=True)
        found |= {row.implementation: row for row in rows[1:]}
    return found
