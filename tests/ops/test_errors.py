"""Wrong arguments: each error names the argument, what was expected and what came, before anything runs."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from helpers import traced

from paddle_flashmask import _checks, _ops, attention, flashmask_attention, masks

B, SQ, SK, HQ, HK, D, DV = 2, 6, 8, 4, 2, 16, 12


def tensor(*shape: int, dtype: str = "float32") -> paddle.Tensor:
    return paddle.zeros(shape, dtype=dtype)


def indices(*shape: int, dtype: str = "int32") -> dict[str, Any]:
    return {"startend_row_indices": tensor(*shape, dtype=dtype)}


INPUTS = {"q": tensor(B, SQ, HQ, D), "k": tensor(B, SK, HK, D), "v": tensor(B, SK, HK, DV)}


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("the operator was called with arguments it should never see")

    monkeypatch.setattr(_ops, "flashmask", launched)


# The wrong arguments, the error, and its whole message. Both functions check these alike.
FLOATS = "float16 or bfloat16 or float32 or float64"
SAME_AS_K = "v: expected the batch, length, heads of k [2, 8, 2, 16], got shape"
INPUT_ERRORS = [
    ({"q": None}, TypeError, "q: expected a paddle.Tensor, got NoneType"),
    ({"q": np.zeros((B, SQ, HQ, D))}, TypeError, "q: expected a paddle.Tensor, got ndarray"),
    ({"k": [1.0]}, TypeError, "k: expected a paddle.Tensor, got list"),
    ({"q": tensor(SQ, HQ, D)}, ValueError, "q: expected rank 4 [B, Sq, Hq, D], got shape [6, 4, 16]"),
    (
        {"v": tensor(2, 8, 2, 3, 4)},
        ValueError,
        "v: expected rank 4 [B, Sk, Hk, Dv], got shape [2, 8, 2, 3, 4]",
    ),
    ({"q": tensor(B, SQ, HQ, D, dtype="int32")}, TypeError, f"q: expected {FLOATS}, got int32"),
    ({"v": tensor(B, SK, HK, DV, dtype="bool")}, TypeError, f"v: expected {FLOATS}, got bool"),
    (
        {"k": tensor(B, SK, HK, D, dtype="float64")},
        TypeError,
        "k: expected the dtype of q, float32, got float64",
    ),
    (
        {"v": tensor(B, SK, HK, DV, dtype="float16")},
        TypeError,
        "v: expected the dtype of q, float32, got float16",
    ),
    (
        {"q": tensor(B, SQ, 0, D)},
        ValueError,
        "q: expected [B, Sq, Hq, D] with at least one head and one dim, got shape [2, 6, 0, 16]",
    ),
    (
        {"v": tensor(B, SK, HK, 0)},
        ValueError,
        "v: expected [B, Sk, Hk, Dv] with at least one head and one dim, got shape [2, 8, 2, 0]",
    ),
    (
        {"k": tensor(3, SK, HK, D)},
        ValueError,
        "k: expected the batch of q [2, 6, 4, 16], got shape [3, 8, 2, 16]",
    ),
    (
        {"k": tensor(B, SK, HK, 8)},
        ValueError,
        "k: expected the head dim of q [2, 6, 4, 16], got shape [2, 8, 2, 8]",
    ),
    ({"v": tensor(3, SK, HK, DV)}, ValueError, f"{SAME_AS_K} [3, 8, 2, 12]"),
    ({"v": tensor(B, 7, HK, DV)}, ValueError, f"{SAME_AS_K} [2, 7, 2, 12]"),
    ({"v": tensor(B, SK, 4, DV)}, ValueError, f"{SAME_AS_K} [2, 8, 4, 12]"),
    (
        {"q": tensor(B, SQ, 3, D)},
        ValueError,
        "k: expected a number of heads that divides the 3 of q, got 2",
    ),
]
INDEX_ERRORS = [
    ({"startend_row_indices": [1]}, TypeError, "expected a paddle.Tensor, got list"),
    (
        {"startend_row_indices": np.zeros((2, 1, 8, 2), np.int32)},
        TypeError,
        "expected a paddle.Tensor, got ndarray",
    ),
    (indices(B, SK, 2), ValueError, "expected rank 4 [Bm, Hm, Sk, C], got shape [2, 8, 2]"),
    (indices(B, 1, SK, 2, dtype="int64"), TypeError, "expected int32, got int64"),
    (indices(3, 1, SK, 2), ValueError, "expected a batch of 1 or that of q, 2, got shape [3, 1, 8, 2]"),
    (
        indices(B, 3, SK, 2),
        ValueError,
        "expected 1 head, or those of k, 2, or of q, 4, got shape [2, 3, 8, 2]",
    ),
    (indices(B, 1, SQ, 2), ValueError, "expected the length of k, 8, got shape [2, 1, 6, 2]"),
    (
        indices(B, 1, SK, 1),
        ValueError,
        "expected a last dim of 2 or 4 with causal=False, got shape [2, 1, 8, 1]",
    ),
    (
        indices(B, 1, SK, 3),
        ValueError,
        "expected a last dim of 2 or 4 with causal=False, got shape [2, 1, 8, 3]",
    ),
    (
        indices(B, 1, SK, 4) | {"causal": True},
        ValueError,
        "expected a last dim of 1 or 2 with causal=True, got shape [2, 1, 8, 4]",
    ),
]


def assert_refused(function: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        function(**arguments)


def cases(*errors: tuple[dict[str, Any], type[Exception], str]) -> Any:
    ids = [f"{'-'.join(arguments)}: {message.split('got ')[-1]}" for arguments, _, message in errors]
    return pytest.mark.parametrize(("arguments", "error", "message"), errors, ids=ids)


@pytest.mark.usefixtures("no_launch")
class TestAttention:
    @cases(
        *INPUT_ERRORS,
        *(
            (arguments, error, f"startend_row_indices: {message}")
            for arguments, error, message in INDEX_ERRORS
        ),
        (
            {"mask": np.ones((6, 8), bool)},
            TypeError,
            "mask: expected a paddle_flashmask.masks.ColumnMask, got ndarray; "
            "a tensor goes to startend_row_indices",
        ),
        ({"mask": "causal"}, TypeError, "mask: expected a paddle_flashmask.masks.ColumnMask, got str"),
        ({"mask": masks.full(5, 8)}, ValueError, "mask: expected 6 rows, the length of q, got 5"),
        ({"mask": masks.full(6, 9)}, ValueError, "mask: expected 8 columns, the length of k, got 9"),
        (
            {"mask": masks.ColumnMask([(np.zeros((3, 1, 8), int), 1)], seqlen_q=6, seqlen_k=8)},
            ValueError,
            "mask: expected a batch of 1 or that of q, 2, got 3",
        ),
        (
            {"mask": masks.ColumnMask([(np.zeros((1, 3, 8), int), 1)], seqlen_q=6, seqlen_k=8)},
            ValueError,
            "mask: expected 1 head, or those of k, 2, or of q, 4, got 3",
        ),
        (
            {"mask": masks.full(6, 8), **indices(B, 1, SK, 2)},
            ValueError,
            "mask: expected mask or startend_row_indices, got both",
        ),
        (
            {"mask": masks.full(6, 8), "causal": False},
            ValueError,
            "mask: expected mask or causal (a ColumnMask has its own causality), got both",
        ),
        ({"causal": 1}, TypeError, "causal: expected a bool, got 1"),
        ({"causal": "yes"}, TypeError, "causal: expected a bool, got 'yes'"),
        ({"softmax_scale": "big"}, TypeError, "softmax_scale: expected a finite number or None, got str"),
        ({"softmax_scale": True}, TypeError, "softmax_scale: expected a finite number or None, got bool"),
        (
            {"softmax_scale": tensor(1)},
            TypeError,
            "softmax_scale: expected a finite number or None, got Tensor",
        ),
        ({"softmax_scale": np.nan}, ValueError, "softmax_scale: expected a finite number or None, got nan"),
        ({"softmax_scale": np.inf}, ValueError, "softmax_scale: expected a finite number or None, got inf"),
        (
            {"softmax_scale": 10**400},
            ValueError,
            "softmax_scale: expected a finite number or None, got more than a float64 holds",
        ),
        ({"dropout_p": None}, TypeError, "dropout_p: expected a number in [0, 1), got NoneType"),
        ({"dropout_p": tensor(1)}, TypeError, "dropout_p: expected a number in [0, 1), got Tensor"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p: expected a number in [0, 1), got 1.0"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p: expected a number in [0, 1), got -0.1"),
        ({"training": None}, TypeError, "training: expected a bool, got None"),
        ({"deterministic": 0}, TypeError, "deterministic: expected a bool, got 0"),
        ({"return_lse": "lse"}, TypeError, "return_lse: expected a bool, got 'lse'"),
    )
    def test_message(self, arguments, error, message):
        assert_refused(attention, INPUTS | arguments, error, message)

    def test_empty_inputs_are_checked_too(self):
        q = tensor(B, 0, HQ, D)
        assert_refused(
            attention,
            INPUTS | {"q": q, "dropout_p": 2},
            ValueError,
            "dropout_p: expected a number in [0, 1), got 2.0",
        )

    def test_traced(self):
        """Sizes that the program does not know yet are not held against anyone; the others are."""
        spec = [
            paddle.static.InputSpec(shape, "float32") for shape in ([None, None, 4, 16], [None, None, 3, 16])
        ]

        def f(q, k):
            return attention(q, k, k)

        with pytest.raises(ValueError, match="k: expected a number of heads that divides the 4 of q, got 3"):
            traced(f, input_spec=spec)(tensor(1, 2, 4, 16), tensor(1, 2, 3, 16))


NAMES = {"q": "query", "k": "key", "v": "value"}


def renamed(text: str) -> str:
    """A message about q, k and v as one about query, key and value."""
    return re.sub(r"(^|of )([qkv])\b", lambda match: match[1] + NAMES[match[2]], text)


@pytest.mark.usefixtures("no_launch")
class TestFlashmaskAttention:
    WINDOW = "window_size: expected an int, or a pair (left, right) of them, got"

    @cases(
        *(
            ({NAMES[name]: value for name, value in arguments.items()}, error, renamed(message))
            for arguments, error, message in INPUT_ERRORS
        ),
        *(
            (arguments, error, f"startend_row_indices: {renamed(message)}")
            for arguments, error, message in INDEX_ERRORS
        ),
        ({"dropout": "half"}, TypeError, "dropout: expected a number in [0, 1), got str"),
        ({"dropout": 1.5}, ValueError, "dropout: expected a number in [0, 1), got 1.5"),
        ({"causal": None}, TypeError, "causal: expected a bool, got None"),
        ({"window_size": 1.5}, TypeError, f"{WINDOW} 1.5"),
        ({"window_size": True}, TypeError, f"{WINDOW} True"),
        ({"window_size": (1, 2, 3)}, TypeError, f"{WINDOW} (1, 2, 3)"),
        ({"window_size": (1, None)}, TypeError, f"{WINDOW} (1, None)"),
        ({"window_size": "12"}, TypeError, f"{WINDOW} '12'"),
        ({"return_softmax_lse": 1}, TypeError, "return_softmax_lse: expected a bool, got 1"),
        ({"return_seed_offset": None}, TypeError, "return_seed_offset: expected a bool, got None"),
        ({"training": "no"}, TypeError, "training: expected a bool, got 'no'"),
        ({"fixed_seed_offset": 3}, TypeError, "fixed_seed_offset: expected a paddle.Tensor, got int"),
        ({"fixed_seed_offset": tensor(2)}, TypeError, "fixed_seed_offset: expected int64, got float32"),
        (
            {"fixed_seed_offset": tensor(3, dtype="int64")},
            ValueError,
            "fixed_seed_offset: expected shape [2], got shape [3]",
        ),
        (
            {"fixed_seed_offset": tensor(1, 2, dtype="int64")},
            ValueError,
            "fixed_seed_offset: expected rank 1 [2], got shape [1, 2]",
        ),
        ({"rng_name": None}, TypeError, "rng_name: expected a str, got None"),
        (
            {"rng_name": "nobody", "dropout": 0.5},
            ValueError,
            "rng_name: expected the name of a registered generator, got 'nobody'",
        ),
        ({"softmax_scale": "big"}, TypeError, "softmax_scale: expected a finite number or None, got str"),
        (
            {"block_mask": tensor(1, dtype="int32")},
            NotImplementedError,
            "block_mask: expected None (it is not supported), got a block mask",
        ),
    )
    def test_message(self, arguments, error, message):
        inputs = {NAMES[name]: value for name, value in INPUTS.items()}
        assert_refused(flashmask_attention, inputs | arguments, error, message)


@pytest.mark.parametrize("name", ["k", "v", "startend_row_indices", "fixed_seed_offset"])
def test_tensors_on_two_devices(name):
    """A CPU build has one device only, so the check gets stand-ins."""
    here, there = SimpleNamespace(place="Place(cpu)"), SimpleNamespace(place="Place(gpu:0)")
    _checks.check_place(name, here, "q", here)
    assert_refused(
        _checks.check_place,
        {"name": name, "tensor": there, "of_name": "q", "of": here},
        ValueError,
        f"{name}: expected the device of q, Place(cpu), got Place(gpu:0)",
    )


HEAD_DIM = "expected a head dim that is a multiple of 8 and at most 256 on CUDA, got shape"


@pytest.mark.parametrize(
    ("kind", "dtype", "dims", "error", "message"),
    [
        ("cpu", "float64", (3, 300), None, ""),
        ("gpu:0", "bfloat16", (8, 256), None, ""),
        ("gpu:0", "float32", (64, 64), TypeError, "q: expected float16 or bfloat16 on CUDA, got float32"),
        ("gpu:0", "float16", (60, 64), ValueError, f"q: {HEAD_DIM} [2, 6, 4, 60]"),
        ("gpu:0", "float16", (64, 264), ValueError, f"v: {HEAD_DIM} [2, 6, 4, 264]"),
        (
            "xpu",
            "float16",
            (64, 64),
            ValueError,
            "q: expected a tensor on a CPU or a CUDA device, got Place(xpu)",
        ),
    ],
)
def test_what_cuda_kernels_do_not_take(monkeypatch, kind, dtype, dims, error, message):
    monkeypatch.setattr(_checks, "cuda_kernels", lambda: ("sm80_forward_d64_bf16",))
    q, v = (SimpleNamespace(place=f"Place({kind})", dtype=dtype, shape=[2, 6, 4, dim]) for dim in dims)
    arguments = {"names": ("q", "k", "v"), "q": q, "v": v}
    if error is None:
        _checks.check_device(**arguments)
    else:
        assert_refused(_checks.check_device, arguments, error, message)


def test_cuda_tensors_without_cuda_kernels(monkeypatch):
    monkeypatch.setattr(_checks, "cuda_kernels", tuple)
    q = SimpleNamespace(place="Place(gpu:0)", dtype="float16", shape=[2, 6, 4, 64])
    assert_refused(
        _checks.check_device,
        {"names": ("q", "k", "v"), "q": q, "v": q},
        ValueError,
        "q: expected a tensor on the CPU, as no CUDA kernels were built, got Place(gpu:0)",
    )


class TestOperator:
    """Who bypasses Python, a saved program say, still cannot make a kernel read what is not there."""

    def call(self, **wrong: Any) -> None:
        options = {"causal": False, "softmax_scale": 1.0, "indices": None} | wrong
        inputs = {name: options.pop(name, INPUTS[name]) for name in "qkv"}
        _ops.flashmask(*inputs.values(), options.pop("indices"), **options)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ({"k": tensor(B, SK, HK, 8)}, "the shapes of q, k and v do not fit together"),
            ({"v": tensor(B, 7, HK, DV)}, "the shapes of q, k and v do not fit together"),
            ({"q": tensor(B, SQ, 3, D)}, "the heads of q must be a multiple of those of k, got 3 and 2"),
            ({"k": tensor(B, SK, HK, D, dtype="float64")}, "q, k and v must have one dtype"),
            ({"indices": tensor(B, 1, 7, 2, dtype="int32")}, "startend_row_indices must be [Bm, Hm, Sk, C]"),
            (
                {"indices": tensor(B, 3, SK, 2, dtype="int32")},
                "the heads of startend_row_indices must be 1 or",
            ),
            (
                {"indices": tensor(3, 1, SK, 2, dtype="int32")},
                "the batch of startend_row_indices must be 1 or",
            ),
            (
                {"indices": tensor(B, SK, 2, dtype="int32")},
                "startend_row_indices must have rank 4, got rank 3",
            ),
            ({"visit": "dense"}, "a dense mask goes with visit=dense, and with that alone"),
            ({"dense_mask": tensor(1, 1, SQ, SK, dtype="bool")}, "a dense mask goes with visit=dense"),
            (
                {"visit": "dense", "dense_mask": tensor(1, 1, SK, SQ, dtype="bool")},
                "dense_mask must be [Bm, Hm, Sq, Sk]",
            ),
            (
                {"dropout_p": 1.0, "seed_offset": tensor(2, dtype="int64")},
                "dropout_p must be in [0, 1), got 1",
            ),
            ({"dropout_p": float("nan")}, "dropout_p must be in [0, 1), got nan"),
            ({"dropout_p": 0.5}, "dropout needs a seed, and a seed is for dropout"),
            ({"seed_offset": tensor(2, dtype="int64")}, "dropout needs a seed, and a seed is for dropout"),
            (
                {"dropout_p": 0.5, "seed_offset": tensor(3, dtype="int64")},
                "seed_offset must hold two values, got 3",
            ),
        ],
    )
    def test_message(self, wrong, message):
        with pytest.raises(Exception, match=re.escape(f"flashmask: {message}")):
            self.call(**wrong)

    def test_dtypes_of_masks(self):
        for wrong in (
            {"indices": tensor(B, 1, SK, 2, dtype="int64")},
            {"visit": "dense", "dense_mask": tensor(1, 1, SQ, SK, dtype="int32")},
            {"dropout_p": 0.5, "seed_offset": tensor(2, dtype="int32")},
        ):
            with pytest.raises(Exception, match="type"):
                self.call(**wrong)
