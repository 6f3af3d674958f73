"""Packing against a dense oracle: what each packed position may see, must predict, and where it came from."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_flashmask.packing import (
    IGNORE_INDEX,
    Document,
    dialogue_document,
    greedy_packs,
    pack,
    preference_document,
    reward_document,
    sft_document,
)

tokens = st.lists(st.integers(1, 99), min_size=1, max_size=9)
samples = st.lists(st.tuples(tokens, tokens), max_size=12)
answer_lists = st.lists(tokens, min_size=2, max_size=6)


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


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=4))
def test_a_dialogue_is_one_document_with_a_loss_on_every_answer(turns):
    document = dialogue_document(turns)
    everything = [token for turn in turns for part in turn for token in part]
    loss = [is_answer for turn in turns for is_answer, part in enumerate(turn) for _ in part]
    assert document.input_ids.tolist() == everything[:-1]
    expected = [
        token if is_answer else IGNORE_INDEX for token, is_answer in zip(everything, loss, strict=True)
    ]
    assert document.labels.tolist() == expected[1:]
    assert document.position_ids.tolist() == list(range(len(document)))
    assert document.row_end.tolist() == [len(document)] * len(document)
    assert [document.labels[a:b].tolist() for a, b in document.answers] == [answer for _, answer in turns]


def branches_seen(document: Document, prompt: int, lengths: list[int]) -> None:
    """Check positions and visibility of a question of `prompt` tokens and branches of these lengths."""
    n = len(document)
    branch = np.repeat(range(-1, len(lengths)), [prompt, *lengths])  # -1: the question
    assert len(branch) == n
    rows, columns = np.indices((n, n))
    own = (branch[columns] == -1) | (branch[columns] == branch[rows])
    np.testing.assert_array_equal(visible(document.row_end[None, :, None]), own & (columns <= rows))
    # A token's position is the number of earlier tokens it sees.
    np.testing.assert_array_equal(document.position_ids, own.sum(1, where=columns < rows))


@given(tokens, tokens, tokens)
def test_a_preference_document_against_dense_oracle(question, chosen, rejected):
    document = preference_document(question, chosen, rejected)
    branches_seen(document, len(question) - 1, [len(chosen), len(rejected)])
    assert document.answers[:, 0].tolist() == [len(question) - 1, len(question) - 1 + len(chosen)]
    for (start, stop), answer in zip(document.answers, (chosen, rejected), strict=True):
        # What an answer's last position sees is the question and the answer: an SFT document.
        alone = sft_document(question, answer)
        seen = [*range(len(question) - 1), *range(start, stop)]
        for field in ("input_ids", "labels", "position_ids"):
            np.testing.assert_array_equal(getattr(document, field)[seen], getattr(alone, field))


@given(tokens, answer_lists)
def test_a_reward_document_against_dense_oracle(question, answers):
    document = reward_document(question, answers)
    branches_seen(document, len(question), [len(answer) for answer in answers])
    assert (document.labels == IGNORE_INDEX).all()
    for (start, stop), answer in zip(document.answers, answers, strict=True):
        seen = [*range(len(question)), *range(start, stop)]
        assert document.input_ids[seen].tolist() == question + answer
        assert document.position_ids[seen].tolist() == list(range(len(seen)))


@given(st.lists(st.tuples(tokens, answer_lists), max_size=6), st.integers(10, 80))
def test_packed_documents_are_the_documents(samples, max_length):
    documents = [reward_document(*sample) for sample in samples]
    packed = pack(documents, max_length)
    for n, (members, answers) in enumerate(zip(packed.documents, packed.answers, strict=True)):
        start = 0
        seen = np.zeros((max_length, max_length), dtype=bool)
        for document, ranges in zip((documents[i] for i in members), answers, strict=True):
            here = slice(start, start + len(document))
            seen[here, here] = visible(document.row_end[None, :, None])
            np.testing.assert_array_equal(packed.input_ids[n, here], document.input_ids)
            np.testing.assert_array_equal(packed.position_ids[n, here], document.position_ids)
            np.testing.assert_array_equal(ranges, document.answers + start)
            start += len(document)
        np.testing.assert_array_equal(visible(packed.startend_row_indices[n]), seen)


def test_the_drawn_example():
    document = preference_document([1, 2, 3], [4, 5], [6, 7])
    drawn = preference_document.__doc__
    rows = [line.rsplit("  ", 1)[1] for line in drawn.splitlines() if "█" in line]
    seen = visible(document.row_end[None, :, None])
    assert rows == ["".join("█" if cell else "·" for cell in row) for row in seen]
    for field in ("input_ids", "labels", "position_ids", "row_end"):
        line = next(line for line in drawn.splitlines() if line.strip().startswith(field))
        values = ["-" if x == IGNORE_INDEX else str(x) for x in getattr(document, field)]
        assert line.replace("|", " ").split()[1:7] == values, field


def test_the_loss_mask_is_where_labels_are():
    packed = pack([preference_document([1, 2], [3], [4, 5])], 6)
    assert packed.loss_mask.tolist() == [[False, True, True, True, False, False]]


def test_shapes_and_dtypes_are_the_operators():
    packed = pack([sft_document([1, 2], [3]), sft_document([4], [5, 6])], 8)
    assert packed.startend_row_indices.shape == (1, 1, 8, 1)
    assert packed.startend_row_indices.dtype == np.int32
    assert packed.input_ids.dtype == packed.labels.dtype == packed.position_ids.dtype == np.int64
    for document in (DOCUMENT, preference_document([1], [2], [3]), reward_document([1], [[2], [3]])):
        for field in (document.input_ids, document.labels, document.position_ids, document.answers):
            assert field.dtype == np.int64
        assert document.row_end.dtype == np.int32


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
        (lambda: dialogue_document([]), ValueError, "turns: expected at least one (question, answer) pair"),
        (lambda: dialogue_document([[1]]), ValueError, "turns[0]: expected a pair (question, answer), got 1"),
        (
            lambda: dialogue_document([([1], [2]), ([3], [])]),
            ValueError,
            "turns[1] answer: expected at least one token, got none",
        ),
        (
            lambda: preference_document([1], [], [2]),
            ValueError,
            "chosen: expected at least one token, got none",
        ),
        (
            lambda: preference_document([1], [2], "x"),
            TypeError,
            "rejected: expected a sequence of token ids, got str 'x'",
        ),
        (lambda: reward_document([1], [[2]]), ValueError, "answers: expected 2 to 6 answers, got 1"),
        (lambda: reward_document([1], [[2]] * 7), ValueError, "answers: expected 2 to 6 answers, got 7"),
        (
            lambda: reward_document([1], [[2], []]),
            ValueError,
            "answers[1]: expected at least one token, got none",
        ),
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
    empty = Document(*(field[:0] for field in vars(DOCUMENT).values()))
    with pytest.raises(ValueError, match=r"documents\[1\]: expected at least one token, got none"):
        pack([DOCUMENT, empty], 8)
