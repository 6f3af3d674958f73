"""Which row tiles a column tile visits: csrc/common/row_runs.cuh, compiled for the host, and all columns."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
INT32 = np.iinfo(np.int32)
MOST = 100  # rows, and a little beyond


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("row_runs") / "row_runs.so"
    command = [
        *(os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-shared", "-fPIC"),
        *(f"-I{ROOT / folder}" for folder in ("tests/host", "csrc", "csrc/include")),
        *(str(ROOT / "tests/host/row_runs.cc"), "-o", str(library)),
    ]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


interval = st.tuples(st.integers(-5, MOST + 5), st.integers(-5, MOST + 5))


@st.composite
def slots(draw: st.DrawFn) -> np.ndarray:
    """Intervals of masked rows, int64 [slots, columns, 2]: up to two of any kind, and perhaps causality's."""
    columns = draw(st.integers(1, 4))
    given_slots = draw(st.lists(st.lists(interval, min_size=columns, max_size=columns), max_size=2))
    if not given_slots or draw(st.booleans()):
        first = draw(st.integers(-MOST, MOST))
        given_slots.append([(INT32.min, first + column) for column in range(columns)])
    return np.array(given_slots, np.int64)


@settings(max_examples=2000)
@given(
    made=slots(),
    seqlen_q=st.integers(1, MOST),
    block_m=st.sampled_from([1, 7, 16, 64]),
    begin=st.integers(0, MOST - 1),
)
def test_runs_are_what_the_columns_say(
    binary: ctypes.CDLL, made: np.ndarray, seqlen_q: int, block_m: int, begin: int
) -> None:
    start, end = np.maximum(made[..., 0], 0), np.minimum(made[..., 1], seqlen_q)
    empty = start >= end
    start[empty], end[empty] = INT32.max, INT32.min  # as the pre-pass writes them
    extremes = np.stack([start.min(1), start.max(1), end.min(1), end.max(1)], axis=1).astype(np.int32)
    tiles = -(-seqlen_q // block_m)
    begin %= tiles
    visited, by_tile = np.zeros((2, tiles), np.uint8)
    touched, touched_by_tile = np.zeros((2, tiles), np.uint32)
    walked = np.zeros(2 * tiles, np.int32)  # room for each twice
    count, runs, last_begin = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (visited, touched, by_tile, touched_by_tile, walked)]
    walked_count = binary.walk_rows(
        ctypes.c_void_p(extremes.ctypes.data),
        *(len(made), seqlen_q, block_m, begin),
        *pointers,
        *(ctypes.byref(count), ctypes.byref(runs), ctypes.byref(last_begin)),
    )

    expected = np.ones(tiles, np.uint8)
    for tile in range(tiles):
        first, last = tile * block_m, min(seqlen_q, (tile + 1) * block_m)
        hides = (start <= first) & (end >= last)  # one interval all of the tile's rows
        expected[tile] = not hides.all(1).any()
    np.testing.assert_array_equal(visited, expected)
    np.testing.assert_array_equal(by_tile, expected)
    np.testing.assert_array_equal(touched[expected == 1], touched_by_tile[expected == 1])
    assert count.value == expected.sum()
    begins = np.flatnonzero(np.diff(expected.astype(int), prepend=0) == 1)
    assert runs.value == len(begins) <= 3
    assert last_begin.value == (begins[-1] if len(begins) else 0)
    order = np.roll(np.arange(tiles), -begin)
    np.testing.assert_array_equal(walked[:walked_count], order[expected[order] == 1])
