"""Each constructor against its rule, written down once more as a dense one, element by element."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flashmask import masks

seqlens = st.integers(0, 40)
segment_lengths = st.lists(st.integers(0, 9), max_size=6)
padding = st.integers(0, 5)
windows = st.one_of(st.integers(0, 45), st.sampled_from([2**31 - 1]))


def segment_of(lengths: list[int], seqlen: int) -> np.ndarray:
    """The number of each token's segment, ``[S]``; -1 for padding."""
    tokens = [number for number, length in enumerate(lengths) for _ in range(length)]
    return np.array(tokens + [-1] * (seqlen - len(tokens)), int)


def grid(seqlen_q: int, seqlen_k: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Row and column numbers, ``[Sq, 1]`` and ``[1, Sk]``."""
    return np.arange(seqlen_q)[:, None], np.arange(seqlen_q if seqlen_k is None else seqlen_k)[None]


def assert_sees(mask: masks.ColumnMask, visible: np.ndarray) -> None:
    np.testing.assert_array_equal(mask.to_dense()[0, 0], np.broadcast_to(visible, mask.shape[2:]))


@given(seqlens, seqlens)
def test_full_and_causal(seqlen_q: int, seqlen_k: int) -> None:
    i, j = grid(seqlen_q, seqlen_k)
    assert_sees(masks.full(seqlen_q, seqlen_k), (i >= 0) & (j >= 0))
    assert_sees(masks.causal(seqlen_q, seqlen_k), j <= i + seqlen_k - seqlen_q)
    assert masks.full(seqlen_q) == masks.full(seqlen_q, seqlen_q)
    assert masks.causal(seqlen_q) == masks.causal(seqlen_q, seqlen_q)


@given(seqlens, windows, windows)
def test_sliding_window(seqlen: int, left: int, right: int) -> None:
    i, j = grid(seqlen)
    assert_sees(masks.sliding_window(seqlen, left), (i - j >= 0) & (i - j <= left))
    assert_sees(masks.sliding_window(seqlen, left, causal=False), abs(i - j) <= left)
    assert_sees(masks.sliding_window(seqlen, (left, right), causal=False), (i - j <= left) & (j - i <= right))
    assert masks.sliding_window(seqlen, (left, right)) == masks.sliding_window(seqlen, left)


@given(seqlens, seqlens, windows, windows, st.booleans())
def test_sliding_window_of_unequal_lengths(
    seqlen_q: int, seqlen_k: int, left: int, right: int, causal: bool
) -> None:
    i, j = grid(seqlen_q, seqlen_k)
    distance = i + seqlen_k - seqlen_q - j
    mask = masks.sliding_window(seqlen_q, (left, right), causal, seqlen_k=seqlen_k)
    assert_sees(mask, (distance <= left) & (distance >= (0 if causal else -right)))


@given(segment_lengths, padding)
def test_documents(lengths: list[int], extra: int) -> None:
    seqlen = sum(lengths) + extra
    i, j = grid(seqlen)
    document = segment_of(lengths, seqlen)
    same = (document[i] == document[j]) & (document[i] >= 0)
    assert_sees(masks.document(lengths, seqlen), same)
    assert_sees(masks.causal_document(np.array(lengths, np.int32), seqlen=seqlen), same & (j <= i))
    if not extra:
        assert masks.document(lengths) == masks.document(lengths, seqlen)
        assert masks.causal_document(lengths) == masks.causal_document(lengths, seqlen)


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.integers(0, 5), max_size=4)), max_size=4), padding)
def test_share_question(documents: list[tuple[int, list[int]]], extra: int) -> None:
    lengths = [question + sum(answers) for question, answers in documents]
    seqlen = sum(lengths) + extra
    i, j = grid(seqlen)
    document = segment_of(lengths, seqlen)
    answer = np.zeros(seqlen, int)  # 0 is the question
    for start, (question, answers) in zip(accumulate([0, *lengths]), documents, strict=False):
        answer[start + question : start + question + sum(answers)] = segment_of(answers, sum(answers)) + 1
    visible = (document[i] == document[j]) & (document[i] >= 0) & (j <= i)
    assert_sees(
        masks.share_question(documents, seqlen), visible & ((answer[j] == 0) | (answer[i] == answer[j]))
    )


@pytest.mark.parametrize(
    "documents",
    [
        [[2, (2, 1)], [1, (1,)], [0, ()]],
        [(2, np.array([2, 1], np.uint8)), (1, np.array([1])), (0, [])],
        [(np.int32(2), [np.int64(2), 1]), np.array([1, [1]], object), (0, np.array([]))],
        [(2, range(2, 0, -1)), (1, range(1, 2)), (0, range(0))],
    ],
    ids=["lists and tuples", "arrays", "NumPy's integers", "ranges"],
)
def test_share_question_takes_any_sequences(documents: list[Any]) -> None:
    assert masks.share_question(documents) == masks.share_question([(2, [2, 1]), (1, [1])])


@given(seqlens, st.integers(0, 40), windows, windows)
def test_global_sliding_window(seqlen: int, num_global: int, left: int, right: int) -> None:
    num_global = min(num_global, seqlen)
    i, j = grid(seqlen)
    globally = (i < num_global) | (j < num_global)
    assert_sees(masks.global_sliding_window(seqlen, num_global, left), globally | (abs(i - j) <= left))
    assert_sees(
        masks.global_sliding_window(seqlen, num_global, (left, right)),
        globally | ((i - j <= left) & (j - i <= right)),
    )


@given(segment_lengths)
def test_causal_blockwise(lengths: list[int]) -> None:
    seqlen = sum(lengths)
    i, j = grid(seqlen)
    block = segment_of(lengths, seqlen)
    assert_sees(
        masks.causal_blockwise(lengths), (j <= i) & ((block[i] == block[j]) | (block[i] == len(lengths) - 1))
    )


def test_causal_blockwise_refuses_padding() -> None:
    with pytest.raises(
        ValueError, match=r"lengths: expected a sum of seqlen=10, got 7; .*no padding.*last block"
    ):
        masks.causal_blockwise([3, 4], seqlen=10)
    assert masks.causal_blockwise([3, 4], seqlen=7) == masks.causal_blockwise([3, 4])


@given(seqlens, st.integers(0, 40))
def test_prefix_lm_causal(seqlen: int, prefix: int) -> None:
    prefix = min(prefix, seqlen)
    i, j = grid(seqlen)
    assert_sees(masks.prefix_lm_causal(seqlen, prefix), (j <= i) | (j < prefix))


@given(
    st.lists(st.integers(0, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=6),
    padding,
)
def test_prefix_lm_document(documents: list[tuple[int, int]], extra: int) -> None:
    lengths, prefixes = [length for length, _ in documents], [prefix for _, prefix in documents]
    seqlen = sum(lengths) + extra
    i, j = grid(seqlen)
    document = segment_of(lengths, seqlen)
    in_prefix = np.zeros(seqlen, bool)
    for start, prefix in zip(accumulate([0, *lengths]), prefixes, strict=False):
        in_prefix[start : start + prefix] = True
    same = (document[i] == document[j]) & (document[i] >= 0)
    assert_sees(masks.prefix_lm_document(lengths, prefixes, seqlen), same & ((j <= i) | in_prefix[j]))


@given(seqlens, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=4))
def test_qk_sparse(seqlen: int, pairs: list[tuple[int, int]]) -> None:
    ranges = [(min(a, b, seqlen), min(max(a, b), seqlen)) for a, b in pairs]
    i, j = grid(seqlen)
    visible = j <= i
    for start, stop in ranges:
        visible = visible & ~((start <= i) & (i < stop) & (start <= j) & (j < stop))
    for form in (ranges, [[*pair] for pair in ranges], np.array(ranges, np.int32).reshape(-1, 2)):
        assert_sees(masks.qk_sparse(seqlen, form), visible)


@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 39), max_size=8),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_dropped(seqlen: int, keys: list[int], queries: tuple[int, int]) -> None:
    keys = [key % seqlen for key in keys]
    start, stop = sorted(min(row, seqlen) for row in queries)
    i, j = grid(seqlen)
    visible = (j <= i) & ~np.isin(j, keys)
    assert_sees(masks.dropped(seqlen, keys), visible)
    assert_sees(masks.dropped(seqlen, keys, (start, stop)), visible & ~((start <= i) & (i < stop)))


@given(st.integers(0, 30), st.data())
def test_random_eviction(seqlen: int, data: st.DataObject) -> None:
    dims = data.draw(st.sampled_from([(), (3,), (2, 3)]))
    values = st.one_of(st.integers(-2, seqlen + 2), st.sampled_from([-(2**31), 2**31 - 1]))
    count = int(np.prod((*dims, seqlen)))
    drawn = data.draw(st.lists(values, min_size=count, max_size=count))
    evict_at = np.array(drawn, np.int64).reshape(*dims, seqlen)
    mask = masks.random_eviction(evict_at)
    assert (mask.batch, mask.heads) == ((1, 1, *dims)[-2:])
    i, j = grid(seqlen)
    visible = (j <= i) & (i < evict_at[..., None, :])
    np.testing.assert_array_equal(mask.to_dense(), visible.reshape(mask.shape))


@given(st.integers(0, 20), st.data())
def test_hash_sparse(seqlen: int, data: st.DataObject) -> None:
    dims = data.draw(st.sampled_from([(), (2,), (2, 2)]))
    count = int(np.prod((*dims, seqlen)))
    buckets = st.lists(st.integers(-1, 2), min_size=count, max_size=count)
    query_buckets, key_buckets = (np.array(data.draw(buckets), int).reshape(*dims, seqlen) for _ in range(2))
    mask, query_order, key_order = masks.hash_sparse(query_buckets, key_buckets)
    assert query_order.shape == key_order.shape == query_buckets.shape
    dense = mask.to_dense().reshape(*dims, seqlen, seqlen)
    i, j = grid(seqlen)
    for head in np.ndindex(*dims):
        for order, bucket in ((query_order[head], query_buckets[head]), (key_order[head], key_buckets[head])):
            assert order.tolist() == sorted(range(seqlen), key=lambda token, b=bucket: (b[token], token))
        in_original_order = np.empty((seqlen, seqlen), bool)
        in_original_order[query_order[head][:, None], key_order[head]] = dense[head]
        same_bucket = query_buckets[head][i] == key_buckets[head][j]
        np.testing.assert_array_equal(in_original_order, same_bucket & (j <= i))


@given(data=st.data())
def test_the_short_way_to_causal_masks_has_the_slots_of_the_long_one(data: st.DataObject) -> None:
    seqlen, dims = data.draw(st.integers(0, 12)), data.draw(st.sampled_from([(), (2,), (3, 2)]))
    count = int(np.prod((*dims, seqlen)))
    ends = data.draw(st.lists(st.integers(-2, 14), min_size=count, max_size=count))
    end = np.array(ends, np.int32).reshape(*dims, seqlen)
    short = masks.ColumnMask._causal_until(end, seqlen)
    causal = (0, np.arange(seqlen))
    long = masks.ColumnMask([causal, (end, seqlen)], seqlen_q=seqlen, seqlen_k=seqlen)
    assert short == long
    assert short._slots[2:] == long._slots[2:]
