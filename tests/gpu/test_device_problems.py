"""What the GPU tests rest on, tested without a GPU: the oracle written in torch, the poisoned buffers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import device_problems
from device_kernels import LAYOUTS, POISON, Buffer, placed
from device_problems import (
    Problem,
    assert_matches,
    dropout_keep,
    make_problem,
    plain_results,
    reference_results,
    visible_rows,
)
from helpers import Inputs, Results, dense_from_indices, plain_attention
from kernel_calls import Options

from paddle_flashmask.reference import (
    attention_reference,
    attention_reference_backward,
    dropout_keep_mask,
)

SHAPE = {"batch": 2, "seqlen_q": 37, "seqlen_k": 29, "heads_q": 4, "heads_k": 2, "device": "cpu"}
FORMS = [(False, 0, 1), (True, 0, 1), (True, 1, 4), (True, 2, 2), (True, 4, 2), (False, 2, 1), (False, 4, 4)]


def options_of(causal: bool, bounds: int, mask_heads: int, dropout_p: float = 0.0) -> Options:
    rng = np.random.default_rng(bounds)
    indices = rng.integers(-5, 42, (2, mask_heads, 29, bounds), np.int32) if bounds else None
    return Options(
        indices=None if indices is None else torch.from_numpy(indices),
        causal=causal,
        dropout_p=dropout_p,
        seed_offset=torch.tensor([-(2**40) + 3, 2**33 + 1]),
    )


def numpy_inputs(problem: Problem) -> Inputs:
    """The problem as the NumPy oracle takes it, its mask and dropout made by the NumPy functions."""
    options = problem.options
    indices = None if options.indices is None else options.indices.numpy()
    seqlens = problem.q.shape[1], problem.k.shape[1]
    keep = None
    if options.dropout_p > 0:
        shape = (problem.q.shape[0], problem.q.shape[2], *seqlens)
        keep = dropout_keep_mask(*options.seed_offset.tolist(), *shape, options.dropout_p)
    tensors = (problem.q, problem.k, problem.v, problem.dout, problem.dlse)
    q, k, v, dout, dlse = (x.float().numpy() for x in tensors)
    visible = dense_from_indices(indices, options.causal, *seqlens)
    return Inputs(q, k, v, dout, dlse, indices, options.causal, visible, keep)


def assert_close(actual: Results, expected: Results, tolerance: float) -> None:
    for name, values, wanted in zip(Results._fields, actual, expected, strict=True):
        np.testing.assert_allclose(values.numpy(), wanted, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("causal", "bounds", "mask_heads"), FORMS)
def test_oracle_equals_the_numpy_oracle(monkeypatch, causal, bounds, mask_heads, dropout_p):
    monkeypatch.setattr(device_problems, "_CHUNK_ELEMENTS", 8 * 29 * 5)  # five rows at a time
    options = options_of(causal, bounds, mask_heads, dropout_p)
    problem = make_problem(1, head_dim=16, head_dim_v=24, options=options, **SHAPE)
    x = numpy_inputs(problem)
    keep = {"dropout_keep": x.dropout_keep, "dropout_p": dropout_p}
    forward = attention_reference(x.q, x.k, x.v, x.visible, **keep)
    backward = attention_reference_backward(x.q, x.k, x.v, x.visible, x.dout, x.dlse, **keep)
    assert_close(reference_results(problem), Results(*forward, *backward), 1e-11)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_plain_implementation_equals_the_numpy_one(dtype):
    problem = make_problem(1, dtype=dtype, options=options_of(False, 4, 2, 0.3), **SHAPE)
    expected = plain_attention(numpy_inputs(problem), dtype, dropout_p=0.3)
    results = plain_results(problem)
    # Another order of summation rounds some values to their neighbours, but few. (One of dS shows in all of a
    # token's dk, and there are but 116 of those.)
    assert_close(results, expected, 2**-6 if dtype == "bfloat16" else 2**-9)
    for name in ("out", "dq", "dk", "dv"):
        assert (getattr(results, name).numpy() != getattr(expected, name)).mean() < 0.03, name


def one_row_decides(seed: int) -> Problem:
    """Of every 32 rows one sees two keys; the others see one, which leaves nothing to round in out."""
    rng = np.random.default_rng(seed)
    blocks, apart = 15, 16
    masked_from = np.zeros((1, 1, 1 + blocks * apart), np.int32)
    masked_before = np.zeros_like(masked_from)
    masked_from[..., 0] = 32 * blocks
    masked_before[..., 1::apart] = 32 * np.arange(blocks) + rng.integers(32, size=blocks)
    masked_from[..., 1::apart] = masked_before[..., 1::apart] + 1
    options = Options(
        indices=torch.from_numpy(np.stack([masked_from, masked_before], axis=-1)),
        softmax_scale=float(rng.choice([-0.043, 0.12])),
    )
    shape = {"seqlen_q": 32 * blocks, "seqlen_k": 1 + blocks * apart, "heads_q": 4, "heads_k": 2}
    return make_problem(seed, batch=2, head_dim=72, gain=3.0, options=options, device="cpu", **shape)


def emulated_kernel(problem: Problem, tile: int, fault: str = "") -> dict[str, torch.Tensor]:
    """Results by the kernels' arithmetic: online softmax by tiles of keys, roundings where kernels round.

    ``fault`` is made in backward; "coarse delta" (of an out rounded four times as coarsely) in all rows with
    two keys of weight, others in one row of each head, that whose second key weighs most.
    """
    x, scale = problem, problem.options.scale(problem.q.shape[3])
    group = x.q.shape[2] // x.k.shape[2]
    q, k, v, dout = (t.float().transpose(1, 2) for t in (x.q, x.k, x.v, x.dout))
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return t.to(x.q.dtype).float()

    visible = visible_rows(x.options, torch.arange(q.shape[2]), q.shape[2], k.shape[2])
    scores = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    row_max = torch.full_like(scores[..., :1], -torch.inf)
    row_sum, out = torch.zeros_like(row_max), torch.zeros_like(dout)
    keep, kept = dropout_keep(problem), 1.0 / (1.0 - x.options.dropout_p)
    keep = torch.ones_like(scores) if keep is None else keep.float()
    tiles = zip(scores.split(tile, -1), keep.split(tile, -1), v.split(tile, -2), strict=True)
    for s, survives, values in tiles:
        before, row_max = row_max, row_max.maximum(s.amax(-1, keepdim=True))
        finite = row_max.masked_fill(row_max == -torch.inf, 0.0)
        rescale, weights = (before - finite).exp(), (s - finite).exp()
        row_sum = row_sum * rescale + weights.sum(-1, keepdim=True)
        out = out * rescale + rounded(weights * survives) @ values
    empty = row_sum == 0.0
    out = rounded(out / row_sum.masked_fill(empty, 1.0) * kept)
    lse = row_max + row_sum.log()

    p = (scores - lse.masked_fill(empty, torch.inf)).exp()
    second, key = (t[..., 1:] for t in p.topk(2, -1))
    row = torch.zeros_like(empty).scatter_(2, second.argmax(2, keepdim=True), True)
    if fault == "dropped key":
        p = p.scatter(-1, key, second.masked_fill(row, 0.0))
    split = out * (2**18 + 1)
    coarse = (split - (split - out)).where(second > 0.1, out)  # 6 of float32's 24 bits, of bfloat16's 8
    delta = (dout * (coarse if fault == "coarse delta" else out)).sum(-1, keepdim=True)
    delta = torch.where(
        row & (fault == "delta of the next row"), delta.roll(-1, 2), delta - x.dlse[..., None]
    )
    ds = rounded(p * (dout @ v.mT * keep * kept - delta.masked_fill(empty, 0.0)))
    dq = ds @ k * scale
    dq = torch.where(row & (fault == "sign of scale"), -dq, dq)
    dk, dv = (
        t.unflatten(1, (-1, group)).sum(2) for t in (ds.mT @ q * scale, rounded(p * keep).mT @ dout * kept)
    )
    results = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    return {name: t.to(x.q.dtype).transpose(1, 2) for name, t in results.items()} | {"lse": lse[..., 0]}


@pytest.mark.parametrize("seed", range(30))
def test_the_kernels_arithmetic_passes_where_one_row_decides(seed):
    problem = one_row_decides(seed)
    for tile in (1, 64, 256):
        assert_matches(emulated_kernel(problem, tile), problem, f"tiles of {tile}")


def one_key_seen(seed: int) -> Problem:
    """One row that sees one of two keys: dropout leaves something to round in out all the same."""
    shape = {"batch": 3, "seqlen_q": 1, "seqlen_k": 2, "heads_q": 2, "heads_k": 1, "head_dim": 216}
    options = Options(
        indices=torch.tensor([1, 0], dtype=torch.int32).view(1, 1, 2, 1),
        causal=True,
        softmax_scale=0.16,
        dropout_p=0.2,
        seed_offset=torch.tensor([seed, 0]),
    )
    return make_problem(seed, dtype="float16", options=options, device="cpu", **shape)


def test_noise_is_what_the_kernels_arithmetic_leaves_in_dk():
    """One number, the error of delta, decides all of a sample's dk: no few roundings can stand for it."""
    errors = []
    for seed in range(100):
        problem = one_key_seen(seed)
        actual = emulated_kernel(problem, 64)
        assert_matches(actual, problem, "emulated")
        results, noise = device_problems._attention(problem, torch.float64, None)
        for error, deviation in zip(actual["dk"] - results.dk, noise["dk"], strict=True):
            if deviation.norm() > 0.0:  # else both heads' keys were dropped
                errors.append(float(error.norm() / deviation.norm()))
    # Less than 1: the noise counts a rounding of the only weight too, which other kernels make.
    assert 0.6 < np.sqrt(np.mean(np.square(errors))) < 1.0


@pytest.mark.parametrize("fault", ["dropped key", "delta of the next row", "sign of scale", "coarse delta"])
@pytest.mark.parametrize("seed", range(3))
def test_faults_fail_where_one_row_decides(seed, fault):
    problem = one_row_decides(seed)
    with pytest.raises(AssertionError, match=r"dq: "):
        assert_matches(emulated_kernel(problem, 64, fault), problem, "emulated")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_values(layout):
    values = torch.randn(2, 5, 3, 16).bfloat16()
    tensor = placed(values, layout)
    assert torch.equal(tensor, values)
    assert tensor.stride(3) == 1
    assert all(stride % 8 == 0 for stride in tensor.stride()[:3])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_around_a_buffer_shows(layout):
    buffer = Buffer((2, 5, 3, 16), torch.bfloat16, layout, "cpu")
    assert buffer.tensor.isnan().all()
    buffer.tensor.fill_(1.0)
    buffer.assert_intact_around("out")
    assert (buffer.tensor == 1.0).all()
    end = 2 * sum(
        (size - 1) * stride for size, stride in zip((2, 5, 3, 16), buffer.tensor.stride(), strict=True)
    )
    for offset in (-2, end + 2):  # the elements just before the first and just after the last
        byte = buffer.tensor.data_ptr() - buffer._memory.data_ptr() + offset
        buffer._memory[byte] = 0
        with pytest.raises(AssertionError, match="out: memory around it was written"):
            buffer.assert_intact_around("out")
        buffer._memory[byte] = POISON
