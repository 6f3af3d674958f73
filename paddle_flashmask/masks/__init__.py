"""Attention masks in O(N) memory: per key column, at most two intervals of query rows that do not see it.

>>> mask = causal_document([2, 1, 3])
>>> mask
<ColumnMask [1, 1, 6, 6], causal, C=1, 27.8% visible>
>>> mask == causal(6) & document([2, 1, 3])
True
>>> mask.show()
# . . . . .
# # . . . .
. . # . . .
. . . # . .
. . . # # .
. . . # # #

NumPy only. `ColumnMask` is the one class, constructors are functions; `paddle_flashmask.masks.constructors`
states and draws every convention (which end of a window counts, what a prefix holds, ...).
"""

from .column_mask import ColumnMask
from .constructors import (
    causal,
    causal_blockwise,
    causal_document,
    document,
    dropped,
    full,
    global_sliding_window,
    hash_sparse,
    prefix_lm_causal,
    prefix_lm_document,
    qk_sparse,
    random_eviction,
    share_question,
    sliding_window,
)

__all__ = [
    "ColumnMask",
    "causal",
    "causal_blockwise",
    "causal_document",
    "document",
    "dropped",
    "full",
    "global_sliding_window",
    "hash_sparse",
    "prefix_lm_causal",
    "prefix_lm_document",
    "qk_sparse",
    "random_eviction",
    "share_question",
    "sliding_window",
]
