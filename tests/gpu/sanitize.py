"""A few small problems of every kind for compute-sanitizer, by the CUDA driver alone: no torch to wait for.

    compute-sanitizer --tool memcheck --padding 256 --error-exitcode 1 python tests/gpu/sanitize.py
    compute-sanitizer --tool synccheck --error-exitcode 1 python tests/gpu/sanitize.py

Every tensor is an allocation of exactly its size, so that memcheck sees the first byte past it. Results are
held against the float64 oracle as everywhere. The library is that of library_path() in kernel_calls.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import ckernels
from helpers import Case, Results, assert_results_match, make_inputs
from kernel_calls import (
    CudaLibrary,
    KernelError,
    Options,
    backward_params,
    classify_params,
    forward_params,
    library_path,
)


def case(mask: str, dtype: str, head_dim: int, head_dim_v: int, **others: Any) -> Case:
    """A problem of two samples and lengths that no tile divides."""
    name = f"{mask} {dtype} {head_dim} {head_dim_v} {others}"
    shape = {"batch": 2, "seqlen_q": 203, "seqlen_k": 171, "heads_q": 4, "heads_k": 2}
    return Case(name, mask, dtype, head_dim=head_dim, head_dim_v=head_dim_v, **(shape | others))


# Every form of the mask, every kernel's head dims; each runs deterministic and not.
CASES = [
    case("full", "bfloat16", 64, 64),
    case("causal", "float16", 128, 128),
    case("random", "bfloat16", 96, 96, causal=True, bounds=1),
    case("random", "float16", 192, 128, causal=True, bounds=2, mask_heads=2),
    case("random", "bfloat16", 64, 64, bounds=2, mask_heads=4, mask_batch=2),
    case("random", "float16", 128, 128, bounds=4, mask_batch=2),
    case("random", "bfloat16", 32, 24, bounds=4),
    case("random", "bfloat16", 192, 192, bounds=2),
    case("random", "float16", 200, 256, causal=True, bounds=1),
    case("causal", "bfloat16", 64, 64, dropout_p=0.2),
    case("random", "float16", 72, 88, bounds=2, dropout_p=0.2),
    case("random", "bfloat16", 128, 128, bounds=4, dropout_p=0.2),
    case("full", "bfloat16", 192, 192, dropout_p=0.2),
    # More column tiles than multiprocessors, so that a block takes several; dQ cleared, and not.
    case("random", "bfloat16", 128, 128, bounds=4, seqlen_q=70, seqlen_k=2600, heads_q=8, heads_k=4),
    case("random", "bfloat16", 64, 64, bounds=2, seqlen_q=70, seqlen_k=2600, heads_q=4, heads_k=4),
    case("full", "float16", 128, 128, seqlen_q=150, seqlen_k=1400, heads_q=8, heads_k=8),
    # Few query rows: heads share row tiles, keys are split.
    case("causal", "bfloat16", 128, 128, seqlen_q=5, seqlen_k=1100),
    case("full", "float16", 64, 64, seqlen_q=1, seqlen_k=1500, heads_q=6),
    case("causal", "bfloat16", 128, 104, seqlen_q=4, seqlen_k=3000),
    case("causal", "bfloat16", 64, 64, seqlen_q=30, seqlen_k=1500, heads_q=6),
    case("causal", "bfloat16", 128, 128, seqlen_q=11, seqlen_k=1100),
    case("causal", "float16", 64, 64, seqlen_q=20, seqlen_k=1500, heads_q=6),
    case("random", "bfloat16", 256, 256, bounds=4, seqlen_q=70, seqlen_k=900),
    case("random", "float16", 192, 128, causal=True, bounds=1, mask_heads=4, seqlen_q=3, seqlen_k=1300),
    case("random", "bfloat16", 192, 192, bounds=2, seqlen_q=9, seqlen_k=60),
]


class Driver:
    """What this needs of libcuda, in the primary context of device 0, where the kernels run too."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            raise RuntimeError(f"{name}: CUDA driver error {error}")


class DeviceArray:
    """A contiguous copy of an array on the device, in an allocation of its size; for kernel_calls."""

    def __init__(self, driver: Driver, values: np.ndarray, dtype: str):
        self._driver, self._host, self._pointer = driver, np.ascontiguousarray(values), ctypes.c_uint64()
        self.shape, self.dtype = values.shape, dtype
        driver.call("cuMemAlloc_v2", ctypes.byref(self._pointer), self._size)
        driver.call("cuMemcpyHtoD_v2", self._pointer, self._host_pointer, self._size)

    def data_ptr(self) -> int:
        return self._pointer.value

    def stride(self, dim: int) -> int:
        return self._host.strides[dim] // self._host.itemsize

    def read(self) -> np.ndarray:
        """What the device holds once all launched work is done."""
        self._driver.call("cuMemcpyDtoH_v2", self._host_pointer, self._pointer, self._size)
        return ckernels.bfloat16_values(self._host) if self.dtype == "bfloat16" else self._host

    def free(self) -> None:
        self._driver.call("cuMemFree_v2", self._pointer)

    @property
    def _host_pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._host.ctypes.data)

    @property
    def _size(self) -> ctypes.c_size_t:
        return ctypes.c_size_t(self._host.nbytes)


class Runner:
    """Runs cases; what they allocate is freed after each."""

    def __init__(self, library: CudaLibrary, driver: Driver, *, complete: bool):
        """``complete``: every case must have its kernels, but for the test modes of free order."""
        self._library, self._driver, self._complete = library, driver, complete
        self._arrays: list[DeviceArray] = []

    def run(self, case: Case) -> int:
        """Both passes, deterministic and not, then in the test modes, and classify; return how many ran."""
        passes = 0
        x = make_inputs(case)
        q, k, v, dout = (self._put(values, case.dtype) for values in (x.q, x.k, x.v, x.dout))
        dlse = self._put(x.dlse, "float32")
        indices = None if x.indices is None else self._put(x.indices, "int32")
        dense = self._put(x.visible, "uint8")
        seed_offset = self._put(np.array([case.dropout_seed, case.dropout_offset]), "int64")
        for visit in ("skip", "all", "dense") if case.dropout_p == 0 else ("skip", "all"):
            for deterministic in (False, True) if visit == "skip" or not self._complete else (True,):
                options = Options(
                    indices=indices,
                    dense=dense if visit == "dense" else None,
                    causal=x.causal,
                    dropout_p=case.dropout_p,
                    seed_offset=seed_offset,
                    visit=visit,
                    deterministic=deterministic,
                )
                out, lse = self._poison(x.dout.shape, case.dtype), self._poison(x.dlse.shape, "float32")
                if not self._launch(forward_params(q, k, v, out, lse, options, stream=0)):
                    continue
                gradients = {
                    name: self._poison(like.shape, case.dtype)
                    for name, like in (("dq", q), ("dk", k), ("dv", v))
                }
                backward = backward_params(q, k, v, out, lse, dout, dlse, gradients, options, stream=0)
                made = gradients.values() if self._launch(backward) else ()
                results = [array.read() for array in (out, lse, *made)]
                passes += 2 if made else 1
                assert_results_match(Results(*results, *[None] * (5 - len(results))), case)
        self._classify(
            classify_params(case.seqlen_q, case.seqlen_k, Options(indices=indices, causal=x.causal), stream=0)
        )
        for array in self._arrays:
            array.free()
        self._arrays.clear()
        return passes

    def _launch(self, params: Any) -> bool:
        """Launch what the family has; return whether it has it."""
        try:
            size = self._library.workspace_bytes(params)
        except KernelError:
            if self._complete:
                raise
            return False
        params.workspace = self._poison((max(size, 1),), "uint8").data_ptr()
        self._library.launch(params)
        return True

    def _classify(self, params: Any) -> None:
        block_m, block_n = 64, 32
        size = self._library.classify_workspace_bytes(params, block_n)
        params.workspace = self._poison((size,), "uint8").data_ptr()
        tiles = (-(-params.shape.seqlen_q // block_m), -(-params.shape.seqlen_k // block_n))
        for backward in (False, True):
            kinds = self._poison((params.mask.batch, params.mask.heads, *tiles), "uint8")
            self._library.classify(params, block_m, block_n, backward, kinds)
            assert (kinds.read() <= 2).all(), "a tile was not classified"

    def _put(self, values: np.ndarray, dtype: str) -> DeviceArray:
        stored = ckernels.bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)
        self._arrays.append(DeviceArray(self._driver, stored, dtype))
        return self._arrays[-1]

    def _poison(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """Bytes of 0xFF: NaN in every floating-point type."""
        stored = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        values = np.full((*shape[:-1], shape[-1] * stored.itemsize), 0xFF, np.uint8).view(stored)
        self._arrays.append(DeviceArray(self._driver, values, dtype))
        return self._arrays[-1]


def main() -> None:
    """Run every case, by the best kernels for the device, the portable ones and what Hopper's own can."""
    driver = Driver()
    passes = 0
    for family in ("cuda", "sm80", "sm90"):
        runner = Runner(CudaLibrary(library_path(), family), driver, complete=family != "sm90")
        for case in CASES:
            ran = runner.run(case)
            passes += ran
            print(f"{family}: {ran} passes of {case}", flush=True)
    print(f"{passes} passes of {len(CASES)} cases are right")


if __name__ == "__main__":
    main()
