"""The tasks: for each, its model, its batches and PaddleNLP's trainer for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddlenlp.peft import LoRAConfig, LoRAModel
from paddlenlp.transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from paddlenlp.transformers.configuration_utils import LlmMetaConfig
from paddlenlp.trl import DPOTrainer, SFTTrainer
from paddlenlp.trl.llm_utils import get_lora_target_modules

from paddle_flashmask.integrations import paddlenlp as integration
from paddle_flashmask.masks import ColumnMask
from paddle_flashmask.packing import PackedSequences

from .reward import LlamaRewardModel, RewardTrainer, reward_features
from .settings import SIZES, Settings

Batch = dict[str, Any]

FEATURES: dict[str, Callable[[PackedSequences], list[dict[str, np.ndarray]]]] = {
    "sft": integration.features,
    "lora": integration.features,
    "dpo": integration.preference_features,
    "rm": reward_features,
}


class PackedDataset(paddle.io.Dataset):
    """Packed sequences under the names of the task's trainer."""

    def __init__(self, task: str, packed: PackedSequences) -> None:
        super().__init__()
        self.samples = FEATURES[task](packed)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def dense_collate(samples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """`integration.collate` for PaddleNLP's own attention: a boolean `attention_mask`, [B, S, S]."""
    batch = integration.collate(samples)
    indices = batch.pop(integration.INDICES)[..., None]
    batch["attention_mask"] = ColumnMask.from_startend_row_indices(indices, causal=True).to_dense()[:, 0]
    return batch


def count_tokens(batch: Batch) -> int:
    """Tokens that are no padding: those that see themselves."""
    if integration.INDICES in batch:
        return int((batch[integration.INDICES] > 0).sum())
    return int(paddle.diagonal(batch["attention_mask"], axis1=1, axis2=2).sum())


def build_model(settings: Settings, vocab_size: int, *, reward: bool = False) -> Any:
    """The model of a folder, or a Llama with random weights that depend on the seed alone."""
    model, args = settings.model, settings.training
    paddle.seed(args.seed)
    if model.model_name_or_path:
        config = AutoConfig.from_pretrained(model.model_name_or_path)
        LlmMetaConfig.set_llm_config(config, args)
        if reward:
            return LlamaRewardModel.from_pretrained(model.model_name_or_path, config=config)
        return AutoModelForCausalLM.from_pretrained(model.model_name_or_path, config=config)
    sizes = {name: getattr(model, name) for name in SIZES}
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=args.max_seq_length, **sizes)
    LlmMetaConfig.set_llm_config(config, args)
    return LlamaRewardModel(config) if reward else LlamaForCausalLM(config)


def add_lora(model: Any, settings: Settings) -> LoRAModel:
    """`model` with adapters in every projection of every layer, which alone are trained."""
    paddle.seed(settings.training.seed)
    config = LoRAConfig(
        target_modules=get_lora_target_modules(model),
        r=settings.lora.lora_rank,
        lora_alpha=settings.lora.lora_alpha,
        dtype="float32",
    )
    return LoRAModel(model, config)


class SingleProcessDPOTrainer(DPOTrainer):
    """PaddleNLP's, which wraps the reference model for several processes even when there is one.

    Attributes:
        accuracy: share of the last batch's pairs whose chosen answer gained more than its rejected one.
    """

    accuracy = 0.0

    def _wrap_ref_model(self, model: Any) -> Any:
        return model

    def log_metric(self, **metrics: Any) -> None:
        """As PaddleNLP's; keeps the accuracy, which that only keeps to the next log line."""
        gains = [
            metrics[f"policy_{answer}_logps"] - metrics[f"reference_{answer}_logps"]
            for answer in ("chosen", "rejected")
        ]
        self.accuracy = float((gains[0] > gains[1]).astype("float32").mean())
        super().log_metric(**metrics)


TRAINERS = {"sft": SFTTrainer, "lora": SFTTrainer, "dpo": SingleProcessDPOTrainer, "rm": RewardTrainer}


def build_task(settings: Settings, vocab_size: int) -> tuple[Any, dict[str, Any]]:
    """The model to train, and what the task's trainer takes beside the usual arguments."""
    task = settings.task.task
    model = build_model(settings, vocab_size, reward=task == "rm")
    if task == "lora":
        return add_lora(model, settings), {}
    if task == "dpo":
        if settings.dpo.lora:  # the reference is the model without its adapters
            return add_lora(model, settings), {"dpo_config": settings.dpo}
        reference = None if settings.dpo.reference_free else build_model(settings, vocab_size)
        return model, {"ref_model": reference, "dpo_config": settings.dpo}
    return model, {}
