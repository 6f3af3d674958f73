"""What the GPU tests rest on, tested without a GPU: the oracle written in torch, the poisoned buffers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import device_problems
from device_kernels import LAYOUTS, POISON, Buffer, placed
from device_problems import make_problem, plain_results, reference_results
from helpers import Inputs, Results, dense_from_indices, plain_attention
from kernel_calls import Options

from paddle_flashmask.reference import (
    attention_reference,
    attention_reference_backward,
    dropout_keep_mask,
)

SHAPE = {"batch": 2, "seqlen_q": 37, "seqlen_k": 29, "heads_q": 4, "heads_k": 2, "device": "cpu"}
FORMS = [(False, 0, 1), (True, 0, 1), (True, 1, 4), (True, 2, 2), (False, 2, 1), (False, 4, 4)]


def options_of(causal: bool, bounds: int, mask_heads: int, dropout_p: float = 0.0) -> Options:
    rng = np.random.default_rng(bounds)
    indices = rng.integers(-5, 42, (2, mask_heads, 29, bounds), np.int32) if bounds else None
    return Options(
        indices=None if indices is None else torch.from_numpy(indices),
        causal=causal,
        dropout_p=dropout_p,
        seed_offset=torch.tensor([-(2**40) + 3, 2**33 + 1]),
    )


def numpy_inputs(problem: device_problems.Problem) -> Inputs:
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
    # Another order of summation rounds some values to their neighbours.
    assert_close(plain_results(problem), expected, 2**-6 if dtype == "bfloat16" else 2**-9)


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
