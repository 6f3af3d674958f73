"""FlashMaskAttention against the same layer written with dense Paddle operations and the same weights."""

import re
from functools import partial

import numpy as np
import pytest

paddle = pytest.importorskip("paddle")

from helpers import dense_from_indices, traced  # noqa: E402

from paddle_flashmask import masks, nn  # noqa: E402

EMBED_DIM, HEADS, KV_HEADS, SEQLEN = 48, 6, 2, 40
LENGTHS = [13, 20, 7]
DOCUMENT_INDICES = np.repeat(np.cumsum(LENGTHS), LENGTHS).astype(np.int32).reshape(1, 1, SEQLEN, 1)
POSITIONS = np.concatenate([np.arange(n) for n in LENGTHS])


def make_layer(**options):
    paddle.seed(0)
    options = {"num_kv_heads": KV_HEADS, "qkv_bias": True, "rotary_base": 10000.0, **options}
    return nn.FlashMaskAttention(EMBED_DIM, HEADS, **options)


def make_input(rng, batch=2, dtype="float32"):
    return paddle.to_tensor(rng.standard_normal((batch, SEQLEN, EMBED_DIM)), dtype=dtype, stop_gradient=False)


def turn_pairs(x, positions, base):
    """Rotary embedding by complex numbers: dims d and d + D/2 are real and imaginary part. x [B, S, H, D]."""
    half = x.shape[-1] // 2
    angle = positions.reshape(-1, SEQLEN, 1, 1) * base ** (-np.arange(half) / half)
    cos, sin = paddle.to_tensor(np.cos(angle), x.dtype), paddle.to_tensor(np.sin(angle), x.dtype)
    a, b = x[..., :half], x[..., half:]
    return paddle.concat([a * cos - b * sin, a * sin + b * cos], axis=-1)


def dense_forward(layer, x, visible, positions=None):
    """The layer's output from its weights; visible is bool NumPy, broadcastable to [B, H, S, S]."""
    batch = x.shape[0]
    q = layer.q_proj(x).reshape([batch, SEQLEN, layer.num_heads, -1])
    k = layer.k_proj(x).reshape([batch, SEQLEN, layer.num_kv_heads, -1])
    v = layer.v_proj(x).reshape([batch, SEQLEN, layer.num_kv_heads, -1])
    if layer.rotary_base is not None:
        positions = np.arange(SEQLEN) if positions is None else positions
        q, k = (turn_pairs(part, positions, layer.rotary_base) for part in (q, k))
    group = layer.num_heads // layer.num_kv_heads
    q, k, v = (
        part.transpose([0, 2, 1, 3]) for part in (q, *(paddle.repeat_interleave(p, group, 2) for p in (k, v)))
    )
    scale = layer.head_dim**-0.5 if layer.softmax_scale is None else layer.softmax_scale
    scores = q @ k.transpose([0, 1, 3, 2]) * scale
    scores = scores + paddle.to_tensor(np.where(visible, 0.0, -1e30), scores.dtype)
    out = paddle.nn.functional.softmax(scores) @ v
    return layer.out_proj(out.transpose([0, 2, 1, 3]).reshape([batch, SEQLEN, -1]))


def assert_same_with_gradients(layer, x, actual, expected, rtol=1e-5, atol=1e-5):
    """Equal outputs, and equal gradients of x and of every weight."""
    np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=rtol, atol=atol)
    wanted = [x, *layer.parameters()]
    weight = paddle.to_tensor(np.random.default_rng(1).standard_normal(actual.shape), actual.dtype)
    gradients = [paddle.grad((out * weight).sum(), wanted) for out in (actual, expected)]
    for parameter, a, b in zip(wanted, *gradients, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=rtol, atol=10 * atol, err_msg=parameter.name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_heads": None},
        {"num_kv_heads": 1},
        {"rotary_base": None},
        {"rotary_base": 500.0},
        {"head_dim": 16},
        {"out_bias": True, "qkv_bias": False},
        {"softmax_scale": 0.05},
    ],
    ids=str,
)
def test_equals_dense(rng, options):
    layer, x = make_layer(**options), make_input(rng)
    visible = dense_from_indices(None, True, SEQLEN, SEQLEN)
    assert_same_with_gradients(layer, x, layer(x, causal=True), dense_forward(layer, x, visible))


def test_indices_and_positions_of_packed_documents(rng):
    layer, x = make_layer(), make_input(rng)
    actual = layer(
        x,
        startend_row_indices=paddle.to_tensor(DOCUMENT_INDICES),
        causal=True,
        position_ids=paddle.to_tensor(POSITIONS),
    )
    visible = dense_from_indices(DOCUMENT_INDICES, True, SEQLEN, SEQLEN)
    assert_same_with_gradients(layer, x, actual, dense_forward(layer, x, visible, POSITIONS))


def test_a_packed_document_is_as_if_alone(rng):
    layer, x = make_layer(), make_input(rng, batch=1)
    packed = layer(x, masks.causal_document(LENGTHS), position_ids=paddle.to_tensor(POSITIONS))
    start = 0
    for length in LENGTHS:
        alone = layer(x[:, start : start + length], masks.causal(length))
        np.testing.assert_allclose(
            packed[:, start : start + length].numpy(), alone.numpy(), rtol=1e-5, atol=1e-6
        )
        start += length


def test_positions_per_sample(rng):
    layer, x = make_layer(), make_input(rng)
    positions = np.stack([POSITIONS, np.arange(SEQLEN) * 3])
    for dtype in ("int64", "int32"):
        actual = layer(x, causal=True, position_ids=paddle.to_tensor(positions, dtype=dtype))
        expected = dense_forward(layer, x, dense_from_indices(None, True, SEQLEN, SEQLEN), positions)
        np.testing.assert_allclose(actual.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)
    one_for_all = layer(x, causal=True, position_ids=paddle.to_tensor(POSITIONS[None]))
    assert (one_for_all == layer(x, causal=True, position_ids=paddle.to_tensor(POSITIONS))).all()


def test_mask_may_change_per_call(rng):
    layer, x = make_layer(), make_input(rng)
    for mask in (masks.full(SEQLEN), masks.sliding_window(SEQLEN, 5), masks.document(LENGTHS)):
        expected = dense_forward(layer, x, mask.to_dense())
        np.testing.assert_allclose(layer(x, mask).numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)
    unmasked = dense_forward(layer, x, np.ones((1, 1, SEQLEN, SEQLEN), bool))
    np.testing.assert_allclose(layer(x).numpy(), unmasked.numpy(), rtol=1e-5, atol=1e-5)


def test_float64_is_exact(rng):
    layer = make_layer()
    layer.to(dtype="float64")
    x = make_input(rng, dtype="float64")
    visible = dense_from_indices(None, True, SEQLEN, SEQLEN)
    expected = dense_forward(layer, x, visible)
    assert_same_with_gradients(layer, x, layer(x, causal=True), expected, rtol=1e-11, atol=1e-12)


def test_dropout_only_in_training(rng):
    layer, x = make_layer(dropout=0.5), make_input(rng)
    layer.eval()
    expected = dense_forward(layer, x, dense_from_indices(None, True, SEQLEN, SEQLEN))
    np.testing.assert_allclose(layer(x, causal=True).numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)
    layer.train()
    first, second = layer(x, causal=True), layer(x, causal=True)
    assert not np.allclose(first.numpy(), expected.numpy(), atol=1e-3)
    assert not np.allclose(first.numpy(), second.numpy(), atol=1e-3)


def test_recompute_repeats_dropout(rng):
    from paddle.distributed.fleet.utils import recompute

    layer, x = make_layer(dropout=0.5), make_input(rng)
    gradients = []
    for call in (layer, partial(recompute, layer)):
        paddle.seed(7)
        call(x, None, None, True).square().sum().backward()
        wanted = [x, *layer.parameters()]
        gradients.append([tensor.grad.numpy() for tensor in wanted])
        for tensor in wanted:
            tensor.clear_grad()
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rotary_of_low_precision_counts_far(rng, dtype):
    """Neither type holds every position above 2048, so angles in it would be wrong."""
    positions = POSITIONS + 3001
    q = paddle.to_tensor(rng.standard_normal((1, SEQLEN, 2, 8)), "float32").astype(dtype)
    rotated, _ = nn.apply_rotary(q, q, paddle.to_tensor(positions), 10000.0)
    assert rotated.dtype == q.dtype
    expected = turn_pairs(q.astype("float32"), positions, 10000.0)
    np.testing.assert_allclose(
        rotated.astype("float32").numpy(), expected.numpy(), rtol=2**-7, atol=1e-3
    )  # Paddle 2.6 truncates


@pytest.mark.parametrize("train", [True, False])
def test_to_static_of_any_batch_and_length(rng, train):
    layer, x = make_layer(), make_input(rng)
    if not train:
        layer.eval()
    expected = layer(x, causal=True)

    class Model(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.attention = layer

        def forward(self, x):
            return self.attention(x, causal=True)

    spec = [paddle.static.InputSpec([None, None, EMBED_DIM], "float32")]
    static = traced(Model(), input_spec=spec)
    assert_same_with_gradients(layer, x, static(x), expected, rtol=1e-6, atol=1e-6)
    shorter = x[:1, :17]
    np.testing.assert_allclose(
        static(shorter).numpy(), layer(shorter, causal=True).numpy(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("full_graph", [True, False])
def test_to_static_with_indices_and_positions(rng, full_graph):
    layer, x = make_layer(), make_input(rng)
    arguments = {
        "startend_row_indices": paddle.to_tensor(DOCUMENT_INDICES),
        "causal": True,
        "position_ids": paddle.to_tensor(POSITIONS),
    }
    expected = layer(x, **arguments)
    static = traced(layer, full_graph=full_graph)
    np.testing.assert_allclose(static(x, **arguments).numpy(), expected.numpy(), rtol=1e-6, atol=1e-6)


def test_state_dict_is_stable(rng):
    layer = make_layer(out_bias=True)
    assert {name: value.shape for name, value in layer.state_dict().items()} == {
        "q_proj.weight": [48, 48],
        "q_proj.bias": [48],
        "k_proj.weight": [48, 16],
        "k_proj.bias": [16],
        "v_proj.weight": [48, 16],
        "v_proj.bias": [16],
        "out_proj.weight": [48, 48],
        "out_proj.bias": [48],
    }
    paddle.seed(1)
    other = nn.FlashMaskAttention(
        EMBED_DIM, HEADS, KV_HEADS, qkv_bias=True, out_bias=True, rotary_base=10000.0
    )
    other.set_state_dict(layer.state_dict())
    x = make_input(rng)
    assert (layer(x, causal=True) == other(x, causal=True)).all()


INTEGER, POSITIVE = "expected an integer", f"expected an integer in [1, {2**31 - 1}]"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(
            case
            for name in ("embed_dim", "num_heads", "num_kv_heads", "head_dim")
            for case in (
                ({name: 2.0}, TypeError, f"{name}: {INTEGER}, got float 2.0"),
                ({name: "16"}, TypeError, f"{name}: {INTEGER}, got str '16'"),
                ({name: True}, TypeError, f"{name}: {INTEGER}, got bool True"),
                ({name: 0}, ValueError, f"{name}: {POSITIVE}, got 0"),
                ({name: -8}, ValueError, f"{name}: {POSITIVE}, got -8"),
            )
        ),
        ({"embed_dim": None}, TypeError, f"embed_dim: {INTEGER}, got NoneType None"),
        ({"num_heads": None}, TypeError, f"num_heads: {INTEGER}, got NoneType None"),
        ({"num_kv_heads": 4}, ValueError, "num_kv_heads: expected a divisor of num_heads=6, got 4"),
        ({"num_heads": 7}, ValueError, "num_heads: expected a divisor of embed_dim=48, or head_dim, got 7"),
        (
            {"head_dim": 9, "rotary_base": 1e4},
            ValueError,
            "head_dim: expected an even one for the rotary embedding, got 9",
        ),
        ({"rotary_base": "x"}, TypeError, "rotary_base: expected a positive number or None, got str"),
        ({"rotary_base": True}, TypeError, "rotary_base: expected a positive number or None, got bool"),
        ({"rotary_base": -1}, ValueError, "rotary_base: expected a positive number or None, got -1.0"),
        ({"rotary_base": np.inf}, ValueError, "rotary_base: expected a positive number or None, got inf"),
        ({"dropout": "a"}, TypeError, "dropout: expected a number in [0, 1), got str"),
        ({"dropout": None}, TypeError, "dropout: expected a number in [0, 1), got NoneType"),
        ({"dropout": 1}, ValueError, "dropout: expected a number in [0, 1), got 1.0"),
        ({"softmax_scale": "x"}, TypeError, "softmax_scale: expected a finite number or None, got str"),
        ({"softmax_scale": np.nan}, ValueError, "softmax_scale: expected a finite number or None, got nan"),
        ({"deterministic": 3}, TypeError, "deterministic: expected a bool, got 3"),
        ({"qkv_bias": "x"}, TypeError, "qkv_bias: expected a bool, got 'x'"),
        ({"out_bias": None}, TypeError, "out_bias: expected a bool, got None"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        nn.FlashMaskAttention(**{"embed_dim": EMBED_DIM, "num_heads": HEADS, **options})


def zeros(*shape, dtype="float32"):
    return paddle.zeros(shape, dtype=dtype)


X, FLOATS = zeros(2, SEQLEN, EMBED_DIM), "float16 or bfloat16 or float32 or float64"
LAYOUTS = "[2, 40], [1, 40] or [40]"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": 3}, TypeError, "x: expected a paddle.Tensor, got int"),
        ({"x": X.numpy()}, TypeError, "x: expected a paddle.Tensor, got ndarray"),
        ({"x": zeros(2, 5)}, ValueError, "x: expected rank 3 [B, S, 48], got shape [2, 5]"),
        ({"x": zeros(2, 5, 47)}, ValueError, "x: expected [B, S, 48], got shape [2, 5, 47]"),
        ({"x": X.astype("int64")}, TypeError, f"x: expected {FLOATS}, got int64"),
        (
            {"x": X.astype("float64")},
            TypeError,
            "x: expected the dtype of the layer's weights, float32, got float64",
        ),
        ({"position_ids": [0, 1, 2]}, TypeError, "position_ids: expected a paddle.Tensor, got list"),
        (
            {"position_ids": zeros(3, dtype="int64")},
            ValueError,
            f"position_ids: expected {LAYOUTS}, got shape [3]",
        ),
        (
            {"position_ids": zeros(3, 40, dtype="int64")},
            ValueError,
            f"position_ids: expected {LAYOUTS}, got shape [3, 40]",
        ),
        (
            {"position_ids": zeros(1, 1, 40, dtype="int64")},
            ValueError,
            f"position_ids: expected rank 1 or 2 {LAYOUTS}, got shape [1, 1, 40]",
        ),
        ({"position_ids": zeros(40)}, TypeError, "position_ids: expected int32 or int64, got float32"),
        ({"mask": 3}, TypeError, "mask: expected a paddle_flashmask.masks.ColumnMask, got int"),
        ({"startend_row_indices": 3}, TypeError, "startend_row_indices: expected a paddle.Tensor, got int"),
        ({"causal": 1}, TypeError, "causal: expected a bool, got 1"),
    ],
)
def test_bad_inputs(arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        make_layer()(**{"x": X, **arguments})


def test_positions_without_rotary_are_refused():
    with pytest.raises(ValueError, match=r"position_ids: expected None, as this layer has no rotary_base"):
        make_layer(rotary_base=None)(X, position_ids=paddle.to_tensor(POSITIONS))


def test_someones_own_projection_decides_what_it_takes(rng):
    """An adapter say, which may have no weight of its own."""

    class Rounded(paddle.nn.Layer):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x.astype("float32"))

    layer, x = make_layer(), make_input(rng, dtype="float64")
    expected = layer(x.astype("float32"), causal=True)
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(layer, name, Rounded(getattr(layer, name)))
    np.testing.assert_array_equal(layer(x, causal=True).numpy(), expected.numpy())


Q, K, IDS = zeros(2, 5, 4, 8), zeros(2, 5, 2, 8), zeros(5, dtype="int64")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": 3}, TypeError, "q: expected a paddle.Tensor, got int"),
        ({"q": zeros(2, 5, 8)}, ValueError, "q: expected rank 4 [B, S, Hq, D], got shape [2, 5, 8]"),
        ({"k": K.astype("float64")}, TypeError, "k: expected float32, got float64"),
        (
            {"k": zeros(2, 6, 2, 8)},
            ValueError,
            "k: expected the batch, length, head dim of q [2, 5, 4, 8], got shape [2, 6, 2, 8]",
        ),
        ({"base": "x"}, TypeError, "base: expected a positive number, got str"),
        ({"base": 0}, ValueError, "base: expected a positive number, got 0.0"),
        ({"position_ids": None}, TypeError, "position_ids: expected a paddle.Tensor, got NoneType"),
    ],
)
def test_bad_arguments_of_rotary(arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        nn.apply_rotary(**{"q": Q, "k": K, "position_ids": IDS, **arguments})
