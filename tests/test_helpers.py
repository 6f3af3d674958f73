"""The comparison the other tests rest on: it lets good results pass and bad ones fail."""

import numpy as np
import pytest
from helpers import (
    Case,
    assert_matches_reference,
    assert_results_match,
    dense_from_indices,
    make_inputs,
    plain_attention,
    plain_results,
    round_to,
)

CASE = Case(
    "helpers", mask="causal", dtype="bfloat16", seqlen_q=512, seqlen_k=512, head_dim=32, head_dim_v=32
)


def test_the_plain_implementation_passes():
    assert_results_match(plain_results(CASE), CASE)


def test_a_more_exact_implementation_passes():
    results = plain_attention(make_inputs(CASE), "float32")
    assert_results_match(type(results)(*(round_to(x, "bfloat16") for x in results[:1]), *results[1:]), CASE)


@pytest.mark.parametrize("field", ["out", "dq", "dk", "dv"])
def test_one_missing_tile_fails(field):
    """Late rows are small: the largest error of bfloat16 alone would let this pass."""
    wrong = getattr(plain_results(CASE), field).copy()
    wrong[0, 480:, 1, :16] = 0.0
    with pytest.raises(
        AssertionError, match=rf"{field}.* at \(0, (4[89]|50|51)\d, 1, \d+\): actual 0, reference"
    ):
        assert_results_match(plain_results(CASE)._replace(**{field: wrong}), CASE)


def test_the_worst_coordinate_is_named():
    reference = np.zeros((1, 4, 1, 2))
    wrong = reference.copy()
    wrong[0, 2, 0, 1], wrong[0, 3, 0, 0] = 0.5, -0.25
    with pytest.raises(
        AssertionError, match=r"out: error is 5.000e-01.*\(0, 2, 0, 1\): actual 0.5, reference 0"
    ):
        assert_matches_reference(wrong, reference, reference, dtype="float32", name="out")


@pytest.mark.parametrize(
    ("noisy_tokens", "passing", "failing"), [(1, 5.5, 6.0), (2, 4.5, 5.5), (32, 1.7, 2.0)]
)
def test_the_fewer_tokens_decide_the_more_noise_passes(noisy_tokens, passing, failing):
    """Where the plain implementation has no error at all; the other block and head have no noise."""
    noise = np.zeros((1, 64, 2, 8))
    noise[0, :noisy_tokens, 1] = 0.1
    zero = np.zeros_like(noise)
    assert_matches_reference(passing * noise, zero, zero, dtype="bfloat16", noise=noise)
    with pytest.raises(AssertionError, match=r"error.* at \(0, \d+, 1, \d\)"):
        assert_matches_reference(failing * noise, zero, zero, dtype="bfloat16", noise=noise)
    with pytest.raises(AssertionError, match="root mean square"):
        assert_matches_reference(0.01 * noise[:, ::-1], zero, zero, dtype="bfloat16", noise=noise)


@pytest.mark.parametrize(
    ("expected", "actual"), [(-np.inf, 0.0), (0.0, np.nan), (-np.inf, np.inf), (np.nan, 0.0)]
)
def test_nan_and_inf_patterns(expected, actual):
    reference, wrong = np.zeros((1, 1, 8)), np.zeros((1, 1, 8))
    reference[0, 0, 5], wrong[0, 0, 5] = expected, actual
    assert_matches_reference(reference, reference, reference, dtype="float32")
    with pytest.raises(AssertionError, match=r"NaN or inf in 1 wrong places, first at \(0, 0, 5\)"):
        assert_matches_reference(wrong, reference, reference, dtype="float32")


def test_round_to_bfloat16():
    x = np.float32([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-8 - 2**-16, np.inf, 3.4e38])
    expected = [1.0, 1.0, 1.0 + 2**-6, -1.0 - 2**-7, np.inf, np.inf]
    assert round_to(x, "bfloat16").tolist() == expected


def test_dense_from_indices():
    lower_and_upper = np.int32([[[[2, 3, 0, 1], [-5, 9, 0, 0], [3, 3, 2, 1]]]])
    assert dense_from_indices(lower_and_upper, False, 3, 3)[0, 0].tolist() == [
        [False, False, True],
        [True, False, True],
        [False, False, True],
    ]
    assert dense_from_indices(None, True, 2, 3)[0, 0].tolist() == [[True, True, False], [True, True, True]]
