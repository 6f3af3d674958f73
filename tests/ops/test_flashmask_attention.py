"""flashmask_attention(): Paddle's signature and results, and windows against their dense meaning."""

from __future__ import annotations

import inspect
import re

import numpy as np
import paddle
import pytest
from helpers import dense_from_indices
from hypothesis import given
from hypothesis import strategies as st
from paddle.base import core

from paddle_flashmask import attention, flashmask_attention, masks
from paddle_flashmask.reference import attention_reference


def random_inputs(seqlen_q: int, seqlen_k: int, batch: int = 2, heads: int = 2) -> list[paddle.Tensor]:
    """q, k, v in float64, D 2."""
    rng = np.random.default_rng(seqlen_q + 100 * seqlen_k)
    lengths = (seqlen_q, seqlen_k, seqlen_k)
    return [paddle.to_tensor(rng.standard_normal((batch, length, heads, 2))) for length in lengths]


def window_visible(seqlen_q: int, seqlen_k: int, left: int, right: int) -> np.ndarray:
    offset = np.arange(seqlen_k) - (np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    return (-left <= offset) & (offset <= right)


def count_intervals(visible: np.ndarray) -> int:
    """The most intervals of masked rows that a column has; visible [..., Sq, Sk]."""
    masked = np.pad(~visible, [(0, 0)] * (visible.ndim - 2) + [(1, 1), (0, 0)])
    return int((masked[..., 1:, :] & ~masked[..., :-1, :]).sum(axis=-2).max(initial=0))


def assert_attends(
    visible: np.ndarray, inputs: list[paddle.Tensor], *args: object, **options: object
) -> None:
    out, lse = flashmask_attention(*inputs, *args, return_softmax_lse=True, **options)
    expected = attention_reference(*(tensor.numpy() for tensor in inputs), visible)
    np.testing.assert_allclose(out.numpy(), expected[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse.numpy(), expected[1], rtol=1e-12, atol=1e-14)


PADDLE_3_3_SIGNATURE = (
    "query, key, value, startend_row_indices=None, *, dropout=0.0, causal=False, window_size=None, "
    "return_softmax_lse=False, return_seed_offset=False, fixed_seed_offset=None, rng_name='', training=True, "
    "name=None, softmax_scale=None, block_mask=None"
)


def plain_signature(function: object) -> str:
    parameters = inspect.signature(function).parameters.values()
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain))[1:-1]


def test_signature_is_that_of_paddle_3_3():
    assert plain_signature(flashmask_attention) == PADDLE_3_3_SIGNATURE
    if paddle.__version__.startswith("3.3."):
        assert plain_signature(paddle.nn.functional.flashmask_attention) == PADDLE_3_3_SIGNATURE


def test_results_come_in_paddles_order():
    inputs = random_inputs(5, 5)
    out = flashmask_attention(*inputs)
    assert isinstance(out, paddle.Tensor)
    lse = attention(*inputs, return_lse=True)[1]
    for wants_lse in (False, True):
        for wants_seed in (False, True):
            results = flashmask_attention(
                *inputs, return_softmax_lse=wants_lse, return_seed_offset=wants_seed
            )
            if not (wants_lse or wants_seed):
                continue
            assert isinstance(results, list)
            expected = [out, *([lse] * wants_lse), *([paddle.zeros([2], dtype="int64")] * wants_seed)]
            assert len(results) == len(expected)
            for a, b in zip(results, expected, strict=True):
                assert a.dtype == b.dtype
                np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("causal", [False, True])
def test_indices_and_scale_mean_what_they_mean_to_attention(causal):
    inputs = random_inputs(20, 20)
    indices = paddle.to_tensor(masks.causal_document([5, 15]).to_startend_row_indices()[0])
    if not causal:
        indices = paddle.concat([indices, paddle.zeros_like(indices)], axis=-1)
    ours = flashmask_attention(*inputs, indices, causal=causal, softmax_scale=0.3)
    theirs = attention(*inputs, startend_row_indices=indices, causal=causal, softmax_scale=0.3)
    np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


WINDOWS = [0, 2, -1, (3, 1), (0, 4), (100, 0), (3, -1), (-1, 3), (-2, -2), (2**40, 2**40), (2**40, -(2**40))]


class TestWindow:
    @pytest.mark.skipif(not paddle.__version__.startswith("3.3."), reason="the function of Paddle 3.3")
    @pytest.mark.parametrize("window", WINDOWS[:-2], ids=str)
    @pytest.mark.parametrize("causal", [False, True])
    def test_means_what_it_means_to_paddle(self, monkeypatch, window, causal):
        """Paddle's function runs on CUDA only, but it says by indices what a window masks."""

        caught = []

        def catch(q, k, v, indices, *_):
            caught.append(indices.numpy())
            return q, None, None, None

        monkeypatch.setattr(paddle._C_ops, "flashmask_attention", catch)
        monkeypatch.setattr(paddle, "get_device", lambda: "xpu:0")  # elsewhere it asks for flags of CUDA
        inputs = random_inputs(9, 9, batch=1)
        paddle.nn.functional.flashmask_attention(*inputs, causal=causal, window_size=window)
        assert_attends(dense_from_indices(caught[0], causal, 9, 9), inputs, window_size=window, causal=causal)

    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(9, 9), (5, 9), (9, 5), (1, 6)])
    @pytest.mark.parametrize("window", WINDOWS, ids=str)
    @pytest.mark.parametrize("causal", [False, True])
    def test_alone(self, seqlen_q, seqlen_k, window, causal):
        left, right = (window, window) if isinstance(window, int) else window
        visible = window_visible(seqlen_q, seqlen_k, left, 0 if causal else right)
        assert_attends(visible, random_inputs(seqlen_q, seqlen_k), window_size=window, causal=causal)

    @pytest.mark.parametrize(("causal", "bounds"), [(True, 1), (True, 2), (False, 2)])
    @pytest.mark.parametrize("mask_shape", [(1, 1), (2, 2)], ids=str)
    def test_with_indices(self, causal, bounds, mask_shape, rng):
        """These forms combine with any window: two intervals and the diagonal always hold the result."""
        for _ in range(20):
            indices = rng.integers(-2, 12, (*mask_shape, 9, bounds)).astype(np.int32)
            left, right = rng.integers(-4, 6, 2).tolist()
            visible = dense_from_indices(indices, causal, 9, 9)
            visible = visible & window_visible(9, 9, left, 0 if causal else right)
            assert_attends(
                visible,
                random_inputs(9, 9),
                paddle.to_tensor(indices),
                causal=causal,
                window_size=(left, right),
            )

    @given(data=st.data())
    def test_with_four_bounds_it_combines_exactly_when_two_intervals_can_say_it(self, data):
        seqlen_q, seqlen_k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
        value = st.integers(-1, seqlen_q + 1)
        indices = np.array(
            data.draw(st.lists(value, min_size=4 * seqlen_k, max_size=4 * seqlen_k)), np.int32
        ).reshape(1, 1, seqlen_k, 4)
        left, right = data.draw(st.integers(-4, 6)), data.draw(st.integers(-4, 6))
        visible = dense_from_indices(indices, False, seqlen_q, seqlen_k)
        visible = visible & window_visible(seqlen_q, seqlen_k, left, right)
        arguments = random_inputs(seqlen_q, seqlen_k), paddle.to_tensor(indices)
        if count_intervals(visible) <= 2:
            assert_attends(visible, *arguments, window_size=(left, right))
        else:
            inputs, tensor = arguments
            with pytest.raises(ValueError, match="window_size: expected a window that leaves at most two"):
                flashmask_attention(*inputs, tensor, window_size=(left, right))

    def test_the_column_that_is_too_much_is_named(self):
        indices = np.zeros((1, 1, 20, 4), np.int32)
        indices[0, 0, 10] = [11, 12, 0, 0]  # a gap inside the window
        with pytest.raises(ValueError, match=re.escape("startend_row_indices, got more in column 10")):
            flashmask_attention(*random_inputs(20, 20), paddle.to_tensor(indices), window_size=3)


class TestDropout:
    def test_seed_offset_that_comes_out_repeats_the_mask_when_put_in(self):
        inputs = random_inputs(30, 30)
        out, seed_offset = flashmask_attention(*inputs, dropout=0.5, return_seed_offset=True)
        assert list(seed_offset.shape) == [2]
        assert seed_offset.dtype == paddle.int64
        again, same = flashmask_attention(
            *inputs, dropout=0.5, fixed_seed_offset=seed_offset, return_seed_offset=True
        )
        np.testing.assert_array_equal(out.numpy(), again.numpy())
        np.testing.assert_array_equal(seed_offset.numpy(), same.numpy())
        assert not np.array_equal(out.numpy(), flashmask_attention(*inputs, dropout=0.5).numpy())

    def test_only_training_drops(self):
        inputs = random_inputs(30, 30)
        out = flashmask_attention(*inputs, dropout=0.5, training=False)
        np.testing.assert_array_equal(out.numpy(), flashmask_attention(*inputs).numpy())

    def test_rng_name_draws_from_the_named_generator_only(self):
        inputs = random_inputs(30, 30)
        core.set_random_seed_generator("test_flashmask_attention", 0)

        def draw() -> np.ndarray:
            core.get_random_seed_generator("test_flashmask_attention").manual_seed(123)
            return flashmask_attention(*inputs, dropout=0.5, rng_name="test_flashmask_attention").numpy()

        paddle.seed(1)
        first, undisturbed = draw(), paddle.rand([4]).numpy()
        paddle.seed(2)
        np.testing.assert_array_equal(draw(), first)
        paddle.seed(1)
        np.testing.assert_array_equal(paddle.rand([4]).numpy(), undisturbed)
