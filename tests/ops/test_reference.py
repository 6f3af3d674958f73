"""The oracle against statements of the same thing that share none of its code."""

import math

import numpy as np
import pytest
from helpers import CASES, Case, make_inputs, plain_results, reference_results

from paddle_flashmask import reference
from paddle_flashmask.reference import (
    attention_reference,
    attention_reference_backward,
    dropout_keep_mask,
    expand_heads,
    philox4x32_10,
)


def attention_by_loops(q, k, v, visible, scale, keep=None, dropout_p=0.0):
    """Softmax attention, one row at a time, from its definition; visible is [B, Hq, Sq, Sk]."""
    batch, seqlen_q, heads_q, _ = q.shape
    seqlen_k, heads_k, head_dim_v = v.shape[1:]
    out = np.zeros((batch, seqlen_q, heads_q, head_dim_v))
    lse = np.full((batch, heads_q, seqlen_q), -math.inf)
    for b, h, i in np.ndindex(batch, heads_q, seqlen_q):
        seen = [j for j in range(seqlen_k) if visible[b, h, i, j]]
        if not seen:
            continue
        kv_head = h * heads_k // heads_q
        weights = {j: math.exp(scale * float(q[b, i, h] @ k[b, j, kv_head])) for j in seen}
        total = sum(weights.values())
        lse[b, h, i] = math.log(total)
        for j in seen:
            if keep is None or keep[b, h, i, j]:
                out[b, i, h] += weights[j] / total / (1.0 - dropout_p) * v[b, j, kv_head]
    return out, lse


def problem(rng, batch=2, seqlen_q=5, seqlen_k=7, heads_q=4, heads_k=2, head_dim=3, head_dim_v=2):
    """Small q, k, v, and a visibility [B, Hq, Sq, Sk] with an empty row."""
    q = rng.standard_normal((batch, seqlen_q, heads_q, head_dim))
    k = rng.standard_normal((batch, seqlen_k, heads_k, head_dim))
    v = rng.standard_normal((batch, seqlen_k, heads_k, head_dim_v))
    visible = rng.random((batch, heads_q, seqlen_q, seqlen_k)) < 0.6
    visible[:, :, 2] = False
    return q, k, v, visible


def test_forward_equals_loops(rng):
    q, k, v, visible = problem(rng)
    out, lse = attention_reference(q, k, v, visible, softmax_scale=0.4)
    expected_out, expected_lse = attention_by_loops(q, k, v, visible, 0.4)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


def test_forward_with_dropout_equals_loops(rng):
    q, k, v, visible = problem(rng)
    keep = rng.random(visible.shape) < 0.7
    out, lse = attention_reference(q, k, v, visible, dropout_keep=keep, dropout_p=0.3)
    expected_out, expected_lse = attention_by_loops(q, k, v, visible, 3**-0.5, keep, 0.3)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_backward_equals_finite_differences(rng, with_dlse, dropout_p):
    q, k, v, visible = problem(rng)
    options = {"softmax_scale": 0.7, "dropout_p": dropout_p}
    options["dropout_keep"] = rng.random(visible.shape) >= dropout_p if dropout_p else None
    dout = rng.standard_normal((*q.shape[:3], v.shape[3]))
    dlse = rng.standard_normal((q.shape[0], q.shape[2], q.shape[1])) if with_dlse else None

    def loss(q, k, v):
        out, lse = attention_reference(q, k, v, visible, **options)
        return (dout * out).sum() + (
            0.0 if dlse is None else (dlse * np.where(np.isinf(lse), 0.0, lse)).sum()
        )

    gradients = attention_reference_backward(q, k, v, visible, dout, dlse, **options)
    for which, gradient in enumerate(gradients):
        inputs = [q, k, v]
        expected = np.zeros_like(gradient)
        for at in np.ndindex(gradient.shape):
            step = np.zeros_like(gradient)
            step[at] = 1e-5
            above, below = (
                loss(*(x + sign * step if n == which else x for n, x in enumerate(inputs)))
                for sign in (1.0, -1.0)
            )
            expected[at] = (above - below) / 2e-5
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)


def test_empty_rows_are_zero_and_minus_infinity(rng):
    q, k, v, visible = problem(rng)
    out, lse = attention_reference(q, k, v, visible)
    assert (out[:, 2] == 0.0).all()
    assert np.isneginf(lse[:, :, 2]).all()


@pytest.mark.parametrize("arriving", [1e300, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_what_arrives_for_empty_rows_is_of_no_effect(rng, arriving, dropout_p):
    q, k, v, visible = problem(rng)
    visible[0, 1, 4] = False  # for one head alone
    keep = rng.random(visible.shape) >= dropout_p
    dout, dlse = rng.standard_normal((2, 5, 4, 2)), rng.standard_normal((2, 4, 5))
    empty = ~visible.any(axis=-1)

    def gradients(value):
        dout.transpose(0, 2, 1, 3)[empty] = dlse[empty] = value
        given = dout.copy(), dlse.copy()
        found = attention_reference_backward(
            q, k, v, visible, dout, dlse, dropout_keep=keep, dropout_p=dropout_p
        )
        for before, after in zip(given, (dout, dlse), strict=True):
            np.testing.assert_array_equal(after, before)
        return found

    for actual, expected in zip(gradients(arriving), gradients(0.0), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert (gradients(arriving)[0].transpose(0, 2, 1, 3)[empty] == 0.0).all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0), (0, 0)])
def test_empty_lengths(rng, seqlen_q, seqlen_k):
    q, k, v, _ = problem(rng, seqlen_q=max(seqlen_q, 3), seqlen_k=seqlen_k)
    q = q[:, :seqlen_q]
    out, lse = attention_reference(q, k, v)
    assert (out == 0.0).all()
    assert np.isneginf(lse).all()
    gradients = attention_reference_backward(q, k, v, None, out)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
    assert not any(g.any() for g in gradients)


def test_chunks_of_rows_change_nothing(rng, monkeypatch):
    q, k, v, visible = problem(rng, seqlen_q=11)
    dout = rng.standard_normal((*q.shape[:3], v.shape[3]))
    whole = *attention_reference(q, k, v, visible), *attention_reference_backward(q, k, v, visible, dout)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 2 * 4 * 7 * 3)  # three rows at a time
    chunked = *attention_reference(q, k, v, visible), *attention_reference_backward(q, k, v, visible, dout)
    for a, b in zip(whole, chunked, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_huge_scores_do_not_overflow(rng):
    q, k, v, visible = problem(rng)
    out, lse = attention_reference(q * 1e3, k * 1e3, v, visible)
    assert np.isfinite(out).all()
    assert np.isfinite(np.delete(lse, 2, axis=2)).all()


class DenseOnly:
    """Stands in for a ColumnMask."""

    def __init__(self, dense):
        self._dense = dense

    def to_dense(self):
        return self._dense


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_visible_forms(rng, heads):
    q, k, v, visible = problem(rng)
    visible = visible[:1, :heads]
    full = np.broadcast_to(np.repeat(visible, 4 // heads, axis=1), (2, 4, 5, 7))
    expected, _ = attention_by_loops(q, k, v, full, 3**-0.5)
    for form in (visible, DenseOnly(visible)):
        np.testing.assert_allclose(attention_reference(q, k, v, form)[0], expected, rtol=1e-12, atol=1e-14)


def test_expand_heads():
    x = np.arange(6).reshape(1, 2, 3)
    assert expand_heads(x, 4)[0].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]
    assert expand_heads(x, 6, axis=2)[0, 0].tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="heads: expected a multiple of the 2 heads of x, got 3"):
        expand_heads(x, 3)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"q": [[1.0]]}, TypeError, r"q: expected a NumPy array, got list \[\[1.0\]\]"),
        ({"k": None}, TypeError, "k: expected a NumPy array, got NoneType None"),
        (
            {"v": np.zeros((2, 7, 2, 2), complex)},
            TypeError,
            "v: expected integers or floats, got dtype complex",
        ),
        ({"q": np.full((2, 5, 4, 3), "a")}, TypeError, "q: expected integers or floats, got dtype <U1"),
        ({"q": np.zeros((5, 4, 3))}, ValueError, "q: expected 4 dimensions"),
        (
            {"q": np.zeros((2, 5, 3, 3))},
            ValueError,
            "q: expected a multiple of the 2 heads of k and v, got 3",
        ),
        (
            {"k": np.zeros((2, 7, 0, 3)), "v": np.zeros((2, 7, 0, 2))},
            ValueError,
            "q: expected a multiple of the 0 heads of k and v, got 4",
        ),
        ({"k": np.zeros((2, 7, 2, 4))}, ValueError, r"k: expected shape \(2, 7, 2, 3\), got \(2, 7, 2, 4\)"),
        ({"v": np.zeros((1, 7, 2, 2))}, ValueError, r"v: expected shape \(2, 7, 2, 2\), got \(1, 7, 2, 2\)"),
        ({"visible": np.ones((2, 4, 5, 6), bool)}, ValueError, "visible: expected a shape that broadcasts"),
        ({"visible": np.ones((2, 3, 5, 7), bool)}, ValueError, "visible: expected a shape that broadcasts"),
        ({"visible": np.ones((1, 2, 4, 5, 7), bool)}, ValueError, r"visible: .*, got \(1, 2, 4, 5, 7\)"),
        ({"visible": np.ones((2, 4, 5, 7))}, TypeError, "visible: expected bool, got float64"),
        ({"visible": "causal"}, TypeError, "visible: expected bool, got <U6"),
        ({"visible": [[True], [True, False]]}, ValueError, "visible: .* rows of different lengths"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale: expected a finite number, got str '1'"),
        ({"softmax_scale": True}, TypeError, "softmax_scale: expected a finite number, got bool True"),
        ({"softmax_scale": np.nan}, ValueError, "softmax_scale: expected a finite number, got float nan"),
        ({"softmax_scale": 10**999}, ValueError, "softmax_scale: expected a finite number, got int 1000"),
        (
            {"q": np.zeros((2, 5, 4, 0)), "k": np.zeros((2, 7, 2, 0))},
            ValueError,
            "softmax_scale: .* where D is 0",
        ),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p: expected a number in \[0, 1\), got 1.0"),
        ({"dropout_p": -0.1}, ValueError, r"dropout_p: expected a number in \[0, 1\), got -0.1"),
        ({"dropout_p": "0.1"}, TypeError, r"dropout_p: expected a number in \[0, 1\), got str '0.1'"),
        ({"dropout_p": 0.1}, ValueError, "dropout_keep: expected an array with dropout_p=0.1, got None"),
        (
            {"dropout_keep": np.ones((2, 4, 5, 6), bool)},
            ValueError,
            r"dropout_keep: expected shape \(2, 4, 5, 7",
        ),
        (
            {"dropout_keep": np.ones((2, 4, 5, 7))},
            TypeError,
            "dropout_keep: expected bool, got dtype float64",
        ),
        ({"dropout_keep": True}, TypeError, "dropout_keep: expected a NumPy array, got bool True"),
        ({"dout": np.ones((2, 5, 4, 3))}, ValueError, r"dout: expected shape \(2, 5, 4, 2\)"),
        ({"dout": 1.0}, TypeError, "dout: expected a NumPy array, got float 1.0"),
        ({"dlse": np.ones((2, 5, 4))}, ValueError, r"dlse: expected shape \(2, 4, 5\), got \(2, 5, 4\)"),
        ({"dlse": np.ones((2, 4, 5), bool)}, TypeError, "dlse: expected integers or floats, got dtype bool"),
    ],
)
def test_errors_name_the_argument(rng, changed, error, message):
    q, k, v, visible = problem(rng)
    arguments = {"q": q, "k": k, "v": v, "visible": visible, **changed}
    with pytest.raises(error, match=message):
        attention_reference_backward(**{"dout": np.ones((2, 5, 4, 2)), **arguments})
    if not changed.keys() & {"dout", "dlse"}:
        with pytest.raises(error, match=message):
            attention_reference(**arguments)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"seed": 2**64}, ValueError, "seed: expected an integer in"),
        ({"offset": 0.5}, TypeError, "offset: expected an integer, got float 0.5"),
        ({"batch": -1}, ValueError, "batch: expected an integer in"),
        ({"heads": "2"}, TypeError, "heads: expected an integer, got str '2'"),
        ({"seqlen_q": None}, TypeError, "seqlen_q: expected an integer"),
        ({"seqlen_k": 1.0}, TypeError, "seqlen_k: expected an integer"),
        ({"p": 1.0}, ValueError, r"p: expected a number in \[0, 1\), got 1.0"),
        ({"p": "half"}, TypeError, r"p: expected a number in \[0, 1\), got str 'half'"),
    ],
)
def test_errors_of_the_dropout_mask_name_the_argument(changed, error, message):
    sizes = {"batch": 1, "heads": 2, "seqlen_q": 3, "seqlen_k": 4}
    with pytest.raises(error, match=message):
        dropout_keep_mask(**{"seed": 1, "offset": 0, **sizes, "p": 0.5, **changed})


# The published known-answer vectors of Philox4x32-10.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    assert tuple(philox4x32_10(counter, key)) == words


def bits_of_element(seed, offset, head, i, j):
    """The 16 bits of an element as the head of csrc/common/philox.h lays them out, in Python integers."""
    seed, offset = seed % 2**64, offset % 2**64
    row, column = i % 16, j % 16
    lane = row % 8 * 4 + column % 8 // 2
    counter = (j // 16 * 32 + lane, i // 16, head, offset % 2**32)
    words = philox4x32_10(counter, (seed % 2**32, seed >> 32 ^ offset >> 32))
    word = int(words[2 * (column // 8) + row // 8])
    return word & 0xFFFF if column % 2 == 0 else word >> 16


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (2**63 - 1, 5), (-3, 2**40 + 9)])
def test_dropout_equals_the_kernels_rule(seed, offset):
    keep = dropout_keep_mask(seed, offset, 2, 3, 37, 41, 0.4)
    for b, h, i, j in np.ndindex(2, 3, 37, 41):
        if (i * 41 + j) % 7 == 0:
            expected = bits_of_element(seed, offset, b * 3 + h, i, j) >= int(0.4 * 65536 + 0.5)
            assert keep[b, h, i, j] == expected, (b, h, i, j)


def test_dropout_rate_and_independence():
    keep = dropout_keep_mask(1, 0, 1, 2, 512, 512, 0.25)
    assert abs(keep.mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / keep.size)
    assert (keep[0, 0] == keep[0, 1]).mean() < 0.64  # independent: 0.625
    assert dropout_keep_mask(1, 0, 1, 1, 64, 64, 0.0).all()


@pytest.mark.parametrize("case", [c for c in CASES.values() if c.dtype == "float64"], ids=str)
def test_float64_plain_implementation_agrees(case: Case):
    for exact, plain in zip(reference_results(case), plain_results(case), strict=True):
        np.testing.assert_allclose(plain, exact, rtol=1e-10, atol=1e-12)


def test_cases_are_reproducible():
    case = CASES["indices_4"]
    first = make_inputs(case)
    make_inputs.cache_clear()
    for a, b in zip(first, make_inputs(case), strict=True):
        np.testing.assert_array_equal(a, b)
