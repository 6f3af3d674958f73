"""What the tests share: named cases, their data, a plain low-precision implementation, the one comparison.

A result passes when its error against the float64 oracle is at most twice that of ``plain_attention``, an
attention written down directly in the low precision, on the same inputs.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from paddle_flashmask.masks import registry
from paddle_flashmask.reference import (
    attention_reference,
    attention_reference_backward,
    dropout_keep_mask,
    expand_heads,
)

# Relative error of one rounding.
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}

# A block's chance of more error than ``_most_by_chance`` is at most exp(-this), about one in ten million.
_CHANCE_EXPONENT = 16.0

# Tokens whose errors are averaged together: few enough that a wrong tile cannot hide behind larger rows.
BLOCK_TOKENS = 32


class Inputs(NamedTuple):
    """One case's data; floating-point values are already rounded to the case's dtype, but held wider."""

    q: np.ndarray  # [B, Sq, Hq, D]
    k: np.ndarray  # [B, Sk, Hk, D]
    v: np.ndarray  # [B, Sk, Hk, Dv]
    dout: np.ndarray  # [B, Sq, Hq, Dv]
    dlse: np.ndarray  # [B, Hq, Sq]
    indices: np.ndarray | None  # startend_row_indices, int32 [Bm, Hm, Sk, C]
    causal: bool
    visible: np.ndarray  # bool [Bm, Hm, Sq, Sk]
    dropout_keep: np.ndarray | None  # bool [B, Hq, Sq, Sk]


class Results(NamedTuple):
    """What attention returns and its gradients, shaped as in ``Inputs``; lse ``[B, Hq, Sq]``."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


@dataclass(frozen=True)
class Case:
    """One named attention problem: everything about it follows from these fields, random data included.

    ``mask`` is "full" or "causal" (any Sq, Sk; no indices); another name of the registry of masks; or
    "random": arbitrary, even senseless, indices with ``bounds`` values per column for ``mask_batch`` samples
    and ``mask_heads`` heads, under ``causal``.
    """

    name: str
    mask: str
    dtype: str = "float32"
    batch: int = 1
    seqlen_q: int = 200
    seqlen_k: int = 200
    heads_q: int = 2
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    causal: bool = False
    bounds: int = 2
    mask_batch: int = 1
    mask_heads: int = 1
    softmax_scale: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    dropout_offset: int = 0

    @property
    def seed(self) -> int:
        """Seed of the case's random data."""
        return zlib.crc32(self.name.encode())

    @property
    def lse_dtype(self) -> str:
        """The dtype of lse for this case's dtype."""
        return "float64" if self.dtype == "float64" else "float32"

    def __str__(self) -> str:
        return self.name


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        # Every named mask, at a length no tile divides.
        *(
            Case(name, mask=name, batch=2, seqlen_q=333, seqlen_k=333, heads_q=4, heads_k=2)
            for name in registry.names()
        ),
        # Storage types.
        Case("float64", mask="causal_document", dtype="float64"),
        Case("bfloat16", mask="causal_document", dtype="bfloat16"),
        Case("float16", mask="document", dtype="float16"),
        Case("bfloat16_gqa", mask="share_question", dtype="bfloat16", batch=2, heads_q=4),
        # Head dimensions, equal and not.
        Case("head_dim_32", mask="causal_document", head_dim=32, head_dim_v=32),
        Case("head_dim_72", mask="causal_document", head_dim=72, head_dim_v=72),
        Case("head_dim_128", mask="causal_document", head_dim=128, head_dim_v=128, dtype="bfloat16"),
        Case("head_dim_256", mask="document", head_dim=256, head_dim_v=256),
        Case("head_dim_192_128", mask="causal_document", head_dim=192, head_dim_v=128),
        Case("head_dim_40_24", mask="causal", head_dim=40, head_dim_v=24),
        # Heads: groups, one key head, one mask per key head, query head and sample.
        Case("mqa", mask="causal_document", heads_q=4, heads_k=1),
        Case("mask_per_kv_head", mask="random", heads_q=4, mask_heads=2, causal=True, bounds=1),
        Case("mask_per_q_head", mask="random", heads_q=4, mask_heads=4, bounds=4),
        Case("mask_per_sample", mask="random", batch=3, mask_batch=3, bounds=2),
        Case("mask_per_everything", mask="random", batch=2, mask_batch=2, mask_heads=2, causal=True),
        # Every form of the indices.
        Case("indices_causal_1", mask="random", causal=True, bounds=1),
        Case("indices_causal_2", mask="random", causal=True, bounds=2),
        Case("indices_2", mask="random", bounds=2),
        Case("indices_4", mask="random", bounds=4),
        # Lengths: Sq != Sk both ways (with empty rows when Sq > Sk and causal), one row, one key, tails.
        Case("causal_more_keys", mask="causal", seqlen_q=70, seqlen_k=301),
        Case("causal_more_queries", mask="causal", seqlen_q=301, seqlen_k=70),
        Case("decode", mask="causal", seqlen_q=1, seqlen_k=500),
        Case("one_key", mask="causal", seqlen_q=76, seqlen_k=1),
        Case("one_by_one", mask="full", seqlen_q=1, seqlen_k=1),
        Case("indices_more_keys", mask="random", bounds=4, seqlen_q=131, seqlen_k=260),
        Case("indices_more_queries", mask="random", causal=True, bounds=1, seqlen_q=260, seqlen_k=131),
        Case("many_samples", mask="causal_document", batch=40, seqlen_q=24, seqlen_k=24),
        # The rest.
        Case("softmax_scale", mask="causal_document", softmax_scale=0.3),
        Case("negative_scale", mask="document", softmax_scale=-0.1),
        Case(
            "dropout", mask="causal_document", dropout_p=0.2, dropout_seed=2024, dropout_offset=7, heads_q=4
        ),
        Case(
            "dropout_wide_seed",
            mask="full",
            dropout_p=0.5,
            dropout_seed=-(2**40) + 3,
            dropout_offset=2**33 + 1,
        ),
    )
}


def dense_from_indices(indices: np.ndarray | None, causal: bool, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """Which row sees which column, bool ``[Bm, Hm, Sq, Sk]``, straight from the definition of the indices."""
    rows = np.arange(seqlen_q)[:, None]
    visible = np.ones((1, 1, seqlen_q, seqlen_k), np.bool_)
    if causal:
        visible &= np.arange(seqlen_k) <= rows + seqlen_k - seqlen_q
    if indices is None:
        return visible
    bound = [indices[:, :, None, :, i] for i in range(indices.shape[-1])]
    if len(bound) == 4:  # the kernels' C interface takes this under causality too
        masked = ((rows >= bound[0]) & (rows < bound[1])) | ((rows >= bound[2]) & (rows < bound[3]))
    elif causal:
        masked = (rows >= bound[0]) & (rows < (bound[1] if len(bound) == 2 else seqlen_q))
    else:
        masked = (rows >= bound[0]) | (rows < bound[1])
    return visible & ~masked


@lru_cache(maxsize=4)
def make_inputs(case: Case) -> Inputs:
    """The case's data, the same every time."""
    rng = np.random.default_rng(case.seed)

    def normal(*shape: int) -> np.ndarray:
        return round_to(rng.standard_normal(shape), case.dtype)

    q = normal(case.batch, case.seqlen_q, case.heads_q, case.head_dim)
    k = normal(case.batch, case.seqlen_k, case.heads_k, case.head_dim)
    v = normal(case.batch, case.seqlen_k, case.heads_k, case.head_dim_v)
    dout = normal(case.batch, case.seqlen_q, case.heads_q, case.head_dim_v)
    dlse = round_to(rng.standard_normal((case.batch, case.heads_q, case.seqlen_q)), case.lse_dtype)
    indices, causal = _make_indices(case, rng)
    visible = dense_from_indices(indices, causal, case.seqlen_q, case.seqlen_k)
    keep = None
    if case.dropout_p > 0.0:
        shape = (case.batch, case.heads_q, case.seqlen_q, case.seqlen_k)
        keep = dropout_keep_mask(case.dropout_seed, case.dropout_offset, *shape, case.dropout_p)
    return Inputs(q, k, v, dout, dlse, indices, causal, visible, keep)


def _make_indices(case: Case, rng: np.random.Generator) -> tuple[np.ndarray | None, bool]:
    if case.mask in ("full", "causal"):
        return None, case.mask == "causal"
    if case.mask == "random":
        shape = (case.mask_batch, case.mask_heads, case.seqlen_k, case.bounds)
        indices = rng.integers(-case.seqlen_q // 4, case.seqlen_q * 5 // 4, shape, dtype=np.int32)
        return indices, case.causal
    mask = registry.make(case.mask, case.seqlen_k, seed=case.seed)
    return mask.to_startend_row_indices()


@lru_cache(maxsize=4)
def reference_results(case: Case) -> Results:
    """The float64 oracle's answer."""
    x = make_inputs(case)
    options: dict[str, Any] = {
        "softmax_scale": case.softmax_scale,
        "dropout_keep": x.dropout_keep,
        "dropout_p": case.dropout_p,
    }
    out, lse = attention_reference(x.q, x.k, x.v, x.visible, **options)
    dq, dk, dv = attention_reference_backward(x.q, x.k, x.v, x.visible, x.dout, x.dlse, **options)
    return Results(out, lse, dq, dk, dv)


@lru_cache(maxsize=4)
def plain_results(case: Case) -> Results:
    """``plain_attention``'s answer."""
    return plain_attention(make_inputs(case), case.dtype, case.softmax_scale, case.dropout_p)


def plain_attention(
    x: Inputs, dtype: str, softmax_scale: float | None = None, dropout_p: float = 0.0
) -> Results:
    """Attention as one would write it in ``dtype``: the error that the precision alone costs.

    Matrix products accumulate in float32 (float64 for float64). Results are rounded to ``dtype``, and so are
    P and dS, the operands of the next product; scores are not.
    """
    wide = np.float64 if dtype == "float64" else np.float32
    heads_q = x.q.shape[2]
    q, dout = x.q.astype(wide), x.dout.astype(wide)
    k, v = expand_heads(x.k.astype(wide), heads_q, axis=2), expand_heads(x.v.astype(wide), heads_q, axis=2)
    scale = wide(x.q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    batch_of = np.broadcast_to(expand_heads(x.visible, heads_q), (len(q), heads_q, *x.visible.shape[2:]))

    out, dq = np.zeros_like(dout), np.zeros_like(q)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    lse = np.zeros_like(x.dlse, dtype=wide)
    for b, h in np.ndindex(len(q), heads_q):

        def drop(p: np.ndarray, at: tuple[int, int] = (b, h)) -> np.ndarray:
            return p if x.dropout_keep is None else p * x.dropout_keep[at] * wide(1.0 / (1.0 - dropout_p))

        scores = np.where(batch_of[b, h], (q[b, :, h] @ k[b, :, h].T) * scale, wide(-np.inf))
        row_max = scores.max(axis=1, keepdims=True)
        row_max[np.isneginf(row_max)] = 0.0
        p = np.exp(scores - row_max)
        row_sum = p.sum(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse[b, h] = (row_max + np.log(row_sum))[:, 0]
        row_sum = np.where(row_sum == 0.0, wide(1.0), row_sum)
        # Divided by the sum at the end, as kernels do: rounding P / sum makes saturated rows exact by luck.
        out[b, :, h] = round_to(round_to(drop(p), dtype) @ v[b, :, h] / row_sum, dtype)
        p /= row_sum
        dropped = round_to(drop(p), dtype)

        dp = drop(dout[b, :, h] @ v[b, :, h].T)
        delta = (dout[b, :, h] * out[b, :, h]).sum(axis=1) - x.dlse[b, h].astype(wide)
        ds = round_to(p * (dp - delta[:, None]) * scale, dtype)
        dq[b, :, h] = ds @ k[b, :, h]
        dk[b, :, h] = ds.T @ q[b, :, h]
        dv[b, :, h] = dropped.T @ dout[b, :, h]

    def sum_groups(grad: np.ndarray) -> np.ndarray:
        batch, seqlen, _, dim = grad.shape
        return grad.reshape(batch, seqlen, x.k.shape[2], -1, dim).sum(axis=3)

    return Results(out, lse, *(round_to(grad, dtype) for grad in (dq, sum_groups(dk), sum_groups(dv))))


def assert_results_match(actual: Results, case: Case) -> None:
    """``assert_matches_reference`` for the results of a case; None entries are left out."""
    reference, plain = reference_results(case), plain_results(case)
    for name, values, expected, by_plain in zip(Results._fields, actual, reference, plain, strict=True):
        if values is not None:
            dtype = case.lse_dtype if name == "lse" else case.dtype
            assert_matches_reference(values, expected, by_plain, dtype=dtype, name=f"{case.name}: {name}")


def largest_terms(
    q_norm: float, k_norm: float, v_norm: float, dout_norm: float, scale: float
) -> dict[str, float]:
    """Bounds of the terms that an element of dq, or a row's share of dk, is summed from; by rows' norms.

    dS is a difference of dP and delta, both at most |dO| |V|; where it cancels, float32 leaves an error of
    their size, not of dS's.
    """
    ds = abs(scale) * dout_norm * v_norm
    return {"dq": ds * k_norm, "dk": ds * q_norm}


def assert_matches_reference(
    actual: np.ndarray,
    reference: np.ndarray,
    plain: np.ndarray,
    *,
    dtype: str,
    name: str = "result",
    terms: float = 0.0,
    noise: np.ndarray | None = None,
    noise_together: bool = False,
) -> None:
    """The one comparison of numerical results.

    NaN and inf patterns must equal the reference's. The largest error against the float64 reference may be
    twice the plain implementation's largest, plus rounding: of the result to ``dtype``, 32 roundings of the
    accumulator at values of order one, and two at the size of the largest terms. So may the root mean square
    error of each block of at least 32 tokens of a head, against the plain one of that block: the largest
    error alone would let small values be wholly wrong. Where a few tokens make up the error of a block, the
    plain implementation may be lucky with them; ``noise`` says what then is allowed without it.

    Args:
        actual: what is tested, ``[B, S, H, D]`` or ``[B, H, S]`` (other shapes: only the largest error is).
        reference: the float64 oracle's.
        plain: ``plain_attention``'s.
        dtype: the dtype of ``actual`` where it was computed.
        name: what to call it in the message.
        terms: bound of the terms that a value is summed from, where they cancel: ``largest_terms``.
        noise: standard deviation of the error that roundings leave in each value, shaped as ``actual``; those
            of a token go up and down together, those of two tokens do not.
        noise_together: those of two tokens do, too.
    """
    actual = np.asarray(actual, np.float64)
    assert actual.shape == reference.shape, f"{name}: shape {actual.shape}, expected {reference.shape}"
    unequal = _pattern(actual) != _pattern(reference)
    if unequal.any():
        where = _coordinate(unequal.argmax(), actual.shape)
        raise AssertionError(
            f"{name}: NaN or inf in {unequal.sum()} wrong places, first at {where}: "
            f"actual {actual[where]}, reference {reference[where]}"
        )
    finite = np.isfinite(reference)
    value = np.where(finite, reference, 0.0)
    error = np.abs(np.where(finite, actual, 0.0) - value)
    plain_error = np.abs(np.where(finite, plain, 0.0) - value)
    if not error.size:
        return

    roundoff = UNIT_ROUNDOFF[dtype]
    wide_roundoff = UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    accumulation = wide_roundoff * (32 * max(1.0, np.abs(value).max()) + 2 * terms)
    slack = roundoff * np.abs(value) + accumulation
    noise = np.zeros_like(error) if noise is None else noise
    most = max(2 * plain_error.max(), (2 * _CHANCE_EXPONENT) ** 0.5 * noise.max())
    _assert_below(error, most + slack, actual, reference, f"{name}: error")
    if actual.ndim in (3, 4):
        blocks = [_block_rms(x) for x in (error, plain_error, value)]
        by_chance = _most_by_chance(noise, noise_together)
        bound = np.maximum(2 * blocks[1], by_chance) + 2 * roundoff * blocks[2] + accumulation
        message = f"{name}: root mean square error of the {BLOCK_TOKENS} tokens around this one"
        _assert_below(_spread(blocks[0], error), _spread(bound, error), actual, reference, message, error)


def _assert_below(
    error: np.ndarray,
    bound: np.ndarray,
    actual: np.ndarray,
    reference: np.ndarray,
    message: str,
    worst_by: np.ndarray | None = None,
) -> None:
    excess = error - bound
    if not (excess > 0.0).any():
        return
    # The worst coordinate; among those of one block, the one with the largest error of its own.
    candidates = np.where(excess == excess.max(), error if worst_by is None else worst_by, -1.0)
    where = _coordinate(candidates.argmax(), actual.shape)
    raise AssertionError(
        f"{message} is {error[where]:.3e}, at most {bound[where]:.3e} allowed; worst at {where}: "
        f"actual {actual[where]:.9g}, reference {reference[where]:.9g}"
    )


def _pattern(x: np.ndarray) -> np.ndarray:
    """0 finite, 1 NaN, 2 +inf, 3 -inf."""
    return np.select([np.isnan(x), np.isposinf(x), np.isneginf(x)], [1, 2, 3], 0)


def _coordinate(flat: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def _token_axis(x: np.ndarray) -> int:
    return 1 if x.ndim == 4 else 2


def _block_sizes(tokens: int) -> np.ndarray:
    """Blocks of BLOCK_TOKENS; what is left over joins the last: on two or three rows, luck decides."""
    whole = max(1, tokens // BLOCK_TOKENS)
    return np.append(np.full(whole - 1, BLOCK_TOKENS), tokens - (whole - 1) * BLOCK_TOKENS)


def _block_rms(x: np.ndarray) -> np.ndarray:
    axis = _token_axis(x)
    sizes = _block_sizes(x.shape[axis])
    sums = np.add.reduceat(np.square(x), np.cumsum(sizes) - sizes, axis=axis)
    if x.ndim == 4:
        return np.sqrt(sums.mean(axis=3, keepdims=True) / sizes[:, None, None])
    return np.sqrt(sums / sizes)


def _most_by_chance(noise: np.ndarray, together: bool) -> np.ndarray:
    """Each block's largest root mean square error that chance explains.

    A token's roundings are independent and bounded, so their sum is no more than Gaussian in its tails. The
    squares of such sums, of variances w, exceed sum(w) + 2 sqrt(t sum(w^2)) + 2 t max(w) together with a
    probability below exp(-t) (Hsu, Kakade and Zhang: A tail inequality for quadratic forms of subgaussian
    random vectors, 2012). That is 1.8 times what is expected of 32 tokens alike, and 6.4 times where one
    token outweighs all. Tokens that go up and down together are as one.
    """
    axis = _token_axis(noise)
    energy = np.square(noise).sum(axis=3, keepdims=True) if noise.ndim == 4 else np.square(noise)
    sizes = _block_sizes(noise.shape[axis])
    starts = np.cumsum(sizes) - sizes
    total = np.add.reduceat(energy, starts, axis=axis)
    if together:
        root, largest = np.sqrt(_CHANCE_EXPONENT) * total, total
    else:
        root = np.sqrt(_CHANCE_EXPONENT * np.add.reduceat(np.square(energy), starts, axis=axis))
        largest = np.maximum.reduceat(energy, starts, axis=axis)
    values = sizes[:, None, None] * noise.shape[3] if noise.ndim == 4 else sizes
    return np.sqrt((total + 2 * root + 2 * _CHANCE_EXPONENT * largest) / values)


def _spread(blocks: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Each block's value at each of its elements."""
    axis = _token_axis(like)
    return np.broadcast_to(np.repeat(blocks, _block_sizes(like.shape[axis]), axis=axis), like.shape)


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """Rounds to ``dtype``, to nearest, ties to even; returns float32 (float64 for "float64")."""
    if dtype == "bfloat16":
        bits = np.asarray(x, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        return np.where(np.isfinite(x), rounded.view(np.float32), np.asarray(x, np.float32))
    if dtype == "float16":
        return np.asarray(x).astype(np.float16).astype(np.float32)
    return np.asarray(x).astype(dtype)


def to_paddle(x: np.ndarray, dtype: str, *, stop_gradient: bool = True) -> Any:
    """A Paddle tensor of ``dtype`` (float32 values that are rounded already lose nothing)."""
    import paddle

    tensor = paddle.to_tensor(x, dtype="float64" if dtype == "float64" else "float32").astype(dtype)
    tensor.stop_gradient = stop_gradient
    return tensor


def to_numpy(tensor: Any) -> np.ndarray:
    """A Paddle tensor's values as float32, or float64."""
    return tensor.numpy() if str(tensor.dtype) == "paddle.float64" else tensor.astype("float32").numpy()


# Paddle 3.3.1 crashes now and then (without this package too) when it traces a function after it has freed
# one that was traced before: none of them is freed.
_traced: list[Any] = []


def traced(function: Any, *, full_graph: bool = True, **options: Any) -> Any:
    """``paddle.jit.to_static(function)``: as one program, or (not ``full_graph``) piece by piece."""
    import paddle

    _traced.append(paddle.jit.to_static(function, full_graph=full_graph, **options))
    return _traced[-1]
