"""scripts/finetune.py end to end: a few steps of every task's configuration, made smaller."""

import csv
import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")

from paddle_flashmask.integrations import paddlenlp as integration

# PaddleNLP calls what Paddle 3.3 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::paddle.utils.deprecated.VisibleDeprecationWarning")
ROOT = Path(__file__).parents[2]
TASKS = ("sft", "lora", "dpo", "rm")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def finetune():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("finetune")
    sys.path.pop(0)


@pytest.fixture(scope="module")
def samples(finetune, tmp_path_factory):
    """The shortest samples of each task, as JSONL files: which docstrings there are hangs on the Python."""
    from training.samples import build_rows

    directory = tmp_path_factory.mktemp("samples")
    for task in ("sft", "dpo", "rm"):
        shortest = sorted(map(json.dumps, build_rows(task)), key=len)[:60]
        (directory / f"{task}.jsonl").write_text("\n".join(shortest) + "\n")
    return directory


@pytest.fixture
def arguments(samples):
    """Arguments for a task, small enough for tests."""

    def make(task, output_dir, **settings):
        small = {
            "model_name_or_path": "",
            "train_file": str(samples / f"{'sft' if task == 'lora' else task}.jsonl"),
            "attention": ["flashmask", "dense_mask"],
            "max_steps": 2,
            "max_seq_length": 256,
            "num_eval_documents": 4,
            "save_steps": 2,
            "warmup_steps": 1,
            "output_dir": str(output_dir),
        } | SIZES
        overrides = [f"--override={key}={json.dumps(value)}" for key, value in (small | settings).items()]
        return ["--config", str(ROOT / "configs" / f"{task}_tiny.json"), *overrides]

    return make


def losses(output_dir, *attention):
    with (output_dir / "losses.csv").open(newline="") as file:
        return [[float(row[f"loss_{name}"]) for name in attention] for row in csv.DictReader(file)]


@pytest.mark.parametrize("task", TASKS)
def test_a_few_steps_through_every_attention(finetune, arguments, tmp_path, capsys, task):
    everything = ["flashmask", "dense_mask", "paddle"]
    assert finetune.main(arguments(task, tmp_path, attention=everything, max_steps=3)) == 0
    printed = capsys.readouterr().out
    assert "% full" in printed
    assert printed.count("identical bit for bit") == 3
    rows = losses(tmp_path, *everything)
    assert len(rows) == 3
    assert len({row[0] for row in rows}) > 1, "nothing was learnt"
    for flashmask, dense_mask, paddle in rows:
        assert flashmask == dense_mask == pytest.approx(paddle, rel=1e-5)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["runs"]["flashmask"]["mask_bytes"] == 256 * 4
    assert report["runs"]["dense_mask"]["mask_bytes"] == 256 * 256
    # The same weights through PaddleNLP's own attention: what differs is rounding.
    losses_of_weights = [report["runs"]["flashmask"][key] for key in ("eval_loss", "eval_loss_paddle")]
    assert losses_of_weights[0] == pytest.approx(losses_of_weights[1], rel=1e-5)
    assert (tmp_path / "losses.png").exists()


def test_a_wrong_mask_fails_the_comparison(finetune, arguments, tmp_path, monkeypatch, capsys):
    correct = integration.Switch._dense_mask
    monkeypatch.setattr(
        integration.Switch,
        "_dense_mask",
        lambda self, indices, *rest: correct(self, indices * 0 + 256, *rest),
    )
    assert finetune.main(arguments("sft", tmp_path)) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def interrupt_at(patch, step, attention):
    """Raise KeyboardInterrupt after this step of the run with this attention, before its checkpoint."""
    from training.runs import Recorder

    end_of_step = Recorder.on_step_end

    def interrupt(self, args, state, control, **rest):
        end_of_step(self, args, state, control, **rest)
        if state.global_step == step and Path(args.output_dir).name == attention:
            raise KeyboardInterrupt

    patch.setattr(Recorder, "on_step_end", interrupt)


@pytest.mark.parametrize("task", TASKS)
def test_an_interrupted_run_continues_to_the_same_bits(finetune, arguments, tmp_path, monkeypatch, task):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert finetune.main(arguments(task, whole, max_steps=4)) == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3, "dense_mask")
        with pytest.raises(KeyboardInterrupt):
            finetune.main(arguments(task, resumed, max_steps=4))
    with pytest.raises(SystemExit, match="interrupted run with other settings"):
        finetune.main(arguments(task, resumed, max_steps=4, learning_rate=0.01))
    assert finetune.main(arguments(task, resumed, max_steps=4)) == 0
    names = ("flashmask", "dense_mask")
    assert losses(resumed, *names) == losses(whole, *names)

    # Interrupted between the last step and the evaluation.
    (resumed / "report.json").unlink()
    (resumed / "dense_mask" / "result.json").unlink()
    assert finetune.main(arguments(task, resumed, max_steps=4)) == 0
    assert losses(resumed, *names) == losses(whole, *names)


def test_other_tasks_start_from_a_trained_model(finetune, arguments, tmp_path):
    """The weights that SFT leaves are those that the other tasks begin with; LoRA leaves them as they are."""
    import paddle
    from training.settings import parse, read_settings
    from training.tasks import build_task

    assert finetune.main(arguments("sft", tmp_path / "sft", attention=["flashmask"])) == 0
    folder = str(tmp_path / "sft" / "flashmask" / "model")
    assert finetune.main(arguments("sft", tmp_path / "more", model_name_or_path=folder)) == 0
    weights = paddle.load(f"{folder}/model_state.pdparams")
    for task in ("lora", "dpo", "rm"):
        _, config, *overrides = arguments(task, tmp_path / task, model_name_or_path=folder)
        settings = read_settings(Path(config), [text.removeprefix("--override=") for text in overrides])
        model, options = build_task(parse(settings), 258)
        for one in filter(None, (model, options.get("ref_model"))):
            state = {name.removeprefix("model."): weight for name, weight in one.state_dict().items()}
            for name, weight in weights.items():
                if task != "rm" or name.startswith("llama."):
                    assert (state[name] == weight).all(), (task, name)
        trained = {name for name, weight in model.state_dict().items() if not weight.stop_gradient}
        if task == "lora":
            assert trained == {name for name in model.state_dict() if "lora" in name} != set()
        else:
            assert trained == set(model.state_dict())


def test_a_run_by_epochs_continues_after_the_first(finetune, arguments, tmp_path, monkeypatch, capsys):
    """At an epoch's end, and within one: each epoch has an order of its own."""
    settings = {"attention": ["flashmask"], "max_steps": -1, "num_train_epochs": 2, "save_steps": 1}
    assert finetune.main(arguments("sft", tmp_path / "whole", **settings)) == 0
    sequences = int(re.search(r"training: .* in (\d+) sequences", capsys.readouterr().out)[1])
    curve = losses(tmp_path / "whole", "flashmask")
    assert len(curve) == 2 * sequences
    for step in (sequences, sequences + 2):
        options = arguments("sft", tmp_path / str(step), **settings)
        with monkeypatch.context() as patch:
            interrupt_at(patch, step + 1, "flashmask")
            with pytest.raises(KeyboardInterrupt):
                finetune.main(options)
        assert finetune.main(options) == 0
        assert f"from step {step}" in capsys.readouterr().out
        assert losses(tmp_path / str(step), "flashmask") == curve


def test_dpo_of_adapters_is_dpo_with_the_base_model_as_reference(finetune, arguments, tmp_path):
    """At the first step adapters do nothing yet; then they learn, and the base model stays."""
    options = arguments("dpo", tmp_path, lora=True, max_steps=3, learning_rate=0.01)
    assert finetune.main(options) == 0
    (first, _), *_, (last, _) = losses(tmp_path, "flashmask", "dense_mask")
    assert first == pytest.approx(math.log(2), rel=1e-6)
    assert last != first
    assert (tmp_path / "flashmask" / "model" / "lora_config.json").exists()


def test_run_finetune_names_its_tasks():
    command = ["bash", str(ROOT / "scripts" / "run_finetune.sh"), "ppo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: bash scripts/run_finetune.sh [sft|lora|dpo|rm]")


def test_a_tokenizer_of_paddlenlps(finetune, arguments, samples, tmp_path):
    """Made here from the samples, so that nothing is downloaded; it has no padding token, like Llama's."""
    import sentencepiece
    from paddlenlp.transformers import LlamaTokenizer

    folder = tmp_path / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(
        input=str(samples / "sft.jsonl"),
        model_prefix=str(tmp_path / "pieces"),
        vocab_size=300,
        model_type="bpe",
        character_coverage=1.0,
        minloglevel=2,
    )
    LlamaTokenizer(str(tmp_path / "pieces.model")).save_pretrained(str(folder))
    tokenizer = finetune.load_tokenizer(str(folder))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    options = arguments("sft", tmp_path / "out", tokenizer_name_or_path=str(folder))
    assert finetune.main(options) == 0
    model = json.loads((tmp_path / "out" / "flashmask" / "model" / "config.json").read_text())
    assert model["vocab_size"] == len(tokenizer) == 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--override=max_step=2"], "unknown setting 'max_step'; did you mean max_steps?"),
        (["--override=zzz=2"], "unknown setting 'zzz'"),
        (["--override=max_steps"], "--override: expected KEY=VALUE, got 'max_steps'"),
        (["--override=max_steps=many"], 'setting max_steps: expected int, got "many"'),
        (["--override=max_steps=2.5"], "setting max_steps: expected int, got 2.5"),
        (["--override=hidden_size=[64]"], "setting hidden_size: expected int, got [64]"),
        (["--override=learning_rate=high"], 'setting learning_rate: expected float, got "high"'),
        (["--override=output_dir=3"], "setting output_dir: expected str, got 3"),
        (["--override=task=ppo"], "setting task: expected one of sft, lora, dpo, rm, got 'ppo'"),
        (["--override=attention=paddle"], "setting attention: expected a list, some of flashmask, "),
        (
            ['--override=attention=["flash"]'],
            'setting attention: expected a list, some of flashmask, dense_mask, paddle, got ["flash"]',
        ),
        (
            ["--override=model_name_or_path={tmp}/none"],
            "setting model_name_or_path: no such folder: {tmp}/none",
        ),
        (["--override=model_name_or_path={tmp}"], "setting model_name_or_path: no config.json in {tmp}"),
        (
            ["--override=tokenizer_name_or_path={tmp}"],
            "setting tokenizer_name_or_path: no tokenizer_config.json in {tmp}",
        ),
        (
            ["--override=output_dir={tmp}/text"],
            "setting output_dir: expected a folder, got a file: {tmp}/text",
        ),
        (["--override=hidden_size=0"], "setting hidden_size: expected at least 1, got 0"),
        (["--override=num_eval_documents=-1"], "setting num_eval_documents: expected at least 1, got -1"),
        (
            ["--override=hidden_size=33"],
            "setting hidden_size: expected a multiple of num_attention_heads, 4, got 33",
        ),
        (["--override=train_file={tmp}/none"], "setting train_file: no such file: {tmp}/none"),
        (["--config={tmp}/none.json"], "--config: {tmp}/none.json cannot be read: No such file or directory"),
        (["--config={tmp}"], "--config: {tmp} cannot be read: Is a directory"),
        (
            ["--config={tmp}/text"],
            "--config: {tmp}/text is not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        (["--config={tmp}/list"], "--config: {tmp}/list: expected one JSON object, got list"),
        (["--config={tmp}/little"], "--config: {tmp}/little lacks task, output_dir, hidden_size, "),
    ],
)
def test_bad_settings_are_one_line(finetune, tmp_path, capsys, arguments, message):
    for name, text in (("text", "max_steps: 2"), ("list", "[]"), ("little", '{"max_steps": 2}')):
        (tmp_path / name).write_text(text)
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    with pytest.raises(SystemExit) as exit_info:
        finetune.main([f"--config={ROOT / 'configs' / 'sft_tiny.json'}", *arguments])
    assert exit_info.value.code == 2
    assert f"error: {message.format(tmp=tmp_path)}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("sft", "{", "{file}, line 1: Expecting property name enclosed in double quotes"),
        ("sft", "\n[]", "{file}, line 2: expected a JSON object, got list"),
        ("sft", b"\xff{{}}", "{file}, line 1: 'utf-8' codec can't decode byte 0xff"),
        ("sft", "\n", "training: expected at least one sample, got none"),
        ("sft", "{}", "training row 1: expected a list under 'messages', got {{}}"),
        (
            "sft",
            '{"messages": [{"role": "user", "content": "?"}]}',
            "training row 1: messages: expected a",
        ),
        (
            "sft",
            '{"messages": [{"role": "user"}]}',
            "training row 1: expected a str under 'content', got",
        ),
        ("dpo", '{"prompt": "?"}', "training row 1: expected a list under 'chosen', got"),
        (
            "rm",
            '{"prompt": "?", "answers": ["."]}',
            "training row 1: answers: expected 2 to 6 answers, got 1",
        ),
        (
            "rm",
            '{"prompt": "?", "answers": ["' + "." * 256 + '", "."]}',
            "training: none of 1 samples has 256",
        ),
    ],
)
def test_bad_rows_are_one_line(finetune, arguments, tmp_path, capsys, task, text, message):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SystemExit):
        finetune.main(arguments(task, tmp_path / "out", train_file=str(file), eval_file=str(file)))
    assert f"error: {message.format(file=file)}" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
