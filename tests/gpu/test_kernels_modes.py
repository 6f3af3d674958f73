"""What must not change a bit: skipping, repetition of a deterministic backward; and dropout's own bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from device_kernels import HopperKernels, Kernels
from device_problems import (
    Problem,
    assert_matches,
    assert_same_bits,
    assert_turns_are_identical,
    dense_mask,
    dropout_keep,
    make_problem,
    run,
    run_into,
)
from kernel_calls import Options

from paddle_flashmask import masks
from paddle_flashmask.masks import registry

pytestmark = pytest.mark.gpu

HEAD_DIMS = [(32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]
head_dims = pytest.mark.parametrize("head_dims", HEAD_DIMS, ids="{0[0]}-{0[1]}".format)
SEQLEN = 777  # no tile divides it


@lru_cache
def named_options(name: str) -> Options:
    indices, causal = registry.make(name, SEQLEN).to_startend_row_indices()
    return Options(
        indices=None if indices is None else torch.from_numpy(indices).cuda(),
        causal=causal,
        deterministic=True,
    )


def grouped_problem(
    seed: int, head_dims: tuple[int, int], options: Options, *, seqlen_q: int = SEQLEN, **others: Any
) -> Problem:
    """Two samples, two query heads for each key head."""
    return make_problem(
        seed,
        batch=2,
        seqlen_q=seqlen_q,
        heads_q=4,
        heads_k=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        options=options,
        **others,
    )


def assert_skipping_changes_nothing(kernels: Kernels, problem: Problem, name: str) -> None:
    """Of dq in deterministic mode only: else it is added in any order.

    Portable kernels that read a dense mask are deterministic.
    """
    skipping = run(kernels, problem)
    if not problem.options.deterministic:
        del skipping["dq"]
    assert_same_bits(run(kernels, problem.with_options(visit="all")), skipping, f"{name}, all")
    if problem.options.deterministic or isinstance(kernels, HopperKernels):
        dense = problem.with_options(visit="dense", dense=dense_mask(problem))
        assert_same_bits(run(kernels, dense), skipping, f"{name}, dense")


@pytest.mark.parametrize("name", ["causal", "sliding_window", "share_question"])
@head_dims
def test_skipping_changes_no_bit_in_free_order(
    kernels: Kernels, seed: int, head_dims: tuple[int, int], name: str
) -> None:
    problem = grouped_problem(seed, head_dims, replace(named_options(name), deterministic=False))
    assert_skipping_changes_nothing(kernels, problem, name)


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@head_dims
def test_skipping_changes_no_bit(
    kernels: Kernels, seed: int, head_dims: tuple[int, int], dtype: str, name: str
) -> None:
    problem = grouped_problem(seed, head_dims, named_options(name), dtype=dtype)
    assert_skipping_changes_nothing(kernels, problem, name)


@pytest.mark.parametrize("mask_heads", [1, 2, 4])
@pytest.mark.parametrize(("causal", "bounds"), [(True, 1), (True, 2), (True, 4), (False, 2), (False, 4)])
@head_dims
def test_skipping_changes_no_bit_with_any_indices(
    kernels: Kernels,
    rng: np.random.Generator,
    head_dims: tuple[int, int],
    causal: bool,
    bounds: int,
    mask_heads: int,
) -> None:
    # Runs of equal columns, so that tiles of every kind occur.
    runs = rng.integers(-5, 505, (2, mask_heads, 10, bounds), np.int32)
    indices = torch.from_numpy(runs.repeat(70, axis=2)[:, :, :643]).cuda().contiguous()
    options = Options(indices=indices, causal=causal, deterministic=True)
    problem = grouped_problem(int(rng.integers(2**31)), head_dims, options, seqlen_q=500, seqlen_k=643)
    assert_skipping_changes_nothing(kernels, problem, f"causal={causal}, C={bounds}")


def shared_last_rows(seqlen: int, document: int, bounds: int, causal: bool) -> np.ndarray:
    """Indices [1, 1, seqlen, bounds]: documents, and a last quarter of rows that sees all (causal blocks).

    Deterministic column tiles begin at those rows. Causal and of two intervals, some rows between see all
    keys before them too: three runs of rows.
    """
    shared = 3 * seqlen // 4
    begin = np.arange(shared) // document * document
    end = np.minimum(begin + document, shared)
    indices = np.full((1, 1, seqlen, bounds), seqlen, np.int32)
    indices[0, 0, :shared, 0], indices[0, 0, :shared, 1] = end, shared
    if causal and bounds == 4:
        indices[0, 0, :shared, 1] = np.maximum(end, shared // 2)
        indices[0, 0, :shared, 2] = np.maximum(end, shared // 2 + seqlen // 24)
        indices[0, 0, :shared, 3] = shared
    elif bounds == 4:
        indices[0, 0, :shared, 2], indices[0, 0, :shared, 3] = 0, begin
    return indices


@pytest.mark.parametrize(("causal", "bounds"), [(True, 2), (True, 4), (False, 4)])
@head_dims
def test_skipping_changes_no_bit_where_the_last_rows_come_first(
    kernels: Kernels, seed: int, head_dims: tuple[int, int], causal: bool, bounds: int
) -> None:
    indices = torch.from_numpy(shared_last_rows(1200, 90, bounds, causal)).cuda()
    options = Options(indices=indices, causal=causal, deterministic=True)
    problem = grouped_problem(seed, head_dims, options, seqlen_q=1200)
    assert_skipping_changes_nothing(kernels, problem, f"causal={causal}, C={bounds}")
    assert_matches(run(kernels, problem), problem, f"causal={causal}, C={bounds}")


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_skipping_changes_no_bit_where_many_last_rows_come_first(
    kernels: Kernels, seed: int, head_dims: tuple[int, int]
) -> None:
    """More column tiles than multiprocessors, more row tiles than lanes, a mask for each key head."""
    one, other = (shared_last_rows(6000, document, 2, True) for document in (700, 90))
    indices = torch.from_numpy(np.concatenate([one, other], axis=1)).cuda()
    options = Options(indices=indices, causal=True, deterministic=True)
    problem = grouped_problem(seed, head_dims, options, seqlen_q=6000)
    assert_skipping_changes_nothing(kernels, problem, "two masks")
    assert_matches(run(kernels, problem), problem, "two masks")


@pytest.mark.parametrize("bounds", [2, 4])
@pytest.mark.parametrize("seqlen_q", [40, 500])
@head_dims
def test_skipping_changes_no_bit_with_both_ends_in_every_tile(
    kernels: Kernels, rng: np.random.Generator, head_dims: tuple[int, int], seqlen_q: int, bounds: int
) -> None:
    # Each column its own short intervals, of one slot or two: empty, ends before starts, far ends too.
    starts = rng.integers(-5, seqlen_q + 5, (2, 2, 643, bounds // 2), np.int32)
    ends = starts + rng.integers(-5, 60, starts.shape, np.int32)
    far = np.iinfo(np.int32)
    starts[rng.random(starts.shape) < 0.02] = far.min
    ends[rng.random(ends.shape) < 0.02] = far.max
    ends[rng.random(ends.shape) < 0.02] = far.min
    indices = torch.from_numpy(np.stack([starts, ends], axis=-1).reshape(2, 2, 643, bounds)).cuda()
    options = Options(indices=indices, causal=False, deterministic=True)
    problem = grouped_problem(int(rng.integers(2**31)), head_dims, options, seqlen_q=seqlen_q, seqlen_k=643)
    assert_skipping_changes_nothing(kernels, problem, f"both ends, C={bounds}")


@pytest.mark.parametrize("name", ["causal_document", "share_question", "random_eviction"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("padded", [(8, 8), (40, 40), (104, 72), (136, 136), (200, 120), (248, 248)], ids=str)
def test_skipping_changes_no_bit_of_head_dims_between(
    kernels: Kernels, seed: int, padded: tuple[int, int], dtype: str, name: str
) -> None:
    """Those that the kernel of the next larger ones serves, with zeros behind them."""
    problem = grouped_problem(seed, padded, named_options(name), dtype=dtype)
    assert_skipping_changes_nothing(kernels, problem, name)


@head_dims
def test_skipping_changes_no_bit_where_warpgroups_see_nothing(
    kernels: Kernels, rng: np.random.Generator, head_dims: tuple[int, int]
) -> None:
    # Whole column tiles hidden from 64 rows: before, between and behind those that they see, by either slot.
    seqlen, rows, columns = 1536, 64, 384
    bounds = rng.integers(0, seqlen // rows + 1, (2, 2, seqlen // columns, 2, 2), np.int32) * rows
    runs = np.sort(bounds, axis=-1).reshape(2, 2, seqlen // columns, 4)
    indices = torch.from_numpy(runs.repeat(columns, axis=2)).cuda().contiguous()
    options = Options(indices=indices, causal=False, deterministic=True)
    problem = grouped_problem(int(rng.integers(2**31)), head_dims, options, seqlen_q=seqlen, seqlen_k=seqlen)
    assert_skipping_changes_nothing(kernels, problem, "blocks of 64 rows")


# Which of 64 rows have scores that rise by 300 from the first key to the last; those of the others fall.
RISING_ROWS = {"all": range(64), "every other": range(0, 64, 2), "a warp's": range(16, 32), "one": [37]}


@pytest.mark.parametrize("at_once", [False, True], ids=["slowly", "at once"])
@pytest.mark.parametrize("rows", RISING_ROWS.values(), ids=RISING_ROWS.keys())
@pytest.mark.parametrize("name", ["full", "causal", "document"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@head_dims
def test_maxima_that_rise(
    kernels: Kernels,
    seed: int,
    head_dims: tuple[int, int],
    dtype: str,
    name: str,
    rows: Sequence[int],
    at_once: bool,
) -> None:
    # Weights by a maximum that is not the last one must not overflow, in 16 bits or in 32, nor lose a key.
    problem = grouped_problem(seed, head_dims, named_options(name), dtype=dtype)
    rising = torch.zeros(64, dtype=torch.bool)
    rising[list(rows)] = True
    signs = torch.where(rising, 1, -1).repeat(SEQLEN // 64 + 1)[:SEQLEN].cuda()
    ramp = torch.linspace(-1, 1, SEQLEN).cuda()
    problem.q[..., 0] = 150 / 8 / problem.options.scale(head_dims[0]) * signs[:, None]
    problem.k[..., 0] = 8 * (ramp.sign() if at_once else ramp)[:, None]
    assert_skipping_changes_nothing(kernels, problem, name)
    results = run(kernels, problem)
    assert all(values.isfinite().all() for values in results.values())
    assert_matches({key: results[key] for key in ("out", "lse")}, problem, name)


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@head_dims
def test_skipping_changes_no_bit_with_dropout(
    kernels: Kernels, seed: int, head_dims: tuple[int, int], dropout_p: float
) -> None:
    options = named_options("causal_document")
    problem = make_problem(
        seed, seqlen_q=SEQLEN, head_dim=head_dims[0], head_dim_v=head_dims[1], options=options
    ).with_options(dropout_p=dropout_p, seed_offset=torch.tensor([5, 6]).cuda())
    assert_same_bits(run(kernels, problem.with_options(visit="all")), run(kernels, problem), "all")


# The order of the work.


@pytest.mark.parametrize("kernels", ["sm90"], indirect=True)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_longest_first_changes_no_bit(kernels: Kernels, seed: int, head_dim: int, per_head: bool) -> None:
    """One sample's tiles come longest first, 30 samples' by position (csrc/common/tile_order.cuh)."""
    lengths = [300, 100, 700, 50, 450]
    documents = [masks.document(lengths[i % 5 :] + lengths[: i % 5]) for i in range(16 if per_head else 1)]
    indices, causal = masks.ColumnMask.stack_heads(documents).to_startend_row_indices()
    many = make_problem(
        seed,
        batch=30,
        seqlen_q=1600,
        heads_q=16,
        head_dim=head_dim,
        options=Options(indices=torch.from_numpy(indices).cuda(), causal=causal),
    )
    assert many.dlse is not None
    first = {name: getattr(many, name)[:1] for name in ("q", "k", "v", "dout", "dlse")}
    expected = run(kernels, many)
    sample = replace(many, **first)
    alone = run(kernels, sample)
    assert_matches({"dq": alone["dq"]}, sample, "one sample")
    del expected["dq"]  # its sums have no order
    assert_same_bits(alone, {name: values[:1] for name, values in expected.items()}, "one sample")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["causal_document", "full"])
def test_blocks_take_one_column_tile_after_another(
    kernels: Kernels, seed: int, name: str, head_dim: int, deterministic: bool
) -> None:
    """448 column tiles: more than three for every multiprocessor."""
    problem = make_problem(
        seed,
        batch=4,
        seqlen_q=SEQLEN,
        heads_q=16,
        head_dim=head_dim,
        options=replace(named_options(name), deterministic=deterministic),
    )
    assert_skipping_changes_nothing(kernels, problem, name)
    dq = run(kernels, problem, wanted=("dq",))["dq"]
    assert_matches({"dq": dq}, problem, name)


@pytest.mark.parametrize("batch", [4, 8, 12, 30])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_query_heads_in_parts(
    kernels: Kernels, seed: int, head_dim: int, deterministic: bool, per_head: bool, batch: int
) -> None:
    """Hopper's backward takes the six query heads of a key head in six, three, two or one parts."""
    documents = [masks.causal_document([200 - 9 * head, 100 + 9 * head]) for head in range(12)]
    indices, causal = masks.ColumnMask.stack_heads(
        documents if per_head else documents[:1]
    ).to_startend_row_indices()
    options = Options(indices=torch.from_numpy(indices).cuda(), causal=causal, deterministic=deterministic)
    x = make_problem(
        seed, batch=batch, seqlen_q=300, heads_q=12, heads_k=2, head_dim=head_dim, options=options
    )
    assert_matches(run(kernels, x), x, f"{batch} samples")
    assert_matches(run(kernels, x, wanted=("dv",)), x, "dv alone")


# Determinism.


def repeated_problem(seed: int, head_dims: tuple[int, int], dropout_p: float) -> Problem:
    """Several column tiles for every multiprocessor, each dQ tile contended for by up to 16 of them."""
    indices = torch.full((1, 1, 1024, 1), 1024, dtype=torch.int32).cuda()
    indices[:, :, :300] = 700
    options = Options(
        indices=indices,
        causal=True,
        deterministic=True,
        dropout_p=dropout_p,
        seed_offset=torch.tensor([7, 8]).cuda(),
    )
    return make_problem(
        seed,
        batch=5,
        seqlen_q=1024,
        heads_q=16,
        heads_k=8,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        options=options,
    )


def assert_repeats_are_identical(kernels: Kernels, x: Problem, repeats: int) -> None:
    first = run(kernels, x)
    for repeat in range(repeats):
        out, lse = kernels.forward(x.q, x.k, x.v, x.options)
        gradients = kernels.backward(
            x.q, x.k, x.v, first["out"], first["lse"], x.dout, x.options, dlse=x.dlse
        )
        assert_same_bits({"out": out, "lse": lse, **gradients}, first, f"repeat {repeat}")


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@head_dims
def test_deterministic_repeats_are_identical(
    kernels: Kernels, seed: int, head_dims: tuple[int, int], dropout_p: float
) -> None:
    assert_repeats_are_identical(kernels, repeated_problem(seed, head_dims, dropout_p), repeats=50)


@pytest.mark.parametrize(
    "head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)], ids=str
)
def test_a_thousand_deterministic_repeats_are_identical(
    kernels: Kernels, seed: int, head_dims: tuple[int, int]
) -> None:
    if head_dims != (128, 128) and not isinstance(kernels, HopperKernels):
        pytest.skip("50 repeats will do where all head dims have one kernel")
    x = repeated_problem(seed, head_dims, 0.0)
    assert_turns_are_identical(partial(run_into, kernels), [x], [run(kernels, x)], rounds=1000)


# Without an order, with parts of query heads, and with an order too.
@pytest.mark.parametrize("heads", [(4, 2), (32, 4), (64, 8)], ids=str)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 192)], ids=str)
def test_no_kernel_sees_what_the_call_before_left(
    kernels: Kernels, seed: int, head_dims: tuple[int, int], deterministic: bool, heads: tuple[int, int]
) -> None:
    """Kernels may start before those before them have ended: they must wait for what they read of them.

    All calls have one workspace, and masks that lay it out alike. Of dq in deterministic order only.
    """
    problems = []
    for lengths in ([100, 290, 10, 112], [1, 511], [64] * 8):
        indices, causal = masks.causal_document(lengths).to_startend_row_indices()
        assert indices is not None
        options = Options(
            indices=torch.from_numpy(indices).cuda(), causal=causal, deterministic=deterministic
        )
        problems.append(
            make_problem(
                seed,
                seqlen_q=512,
                heads_q=heads[0],
                heads_k=heads[1],
                head_dim=head_dims[0],
                head_dim_v=head_dims[1],
                options=options,
            )
        )
    expected = [run(kernels, problem) for problem in problems]
    but = () if deterministic else ("dq",)
    assert_turns_are_identical(partial(run_into, kernels), problems, expected, rounds=50, but=but)


# Dropout.


def dropout_problem(seed: int, head_dims: tuple[int, int], p: float, seed_offset: tuple[int, int]) -> Problem:
    """Equal scores everywhere: every probability is 1 / Sk."""
    options = Options(
        softmax_scale=0.0, dropout_p=p, seed_offset=torch.tensor(seed_offset).cuda(), deterministic=True
    )
    return make_problem(
        seed,
        dtype="float16",
        batch=2,
        seqlen_q=210,
        seqlen_k=300,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dlse=False,
        options=options,
    )


@pytest.mark.parametrize(
    ("p", "seed_offset"), [(0.1, (2024, 0)), (0.5, (-(2**40) + 3, 2**33 + 1)), (0.999, (2**62 + 1, -1))]
)
@head_dims
def test_both_passes_drop_what_philox_says(
    kernels: Kernels, seed: int, head_dims: tuple[int, int], p: float, seed_offset: tuple[int, int]
) -> None:
    """Unit vectors in v, and in dout, read the mask element by element off out, and off dv."""
    x = dropout_problem(seed, head_dims, p, seed_offset)
    keep = dropout_keep(x)
    width = head_dims[1]
    for first in range(0, 300, width):
        columns = torch.arange(first, min(first + width, 300)).cuda()
        x.v.zero_()
        x.v[:, columns, :, columns - first] = 1.0
        out, lse = kernels.forward(x.q, x.k, x.v, x.options)
        kept = out[..., : len(columns)].transpose(1, 2) != 0
        assert torch.equal(kept, keep[..., columns]), f"forward, columns from {first}"
    for first in range(0, 210, width):
        rows = torch.arange(first, min(first + width, 210)).cuda()
        x.dout.zero_()
        x.dout[:, rows, :, rows - first] = 1.0
        dv = kernels.backward(x.q, x.k, x.v, out, lse, x.dout, x.options)["dv"]
        kept = dv[..., : len(rows)].permute(0, 2, 3, 1) != 0
        assert torch.equal(kept, keep[:, :, rows]), f"backward, rows from {first}"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@head_dims
def test_dropout_matches_the_reference(
    kernels: Kernels, seed: int, head_dims: tuple[int, int], dtype: str, deterministic: bool
) -> None:
    options = Options(
        causal=True,
        dropout_p=0.3,
        seed_offset=torch.tensor([seed, 1]).cuda(),
        deterministic=deterministic,
    )
    problem = make_problem(
        seed,
        dtype=dtype,
        batch=2,
        seqlen_q=400,
        heads_q=4,
        heads_k=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        options=options,
    )
    assert_matches(run(kernels, problem), problem, "dropout")


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_drops_the_fraction_asked_for(kernels: Kernels, seed: int, p: float) -> None:
    options = Options(softmax_scale=0.0, dropout_p=p, seed_offset=torch.tensor([seed, 0]).cuda())
    x = make_problem(seed, dtype="float16", seqlen_q=4096, heads_q=2, head_dim=32, options=options)
    x.v.fill_(1.0)
    out, _ = kernels.forward(x.q, x.k, x.v, options)
    # An output is kept / (Sk * (1 - p)). Five standard deviations, and what rounding it to float16 may do.
    kept = out[..., 0].double().mean().item() * (1 - p)
    assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / (2 * 4096 * 4096)) ** 0.5 + 2**-12


def test_samples_heads_and_offsets_drop_differently(kernels: Kernels, seed: int) -> None:
    x = dropout_problem(seed, (64, 64), 0.5, (3, 0))
    x.v[:] = x.v[:1, :, :1]  # alike in every sample and head
    outs = [
        kernels.forward(x.q, x.k, x.v, x.with_options(seed_offset=torch.tensor(so).cuda()).options)[0]
        for so in ((3, 0), (3, 1), (4, 0))
    ]
    planes = torch.stack(outs).transpose(2, 3).flatten(0, 2)
    for i, j in zip(*np.triu_indices(len(planes), 1), strict=True):
        assert not torch.equal(planes[i], planes[j]), (i, j)
