"""The kernels under test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from device_kernels import Kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The library's kernels; an error when it has not been built."""
    from device_kernels import Kernels
    from kernel_calls import CudaLibrary, library_path

    return Kernels(CudaLibrary(library_path()))
