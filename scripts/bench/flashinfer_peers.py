"""FlashInfer's two attentions with a custom mask, forward only, for one sample. Needs flashinfer-python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import flex_masks
import numpy as np
import torch
from cells import Case

if TYPE_CHECKING:
    from implementations import Data

Tensors = Sequence[torch.Tensor]
Attend = Callable[..., torch.Tensor]
WORKSPACE_BYTES = 1 << 28


def dense(case: Case, data: Data) -> tuple[Tensors, Attend]:
    """single_prefill_with_kv_cache under a packed boolean mask; packing it is not timed."""
    import flashinfer

    rule, index = _rule(case, data)
    rows = [flashinfer.packbits(rule(i[:, None], index).flatten(), "little") for i in index.split(1024)]
    packed = torch.cat(rows)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flashinfer.single_prefill_with_kv_cache(q[0], k[0], v[0], packed_custom_mask=packed)[None]

    return data.tensors, attend


def sparse(block: int, case: Case, data: Data) -> tuple[Tensors, Attend]:
    """BlockSparseAttentionWrapper with blocks of so many rows and columns; planning is not timed."""
    import flashinfer

    q = data.tensors[0]
    rule, index = _rule(case, data)
    kinds = case.build_mask().block_map(block, block)[0, 0]
    row, column = np.nonzero(kinds)
    indptr = np.concatenate([[0], np.cumsum((kinds != 0).sum(1))])
    mask = None
    if bool((kinds == 1).any()):
        i, j = (torch.from_numpy(x).to(q.device)[:, None, None] * block for x in (row, column))
        mask = rule(i + index[:block, None], j + index[None, :block])
    wrapper = flashinfer.BlockSparseAttentionWrapper(
        torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    )
    wrapper.plan(
        *(torch.from_numpy(x.astype(np.int32)).to(q.device) for x in (indptr, column)),
        *(case.seqlen, case.seqlen, block, block, case.heads, case.key_heads, case.head_dim),
        mask=mask,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
        o_data_type=q.dtype,
    )
    return data.tensors, lambda q, k, v: wrapper.run(q[0], k[0], v[0])[None]


def _rule(case: Case, data: Data) -> tuple[flex_masks.Rule, torch.Tensor]:
    device = data.tensors[0].device
    arrays = flex_masks.token_arrays(case.seqlen, case.seed)
    tokens = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return flex_masks.make_rule(case.mask, case.seqlen, tokens), torch.arange(case.seqlen, device=device)
