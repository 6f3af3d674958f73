"""PaddleNLP's Llama and Qwen2 on packed documents, through this package's operator, on any device.

    import paddle_flashmask as fm

    fm.integrations.paddlenlp.enable()            # until disable()
    with fm.integrations.paddlenlp.enable():      # or for a block
        trainer.train()

PaddleNLP's attention layers look up `paddle.nn.functional.flashmask_attention` at every call; `enable()`
puts this package's function there. They do so only if the model's config has `use_flash_attention=True` and
the batch brings `attn_mask_startend_row_indices`. In several other settings PaddleNLP drops those indices
without a word and trains on plain causal attention; while enabled, each of these raises instead:
those that `check_model` lists, DPO in a pipeline, and Llama's pipeline on other devices than GPUs.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from paddle_flashmask.integrations._patches import Patches, warn_if_unknown

if TYPE_CHECKING:
    import paddle

    from paddle_flashmask.packing import PackedSequences

__all__ = [
    "SUPPORTED_VERSIONS",
    "Switch",
    "check_model",
    "collate",
    "disable",
    "enable",
    "features",
    "preference_features",
]

SUPPORTED_VERSIONS = ("3.0.0b4",)
"""PaddleNLP versions this module is tested with; any other warns once."""

INDICES = "attn_mask_startend_row_indices"
"""PaddleNLP's name for `startend_row_indices`, there int32 [B, S] or [B, 1, S]."""

_MODEL_FAMILIES = ("llama", "qwen2")
# Kernels of their own, chosen by PaddleNLP before it looks at the indices.
_DEVICES_IGNORING_INDICES = ("npu", "gcu", "intel_hpu")

_switches: list[Switch] = []
_patches = Patches()


class Switch:
    """What `enable` returns: a context manager that ends the switch, and a record of what went through it.

    Attributes:
        visit: "skip" or "dense", as given to `enable`.
        calls: how often PaddleNLP called the operator under this switch (recomputation included).
        mask_bytes: size of the last call's mask: of the indices for "skip", of the boolean mask for "dense".
    """

    def __init__(self, visit: Literal["skip", "dense"]) -> None:
        self.visit = visit
        self.calls = 0
        self.mask_bytes = 0
        self._dense: tuple[NDArray[np.int32], paddle.Tensor] | None = None

    def __enter__(self) -> Switch:
        if self not in _switches:
            raise RuntimeError("this switch has ended, and PaddleNLP is as it was; call enable() again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _switches:
            _switches.remove(self)
            if not _switches:
                _patches.restore()

    def _attention(
        self,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        startend_row_indices: paddle.Tensor | None = None,
        **options: Any,
    ) -> Any:
        from paddle_flashmask import flashmask_attention

        self.calls += 1
        if startend_row_indices is None or self.visit == "skip":
            self.mask_bytes = 0 if startend_row_indices is None else 4 * math.prod(startend_row_indices.shape)
            return flashmask_attention(query, key, value, startend_row_indices, **options)
        return self._dense_attention(query, key, value, startend_row_indices, **options)

    def _dense_attention(
        self,
        query: paddle.Tensor,
        key: paddle.Tensor,
        value: paddle.Tensor,
        startend_row_indices: paddle.Tensor,
        *,
        causal: bool,
    ) -> paddle.Tensor:
        """The operator's test mode: the same schedule, every tile computed and masked from a dense mask."""
        from paddle_flashmask import _ops, functional

        dense_mask = self._dense_mask(startend_row_indices, causal, query.shape[1])
        self.mask_bytes = int(dense_mask.size)
        q, k, v = functional._amp_cast(query, key, value)
        out, _ = _ops.flashmask(
            q,
            k,
            v,
            startend_row_indices,
            causal=causal,
            softmax_scale=functional._softmax_scale(None, q),
            dense_mask=dense_mask,
            visit="dense",
            deterministic=functional._deterministic_flag(),
        )
        return out

    def _dense_mask(self, startend_row_indices: paddle.Tensor, causal: bool, seqlen_q: int) -> paddle.Tensor:
        """Boolean [B, Hm, Sq, Sk]; the layers of a model ask for the same one, so the last is kept."""
        import paddle

        from paddle_flashmask.masks import ColumnMask

        indices = startend_row_indices.numpy()
        if self._dense is None or not np.array_equal(self._dense[0], indices):
            mask = ColumnMask.from_startend_row_indices(indices, causal, seqlen_q=seqlen_q)
            self._dense = (indices, paddle.to_tensor(mask.to_dense()))
        return self._dense[1]


def enable(visit: Literal["skip", "dense"] = "skip") -> Switch:
    """Make PaddleNLP's models run packed documents through this package's operator.

    It holds until `disable()`, or to the end of the `with` block it opens, which restores the one before.

    Args:
        visit: "skip" is production. "dense" repeats a run through the operator's test mode: no tile is
            skipped, and the mask is a dense boolean [B, 1, S, S]; results are the same bit for bit.

    Raises:
        ValueError: another `visit`.
        ImportError: PaddleNLP is missing.
    """
    if visit not in ("skip", "dense"):
        raise ValueError(f'visit: expected "skip" or "dense", got {visit!r}')
    import paddlenlp

    warn_if_unknown("PaddleNLP", paddlenlp.__version__, SUPPORTED_VERSIONS)
    switch = Switch(visit)
    if not _switches:
        _install()
    _switches.append(switch)
    return switch


def disable() -> None:
    """Undo every `enable`: Paddle and PaddleNLP are exactly as they were."""
    _switches.clear()
    _patches.restore()


def check_model(model: Any) -> None:
    """Raise unless `model` gives the indices of a packed batch to the operator.

    `enable()` makes models check this at every call that brings indices. Call it yourself where indices may
    be lost before: trainers drop those columns of a Hugging Face dataset that `forward` does not take.

    Args:
        model: a PaddleNLP model (or one of its layers) with a `config`.

    Raises:
        TypeError: a model family that drops the indices, or that is not tested here.
        ValueError: a setting under which PaddleNLP drops the indices, or something else because of them:
            `use_flash_attention=False`, `context_parallel_degree > 1` (ring attention), `alibi=True`,
            `use_sliding_window=True` (PaddleNLP knows no window), and devices for which PaddleNLP has kernels
            of its own.
    """
    from paddlenlp.utils.tools import get_env_device

    if not any(_family(base) in _MODEL_FAMILIES for base in type(model).__mro__):
        raise TypeError(
            f"{type(model).__name__}: expected a model of a family tested to use {INDICES} "
            f"({', '.join(_MODEL_FAMILIES)}); others may ignore them"
        )
    config = model.config
    if not config.use_flash_attention:
        raise ValueError(
            "config.use_flash_attention: expected True, got False, with which PaddleNLP ignores "
            f"{INDICES} and attends to every earlier document"
        )
    if config.context_parallel_degree > 1:
        raise ValueError(
            f"config.context_parallel_degree: expected 1, got {config.context_parallel_degree}; "
            f"PaddleNLP's ring attention ignores {INDICES}"
        )
    if getattr(config, "alibi", False):
        raise ValueError(
            f"config.alibi: expected False, got True; PaddleNLP drops ALiBi when {INDICES} are given"
        )
    if getattr(config, "use_sliding_window", False):
        raise ValueError(
            "config.use_sliding_window: expected False, got True; PaddleNLP would attend to all of a document"
        )
    if get_env_device() in _DEVICES_IGNORING_INDICES:
        raise ValueError(
            f"device: PaddleNLP's attention on {get_env_device()} ignores {INDICES}; expected a CPU or a GPU"
        )


def features(packed: PackedSequences) -> list[dict[str, NDArray[Any]]]:
    """Packed sequences as samples under PaddleNLP's names: int64 [S] each, and the indices int32 [1, S]."""
    return [
        {
            "input_ids": packed.input_ids[i],
            "labels": packed.labels[i],
            "position_ids": packed.position_ids[i],
            INDICES: packed.startend_row_indices[i, :, :, 0],
        }
        for i in range(len(packed))
    ]


def preference_features(packed: PackedSequences) -> list[dict[str, NDArray[Any]]]:
    """`features` for PaddleNLP's `DPOTrainer`, from packed `preference_document`s.

    In place of `labels` there are `chosen_labels` and `rejected_labels`, int64 [S], 0 where there is no loss,
    and `response_indexs`, int64 [P, 3] for P documents: where the chosen answer starts, where it ends and the
    rejected one starts, and where that ends.

    Raises:
        ValueError: a document that has not two answers.
    """
    samples = features(packed)
    for n, (sample, documents) in enumerate(zip(samples, packed.answers, strict=True)):
        labels = sample.pop("labels")
        sample["chosen_labels"], sample["rejected_labels"] = np.zeros_like(labels), np.zeros_like(labels)
        for document, answers in zip(packed.documents[n], documents, strict=True):
            if len(answers) != 2:
                raise ValueError(
                    f"packed: expected preference documents, got one with {len(answers)} answers "
                    f"(document {document})"
                )
            for key, (start, stop) in zip(("chosen_labels", "rejected_labels"), answers, strict=True):
                sample[key][start:stop] = labels[start:stop]
        sample["response_indexs"] = np.array([[*chosen, rejected[1]] for chosen, rejected in documents])
    return samples


def collate(samples: list[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """A data collator for PaddleNLP's trainers: stacks features, whose lengths are equal, into a batch.

    The rows of `response_indexs`, of which each sample has its own number, come one after another, each after
    the index of its sample in the batch.

    Raises:
        ValueError: no sample.
    """
    if not samples:
        raise ValueError("samples: expected at least one to make a batch of, got none")
    batch = {name: [sample[name] for sample in samples] for name in samples[0]}
    indexs = [np.insert(rows, 0, i, axis=1) for i, rows in enumerate(batch.pop("response_indexs", []))]
    stacked = {name: np.stack(arrays) for name, arrays in batch.items()}
    return stacked | ({"response_indexs": np.concatenate(indexs)} if indexs else {})


def _family(base: type) -> str | None:
    """ "llama" for a class of paddlenlp.transformers.llama.modeling or its pipeline twin, else None."""
    parts = base.__module__.split(".")
    if parts[:2] == ["paddlenlp", "transformers"] and parts[3:] in (["modeling"], ["modeling_pp"]):
        return parts[2]
    return None


def _install() -> None:
    import paddle.nn.functional
    from paddlenlp.transformers import PretrainedModel
    from paddlenlp.transformers.llama.modeling import LlamaAttention
    from paddlenlp.transformers.qwen2.modeling import Qwen2Attention
    from paddlenlp.trl import dpo_trainer

    from paddle_flashmask import flashmask_attention

    @functools.wraps(flashmask_attention)  # PaddleNLP's recomputation reads the signature
    def switched(*args: Any, **kwargs: Any) -> Any:
        return _switches[-1]._attention(*args, **kwargs)

    _patches.replace(paddle.nn.functional, "flashmask_attention", switched)
    for layer in (LlamaAttention, Qwen2Attention):
        _patches.replace(layer, "forward", _guard_layer(layer.forward))
    _patches.replace(PretrainedModel, "__call__", _guard_model(PretrainedModel.__call__))
    _patches.replace(PretrainedModel, "generate", _guard_generate(PretrainedModel.generate))
    prepare = dpo_trainer.prepare_pipeline_dpo_inputs_func
    _patches.replace(dpo_trainer, "prepare_pipeline_dpo_inputs_func", _guard_pipeline_inputs(prepare))


def _guard_layer(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Check the config where the indices arrive last: whole models, pipeline stages, single layers."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        if arguments.get(INDICES) is not None:
            check_model(self)
            if arguments.get("past_key_value") is not None:
                raise ValueError(
                    f"{INDICES}: expected none beside a cache, whose keys they count as rows of this step; "
                    "generate for one document at a time"
                )
        # Stages of a pipeline pass tensors without names; Llama's tell them apart on GPUs only.
        if (mask := arguments.get("attention_mask")) is not None and str(mask.dtype).endswith("int32"):
            raise ValueError(
                "attention_mask: expected a mask that is not int32; PaddleNLP's pipeline takes "
                f"{INDICES} for a dense mask on this device"
            )
        return forward(self, *args, **kwargs)

    return guarded


def _guard_model(call: Callable[..., Any]) -> Callable[..., Any]:
    """Check before anything is computed, and refuse models whose `**kwargs` swallow the indices."""

    @functools.wraps(call)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(INDICES) is not None:
            check_model(self)
        return call(self, *args, **kwargs)

    return guarded


def _guard_generate(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(INDICES) is not None:
            raise ValueError(f"{INDICES}: generate() would ignore it; generate for one document at a time")
        return generate(self, *args, **kwargs)

    return guarded


def _guard_pipeline_inputs(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse batches whose indices stay behind: for DPO, PaddleNLP 3.0.0b4 misspells their name."""

    @functools.wraps(prepare)
    def guarded(inputs: Any) -> Any:
        prepared = prepare(inputs)
        if INDICES in inputs:  # it pops what it takes
            raise ValueError(
                f"pipeline_parallel_degree: expected 1, as PaddleNLP's DPO drops {INDICES} in a pipeline"
            )
        return prepared

    return guarded
