"""Few query rows against many keys: query heads share row tiles, key columns are split and merged."""

from __future__ import annotations

import numpy as np
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
    run,
)
from kernel_calls import Options

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernels", ["cuda"], indirect=True)]

FORMS = [(False, 0), (True, 0), (True, 1), (True, 2), (True, 4), (False, 2), (False, 4)]
forms = pytest.mark.parametrize(("causal", "bounds"), FORMS)
every_seqlen_q = pytest.mark.parametrize("seqlen_q", [1, 2, 7, 64, 128, 300])
every_group = pytest.mark.parametrize(("heads_q", "heads_k"), [(32, 8), (8, 1), (6, 2)])


def forward(kernels: Kernels, x: Problem, layout: str = "contiguous") -> dict[str, torch.Tensor]:
    out, lse = kernels.forward(x.q, x.k, x.v, x.options, layout=layout)
    return {"out": out, "lse": lse}


def draw_indices(
    rng: np.random.Generator, planes: tuple[int, int], seqlen_q: int, seqlen_k: int, bounds: int
) -> torch.Tensor | None:
    """Runs of equal columns, so that tiles of every kind occur, and splits that see nothing."""
    if bounds == 0:
        return None
    runs = rng.integers(-2, seqlen_q + 3, (*planes, -(-seqlen_k // 333), bounds), np.int32)
    return torch.from_numpy(runs.repeat(333, axis=2)[:, :, :seqlen_k].copy()).cuda()


# Against the oracle.


@pytest.mark.parametrize("causal", [False, True])
@every_group
@every_seqlen_q
def test_long_keys(
    kernels: Kernels, seed: int, seqlen_q: int, heads_q: int, heads_k: int, causal: bool
) -> None:
    x = make_problem(
        seed,
        seqlen_q=seqlen_q,
        seqlen_k=16_001,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=128,
        options=Options(causal=causal),
    )
    assert_matches(forward(kernels, x), x, "long keys")


@pytest.mark.parametrize("mask_heads", ["one", "key", "query"])
@forms
@every_group
def test_masks(
    kernels: Kernels,
    rng: np.random.Generator,
    heads_q: int,
    heads_k: int,
    causal: bool,
    bounds: int,
    mask_heads: str,
) -> None:
    seqlen_q, seqlen_k = int(rng.choice([1, 2, 7, 64, 128, 300])), int(rng.integers(1300, 4000))
    planes = (int(rng.choice([1, 2])), {"one": 1, "key": heads_k, "query": heads_q}[mask_heads])
    x = make_problem(
        int(rng.integers(2**31)),
        batch=2,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_k=heads_k,
        options=Options(indices=draw_indices(rng, planes, seqlen_q, seqlen_k, bounds), causal=causal),
    )
    assert_matches(forward(kernels, x), x, f"Sq {seqlen_q}, Sk {seqlen_k}, planes {planes}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("seqlen_q", [1, 70])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(64, 64), (40, 24), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
def test_every_head_dim(
    kernels: Kernels, seed: int, head_dim: int, head_dim_v: int, seqlen_q: int, dtype: str
) -> None:
    x = make_problem(
        seed,
        dtype=dtype,
        batch=2,
        seqlen_q=seqlen_q,
        seqlen_k=2500,
        heads_q=6,
        heads_k=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        options=Options(causal=True),
    )
    assert_matches(forward(kernels, x), x, "head dims")


@pytest.mark.parametrize("seqlen_q", [1, 3, 33])
@pytest.mark.parametrize("group", [1, 2, 5, 12, 40, 64, 65, 71])
def test_every_group_size(kernels: Kernels, seed: int, group: int, seqlen_q: int) -> None:
    """Groups that divide 64, that do not, and that are too large to share a row tile."""
    x = make_problem(seed, seqlen_q=seqlen_q, seqlen_k=1500, heads_q=2 * group, heads_k=2)
    assert_matches(forward(kernels, x), x, "groups")


@pytest.mark.parametrize("batch", [1, 5, 20, 70])
@pytest.mark.parametrize("seqlen_k", [1, 127, 300, 5000])
def test_many_samples(kernels: Kernels, seed: int, seqlen_k: int, batch: int) -> None:
    """From many splits to none."""
    x = make_problem(seed, batch=batch, seqlen_q=2, seqlen_k=seqlen_k, heads_q=8, heads_k=2)
    assert_matches(forward(kernels, x), x, "samples")


@pytest.mark.parametrize("scale", [0.3, -0.2, 0.0])
def test_softmax_scale(kernels: Kernels, seed: int, scale: float) -> None:
    options = Options(causal=True, softmax_scale=scale)
    x = make_problem(seed, seqlen_q=7, seqlen_k=3000, heads_q=8, heads_k=2, options=options)
    assert_matches(forward(kernels, x), x, "scale")


def test_splits_whose_sums_are_far_apart(kernels: Kernels, seed: int) -> None:
    """Most splits weigh nothing beside that of the largest keys, and their lse reach past what exp can."""
    x = make_problem(seed, seqlen_q=7, seqlen_k=8000, heads_q=8, heads_k=2, gain=2.0)
    growth = torch.linspace(0.0, 20.0, 8000, device="cuda").to(x.k.dtype)
    x.k.mul_(growth[:, None, None])
    results = forward(kernels, x)
    assert results["lse"].abs().max() > 100
    assert_matches(results, x, "far apart")


def test_backward_takes_the_merged_lse(kernels: Kernels, seed: int) -> None:
    options = Options(causal=True, deterministic=True)
    x = make_problem(seed, batch=2, seqlen_q=7, seqlen_k=2100, heads_q=8, heads_k=2, options=options)
    assert_matches(run(kernels, x), x, "both passes")


# Rows without a key, splits without a key.


@pytest.mark.parametrize("visit", ["skip", "all"])
@pytest.mark.parametrize("seqlen_q", [1, 7, 64])
def test_no_key_in_any_split(kernels: Kernels, seed: int, seqlen_q: int, visit: str) -> None:
    indices = torch.zeros((1, 1, 5000, 1), dtype=torch.int32).cuda()
    options = Options(indices=indices, causal=True, visit=visit)
    x = make_problem(seed, seqlen_q=seqlen_q, seqlen_k=5000, heads_q=8, heads_k=2, options=options)
    results = forward(kernels, x)
    assert (results["out"] == 0).all()
    assert (results["lse"] == -torch.inf).all()


@pytest.mark.parametrize("visit", ["skip", "all"])
def test_some_rows_without_a_key(kernels: Kernels, seed: int, visit: str) -> None:
    indices = torch.tensor([3, 5], dtype=torch.int32).repeat(1, 1, 5000, 1).cuda()
    options = Options(indices=indices, causal=True, visit=visit)
    x = make_problem(seed, seqlen_q=9, seqlen_k=5000, heads_q=8, heads_k=2, options=options)
    results = forward(kernels, x)
    assert (results["out"][:, 3:5] == 0).all()
    assert (results["lse"][..., 3:5] == -torch.inf).all()
    assert_matches(results, x, "rows")


@pytest.mark.parametrize("seqlen_q", [1, 7, 64])
@pytest.mark.parametrize("visible", [slice(0, 1), slice(4990, 5000), slice(1000, 1100)])
def test_keys_in_one_split_only(kernels: Kernels, seed: int, visible: slice, seqlen_q: int) -> None:
    indices = torch.zeros((1, 1, 5000, 1), dtype=torch.int32).cuda()
    indices[:, :, visible] = seqlen_q
    options = Options(indices=indices, causal=True)
    x = make_problem(seed, seqlen_q=seqlen_q, seqlen_k=5000, heads_q=8, heads_k=2, options=options)
    assert_matches(forward(kernels, x), x, "one split")


# What must not change a bit.


@pytest.mark.parametrize("mask_heads", ["one", "key", "query"])
@forms
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_skipping_changes_no_bit(
    kernels: Kernels, rng: np.random.Generator, head_dim: int, causal: bool, bounds: int, mask_heads: str
) -> None:
    for seqlen_q, (heads_q, heads_k) in ((1, (8, 2)), (7, (6, 2)), (64, (8, 1)), (150, (8, 2))):
        planes = (2, {"one": 1, "key": heads_k, "query": heads_q}[mask_heads])
        x = make_problem(
            int(rng.integers(2**31)),
            batch=2,
            seqlen_q=seqlen_q,
            seqlen_k=3001,
            heads_q=heads_q,
            heads_k=heads_k,
            head_dim=head_dim,
            options=Options(indices=draw_indices(rng, planes, seqlen_q, 3001, bounds), causal=causal),
        )
        skipping = forward(kernels, x)
        assert_same_bits(forward(kernels, x.with_options(visit="all")), skipping, f"Sq {seqlen_q}, all")
        dense = x.with_options(visit="dense", dense=dense_mask(x))
        assert_same_bits(forward(kernels, dense), skipping, f"Sq {seqlen_q}, dense")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seqlen_q", [1, 7, 64, 128])
def test_strides_change_no_bit(kernels: Kernels, seed: int, seqlen_q: int, layout: str) -> None:
    shape = {"batch": 2, "seqlen_q": seqlen_q, "seqlen_k": 2000, "heads_q": 8, "heads_k": 2, "head_dim": 96}
    options = Options(causal=True)
    expected = forward(kernels, make_problem(seed, **shape, options=options))
    x = make_problem(seed, **shape, options=options, layouts=dict.fromkeys("qkv", layout))
    assert_same_bits(forward(kernels, x, layout), expected, layout)


def test_repeats_are_identical(kernels: Kernels, seed: int) -> None:
    x = make_problem(seed, seqlen_q=3, seqlen_k=16_000, heads_q=32, heads_k=8, head_dim=128)
    first = forward(kernels, x)
    for repeat in range(100):
        assert_same_bits(forward(kernels, x), first, f"repeat {repeat}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bounds", [0, 2])
def test_no_merge_sees_what_the_call_before_left(
    kernels: Kernels, rng: np.random.Generator, seed: int, bounds: int, causal: bool
) -> None:
    """The merge may start before the splits have ended. All calls have one workspace."""
    problems = [
        make_problem(
            seed + i,
            seqlen_q=3,
            seqlen_k=16_000,
            heads_q=32,
            heads_k=8,
            head_dim=128,
            options=Options(indices=draw_indices(rng, (1, 1), 3, 16_000, bounds), causal=causal),
        )
        for i in range(3)
    ]
    expected = [forward(kernels, x) for x in problems]
    assert_turns_are_identical(
        lambda x, into: kernels.forward(x.q, x.k, x.v, x.options, into=into), problems, expected, rounds=100
    )


# How the work is divided: by shapes alone.


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="Hopper's"
)
@pytest.mark.parametrize("visit", ["skip", "all", "dense"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "mask_heads", "expected"),
    [
        (1, 16_384, 1, "rows of 4 heads together, keys in 16 splits"),
        (1, 16_384, 8, "rows of 4 heads together, keys in 16 splits"),
        (1, 16_384, 32, "rows of 1 heads together, keys in 4 splits"),
        (128, 16_384, 1, "rows of 1 heads together, keys in 4 splits"),
        (16, 128, 1, "rows of 4 heads together, keys in 1 splits"),
        (4096, 4096, 1, None),
        (1024, 16_384, 1, "rows of 1 heads together, keys in 1 splits"),  # of two waves, the lower tiles'
        (1536, 16_384, 1, None),
    ],
)
def test_plans(
    kernels: Kernels, seqlen_q: int, seqlen_k: int, mask_heads: int, expected: str | None, visit: str
) -> None:
    indices = torch.zeros((1, mask_heads, seqlen_k, 1), dtype=torch.int32).cuda()
    dense = torch.zeros((1, mask_heads, 1, 1), dtype=torch.uint8).cuda() if visit == "dense" else None
    x = make_problem(
        0,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=32,
        heads_k=8,
        head_dim=128,
        options=Options(indices=indices, causal=True, visit=visit, dense=dense),
    )
    text = kernels.describe(x.q, x.k, x.v, x.options)
    assert text.endswith(expected) if expected else "splits" not in text, text
