"""Faults that users reported of other attention kernels, one by one: none may happen here.

Inputs lie between NaN and results start as NaN (device_kernels.Buffer), so that what is read out of range, or
not written, shows in every test.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import prod

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ckernels import KernelError
from device_kernels import GRADIENTS, LAYOUTS, Kernels, placed
from device_problems import Problem, assert_matches, assert_same_bits, make_problem, place_for, run, run_into
from kernel_calls import Options

from paddle_flashmask.masks import ColumnMask, causal_document, registry

pytestmark = pytest.mark.gpu

INT32 = np.iinfo(np.int32)
INPUTS = ("q", "k", "v", "dout")
every_head_dim = pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])


def options_of(mask: ColumnMask, **others: object) -> Options:
    indices, causal = mask.to_startend_row_indices()
    return Options(
        indices=None if indices is None else torch.from_numpy(indices).cuda(), causal=causal, **others
    )


def same_columns(seqlen_k: int, *bounds: int) -> torch.Tensor:
    """Indices that are alike in every column."""
    return torch.tensor(bounds, dtype=torch.int32).repeat(1, 1, seqlen_k, 1).cuda()


# Rows with no key.

EMPTY_ROWS = {
    "some rows, and a whole tile": (300, 300, False, (40, 75, 128, 256), [*range(40, 75), *range(128, 256)]),
    "all rows": (150, 200, False, (0, 0), range(150)),
    "the last rows": (300, 300, True, (100,), range(100, 300)),
    "causal, more queries than keys": (300, 100, True, None, range(200)),
    "causal, one key": (76, 1, True, None, range(75)),
}


@pytest.mark.parametrize("name", EMPTY_ROWS)
@pytest.mark.parametrize("visit", ["skip", "all"])
@every_head_dim
def test_rows_that_see_no_key(kernels: Kernels, seed: int, head_dim: int, visit: str, name: str) -> None:
    seqlen_q, seqlen_k, causal, bounds, rows = EMPTY_ROWS[name]
    indices = None if bounds is None else same_columns(seqlen_k, *bounds)
    options = Options(indices=indices, causal=causal, visit=visit, deterministic=True)
    x = make_problem(seed, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, options=options)
    rows = torch.tensor(rows).cuda()
    # Their gradients must not count, finite or not: that of lse is of -inf, that of out of a constant zero.
    x.dlse[..., rows] = torch.nan
    x.dout[:, rows] = torch.nan
    results = run(kernels, x)
    assert (results["out"][:, rows] == 0).all()
    assert (results["lse"][..., rows] == -torch.inf).all()
    assert (results["dq"][:, rows] == 0).all()
    x.dlse[..., rows] = 0
    x.dout[:, rows] = 0
    assert_same_bits(run(kernels, x), results, name)
    assert_matches(results, x, name)


@pytest.mark.parametrize("visit", ["skip", "all"])
@every_head_dim
def test_rows_that_see_no_key_beside_keys_that_are_not_finite(
    kernels: Kernels, seed: int, head_dim: int, visit: str
) -> None:
    seqlen_q, seqlen_k, causal, bounds, rows = EMPTY_ROWS["some rows, and a whole tile"]
    options = Options(indices=same_columns(seqlen_k, *bounds), causal=causal, visit=visit)
    x = make_problem(seed, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, options=options)
    x.v[:, 3], x.k[:, 5] = torch.inf, torch.nan  # other rows see them
    results = run(kernels, x)
    assert (results["out"][:, rows] == 0).all()
    assert (results["lse"][..., rows] == -torch.inf).all()
    assert (results["dq"][:, rows] == 0).all()


# NaN gradients.


@pytest.mark.parametrize("gain", [1.0, 3.0])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal"),
    [(76, 1, True), (76, 1, False), (1, 1, True), (1, 500, True), (1, 77, False), (333, 333, True)],
)
@every_head_dim
def test_gradients_of_few_tokens_and_large_inputs(
    kernels: Kernels, seed: int, head_dim: int, seqlen_q: int, seqlen_k: int, causal: bool, gain: float
) -> None:
    x = make_problem(
        seed,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        gain=gain,
        options=Options(causal=causal),
    )
    assert_matches(run(kernels, x), x, f"gain {gain}")
    without_dlse = run(kernels, replace(x, dlse=None))
    assert all(without_dlse[name].isfinite().all() for name in GRADIENTS)


# Reads out of bounds.


@pytest.mark.parametrize("seqlen_k", [1, 31, 33, 65, 127, 129, 200])
@pytest.mark.parametrize(("causal", "bounds"), [(True, 1), (True, 2), (True, 4), (False, 2), (False, 4)])
def test_lengths_that_no_tile_divides(
    kernels: Kernels, rng: np.random.Generator, causal: bool, bounds: int, seqlen_k: int
) -> None:
    indices = torch.from_numpy(rng.integers(-5, 140, (1, 2, seqlen_k, bounds), np.int32)).cuda()
    x = make_problem(
        int(rng.integers(2**31)),
        seqlen_q=133,
        seqlen_k=seqlen_k,
        options=Options(indices=indices, causal=causal, deterministic=True),
    )
    results = run(kernels, x)
    assert_matches(results, x, f"Sk {seqlen_k}")
    for surroundings in (INT32.min, 0, INT32.max):
        memory = torch.full((indices.numel() + 2048,), surroundings, dtype=torch.int32).cuda()
        surrounded = memory[1024 : 1024 + indices.numel()].view(indices.shape).copy_(indices)
        assert_same_bits(run(kernels, x.with_options(indices=surrounded)), results, f"among {surroundings}")


@pytest.mark.parametrize("seqlen_q", [1, 127, 129, 200])
def test_lse_has_exactly_as_many_values_as_rows(kernels: Kernels, seed: int, seqlen_q: int) -> None:
    x = make_problem(seed, batch=2, seqlen_q=seqlen_q, seqlen_k=100, heads_q=3)
    _, lse = kernels.forward(x.q, x.k, x.v, x.options)  # checks that nothing around lse is written
    assert lse.shape == (2, 3, seqlen_q)
    assert_matches({"lse": lse}, x, "lse")


# Stale tails, refused head dims.


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_head_dim(kernels: Kernels, seed: int, head_dim: int, deterministic: bool) -> None:
    x = make_problem(
        seed,
        dtype="float16" if deterministic else "bfloat16",
        seqlen_q=150,
        head_dim=head_dim,
        layouts=dict.fromkeys(INPUTS, "padded"),
        options=Options(causal=True, deterministic=deterministic),
    )
    assert_matches(run(kernels, x, layout="padded"), x, f"D {head_dim}")


def test_what_was_not_built_is_refused(kernels: Kernels, seed: int) -> None:
    too_wide = make_problem(seed, head_dim=264)
    with pytest.raises(KernelError, match=r"no .* kernel was built for .*head_dim 264"):
        run(kernels, too_wide)
    with pytest.raises(KernelError, match=r"no .* kernel was built for dtype 2"):
        run(kernels, make_problem(seed, dtype="float32"))


def test_what_no_kernel_takes_is_refused(kernels: Kernels, seed: int) -> None:
    with pytest.raises(KernelError, match="head dims are not multiples of 8"):
        run(kernels, make_problem(seed, head_dim=36))
    x = make_problem(seed, heads_q=4, heads_k=2, head_dim=64)
    with pytest.raises(KernelError, match="query heads are not a multiple of key heads"):
        run(kernels, replace(x, q=x.q[:, :, :3].contiguous()))
    tall = x.q[:1, :1, :1].expand(2**20, 1, 2**11, 64)
    with pytest.raises(KernelError, match=r"more than 2\^31 - 1 tiles"):
        kernels.describe(tall, x.k[:1, :1, :1].expand(2**20, 1, 1, 64), tall[:, :, :1], x.options)
    memory = torch.zeros(x.q.numel() + 8, dtype=x.q.dtype).cuda()
    shifted = memory[4:-4].view(x.q.shape)
    long_rows = torch.zeros((*x.q.shape[:3], 68), dtype=x.q.dtype).cuda()[..., :64]
    for q in (shifted, long_rows):
        with pytest.raises(KernelError, match="address or strides are not multiples of 16 bytes"):
            run(kernels, replace(x, q=q))
    with pytest.raises(KernelError, match="address or strides are not multiples of 16 bytes"):
        run(kernels, replace(x, dout=long_rows))


def test_the_stride_of_a_single_one_may_be_anything(kernels: Kernels, seed: int) -> None:
    x = make_problem(seed, seqlen_q=1, seqlen_k=200, heads_q=1, head_dim=64)
    expected = run(kernels, x)
    odd = replace(
        x,
        q=x.q.as_strided(x.q.shape, (1, 3, 5, 1)),
        dout=x.dout.as_strided(x.dout.shape, (7, 1, 1, 1)),
        k=x.k.as_strided(x.k.shape, (1, 64, 1, 1)),
        v=x.v.as_strided(x.v.shape, (1, 64, 3, 1)),
    )
    assert_same_bits(run(kernels, odd), expected, "odd strides")


# Wrong gradients.


@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
@every_head_dim
def test_dout_that_is_not_contiguous(kernels: Kernels, seed: int, head_dim: int, layout: str) -> None:
    options = Options(causal=True, deterministic=True)
    x = make_problem(seed, batch=2, seqlen_q=200, heads_q=3, head_dim=head_dim, options=options)
    if layout == "expanded":  # as from a sum over samples, tokens and heads
        x = replace(x, dout=x.dout[:1, :1, :1].expand_as(x.dout))
        contiguous = replace(x, dout=x.dout.contiguous())
    else:
        contiguous, x = x, replace(x, dout=placed(x.dout, layout))
    results = run(kernels, x)
    assert_same_bits(results, run(kernels, contiguous), layout)
    assert_matches(results, x, layout)


@pytest.mark.parametrize(
    "wanted", [names for n in range(4) for names in combinations(GRADIENTS, n)], ids="-".join
)
@every_head_dim
def test_only_some_gradients(kernels: Kernels, seed: int, head_dim: int, wanted: tuple[str, ...]) -> None:
    options = options_of(registry.make("causal_document", 200), deterministic=True)
    x = make_problem(seed, seqlen_q=200, heads_q=4, heads_k=2, head_dim=head_dim, options=options)
    every = run(kernels, x)
    some = run(kernels, x, wanted=wanted)
    assert set(some) == {"out", "lse", *wanted}
    assert_same_bits(some, {name: every[name] for name in some}, "bits")
    assert_matches(some, x, "some")


@pytest.mark.parametrize("mask_heads", ["one", "key", "query"])
@pytest.mark.parametrize(("heads_q", "heads_k"), [(8, 2), (5, 1), (4, 4)])
@pytest.mark.parametrize("mask_name", ["document", "causal_document", "share_question"])
def test_grouped_heads_with_documents(
    kernels: Kernels, seed: int, mask_name: str, heads_q: int, heads_k: int, mask_heads: str
) -> None:
    heads = {"one": 1, "key": heads_k, "query": heads_q}[mask_heads]
    samples = [
        ColumnMask.stack_heads([registry.make(mask_name, 400, seed=10 * b + h) for h in range(heads)])
        for b in range(2)
    ]
    options = options_of(ColumnMask.stack_batch(samples))
    x = make_problem(seed, batch=2, seqlen_q=400, heads_q=heads_q, heads_k=heads_k, options=options)
    assert_matches(run(kernels, x), x, mask_name)


@pytest.mark.parametrize("seqlen_q", [2, 300])  # keys are split, and not
@pytest.mark.parametrize("visit", ["skip", "all"])
@every_head_dim
def test_no_kernel_ignores_the_mask(
    kernels: Kernels, seed: int, head_dim: int, visit: str, seqlen_q: int
) -> None:
    """What stands behind the mask changes no bit; without the mask it does."""
    seqlen_k, seen = 2000, 700
    indices = same_columns(seqlen_k, 0, seqlen_q)
    indices[:, :, :seen, 0] = seqlen_q
    options = Options(indices=indices, visit=visit, deterministic=True)
    x = make_problem(seed, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, options=options)
    other = replace(x, k=x.k.clone(), v=x.v.clone())
    for tensor in (other.k, other.v):
        tensor[:, seen:] = torch.randn_like(tensor[:, seen:])
    results = run(kernels, x)
    assert_same_bits(run(kernels, other), results, "behind the mask")
    assert not results["dk"][:, seen:].any()
    assert not results["dv"][:, seen:].any()
    unmasked = [run(kernels, problem.with_options(indices=None))["out"] for problem in (x, other)]
    assert (unmasked[0] != unmasked[1]).any()


@pytest.mark.parametrize("mask_name", registry.names())
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_dense_fallback_gives_the_same(
    kernels: Kernels, seed: int, head_dim: int, mask_name: str
) -> None:
    """What is trained with where FlashMask is switched off: the framework's attention, a dense mask."""
    mask = registry.make(mask_name, 500)
    visible = torch.from_numpy(mask.to_dense()[0, 0]).cuda()
    rows = visible.any(1)  # of others the framework may say anything: they count for nothing
    x = make_problem(seed, seqlen_q=500, head_dim=head_dim, dlse=False, options=options_of(mask))
    x.dout[:, ~rows] = 0
    results = run(kernels, x)
    q, k, v = (getattr(x, name).transpose(1, 2).detach().requires_grad_() for name in ("q", "k", "v"))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible | ~rows[:, None])
    gradients = torch.autograd.grad(out, (q, k, v), x.dout.transpose(1, 2))
    for name, dense in zip(("out", *GRADIENTS), (out, *gradients), strict=True):
        ours, theirs = results[name].float(), dense.transpose(1, 2).float()
        if name == "out":
            ours, theirs = ours[:, rows], theirs[:, rows]
        # Both round to bfloat16, 0.2 to 0.3 % of the norm each.
        assert (ours - theirs).norm() <= 0.01 * theirs.norm(), name


@pytest.mark.parametrize("scale", [0.3, -0.1, 0.0])
@pytest.mark.parametrize("mask_name", ["full", "causal", "document"])
@every_head_dim
def test_softmax_scale_counts_with_and_without_indices(
    kernels: Kernels, seed: int, head_dim: int, mask_name: str, scale: float
) -> None:
    options = options_of(registry.make(mask_name, 200), softmax_scale=scale)
    x = make_problem(seed, seqlen_q=200, head_dim=head_dim, options=options)
    assert_matches(run(kernels, x), x, mask_name)


# Offsets past 2^31.


def assert_all_written(results: dict[str, torch.Tensor]) -> None:
    for name, values in results.items():
        assert not (values != values).any(), f"{name} holds NaN"


def test_ten_thousand_samples(kernels: Kernels, rng: np.random.Generator) -> None:
    shape = batch, seqlen, heads, _ = 10_000, 200, 17, 64
    assert prod(shape) > 2**31
    q, k, v, dout = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    indices = torch.from_numpy(rng.integers(0, seqlen + 1, (batch, 1, seqlen, 1), np.int32)).cuda()
    dlse = torch.randn((batch, heads, seqlen), device="cuda")
    results = run(kernels, Problem(q, k, v, dout, dlse, Options(indices=indices, causal=True)))
    assert_all_written(results)
    some = [0, 1, batch // 2, batch - 2, batch - 1]
    inputs = [tensor[some] for tensor in (q, k, v, dout, dlse)]
    x = Problem(*inputs, Options(indices=indices[some], causal=True))
    assert_matches({name: values[some] for name, values in results.items()}, x, f"samples {some}")


def far_apart(shape: tuple[int, ...], far: int, count: int) -> list[torch.Tensor]:
    """Tensors of NaN, dense but for dimension ``far``, whose steps reach past 2^31 elements."""
    strides, dense = [0, 0, 0, 0], 1
    for dim in reversed(range(4)):
        if dim != far:
            strides[dim], dense = dense, dense * shape[dim]
    strides[far] = (2**31 // (shape[far] - 1) // 8 + 1) * 8
    size = strides[far] * (shape[far] - 1) + count * dense
    memory = torch.full((size,), torch.nan, dtype=torch.bfloat16, device="cuda")
    return [memory.as_strided(shape, strides, i * dense) for i in range(count)]


@pytest.mark.parametrize("far", [0, 1, 2], ids=["sample", "token", "head"])
def test_strides_that_reach_far(kernels: Kernels, seed: int, far: int) -> None:
    options = options_of(registry.make("causal_document", 300), deterministic=True)
    x = make_problem(seed, batch=2, seqlen_q=300, options=options)
    expected = run(kernels, x)
    shape = tuple(x.q.shape)
    inputs = far_apart(shape, far, 4)
    q, k, v, dout = (view.copy_(values) for view, values in zip(inputs, (x.q, x.k, x.v, x.dout), strict=True))
    results = dict(zip(("out", *GRADIENTS), far_apart(shape, far, 4), strict=True))
    out, lse = kernels.forward(q, k, v, options, into=results)
    kernels.backward(q, k, v, out, lse, dout, options, dlse=x.dlse, into=results)
    assert_same_bits({"lse": lse, **results}, expected, "far apart")


def test_a_million_tokens(kernels: Kernels, rng: np.random.Generator) -> None:
    seqlen, documents = 2**20, 64
    cuts = np.arange(1, documents) * (seqlen // documents) + rng.integers(-4000, 4000, documents - 1)
    cuts = np.concatenate([[0], cuts, [seqlen]])
    options = options_of(causal_document(np.diff(cuts)))
    x = make_problem(int(rng.integers(2**31)), seqlen_q=seqlen, heads_q=1, options=options)
    results = run(kernels, x)
    assert_all_written(results)
    # A document alone is a causal problem of its own.
    for document in (0, documents // 2 - 1, documents // 2, documents - 1):
        tokens = slice(cuts[document], cuts[document + 1])
        inputs = [tensor[:, tokens] for tensor in (x.q, x.k, x.v, x.dout)]
        alone = Problem(*inputs, x.dlse[..., tokens], Options(causal=True))
        lse = results["lse"][..., tokens]
        part = {name: values[:, tokens] for name, values in results.items() if name != "lse"}
        assert_matches({"lse": lse, **part}, alone, f"document {document}")


# Streams and devices.


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_launches_to_the_current_stream(kernels: Kernels, seed: int, direction: str) -> None:
    options = options_of(registry.make("causal_document", 300), deterministic=True)
    x = make_problem(seed, seqlen_q=300, options=options)
    expected = run(kernels, x)
    inputs = [*(getattr(x, name) for name in INPUTS), x.dlse, expected["out"], expected["lse"]]
    late = [torch.full_like(tensor, torch.nan) for tensor in inputs]
    late_options = replace(options, indices=torch.zeros_like(options.indices))
    q, k, v, dout, dlse, out, lse = late
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(
            200_000_000
        )  # 0.1 s: until then the inputs are NaN for who does not wait for `side`
        late_options.indices.copy_(options.indices)
        for tensor, values in zip(late, inputs, strict=True):
            tensor.copy_(values)
        if direction == "forward":
            results = dict(zip(("out", "lse"), kernels.forward(q, k, v, late_options), strict=True))
        else:
            results = kernels.backward(q, k, v, out, lse, dout, late_options, dlse=dlse)
        done = side.record_event()
    torch.cuda.current_stream().wait_event(done)
    assert_same_bits(results, {name: expected[name] for name in results}, direction)


@pytest.mark.parametrize("mask", ["causal_document", "causal", "full"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "heads"), [(300, 700, (2, 2)), (2, 16000, (8, 2)), (700, 700, (64, 8))], ids=str
)
def test_a_graph_replays_captured_calls(
    kernels: Kernels, seed: int, seqlen_q: int, seqlen_k: int, heads: tuple[int, int], mask: str
) -> None:
    """Kernels of a call hang together otherwise than by the stream's order.

    Two rows and many keys are split over the keys and merged, where kernels do so.
    """
    options = options_of(registry.make(mask, seqlen_k), deterministic=True)
    x = make_problem(
        seed, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads[0], heads_k=heads[1], options=options
    )
    expected = run(kernels, x)
    into = place_for(expected)
    inputs = {name: getattr(x, name) for name in (*INPUTS, "dlse")}
    late = {name: torch.full_like(tensor, torch.nan) for name, tensor in inputs.items()}
    indices = None if options.indices is None else torch.zeros_like(options.indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_into(kernels, replace(x, **late, options=replace(options, indices=indices)), into)
    for name, tensor in inputs.items():
        late[name].copy_(tensor)
    if indices is not None:
        indices.copy_(options.indices)
    for _ in range(3):
        for name in expected:
            into[name].fill_(torch.nan)
        graph.replay()
        assert_same_bits({name: into[name] for name in expected}, expected, mask)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_second_device(kernels: Kernels, seed: int) -> None:
    with torch.cuda.device(1):
        x = make_problem(seed, device="cuda:1", options=Options(causal=True))
        assert_matches(run(kernels, x), x, "cuda:1")


# Deterministic mode must not wait for tiles that nobody computes.


@pytest.mark.parametrize(
    "mask_name", ["sliding_window", "global_sliding_window", "causal_blockwise", "document", "qk_sparse"]
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_backward_of_sparse_masks_finishes(
    kernels: Kernels, seed: int, head_dim: int, mask_name: str
) -> None:
    options = options_of(registry.make(mask_name, 4096), deterministic=True)
    x = make_problem(seed, seqlen_q=4096, heads_q=16, heads_k=8, head_dim=head_dim, options=options)
    results = run(kernels, x)
    # Two heads are enough to compare; it takes all of them to fill the device more than once.
    some = replace(
        x, q=x.q[:, :, :2], k=x.k[:, :, :1], v=x.v[:, :, :1], dout=x.dout[:, :, :2], dlse=x.dlse[:, :2]
    )
    part = {name: results[name][:, :, : 1 if name in ("dk", "dv") else 2] for name in ("out", *GRADIENTS)}
    assert_matches({"lse": results["lse"][:, :2], **part}, some, mask_name)


def test_deterministic_backward_of_many_heads(kernels: Kernels, seed: int) -> None:
    """32 key heads at most take turns; where L2 holds so many short ones, 35 do in rounds of 18 and 17."""
    options = options_of(registry.make("causal_blockwise", 1024), deterministic=True)
    x = make_problem(seed, batch=5, seqlen_q=1024, heads_q=14, heads_k=7, options=options)
    assert_matches(run(kernels, x), x, "35 key heads")


# Backward's blocks walk over the row tiles that they visit, of all query heads of a group.


def some_rows_per_column_tile(
    rng: np.random.Generator, heads: int, seqlen_q: int, seqlen_k: int
) -> torch.Tensor:
    """Indices that let 128 columns at a time see a run of rows: none, one, less or more than a tile, all."""
    shape = 1, heads, -(-seqlen_k // 128)
    first = rng.integers(0, seqlen_q, shape)
    end = np.minimum(first + rng.choice([0, 1, 60, 130, seqlen_q], shape), seqlen_q)
    bounds = np.stack([end, first], axis=-1).astype(np.int32)
    return torch.from_numpy(bounds.repeat(128, axis=2)[:, :, :seqlen_k]).cuda().contiguous()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads_q", "heads_k"), [(8, 1), (6, 2)])
@every_head_dim
def test_walks_over_no_one_and_many_row_tiles(
    kernels: Kernels,
    rng: np.random.Generator,
    head_dim: int,
    heads_q: int,
    heads_k: int,
    deterministic: bool,
) -> None:
    indices = some_rows_per_column_tile(rng, heads_q, 500, 900)
    x = make_problem(
        int(rng.integers(2**31)),
        seqlen_q=500,
        seqlen_k=900,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=head_dim,
        options=Options(indices=indices, deterministic=deterministic),
    )
    assert_matches(run(kernels, x), x, "every gradient")
    for name in GRADIENTS:
        assert_matches(run(kernels, x, wanted=(name,)), x, f"only {name}")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_k", [1536, 8192])
def test_all_column_tiles_meet_at_the_same_rows(
    kernels: Kernels, seed: int, seqlen_k: int, head_dim: int, deterministic: bool
) -> None:
    """Who comes first may be treated otherwise, if few come, and who that is differs from run to run."""
    options = Options(deterministic=deterministic)
    x = make_problem(seed, seqlen_q=100, seqlen_k=seqlen_k, heads_q=16, head_dim=head_dim, options=options)
    for repeat in range(20):
        dq = run(kernels, x, wanted=("dq",))["dq"]
        assert_matches({"dq": dq}, x, f"repeat {repeat}")


# Nothing at all.


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k"), [(2, 0, 5), (2, 5, 0), (4, 3000, 0), (2, 0, 0), (0, 5, 5)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_tensors(
    kernels: Kernels, seed: int, deterministic: bool, batch: int, seqlen_q: int, seqlen_k: int
) -> None:
    options = Options(indices=same_columns(seqlen_k, 0), causal=True, deterministic=deterministic)
    x = make_problem(seed, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, options=options)
    results = run(kernels, x)
    assert (results["lse"] == -torch.inf).all()
    assert all((values == 0).all() for name, values in results.items() if name != "lse")
