"""Losses on packed documents, against dense models that see each question with one answer alone."""

from itertools import combinations

import numpy as np
import pytest

pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")

import paddle
from paddlenlp.peft import LoRAConfig, LoRAModel
from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM
from paddlenlp.trl import DPOCriterion
from training.reward import LlamaRewardModel, RewardTrainer, reward_features
from training.settings import DPOArguments
from training.tasks import count_tokens, dense_collate

from paddle_flashmask.integrations import paddlenlp as integration
from paddle_flashmask.packing import pack, preference_document, reward_document

# PaddleNLP calls what Paddle 3.3 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::paddle.utils.deprecated.VisibleDeprecationWarning")
VOCAB, LENGTH = 61, 64


def build(model_class, flash=True):
    paddle.seed(7)
    return model_class(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_flash_attention=flash,
            initializer_range=0.3,  # so that losses are not those of a uniform guess
        )
    ).eval()


def some(rng, *lengths):
    return [rng.integers(1, VOCAB, n).tolist() for n in lengths]


@pytest.fixture
def preferences(rng):
    return [some(rng, *lengths) for lengths in ((5, 7, 9), (1, 3, 2), (4, 6, 1), (9, 11, 12), (2, 20, 8))]


@pytest.fixture
def rankings(rng):
    samples = [
        some(rng, *lengths) for lengths in ((5, 4, 3), (2, 5, 1, 6), (3, 2, 2, 2, 2, 2, 2), (7, 9, 9, 4))
    ]
    return [(question, answers) for question, *answers in samples]


def inputs_of(batch):
    """What a model takes of a batch."""
    return {name: value for name, value in batch.items() if name != "response_indexs"}


def tensors(batch):
    return {name: paddle.to_tensor(array) for name, array in batch.items()}


@pytest.mark.parametrize("attention", ["flashmask", "paddle"])
def test_dpo_sees_each_answer_as_if_alone(preferences, attention):
    """The criterion's sums of log probabilities are those of each question and answer by itself."""
    packed = pack([preference_document(*sample) for sample in preferences], LENGTH)
    assert len(packed) > 1
    collate = integration.collate if attention == "flashmask" else dense_collate
    batch = tensors(collate(integration.preference_features(packed)))
    model = build(LlamaForCausalLM, attention == "flashmask")
    criterion = DPOCriterion(model.config, dpo_config=DPOArguments())
    labels = [batch.pop(f"{answer}_labels") for answer in ("chosen", "rejected")]
    with integration.enable(), paddle.no_grad():
        chosen, rejected = criterion(
            model(**inputs_of(batch)), (*labels, batch["response_indexs"], None, None)
        )

    plain = build(LlamaForCausalLM, flash=False)
    for row, i in enumerate(i for members in packed.documents for i in members):
        question, *answers = preferences[i]
        for ours, answer in zip((chosen, rejected), answers, strict=True):
            with paddle.no_grad():
                logits = plain(paddle.to_tensor([question + answer]))[0][0, len(question) - 1 : -1]
            logps = paddle.nn.functional.log_softmax(logits, -1).numpy()
            expected = logps[range(len(answer)), answer].sum()
            np.testing.assert_allclose(float(ours[row]), expected, rtol=1e-5)


@pytest.mark.parametrize("attention", ["flashmask", "paddle"])
def test_reward_loss_is_that_of_separate_answers(rankings, attention):
    packed = pack([reward_document(*sample) for sample in rankings], LENGTH)
    assert len(packed) > 1
    collate = integration.collate if attention == "flashmask" else dense_collate
    batch = tensors(collate(reward_features(packed)))
    trainer = RewardTrainer.__new__(RewardTrainer)
    with integration.enable(), paddle.no_grad():
        loss = trainer.compute_loss(build(LlamaRewardModel, attention == "flashmask"), batch)

    plain = build(LlamaRewardModel, flash=False)
    margins = []
    for question, answers in rankings:
        with paddle.no_grad():
            rewards = [float(plain(paddle.to_tensor([question + answer]))[0, -1]) for answer in answers]
        margins += [better - worse for better, worse in combinations(rewards, 2)]
    assert len(margins) == 1 + 3 + 15 + 3
    assert float(loss) == pytest.approx(np.log1p(np.exp(-np.array(margins))).mean(), rel=1e-5)
    assert trainer.accuracy == pytest.approx(np.mean(np.array(margins) > 0))


def test_the_reward_model_is_guarded(rankings):
    """With a model that would drop the mask, the reward model raises as others do."""
    batch = tensors(integration.collate(reward_features(pack([reward_document(*rankings[0])], LENGTH))))
    model = build(LlamaRewardModel, flash=False)
    with (
        integration.enable(),
        pytest.raises(ValueError, match="use_flash_attention: expected True, got False"),
    ):
        model(**inputs_of(batch))


def test_adapters_are_guarded(preferences):
    """PaddleNLP's LoRAModel calls the model's forward without the model's own call."""
    packed = pack([preference_document(*sample) for sample in preferences], LENGTH)
    batch = tensors(integration.collate(integration.features(packed)))
    config = LoRAConfig(target_modules=[".*q_proj.*"], dtype="float32")
    model = LoRAModel(build(LlamaForCausalLM, flash=False), config)
    with (
        integration.enable(),
        pytest.raises(ValueError, match="use_flash_attention: expected True, got False"),
    ):
        model(**batch)


def test_tokens_are_counted_alike(rankings):
    features = reward_features(pack([reward_document(*sample) for sample in rankings], LENGTH))
    total = sum(len(question) + sum(map(len, answers)) for question, answers in rankings)
    assert count_tokens(tensors(integration.collate(features))) == total
    assert count_tokens(tensors(dense_collate(features))) == total
