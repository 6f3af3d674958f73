"""The switch on the real PaddleNLP: what it changes, what it gives back, and what it refuses."""

import warnings

import numpy as np
import pytest

pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")

import paddle
from paddle.nn import functional
from paddlenlp.transformers import (
    ChatGLMv2Config,
    ChatGLMv2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PretrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    QWenConfig,
    QWenForCausalLM,
)
from paddlenlp.transformers.llama import fusion_ops
from paddlenlp.transformers.llama import modeling_pp as llama_pipeline
from paddlenlp.transformers.llama.modeling import LlamaAttention
from paddlenlp.transformers.qwen2 import modeling_pp as qwen2_pipeline
from paddlenlp.transformers.qwen2.modeling import Qwen2Attention
from paddlenlp.trl import dpo_trainer

from paddle_flashmask.integrations import paddlenlp as integration
from paddle_flashmask.masks import ColumnMask
from paddle_flashmask.packing import pack, preference_document, sft_document

# PaddleNLP calls what Paddle 3.3 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::paddle.utils.deprecated.VisibleDeprecationWarning")
VOCAB, LENGTH, LAYERS = 61, 48, 2
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, 4),
    "llama-gqa": (LlamaForCausalLM, LlamaConfig, 2),
    "qwen2-gqa": (Qwen2ForCausalLM, Qwen2Config, 2),
}


@pytest.fixture(autouse=True)
def _switched_off_afterwards():
    yield
    integration.disable()


def build(name="llama-gqa", **options):
    model_class, config_class, kv_heads = MODELS[name]
    paddle.seed(7)
    settings = {"use_flash_attention": True, "max_position_embeddings": LENGTH} | options
    return model_class(
        config_class(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            **settings,
        )
    )


def documents(seed=0):
    """Five documents, 47 tokens: one packed sequence of LENGTH with a position of padding."""
    rng = np.random.default_rng(seed)
    return [
        sft_document(*(rng.integers(1, VOCAB, n) for n in shape))
        for shape in ((3, 9), (1, 7), (8, 8), (2, 4), (5, 5))
    ]


def batch(docs, length=LENGTH):
    packed = pack(docs, length)
    return {k: paddle.to_tensor(v) for k, v in integration.collate(integration.features(packed)).items()}


def loss_and_gradients(model, inputs):
    loss = model(**inputs)[0]
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    model.clear_gradients()
    return float(loss), gradients


def test_enable_and_disable_leave_no_trace():
    owners = (functional, PretrainedModel, LlamaAttention, Qwen2Attention, dpo_trainer)
    before = [dict(vars(owner)) for owner in owners]
    integration.enable()
    assert functional.flashmask_attention is not before[0]["flashmask_attention"]
    integration.enable("dense")
    integration.disable()
    assert [dict(vars(owner)) for owner in owners] == before
    integration.disable()  # harmless


def test_context_manager_nests_and_restores():
    own = functional.flashmask_attention
    model, inputs = build(), batch(documents())
    with integration.enable() as outer:
        model(**inputs)
        with integration.enable("dense") as inner:
            model(**inputs)
        model(**inputs)
    assert (outer.calls, inner.calls) == (2 * LAYERS, LAYERS)
    assert functional.flashmask_attention is own


def test_context_manager_restores_after_an_error():
    own = functional.flashmask_attention
    with pytest.raises(KeyError), integration.enable():
        raise KeyError
    assert functional.flashmask_attention is own


def test_an_ended_switch_does_not_begin_again():
    switch = integration.enable()
    integration.disable()
    with pytest.raises(RuntimeError, match="this switch has ended"), switch:
        pass


def test_mask_bytes_are_linear_or_quadratic():
    model, inputs = build(), batch(documents())
    with integration.enable() as skip:
        model(**inputs)
    with integration.enable("dense") as dense:
        model(**inputs)
    assert (skip.mask_bytes, dense.mask_bytes) == (4 * LENGTH, LENGTH**2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("visit", ["skip", "dense"])
def test_packed_documents_equal_separate_ones(name, visit):
    model = build(name)
    docs = documents()
    with integration.enable(visit):
        packed_loss, packed = loss_and_gradients(model, batch(docs))
        counts = [int((d.labels >= 0).sum()) for d in docs]
        parts = [loss_and_gradients(model, batch([d], len(d))) for d in docs]
    shares = np.array(counts) / sum(counts)
    np.testing.assert_allclose(
        packed_loss, sum(s * loss for s, (loss, _) in zip(shares, parts, strict=True)), rtol=1e-5
    )
    for key, gradient in packed.items():
        separate = sum(share * gradients[key] for share, (_, gradients) in zip(shares, parts, strict=True))
        np.testing.assert_allclose(gradient, separate, rtol=1e-3, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_mask_reaches_the_operator(name, mode):
    """Other tokens in the first document must not move a bit of the later ones' logits."""
    model = build(name)
    getattr(model, mode)()
    docs, others = documents(), documents()
    others[0] = documents(seed=1)[0]
    with integration.enable() as switch, paddle.no_grad():
        one, two = (model(**{**batch(d), "labels": None})[0].numpy() for d in (docs, others))
    assert switch.calls == 2 * LAYERS
    first = len(docs[0])
    assert not np.array_equal(one[:, :first], two[:, :first])
    np.testing.assert_array_equal(one[:, first:], two[:, first:])


@pytest.mark.parametrize("granularity", ["full", "full_attn", "core_attn"])
def test_recomputation_changes_nothing(granularity):
    inputs = batch(documents())
    with integration.enable() as switch:
        plain = loss_and_gradients(build(), inputs)
        calls, model = switch.calls, build(recompute_granularity=granularity)
        model.recompute_enable()
        model.train()
        again = loss_and_gradients(model, inputs)
    assert switch.calls - calls > LAYERS, "nothing was recomputed"
    assert again[0] == plain[0]
    for key, gradient in again[1].items():
        np.testing.assert_array_equal(gradient, plain[1][key], err_msg=key)


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place'")  # Paddle's full_like, while it traces
@pytest.mark.parametrize("name", MODELS)
def test_a_traced_model_keeps_the_mask(name):
    model, one, two = build(name), batch(documents()), batch(documents(seed=1))
    with integration.enable():
        eager = [loss_and_gradients(model, inputs) for inputs in (one, two)]
        # Without full_graph PaddleNLP's models do not trace, with or without this package.
        traced = paddle.jit.to_static(model, full_graph=True)
        again = [loss_and_gradients(traced, inputs) for inputs in (one, two)]
    for (loss, gradients), (loss_again, gradients_again) in zip(eager, again, strict=True):
        np.testing.assert_allclose(loss_again, loss, rtol=1e-6)
        for key, gradient in gradients.items():
            np.testing.assert_allclose(gradients_again[key], gradient, rtol=1e-4, atol=1e-7, err_msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_equals_the_dense_mask_run_bit_for_bit(name):
    curves, weights = {}, {}
    for visit in ("skip", "dense"):
        model = build(name)
        optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
        curves[visit] = []
        with integration.enable(visit) as switch:
            for step in range(4):
                loss = model(**batch(documents(seed=step)))[0]
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                curves[visit].append(float(loss))
        assert switch.calls == 4 * LAYERS
        weights[visit] = {key: value.numpy() for key, value in model.state_dict().items()}
    assert curves["skip"] == curves["dense"]
    assert len(set(curves["skip"])) == 4
    for key, value in weights["skip"].items():
        np.testing.assert_array_equal(value, weights["dense"][key], err_msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_would_ignore_the_mask_raises(name):
    model, inputs = build(name, use_flash_attention=False), batch(documents())
    unmasked = {k: v for k, v in inputs.items() if k != integration.INDICES}
    assert float(model(**inputs)[0]) == float(model(**unmasked)[0]), "PaddleNLP has learnt: relax the guard"
    with integration.enable():
        with pytest.raises(ValueError, match="use_flash_attention: expected True, got False"):
            model(**inputs)
        model(**unmasked)  # nothing to ignore
        layer = model.sublayers()[
            [type(x).__name__.endswith("Attention") for x in model.sublayers()].index(True)
        ]
        hidden = paddle.randn([1, LENGTH, 32])
        with pytest.raises(ValueError, match="use_flash_attention"):
            layer(
                hidden,
                inputs["position_ids"],
                None,
                None,
                False,
                False,
                attn_mask_startend_row_indices=inputs[integration.INDICES],
            )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"context_parallel_degree": 2}, "context_parallel_degree: expected 1, got 2"),
        ({"alibi": True}, "alibi: expected False, got True"),
        ({"use_sliding_window": True}, "use_sliding_window: expected False, got True"),
    ],
)
def test_settings_that_drop_the_mask_or_something_else_raise(setting, message):
    model, inputs = build(), batch(documents())
    for key, value in setting.items():
        setattr(model.config, key, value)
    with integration.enable(), pytest.raises(ValueError, match=message):
        model(**inputs)


def test_paddlenlp_knows_no_sliding_window():
    """Why a configured one raises. If this fails, PaddleNLP has learnt: combine it instead."""
    inputs = batch(documents())
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    del inputs[integration.INDICES]
    losses = [float(build("qwen2-gqa", **options)(**inputs)[0]) for options in ({}, window)]
    assert losses[0] == losses[1]


def test_paddlenlps_ring_attention_gets_no_mask(monkeypatch):
    """Why context parallelism raises. If this fails, PaddleNLP has learnt: relax the guard."""
    taken = {}

    class Ring:
        @staticmethod
        def apply(query, key, value, **options):
            taken.update(options)
            return query

    monkeypatch.setattr(fusion_ops, "RingFlashAttention", Ring)
    x = paddle.randn([1, LENGTH, 4, 8])
    config = build(context_parallel_degree=2).config
    indices = batch(documents())[integration.INDICES]
    fusion_ops.fusion_flash_attention(x, config, x, x, None, False, attn_mask_startend_row_indices=indices)
    assert taken == {"attn_mask": None, "is_causal": True}


@pytest.mark.parametrize("name", MODELS)
def test_paddlenlps_dense_attention_gives_the_same(name):
    """What one trains with when FlashMask is switched off: a dense mask, PaddleNLP's own attention."""
    inputs = batch(documents())
    with integration.enable():
        ours = loss_and_gradients(build(name), inputs)
    mask = ColumnMask.from_startend_row_indices(inputs.pop(integration.INDICES).unsqueeze(-1).numpy(), True)
    inputs["attention_mask"] = paddle.to_tensor(mask.to_dense())
    dense = loss_and_gradients(build(name, use_flash_attention=False), inputs)
    np.testing.assert_allclose(ours[0], dense[0], rtol=1e-5)
    for key, gradient in ours[1].items():
        np.testing.assert_allclose(gradient, dense[1][key], rtol=1e-3, atol=2e-6, err_msg=key)


def pipeline_of_one_layer(name, inputs):
    """Hidden states of what a pipeline's first stage strings together."""
    pipeline, prefix = {"llama": (llama_pipeline, "Llama"), "qwen2": (qwen2_pipeline, "Qwen2")}[name]
    config = build(f"{name}-gqa").config
    embedding, layer = (
        getattr(pipeline, f"{prefix}{part}Pipe")(config) for part in ("Embedding", "DecoderLayer")
    )
    arguments, _ = getattr(pipeline, f"{prefix}ForCausalLMPipe")._prepare_pipeline_inputs_func(dict(inputs))
    return layer(embedding(arguments))[0].numpy()


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_stages_of_a_pipeline_keep_the_mask(name, monkeypatch):
    monkeypatch.setattr(
        llama_pipeline, "get_env_device", lambda: "gpu"
    )  # elsewhere it loses the mask, see below
    first = documents()[0]
    others = [documents(seed=1)[0], *documents()[1:]]
    with integration.enable() as switch, paddle.no_grad():
        one, two = (pipeline_of_one_layer(name, batch(docs)) for docs in (documents(), others))
    assert switch.calls == 2
    assert not np.array_equal(one[:, : len(first)], two[:, : len(first)])
    np.testing.assert_array_equal(one[:, len(first) :], two[:, len(first) :])


@pytest.mark.parametrize("positions", [True, False])
def test_a_pipeline_that_takes_the_indices_for_a_dense_mask_raises(positions):
    """Llama's, on a CPU, as it tells its nameless tensors apart on GPUs only."""
    inputs = batch(documents())
    if not positions:
        del inputs["position_ids"]
    with integration.enable(), pytest.raises(ValueError, match="attention_mask: expected a mask that is not"):
        pipeline_of_one_layer("llama", inputs)


def test_dpo_in_a_pipeline_raises():
    """PaddleNLP looks for attn_mask_startend_row_indice. If this fails, it has learnt: test what it gets."""
    packed = pack([preference_document([1, 2], [3, 4], [5, 6, 7])], LENGTH)
    inputs = integration.collate(integration.preference_features(packed))
    arguments, _ = dpo_trainer.prepare_pipeline_dpo_inputs_func(dict(inputs))
    assert len(arguments) == 2, "token ids and positions"
    with integration.enable():
        prepare = dpo_trainer.prepare_pipeline_dpo_inputs_func
        with pytest.raises(ValueError, match="pipeline_parallel_degree: expected 1"):
            prepare(dict(inputs))
        inputs["attention_mask"] = inputs.pop(integration.INDICES)
        assert len(prepare(dict(inputs))[0]) == 3


def test_devices_with_kernels_that_ignore_the_mask_raise(monkeypatch):
    monkeypatch.setattr("paddlenlp.utils.tools.get_env_device", lambda: "npu")
    with pytest.raises(ValueError, match="attention on npu ignores"):
        integration.check_model(build())


@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        (OPTForCausalLM, OPTConfig, {"word_embed_proj_dim": 16, "max_position_embeddings": LENGTH}),
        (QWenForCausalLM, QWenConfig, {"kv_channels": 8, "seq_length": LENGTH}),
        (ChatGLMv2ForCausalLM, ChatGLMv2Config, {"padded_vocab_size": VOCAB, "kv_channels": 8}),
    ],
)
def test_other_model_families_raise(model_class, config_class, options):
    """OPT's forward takes **kwargs and would swallow the indices."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = model_class(config_class(intermediate_size=16, **sizes, **options))
    message = f"{model_class.__name__}: expected a model of a family"
    with integration.enable(), pytest.raises(TypeError, match=message):
        model(**batch(documents()))


def test_generate_with_indices_raises():
    inputs = batch(documents())
    with integration.enable(), pytest.raises(ValueError, match="generate"):
        build().generate(
            inputs["input_ids"], attn_mask_startend_row_indices=inputs[integration.INDICES], max_new_tokens=1
        )


def test_indices_with_a_cache_raise():
    """They name rows of the whole sequence, and the operator would count those of one step."""
    model, inputs = build().eval(), batch(documents())
    ids, positions, indices = (inputs[name] for name in ("input_ids", "position_ids", integration.INDICES))
    with integration.enable(), paddle.no_grad():
        past = model(ids[:, :20], position_ids=positions[:, :20], use_cache=True)[1]
        with pytest.raises(ValueError, match="expected none beside a cache"):
            model(
                input_ids=ids[:, 20:21],
                position_ids=positions[:, 20:21],
                attn_mask_startend_row_indices=indices[..., :21],
                past_key_values=past,
                use_cache=True,
            )


def test_generate_without_indices_still_works():
    new_tokens = 8
    # Past LENGTH the model has no rotary embedding, and its logits are whatever memory holds.
    prompt = batch(documents())["input_ids"][:, : LENGTH - new_tokens]
    options = {
        "attention_mask": paddle.ones_like(prompt),
        "decode_strategy": "greedy_search",
        "max_new_tokens": new_tokens,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    model = build().eval()
    expected, _ = model.generate(prompt, **options)
    with integration.enable():
        tokens, _ = model.generate(prompt, **options)
    assert tokens.shape == [1, new_tokens]
    np.testing.assert_array_equal(tokens.numpy(), expected.numpy())


def test_a_batch_of_no_samples_raises():
    with pytest.raises(ValueError, match="samples: expected at least one to make a batch of, got none"):
        integration.collate([])


def test_unknown_version_warns_once(monkeypatch):
    monkeypatch.setattr("paddlenlp.__version__", "9.9.9")
    with pytest.warns(UserWarning, match=r"PaddleNLP 9\.9\.9 is not tested"):
        integration.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.enable()


def test_supported_version_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.enable()


def test_unknown_visit_is_refused():
    with pytest.raises(ValueError, match='visit: expected "skip" or "dense", got \'all\''):
        integration.enable("all")
