"""A reward model on PaddleNLP's Llama, and its trainer. PaddleNLP 3.0.0b4 has neither in its wheel."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import paddle
from paddle.nn import functional
from paddlenlp.trainer import Trainer
from paddlenlp.transformers import LlamaConfig, LlamaModel, LlamaPretrainedModel

from paddle_flashmask.integrations import paddlenlp as integration
from paddle_flashmask.packing import PackedSequences


class LlamaRewardModel(LlamaPretrainedModel):
    """A Llama with one number per position in place of the vocabulary."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.llama = LlamaModel(config)
        self.reward_head = paddle.nn.Linear(config.hidden_size, 1, bias_attr=False)

    def forward(self, input_ids: paddle.Tensor, **masks: paddle.Tensor) -> paddle.Tensor:
        """Rewards, [B, S], of int64 token ids, [B, S]; `masks` and positions are LlamaModel's arguments."""
        return self.reward_head(self.llama(input_ids, **masks)[0]).squeeze(-1)


def reward_features(packed: PackedSequences) -> list[dict[str, np.ndarray]]:
    """PaddleNLP's names for packed `reward_document`s, and all pairs of answers to the same question.

    `response_indexs` is int64 [P, 2]: the last positions of the better and of the worse answer of each pair.
    """
    samples = integration.features(packed)
    for sample, documents in zip(samples, packed.answers, strict=True):
        del sample["labels"]
        lasts = [answers[:, 1] - 1 for answers in documents]
        sample["response_indexs"] = np.array([pair for last in lasts for pair in combinations(last, 2)])
    return samples


class RewardTrainer(Trainer):
    """Minimises the mean over all pairs of answers to one question of -log sigmoid(better - worse reward).

    Attributes:
        accuracy: share of the last batch's pairs whose better answer had the greater reward.
    """

    accuracy = 0.0

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        """The batch's loss; `response_indexs` is int64 [P, 3], each pair after its row in the batch."""
        inputs = dict(inputs)
        row, better, worse = inputs.pop("response_indexs").unbind(1)
        rewards = model(**inputs)
        margins = rewards[row, better] - rewards[row, worse]
        self.accuracy = float((margins > 0).astype("float32").mean())
        loss = functional.softplus(-margins).mean()
        return (loss, rewards) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool = True, ignore_keys: Any = None
    ) -> tuple[paddle.Tensor, None, None]:
        """The loss alone: the trainer would look for labels."""
        with paddle.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None
