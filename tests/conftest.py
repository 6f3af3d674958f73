"""Shared fixtures and settings of the test run."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

_SEED = pytest.StashKey[int]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    """Whether the driver knows a device: the kernels' own tests reach it without Paddle."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The test's seed: from its name, or FLASHMASK_TEST_SEED; printed when the test fails."""
    value = int(os.environ.get("FLASHMASK_TEST_SEED", zlib.crc32(request.node.nodeid.encode())))
    request.node.stash[_SEED] = value
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A generator for the test's random data."""
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def library() -> Path:
    """The operators' own library, which has the C interface too, where torch is."""
    pytest.importorskip("torch")
    pytest.importorskip("paddle")  # what it is linked to
    path = Path(__file__).parents[1] / "paddle_flashmask" / "_C.so"
    if not path.exists():
        pytest.skip("the operators are not built")
    return path


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and _SEED in item.stash:
        report.sections.append(("seed", f"FLASHMASK_TEST_SEED={item.stash[_SEED]}"))
    return report
