"""PaddleFormers' models through this package's operator, on any device.

    import paddle_flashmask as fm

    fm.integrations.paddleformers.register()            # until unregister()
    with fm.integrations.paddleformers.register():      # or for a block
        trainer.train()

PaddleFormers looks attention up by name: `config._attn_implementation` in its `AttentionInterface`.
`register()` puts this package's function there as "flashmask", the name that PaddleFormers' own commands
take by default, in place of Paddle's, which does not run on a CPU. (There, a config also needs
`fuse_rms_norm=False`.) It honours what PaddleFormers' own function leaves out: the softmax scale, attention
dropout and dense attention masks, which padded batches and sliding windows bring.

Whatever would lose the mask raises instead, while registered: `check_model` lists it.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paddle_flashmask.integrations._patches import Patches, warn_if_unknown
from paddle_flashmask.masks import ColumnMask

if TYPE_CHECKING:
    import paddle

    from paddle_flashmask.packing import PackedSequences

__all__ = [
    "SUPPORTED_VERSIONS",
    "Registration",
    "check_model",
    "collate",
    "features",
    "register",
    "unregister",
]

SUPPORTED_VERSIONS = ("1.2.0",)
"""PaddleFormers versions this module is tested with; any other warns once."""

INDICES = "attn_mask_startend_row_indices"
"""PaddleFormers' name for `startend_row_indices`, there int32 [B, Hm, S, C] or [B, Hm, S]."""

# What LlamaForCausalLM also takes, and others swallow without using it.
_OLD_INDICES = "attn_mask_start_row_indices"
_MODEL_FAMILIES = ("deepseek_v3", "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_FAMILIES_WITHOUT_WINDOW = ("llama",)
_FAMILIES_OF_ONE_WINDOW = ("deepseek_v3", "qwen2_moe", "qwen3_moe")  # alike in every layer, if any has one
# PaddleFormers' own functions. Their masks are dense, and models make them so only for "eager".
_DENSE_IMPLEMENTATIONS = ("eager", "sdpa")
# An additive mask holds 0 where a key is seen, and where not, PaddleFormers' -1e6 or the dtype's lowest.
_HIDDEN = -1e4

_registrations: list[Registration] = []
_own_functions: dict[str, Callable[..., Any] | None] = {}  # what each registered name stood for before
_patches = Patches()


class Registration:
    """What `register` returns: a context manager that ends the registration, and a count of its use.

    Attributes:
        name: the name it is registered under.
        calls: how often PaddleFormers' models called the operator by it (recomputation included).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0

    def __enter__(self) -> Registration:
        if self not in _registrations:
            raise RuntimeError(
                "this registration has ended, and PaddleFormers is as it was; call register() again"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _registrations:
            _registrations.remove(self)
            _restore_unused()


def register(name: str = "flashmask") -> Registration:
    """Make `config._attn_implementation = name` mean this package's operator in PaddleFormers.

    It holds until `unregister()`, or to the end of the `with` block it opens.

    Args:
        name: "flashmask" replaces PaddleFormers' own function for every model that asks for it, also for
            those that treat this name in a special way, such as DeepSeek V3. Any other new name leaves
            PaddleFormers' own one in place.

    Raises:
        TypeError: a name that is not a str.
        ValueError: "eager" or "sdpa", for which PaddleFormers' models prepare other masks.
        ImportError: PaddleFormers is missing.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {name!r}")
    if not name or name in _DENSE_IMPLEMENTATIONS:
        raise ValueError(f'name: expected "flashmask" or a new name, got {name!r}')
    import paddleformers
    from paddleformers.nn.attention.interface import AttentionInterface

    warn_if_unknown("PaddleFormers", paddleformers.__version__, SUPPORTED_VERSIONS)
    if not _registrations:
        _install()
    registration = Registration(name)
    _registrations.append(registration)
    if name not in _own_functions:
        _own_functions[name] = AttentionInterface._global_mapping.get(name)
        AttentionInterface.register(name, functools.partial(_attention, name))
    return registration


def unregister() -> None:
    """Undo every `register`: PaddleFormers is exactly as it was."""
    _registrations.clear()
    _restore_unused()


def check_model(model: Any) -> None:
    """Raise unless `model` gives the indices of a packed batch to the operator.

    While registered, models check this at every call that brings indices.

    Args:
        model: a PaddleFormers model with a `config`.

    Raises:
        TypeError: a model family that is not tested here and may drop the indices; PaddleFleet's models
            (`Qwen2ForCausalLM` and others), whose attention does not go through the attention interface.
        ValueError: `config._attn_implementation` is not registered; `config.context_parallel_size > 1`; a
            sliding window that the family would give to no layer, or to layers that should have none.
    """
    family = next(filter(None, map(_family, type(model).__mro__)), None)
    if family not in _MODEL_FAMILIES:
        raise TypeError(
            f"{type(model).__name__}: expected a model of a family tested to use {INDICES} "
            f"({', '.join(_MODEL_FAMILIES)}); others may ignore them, and PaddleFleet's models do not take "
            "their attention from PaddleFormers: there, take the ...ForCausalLMDeprecated class"
        )
    implementation = model.config._attn_implementation
    if implementation not in _own_functions:
        raise ValueError(
            f"config._attn_implementation: expected a registered name ({_registered_names()}), got "
            f"{implementation!r}, which is not this package's operator"
        )
    _check_context_parallel(model)
    window = getattr(model.config, "sliding_window", None)
    layer_types = set(getattr(model.config, "layer_types", None) or ())
    if window is not None and family in _FAMILIES_WITHOUT_WINDOW:
        raise ValueError(f"config.sliding_window: expected None, got {window}, which {family} models ignore")
    if window is not None and family in _FAMILIES_OF_ONE_WINDOW and layer_types != {"sliding_attention"}:
        raise ValueError(
            f'config.layer_types: expected only "sliding_attention" beside sliding_window={window}, got '
            f"{sorted(layer_types)}; {family} models give the window to all layers or to none"
        )


def _check_context_parallel(module: Any) -> None:
    degree = getattr(getattr(module, "config", None), "context_parallel_size", 1)
    if degree > 1:
        raise ValueError(
            f"config.context_parallel_size: expected 1, got {degree}; {type(module).__name__} would attend "
            "within each part of a sequence only"
        )


def features(packed: PackedSequences) -> list[dict[str, NDArray[Any]]]:
    """Packed sequences as samples under PaddleFormers' names: int64 [S] each; the indices int32 [1, S, 1]."""
    return [
        {
            "input_ids": packed.input_ids[i],
            "labels": packed.labels[i],
            "position_ids": packed.position_ids[i],
            INDICES: packed.startend_row_indices[i],
        }
        for i in range(len(packed))
    ]


def collate(samples: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """A data collator for PaddleFormers' trainers: stacks `features`, whose lengths are equal.

    Raises:
        ValueError: no sample.
    """
    if not samples:
        raise ValueError("samples: expected at least one to make a batch of, got none")
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _attention(
    name: str,
    module: Any,
    query: paddle.Tensor,
    key: paddle.Tensor,
    value: paddle.Tensor,
    attention_mask: paddle.Tensor | None = None,
    attn_mask_startend_row_indices: paddle.Tensor | None = None,
    dropout: float = 0.0,
    sink: paddle.Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **unknown: Any,
) -> tuple[paddle.Tensor, None]:
    """What `AttentionInterface` calls: q, k, v [B, H, S, D] to (out [B, Sq, Hq * Dv], None)."""
    from paddle import nn

    from paddle_flashmask import attention

    indices = attn_mask_startend_row_indices
    if sink is not None:
        raise NotImplementedError(
            f"sink: {type(module).__name__} has attention sinks, which FlashMask has not; expected None"
        )
    unknown = {key_: value_ for key_, value_ in unknown.items() if value_ is not None}
    if unknown:
        raise TypeError(f"{type(module).__name__}: unexpected attention arguments {', '.join(unknown)}")
    if attention_mask is not None and indices is not None:
        raise ValueError(f"attention_mask: expected None beside {INDICES}, got both")
    next(r for r in reversed(_registrations) if r.name == name).calls += 1
    if name == "flashmask" and type(module) is nn.Layer:
        # DeepSeek V3, which passes a bare layer and, for this name only, queries that are scaled already.
        scaling = None
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "dropout_p": dropout,
        "training": module.training,
    }
    q, k, v = (x.transpose([0, 2, 1, 3]) for x in (query, key, value))
    if attention_mask is not None:
        options["mask"] = _dense_masks.column_mask(attention_mask, k.shape[1])
    elif indices is not None:
        _check_context_parallel(module)  # pipelines call no model that check_model would see
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                f"{INDICES}: expected as many queries as keys, got {q.shape[1]} and {k.shape[1]}; "
                "with a cache, generate for one document at a time"
            )
        indices = indices.unsqueeze(-1) if indices.ndim == 3 else indices
        # As PaddleFormers' own function: C = 2 is [LTS, LTE), unless a layer says that it is not causal.
        causal = {1: True, 4: False}.get(indices.shape[-1], is_causal is not False)
        options |= {"startend_row_indices": indices, "causal": causal}
    else:
        options["causal"] = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = attention(q, k, v, **options)
    return out.reshape([out.shape[0], out.shape[1], -1]), None


class _DenseMasks:
    """Dense masks as intervals, for as long as they live: a model hands the same tensor to many layers."""

    def __init__(self) -> None:
        self._masks: dict[int, tuple[weakref.ref[Any], tuple[int, int], ColumnMask]] = {}

    def column_mask(self, attention_mask: paddle.Tensor, seqlen_k: int) -> ColumnMask:
        """The mask of the last `seqlen_k` keys: what the cache of a sliding window has kept.

        Args:
            attention_mask: [B, Hm, Sq, Sk or more], boolean (true: seen) or additive (0: seen, or at most
                -10,000: not seen).
            seqlen_k: Sk.

        Raises:
            ValueError: in a traced program; fewer columns; other values (a bias); three masked intervals in
                a column.
        """
        import paddle

        if not paddle.in_dynamic_mode():
            raise ValueError(f"attention_mask: expected None in a traced program, pass {INDICES}")
        key, state = id(attention_mask), (attention_mask.inplace_version, seqlen_k)
        tensor, known_state, mask = self._masks.get(key, (None, None, None))
        if mask is None or tensor is None or tensor() is not attention_mask or known_state != state:
            mask = ColumnMask.from_dense(_visible(attention_mask, seqlen_k))
            self._masks[key] = (
                weakref.ref(attention_mask, lambda _: self._masks.pop(key, None)),
                state,
                mask,
            )
        return mask


_dense_masks = _DenseMasks()


def _visible(attention_mask: paddle.Tensor, seqlen_k: int) -> NDArray[np.bool_]:
    """[B, Hm, Sq, Sk] boolean, true where a key is seen."""
    columns = attention_mask.shape[-1]
    if attention_mask.ndim != 4 or columns < seqlen_k:
        raise ValueError(
            f"attention_mask: expected [B, Hm, Sq, Sk] with Sk at least {seqlen_k}, "
            f"got {list(attention_mask.shape)}"
        )
    dense = attention_mask[..., columns - seqlen_k :]
    if str(dense.dtype).endswith("bool"):
        return dense.numpy()
    values = dense.astype("float32").numpy()
    visible = values == 0.0
    if not (visible | (values <= _HIDDEN)).all():
        raise ValueError(
            f"attention_mask: expected 0 (seen) or at most {_HIDDEN:g} (not seen) everywhere, got other "
            "values; FlashMask has no bias"
        )
    return visible


def _window_indices(startend_row_indices: paddle.Tensor | None, window_size: int) -> paddle.Tensor | None:
    """PaddleFormers' `prepare_sliding_window_startend_row_indices`, for causal indices of C = 1 and C = 2.

    Row i sees column j of the window only if i - j < window_size. PaddleFormers' own runs in Python over
    every column, and for C = 2, [LTS, LTE), shows a row what lies behind the window again from LTE on.

    Raises:
        ValueError: C = 4; or C = 2 where a column would need two intervals.
    """
    import paddle

    if startend_row_indices is None:
        return None
    bounds = startend_row_indices.shape[-1]
    if bounds not in (1, 2):
        raise ValueError(
            f"{INDICES}: expected 1 or 2 bounds beside a sliding window, "
            f"got shape {list(startend_row_indices.shape)}"
        )
    start = startend_row_indices[..., :1]
    seqlen = start.shape[-2]
    column = paddle.arange(seqlen, dtype="int32").reshape([1, 1, -1, 1])
    edge = column + window_size
    if bounds == 1:
        return paddle.minimum(start, edge)
    end = startend_row_indices[..., 1:]
    within = edge >= seqlen  # the window hides nothing of this column
    empty = paddle.logical_or(start >= end, end <= column)
    apart = paddle.logical_and(end < edge, paddle.logical_not(paddle.logical_or(within, empty)))
    if bool(apart.any()):
        raise ValueError(
            f"{INDICES}: expected rows hidden up to the sliding window's edge, but column "
            f"{int(paddle.nonzero(apart)[0][2])} shows some before it: it would need two intervals"
        )
    hidden_from = paddle.where(empty, edge, paddle.minimum(start, edge))
    return paddle.concat(
        [
            paddle.where(within, start, hidden_from),
            paddle.where(within, end, paddle.full_like(end, seqlen)),
        ],
        axis=-1,
    )


def _family(base: type) -> str | None:
    """ "llama" for a class of paddleformers.transformers.llama.modeling, else None."""
    parts = base.__module__.split(".")
    if parts[:2] == ["paddleformers", "transformers"] and parts[3:] == ["modeling"]:
        return parts[2]
    return None


def _registered_names() -> str:
    return ", ".join(_own_functions) or "none"


def _install() -> None:
    from paddleformers.nn.attention.interface import AttentionInterface
    from paddleformers.transformers import PretrainedModel, masking_utils

    mapping = AttentionInterface._global_mapping
    _patches.replace_entry(mapping, "sdpa", _guard_sdpa(mapping["sdpa"]))
    _patches.replace(masking_utils, "prepare_sliding_window_startend_row_indices", _window_indices)
    _patches.replace(PretrainedModel, "__call__", _guard_model(PretrainedModel.__call__))
    _patches.replace(PretrainedModel, "generate", _guard_generate(PretrainedModel.generate))


def _restore_unused() -> None:
    """Give back the names without a registration, and everything with the last."""
    names = {registration.name for registration in _registrations}
    for name in [name for name in _own_functions if name not in names]:
        from paddleformers.nn.attention.interface import AttentionInterface

        own = _own_functions.pop(name)
        if own is None:
            del AttentionInterface._global_mapping[name]
        else:
            AttentionInterface.register(name, own)
    if not _registrations:
        _patches.restore()


def _guard_model(call: Callable[..., Any]) -> Callable[..., Any]:
    """Check before anything is computed, and refuse models whose `**kwargs` swallow the indices."""

    @functools.wraps(call)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(_OLD_INDICES) is not None:
            raise ValueError(f"{_OLD_INDICES}: expected {INDICES} instead; most models ignore the old name")
        if kwargs.get(INDICES) is not None:
            implementation = getattr(self.config, "_attn_implementation", None)
            if implementation in _own_functions or implementation is None:  # PaddleFleet's models have none
                check_model(self)
            else:
                _warn_of_other(implementation)
        return call(self, *args, **kwargs)

    return guarded


def _guard_sdpa(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse causal indices, which PaddleFormers' "sdpa" loses; it keeps those of four bounds."""

    @functools.wraps(attention)
    def guarded(
        module: Any,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        attention_mask: paddle.Tensor | None = None,
        attn_mask_startend_row_indices: paddle.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        indices = attn_mask_startend_row_indices
        if indices is not None and (indices.ndim == 3 or indices.shape[-1] != 4):
            raise ValueError(
                f"config._attn_implementation: expected a registered name ({_registered_names()}), got "
                f"'sdpa'; Paddle's attention on a CPU drops {INDICES} of one bound, and two are taken for a "
                "mask that is not causal"
            )
        return attention(module, query, key, value, attention_mask, indices, *args, **kwargs)

    return guarded


@functools.cache
def _warn_of_other(implementation: str) -> None:
    """A model left to PaddleFormers' own attention is perhaps not what was asked for."""
    warnings.warn(
        f"config._attn_implementation is {implementation!r}: not this package's operator, which is "
        f"registered as {_registered_names()}",
        stacklevel=3,
    )


def _guard_generate(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(INDICES) is not None:
            raise ValueError(f"{INDICES}: expected none in generate(); generate for one document at a time")
        return generate(self, *args, **kwargs)

    return guarded
