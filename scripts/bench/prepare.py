"""Lets peers compile in several processes, so that the one that times finds the results in their caches.

FlexAttention's are in torch's cache of compiled graphs and in Triton's, FA4's and FlashInfer's in their own.
A cell whose compilation fails, or takes its process down or too long, is named, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cells import Case
from limits import apart
from results import length_name

# The slowest first; FlashInfer's, by nvcc, are the same for all lengths and blocks.
FLASHINFER = ("flashinfer_sparse", "flashinfer_dense")
COMPILED = (*FLASHINFER, "flex_flash", "flex", "fa4")
# Bytes of GPU memory at 131,072 tokens and a hidden size of 4096: 4 GiB while it compiles, 9 when it runs.
MEMORY_PER_WORKER = 6 << 30


def share_compiled() -> None:
    """Let what this process and others compile be found by each other; call it before torch is imported."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool: each kernel is waited for anyway


def add_prepare_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--prepare [N]``: None where it is not given, 0 where N is not."""
    parser.add_argument(
        "--prepare",
        type=int,
        nargs="?",
        const=0,
        metavar="N",
        help="let the peers compile in N processes (by default as many as fit), and measure nothing",
    )


def prepare(cases: Sequence[Case], peers: Sequence[str], workers: int, *, backward: bool) -> None:
    """Let each of these peers compile each of the cases that it takes; print a line for each.

    Args:
        cases: to compile for.
        peers: by name; what they lack leaves them out.
        workers: how many processes; 0: as many as there are cores and GPU memory for.
        backward: the backward pass too.
    """

    def place(item: tuple[Case, str]) -> str:
        case, peer = item
        return f"{case.mask} S={length_name(case.seqlen)} D={case.head_dim} {peer}"

    compile_apart(partial(compile_one, backward=backward), items_of(cases, peers), place, workers)


def compile_apart(
    act: Callable[[Any], None], items: Sequence[Any], name: Callable[[Any], str], workers: int
) -> None:
    """Call ``act`` with each item in so many processes (0: as many as there is room for); print a line each.

    Args:
        act: compiles; what is given to another process must be importable there.
        items: what to compile.
        name: what to print of an item.
        workers: how many processes.
    """
    start = time.monotonic()
    workers = workers or default_workers()
    print(f"{len(items)} to compile in {workers} processes", flush=True)
    for item, seconds, reason in apart(act, items, workers):
        print(f"{name(item)}: {reason or 'ready'} after {seconds:.0f} s", flush=True)
    print(f"took {time.monotonic() - start:.0f} s", flush=True)


def items_of(cases: Sequence[Case], peers: Sequence[str]) -> list[tuple[Case, str]]:
    """What there is to compile; one rule alone, causal_blockwise, knows what a seed changes."""
    from implementations import PEERS

    items: dict[tuple[str, Case | str], tuple[Case, str]] = {}
    for peer in COMPILED:
        if peer in peers and PEERS[peer].missing() is None:
            for case in cases:
                if case.mask in PEERS[peer].masks:
                    alike = case if case.mask == "causal_blockwise" else replace(case, seed=0)
                    items.setdefault((peer, case.mask if peer in FLASHINFER else alike), (case, peer))
    return [*items.values()]


def compile_one(item: tuple[Case, str], *, backward: bool) -> None:
    """Make one peer of one case ready, and forget it."""
    import torch
    from implementations import PEERS, Data

    case, peer = item
    try:
        PEERS[peer].job(case, Data(case, shared=True), backward=backward)
        torch.cuda.synchronize()
    finally:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def default_workers() -> int:
    """As many processes as there are cores and GPU memory for."""
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory
    return max(1, min(len(os.sched_getaffinity(0)), memory // MEMORY_PER_WORKER))
