"""attention() in traced programs: to_static, saving, loading, inference."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from helpers import traced
from paddle.static import InputSpec

import paddle_flashmask
from paddle_flashmask import attention, flashmask_attention, masks

SEQLEN = 24


def random_inputs(seqlen: int = SEQLEN, batch: int = 2, seed: int = 0) -> list[paddle.Tensor]:
    rng = np.random.default_rng(seed)
    return [
        paddle.to_tensor(
            rng.standard_normal((batch, seqlen, heads, 8)).astype(np.float32), stop_gradient=False
        )
        for heads in (4, 2, 2)
    ]


def document_indices(lengths: list[int]) -> paddle.Tensor:
    ends = np.repeat(np.cumsum(lengths), lengths).astype(np.int32)
    return paddle.to_tensor(ends[None, None, :, None])


def assert_same(f: Callable[..., Any], g: Callable[..., Any], *others: Any, seqlen: int = SEQLEN) -> None:
    """Two functions of (q, k, v, *others): outputs and gradients, bit for bit."""
    results = []
    for function in (f, g):
        inputs = random_inputs(seqlen)
        outputs = function(*inputs, *others)
        outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        sum((output * output).sum() for output in outputs).backward()
        results.append([*(o.numpy() for o in outputs), *(x.grad.numpy() for x in inputs)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("full_graph", [True, False])
def test_traced_equals_eager(full_graph):
    def f(q, k, v, indices):
        return attention(q, k, v, startend_row_indices=indices, causal=True, return_lse=True)

    assert_same(f, traced(f, full_graph=full_graph), document_indices([10, 14]))


@pytest.mark.parametrize("full_graph", [True, False])
def test_only_one_output_used(full_graph):
    def f(q, k, v):
        return attention(q, k, v, causal=True, return_lse=True)[1]

    assert_same(f, traced(f, full_graph=full_graph))


def test_indices_are_inputs_that_may_change():
    def f(q, k, v, indices):
        return attention(q, k, v, startend_row_indices=indices, causal=True)

    g = traced(f)
    for lengths in ([10, 14], [3, 20, 1]):
        assert_same(f, g, document_indices(lengths))
    assert len(g.program_cache) == 1


class TestPieceByPiece:
    """Paddle 2.6 would trace our own Python too, frame by frame, and break it: it must leave it alone."""

    def test_paddles_signature(self):
        def f(q, k, v, indices):
            return flashmask_attention(
                q, k, v, indices, causal=True, window_size=7, return_softmax_lse=True, return_seed_offset=True
            )[:2]

        assert_same(f, traced(f, full_graph=False), document_indices([10, 14]))

    @pytest.mark.skipif(not paddle.__version__.startswith("2."), reason="Paddle 3 is told so by a decorator")
    def test_our_frames_run_as_they_are(self, monkeypatch):
        from paddle.jit.sot.opcode_translator.executor import executor_cache

        rewritten, start = [], executor_cache.start_translate

        def record(frame, **options):
            rewritten.append(frame.f_code.co_filename)
            return start(frame, **options)

        monkeypatch.setattr(executor_cache, "start_translate", record)

        def f(q, k, v):
            return attention(q, k, v, dropout_p=0.5) + 1

        traced(f, full_graph=False)(*random_inputs())
        package = Path(paddle_flashmask.__file__).parent
        assert rewritten
        assert not [file for file in rewritten if package in Path(file).parents]


class MaskedAttention(paddle.nn.Layer):
    """attention() under one mask."""

    def __init__(self, mask: masks.ColumnMask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v):
        return attention(q, k, v, mask=self.mask)


@pytest.mark.parametrize("full_graph", [True, False])
def test_a_mask_is_a_constant(full_graph):
    mask = masks.share_question([(10, [3, 4]), (4, [3])])
    assert_same(MaskedAttention(mask), traced(MaskedAttention(mask), full_graph=full_graph))


def test_a_mask_of_more_values_than_one_constant_holds():
    """Paddle 2.6 takes at most 2**20 values in one."""
    rng = np.random.default_rng(0)
    seqlen, heads = 2**14, 33
    starts = np.sort(rng.integers(0, 6, (1, heads, seqlen)), axis=-1)
    layer = MaskedAttention(masks.ColumnMask([(starts, starts + 2)], seqlen_q=8, seqlen_k=seqlen))
    indices, _ = layer.mask.to_startend_row_indices()
    assert indices.size > 2**20
    q = paddle.to_tensor(rng.standard_normal((1, 8, heads, 4)).astype(np.float32))
    k = paddle.to_tensor(rng.standard_normal((1, seqlen, heads, 4)).astype(np.float32))
    expected = layer(q, k, k).numpy()
    np.testing.assert_array_equal(traced(layer)(q, k, k).numpy(), expected)


def test_one_program_for_every_length():
    def f(q, k, v, indices):
        return attention(q, k, v, startend_row_indices=indices, causal=True, return_lse=True)

    spec = [InputSpec([None, None, heads, 8], "float32", stop_gradient=False) for heads in (4, 2, 2)]
    g = traced(f, input_spec=[*spec, InputSpec([None, 1, None, 1], "int32")])
    for lengths in ([24], [10, 21], [1, 1]):
        assert_same(f, g, document_indices(lengths), seqlen=sum(lengths))


class WindowAttention(paddle.nn.Layer):
    """flashmask_attention() under a window and, where given, indices."""

    def __init__(self, window: int | tuple[int, int], causal: bool = False) -> None:
        super().__init__()
        self.window, self.causal = window, causal

    def forward(self, q, k, v, indices=None):
        return flashmask_attention(q, k, v, indices, causal=self.causal, window_size=self.window)


class TestWindow:
    """Windows are tensor operations, so that they can be traced, for any form and length of the indices."""

    @pytest.mark.parametrize(
        ("causal", "bounds"), [(True, 0), (True, 1), (True, 2), (False, 0), (False, 2), (False, 4)]
    )
    @pytest.mark.parametrize("lengths_known", [True, False])
    def test_traced_equals_eager(self, causal, bounds, lengths_known):
        columns = np.arange(SEQLEN)
        below, above = np.minimum(columns + 9, SEQLEN), np.maximum(columns - 9, 0)
        forms = {0: (), 1: (below,), 2: (below, below + 3 if causal else above)}
        forms[4] = (below, np.full_like(below, SEQLEN), np.zeros_like(above), above)
        others = (
            [paddle.to_tensor(np.stack(forms[bounds], -1).astype(np.int32)[None, None])] if bounds else []
        )

        spec = None
        if not lengths_known:
            spec = [InputSpec([None, None, heads, 8], "float32", stop_gradient=False) for heads in (4, 2, 2)]
            spec += [InputSpec([None, 1, None, bounds], "int32")] * len(others)
        layer = WindowAttention((5, 3), causal)
        assert_same(layer, traced(WindowAttention((5, 3), causal), input_spec=spec), *others)

    def test_what_two_intervals_cannot_say_fails_when_it_runs(self):
        indices = np.zeros((1, 1, SEQLEN, 4), np.int32)
        indices[0, 0, 10] = [11, 12, 0, 0]

        g = traced(WindowAttention(3))
        inputs = random_inputs()
        g(*inputs, paddle.zeros_like(paddle.to_tensor(indices)))
        with pytest.raises(Exception, match=r"(?i)assert"):
            g(*inputs, paddle.to_tensor(indices))


@pytest.mark.skipif(paddle.__version__.startswith("2."), reason="auto_cast does nothing on a CPU in 2.6")
def test_amp_in_a_traced_program():
    def f(q, k, v):
        with paddle.amp.auto_cast(dtype="bfloat16", level="O1"):
            return attention(q, k, v, causal=True, return_lse=True)

    inputs = random_inputs()
    out, lse = traced(f)(*inputs)
    assert (out.dtype, lse.dtype) == (paddle.bfloat16, paddle.float32)
    expected = attention(*(x.astype("bfloat16") for x in inputs), causal=True)
    np.testing.assert_array_equal(out.astype("float32").numpy(), expected.astype("float32").numpy())
    out.astype("float32").sum().backward()
    assert all(x.grad.dtype == paddle.float32 for x in inputs)


@pytest.mark.parametrize("full_graph", [True, False])
def test_each_step_draws_its_dropout(full_graph):
    def f(q, k, v):
        return attention(q, k, v, dropout_p=0.5)

    g = traced(f, full_graph=full_graph)
    inputs = random_inputs()
    paddle.seed(3)
    first, second = g(*inputs).numpy(), g(*inputs).numpy()
    assert not np.array_equal(first, second)
    paddle.seed(3)
    np.testing.assert_array_equal(g(*inputs).numpy(), first)
    paddle.seed(3)
    np.testing.assert_array_equal(f(*inputs).numpy(), first)


def test_a_named_generator_cannot_be_traced():
    def f(q, k, v):
        return flashmask_attention(q, k, v, dropout=0.5, rng_name="any")

    with pytest.raises(ValueError, match="rng_name: expected '' in a traced program"):
        traced(f)(*random_inputs())


class Block(paddle.nn.Layer):
    """A projection and attention under indices; heads of 8 dims, 2 of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = paddle.nn.Linear(16, 48)

    def forward(self, x, indices):
        q, k, v = paddle.split(self.qkv(x).reshape([0, 0, 6, 8]), 3, axis=2)
        return attention(q, k, v, startend_row_indices=indices, causal=True).flatten(2)


def test_training_a_traced_layer_is_training_the_layer():
    indices = document_indices([10, 14])
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal((2, SEQLEN, 16)).astype(np.float32))
    losses = []
    for convert in (lambda layer: layer, traced):
        paddle.seed(0)
        layer = Block()
        model = convert(layer)
        optimizer = paddle.optimizer.AdamW(1e-2, parameters=layer.parameters())
        losses.append([])
        for _ in range(4):
            loss = (model(x, indices) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses[-1].append(float(loss))
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[paddle.Tensor, ...]]]:
    """A saved Block of any batch and length, and what the layer itself answers."""
    paddle.seed(1)
    layer = Block()
    layer.eval()
    path = tmp_path_factory.mktemp("model") / "block"
    spec = [InputSpec([None, None, 16], "float32"), InputSpec([None, 1, None, 1], "int32")]
    paddle.jit.save(layer, str(path), input_spec=spec)
    examples = []
    for lengths in ([10, 14], [40]):
        x, indices = paddle.randn([3, sum(lengths), 16]), document_indices(lengths)
        examples.append((x, indices, layer(x, indices)))
    return path, examples


def test_loading(saved):
    path, examples = saved
    loaded = paddle.jit.load(str(path))
    for x, indices, expected in examples:
        np.testing.assert_array_equal(loaded(x, indices).numpy(), expected.numpy())


def test_inference(saved):
    path, examples = saved
    program = next(path.parent.glob("block.[jp]*[nl]"))  # .json, or .pdmodel before Paddle 3
    config = paddle.inference.Config(str(program), f"{path}.pdiparams")
    config.disable_glog_info()
    predictor = paddle.inference.create_predictor(config)
    for x, indices, expected in examples:
        for name, value in zip(predictor.get_input_names(), (x, indices), strict=True):
            predictor.get_input_handle(name).copy_from_cpu(value.numpy())
        predictor.run()
        actual = predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()
        np.testing.assert_allclose(actual, expected.numpy(), atol=1e-5)


def test_a_mask_is_saved_with_the_program(tmp_path):
    layer = MaskedAttention(masks.share_question([(10, [3, 4]), (4, [3])]))
    spec = [InputSpec([None, SEQLEN, heads, 8], "float32") for heads in (4, 2, 2)]
    paddle.jit.save(layer, str(tmp_path / "masked"), input_spec=spec)
    inputs = random_inputs()
    actual = paddle.jit.load(str(tmp_path / "masked"))(*inputs)
    np.testing.assert_array_equal(actual.numpy(), layer(*inputs).numpy())


def test_loading_in_a_process_that_only_loads(saved):
    path, [(x, indices, expected), *_] = saved
    np.savez(path.parent / "example.npz", x=x.numpy(), indices=indices.numpy(), expected=expected.numpy())
    code = f"""
import numpy as np, paddle, paddle_flashmask
paddle_flashmask.load_operators()
example = np.load({str(path.parent / "example.npz")!r})
actual = paddle.jit.load({str(path)!r})(paddle.to_tensor(example["x"]), paddle.to_tensor(example["indices"]))
np.testing.assert_array_equal(actual.numpy(), example["expected"])
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=300)
