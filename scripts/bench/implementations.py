"""Our kernels and their peers, each as a job: one case made ready to run again and again, with its results.

Every job reads the same values. What it takes to make a job (compilation, block masks, memory for results) is
not timed; whatever our kernels do with a mask is, for they do all of it in every call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import flashinfer_peers
import flex_masks
import numpy as np
import torch
from cells import (
    EQUAL_DOCUMENT_COUNT,
    EQUAL_DOCUMENTS,
    MAGI_WINDOW,
    PACKED,
    PEER_MASKS,
    TWELVE,
    Case,
    document_ends,
)
from kernel_calls import BackwardParams, CudaLibrary, ForwardParams, Options, backward_params, forward_params
from paper_data import PUBLISHED
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from torch_attention import give_workspace

from paddle_flashmask.masks import ColumnMask

Tensors = Sequence[torch.Tensor]
FLEX_MASKS = (*TWELVE, *PUBLISHED, MAGI_WINDOW)


@dataclass
class Job:
    """One implementation of one case; ``results`` are of one run of both passes, to check and to drop."""

    directions: dict[str, Callable[[], Any]]  # forward, backward
    results: dict[str, torch.Tensor]  # o, dq, dk, dv [B, S, H, D]; ours: lse [B, H, S] too
    mask_bytes: int = 0
    workspace_bytes: dict[str, int] = field(default_factory=dict)  # by direction
    keep_alive: Any = None  # what the calls point into


class Data:
    """q, k, v and dout of a shape: normal, bfloat16, [B, S, H, D].

    In memory those of equal documents are [B, H, S, D]. Packed they are walked through head by head, as a
    batch document by document: with heads behind tokens, the pages that are in use at once would differ.

    ``shared``: those of one shape lie in the same memory, which does for compiling.
    """

    def __init__(self, case: Case, device: str = "cuda", *, shared: bool = False):
        generator = torch.Generator(device).manual_seed(case.seed)
        queries, keys = (case.batch, case.seqlen, case.heads), (case.batch, case.seqlen, case.key_heads)
        shapes = [(*sizes, case.head_dim) for sizes in (queries, keys, keys, queries)]

        def make(shape: tuple[int, ...]) -> torch.Tensor:
            made = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)
            if case.mask == EQUAL_DOCUMENTS:
                made = made.transpose(1, 2).contiguous().transpose(1, 2)
            return made

        if shared:
            made = {shape: make(shape) for shape in shapes}
            self.tensors = [made[shape].view(shape) for shape in shapes]
        else:
            self.tensors = [make(shape) for shape in shapes]
        self._made_for = _unmasked(case)

    def serves(self, case: Case) -> bool:
        """Whether these are a case's tensors."""
        return self._made_for == _unmasked(case)

    @cached_property
    def heads_first(self) -> list[torch.Tensor]:
        """The same, contiguous as [B, H, S, D]."""
        made = {tensor.data_ptr(): tensor.transpose(1, 2).contiguous() for tensor in self.tensors}
        return [made[tensor.data_ptr()].view(made[tensor.data_ptr()].shape) for tensor in self.tensors]


def _unmasked(case: Case) -> Case:
    return replace(case, mask="")


def own_job(
    library: CudaLibrary,
    mask: ColumnMask,
    data: Data,
    *,
    backward: bool = True,
    deterministic: bool = False,
) -> Job:
    """Our kernels, through the C interface. Deterministic mode differs in the backward pass only."""
    return _own_job(library, data.tensors, *mask.to_startend_row_indices(), backward, deterministic)


def idle_indices_job(library: CudaLibrary, data: Data, *, causal: bool, backward: bool = True) -> Job:
    """Our kernels on a full or a causal mask, with indices that hide nothing more."""
    seqlen = data.tensors[0].shape[1]
    return _own_job(library, data.tensors, _nothing(seqlen, causal), causal, backward, deterministic=False)


def _nothing(seqlen: int, causal: bool) -> np.ndarray:
    """Indices that hide nothing: int32 ``[1, 1, Sk, 1 or 2]``."""
    return np.tile(np.array([seqlen] if causal else [seqlen, 0], np.int32), (1, 1, seqlen, 1))


def batched_job(library: CudaLibrary, data: Data) -> Job:
    """Our kernels on equal documents as a batch: the same tiles, and none to find.

    They get indices that hide nothing, as without any other kernels might run.
    """
    count = EQUAL_DOCUMENT_COUNT
    split = [tensor.view(count, -1, *tensor.shape[2:]) for tensor in data.tensors]
    seqlen = split[0].shape[1]
    job = _own_job(library, split, _nothing(seqlen, False), False, backward=True, deterministic=False)
    job.results = {
        name: tensor.view(data.tensors[0].shape) for name, tensor in job.results.items() if name != "lse"
    }
    return job


def _own_job(
    library: CudaLibrary,
    tensors: Tensors,
    indices: np.ndarray | None,
    causal: bool,
    backward: bool,
    deterministic: bool,
) -> Job:
    q, k, v, dout = tensors
    options = Options(
        indices=None if indices is None else torch.from_numpy(indices).to(q.device),
        causal=causal,
        deterministic=deterministic,
    )
    stream = torch.cuda.current_stream().cuda_stream
    out = torch.full_like(q, torch.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, device=q.device)
    gradients = {
        name: torch.full_like(x, torch.nan) for name, x in zip(("dq", "dk", "dv"), tensors[:3], strict=True)
    }
    params: dict[str, ForwardParams | BackwardParams] = {
        "forward": forward_params(q, k, v, out, lse, options, stream)
    }
    if backward:
        params["backward"] = backward_params(q, k, v, out, lse, dout, None, gradients, options, stream)
    workspaces = {name: give_workspace(library, params[name], q.device) for name in params}

    def launch(direction: str) -> None:
        library.launch(params[direction])

    directions: dict[str, Callable[[], Any]] = {name: partial(launch, name) for name in params}
    for run in directions.values():
        run()
    if deterministic:
        del directions["forward"]
    return Job(
        directions=directions,
        results={"o": out, "lse": lse, **(gradients if backward else {})},
        mask_bytes=0 if indices is None else indices.nbytes,
        workspace_bytes={name: workspace.numel() for name, workspace in workspaces.items()},
        keep_alive=(options, out, lse, gradients, workspaces),
    )


@dataclass(frozen=True)
class Peer:
    """Somebody else's attention, with autograd.

    Attributes:
        masks: what it can do of those that are measured.
        attend: (case, data) to its inputs q, k, v, dout and a function from q, k, v to o.
        heads_first: whether its tensors are [B, H, S, D].
        module: what must be importable besides torch.
        trains: whether it has a backward pass.
    """

    masks: tuple[str, ...]
    attend: Callable[[Case, Data], tuple[Tensors, Callable[..., torch.Tensor]]]
    heads_first: bool
    module: str | None = None
    trains: bool = True

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        if self.module is not None:
            try:
                importlib.import_module(self.module)
            except Exception as error:  # whatever it raises, others can be measured
                return f"{type(error).__name__}: {error}"
        return None

    def job(self, case: Case, data: Data, *, backward: bool = True) -> Job:
        """Make a case ready, with or without its backward pass; compiles what has to be compiled."""
        tensors, attend = self.attend(case, data)
        if not backward or not self.trains:
            return self._forward_job(tensors, attend)
        inputs = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
        out = attend(*inputs)
        directions = {
            "forward": lambda: attend(*inputs),
            "backward": lambda: torch.autograd.grad(out, inputs, tensors[3], retain_graph=True),
        }
        results = dict(zip(("o", "dq", "dk", "dv"), (out.detach(), *directions["backward"]()), strict=True))
        if self.heads_first:
            results = {name: tensor.transpose(1, 2) for name, tensor in results.items()}
        return Job(directions, results)

    def _forward_job(self, tensors: Tensors, attend: Callable[..., torch.Tensor]) -> Job:
        inputs = tensors[:3]
        with torch.no_grad():
            out = attend(*inputs)
        directions = {"forward": lambda: torch.no_grad()(attend)(*inputs)}
        return Job(directions, {"o": out.transpose(1, 2) if self.heads_first else out})


def _sdpa(backend: SDPBackend, case: Case, data: Data) -> tuple[Tensors, Callable[..., torch.Tensor]]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.mask == "causal", enable_gqa=case.kv_heads != 0
            )

    # FlashAttention-2 wants [B, S, H, D] underneath, cuDNN is given what SDPA's users have.
    if backend == SDPBackend.FLASH_ATTENTION:
        return [tensor.transpose(1, 2) for tensor in data.tensors], attend
    return data.heads_first, attend


def _flex(kernel_options: Any, case: Case, data: Data) -> tuple[Tensors, Callable[..., torch.Tensor]]:
    from torch._functorch import config
    from torch.nn.attention.flex_attention import flex_attention

    config.donated_buffer = False  # else a compiled graph's backward runs only once
    seqlen, device = case.seqlen, data.tensors[0].device
    arrays = flex_masks.token_arrays(seqlen, case.seed, published=case.mask in PUBLISHED)
    tokens = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    rule = flex_masks.make_rule(case.mask, seqlen, tokens)
    block_mask = None if case.mask == "full" else make_block_mask(case.build_mask(), rule, device)
    compiled = torch.compile(
        lambda q, k, v, block_mask: flex_attention(
            q, k, v, block_mask=block_mask, kernel_options=kernel_options, enable_gqa=case.kv_heads != 0
        ),
        dynamic=False,
    )
    return data.heads_first, lambda q, k, v: compiled(q, k, v, block_mask)


def make_block_mask(
    mask: ColumnMask, rule: flex_masks.Rule, device: torch.device, block: int = 128
) -> BlockMask:
    """Return what create_block_mask returns for a mask of one sample and head, without compiling it."""

    def ordered(chosen: torch.Tensor) -> list[torch.Tensor]:
        indices = torch.argsort(chosen.to(torch.int32), dim=-1, descending=True, stable=True)
        return [x.to(torch.int32).contiguous()[None, None] for x in (chosen.sum(-1), indices)]

    kinds = torch.from_numpy(mask.block_map(block, block)[0, 0]).to(device)
    return BlockMask.from_kv_blocks(
        *ordered(kinds == 1),
        *ordered(kinds == 2),
        BLOCK_SIZE=block,
        mask_mod=lambda b, h, i, j: rule(i, j),
        seq_lengths=(mask.seqlen_q, mask.seqlen_k),
    )


def _fa4(case: Case, data: Data) -> tuple[Tensors, Callable[..., torch.Tensor]]:
    if case.mask in PACKED:
        return _fa4_packed(case, data)
    from flash_attn.cute import flash_attn_func

    widths = {"sliding_window": case.seqlen // 16, MAGI_WINDOW: min(1024, case.seqlen - 1)}
    window = (widths[case.mask], 0) if case.mask in widths else (None, None)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result = flash_attn_func(q, k, v, causal=case.mask == "causal", window_size=window)
        return result[0] if isinstance(result, tuple) else result

    return data.tensors, attend


def _fa4_packed(case: Case, data: Data) -> tuple[Tensors, Callable[..., torch.Tensor]]:
    """Documents as sequences of several lengths, one after the other."""
    from flash_attn.cute import flash_attn_varlen_func

    ends = document_ends(case)
    longest = int(np.diff(ends).max())
    places = torch.from_numpy(ends).to(data.tensors[0].device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result = flash_attn_varlen_func(
            *(tensor.flatten(0, 1) for tensor in (q, k, v)),
            cu_seqlens_q=places,
            cu_seqlens_k=places,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=PACKED[case.mask],
        )
        return (result[0] if isinstance(result, tuple) else result).view(q.shape)

    return data.tensors, attend


PEERS = {
    "fa2": Peer(PEER_MASKS["fa2"], partial(_sdpa, SDPBackend.FLASH_ATTENTION), heads_first=True),
    "cudnn": Peer(PEER_MASKS["cudnn"], partial(_sdpa, SDPBackend.CUDNN_ATTENTION), heads_first=True),
    "flex": Peer(FLEX_MASKS, partial(_flex, None), heads_first=True),
    "flex_flash": Peer(
        FLEX_MASKS,
        partial(_flex, {"BACKEND": "FLASH"}),
        heads_first=True,
        module="flash_attn.cute",
    ),
    "fa4": Peer((*PEER_MASKS["fa4"], MAGI_WINDOW), _fa4, heads_first=False, module="flash_attn.cute"),
    **{
        name: Peer(TWELVE, attend, heads_first=False, module="flashinfer", trains=False)
        for name, attend in (
            ("flashinfer_dense", flashinfer_peers.dense),
            ("flashinfer_sparse", partial(flashinfer_peers.sparse, 64)),
            ("flashinfer_sparse_16", partial(flashinfer_peers.sparse, 16)),
        )
    },
}
