"""How the device classifies tiles, in both passes: as ``ColumnMask.block_map(rule="minmax")`` says."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import generate_instantiations
from device_kernels import Kernels
from kernel_calls import Options

from paddle_flashmask.masks import ColumnMask, block_map, registry
from paddle_flashmask.masks.intervals import Interval, Slots, causal_rows, clamp

# Every family of kernels classifies alike.
pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernels", ["cuda"], indirect=True)]

FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]


def tile_of(tiles: dict[str, int]) -> tuple[int, int]:
    """The rows and columns of a tile of configs/kernels.toml; Hopper's come in warpgroups."""
    return tiles.get("block_m", 64 * tiles.get("consumers", 0)), tiles.get("block_n", 128)


TILES = sorted(
    {
        tile_of(kernel["tiles"])
        for architecture in generate_instantiations.ARCHITECTURES
        for kind, kernels in generate_instantiations.load_config()[architecture].items()
        if kind != "few_rows_forward"  # it asks no mask's tables
        for kernel in kernels
    }
)
tiles = pytest.mark.parametrize("tile", TILES, ids="{0[0]}x{0[1]}".format)


def assert_classified(
    kernels: Kernels,
    indices: np.ndarray | None,
    causal: bool,
    seqlens: tuple[int, int],
    tile: tuple[int, int],
    expected: np.ndarray,
) -> None:
    options = Options(indices=None if indices is None else torch.from_numpy(indices).cuda(), causal=causal)
    for backward in (False, True):
        kinds = kernels.classify(*seqlens, options, *tile, backward=backward).cpu().numpy()
        # A mask that needs no indices has one plane for all samples and heads.
        np.testing.assert_array_equal(
            np.broadcast_to(kinds, expected.shape), expected, err_msg=f"backward={backward}"
        )


def assert_mask_classified(kernels: Kernels, mask: ColumnMask, tile: tuple[int, int]) -> None:
    expected = mask.block_map(*tile, rule="minmax")
    assert_classified(kernels, *mask.to_startend_row_indices(), mask.shape[2:], tile, expected)


@pytest.mark.parametrize("seqlen", [1, 127, 1000, 4097])
@pytest.mark.parametrize("name", registry.names())
@tiles
def test_named_masks(kernels: Kernels, tile: tuple[int, int], name: str, seqlen: int) -> None:
    assert_mask_classified(kernels, registry.make(name, seqlen), tile)


def draw_indices(
    rng: np.random.Generator, planes: tuple[int, int], seqlen_q: int, seqlen_k: int, bounds: int
) -> np.ndarray:
    """Long runs of equal columns, each ended by some of other values, so that tiles of every kind occur."""
    runs = rng.integers(-5, seqlen_q + 6, (*planes, -(-seqlen_k // 190), bounds), np.int32)
    indices = runs.repeat(190, axis=2)[:, :, :seqlen_k]
    odd = rng.random(indices.shape) < 0.003
    extremes = np.array([-(2**31), 2**31 - 1, 0, seqlen_q, seqlen_q // 2], np.int32)
    return np.where(odd, rng.choice(extremes, indices.shape), indices)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 900), (900, 1), (517, 1301), (1301, 517), (2048, 2048)]
)
@pytest.mark.parametrize(("causal", "bounds"), FORMS)
@tiles
def test_random_masks(
    kernels: Kernels,
    rng: np.random.Generator,
    tile: tuple[int, int],
    causal: bool,
    bounds: int,
    seqlen_q: int,
    seqlen_k: int,
) -> None:
    indices = draw_indices(rng, (2, 3), seqlen_q, seqlen_k, bounds)
    assert_mask_classified(kernels, ColumnMask.from_startend_row_indices(indices, causal, seqlen_q), tile)
    # As given: ColumnMask has merged and placed the intervals anew, the kernels do not.
    expected = block_map.minmax(slots_as_given(indices, causal, seqlen_q), seqlen_q, *tile)
    assert_classified(kernels, indices, causal, (seqlen_q, seqlen_k), tile, expected)


def slots_as_given(indices: np.ndarray, causal: bool, seqlen_q: int) -> Slots:
    """The two slots that csrc/common/column_mask.h makes of these very indices."""
    bound = [indices[..., i] for i in range(indices.shape[-1])]
    lower = clamp(
        bound[0], seqlen_q if len(bound) == 1 or (len(bound) == 2 and not causal) else bound[1], seqlen_q
    )
    if causal:
        upper = clamp(0, causal_rows(seqlen_q, indices.shape[2]), seqlen_q)
    else:
        upper = clamp(0, bound[1], seqlen_q) if len(bound) == 2 else clamp(*bound[2:], seqlen_q)
    upper = Interval(*(np.broadcast_to(values, indices.shape[:3]) for values in upper))
    return Slots(lower, upper, bounds=len(bound), causal=causal)


@tiles
def test_causality_beside_two_intervals(
    kernels: Kernels, rng: np.random.Generator, tile: tuple[int, int]
) -> None:
    """Three slots, as a causal window with both bounds has them: a tile is what the hardest of them says."""
    seqlens = (1301, 1301)
    indices = draw_indices(rng, (2, 3), *seqlens, 4)
    given = block_map.minmax(slots_as_given(indices, False, seqlens[0]), seqlens[0], *tile)
    causality = registry.make("causal", seqlens[0]).block_map(*tile, rule="minmax")
    assert_classified(kernels, indices, True, seqlens, tile, np.minimum(given, causality))


# The portable forward's scan takes 2048 column tiles at a time.


@pytest.mark.parametrize("name", registry.names())
def test_more_than_131072_tokens(kernels: Kernels, name: str) -> None:
    narrowest = min(block_n for _, block_n in TILES)
    tile = max(tile for tile in TILES if tile[1] == narrowest)
    assert 2048 * narrowest < 140_001
    assert_mask_classified(kernels, registry.make(name, 140_001), tile)


@pytest.mark.parametrize(("causal", "bounds"), FORMS)
@tiles
def test_several_chunks_of_column_tiles(
    kernels: Kernels, rng: np.random.Generator, tile: tuple[int, int], causal: bool, bounds: int
) -> None:
    seqlen_q, seqlen_k = 300, 9000 * tile[1] + 5
    indices = draw_indices(rng, (1, 2), seqlen_q, seqlen_k, bounds)
    expected = block_map.minmax(slots_as_given(indices, causal, seqlen_q), seqlen_q, *tile)
    assert_classified(kernels, indices, causal, (seqlen_q, seqlen_k), tile, expected)


@pytest.mark.parametrize("visit", ["all", "dense"])
def test_test_modes_visit_every_tile(kernels: Kernels, visit: str) -> None:
    indices, causal = registry.make("causal_document", 1000).to_startend_row_indices()
    options = Options(indices=torch.from_numpy(indices).cuda(), causal=causal, visit=visit)
    for backward in (False, True):
        assert (kernels.classify(1000, 1000, options, 64, 64, backward=backward) == 1).all()
