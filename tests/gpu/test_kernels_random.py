"""The kernels against the float64 oracle: the registry's cases, and hundreds of random ones.

A failure prints the case and its seed; FLASHMASK_TEST_SEED with the test's own id runs it again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from device_kernels import GRADIENTS, LAYOUTS, Kernels
from device_problems import Problem, assert_matches, make_problem, run
from helpers import CASES, Case, make_inputs
from kernel_calls import Options

from paddle_flashmask.masks import ColumnMask, registry

pytestmark = pytest.mark.gpu

INT32 = np.iinfo(np.int32)
FORMS = [(False, 0), (True, 0), (True, 1), (True, 2), (True, 4), (False, 2), (False, 4)]
HEAD_DIMS = [
    *((d, d) for d in range(8, 257, 8)),
    *[(192, 128)] * 4,
    *[(64, 32), (32, 64), (72, 104), (104, 72), (128, 192), (8, 256), (256, 8), (40, 24)],
]
RANDOM_CASES = 300
LONG_CASES = 12


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.head_dim % 8 == 0])
def test_registry_cases(kernels: Kernels, name: str, dtype: str) -> None:
    case = replace(CASES[name], dtype=dtype)
    problem = problem_of(case)
    assert_matches(run(kernels, problem), problem, name)


@pytest.mark.parametrize("index", range(RANDOM_CASES))
def test_random_cases(kernels: Kernels, rng: np.random.Generator, index: int) -> None:
    check_random_case(kernels, rng, max_length=2000, max_elements=1_500_000)


@pytest.mark.parametrize("index", range(LONG_CASES))
def test_long_random_cases(kernels: Kernels, rng: np.random.Generator, index: int) -> None:
    check_random_case(kernels, rng, min_length=4000, max_length=16384, max_elements=2_000_000)


@pytest.mark.parametrize(("causal", "bounds"), [(False, 2), (False, 4), (True, 2), (True, 4)])
def test_more_column_tiles_than_one_scan_takes(
    kernels: Kernels, rng: np.random.Generator, causal: bool, bounds: int
) -> None:
    """The portable forward's scan takes 2048 column tiles at a time, of 64 columns at this head dim."""
    seqlen_q, seqlen_k = 150, 2 * 2048 * 64 + 5000
    indices = draw_indices(rng, (1, 1, seqlen_k, bounds), seqlen_q)
    problem = make_problem(
        int(rng.integers(2**31)),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=1,
        head_dim=32,
        options=Options(indices=torch.from_numpy(indices).cuda(), causal=causal),
    )
    assert_matches(run(kernels, problem), problem, f"causal={causal}, C={bounds}")


@pytest.mark.parametrize("visit", ["skip", "all"])
@pytest.mark.parametrize("causal", [False, True])
def test_more_column_tiles_than_one_scan_takes_without_indices(
    kernels: Kernels, seed: int, causal: bool, visit: str
) -> None:
    """Then the first column tile is loaded before the scan."""
    options = Options(causal=causal, visit=visit)
    problem = make_problem(seed, seqlen_q=150, seqlen_k=270_000, heads_q=1, head_dim=32, options=options)
    assert_matches(run(kernels, problem), problem, f"causal={causal}, {visit}")


def problem_of(case: Case) -> Problem:
    """A case of the registry on the device."""
    x = make_inputs(case)
    dtype = getattr(torch, case.dtype)
    q, k, v, dout = (torch.from_numpy(a).to("cuda", dtype) for a in (x.q, x.k, x.v, x.dout))
    options = Options(
        indices=None if x.indices is None else torch.from_numpy(x.indices).cuda(),
        causal=x.causal,
        softmax_scale=case.softmax_scale,
        dropout_p=case.dropout_p,
        seed_offset=torch.tensor([case.dropout_seed, case.dropout_offset]).cuda(),
    )
    return Problem(q, k, v, dout, torch.from_numpy(x.dlse).cuda(), options)


def check_random_case(
    kernels: Kernels, rng: np.random.Generator, *, min_length: int = 1, max_length: int, max_elements: int
) -> None:
    shape = draw_shape(rng, min_length, max_length, max_elements)
    options, mask_name = draw_options(rng, shape)
    how: dict[str, Any] = {
        "dtype": str(rng.choice(["bfloat16", "float16"])),
        "gain": float(rng.choice([1.0, 1.0, 1.0, 3.0])),
        "dlse": bool(rng.random() < 0.5),
        "layouts": {name: str(rng.choice(LAYOUTS)) for name in ("q", "k", "v", "dout")},
    }
    every = rng.random() < 0.7
    results = {
        "wanted": GRADIENTS if every else tuple(n for n in GRADIENTS if rng.random() < 0.5),
        "layout": str(rng.choice(LAYOUTS)),
    }
    problem = make_problem(int(rng.integers(2**31)), options=options, **shape, **how)
    scalars = {key: getattr(options, key) for key in ("softmax_scale", "dropout_p", "deterministic")}
    name = f"{shape | how | results | scalars}, mask {mask_name}"
    assert_matches(run(kernels, problem, **results), problem, name)


def draw_length(rng: np.random.Generator, low: int, high: int) -> int:
    """Short lengths as often as long ones, and often one more or less than a tile's multiple."""
    length = int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))
    if rng.random() < 0.3:
        length = length // 64 * 64 + int(rng.integers(-1, 2))
    return min(max(length, low), high)


def draw_shape(
    rng: np.random.Generator, min_length: int, max_length: int, max_elements: int
) -> dict[str, int]:
    seqlen_q = draw_length(rng, min_length, max_length)
    seqlen_k = seqlen_q if rng.random() < 0.5 else draw_length(rng, min_length, max_length)
    head_dim, head_dim_v = HEAD_DIMS[rng.integers(len(HEAD_DIMS))]
    batch, heads_k, group = (int(rng.integers(1, most + 1)) for most in (3, 3, 4))
    per_head = max(seqlen_q, seqlen_k) * max(head_dim, head_dim_v)
    while batch * heads_k * group * per_head > max_elements and (batch, heads_k, group) != (1, 1, 1):
        batch, heads_k, group = max(batch - 1, 1), max(heads_k - 1, 1), max(group - 1, 1)
    return {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "heads_q": heads_k * group,
        "heads_k": heads_k,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
    }


def draw_options(rng: np.random.Generator, shape: dict[str, int]) -> tuple[Options, str]:
    """Options, and in words what its mask is."""
    planes = (
        int(rng.choice([1, shape["batch"]])),
        int(rng.choice([1, shape["heads_k"], shape["heads_q"]])),
    )
    if shape["seqlen_q"] == shape["seqlen_k"] and rng.random() < 0.4:
        mask_name = str(rng.choice(registry.names()))
        indices, causal = named_indices(rng, mask_name, shape["seqlen_q"], planes)
    else:
        causal, bounds = FORMS[rng.integers(len(FORMS))]
        mask_name = f"random causal={causal} C={bounds}"
        indices = (
            draw_indices(rng, (*planes, shape["seqlen_k"], bounds), shape["seqlen_q"]) if bounds else None
        )
    scales = [None, None, rng.uniform(0.02, 0.3), -rng.uniform(0.02, 0.3), 0.0]
    elements = shape["batch"] * shape["heads_q"] * shape["seqlen_q"] * shape["seqlen_k"]
    dropped = elements < 4_000_000 and rng.random() < 0.25  # its oracle runs on the CPU
    options = Options(
        indices=None if indices is None else torch.from_numpy(indices).cuda(),
        causal=causal,
        softmax_scale=scales[rng.integers(len(scales))],
        dropout_p=float(rng.uniform(0.05, 0.6)) if dropped else 0.0,
        seed_offset=torch.from_numpy(rng.integers(-(2**63), 2**63, 2)).cuda(),
        deterministic=bool(rng.random() < 0.3),
    )
    return options, f"{mask_name} {planes}"


def named_indices(
    rng: np.random.Generator, name: str, seqlen: int, planes: tuple[int, int]
) -> tuple[np.ndarray | None, bool]:
    """Indices of a mask of the registry, drawn anew for each sample and head."""
    batch, heads = planes
    samples = [
        ColumnMask.stack_heads([registry.make(name, seqlen, int(rng.integers(2**31))) for _ in range(heads)])
        for _ in range(batch)
    ]
    return ColumnMask.stack_batch(samples).to_startend_row_indices()


def draw_indices(rng: np.random.Generator, shape: tuple[int, int, int, int], seqlen_q: int) -> np.ndarray:
    """Any int32 values; each bound in one of four ways, so that whole tiles are often masked."""
    planes, bounds = shape[:3], shape[3]

    def bound() -> np.ndarray:
        style = rng.choice(["anything", "runs", "ramp", "extremes"])
        values = rng.integers(-5, seqlen_q + 6, planes)
        if style == "runs":
            starts = np.where(rng.random(planes) < rng.choice([0.003, 0.03]), np.arange(planes[2]), 0)
            values = np.take_along_axis(values, np.maximum.accumulate(starts, axis=2), axis=2)
        elif style == "ramp":
            values = np.arange(planes[2]) + rng.integers(-seqlen_q, seqlen_q + 1, (*planes[:2], 1))
        elif style == "extremes":
            extremes = rng.choice([INT32.min, INT32.max, 0, -1, seqlen_q, seqlen_q + 1], planes)
            values = np.where(rng.random(planes) < 0.3, extremes, values)
        return values.astype(np.int32)

    return np.ascontiguousarray(np.stack([bound() for _ in range(bounds)], axis=-1))
