"""Benchmark decoding and chunked prefill: few query rows against many keys, in turns with torch's attentions.

python scripts/build_kernels.py --cuda --targets 90 --subset benchmark --output build
python scripts/bench/decode.py

32 query and 8 key heads, bfloat16, no mask (causality hides next to nothing here), a cold L2. Prints
milliseconds, and of ours the rate at which K and V are read; a copy of K and V, in the same turns, says what
the memory gives. Needs torch with CUDA.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from kernel_calls import CudaLibrary, Options, forward_params, library_path
from measure import Clock, card_and_driver
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_attention import give_workspace

HEADS, KEY_HEADS = 32, 8
BACKENDS = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
# batch, query rows, keys
SHAPES = [
    *((1, 1, seqlen_k) for seqlen_k in (1024, 4096, 16_384, 131_072)),
    *((1, seqlen_q, 16_384) for seqlen_q in (7, 16, 64, 128, 300, 1024)),
    *((batch, 1, 16_384) for batch in (4, 20, 64)),
]
TOLERANCE = 0.03  # of the largest value


def main() -> None:
    """Measure every shape and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=0.05, help="per job and shape")
    arguments = parser.parse_args()
    libraries = {name: CudaLibrary(library_path(), name) for name in ("cuda", "sm80")}
    clock = Clock()
    print(*card_and_driver(), f"D = {arguments.head_dim}")
    for batch, seqlen_q, seqlen_k in SHAPES:
        q = _normal(batch, seqlen_q, HEADS, arguments.head_dim)
        k, v = (_normal(batch, seqlen_k, KEY_HEADS, arguments.head_dim) for _ in range(2))
        jobs: dict[str, Callable[[], Any]] = {"copy": torch.stack([k, v]).clone}
        jobs |= {name: _own_job(library, q, k, v) for name, library in libraries.items()}
        jobs |= {name: _torch_job(backend, q, k, v) for name, backend in BACKENDS.items()}
        jobs = _checked(jobs)
        timings, _ = clock.take_turns(jobs, arguments.seconds)
        medians = {name: timing.median for name, timing in timings.items()}
        rate = (k.nbytes + v.nbytes) / medians["cuda"] / 1e9
        copied = 2 * (k.nbytes + v.nbytes) / medians["copy"] / 1e9
        text = "  ".join(f"{name} {medians[name]:.4f}" for name in jobs if name != "copy")
        print(f"B {batch:3} Sq {seqlen_q:4} Sk {seqlen_k:6}: {text} ms; {rate:.2f} TB/s of {copied:.2f}")


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _own_job(
    library: CudaLibrary, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], torch.Tensor]:
    out = torch.full_like(q, torch.nan)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), device=q.device)
    params = forward_params(q, k, v, out, lse, Options(), torch.cuda.current_stream().cuda_stream)
    workspace = give_workspace(library, params, q.device)

    def run(_kept: tuple[torch.Tensor, ...] = (lse, workspace)) -> torch.Tensor:
        library.launch(params)
        return out

    return run


def _torch_job(
    backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], torch.Tensor]:
    return partial(_attend, backend, *(x.transpose(1, 2) for x in (q, k, v)))


def _attend(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(backend):
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return attended.transpose(1, 2)


def _checked(jobs: dict[str, Callable[[], torch.Tensor]]) -> dict[str, Callable[[], torch.Tensor]]:
    """The jobs less the backends that do not take this shape; each must give FA2's result, up to rounding."""
    expected = jobs["FA2"]().float()
    possible = {"copy": jobs["copy"]}
    for name in jobs.keys() - {"copy"}:
        try:
            result = jobs[name]()
        except RuntimeError:
            if name not in BACKENDS:
                raise
            continue
        error = float((result.float() - expected).abs().max())
        if not error <= TOLERANCE * float(expected.abs().max()):
            raise RuntimeError(f"{name}: off by {error:.2g}")
        possible[name] = jobs[name]
    return {name: possible[name] for name in jobs if name in possible}


if __name__ == "__main__":
    main()
