"""The kernels under test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from device_kernels import Kernels


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    """Give back what torch keeps after a large test: other processes test on the same GPU."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 4 << 30:
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", params=["cuda", "sm80", "sm90"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The best kernels for the device, the portable ones, Hopper's; an error when there is no library."""
    from device_kernels import HopperKernels, Kernels
    from kernel_calls import CudaLibrary, library_path

    library = CudaLibrary(library_path(), request.param)
    return HopperKernels(library) if request.param == "sm90" else Kernels(library)
