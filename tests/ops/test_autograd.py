"""Gradients of attention() as Paddle's autograd sees them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import paddle
import pytest
from paddle.base import core, framework
from paddle.distributed.fleet.utils import recompute

from paddle_flashmask import attention, flashmask_attention, masks


def random_inputs(
    seqlen_q: int = 6, seqlen_k: int = 6, heads_q: int = 4, heads_k: int = 2, dtype: str = "float64"
) -> list[paddle.Tensor]:
    """q, k, v of two samples; D 4, Dv 3."""
    rng = np.random.default_rng(0)
    shapes = [(2, seqlen_q, heads_q, 4), (2, seqlen_k, heads_k, 4), (2, seqlen_k, heads_k, 3)]
    return [
        paddle.to_tensor(rng.standard_normal(shape).astype(dtype), stop_gradient=False) for shape in shapes
    ]


def gradients(f: Callable[..., paddle.Tensor], inputs: list[paddle.Tensor]) -> list[np.ndarray]:
    return [gradient.numpy() for gradient in paddle.grad(f(*inputs), inputs)]


def finite_differences(
    f: Callable[..., paddle.Tensor], inputs: list[paddle.Tensor], step: float = 1e-5
) -> list[np.ndarray]:
    """Central differences of a scalar function in every element of every input."""
    results = []
    for at, tensor in enumerate(inputs):
        values = tensor.numpy()
        result = np.zeros_like(values)
        for index in np.ndindex(values.shape):
            ends = []
            for sign in (1, -1):
                moved = values.copy()
                moved[index] += sign * step
                arguments = [*inputs[:at], paddle.to_tensor(moved), *inputs[at + 1 :]]
                ends.append(float(f(*arguments)))
            result[index] = (ends[0] - ends[1]) / (2 * step)
        results.append(result)
    return results


def weighted(out: paddle.Tensor, lse: paddle.Tensor) -> paddle.Tensor:
    """A scalar in which every element of out and every finite one of lse counts differently."""
    weights = paddle.linspace(-1, 1, out.size, dtype=out.dtype).reshape(out.shape)
    finite = paddle.where(paddle.isfinite(lse), lse, paddle.zeros_like(lse))
    return (out * weights).sum() + (
        finite * paddle.linspace(1, 2, lse.size, dtype=lse.dtype).reshape(lse.shape)
    ).sum()


MASKS = {
    "full": masks.full(6),
    "causal with more keys": masks.causal(4, 6),
    "causal with empty rows": masks.causal(6, 4),
    "causal document": masks.causal_document([2, 4]),
    "document with padding": masks.document([2, 3], seqlen=6),
    "two intervals": masks.ColumnMask(
        [([0, 0, 1, 1, 2, 2], [1, 1, 2, 2, 3, 3]), (4, 5)], seqlen_q=6, seqlen_k=6
    ),
    "per head": masks.random_eviction(np.array([[1, 3, 4, 6, 5, 6], [6, 6, 6, 4, 6, 6]])),
}


@pytest.mark.parametrize("name", MASKS)
def test_finite_differences(name):
    mask = MASKS[name]

    def f(q, k, v):
        return weighted(*attention(q, k, v, mask=mask, softmax_scale=0.7, return_lse=True))

    inputs = random_inputs(mask.seqlen_q, mask.seqlen_k)
    for actual, expected in zip(gradients(f, inputs), finite_differences(f, inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-8)


def test_finite_differences_with_dropout():
    seed_offset = paddle.to_tensor([3, 4], dtype="int64")

    def f(q, k, v):
        out, lse = flashmask_attention(
            q, k, v, dropout=0.4, fixed_seed_offset=seed_offset, causal=True, return_softmax_lse=True
        )
        return weighted(out, lse)

    inputs = random_inputs()
    for actual, expected in zip(gradients(f, inputs), finite_differences(f, inputs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_an_unused_output_counts_as_a_zero_gradient(used):
    """Paddle hands the gradient of an output that nothing used over uninitialised."""
    mask = MASKS["causal document"]

    def unused_left_out(q, k, v):
        out, lse = attention(q, k, v, mask=mask, return_lse=True)
        return out.square().sum() if used == "out" else lse.square().sum()

    def unused_times_zero(q, k, v):
        out, lse = attention(q, k, v, mask=mask, return_lse=True)
        return unused_left_out(q, k, v) + 0 * (lse.sum() if used == "out" else out.sum())

    inputs = random_inputs()
    expected = gradients(unused_times_zero, inputs)
    for a, b in zip(gradients(unused_left_out, inputs), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(gradient.any() for gradient in expected)


@pytest.mark.parametrize("wanted", [w for n in (1, 2) for w in itertools.combinations(range(3), n)], ids=str)
def test_only_the_gradients_asked_for(wanted):
    inputs = random_inputs()
    every = gradients(lambda q, k, v: attention(q, k, v, causal=True).square().sum(), inputs)
    chosen = random_inputs()
    for at, tensor in enumerate(chosen):
        tensor.stop_gradient = at not in wanted
    attention(*chosen, causal=True).square().sum().backward()
    for at, tensor in enumerate(chosen):
        if at in wanted:
            np.testing.assert_array_equal(tensor.grad.numpy(), every[at])
        else:
            assert tensor.grad is None


def test_no_gradient_at_all():
    inputs = [tensor.detach() for tensor in random_inputs()]
    assert attention(*inputs).stop_gradient
    with paddle.no_grad():
        assert attention(*random_inputs()).stop_gradient


@pytest.mark.parametrize("make", ["transposed", "sliced", "expanded"])
def test_output_gradient_that_is_not_contiguous(make):
    """What autograd hands back is a view: of a transpose, of a part, or one number for all."""
    q, k, v = random_inputs()
    out = attention(q, k, v, causal=True)
    rng = np.random.default_rng(1)
    if make == "transposed":
        dout = paddle.to_tensor(rng.standard_normal((2, 4, 6, 3))).transpose([0, 2, 1, 3])
    elif make == "sliced":
        dout = paddle.to_tensor(rng.standard_normal((2, 6, 4, 7)))[..., 2:5]
    else:
        dout = paddle.to_tensor([0.7], dtype="float64").expand(out.shape)
    expected = paddle.grad(out, [q, k, v], paddle.to_tensor(dout.numpy()), retain_graph=True)
    for a, b in zip(paddle.grad(out, [q, k, v], dout), expected, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_repeats_dropout(use_reentrant):
    if not use_reentrant and paddle.__version__.startswith("2.") and paddle.get_device() == "cpu":
        pytest.skip("Paddle 2.6 has no such recompute on a CPU")

    def f(q, k, v):
        return attention(q, k, v, dropout_p=0.5)

    results = []
    for call in (f, lambda *inputs: recompute(f, *inputs, use_reentrant=use_reentrant)):
        paddle.seed(11)
        inputs = random_inputs(dtype="float32")
        out = call(*inputs)
        out.square().sum().backward()
        results.append([out.numpy(), *(tensor.grad.numpy() for tensor in inputs)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@contextlib.contextmanager
def auto_cast(level: core.AmpLevel, dtype: str) -> Iterator[None]:
    """What ``paddle.amp.auto_cast`` sets on a device; on a CPU it warns and sets nothing."""
    tracer = framework._dygraph_tracer()
    before = tracer._amp_level, tracer._amp_dtype
    tracer._amp_level, tracer._amp_dtype = level, dtype
    try:
        yield
    finally:
        tracer._amp_level, tracer._amp_dtype = before


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_amp_casts_to_its_dtype_and_gradients_come_back_in_the_inputs(level, dtype):
    inputs = random_inputs(dtype="float32")
    inputs[1] = inputs[1].astype(dtype).detach()  # as a layer run under AMP returns it
    inputs[1].stop_gradient = False
    with auto_cast(getattr(core.AmpLevel, level), dtype):
        out, lse = attention(*inputs, causal=True, return_lse=True)
    assert str(out.dtype) == f"paddle.{dtype}"
    assert lse.dtype == paddle.float32
    expected = attention(*(tensor.astype(dtype) for tensor in inputs), causal=True)
    np.testing.assert_array_equal(out.astype("float32").numpy(), expected.astype("float32").numpy())
    for tensor, gradient in zip(inputs, paddle.grad(out.astype("float32").sum(), inputs), strict=True):
        assert gradient.dtype == tensor.dtype


def test_amp_leaves_float64_alone():
    with auto_cast(core.AmpLevel.O1, "bfloat16"):
        assert attention(*random_inputs()).dtype == paddle.float64


def test_amp_off_and_level_o0_cast_nothing():
    assert attention(*random_inputs(dtype="float32")).dtype == paddle.float32
    with auto_cast(core.AmpLevel.O0, "bfloat16"):
        assert attention(*random_inputs(dtype="float32")).dtype == paddle.float32


@pytest.mark.parametrize("deterministic", [None, False, True])
def test_backward_repeats_bit_for_bit(deterministic):
    """The CPU kernel is always deterministic."""

    def f(q, k, v):
        return attention(q, k, v, causal=True, deterministic=deterministic).square().sum()

    rng = np.random.default_rng(2)
    inputs = [
        paddle.to_tensor(rng.standard_normal((2, 300, heads, 32)).astype(np.float32), stop_gradient=False)
        for heads in (4, 2, 2)
    ]
    first = gradients(f, inputs)
    for _ in range(3):
        for a, b in zip(gradients(f, inputs), first, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_second_derivative_is_refused_not_left_out():
    q, k, v = random_inputs()
    (dq,) = paddle.grad(attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(Exception, match="second derivative of attention is not implemented"):
        dq.square().sum().backward()
