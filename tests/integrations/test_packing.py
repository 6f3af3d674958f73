"""Packing against a dense oracle: what each packed position may see, must predict, and where it came from."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_flashmask.packing import IGNORE_INDEX, Document, greedy_packs, pack, sft_document

tokens = st.lists(st.integers(1, 99), min_size=1, max_size=9)
samples = st.lists(st.tuples(tokens, tokens), max_size=12)


def visible(startend_row_indices: np.ndarray) -> np.ndarray:
    """Causal visibility [S, S] of one sequence's indices [1, S, 1], straight from their definition."""
    rows, columns = np.indices((startend_row_indices.shape[1],) * 2)
    return (columns <= rows) & (rows < startend_row_indices[0, :, 0])


@settings(deadline=None)
@given(samples, st.integers(1, 40))
def test_pack_against_dense_oracle(samples, max_length):
    documents = [sft_document(question, answer) for question, answer in samples]
    packed = pack(documents, max_length, pad_token_id=7)

    for n, members in enumerate(packed.documents):
        seen = np.zeros((max_length, max_length), dtype=bool)
        ids, labels, positions = (np.full(max_length, pad) for pad in (7, IGNORE_INDEX, 0))
        start = 0
        for question, answer in (samples[i] for i in members):
            length = len(question) + len(answer) - 1
            here = slice(start, start + length)
            seen[here, here] = np.tri(length, dtype=bool)
            ids[here] = (question + answer)[:-1]
            labels[here] = [IGNORE_INDEX] * (len(question) - 1) + answer
            positions[here] = range(length)
            start += length
        np.testing.assert_array_equal(visible(packed.startend_row_indices[n]), seen)
        np.testing.assert_array_equal(packed.input_ids[n], ids)
        np.testing.assert_array_equal(packed.labels[n], labels)
        np.testing.assert_array_equal(packed.position_ids[n], positions)

    placed = sorted(i for members in packed.documents for i in members)
    assert placed == [i for i, document in enumerate(documents) if len(document) <= max_length]
    assert packed.skipped == tuple(i for i, document in enumerate(documents) if len(document) > max_length)
    used = sum(len(documents[i]) for i in placed)
    assert packed.num_tokens == used
    assert packed.fill_rate == (used / (len(packed) * max_length) if placed else 0.0)


def test_shapes_and_dtypes_are_the_operators():
    packed = pack([sft_document([1, 2], [3]), sft_document([4], [5, 6])], 8)
    assert packed.startend_row_indices.shape == (1, 1, 8, 1)
    assert packed.startend_row_indices.dtype == np.int32
    assert packed.input_ids.dtype == packed.labels.dtype == packed.position_ids.dtype == np.int64


@given(st.lists(st.integers(1, 50), max_size=60))
def test_greedy_packs_fill_well(lengths):
    packs = greedy_packs(lengths, 50)
    assert sorted(i for items in packs for i in items) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in items) for items in packs]
    assert all(load <= 50 for load in loads)
    # A bin is opened only when no open one has room, so at most one is half empty.
    assert sum(load <= 25 for load in loads) <= 1


def test_greedy_packs_takes_the_fullest_bin_that_fits():
    assert greedy_packs([6, 5, 3, 4, 1], 10) == [[0, 2, 4], [1, 3]]


DOCUMENT = sft_document([1], [2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sft_document([], [1]), ValueError, "question: expected at least one token, got none"),
        (lambda: sft_document([1], []), ValueError, "answer: expected at least one token, got none"),
        (
            lambda: sft_document("ab", [1]),
            TypeError,
            "question: expected a sequence of token ids, got str 'ab'",
        ),
        (lambda: sft_document([1], 3), TypeError, "answer: expected a sequence of token ids, got int 3"),
        (
            lambda: sft_document([1.5], [1]),
            TypeError,
            "question: expected integers that int64 holds, got dtype",
        ),
        (lambda: sft_document([1], [[2]]), ValueError, "answer: expected 1 dimensions, got shape [1, 1]"),
        (lambda: greedy_packs([3, 11], 10), ValueError, "lengths[1]: expected a length in [1, 10], got 11"),
        (
            lambda: greedy_packs(["a"], 10),
            TypeError,
            "lengths: expected integers that int64 holds, got dtype",
        ),
        (lambda: greedy_packs(3, 10), TypeError, "lengths: expected a sequence of integers, got int 3"),
        (lambda: greedy_packs([3], 1.5), TypeError, "max_length: expected an integer, got float 1.5"),
        (lambda: pack([], 0), ValueError, "max_length: expected an integer in [1, 2147483647], got 0"),
        (lambda: pack([DOCUMENT], "a"), TypeError, "max_length: expected an integer, got str 'a'"),
        (lambda: pack([3], 8), TypeError, "documents[0]: expected a Document, got int 3"),
        (lambda: pack(DOCUMENT, 8), TypeError, "documents: expected a sequence of Documents, got Document"),
        (
            lambda: pack([DOCUMENT], 8, pad_token_id=None),
            TypeError,
            "pad_token_id: expected an integer, got NoneType None",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        call()


def test_an_empty_document_is_named():
    empty = Document(*(field[:0] for field in (DOCUMENT.input_ids,) * 3), DOCUMENT.row_end[:0])
    with pytest.raises(ValueError, match=r"documents\[1\]: expected at least one token, got none"):
        pack([DOCUMENT, empty], 8)
