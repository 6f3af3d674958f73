"""The CUDA kernels through Paddle's dispatcher and autograd, against the float64 oracle.

Needs a CUDA build of Paddle, and this package built for it with at least the kernels of subset "operator".

Paddle's newest CUDA build on PyPI, 2.6.2, has no code for Hopper: there any of Paddle's own CUDA kernels
(cast, fill, add, random) silently does nothing. So that these tests hold there too, inputs are made and
results are compared by NumPy, gradients are given explicitly, and no tensor on the device is computed with.
On the way of attention() and flashmask_attention() Paddle's kernels run for: casts under AMP; the seed of
dropout; results of empty inputs; the zeros of return_seed_offset; window_size. All but AMP and a window on
top of indices are made on Paddle's current device and copied to that of q, so the tests of these make the
CPU the current one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")
if not paddle.is_compiled_with_cuda():
    pytest.skip("this Paddle has no CUDA", allow_module_level=True)

from helpers import Case, Inputs, Results, assert_matches_reference, make_inputs, plain_attention

from paddle_flashmask import _ops, attention, flashmask_attention, functional, masks, nn
from paddle_flashmask.reference import attention_reference, attention_reference_backward, dropout_keep_mask

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def current_device() -> Iterator[None]:
    before = paddle.device.get_device()
    paddle.set_device("gpu:0")
    yield
    paddle.set_device(before)


@pytest.fixture
def cpu_is_current(current_device: None) -> None:
    """What Paddle makes by itself is made by its CPU kernels."""
    paddle.set_device("cpu")


def to_device(x: np.ndarray, dtype: str | None = None, *, device: int = 0, leaf: bool = False) -> Any:
    """A tensor on the GPU; ``x`` holds values of ``dtype`` already where that is a float type."""
    if dtype == "bfloat16":
        x = (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif dtype is not None:
        x = x.astype(dtype)
    place = paddle.CUDAPlace(device)
    return paddle.to_tensor(x, dtype=dtype, place=place, stop_gradient=not leaf)


def to_host(tensor: Any) -> np.ndarray:
    """A tensor's values; those of bfloat16 as float32."""
    values = tensor.numpy()
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


def inputs_of(case: Case, x: Inputs, **options: Any) -> list[Any]:
    """q, k, v as leaves on the device."""
    return [to_device(array, case.dtype, leaf=True, **options) for array in (x.q, x.k, x.v)]


def run(case: Case, x: Inputs | None = None, *, device: int = 0, **options: Any) -> Results:
    """The case through the operator: results and gradients."""
    x = make_inputs(case) if x is None else x
    q, k, v = leaves = inputs_of(case, x, device=device)
    if case.dropout_p:
        seed_offset = np.array([case.dropout_seed, case.dropout_offset])
        options |= {"dropout_p": case.dropout_p, "seed_offset": to_device(seed_offset, device=device)}
    if options.get("visit") == "dense":
        options["dense_mask"] = to_device(np.ascontiguousarray(x.visible), device=device)
    out, lse = _ops.flashmask(
        q,
        k,
        v,
        None if x.indices is None else to_device(x.indices, device=device),
        causal=x.causal,
        softmax_scale=case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale,
        **options,
    )
    assert str(out.dtype) == f"paddle.{case.dtype}"
    assert str(lse.dtype) == "paddle.float32"
    assert str(out.place) == str(lse.place) == str(q.place)
    paddle.autograd.backward(
        [out, lse], [to_device(x.dout, case.dtype, device=device), to_device(x.dlse, device=device)]
    )
    return Results(*(to_host(tensor) for tensor in (out, lse, *(leaf.grad for leaf in leaves))))


def assert_right(actual: Results, case: Case, x: Inputs | None = None) -> None:
    """Compares with the oracle; None among the results is left out."""
    x = make_inputs(case) if x is None else x
    options = {
        "softmax_scale": case.softmax_scale,
        "dropout_keep": x.dropout_keep,
        "dropout_p": case.dropout_p,
    }
    out, lse = attention_reference(x.q, x.k, x.v, x.visible, **options)
    gradients = attention_reference_backward(x.q, x.k, x.v, x.visible, x.dout, x.dlse, **options)
    plain = plain_attention(x, case.dtype, case.softmax_scale, case.dropout_p)
    for name, values, reference, by_plain in zip(
        Results._fields, actual, (out, lse, *gradients), plain, strict=True
    ):
        if values is not None:
            dtype = "float32" if name == "lse" else case.dtype
            assert_matches_reference(values, reference, by_plain, dtype=dtype, name=f"{case.name}: {name}")


def assert_same_bits(a: Results, b: Results) -> None:
    for name, x, y in zip(Results._fields, a, b, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


def make_case(name: str, **fields: Any) -> Case:
    return Case(name, **{"dtype": "bfloat16", "heads_q": 4, "heads_k": 2, **fields})


CASES = [
    # Every form of a mask.
    make_case("no mask", mask="full", dtype="float16"),
    make_case("causal", mask="causal"),
    make_case("causal, C = 1", mask="random", causal=True, bounds=1),
    make_case("causal, C = 2", mask="random", causal=True, bounds=2, dtype="float16"),
    make_case("C = 2", mask="random", bounds=2),
    make_case("C = 4", mask="random", bounds=4),
    make_case("C = 4, float16", mask="random", bounds=4, dtype="float16"),
    *(make_case(name, mask=name, seqlen_q=333, seqlen_k=333) for name in ("share_question", "qk_sparse")),
    # One mask per key head, query head, sample, and both.
    make_case("mask per key head", mask="random", mask_heads=2, bounds=4),
    make_case("mask per query head", mask="random", mask_heads=4, causal=True, bounds=1),
    make_case("mask per sample", mask="random", batch=3, mask_batch=3),
    make_case("mask per everything", mask="random", batch=2, mask_batch=2, mask_heads=4, bounds=4),
    # Heads and head dims.
    make_case("one head each", mask="causal_document", heads_q=2),
    make_case("one key head", mask="causal_document", heads_q=8, heads_k=1),
    make_case("D 8", mask="document", head_dim=8, head_dim_v=8),
    make_case("D 40, Dv 24", mask="causal_document", head_dim=40, head_dim_v=24, dtype="float16"),
    make_case("D 72", mask="causal_document", head_dim=72, head_dim_v=72),
    make_case("D 128", mask="causal_document", head_dim=128, head_dim_v=128),
    make_case("D 192, Dv 128", mask="causal_document", head_dim=192, head_dim_v=128),
    make_case("D 64, Dv 128", mask="document", head_dim=64, head_dim_v=128, dtype="float16"),
    # Up to 16 column tiles add to a row of dQ.
    make_case("2K", mask="random_eviction", seqlen_q=2048, seqlen_k=2048, head_dim=128, head_dim_v=128),
    # Lengths: one row, one key, odd, Sq != Sk both ways (with rows that see nothing), several tiles, 8K.
    make_case("one by one", mask="full", seqlen_q=1, seqlen_k=1),
    make_case("one row", mask="causal", seqlen_q=1, seqlen_k=517),
    make_case("one key", mask="causal", seqlen_q=77, seqlen_k=1),
    make_case("more keys", mask="random", causal=True, bounds=1, seqlen_q=131, seqlen_k=260),
    make_case("more queries", mask="causal", seqlen_q=301, seqlen_k=70),
    make_case("2049 tokens", mask="causal_document", seqlen_q=2049, seqlen_k=2049),
    make_case("8K", mask="causal_document", seqlen_q=8192, seqlen_k=8192, heads_q=1, heads_k=1),
    make_case("many samples", mask="causal_document", batch=40, seqlen_q=24, seqlen_k=24),
    # The rest.
    make_case("softmax_scale", mask="causal_document", softmax_scale=0.3),
    make_case("dropout", mask="causal_document", dropout_p=0.2, dropout_seed=2024, dropout_offset=7),
    make_case(
        "dropout with a wide seed",
        mask="full",
        dtype="float16",
        head_dim=128,
        head_dim_v=128,
        dropout_p=0.5,
        dropout_seed=-(2**40) + 3,
        dropout_offset=2**33 + 1,
    ),
]
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case_matches_reference(case):
    assert_right(run(case), case)


def test_causal_with_four_bounds():
    """The operator takes both intervals on top of causality; window_size makes such masks."""
    case = make_case("causal, C = 4", mask="random", bounds=4)
    x = make_inputs(case)
    visible = x.visible & np.tri(case.seqlen_q, dtype=bool)
    x = x._replace(causal=True, visible=visible)
    assert_right(run(case, x), case, x)


@pytest.mark.parametrize("visit", ["all", "dense"])
@pytest.mark.parametrize("name", ["C = 4", "mask per key head", "causal, C = 1", "D 192, Dv 128"])
def test_skipping_changes_no_bit(name, visit):
    case = BY_NAME[name]
    assert_same_bits(run(case, deterministic=True), run(case, deterministic=True, visit=visit))


@pytest.mark.parametrize("name", ["share_question", "2K", "dropout"])
def test_deterministic_backward_repeats_its_bits(name):
    case = BY_NAME[name]
    first = run(case, deterministic=True)
    assert_right(first, case)
    for _ in range(3):
        assert_same_bits(run(case, deterministic=True), first)


@pytest.mark.parametrize("call", [attention, flashmask_attention])
def test_paddles_flag_makes_the_backward_deterministic(call, monkeypatch):
    """The only way to ask flashmask_attention for it."""
    case = BY_NAME["2K"]
    x = make_inputs(case)
    asked = []
    operator = _ops.flashmask
    monkeypatch.setattr(
        _ops, "flashmask", lambda *tensors, **o: asked.append(o["deterministic"]) or operator(*tensors, **o)
    )

    def gradients() -> list[np.ndarray]:
        leaves = inputs_of(case, x)
        out = call(*leaves, startend_row_indices=to_device(x.indices), causal=x.causal)
        paddle.autograd.backward([out], [to_device(x.dout, case.dtype)])
        return [to_host(leaf.grad) for leaf in leaves]

    flag = "FLAGS_cudnn_deterministic"
    before = paddle.get_flags([flag])
    try:
        paddle.set_flags({flag: True})
        first = gradients()
        for _ in range(50):
            for values, expected in zip(gradients(), first, strict=True):
                np.testing.assert_array_equal(values, expected)
        paddle.set_flags({flag: False})
        gradients()
    finally:
        paddle.set_flags(before)
    assert asked == [True] * 51 + [False]


def test_dropout_only_in_training():
    case = BY_NAME["causal"]
    q, k, v = inputs_of(case, make_inputs(case))
    expected = to_host(flashmask_attention(q, k, v, causal=True))
    evaluated = flashmask_attention(q, k, v, causal=True, dropout=0.5, training=False)
    np.testing.assert_array_equal(to_host(evaluated), expected)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv", "kv"])
def test_only_the_gradients_asked_for(wanted):
    case = BY_NAME["C = 4"]
    x = make_inputs(case)
    leaves = inputs_of(case, x)
    for name, leaf in zip("qkv", leaves, strict=True):
        leaf.stop_gradient = name not in wanted
    out, lse = attention(*leaves, startend_row_indices=to_device(x.indices), causal=x.causal, return_lse=True)
    paddle.autograd.backward([out, lse], [to_device(x.dout, case.dtype), to_device(x.dlse)])
    for name, leaf in zip("qkv", leaves, strict=True):
        assert (leaf.grad is not None) == (name in wanted), name
    gradients = [None if leaf.grad is None else to_host(leaf.grad) for leaf in leaves]
    assert_right(Results(to_host(out), to_host(lse), *gradients), case)


@pytest.mark.parametrize("used", ["out", "lse"])
def test_an_unused_output_counts_as_a_zero_gradient(used):
    case = BY_NAME["causal, C = 1"]
    x = make_inputs(case)
    x = x._replace(dlse=np.zeros_like(x.dlse)) if used == "out" else x._replace(dout=np.zeros_like(x.dout))
    leaves = inputs_of(case, x)
    out, lse = attention(*leaves, startend_row_indices=to_device(x.indices), causal=x.causal, return_lse=True)
    if used == "out":
        paddle.autograd.backward([out], [to_device(x.dout, case.dtype)])
    else:
        paddle.autograd.backward([lse], [to_device(x.dlse)])
    assert_right(Results(None, None, *(to_host(leaf.grad) for leaf in leaves)), case, x)


def test_no_grad_and_stopped_inputs_record_nothing():
    case = BY_NAME["causal"]
    x = make_inputs(case)
    with paddle.no_grad():
        assert attention(*inputs_of(case, x), causal=True).stop_gradient
    assert attention(*(leaf.detach() for leaf in inputs_of(case, x)), causal=True).stop_gradient


MASKS = {
    "full": masks.full(200),
    "causal": masks.causal(200),
    "causal document": masks.causal_document([31, 100, 69]),
    "causal with a gap": masks.causal(200) & masks.ColumnMask([(90, 150)], seqlen_q=200, seqlen_k=200),
    "document": masks.document([31, 100, 69]),
    "two intervals": masks.share_question([(10, [30, 60]), (20, [40, 40])]) | masks.document([100, 100]),
    "per head": masks.random_eviction(np.arange(400).reshape(2, 200) % 190 + 4),
    "per sample": masks.ColumnMask.stack_batch([masks.document([7, 193]), masks.document([100, 100])]),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_with_a_mask(name, monkeypatch):
    """A ColumnMask means what it shows, and keeps one tensor on the device."""
    given = []
    flashmask = _ops.flashmask

    def record(*inputs: Any, **options: Any) -> Any:
        given.append(inputs[3])
        return flashmask(*inputs, **options)

    monkeypatch.setattr(_ops, "flashmask", record)
    mask = MASKS[name]
    case = make_case(name, mask="full", batch=2)
    x = make_inputs(case)._replace(visible=mask.to_dense())
    for _ in range(2):
        leaves = inputs_of(case, x)
        out, lse = attention(*leaves, mask=mask, return_lse=True)
        paddle.autograd.backward([out, lse], [to_device(x.dout, case.dtype), to_device(x.dlse)])
        gradients = [to_host(leaf.grad) for leaf in leaves]
        assert_right(Results(to_host(out), to_host(lse), *gradients), case, x)
    assert given[0] is given[1]
    assert given[0] is None or given[0].place.is_gpu_place()


def test_any_index_value_is_safe(rng):
    case = make_case("any index", mask="full")
    values = np.array([-(2**31), -1, 0, 100, 200, 201, 2**31 - 1], np.int32)
    indices = rng.choice(values, (1, 2, 200, 4)).astype(np.int32)
    rows = np.arange(200)[:, None]
    lts, lte, uts, ute = (indices[:, :, None, :, i] for i in range(4))
    masked = ((rows >= lts) & (rows < lte)) | ((rows >= uts) & (rows < ute))
    x = make_inputs(case)._replace(indices=indices, visible=~masked)
    assert_right(run(case, x), case, x)


def test_views_into_the_middle_of_a_tensor():
    """The kernels read 16 bytes at once; a view of Paddle's may start at any element."""
    case = BY_NAME["causal, C = 1"]
    x = make_inputs(case)

    def shifted(array: np.ndarray) -> Any:
        whole = to_device(np.concatenate([[0.0], array.reshape(-1)]), case.dtype)
        view = whole[1:].reshape(array.shape).detach()
        assert view.data_ptr() == whole.data_ptr() + 2
        return view

    leaves = [shifted(array) for array in (x.q, x.k, x.v)]
    for leaf in leaves:
        leaf.stop_gradient = False
    out, lse = attention(*leaves, startend_row_indices=to_device(x.indices), causal=x.causal, return_lse=True)
    paddle.autograd.backward([out, lse], [shifted(x.dout), to_device(x.dlse)])
    gradients = [to_host(leaf.grad) for leaf in leaves]
    assert_right(Results(to_host(out), to_host(lse), *gradients), case)


def test_launches_go_to_the_current_stream():
    case = make_case("stream", mask="full", seqlen_q=8192, seqlen_k=8192, heads_q=32, heads_k=32)
    bits = np.zeros((1, 8192, 32, 64), np.float32)
    q, k, v = (to_device(bits, case.dtype) for _ in range(3))
    attention(q, k, v)  # loads the kernel and fills Paddle's memory pool
    paddle.device.cuda.synchronize()
    main, side = paddle.device.cuda.current_stream(), paddle.device.cuda.Stream()
    with paddle.device.cuda.stream_guard(side):
        for _ in range(4):
            attention(q, k, v)
        running = (not side.query(), not main.query())
    side.synchronize()
    assert running == (True, False)


def test_indices_may_be_freed_while_the_kernel_runs(rng):
    """Whoever gets their memory next writes to it behind the kernel."""
    shape = (1, 8192, 32, 128)
    q, k, v = (to_device(rng.standard_normal(shape).astype(np.float32), "bfloat16") for _ in range(3))
    indices, causal = masks.causal_document([1024] * 8).to_startend_row_indices()
    kept = to_device(indices)
    expected = to_host(_ops.flashmask(q, k, v, kept, causal=causal, softmax_scale=0.1)[0])
    freed = to_device(indices)
    for _ in range(20):
        attention(q, k, v)  # so that the kernel has not begun when its indices are freed
    out = _ops.flashmask(q, k, v, freed, causal=causal, softmax_scale=0.1)[0]
    del freed
    for _ in range(8):
        to_device(np.zeros_like(indices))  # as indices they would mask everything
    np.testing.assert_array_equal(to_host(out), expected)


def test_results_on_a_side_stream():
    case = BY_NAME["D 128"]
    expected = run(case, deterministic=True)
    side = paddle.device.cuda.Stream()
    x = make_inputs(case)
    leaves = inputs_of(case, x)
    indices, dout, dlse = to_device(x.indices), to_device(x.dout, case.dtype), to_device(x.dlse)
    with paddle.device.cuda.stream_guard(side):
        out, lse = attention(
            *leaves, startend_row_indices=indices, causal=x.causal, deterministic=True, return_lse=True
        )
        paddle.autograd.backward([out, lse], [dout, dlse])
    side.synchronize()
    gradients = [to_host(leaf.grad) for leaf in leaves]
    assert_same_bits(Results(to_host(out), to_host(lse), *gradients), expected)


@pytest.mark.parametrize("dropped", ["nothing", "lse", "out and lse", "leaves"])
def test_other_streams_do_not_get_memory_of_a_running_kernel(dropped):
    """Workspace and dropped results: their next owner would be overwritten once the kernel begins."""
    case = BY_NAME["2K"]
    expected = run(case, deterministic=True)
    x = make_inputs(case)
    leaves = inputs_of(case, x)
    indices, dout, dlse = to_device(x.indices), to_device(x.dout, case.dtype), to_device(x.dlse)
    busy = [to_device(np.zeros((1, 16_384, 32, 128), np.float32), case.dtype) for _ in range(3)]
    sizes = [x.q.size // 2, x.k.size // 2, x.q.size, x.dlse.size, *(2**power for power in range(6, 22))]
    nans = [np.full(size, np.nan, np.float32) for size in sizes]
    paddle.device.cuda.synchronize()
    side = paddle.device.cuda.Stream()
    with paddle.device.cuda.stream_guard(side), paddle.set_grad_enabled("lse" not in dropped):
        delays = [attention(*busy) for _ in range(120)]
        out, lse = _ops.flashmask(
            *leaves, indices, causal=x.causal, softmax_scale=case.head_dim**-0.5, deterministic=True
        )
        if "lse" not in dropped:
            paddle.autograd.backward([out, lse], [dout, dlse])
    if dropped == "leaves":
        leaves.clear()  # and with them their gradients
    if "lse" in dropped:
        del lse
    if "out" in dropped:
        del out
    others = [to_device(array) for array in nans for _ in range(4)]
    assert not side.query(), "the kernels had run before the memory was written"
    side.synchronize()
    assert len(delays) == 120  # held until here
    for other in others:
        assert np.isnan(other.numpy()).all()
    if "out" not in dropped:
        np.testing.assert_array_equal(to_host(out), expected.out)
    if dropped == "nothing":
        gradients = [to_host(leaf.grad) for leaf in leaves]
        assert_same_bits(Results(to_host(out), to_host(lse), *gradients), expected)


def test_the_workspace_is_reused():
    """By the next call on the same stream, main or side: memory does not grow with calls."""
    case = BY_NAME["2K"]
    x = make_inputs(case)
    indices, dout = to_device(x.indices), to_device(x.dout, case.dtype)

    def step() -> None:
        leaves = inputs_of(case, x)
        out = attention(*leaves, startend_row_indices=indices, causal=x.causal)
        paddle.autograd.backward([out], [dout])

    side = paddle.device.cuda.Stream()
    for stream in (paddle.device.cuda.current_stream(), side):
        with paddle.device.cuda.stream_guard(stream):
            step()
            stream.synchronize()
            before = paddle.device.cuda.memory_reserved(), paddle.device.cuda.memory_allocated()
            for _ in range(20):
                step()
                stream.synchronize()
            after = paddle.device.cuda.memory_reserved(), paddle.device.cuda.memory_allocated()
        assert after == before


@pytest.mark.parametrize("current", ["gpu:0", "cpu"])
def test_tensors_of_another_device(current):
    """Launches go to the tensors' device, whichever is the current one, and that stays."""
    device = 1 if current == "gpu:0" else 0
    if device >= paddle.device.cuda.device_count():
        pytest.skip("needs two GPUs")
    paddle.set_device(current)
    case = BY_NAME["share_question"]
    assert_right(run(case, device=device), case)
    assert paddle.device.get_device() == current


@pytest.mark.usefixtures("cpu_is_current")
class TestWhatPaddleMakes:
    """Seeds, zeros and windows are copied to the inputs' device."""

    @pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(2, 5, 0), (2, 0, 7), (0, 5, 7)])
    def test_empty_inputs(self, batch, seqlen_q, seqlen_k):
        shapes = [(batch, seqlen_q, 4, 8), (batch, seqlen_k, 2, 8), (batch, seqlen_k, 2, 16)]
        q, k, v = (to_device(np.ones(shape, np.float32), "bfloat16", leaf=True) for shape in shapes)
        out, lse = attention(q, k, v, return_lse=True)
        assert str(out.place) == str(lse.place) == str(q.place)
        np.testing.assert_array_equal(to_host(out), np.zeros((batch, seqlen_q, 4, 16)))
        np.testing.assert_array_equal(to_host(lse), np.full((batch, 4, seqlen_q), -np.inf))
        if seqlen_k == 0:
            paddle.autograd.backward([out], [to_device(np.ones((batch, seqlen_q, 4, 16)), "bfloat16")])
            np.testing.assert_array_equal(to_host(q.grad), np.zeros(shapes[0]))

    def test_dropout_draws_a_seed(self, monkeypatch):
        seeds = []
        flashmask = _ops.flashmask

        def record(*inputs: Any, **options: Any) -> Any:
            seeds.append(options["seed_offset"].numpy().tolist())
            return flashmask(*inputs, **options)

        monkeypatch.setattr(_ops, "flashmask", record)
        case = make_case("drawn dropout", mask="causal", dropout_p=0.3)
        x = make_inputs(case)
        paddle.seed(5)
        for _ in range(2):
            out = attention(*inputs_of(case, x), causal=True, dropout_p=0.3)
            keep = dropout_keep_mask(*seeds[-1], 1, case.heads_q, 200, 200, 0.3)
            actual = Results(to_host(out), None, None, None, None)
            assert_right(actual, case, x._replace(dropout_keep=keep))
        paddle.seed(5)
        attention(*inputs_of(case, x), causal=True, dropout_p=0.3)
        assert seeds[0] != seeds[1]
        assert seeds[0] == seeds[2]

    def test_fixed_seed_offset(self):
        case = BY_NAME["dropout"]
        x = make_inputs(case)
        seed_offset = to_device(np.array([case.dropout_seed, case.dropout_offset]))
        out, returned = flashmask_attention(
            *inputs_of(case, x),
            startend_row_indices=to_device(x.indices),
            causal=x.causal,
            dropout=case.dropout_p,
            fixed_seed_offset=seed_offset,
            return_seed_offset=True,
        )
        assert returned is seed_offset
        assert_right(Results(to_host(out), None, None, None, None), case)

    def test_seed_offset_without_dropout_is_zero_and_on_the_device(self):
        case = BY_NAME["causal"]
        _, seed_offset = flashmask_attention(
            *inputs_of(case, make_inputs(case)), causal=True, return_seed_offset=True
        )
        assert seed_offset.place.is_gpu_place()
        assert seed_offset.numpy().tolist() == [0, 0]

    @pytest.mark.parametrize(("causal", "window"), [(False, (20, 50)), (True, (30, 0)), (False, (0, 0))])
    def test_window(self, causal, window):
        case = make_case("window", mask="full", seqlen_q=150)
        x = make_inputs(case)
        offset = np.arange(200) - (np.arange(150)[:, None] + 50)
        visible = (offset >= -window[0]) & (offset <= (0 if causal else window[1]))
        x = x._replace(visible=visible[None, None])
        leaves = inputs_of(case, x)
        out, lse = flashmask_attention(*leaves, causal=causal, window_size=window, return_softmax_lse=True)
        paddle.autograd.backward([out, lse], [to_device(x.dout, case.dtype), to_device(x.dlse)])
        gradients = [to_host(leaf.grad) for leaf in leaves]
        assert_right(Results(to_host(out), to_host(lse), *gradients), case, x)

    def test_a_window_on_top_of_packed_documents(self, monkeypatch):
        """Both count. The indices are combined on the CPU here: that takes kernels of Paddle's own."""
        combine = functional.combine_window

        def on_the_cpu(window: Any, indices: Any, causal: bool, q: Any, k: Any) -> Any:
            return to_device(combine(window, indices.cpu(), causal, q.cpu(), k.cpu()).numpy())

        monkeypatch.setattr(functional, "combine_window", on_the_cpu)
        documents = masks.causal_document([31, 100, 69])
        indices, causal = documents.to_startend_row_indices()
        case = make_case("window on documents", mask="full")
        window = np.tri(200, dtype=bool) & ~np.tri(200, k=-31, dtype=bool)
        x = make_inputs(case)._replace(visible=documents.to_dense() & window)
        leaves = inputs_of(case, x)
        out, lse = flashmask_attention(
            *leaves, to_device(indices), causal=causal, window_size=(30, 0), return_softmax_lse=True
        )
        paddle.autograd.backward([out, lse], [to_device(x.dout, case.dtype), to_device(x.dlse)])
        gradients = [to_host(leaf.grad) for leaf in leaves]
        assert_right(Results(to_host(out), to_host(lse), *gradients), case, x)

    def test_a_layer_that_evaluates(self, rng):
        """Without its dropout, with its mask."""
        paddle.set_device("gpu:0")
        paddle.set_default_dtype("float16")
        try:
            layer = nn.FlashMaskAttention(embed_dim=256, num_heads=4, num_kv_heads=2, dropout=0.5)
            for parameter in layer.parameters():
                parameter.set_value((rng.standard_normal(parameter.shape) / 16).astype(np.float16))
        finally:
            paddle.set_default_dtype("float32")
            paddle.set_device("cpu")
        documents = masks.causal_document([31, 100, 69])
        hidden = to_device(rng.standard_normal((1, 200, 256)), "float16")
        q, k, v = (
            getattr(layer, f"{name}_proj")(hidden).reshape([1, 200, heads, 64])
            for name, heads in (("q", 4), ("k", 2), ("v", 2))
        )
        assert np.abs(to_host(q)).max() > 1.0  # Paddle's matmul ran
        expected = layer.out_proj(attention(q, k, v, mask=documents).reshape([1, 200, 256]))
        layer.eval()
        np.testing.assert_array_equal(to_host(layer(hidden, documents)), to_host(expected))
        layer.train()
        assert (to_host(layer(hidden, documents)) != to_host(expected)).any()


class TestErrors:
    """What CUDA does not take is refused before a launch, in Python and once more in the operator."""

    @staticmethod
    def qkv(dtype: str = "bfloat16", head_dim: int = 64, head_dim_v: int = 64) -> list[Any]:
        shapes = [(2, 6, 4, head_dim), (2, 8, 2, head_dim), (2, 8, 2, head_dim_v)]
        return [to_device(np.zeros(shape, np.float32), dtype) for shape in shapes]

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_dtype(self, dtype):
        q, k, v = self.qkv(dtype)
        with pytest.raises(TypeError, match=rf"^q: expected float16 or bfloat16 on CUDA, got {dtype}$"):
            attention(q, k, v)
        with pytest.raises(TypeError, match=r"^query: expected float16 or bfloat16 on CUDA"):
            flashmask_attention(q, k, v)
        with pytest.raises(Exception, match="on CUDA q, k and v must be float16 or bfloat16"):
            _ops.flashmask(q, k, v, None, causal=False, softmax_scale=1.0)

    @pytest.mark.parametrize(
        ("head_dim", "head_dim_v", "name"), [(20, 64, "q"), (264, 64, "q"), (64, 60, "v")]
    )
    def test_head_dim(self, head_dim, head_dim_v, name):
        q, k, v = self.qkv(head_dim=head_dim, head_dim_v=head_dim_v)
        expected = f"^{name}: expected a head dim that is a multiple of 8 and at most 256 on CUDA, got shape "
        with pytest.raises(ValueError, match=expected):
            attention(q, k, v)
        with pytest.raises(Exception, match="on CUDA head dims must be multiples of 8 up to 256"):
            _ops.flashmask(q, k, v, None, causal=False, softmax_scale=1.0)

    @pytest.mark.parametrize("name", ["k", "v", "startend_row_indices"])
    def test_device(self, name):
        arguments = dict(zip("qkv", self.qkv(), strict=True))
        arguments["startend_row_indices"] = to_device(np.zeros((1, 1, 8, 1), np.int32))
        arguments[name] = arguments[name].cpu()
        with pytest.raises(ValueError, match=rf"^{name}: expected the device of q, .*gpu:0.*, got .*cpu"):
            attention(**arguments, causal=True)
        q, k, v, indices = arguments.values()
        with pytest.raises(Exception, match=f"flashmask: {name} must be on the device of q"):
            _ops.flashmask(q, k, v, indices, causal=True, softmax_scale=1.0)

    def test_seed_offset(self):
        seed_offset = paddle.to_tensor(np.array([1, 2]), place=paddle.CPUPlace())
        expected = r"^fixed_seed_offset: expected the device of query, .*gpu:0.*, got .*cpu"
        with pytest.raises(ValueError, match=expected):
            flashmask_attention(*self.qkv(), dropout=0.5, fixed_seed_offset=seed_offset)
        with pytest.raises(Exception, match="seed_offset must be on the device of q"):
            _ops.flashmask(
                *self.qkv(), None, causal=True, softmax_scale=1.0, dropout_p=0.5, seed_offset=seed_offset
            )

    def test_the_next_call_works(self):
        q, k, v = self.qkv("float32")
        with pytest.raises(TypeError):
            attention(q, k, v)
        case = BY_NAME["causal"]
        assert_right(run(case), case)


def test_the_library_leaves_no_symbol_undefined():
    """Whatever C++ ABI and CUDA Paddle has: a fresh process looks every symbol up at once."""
    code = "import ctypes, os, sys, paddle; ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW)"
    library = Path(_ops.__file__).with_name("_C.so")
    done = subprocess.run(
        [sys.executable, "-c", code, str(library)], stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_info_names_the_kernel(capsys):
    from paddle_flashmask import __main__ as cli

    status = cli.main(["info", "--shape", "1,64,64,8,8,64", "--dtype", "bfloat16", "--device", "gpu"])
    out = capsys.readouterr().out
    assert status == 0
    assert "on gpu: CUDA (forward: sm_" in out


@pytest.mark.parametrize(
    ("arguments", "hopper", "elsewhere"),
    [
        ("--shape 1,4096,4096,8,8,64", "sm_90 (Hopper's own, on", "as the device is no Hopper"),
        ("--shape 1,4096,4096,8,8,64 --dropout", "as Hopper's have no dropout", "as the device is no Hopper"),
        ("--shape 1,1,16384,32,8,128", "rows of 4 heads together, keys in", "as the device is no Hopper"),
    ],
)
def test_info_says_why_this_kernel(capsys, arguments, hopper, elsewhere):
    from paddle_flashmask import __main__ as cli

    assert cli.main(["info", *arguments.split(), "--dtype", "bfloat16", "--device", "gpu"]) == 0
    on_hopper = paddle.device.cuda.get_device_capability()[0] == 9
    assert (hopper if on_hopper else elsewhere) in capsys.readouterr().out
