"""The kernels under test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from device_kernels import Kernels


@pytest.fixture(scope="session", params=["cuda", "sm80"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The best kernels for the device, and the portable ones; an error when there is no library."""
    from device_kernels import Kernels
    from kernel_calls import CudaLibrary, library_path

    return Kernels(CudaLibrary(library_path(), request.param))
