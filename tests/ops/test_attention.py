"""attention() through Paddle: every case of the registry against the float64 oracle, and the test modes."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import paddle
import pytest
from helpers import (
    CASES,
    Case,
    Results,
    assert_results_match,
    dense_from_indices,
    make_inputs,
    to_numpy,
    to_paddle,
)

from paddle_flashmask import _ops, attention, masks
from paddle_flashmask.reference import dropout_keep_mask


def run(case: Case, visit: str = "skip") -> Results:
    """The case through the operator: results and gradients."""
    x = make_inputs(case)
    q, k, v = (to_paddle(a, case.dtype, stop_gradient=False) for a in (x.q, x.k, x.v))
    indices = None if x.indices is None else paddle.to_tensor(x.indices)
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    if visit == "skip" and not case.dropout_p:
        out, lse = attention(
            q,
            k,
            v,
            startend_row_indices=indices,
            causal=x.causal,
            softmax_scale=case.softmax_scale,
            return_lse=True,
        )
    else:
        seed_offset = paddle.to_tensor([case.dropout_seed, case.dropout_offset], dtype="int64")
        out, lse = _ops.flashmask(
            q,
            k,
            v,
            indices,
            causal=x.causal,
            softmax_scale=scale,
            dropout_p=case.dropout_p,
            seed_offset=seed_offset if case.dropout_p else None,
            dense_mask=paddle.to_tensor(x.visible) if visit == "dense" else None,
            visit=visit,
        )
    assert str(out.dtype) == f"paddle.{case.dtype}"
    assert str(lse.dtype) == f"paddle.{case.lse_dtype}"
    gradients = paddle.grad(
        [out, lse], [q, k, v], [to_paddle(x.dout, case.dtype), to_paddle(x.dlse, case.lse_dtype)]
    )
    return Results(*(to_numpy(tensor) for tensor in (out, lse, *gradients)))


# The kernel alone takes every case; all that the named masks' ones add to the others here is time.
BINDING_CASES = [
    case for case in CASES.values() if case.mask in ("random", "causal", "full") or case.seqlen_q <= 200
]


@pytest.mark.parametrize("case", BINDING_CASES, ids=str)
def test_case_matches_reference(case):
    assert_results_match(run(case), case)


@pytest.mark.parametrize("visit", ["all", "dense"])
@pytest.mark.parametrize("name", ["share_question", "bfloat16_gqa", "mask_per_q_head", "dropout", "float64"])
def test_skipping_changes_no_bit(name, visit):
    skipping, visiting = run(CASES[name]), run(CASES[name], visit)
    for field, a, b in zip(Results._fields, skipping, visiting, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=field)


MASKS = {
    "full": masks.full(40),
    "causal": masks.causal(40),
    "causal, more keys": masks.causal(24, 40),
    "causal, C = 1": masks.causal_document([7, 20, 13]),
    "causal, C = 2": masks.causal(40) & masks.ColumnMask([(20, 30)], seqlen_q=40, seqlen_k=40),
    "C = 2": masks.document([7, 20, 13]),
    "C = 4": masks.share_question([(10, [5, 5]), (12, [4, 4])]) | masks.document([20, 20]),
    "per head": masks.random_eviction(np.arange(80).reshape(2, 40) % 37 + 4),
    "per sample": masks.ColumnMask.stack_batch([masks.document([7, 33]), masks.document([20, 20])]),
}


def mask_tensors(mask: masks.ColumnMask, heads_q: int = 4) -> list[paddle.Tensor]:
    rng = np.random.default_rng(0)
    shapes = [(mask.seqlen_q, heads_q), (mask.seqlen_k, 2), (mask.seqlen_k, 2)]
    return [paddle.to_tensor(rng.standard_normal((2, *shape, 16)).astype(np.float32)) for shape in shapes]


@pytest.mark.parametrize("name", MASKS)
def test_mask_means_what_it_shows(name):
    """mask=, its indices, and its dense form through the dense test mode: one answer, bit for bit."""
    mask = MASKS[name]
    q, k, v = mask_tensors(mask)
    out, lse = attention(q, k, v, mask=mask, return_lse=True)
    indices, causal = mask.to_startend_row_indices()
    tensor = None if indices is None else paddle.to_tensor(indices)
    dense, dense_lse = _ops.flashmask(
        q,
        k,
        v,
        tensor,
        causal=causal,
        softmax_scale=0.25,
        dense_mask=paddle.to_tensor(mask.to_dense()),
        visit="dense",
    )
    by_indices = attention(q, k, v, startend_row_indices=tensor, causal=causal)
    np.testing.assert_array_equal(out.numpy(), dense.numpy())
    np.testing.assert_array_equal(lse.numpy(), dense_lse.numpy())
    np.testing.assert_array_equal(out.numpy(), by_indices.numpy())


def test_a_mask_keeps_one_tensor_per_place_and_only_as_long_as_it_lives(monkeypatch):
    mask = masks.document([7, 20, 13])
    q, k, v = mask_tensors(mask)
    given = []
    flashmask = _ops.flashmask

    def record(*inputs, **options):
        given.append(inputs[3])
        return flashmask(*inputs, **options)

    monkeypatch.setattr(_ops, "flashmask", record)
    attention(q, k, v, mask=mask)
    attention(q, k, v, mask=mask)
    assert given[0] is given[1]
    tensor = weakref.ref(given[0])
    given.clear()
    del mask
    gc.collect()
    assert tensor() is None


def test_one_mask_for_all_samples_equals_the_mask_repeated():
    mask = MASKS["C = 2"]
    q, k, v = mask_tensors(mask)
    indices = paddle.to_tensor(mask.to_startend_row_indices()[0])
    one = attention(q, k, v, startend_row_indices=indices)
    repeated = attention(q, k, v, startend_row_indices=indices.tile([2, 1, 1, 1]))
    np.testing.assert_array_equal(one.numpy(), repeated.numpy())


def test_any_index_value_is_safe(rng):
    """Values far outside the rows, negative ones and inverted intervals mean what the definition says."""
    q, k, v = (paddle.to_tensor(rng.standard_normal((1, 50, 2, 8)).astype(np.float32)) for _ in range(3))
    values = np.array([-(2**31), -1, 0, 25, 50, 51, 2**31 - 1], np.int32)
    indices = rng.choice(values, (1, 2, 50, 4)).astype(np.int32)
    visible = dense_from_indices(indices, False, 50, 50)
    tensor = paddle.to_tensor(indices)
    out, lse = attention(q, k, v, startend_row_indices=tensor, softmax_scale=0.5, return_lse=True)
    options = {"dense_mask": paddle.to_tensor(visible), "visit": "dense"}
    dense, dense_lse = _ops.flashmask(q, k, v, None, causal=False, softmax_scale=0.5, **options)
    np.testing.assert_array_equal(out.numpy(), dense.numpy())
    np.testing.assert_array_equal(lse.numpy(), dense_lse.numpy())


@pytest.mark.parametrize("name", ["full", "causal, C = 1"])
def test_strided_views_give_what_their_copies_give(name):
    mask = MASKS[name]
    q, k, v = mask_tensors(mask)
    packed = paddle.concat([q, k, v], axis=2)
    views = paddle.split(packed, [4, 2, 2], axis=2)
    turned = [x.transpose([0, 2, 1, 3]).clone().transpose([0, 2, 1, 3]) for x in (q, k, v)]
    expected = attention(q, k, v, mask=mask).numpy()
    np.testing.assert_array_equal(attention(*views, mask=mask).numpy(), expected)
    np.testing.assert_array_equal(attention(*turned, mask=mask).numpy(), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(2, 0, 7), (2, 5, 0), (0, 5, 7), (2, 0, 0)])
def test_empty_inputs(batch, seqlen_q, seqlen_k, dtype):
    q = paddle.ones([batch, seqlen_q, 4, 8], dtype=dtype)
    k = paddle.ones([batch, seqlen_k, 2, 8], dtype=dtype)
    v = paddle.ones([batch, seqlen_k, 2, 6], dtype=dtype)
    for tensor in (q, k, v):
        tensor.stop_gradient = False
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert list(out.shape) == [batch, seqlen_q, 4, 6]
    assert list(lse.shape) == [batch, 4, seqlen_q]
    assert out.dtype == q.dtype
    assert str(lse.dtype) == ("paddle.float64" if dtype == "float64" else "paddle.float32")
    np.testing.assert_array_equal(to_numpy(out), 0)
    np.testing.assert_array_equal(to_numpy(lse), -np.inf)
    paddle.autograd.backward([out, lse], [paddle.zeros_like(out), paddle.zeros_like(lse)])
    for tensor in (q, k, v):
        if 0 not in tensor.shape:
            np.testing.assert_array_equal(to_numpy(tensor.grad), np.zeros(tensor.shape))


class TestDropout:
    P = 0.3
    SHAPE = (2, 100, 2, 16)

    def inputs(self) -> list[paddle.Tensor]:
        rng = np.random.default_rng(0)
        return [paddle.to_tensor(rng.standard_normal(self.SHAPE).astype(np.float32)) for _ in range(3)]

    def kept(self, q: paddle.Tensor, k: paddle.Tensor, seed_offset: paddle.Tensor) -> np.ndarray:
        """Which elements dropout kept, bool ``[B, H, Sq, Sk]``: what comes out when v is the identity."""
        batch, seqlen, heads, _ = self.SHAPE
        identity = paddle.eye(seqlen).reshape([1, seqlen, 1, seqlen]).tile([batch, 1, heads, 1])
        out, _ = _ops.flashmask(
            q, k, identity, None, causal=False, softmax_scale=0.1, dropout_p=self.P, seed_offset=seed_offset
        )
        return out.transpose([0, 2, 1, 3]).numpy() != 0

    def test_mask_is_that_of_the_reference_bit_by_bit(self):
        q, k, _ = self.inputs()
        seed, offset = -(2**50) + 11, 2**34 + 5
        kept = self.kept(q, k, paddle.to_tensor([seed, offset], dtype="int64"))
        np.testing.assert_array_equal(kept, dropout_keep_mask(seed, offset, 2, 2, 100, 100, self.P))
        assert abs(kept.mean() - (1 - self.P)) < 5 * np.sqrt(self.P * (1 - self.P) / kept.size)

    def test_seed_draws_differ_and_paddle_seed_repeats_them(self):
        q, k, v = self.inputs()

        def draws() -> list[np.ndarray]:
            paddle.seed(5)
            return [attention(q, k, v, dropout_p=self.P).numpy() for _ in range(2)]

        first, second = draws()
        assert not np.array_equal(first, second)
        for a, b in zip(draws(), (first, second), strict=True):
            np.testing.assert_array_equal(a, b)

    def test_mean_over_draws_is_the_result_without(self):
        """Kept weights grow by 1 / (1 - p), so dropout changes no expectation."""
        q, k, v = self.inputs()
        paddle.seed(0)
        draws = np.stack([attention(q, k, v, dropout_p=self.P).numpy() for _ in range(200)])
        error = draws.mean(axis=0) - attention(q, k, v).numpy()
        deviations = error / (draws.std(axis=0) / np.sqrt(len(draws)))
        assert abs(deviations.mean()) < 0.2
        assert 0.8 < deviations.std() < 1.2

    def test_lse_is_that_without_dropout(self):
        q, k, v = self.inputs()
        _, dropped = attention(q, k, v, dropout_p=self.P, return_lse=True)
        _, lse = attention(q, k, v, return_lse=True)
        np.testing.assert_array_equal(dropped.numpy(), lse.numpy())

    def test_only_training_drops(self):
        q, k, v = self.inputs()
        out = attention(q, k, v, dropout_p=self.P, training=False)
        np.testing.assert_array_equal(out.numpy(), attention(q, k, v).numpy())


def test_softmax_scale_keeps_double_precision(rng):
    q, k, v = (paddle.to_tensor(rng.standard_normal((1, 20, 1, 8))) for _ in range(3))
    scale = 0.1 + 2.0**-40
    _, lse = attention(q, k, v, softmax_scale=scale, return_lse=True)
    scores = scale * np.einsum("bihd,bjhd->bhij", q.numpy(), k.numpy())
    np.testing.assert_allclose(lse.numpy(), np.log(np.exp(scores).sum(axis=-1)), rtol=1e-14)
