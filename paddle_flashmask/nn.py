"""An attention layer: projections, grouped key heads, optional rotary embedding, any column mask per call."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import paddle
from paddle import Tensor, nn

from paddle_flashmask._checks import (
    FLOATS,
    check_flag,
    check_number,
    check_place,
    check_probability,
    check_tensor,
    dtype_name,
    fail,
    same_size,
)
from paddle_flashmask._ops import in_pir_mode, to_device_of
from paddle_flashmask.functional import amp_dtype, attention, traced_as_written
from paddle_flashmask.masks import ColumnMask
from paddle_flashmask.masks._checks import as_int


class FlashMaskAttention(nn.Layer):
    """Multi-head self-attention under a column mask.

    ``q_proj``, ``k_proj`` and ``v_proj`` make the heads, ``out_proj`` joins them; these four are the whole
    ``state_dict``. Query head h reads key head ``h // (num_heads // num_kv_heads)``.

    Args:
        embed_dim: size of the last dim of input and output.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of ``num_heads``; None is ``num_heads``.
        head_dim: dims per head; None is ``embed_dim // num_heads``.
        qkv_bias: whether the three input projections have a bias.
        out_bias: whether the output projection has one.
        rotary_base: base of the rotary position embedding of queries and keys (10000.0 is Llama's); None: no
            position embedding.
        dropout: probability of dropping an attention weight, in training only.
        softmax_scale: multiplies the scores; None is ``head_dim ** -0.5``.
        deterministic: as for ``attention``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a wrong value, or two do not belong together.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        rotary_base: float | None = None,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        deterministic: bool | None = None,
    ) -> None:
        super().__init__()
        embed_dim = as_int("embed_dim", embed_dim, minimum=1)
        num_heads = as_int("num_heads", num_heads, minimum=1)
        num_kv_heads = num_heads if num_kv_heads is None else as_int("num_kv_heads", num_kv_heads, minimum=1)
        if num_heads % num_kv_heads != 0:
            fail(ValueError, "num_kv_heads", f"a divisor of num_heads={num_heads}", num_kv_heads)
        if head_dim is None:
            if embed_dim % num_heads != 0:
                fail(ValueError, "num_heads", f"a divisor of embed_dim={embed_dim}, or head_dim", num_heads)
            head_dim = embed_dim // num_heads
        head_dim = as_int("head_dim", head_dim, minimum=1)
        if rotary_base is not None:
            rotary_base = _check_rotary(rotary_base, "rotary_base", "a positive number or None", head_dim)
        dropout = check_probability("dropout", dropout)
        if softmax_scale is not None:
            softmax_scale = check_number("softmax_scale", softmax_scale, "a finite number or None")
        if deterministic is not None:
            check_flag("deterministic", deterministic)
        for name, flag in (("qkv_bias", qkv_bias), ("out_bias", out_bias)):
            check_flag(name, flag)

        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rotary_base = rotary_base
        self.dropout = dropout
        self.softmax_scale = softmax_scale
        self.deterministic = deterministic
        qkv_attr, out_attr = (None if bias else False for bias in (qkv_bias, out_bias))
        self.q_proj = nn.Linear(embed_dim, num_heads * head_dim, bias_attr=qkv_attr)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias_attr=qkv_attr)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * head_dim, bias_attr=qkv_attr)
        self.out_proj = nn.Linear(num_heads * head_dim, embed_dim, bias_attr=out_attr)

    def forward(
        self,
        x: Tensor,
        mask: ColumnMask | None = None,
        startend_row_indices: Tensor | None = None,
        causal: bool | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Attends within each sample.

        Args:
            x: ``[B, S, embed_dim]``.
            mask: which row sees which column; not together with the next two.
            startend_row_indices: int32 ``[Bm, Hm, S, C]``, as for ``attention``.
            causal: as for ``attention``.
            position_ids: integers ``[B, S]``, ``[1, S]`` or ``[S]``, for the rotary embedding; None counts
                from 0. Packed documents restart at 0 each.

        Returns:
            ``[B, S, embed_dim]``.

        Raises:
            TypeError: an argument has the wrong type or dtype; that of ``x`` is the weights', but under AMP.
            ValueError: shapes, devices or arguments that do not belong together.
        """
        self._check_input(x)
        q = self.q_proj(x).reshape([0, 0, self.num_heads, self.head_dim])
        k = self.k_proj(x).reshape([0, 0, self.num_kv_heads, self.head_dim])
        v = self.v_proj(x).reshape([0, 0, self.num_kv_heads, self.head_dim])
        if self.rotary_base is not None:
            if position_ids is None:
                position_ids = to_device_of(x, paddle.arange(x.shape[1]))
            q, k = apply_rotary(q, k, position_ids, self.rotary_base)
        elif position_ids is not None:
            fail(ValueError, "position_ids", "None, as this layer has no rotary_base", "some")
        out = attention(
            q,
            k,
            v,
            mask=mask,
            startend_row_indices=startend_row_indices,
            causal=causal,
            softmax_scale=self.softmax_scale,
            dropout_p=self.dropout,
            training=self.training,
            deterministic=self.deterministic,
        )
        return self.out_proj(out.reshape([0, 0, self.num_heads * self.head_dim]))

    def _check_input(self, x: Tensor) -> None:
        check_tensor("x", x, 3, FLOATS, f"[B, S, {self.embed_dim}]")
        if not same_size(x.shape[2], self.embed_dim):
            fail(ValueError, "x", f"[B, S, {self.embed_dim}]", f"shape {list(x.shape)}")
        if not isinstance(
            self.q_proj, nn.Linear
        ):  # someone's own (an adapter, say), which knows what it takes
            return
        weight = self.q_proj.weight
        if amp_dtype() is None and dtype_name(x) != dtype_name(weight):
            fail(TypeError, "x", f"the dtype of the layer's weights, {dtype_name(weight)}", dtype_name(x))
        check_place("x", x, "the layer's weights", weight)

    def extra_repr(self) -> str:
        """The arguments, for ``print(model)``."""
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, rotary_base={self.rotary_base}, dropout={self.dropout}"
        )


@traced_as_written
def apply_rotary(q: Tensor, k: Tensor, position_ids: Tensor, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their positions, as Llama does.

    Dims d and d + D/2 are one pair, turned by ``position * base ** (-2 d / D)`` (RoFormer's rotation, with
    halves in place of neighbours). Angles and products are float32, also under AMP, or float64 for float64.

    Args:
        q: ``[B, S, Hq, D]``.
        k: ``[B, S, Hk, D]``.
        position_ids: integers ``[B, S]``, ``[1, S]`` or ``[S]``.
        base: base of the frequencies.

    Returns:
        q and k rotated, in their dtypes.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices do not fit together, D is odd, or ``base`` is not positive.
    """
    check_tensor("q", q, 4, FLOATS, "[B, S, Hq, D]")
    check_tensor("k", k, 4, (dtype_name(q),), "[B, S, Hk, D]")
    batch, seqlen, _, head_dim = q.shape
    if not all(same_size(k.shape[axis], q.shape[axis]) for axis in (0, 1, 3)):
        fail(ValueError, "k", f"the batch, length, head dim of q {list(q.shape)}", f"shape {list(k.shape)}")
    base = _check_rotary(base, "base", "a positive number", head_dim)
    layouts = f"[{batch}, {seqlen}], [1, {seqlen}] or [{seqlen}]"
    check_tensor("position_ids", position_ids, (1, 2), ("int32", "int64"), layouts)
    shape = [1, *position_ids.shape][-2:]
    if not ((shape[0] == 1 or same_size(shape[0], batch)) and same_size(shape[1], seqlen)):
        fail(ValueError, "position_ids", layouts, f"shape {list(position_ids.shape)}")
    check_place("position_ids", position_ids, "q", q)
    with _without_amp():
        wide = "float64" if q.dtype == paddle.float64 else "float32"
        frequencies = paddle.exp(paddle.arange(0, head_dim, 2, dtype=wide) * (-math.log(base) / head_dim))
        angles = position_ids.astype(wide).unsqueeze(-1) * frequencies
        cos, sin = (f(angles).unsqueeze(-2) for f in (paddle.cos, paddle.sin))  # [(B,) S, 1, D / 2]

        def rotate(x: Tensor) -> Tensor:
            first, second = x.astype(wide).chunk(2, axis=-1)
            rotated = paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)
            return rotated.astype(x.dtype)

        return rotate(q), rotate(k)


def _without_amp() -> AbstractContextManager[None]:
    """Keeps what is inside in its own dtype: low precision does not hold every position above 2048.

    Paddle 2.6 cannot switch AMP off inside a program that it traces: there AMP rewrites the program later.
    """
    if paddle.in_dynamic_mode() or in_pir_mode():
        return paddle.amp.auto_cast(enable=False)
    return nullcontext()


def _check_rotary(base: float, name: str, expected: str, head_dim: int) -> float:
    base = check_number(name, base, expected)
    if base <= 0:
        fail(ValueError, name, expected, base)
    if head_dim % 2 != 0:
        fail(ValueError, "head_dim", "an even one for the rotary embedding", head_dim)
    return base
