"""A few query rows that share a key head, without index vectors: a kernel of their own.

The portable one takes 64 rows, in groups of 16; Hopper's 16, beyond which its ordinary kernels are tested.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from device_kernels import LAYOUTS, Kernels
from device_problems import (
    Problem,
    assert_matches,
    assert_same_bits,
    assert_turns_are_identical,
    dense_mask,
    make_problem,
)
from kernel_calls import Options

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernels", ["cuda", "sm80"], indirect=True)]

every_shape = pytest.mark.parametrize(
    ("seqlen_q", "heads_q", "heads_k"),
    [(1, 8, 2), (4, 8, 2), (16, 3, 3), (1, 16, 1), (5, 6, 2), (7, 8, 2), (16, 8, 2), (33, 2, 2), (3, 17, 1)],
)
causal_or_not = pytest.mark.parametrize("causal", [False, True])
groups = pytest.mark.parametrize("seqlen_q", [3, 7, 13])  # of four heads: one group of 16 rows, two, four


def forward(kernels: Kernels, x: Problem, layout: str = "contiguous") -> dict[str, torch.Tensor]:
    out, lse = kernels.forward(x.q, x.k, x.v, x.options, layout=layout)
    return {"out": out, "lse": lse}


@causal_or_not
@every_shape
@pytest.mark.parametrize("seqlen_k", [1, 9, 16, 17, 127, 129, 2049, 5003])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(
    kernels: Kernels,
    seed: int,
    head_dim: int,
    seqlen_k: int,
    seqlen_q: int,
    heads_q: int,
    heads_k: int,
    causal: bool,
) -> None:
    """Tiles of 16 keys, 8 at a time or fewer, and splits: what ends within, what is without a key."""
    x = make_problem(
        seed,
        batch=2,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=head_dim,
        options=Options(causal=causal),
    )
    assert_matches(forward(kernels, x), x, "few rows")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(8, 8), (40, 64), (64, 24), (80, 80), (96, 96), (104, 128), (128, 72), (120, 120)],
)
@groups
def test_head_dims(
    kernels: Kernels, seed: int, head_dim: int, head_dim_v: int, dtype: str, seqlen_q: int
) -> None:
    """Those that fill no load of theirs."""
    x = make_problem(
        seed,
        dtype=dtype,
        batch=2,
        seqlen_q=seqlen_q,
        seqlen_k=700,
        heads_q=8,
        heads_k=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        options=Options(causal=True),
    )
    assert_matches(forward(kernels, x), x, "head dims")


@groups
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernels: Kernels, seed: int, layout: str, seqlen_q: int) -> None:
    x = make_problem(
        seed,
        batch=3,
        seqlen_q=seqlen_q,
        seqlen_k=900,
        heads_q=8,
        heads_k=2,
        head_dim=128,
        layouts=dict.fromkeys(("q", "k", "v"), layout),
        options=Options(causal=True),
    )
    assert_matches(forward(kernels, x, layout), x, layout)


@groups
@pytest.mark.parametrize("scale", [0.3, -0.2, 0.0])
def test_softmax_scale(kernels: Kernels, seed: int, scale: float, seqlen_q: int) -> None:
    options = Options(causal=True, softmax_scale=scale)
    x = make_problem(seed, seqlen_q=seqlen_q, seqlen_k=1000, heads_q=8, heads_k=2, options=options)
    assert_matches(forward(kernels, x), x, "scale")


@groups
@pytest.mark.parametrize("gain", [30.0, 300.0])
def test_large_scores(kernels: Kernels, seed: int, gain: float, seqlen_q: int) -> None:
    """Maxima that rise late, parts that weigh nothing."""
    x = make_problem(seed, seqlen_q=seqlen_q, seqlen_k=3000, heads_q=8, heads_k=2, gain=gain)
    assert_matches(forward(kernels, x), x, "gain")


def test_rows_without_a_key(kernels: Kernels, seed: int) -> None:
    """Causal, more rows than keys: the first see none; of 28 all of the first group."""
    for seqlen_q in (8, 28):
        options = Options(causal=True)
        x = make_problem(seed, seqlen_q=seqlen_q, seqlen_k=3, heads_q=4, heads_k=2, options=options)
        results = forward(kernels, x)
        assert_matches(results, x, "no key")
        assert not results["out"][:, : seqlen_q - 3].any()
        assert torch.isneginf(results["lse"][:, :, : seqlen_q - 3]).all()


@causal_or_not
@every_shape
def test_modes(kernels: Kernels, seed: int, seqlen_q: int, heads_q: int, heads_k: int, causal: bool) -> None:
    x = make_problem(
        seed,
        seqlen_q=seqlen_q,
        seqlen_k=1500,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=128,
        options=Options(causal=causal),
    )
    skipping = forward(kernels, x)
    assert_same_bits(forward(kernels, x.with_options(visit="all")), skipping, "all")
    dense = x.with_options(visit="dense", dense=dense_mask(x))
    assert_same_bits(forward(kernels, dense), skipping, "dense")


@groups
def test_calls_in_one_workspace(kernels: Kernels, seed: int, seqlen_q: int) -> None:
    """Tickets count from zero again, whoever is the last of a key head's blocks."""
    problems = [
        make_problem(
            seed + i, batch=2, seqlen_q=seqlen_q, seqlen_k=16_000 + i, heads_q=32, heads_k=8, head_dim=128
        )
        for i in range(3)
    ]
    expected = [forward(kernels, x) for x in problems]
    for x, results in zip(problems, expected, strict=True):
        assert_matches(results, x, "alone")
    assert_turns_are_identical(
        lambda x, into: kernels.forward(x.q, x.k, x.v, x.options, into=into), problems, expected, rounds=100
    )


@pytest.mark.parametrize(
    ("seqlen_q", "head_dim", "heads_k", "splits"),
    [
        (2, 64, 8, 32),  # two blocks a multiprocessor, so twice the splits
        (2, 64, 1, 64),  # as many as one block merges
        (2, 128, 1, 64),
        (2, 128, 2, 64),
        (2, 96, 8, 16),
        (32, 128, 1, 64),  # and as many rows
        (32, 64, 8, 33),
    ],
)
def test_many_keys(
    kernels: Kernels, seed: int, seqlen_q: int, head_dim: int, heads_k: int, splits: int
) -> None:
    """Splits for all that the card holds, in all modes."""
    x = make_problem(
        seed,
        seqlen_q=seqlen_q,
        seqlen_k=131_072,
        heads_q=2 * heads_k,
        heads_k=heads_k,
        head_dim=head_dim,
        options=Options(causal=True),
    )
    text = kernels.describe(x.q, x.k, x.v, x.options)
    if seqlen_q == 2 or text.startswith("sm_80"):
        assert text.endswith(f"keys in {splits} splits")
    skipping = forward(kernels, x)
    assert_matches(skipping, x, "many keys")
    assert_same_bits(forward(kernels, x.with_options(visit="all")), skipping, "all")
    dense = x.with_options(visit="dense", dense=dense_mask(x))
    assert_same_bits(forward(kernels, dense), skipping, "dense")


@pytest.mark.parametrize("visit", ["skip", "all", "dense"])
@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "heads_q", "pack", "splits", "splits_on_hopper"),
    [
        (1, 1, 1024, 32, 4, 8, 8),
        (1, 1, 4096, 32, 4, 16, 8),  # a cluster's
        (1, 1, 16_384, 32, 4, 16, 16),
        (4, 1, 16_384, 32, 4, 4, 4),  # too many for clusters
        (1, 4, 131_072, 32, 4, 16, 16),
        (64, 1, 16_384, 32, 4, 1, 1),
        (1, 16, 128, 8, 1, 1, 1),
    ],
)
def test_plans(
    kernels: Kernels,
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    heads_q: int,
    pack: int,
    splits: int,
    splits_on_hopper: int,
    visit: str,
) -> None:
    dense = torch.zeros((1, 1, 1, 1), dtype=torch.uint8).cuda() if visit == "dense" else None
    x = make_problem(
        0,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_k=8,
        head_dim=128,
        options=Options(visit=visit, dense=dense),
    )
    text = kernels.describe(x.q, x.k, x.v, x.options)
    splits = splits_on_hopper if text.startswith("sm_90") else splits
    assert "16 query rows x 128 key columns a tile, head dims up to 128 and 128" in text
    assert text.endswith(f"rows of {pack} heads together, keys in {splits} splits")


@pytest.mark.parametrize(
    ("seqlen_q", "rows"), [(1, 16), (8, 16), (9, 32), (16, 32), (17, 64), (32, 64), (33, None)]
)
def test_groups_of_rows(kernels: Kernels, seqlen_q: int, rows: int | None) -> None:
    """Of two heads each: as few groups of 16 as hold them, and other kernels for more than four."""
    x = make_problem(0, seqlen_q=seqlen_q, seqlen_k=128, heads_q=4, heads_k=2)
    text = kernels.describe(x.q, x.k, x.v, x.options)
    if text.startswith("sm_90") and rows != 16:
        rows = None
    if rows is None:
        assert not any(f"{16 * n} query rows x {128 // n} key" in text for n in (1, 2, 4))
    else:
        assert f"{rows} query rows x {128 * 16 // rows} key columns a tile" in text
