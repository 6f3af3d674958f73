"""The registration on the real PaddleFormers: what it changes, what it gives back, and what it refuses.

PaddleFormers' Qwen and DeepSeek modules import PaddleFleet, which is not on PyPI. What they import of it is
for other classes than those tested here, so empty classes stand in for it while the modules load.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("paddleformers", reason="needs PaddleFormers: bash scripts/setup_env.sh formers")

import paddle
import tokenizers
from paddleformers.cli.train.dpo.dpo_trainer import DPOTrainer
from paddleformers.cli.train.tuner import run_tuner
from paddleformers.nn.attention.interface import AttentionInterface
from paddleformers.peft import LoRAConfig, LoRAModel
from paddleformers.trainer import Trainer, TrainingArguments
from paddleformers.transformers import PretrainedModel, masking_utils
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paddle_flashmask import masks
from paddle_flashmask.integrations import paddleformers as integration
from paddle_flashmask.masks import ColumnMask
from paddle_flashmask.packing import pack, sft_document

VOCAB, LENGTH, LAYERS, WINDOW = 61, 48, 2, 4


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds any module of PaddleFleet, and in it an empty class for any name."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] not in ("paddlefleet", "paddlefleet_ops"):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin="stand-in", is_package=True)
        spec.has_location = True  # by which PaddleFormers tells that a package is there
        return spec

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {"encoder_or_decoder": None})
        return module

    def exec_module(self, module):
        pass


def load(*names):
    """Modules of paddleformers.transformers, with the stand-in for as long as they load."""
    finder = _StandIn()
    sys.meta_path.insert(0, finder)
    try:
        return [importlib.import_module(f"paddleformers.transformers.{name}") for name in names]
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0].startswith("paddlefleet")]:
            del sys.modules[name]


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,  # so that the scale is not 1 / sqrt(D)
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
FAMILIES = {  # prefix of the class names, suffix of the model's, settings
    "llama": ("Llama", "ForCausalLM", {}),
    "qwen2": ("Qwen2", "ForCausalLMDeprecated", {"head_dim": 8}),
    "qwen3": ("Qwen3", "ForCausalLMDeprecated", {"head_dim": 8}),
    "qwen2_moe": ("Qwen2Moe", "ForCausalLMDeprecated", {"head_dim": 8} | _EXPERTS),
    "qwen3_moe": ("Qwen3Moe", "ForCausalLMDeprecated", {"head_dim": 8} | _EXPERTS),
    "deepseek_v3": ("DeepseekV3", "ForCausalLM", _DEEPSEEK),
}
WITH_WINDOW = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")


@pytest.fixture(autouse=True)
def _unregistered_afterwards():
    yield
    integration.unregister()


def build(family, implementation="flashmask", **options):
    prefix, suffix, settings = FAMILIES[family]
    configuration, modeling = load(f"{family}.configuration", f"{family}.modeling")
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "seq_length": LENGTH,
        "fuse_rms_norm": False,
        "use_cache": False,  # as trainers set it; generate() asks for it
        **settings,
        **options,
    }
    paddle.seed(7)
    config = getattr(configuration, f"{prefix}Config")(**settings)
    config._attn_implementation = implementation
    return getattr(modeling, f"{prefix}{suffix}")(config)


def windowed(family, without=0, **options):
    """A model whose layers, but for the first `without`, have a window."""
    layers = options.get("num_hidden_layers", LAYERS)
    layer_types = ["full_attention"] * without + ["sliding_attention"] * (layers - without)
    return build(family, use_sliding_window=True, sliding_window=WINDOW, layer_types=layer_types, **options)


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


def prompt(batch_size=2, length=7, seed=0):
    return paddle.to_tensor(np.random.default_rng(seed).integers(1, VOCAB, [batch_size, length]))


def logits(model, input_ids, **inputs):
    with paddle.no_grad():
        outputs = model(input_ids, **inputs)
    return (outputs if isinstance(outputs, paddle.Tensor) else outputs[0]).numpy()


def loss_and_gradients(model, inputs):
    loss = model(**inputs)[0]
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    model.clear_gradients()
    return float(loss), gradients


def assert_same(left, right, rtol=1e-5):
    """Of two (loss, gradients)."""
    np.testing.assert_allclose(left[0], right[0], rtol=rtol)
    assert left[1].keys() == right[1].keys()
    for key, gradient in left[1].items():
        np.testing.assert_allclose(gradient, right[1][key], rtol=1e-3, atol=2e-6, err_msg=key)


# What is registered, and given back.


def test_register_and_unregister_leave_no_trace():
    owners = (AttentionInterface, masking_utils, PretrainedModel)
    before = [dict(vars(owner)) for owner in owners], dict(AttentionInterface._global_mapping)
    integration.register()
    integration.register("packed")
    mapping = AttentionInterface._global_mapping
    assert mapping["flashmask"] is not before[1]["flashmask"]
    assert {"eager", "sdpa", "packed"} < set(mapping)
    integration.unregister()
    assert ([dict(vars(owner)) for owner in owners], dict(AttentionInterface._global_mapping)) == before
    integration.unregister()  # harmless


def test_context_managers_end_in_any_order():
    own = AttentionInterface._global_mapping["flashmask"]
    model, inputs = build("llama"), batch(documents())
    outer, inner = integration.register(), integration.register()
    model(**inputs)
    with outer:
        model(**inputs)
    model(**inputs)
    assert (outer.calls, inner.calls) == (0, 3 * LAYERS), "the last one registered takes the calls"
    with inner:
        pass
    assert AttentionInterface._global_mapping["flashmask"] is own


def test_an_ended_registration_does_not_begin_again():
    registration = integration.register()
    integration.unregister()
    with pytest.raises(RuntimeError, match="this registration has ended"), registration:
        pass


def test_context_manager_restores_after_an_error():
    own = AttentionInterface._global_mapping["flashmask"]
    with pytest.raises(KeyError), integration.register():
        raise KeyError
    assert AttentionInterface._global_mapping["flashmask"] is own


@pytest.mark.parametrize(("name", "error"), [("eager", ValueError), ("", ValueError), (None, TypeError)])
def test_bad_names_are_refused(name, error):
    with pytest.raises(error, match="name: expected"):
        integration.register(name)


def test_a_batch_of_no_samples_raises():
    with pytest.raises(ValueError, match="samples: expected at least one to make a batch of, got none"):
        integration.collate([])


def test_versions(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.register()
    monkeypatch.setattr("paddleformers.__version__", "9.9.9")
    with pytest.warns(UserWarning, match=r"PaddleFormers 9\.9\.9 is not tested"):
        integration.register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        integration.register()


# What models compute.


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_separate_ones(family):
    model, docs = build(family), documents()
    with integration.register():
        packed = loss_and_gradients(model, batch(docs))
        parts = [loss_and_gradients(model, batch([d], len(d))) for d in docs]
    counts = np.array([(d.labels >= 0).sum() for d in docs])
    shares = counts / counts.sum()
    separate = {key: np.zeros_like(gradient) for key, gradient in packed[1].items()}
    for share, (_, gradients) in zip(shares, parts, strict=True):
        for key, gradient in gradients.items():
            separate[key] += share * gradient
    assert_same(packed, (np.dot(shares, [loss for loss, _ in parts]), separate))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["flashmask", "packed"])
def test_a_model_equals_its_own_dense_attention(family, name):
    """Under both names: DeepSeek V3 scales queries and pads values itself if the name is "flashmask"."""
    inputs = batch(documents())
    dense = loss_and_gradients(build(family, "eager"), inputs)
    with integration.register(name) as registration:
        ours = loss_and_gradients(build(family, name), inputs)
    assert registration.calls == LAYERS
    assert_same(ours, dense)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_mask_reaches_the_operator(family, mode):
    """Other tokens in the first document must not move the later ones' logits."""
    model = build(family)
    getattr(model, mode)()
    docs, others = documents(), documents()
    others[0] = documents(seed=1)[0]
    with integration.register() as registration:
        one, two = (logits(model, **{**batch(d), "labels": None}) for d in (docs, others))
    assert registration.calls == 2 * LAYERS
    first = len(docs[0])
    assert np.abs(one[:, :first] - two[:, :first]).max() > 1e-2
    np.testing.assert_allclose(one[:, first:], two[:, first:], atol=1e-6)  # experts batch tokens


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("bounds", ["[B,H,S]", "C=1", "C=2", "C=4"])
def test_every_form_of_the_indices_means_the_same(heads, bounds):
    inputs = batch(documents())
    lts = inputs[integration.INDICES].expand([1, heads, LENGTH, 1])
    lte = paddle.full_like(lts, LENGTH)
    columns = paddle.arange(LENGTH, dtype="int32").reshape([1, 1, -1, 1]).expand(lts.shape)
    form = {
        "[B,H,S]": lts.squeeze(-1),
        "C=1": lts,
        "C=2": paddle.concat([lts, lte], -1),
        "C=4": paddle.concat([lts, lte, paddle.zeros_like(lts), columns], -1),
    }[bounds]
    with integration.register():
        expected = loss_and_gradients(build("llama"), inputs)
        ours = loss_and_gradients(build("llama"), {**inputs, integration.INDICES: form})
    assert_same(ours, expected)


def test_the_scale_is_honoured():
    losses = {}
    for implementation in ("eager", "flashmask"):
        model = build("llama", implementation)
        for layer in model.sublayers():
            if hasattr(layer, "scaling"):
                layer.scaling = 3.0
        if implementation == "flashmask":
            integration.register()
        losses[implementation] = float(model(**batch(documents()))[0])
    assert losses["flashmask"] == pytest.approx(losses["eager"], rel=1e-5)


def test_dropout_is_for_training_only():
    model, inputs = build("llama", attention_dropout=0.5), batch(documents())
    with integration.register():
        model.train()
        drawn = [float(model(**inputs)[0]) for _ in range(2)]
        model.eval()
        kept = [float(model(**inputs)[0]) for _ in range(2)]
        assert drawn[0] != drawn[1]
        assert kept[0] == kept[1]
        assert kept[0] not in drawn
        layer, x = paddle.nn.Layer(), paddle.randn([1, 2, 8, 4])
        layer.eval()  # whatever it passes
        call = AttentionInterface._global_mapping["flashmask"]
        one, other = (call(layer, query=x, key=x, value=x, dropout=p)[0].numpy() for p in (0.0, 0.5))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputation_changes_nothing(family):
    inputs = batch(documents())
    options = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    with integration.register() as registration:
        plain = loss_and_gradients(build(family), inputs)
        calls, model = registration.calls, build(family, **options)
        model.train()
        again = loss_and_gradients(model, inputs)
    assert registration.calls - calls > LAYERS, "nothing was recomputed"
    assert again[0] == plain[0]
    for key, gradient in again[1].items():
        np.testing.assert_array_equal(gradient, plain[1][key], err_msg=key)


def test_low_rank_adapters():
    model = LoRAModel(build("llama"), LoRAConfig(target_modules=[".*q_proj.*"], r=4, lora_alpha=8))
    inputs = batch(documents())
    with integration.register() as registration:
        model(**inputs)[0].backward()
    assert registration.calls == LAYERS
    model.model.config.context_parallel_size = 2
    with integration.register(), pytest.raises(ValueError, match="context_parallel_size"):
        model(**inputs)


def test_the_trainer_takes_packed_sequences(tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path),
        device="cpu",
        max_steps=3,
        per_device_train_batch_size=1,
        save_strategy="no",
        amp_master_grad=False,  # its default is for bf16 only
        disable_tqdm=True,
        report_to=[],
    )
    packed = pack([d for seed in range(3) for d in documents(seed)], LENGTH)
    model = build("llama")
    before = {name: p.numpy() for name, p in model.named_parameters()}
    with integration.register() as registration:
        Trainer(
            model=model,
            args=args,
            train_dataset=integration.features(packed),
            data_collator=integration.collate,
        ).train()
    assert registration.calls == 3 * LAYERS
    assert any(not np.array_equal(before[name], p.numpy()) for name, p in model.named_parameters())


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A small Llama with a tokenizer of single bytes, and samples of both stages in PaddleFormers' JSONL."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    vocabulary = {token: i for i, token in enumerate([*special.values(), *alphabet])}
    bytes_only = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, **special)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}</s>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    special_ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}
    build("llama", vocab_size=len(tokenizer), max_position_embeddings=256, **special_ids).save_pretrained(
        str(folder)
    )
    rows = {"SFT": [], "DPO": []}
    for i in range(40):
        question, good, bad = (
            [{"role": role, "content": content}]
            for role, content in (
                ("user", f"What is {i} + {i}?"),
                ("assistant", f"It is {2 * i}."),
                ("assistant", f"Who would know {i}?"),
            )
        )
        rows["SFT"].append({"messages": question + good})
        rows["DPO"].append({"messages": question, "chosen_response": good, "rejected_response": bad})
    for stage, samples in rows.items():
        (folder / f"{stage}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


@pytest.mark.parametrize("fine_tuning", ["full", "LoRA"])
@pytest.mark.parametrize(("stage", "passes"), [("SFT", 1), ("DPO", 2)])
def test_paddleformers_own_command(model_folder, tmp_path, monkeypatch, stage, passes, fine_tuning):
    """What `paddleformers-cli train` runs: their data, packing, masks and trainer, and one switch of ours."""
    # It wraps the reference model for several processes even when there is one, which takes a Fleet.
    monkeypatch.setattr(DPOTrainer, "_wrap_ref_model", lambda self, model: model)
    data = str(model_folder / f"{stage}.jsonl")
    settings = {
        "stage": stage,
        "fine_tuning": fine_tuning,
        "model_name_or_path": str(model_folder),
        **{f"{part}_dataset_type": "messages" for part in ("train", "eval")},
        **{f"{part}_dataset_path": data for part in ("train", "eval")},
        **{f"{part}_dataset_prob": "1.0" for part in ("train", "eval")},
        "template_backend": "jinja",
        "packing": True,
        "max_seq_len": 256,
        "device": "cpu",
        "amp_master_grad": False,
        "per_device_train_batch_size": 1,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "do_train": True,
    }
    losses = {}
    for implementation in ("eager", "flashmask"):
        output = tmp_path / implementation
        with integration.register() as registration:
            run_tuner({**settings, "_attn_implementation": implementation, "output_dir": str(output)})
        losses[implementation] = json.loads((output / "train_results.json").read_text())["train_loss"]
    assert registration.calls == 3 * LAYERS * passes
    assert losses["flashmask"] == pytest.approx(losses["eager"], rel=1e-5)


# Sliding windows.


@pytest.mark.parametrize("family", WITH_WINDOW)
def test_a_window_is_combined_with_packing(family):
    """The window W means i - j < W, in every document, and never shows another document."""
    docs = documents()
    inputs = batch(docs)
    wanted = ColumnMask.from_startend_row_indices(inputs[integration.INDICES].numpy(), True)
    wanted = wanted & masks.sliding_window(LENGTH, window=WINDOW - 1)
    dense = {key: value for key, value in inputs.items() if key != integration.INDICES}
    dense["attention_mask"] = paddle.to_tensor(wanted.to_dense())
    expected = loss_and_gradients(windowed(family, implementation="eager"), dense)
    with integration.register() as registration:
        ours = loss_and_gradients(windowed(family), inputs)
    assert registration.calls == LAYERS
    assert_same(ours, expected)


def test_the_window_ends_where_paddleformers_says():
    model, ids = windowed("qwen2", num_hidden_layers=1).eval(), prompt(1, 12)
    moved = ids.clone()
    moved[0, 5] = (ids[0, 5] + 1) % VOCAB
    indices = paddle.full([1, 1, 12, 1], 9, dtype="int32")  # nothing sees further than row 8
    with integration.register():
        one, two = (logits(model, x, attn_mask_startend_row_indices=indices) for x in (ids, moved))
    rows = np.abs(one - two).max(axis=(0, 2)).nonzero()[0]
    assert rows.tolist() == [5, 6, 7, 8]  # 5 + W is 9


def test_what_a_window_does_not_combine_with_raises():
    columns = paddle.arange(LENGTH, dtype="int32").reshape([1, 1, -1, 1])
    until = paddle.clip(columns + 2, max=LENGTH)
    hole = paddle.concat([columns + 1, until], -1)  # hides one row, then shows more, and then the window ends
    full = paddle.full_like(columns, LENGTH)
    inputs = batch(documents())
    model = windowed("qwen2")
    with integration.register():
        with pytest.raises(ValueError, match="column 0 shows some before it"):
            model(**{**inputs, integration.INDICES: hole})
        with pytest.raises(ValueError, match="expected 1 or 2 bounds beside a sliding window"):
            model(**{**inputs, integration.INDICES: paddle.concat([full, full, columns, columns], -1)})


@pytest.mark.parametrize(
    ("family", "layer_types", "message"),
    [
        ("llama", None, "sliding_window: expected None, got 4, which llama models ignore"),
        ("qwen2_moe", None, r"layer_types: expected .* got \[\]; qwen2_moe models give"),
        ("qwen3_moe", ["full_attention", "sliding_attention"], "layer_types: expected"),
    ],
)
def test_a_window_that_a_family_would_lose_raises(family, layer_types, message):
    options = {} if layer_types is None else {"layer_types": layer_types}
    model = build(family, use_sliding_window=True, sliding_window=WINDOW, **options)
    with integration.register(), pytest.raises(ValueError, match=message):
        model(**batch(documents()))


@given(st.data())
def test_window_indices_equal_the_masks_algebra(data):
    seqlen, window = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 14))
    bounds = data.draw(st.sampled_from([1, 2]))
    rows = st.lists(st.integers(0, seqlen + 1), min_size=bounds, max_size=bounds)
    indices = np.array(data.draw(st.lists(rows, min_size=seqlen, max_size=seqlen)), np.int32)[None, None]
    wanted = ColumnMask.from_startend_row_indices(indices, True).to_dense() & (
        masks.sliding_window(seqlen, window=window - 1).to_dense()
    )
    try:
        combined = integration._window_indices(paddle.to_tensor(indices), window).numpy()
    except ValueError:
        assert bounds == 2, "one bound always combines"
        assert any(_runs(~wanted[0, 0, j:, j]) > 1 for j in range(seqlen))
    else:
        got = ColumnMask.from_startend_row_indices(combined, True).to_dense()
        np.testing.assert_array_equal(got, np.broadcast_to(wanted, got.shape))


def test_rows_above_the_diagonal_are_no_second_interval():
    columns = paddle.arange(9, dtype="int32").reshape([1, 1, -1, 1])
    combined = integration._window_indices(paddle.concat([columns * 0, columns], -1), WINDOW).numpy()
    assert combined[0, 0, :, 0].tolist() == [4, 5, 6, 7, 8, 0, 0, 0, 0]  # the window hides nothing from 5 on
    assert combined[0, 0, :, 1].tolist() == [9, 9, 9, 9, 9, 5, 6, 7, 8]


def _runs(hidden):
    """How many runs of rows are hidden."""
    return int(hidden[:1].sum() + (hidden[1:] & ~hidden[:-1]).sum())


def test_paddleformers_own_window_is_wrong_for_two_bounds_and_equal_for_one():
    """Why it is replaced while registered. If this fails, PaddleFormers has learnt: relax the replacement."""
    lts = batch(documents())[integration.INDICES][..., :9, :]
    own = masking_utils.prepare_sliding_window_startend_row_indices
    np.testing.assert_array_equal(own(lts, WINDOW).numpy(), integration._window_indices(lts, WINDOW).numpy())
    hidden = paddle.to_tensor([[[[2, 6]] + [[9, 9]] * 8]], dtype="int32")
    assert own(hidden, WINDOW).numpy()[0, 0, 0].tolist() == [2, 6], "rows 6 to 8 see column 0, W = 4"
    assert integration._window_indices(hidden, WINDOW).numpy()[0, 0, 0].tolist() == [2, 9]


# Evaluation and generation.


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_generation_equals_dense_attention(family):
    tokens = {}
    for implementation in ("eager", "flashmask"):
        with integration.register() as registration:
            tokens[implementation], _ = generate(build(family, implementation), prompt())
    assert registration.calls == 6 * LAYERS
    np.testing.assert_array_equal(tokens["flashmask"].numpy(), tokens["eager"].numpy())


def generate(model, input_ids, **inputs):
    options = {"decode_strategy": "greedy_search", "max_new_tokens": 6, "eos_token_id": 0, "pad_token_id": 0}
    return model.eval().generate(input_ids, use_cache=True, **options, **inputs)


@pytest.mark.parametrize("family", WITH_WINDOW)
def test_steps_beyond_the_window_equal_one_pass(family):
    """The cache keeps W - 1 keys, the dense mask of a step has a column for each there ever was."""
    model = windowed(family, without=0 if "moe" in family else 1).eval()
    ids = prompt()
    with integration.register():
        tokens, _ = generate(model, ids)
        whole = logits(model, paddle.concat([ids, tokens], axis=1))
    np.testing.assert_array_equal(whole.argmax(-1)[:, ids.shape[1] - 1 : -1], tokens.numpy())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_padded_prompts(family):
    """Left-padded prompts come with a dense mask; the padding must not be seen."""
    model, ids = build(family).eval(), prompt(2)
    padding = 3
    padded = ids.clone()
    padded[0, :padding] = 0
    attention_mask = paddle.ones_like(ids)
    attention_mask[0, :padding] = 0
    positions = paddle.clip(attention_mask.cumsum(-1) - 1, min=0)
    with integration.register() as registration:
        together = logits(model, padded, attention_mask=attention_mask, position_ids=positions)
        alone = logits(model, ids[:1, padding:])
    assert registration.calls == 2 * LAYERS
    np.testing.assert_allclose(together[:1, padding:], alone, atol=1e-5)


# What would lose the mask, or something else because of it.


def test_attention_sinks_are_refused():
    configuration, modeling = load("gpt_oss.configuration", "gpt_oss.modeling")
    config = configuration.GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        fuse_rms_norm=False,
    )
    config._attn_implementation = "flashmask"
    model = modeling.GptOssForCausalLM(config)
    with integration.register(), pytest.raises(NotImplementedError, match="sink: GptOssAttention has"):
        model(prompt())


def test_other_families_and_fleet_models_raise():
    configuration, modeling, provider = load("phi3.configuration", "phi3.modeling", "gpt_provider")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = configuration.Phi3Config(vocab_size=VOCAB, pad_token_id=0, fuse_rms_norm=False, **sizes)
    config._attn_implementation = "flashmask"
    with integration.register():
        with pytest.raises(TypeError, match="Phi3ForCausalLM: expected a model of a family tested"):
            modeling.Phi3ForCausalLM(config)(**batch(documents()))
        with pytest.raises(TypeError, match=r"GPTModel: expected a model of a family.*ForCausalLMDeprecated"):
            integration.check_model(provider.GPTModel.__new__(provider.GPTModel))


def test_context_parallelism_raises():
    model = build("llama")
    model.config.context_parallel_size = 2
    inputs, message = batch(documents()), "context_parallel_size: expected 1, got 2"
    with integration.register():
        with pytest.raises(ValueError, match=message):
            model(**inputs)
        layer = model.model.layers[0]  # as in a stage of a pipeline
        rotary = model.model.rotary_emb(paddle.zeros([1]), inputs["position_ids"])
        with pytest.raises(ValueError, match=message):
            layer(
                paddle.randn([1, LENGTH, 32]),
                attn_mask_startend_row_indices=inputs[integration.INDICES],
                position_embeddings=rotary,
            )


def test_a_model_that_is_not_registered_says_so():
    with pytest.raises(ValueError, match=r"expected a registered name \(none\), got 'eager'"):
        integration.check_model(build("llama", "eager"))
    integration._warn_of_other.cache_clear()
    with integration.register(), pytest.warns(UserWarning, match="'eager': not this package's operator"):
        build("llama", "eager")(**batch(documents()))


@pytest.mark.filterwarnings("ignore:config._attn_implementation is 'sdpa'")
def test_paddles_other_attention_loses_causal_indices():
    """Paddle's attention, asked for causality and given a mask, drops the mask on a CPU."""
    inputs = batch(documents())
    lts = inputs[integration.INDICES]
    two = paddle.concat([lts, paddle.full_like(lts, LENGTH)], -1)
    nothing = paddle.zeros_like(lts)
    four = paddle.concat([two, nothing, paddle.arange(LENGTH, dtype="int32").reshape([1, 1, -1, 1])], -1)
    expected = float(build("llama", "eager")(**inputs)[0])
    model = build("llama", "sdpa")
    for indices in (lts, lts.squeeze(-1), two):
        changed = {**inputs, integration.INDICES: indices}
        assert float(model(**changed)[0]) != pytest.approx(expected, rel=1e-3), "PaddleFormers has learnt"
        for call in (model, model.forward):
            with integration.register(), pytest.raises(ValueError, match="got 'sdpa'; Paddle's attention"):
                call(**changed)
    with integration.register():
        kept = float(model(**{**inputs, integration.INDICES: four})[0])
    assert kept == pytest.approx(expected, rel=1e-5)


def test_generate_with_indices_raises():
    inputs = batch(documents())
    with integration.register(), pytest.raises(ValueError, match="generate"):
        generate(
            build("llama"), inputs["input_ids"], attn_mask_startend_row_indices=inputs[integration.INDICES]
        )


def test_indices_with_a_cache_raise():
    model, inputs = build("llama").eval(), batch(documents())
    with integration.register():
        cache = model(inputs["input_ids"], use_cache=True, return_dict=True).past_key_values
        with pytest.raises(ValueError, match="expected as many queries as keys, got 48 and 96"):
            model(**inputs, past_key_values=cache, use_cache=True)


def test_the_old_name_of_the_indices_raises():
    """Llama takes it, and the others swallow it."""
    inputs = batch(documents())
    indices = inputs.pop(integration.INDICES)
    with integration.register():
        for family in ("llama", "qwen2"):
            with pytest.raises(ValueError, match="attn_mask_start_row_indices: expected"):
                build(family)(**inputs, attn_mask_start_row_indices=indices)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attention_mask": paddle.full([1, 1, 8, 8], 0.5)}, ValueError, "FlashMask has no bias"),
        ({"attention_mask": paddle.zeros([1, 1, 8, 7])}, ValueError, r"Sk at least 8, got \[1, 1, 8, 7\]"),
        (
            {
                "attention_mask": paddle.zeros([1, 1, 8, 8]),
                integration.INDICES: paddle.full([1, 1, 8, 1], 8, "int32"),
            },
            ValueError,
            "expected None beside attn_mask_startend_row_indices",
        ),
        ({"position_bias": paddle.zeros([1])}, TypeError, "unexpected attention arguments position_bias"),
    ],
)
def test_arguments_that_would_be_lost_raise(changes, error, message):
    x = paddle.randn([1, 2, 8, 4])
    with integration.register():
        call = AttentionInterface._global_mapping["flashmask"]
        with pytest.raises(error, match=message):
            call(paddle.nn.Layer(), query=x, key=x, value=x, **changes)


@pytest.mark.parametrize("dtype", ["bool", "float32", "bfloat16", "float16"])
def test_dense_masks_of_every_dtype(dtype):
    wanted = np.tril(np.ones([1, 1, 4, 4], bool))
    mask = paddle.to_tensor(wanted)
    if dtype != "bool":
        lowest = paddle.full([1], paddle.finfo(getattr(paddle, dtype)).min)
        mask = paddle.where(mask, paddle.zeros([1]), lowest).astype(dtype)
    np.testing.assert_array_equal(integration._visible(mask, 4), wanted)


def test_dense_masks_are_read_once_and_let_go():
    known = integration._DenseMasks()
    mask = paddle.ones([1, 1, 4, 6], dtype="bool")
    assert known.column_mask(mask, 6) is known.column_mask(mask, 6)
    assert known.column_mask(mask, 4).seqlen_k == 4
    mask[:, :, :, 5] = False  # in place: read again
    assert known.column_mask(mask, 6).to_dense()[0, 0].sum() == 20
    del mask
    assert not known._masks
