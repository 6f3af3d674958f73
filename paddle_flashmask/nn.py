"""An attention layer: projections, grouped key heads, optional rotary embedding, any column mask per call."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import paddle
from paddle import Tensor, nn

from paddle_flashmask._checks import same_size
from paddle_flashmask._ops import in_pir_mode
from paddle_flashmask.functional import attention, traced_as_written
from paddle_flashmask.masks import ColumnMask


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
        ValueError: arguments that do not belong together.
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
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (
            ("embed_dim", embed_dim),
            ("num_heads", num_heads),
            ("num_kv_heads", num_kv_heads),
        ):
            _check_positive(name, value)
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads={num_heads}, got {num_kv_heads}")
        if head_dim is None:
            if embed_dim % num_heads != 0:
                raise ValueError(
                    f"num_heads: expected a divisor of embed_dim={embed_dim}, or head_dim, got {num_heads}"
                )
            head_dim = embed_dim // num_heads
        _check_positive("head_dim", head_dim)
        if rotary_base is not None:
            if not rotary_base > 0:
                raise ValueError(f"rotary_base: expected a positive number or None, got {rotary_base}")
            if head_dim % 2 != 0:
                raise ValueError(f"head_dim: rotary embedding needs an even one, got {head_dim}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: expected a probability in [0, 1), got {dropout}")

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
            ValueError: shapes or arguments that do not belong together.
        """
        if x.ndim != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x: expected shape [B, S, {self.embed_dim}], got {list(x.shape)}")
        q = self.q_proj(x).reshape([0, 0, self.num_heads, self.head_dim])
        k = self.k_proj(x).reshape([0, 0, self.num_kv_heads, self.head_dim])
        v = self.v_proj(x).reshape([0, 0, self.num_kv_heads, self.head_dim])
        if self.rotary_base is not None:
            if position_ids is None:
                position_ids = paddle.arange(x.shape[1])
            q, k = apply_rotary(q, k, position_ids, self.rotary_base)
        elif position_ids is not None:
            raise ValueError("position_ids: only a layer with rotary_base uses them, this one has none")
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
        TypeError: ``position_ids`` are not integers.
        ValueError: ``position_ids`` do not have one of the two shapes.
    """
    if position_ids.dtype not in (paddle.int32, paddle.int64):
        raise TypeError(f"position_ids: expected int32 or int64, got {position_ids.dtype}")
    batch, seqlen, _, head_dim = q.shape
    shape = [1, *position_ids.shape] if position_ids.ndim == 1 else list(position_ids.shape)
    if len(shape) != 2 or not ((shape[0] == 1 or same_size(shape[0], batch)) and same_size(shape[1], seqlen)):
        expected = f"[{batch}, {seqlen}], [1, {seqlen}] or [{seqlen}]"
        raise ValueError(f"position_ids: expected shape {expected}, got {list(position_ids.shape)}")
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


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}: expected a positive int, got {value!r}")
