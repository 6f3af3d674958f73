"""A million tokens: each operation takes under 2 s, memory is linear in tokens (block_map: in tiles)."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from paddle_flashmask import masks
from paddle_flashmask.masks import ColumnMask

TOKENS = 2**20
SECONDS = 2.0
BYTES_PER_TOKEN = 200  # 50 numbers of 4 bytes: the four bounds, and temporary ones
BYTES_PER_TILE = 3  # of the 8192 x 8192 tiles

LENGTHS = np.full(1024, TOKENS // 1024)
RANDOM = np.random.default_rng(0)

CONSTRUCTORS: dict[str, Callable[[], ColumnMask]] = {
    "full": lambda: masks.full(TOKENS),
    "causal": lambda: masks.causal(TOKENS),
    "sliding_window": lambda: masks.sliding_window(TOKENS, 4096),
    "two_sided_window": lambda: masks.sliding_window(TOKENS, 4096, causal=False),
    "document": lambda: masks.document(LENGTHS),
    "causal_document": lambda: masks.causal_document(LENGTHS),
    "share_question": lambda: masks.share_question([(512, [256, 256])] * 1024),
    "global_sliding_window": lambda: masks.global_sliding_window(TOKENS, 4096, 4096),
    "causal_blockwise": lambda: masks.causal_blockwise(LENGTHS),
    "prefix_lm_causal": lambda: masks.prefix_lm_causal(TOKENS, TOKENS // 7),
    "prefix_lm_document": lambda: masks.prefix_lm_document(LENGTHS, LENGTHS // 3),
    "qk_sparse": lambda: masks.qk_sparse(TOKENS, [(i + 1, i + 1000) for i in range(0, TOKENS, 1024)]),
    "dropped": lambda: masks.dropped(TOKENS, np.arange(0, TOKENS, 3), (5000, 90000)),
    "random_eviction": lambda: masks.random_eviction(RANDOM.integers(0, TOKENS, TOKENS)),
    "hash_sparse": lambda: masks.hash_sparse(*RANDOM.integers(0, 64, (2, TOKENS)))[0],
}

# As many documents, ranges or dropped keys as there are tokens, from lists where lists are taken.
ONES = [1] * TOKENS
PAIRS = [(i, i + 1) for i in range(TOKENS)]
PAIR_ARRAY = np.array(PAIRS)

MANY: dict[str, Callable[[], ColumnMask]] = {
    "document": lambda: masks.document(ONES),
    "causal_document": lambda: masks.causal_document(ONES),
    "share_question, no answers": lambda: masks.share_question([(1, [])] * TOKENS),
    "share_question, one answer": lambda: masks.share_question([(1, [1])] * (TOKENS // 2)),
    "share_question, arrays": lambda: masks.share_question([(1, np.ones(3, int))] * (TOKENS // 4)),
    "share_question, many answers": lambda: masks.share_question([(1, ONES[1:])]),
    "causal_blockwise": lambda: masks.causal_blockwise(ONES),
    "prefix_lm_document": lambda: masks.prefix_lm_document(ONES, ONES),
    "qk_sparse": lambda: masks.qk_sparse(TOKENS, PAIRS),
    "qk_sparse, array": lambda: masks.qk_sparse(TOKENS, PAIR_ARRAY),
    "dropped": lambda: masks.dropped(TOKENS, list(range(TOKENS))),
    "random_eviction": lambda: masks.random_eviction(ONES),
    "hash_sparse": lambda: masks.hash_sparse(list(range(TOKENS)), ONES)[0],
}

built = lru_cache(maxsize=None)(lambda name: CONSTRUCTORS[name]())


def measured(make: Callable[[], Any], max_bytes: float) -> Any:
    """What ``make`` returns, within SECONDS of processor time and ``max_bytes`` at the peak."""
    for _ in range(3):  # a busy machine may make it slower, never faster
        begin = time.process_time()
        result = make()
        seconds = time.process_time() - begin
        if seconds < SECONDS:
            break
    tracemalloc.start()
    make()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < SECONDS
    assert peak < max_bytes
    return result


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in CONSTRUCTORS.items()])
def test_constructors(make: Callable[[], ColumnMask]) -> None:
    assert measured(make, BYTES_PER_TOKEN * TOKENS).seqlen_k == TOKENS


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in MANY.items()])
def test_constructors_of_many_parts(make: Callable[[], ColumnMask]) -> None:
    assert measured(make, BYTES_PER_TOKEN * TOKENS).seqlen_k == TOKENS


@pytest.mark.parametrize(
    "combine",
    [
        lambda: built("document") & built("sliding_window"),
        lambda: built("global_sliding_window") & built("two_sided_window"),
        lambda: built("document") | built("prefix_lm_document"),
        lambda: built("causal_document") & built("random_eviction"),
    ],
)
def test_compositions(combine: Callable[[], ColumnMask]) -> None:
    measured(combine, BYTES_PER_TOKEN * TOKENS)


@pytest.mark.parametrize(
    "name", ["causal_document", "global_sliding_window", "hash_sparse", "random_eviction"]
)
def test_bridge_area_and_equality(name: str) -> None:
    mask = built(name)
    limit = BYTES_PER_TOKEN * TOKENS
    indices, causal = measured(mask.to_startend_row_indices, limit)
    again = measured(lambda: ColumnMask.from_startend_row_indices(indices, causal), limit)
    assert measured(lambda: again == mask, limit)
    assert measured(again.visible_area, limit) == mask.visible_area()
    measured(lambda: hash(again), limit)
    measured(lambda: repr(again), limit)


@pytest.mark.parametrize("name", ["causal_document", "global_sliding_window", "random_eviction"])
def test_sparsity_and_drawing_keep_no_tiles(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mask = built(name)
    measured(mask.block_sparsity, BYTES_PER_TOKEN * TOKENS)
    measured(mask.show, BYTES_PER_TOKEN * TOKENS)
    assert "32768 x 32768 elements a cell" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exact", "minmax"])
@pytest.mark.parametrize("name", ["causal_document", "global_sliding_window", "random_eviction"])
def test_block_map(name: str, rule: str) -> None:
    mask = built(name)
    tiles = (TOKENS // 128) ** 2
    kinds = measured(
        lambda: mask.block_map(128, 128, rule), BYTES_PER_TILE * tiles + BYTES_PER_TOKEN * TOKENS / 4
    )
    assert kinds.shape == (1, 1, TOKENS // 128, TOKENS // 128)
