"""The CPU kernel alone, through its C interface: no Paddle here."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import CASES, Case, Results, assert_results_match, dense_from_indices, make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_flashmask.reference import attention_reference, attention_reference_backward, dropout_keep_mask

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import build_kernels
import ckernels
from ckernels import Kernels, Options

INT32 = np.iinfo(np.int32)
GRADIENTS = ("dq", "dk", "dv")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_kernels.build_cpu(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def kernels(library: Path) -> Kernels:
    return Kernels(library)


def to_storage(values: np.ndarray, dtype: str) -> np.ndarray:
    return ckernels.bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)


def from_storage(values: np.ndarray, dtype: str) -> np.ndarray:
    return ckernels.bfloat16_values(values) if dtype == "bfloat16" else values


def poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return to_storage(np.full(shape, np.nan), dtype)


def options_of(case: Case, **changes: object) -> Options:
    x = make_inputs(case)
    options = Options(
        indices=x.indices,
        causal=x.causal,
        softmax_scale=case.softmax_scale,
        dropout_p=case.dropout_p,
        seed_offset=(case.dropout_seed, case.dropout_offset),
        dtype=case.dtype,
    )
    return replace(options, **changes)


def run(kernels: Kernels, case: Case, **changes: object) -> Results:
    """Runs both passes on a case's inputs, into poisoned outputs; results stay in their storage type."""
    x = make_inputs(case)
    options = options_of(case, **changes)
    if options.visit == "dense":
        options = replace(options, dense=np.ascontiguousarray(x.visible))
    q, k, v, dout = (to_storage(array, case.dtype) for array in (x.q, x.k, x.v, x.dout))
    out, lse = kernels.forward(
        q,
        k,
        v,
        options,
        out=poisoned(dout.shape, case.dtype),
        lse=np.full(x.dlse.shape, np.nan, case.lse_dtype),
    )
    into = {name: poisoned(array.shape, case.dtype) for name, array in zip(GRADIENTS, (q, k, v), strict=True)}
    dlse = x.dlse.astype(case.lse_dtype)
    kernels.backward(q, k, v, out, lse, dout, options, dlse=dlse, into=into)
    return Results(out, lse, **into)


def assert_same_bits(actual: Results, expected: Results) -> None:
    """Equal bit by bit, up to the sign of zero; NaN nowhere."""
    for name, a, b in zip(Results._fields, actual, expected, strict=True):
        if a.dtype == np.uint16:
            a, b = ckernels.bfloat16_values(a), ckernels.bfloat16_values(b)
        assert not np.isnan(a).any(), name
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_matches_the_reference(kernels: Kernels, case: Case) -> None:
    results = run(kernels, case)
    wide = Results(*(a if a is results.lse else from_storage(a, case.dtype) for a in results))
    assert_results_match(wide, case)


@pytest.mark.parametrize("visit", ["all", "dense"])
@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_skipping_changes_no_bit(kernels: Kernels, case: Case, visit: str) -> None:
    assert_same_bits(run(kernels, case, visit=visit), run(kernels, case))


@pytest.mark.parametrize(
    "case",
    [
        Case("threads_one_head", "causal_document", seqlen_q=1500, seqlen_k=1500, heads_q=1, heads_k=1),
        Case("threads_gqa", "random", batch=2, seqlen_q=700, seqlen_k=500, heads_q=4, mask_heads=2, bounds=4),
        Case("threads_half", "causal", dtype="bfloat16", seqlen_q=600, seqlen_k=900, head_dim=40),
        Case("threads_dropout", "full", seqlen_q=640, seqlen_k=640, dropout_p=0.1, dropout_seed=3),
    ],
    ids=str,
)
def test_results_do_not_depend_on_threads_or_repetition(kernels: Kernels, case: Case) -> None:
    alone = run(kernels, case, num_threads=1)
    for num_threads in (2, 3, 8, 0, 2, 2):
        assert_same_bits(run(kernels, case, num_threads=num_threads), alone)


THREAD_VARIABLES = ("OMP_NUM_THREADS", "FLASHMASK_NUM_THREADS")
PROCESSORS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("variables", "then", "expected"),
    [
        ({}, "", PROCESSORS),
        ({"OMP_NUM_THREADS": "1"}, "", 1),
        ({"OMP_NUM_THREADS": "3"}, "", 3),
        ({"OMP_NUM_THREADS": "3,2"}, "", 3),
        ({"OMP_NUM_THREADS": "0"}, "", PROCESSORS),
        ({"OMP_NUM_THREADS": "5", "FLASHMASK_NUM_THREADS": "2"}, "", 2),
        ({"FLASHMASK_NUM_THREADS": ""}, "", PROCESSORS),
        ({}, "os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])", 1),
        # Importing Paddle sets it to 1, whatever the user wants; what the process was started with is his.
        ({}, "os.environ['OMP_NUM_THREADS'] = '1'", PROCESSORS),
        ({"OMP_NUM_THREADS": "1"}, "os.environ['OMP_NUM_THREADS'] = '1'", 1),
        ({}, "os.environ['OMP_NUM_THREADS'] = '7'", 7),
        # A worker of a data loader may lower it for itself.
        ({"OMP_NUM_THREADS": "5"}, "os.environ['FLASHMASK_NUM_THREADS'] = '1'", 1),
        *(
            ({"FLASHMASK_NUM_THREADS": bad}, "", 0)
            for bad in ("x", "0", "-1", "1.5", "2 3", "4097", "9" * 30)
        ),
    ],
    ids=str,
)
def test_default_number_of_threads(
    library: Path, variables: dict[str, str], then: str, expected: int
) -> None:
    code = f"import ctypes, os; {then}\nprint(ctypes.CDLL({str(library)!r}).flashmask_cpu_threads())"
    environment = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == f"{expected}\n"


def test_a_wrong_number_of_threads_is_named(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMASK_NUM_THREADS", "many")
    ones = np.ones((1, 3, 1, 4), np.float32)
    with pytest.raises(
        ckernels.KernelError, match="FLASHMASK_NUM_THREADS: expected an integer from 1 to 4096, got many"
    ):
        kernels.forward(ones, ones, ones, Options())
    kernels.forward(ones, ones, ones, Options(num_threads=1))  # not asked


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str
) -> None:
    monkeypatch.setenv("FLASHMASK_CPU_ISA", isa)
    # Another file is another library to the loader: it chooses anew.
    kernels = Kernels(shutil.copy(library, tmp_path / "another.so"))
    if kernels.isa() != isa:
        pytest.skip(f"this machine has no {isa}")
    for name in (
        "float64",
        "bfloat16_gqa",
        "float16",
        "head_dim_72",
        "head_dim_40_24",
        "indices_4",
        "dropout",
    ):
        results = run(kernels, CASES[name])
        dtype = CASES[name].dtype
        wide = Results(*(a if a is results.lse else from_storage(a, dtype) for a in results))
        assert_results_match(wide, CASES[name])
        assert_same_bits(run(kernels, CASES[name], visit="dense"), results)
    assert_exp_is_accurate(kernels)


LENGTHS = st.sampled_from([1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 129, 200])


@given(data=st.data(), seqlen_q=LENGTHS, seqlen_k=LENGTHS, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_any_shape_and_any_indices(
    kernels: Kernels, data: st.DataObject, seqlen_q: int, seqlen_k: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    batch, heads_k, group = (data.draw(st.integers(1, n)) for n in (2, 2, 3))
    head_dim, head_dim_v = (data.draw(st.sampled_from([1, 3, 8, 16, 24, 33, 64])) for _ in range(2))
    heads_q = heads_k * group
    causal = data.draw(st.booleans())
    bounds = data.draw(st.sampled_from([0, 1, 2] if causal else [0, 2, 4]))
    indices = None
    if bounds:
        mask_shape = (
            data.draw(st.sampled_from([1, batch])),
            data.draw(st.sampled_from([1, heads_k, heads_q])),
        )
        low, high = data.draw(st.sampled_from([(0, seqlen_q), (-5, seqlen_q + 5), (INT32.min, INT32.max)]))
        indices = rng.integers(low, high, (*mask_shape, seqlen_k, bounds), np.int32, endpoint=True)
        if data.draw(st.booleans()):  # two runs of like columns, so that tiles and parts of them are skipped
            cut = data.draw(st.integers(0, seqlen_k - 1))
            indices[:, :, :cut] = indices[:, :, :1]
            indices[:, :, cut:] = indices[:, :, -1:]
    visible = dense_from_indices(indices, causal, seqlen_q, seqlen_k)
    dropout_p = data.draw(st.sampled_from([0.0, 0.3]))
    keep = dropout_keep_mask(seed, 5, batch, heads_q, seqlen_q, seqlen_k, dropout_p)

    q = rng.standard_normal((batch, seqlen_q, heads_q, head_dim))
    k = rng.standard_normal((batch, seqlen_k, heads_k, head_dim))
    v = rng.standard_normal((batch, seqlen_k, heads_k, head_dim_v))
    dout = rng.standard_normal((batch, seqlen_q, heads_q, head_dim_v))
    dlse = rng.standard_normal((batch, heads_q, seqlen_q))
    options = Options(indices=indices, causal=causal, dropout_p=dropout_p, seed_offset=(seed, 5))
    out, lse = kernels.forward(q, k, v, options)
    gradients = kernels.backward(q, k, v, out, lse, dout, options, dlse=dlse)

    dropout = {"dropout_keep": keep, "dropout_p": dropout_p}
    expected_out, expected_lse = attention_reference(q, k, v, visible, **dropout)
    expected = attention_reference_backward(q, k, v, visible, dout, dlse, **dropout)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)
    for name, values in zip(GRADIENTS, expected, strict=True):
        np.testing.assert_allclose(gradients[name], values, rtol=1e-11, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_strides_are_honoured_and_gaps_left_alone(
    kernels: Kernels, rng: np.random.Generator, dtype: str
) -> None:
    batch, seqlen, heads, dim = 2, 70, 2, 24

    def spread(values: np.ndarray) -> np.ndarray:
        """The values with gaps of 7 between elements' rows, heads first in memory."""
        home = np.full((batch, heads, seqlen + 1, dim + 7), 7, dtype)
        view = home[:, :, :seqlen, :dim].transpose(0, 2, 1, 3)
        view[:] = values
        return view

    def gaps_of(view: np.ndarray) -> np.ndarray:
        return view.base[:, :, seqlen:], view.base[:, :, :, dim:]

    dense = [rng.standard_normal((batch, seqlen, heads, dim)).astype(dtype) for _ in range(4)]
    options = Options(causal=True)
    out, lse = kernels.forward(*dense[:3], options)
    gradients = kernels.backward(*dense[:3], out, lse, dense[3], options)

    q, k, v, dout = map(spread, dense)
    strided_out, strided_lse = kernels.forward(q, k, v, options, out=spread(np.nan))
    into = {name: spread(np.nan) for name in GRADIENTS}
    kernels.backward(q, k, v, strided_out, strided_lse, dout, options, into=into)
    np.testing.assert_array_equal(strided_out, out)
    np.testing.assert_array_equal(strided_lse, lse)
    for name in GRADIENTS:
        np.testing.assert_array_equal(into[name], gradients[name], err_msg=name)
    for view in (strided_out, *into.values()):
        assert all((gap == 7).all() for gap in gaps_of(view))


@pytest.mark.parametrize("case_name", ["mqa", "head_dim_72", "bfloat16_gqa"])
@pytest.mark.parametrize("wanted", [("dq",), ("dk",), ("dv",), ("dq", "dv"), ("dk", "dv"), ()])
def test_only_wanted_gradients(kernels: Kernels, case_name: str, wanted: tuple[str, ...]) -> None:
    case = CASES[case_name]
    x = make_inputs(case)
    q, k, v, dout = (to_storage(array, case.dtype) for array in (x.q, x.k, x.v, x.dout))
    options = options_of(case)
    out, lse = kernels.forward(q, k, v, options)
    every = kernels.backward(q, k, v, out, lse, dout, options)
    some = kernels.backward(q, k, v, out, lse, dout, options, wanted=wanted)
    assert set(some) == set(wanted)
    for name in wanted:
        np.testing.assert_array_equal(some[name], every[name], err_msg=name)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences(kernels: Kernels, seqlen_q: int, seqlen_k: int) -> None:
    q, k = np.ones((2, seqlen_q, 2, 8), np.float32), np.ones((2, seqlen_k, 2, 8), np.float32)
    options = Options(indices=np.zeros((1, 1, seqlen_k, 1), np.int32), causal=True)
    out, lse = kernels.forward(q, k, k, options)
    gradients = kernels.backward(q, k, k, out, lse, out, options)
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("visit", ["skip", "all", "dense"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("arriving", [6e4, np.inf, np.nan])
def test_rows_that_see_nothing_are_exact_zeros(
    kernels: Kernels, rng: np.random.Generator, arriving: float, dtype: str, visit: str, dropout_p: float
) -> None:
    # Rows 64 to 127, a whole block, and some of their neighbours; for one of the two heads only the latter.
    rows, columns = 200, 150
    empty = np.zeros((1, 2, rows), bool)
    empty[:, 0, 40:131] = empty[:, 1, 70:90] = True
    indices = np.zeros((1, 2, columns, 4), np.int32)
    indices[:, 0, :, :2], indices[:, 1, :, :2] = (40, 131), (70, 90)
    indices[..., 2], indices[..., 3] = 150, np.linspace(150, 200, columns)
    options = Options(
        indices=indices,
        dense=dense_from_indices(indices, False, rows, columns),
        visit=visit,
        dtype=dtype,
        dropout_p=dropout_p,
    )
    q, k, v = (
        to_storage(rng.standard_normal((1, tokens, heads, 20)), dtype)
        for tokens, heads in ((rows, 2), (columns, 1), (columns, 1))
    )
    dout = rng.standard_normal(q.shape)
    dlse = rng.standard_normal(empty.shape).astype(ckernels.lse_dtype(dtype))
    out, lse = kernels.forward(q, k, v, options)
    empty_of_head = empty.transpose(0, 2, 1)
    assert (out[empty_of_head] == 0).all()
    np.testing.assert_array_equal(np.isneginf(lse), empty)

    def gradients(arriving: float) -> dict[str, np.ndarray]:
        """What comes out where this arrives for the empty rows: as -inf is constant, it must not count."""
        dlse[empty] = dout[empty_of_head] = arriving
        found = kernels.backward(q, k, v, out, lse, to_storage(dout, dtype), options, dlse=dlse)
        return {name: from_storage(values, dtype) for name, values in found.items()}

    expected = gradients(0.0)
    assert (expected["dq"][empty_of_head] == 0).all()
    for name, values in gradients(arriving).items():
        assert np.isfinite(values).all(), name
        np.testing.assert_array_equal(values, expected[name], err_msg=name)


@pytest.mark.parametrize("visit", ["skip", "all"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_rows_that_see_nothing_beside_keys_that_are_not_finite(
    kernels: Kernels, rng: np.random.Generator, dtype: str, visit: str
) -> None:
    indices = np.zeros((1, 1, 150, 2), np.int32)
    indices[...] = (40, 70)  # rows 40 to 69, from all columns
    indices = np.concatenate([indices, np.full_like(indices, 200)], axis=-1)
    options = Options(indices=indices, visit=visit, dtype=dtype)
    shapes = [(1, 200, 2, 20), (1, 150, 1, 20), (1, 150, 1, 20), (1, 200, 2, 20)]
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    v[:, 3], k[:, 5] = np.inf, np.nan  # other rows see them
    q, k, v, dout = (to_storage(values, dtype) for values in (q, k, v, dout))
    with np.errstate(all="ignore"):
        out, lse = kernels.forward(q, k, v, options)
        gradients = kernels.backward(q, k, v, out, lse, dout, options)
    assert (out[:, 40:70] == 0).all()
    assert np.isneginf(lse[..., 40:70]).all()
    assert (from_storage(gradients["dq"], dtype)[:, 40:70] == 0).all()


def test_first_visited_tile_masked(kernels: Kernels, rng: np.random.Generator) -> None:
    # In "all" mode the first two tiles of every row hold no visible key: the maximum must stay -inf.
    q, k, v = (rng.standard_normal((1, 192, 1, 8)) for _ in range(3))
    indices = np.full((1, 1, 192, 2), 192, np.int32)
    indices[..., 1] = np.where(np.arange(192) < 128, 192, 0)
    visible = dense_from_indices(indices, False, 192, 192)
    out, lse = kernels.forward(q, k, v, Options(indices=indices, visit="all"))
    expected_out, expected_lse = attention_reference(q, k, v, visible)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


def test_large_scores_do_not_overflow(kernels: Kernels, rng: np.random.Generator) -> None:
    q, k, v, dout = (1e4 * rng.standard_normal((1, 100, 1, 16)).astype(np.float32) for _ in range(4))
    out, lse = kernels.forward(q, k, v, Options(causal=True))
    gradients = kernels.backward(q, k, v, out, lse, dout, Options(causal=True))
    for values in (out, lse, *gradients.values()):
        assert np.isfinite(values).all()
    expected, _ = attention_reference(q, k, v, np.tril(np.ones((100, 100), bool)))
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1)


def test_what_skipped_tiles_hold_does_not_matter(kernels: Kernels, rng: np.random.Generator) -> None:
    # Documents of whole tiles: rows of the first never meet the second's keys, NaN or not. (A masked element
    # within a visited tile does enter products, as 0 * k: finite values are expected there.)
    q, k, v, dout = (rng.standard_normal((1, 256, 2, 16)).astype(np.float32) for _ in range(4))
    indices = np.where(np.arange(256) < 128, 128, 256).astype(np.int32).reshape(1, 1, 256, 1)
    options = Options(indices=indices, causal=True)
    out, lse = kernels.forward(q, k, v, options)
    gradients = kernels.backward(q, k, v, out, lse, dout, options)
    for array in (q, k, v, dout):
        array[:, 128:] = np.nan
    poisoned_out, poisoned_lse = kernels.forward(q, k, v, options)
    after = kernels.backward(q, k, v, poisoned_out, poisoned_lse, dout, options)
    np.testing.assert_array_equal(poisoned_out[:, :128], out[:, :128])
    np.testing.assert_array_equal(poisoned_lse[..., :128], lse[..., :128])
    for name in GRADIENTS:
        np.testing.assert_array_equal(after[name][:, :128], gradients[name][:, :128], err_msg=name)


def test_gradients_match_finite_differences(kernels: Kernels, rng: np.random.Generator) -> None:
    shapes = {"q": (1, 21, 2, 5), "k": (1, 19, 1, 5), "v": (1, 19, 1, 3)}
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    options = Options(
        indices=rng.integers(0, 21, (1, 2, 19, 4), np.int32), dropout_p=0.25, seed_offset=(1, 2)
    )
    dout, dlse = rng.standard_normal((1, 21, 2, 3)), rng.standard_normal((1, 2, 21))

    def loss(arrays: dict[str, np.ndarray]) -> float:
        out, lse = kernels.forward(**arrays, options=options)
        return (out * dout).sum() + (np.where(np.isneginf(lse), 0, lse) * dlse).sum()

    out, lse = kernels.forward(**inputs, options=options)
    gradients = kernels.backward(*inputs.values(), out, lse, dout, options, dlse=dlse)
    step = 1e-5
    for name in inputs:
        direction = rng.standard_normal(shapes[name])
        ahead, behind = (loss({**inputs, name: inputs[name] + s * direction}) for s in (step, -step))
        slope = (gradients[f"d{name}"] * direction).sum()
        assert (ahead - behind) / (2 * step) == pytest.approx(slope, rel=1e-7), name


def assert_exp_is_accurate(kernels: Kernels) -> None:
    # Subnormal results at the lower end, overflow at the upper; wider is the type the truth is held in.
    for dtype, wider, low, high in (
        (np.float32, np.float64, -104, 89),
        (np.float64, np.longdouble, -746, 710),
    ):
        x = np.linspace(low, high, 1_000_003).astype(dtype)
        x = np.concatenate([x, np.linspace(-1, 1, 200_001).astype(dtype)])
        with np.errstate(over="ignore", under="ignore"):
            truth = np.exp(x.astype(wider))
            rounded = truth.astype(dtype)
        finite = np.isfinite(rounded)
        actual = kernels.exp(x)
        ulps = np.abs(actual[finite] - truth[finite]) / np.spacing(rounded[finite])
        assert ulps.max() < 1.5
        # Within an ulp of the largest value either side of overflow is right.
        assert np.isinf(actual[~finite & (x > x[finite].max() + 1e-3)]).all()
        special = kernels.exp(np.array([-np.inf, -1e30, 0, -0.0, np.inf, 1e30, np.nan], dtype))
        np.testing.assert_array_equal(special, [0, 0, 1, 1, np.inf, np.inf, np.nan])


def test_exp_is_accurate(kernels: Kernels) -> None:
    assert_exp_is_accurate(kernels)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_conversions_are_exact(kernels: Kernels, dtype: str) -> None:
    # With one key the output is v: every half there is goes in and comes out.
    every = np.arange(2**16, dtype=np.uint16)
    stored = every if dtype == "bfloat16" else every.view(np.float16)
    zeros = np.zeros((1, 2, 1, 1), stored.dtype)
    options = Options(dtype=dtype)
    out, _ = kernels.forward(zeros[:, :1], zeros[:, :1], stored[None, None, None, :], options)
    np.testing.assert_array_equal(from_storage(out[0, 0, 0], dtype), from_storage(stored, dtype))

    # With two keys of equal score it is their mean: half of the sums below need rounding, to even.
    finite = stored[np.isfinite(from_storage(stored, dtype).astype(np.float32))]
    values = np.sort(from_storage(finite, dtype).astype(np.float32))
    pair = to_storage(np.stack([values[:-1], values[1:]]), dtype)
    out, _ = kernels.forward(zeros[:, :1], zeros, pair[None, :, None, :], options)
    with np.errstate(over="ignore"):
        mean = values[:-1] / 2 + values[1:] / 2
    expected = from_storage(to_storage(mean, dtype), dtype)
    fits = np.abs(mean) < 1e38  # float32 sums of the largest bfloat16 values overflow before they are halved
    np.testing.assert_array_equal(from_storage(out[0, 0, 0], dtype)[fits], expected[fits])


def test_too_long_sequences_are_refused(kernels: Kernels) -> None:
    nothing = np.zeros((0, 1, 1, 1), np.float32)
    longest = np.lib.stride_tricks.as_strided(nothing, (0, 2**31, 1, 1), (0, 0, 0, 4))
    with pytest.raises(ckernels.KernelError, match="seqlen must be below 2\\^31"):
        kernels.forward(longest, nothing, nothing, Options(), out=nothing, lse=np.zeros(1, np.float32))


def test_works_in_a_forked_child(kernels: Kernels) -> None:
    case = CASES["causal_document"]
    expected = run(kernels, case, num_threads=2)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        actual = pool.apply_async(_run_in_child, (str(kernels.binary._name), case)).get(timeout=60)
    assert_same_bits(Results(*actual), expected)


def _run_in_child(library: str, case: Case) -> tuple[np.ndarray, ...]:
    return tuple(run(Kernels(library), case, num_threads=2))
