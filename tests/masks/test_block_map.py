"""Tiles: the exact rule against dense booleans, and how little the kernels' rule misses of it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_strategies import Drawn, masks

from paddle_flashmask.masks import ColumnMask, causal, document, dropped, full, registry, sliding_window

MASKED, PARTIAL, UNMASKED = 0, 1, 2
TILES = [(128, 128), (64, 128), (128, 176), (80, 128), (64, 64)]
blocks = st.one_of(st.integers(1, 8), st.sampled_from([64, 2**31 - 1]))


@given(masks(), blocks, blocks)
def test_exact_is_what_the_elements_say(drawn: Drawn, block_m: int, block_n: int) -> None:
    kinds = drawn.mask.block_map(block_m, block_n)
    _, _, seqlen_q, seqlen_k = drawn.dense.shape
    rows, columns = range(0, seqlen_q, block_m), range(0, seqlen_k, block_n)
    assert kinds.dtype == np.int8
    assert kinds.flags.c_contiguous
    assert kinds.shape == (*drawn.dense.shape[:2], len(rows), len(columns))
    for b, h, r, c in np.ndindex(kinds.shape):
        tile = drawn.dense[b, h, rows[r] : rows[r] + block_m, columns[c] : columns[c] + block_n]
        assert kinds[b, h, r, c] == (UNMASKED if tile.all() else PARTIAL if tile.any() else MASKED)


@given(masks(), blocks)
def test_sparsity_counts_what_the_map_says(drawn: Drawn, block: int) -> None:
    kinds = drawn.mask.block_map(block, block)
    assert drawn.mask.block_sparsity(block) == ((kinds == MASKED).mean() if kinds.size else 0.0)


@given(masks(), blocks, blocks)
def test_minmax_only_errs_towards_partial(drawn: Drawn, block_m: int, block_n: int) -> None:
    exact = drawn.mask.block_map(block_m, block_n, rule="exact")
    minmax = drawn.mask.block_map(block_m, block_n, rule="minmax")
    assert ((minmax == exact) | (minmax == PARTIAL)).all()


def test_maps_larger_than_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = ColumnMask.stack_heads([registry.make(name, 500) for name in registry.names()])
    whole = [mask.block_map(16, 24, rule) for rule in ("exact", "minmax")]
    monkeypatch.setattr("paddle_flashmask.masks.block_map._CHUNK", 40)
    for rule, kinds in zip(("exact", "minmax"), whole, strict=True):
        np.testing.assert_array_equal(mask.block_map(16, 24, rule), kinds)
    assert mask.block_sparsity(16) == (mask.block_map(16, 16) == MASKED).mean()


def test_sparsity_at_the_greatest_length() -> None:
    """Where the rows of the last tile end past int32, and no map would fit memory."""
    seqlen_q = 2**31 - 1
    mask = ColumnMask([(128, seqlen_q)], seqlen_q=seqlen_q, seqlen_k=200)
    assert mask.block_sparsity() == 1 - 1 / 2**24


def missed(mask: ColumnMask, tile: tuple[int, int]) -> tuple[int, int]:
    """How many masked and how many unmasked tiles the kernels take for partial ones."""
    exact, minmax = mask.block_map(*tile), mask.block_map(*tile, rule="minmax")
    return tuple(int(((exact == kind) & (minmax != kind)).sum()) for kind in (MASKED, UNMASKED))  # type: ignore


@pytest.mark.parametrize("seqlen", [8192, 8000])
@pytest.mark.parametrize("name", registry.names())
def test_the_kernels_miss_no_tile_of_a_named_mask(name: str, seqlen: int) -> None:
    for seed in range(2):
        for tile in TILES:
            assert missed(registry.make(name, seqlen, seed), tile) == (0, 0), tile


def test_the_kernels_miss_next_to_nothing_of_compositions() -> None:
    """`&` and `|` of any two: at most 0.4 % of the masked tiles of any, and nothing of nearly all."""
    seqlen = 8192
    parts = {name: registry.make(name, seqlen, seed) for seed, name in enumerate(registry.names())}
    parts["odd documents"] = document([500] * 15, seqlen=seqlen)
    parts["hidden rows"] = ColumnMask([(1000, 2000)], seqlen_q=seqlen, seqlen_k=seqlen)
    worst, count, perfect = 0.0, 0, 0
    for a, b in combinations(parts.values(), 2):
        for combine in (ColumnMask.__and__, ColumnMask.__or__):
            try:
                mask = combine(a, b)
            except ValueError:
                continue
            masked, unmasked = missed(mask, (128, 128))
            count += 1
            perfect += (masked, unmasked) == (0, 0)
            worst = max(worst, masked / max(1, (mask.block_map(128, 128) == MASKED).sum()))
            assert unmasked <= 10
    assert count > 200
    assert worst < 0.004
    assert perfect / count > 0.98


def test_the_kernels_miss_no_tile_of_packed_windows() -> None:
    """The composition that models use: documents of any lengths, causality, a window."""
    rng = np.random.default_rng(0)
    for window in (100, 1000, 5000):
        mask = document(rng.integers(1, 400, 35), seqlen=8192) & causal(8192) & sliding_window(8192, window)
        for tile in TILES:
            assert missed(mask, tile) == (0, 0)


def test_block_sparsity_is_the_share_of_masked_tiles() -> None:
    assert full(256).block_sparsity() == 0.0
    assert causal(512).block_sparsity(128) == 6 / 16
    assert causal(500).block_sparsity(128) == 6 / 16
    assert full(0).block_sparsity() == 0.0
    assert dropped(128, np.arange(128)).block_sparsity() == 1.0


@pytest.mark.parametrize(
    ("name", "sparsity"),
    [
        ("full", 0.00),
        ("causal", 0.49),
        ("sliding_window", 0.92),
        ("causal_document", 0.86),
        ("document", 0.74),
        ("share_question", 0.86),
        ("global_sliding_window", 0.86),
        ("causal_blockwise", 0.62),
        ("prefix_lm_document", 0.83),
        ("prefix_lm_causal", 0.48),
        ("qk_sparse", 0.51),
        ("random_eviction", 0.49),
    ],
)
def test_block_sparsity_of_the_benchmark_masks(name: str, sparsity: float) -> None:
    assert round(registry.make(name, 8192).block_sparsity(), 2) == sparsity
