"""scripts/finetune.py end to end, on two steps of its own configuration made smaller."""

import csv
import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")

from paddle_flashmask.integrations import paddlenlp as integration

# PaddleNLP calls what Paddle 3.3 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::paddle.utils.deprecated.VisibleDeprecationWarning")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finetune():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("finetune")
    sys.path.pop(0)


def arguments(output_dir, **settings):
    small = {
        "max_steps": 2,
        "max_seq_length": 256,
        "num_eval_documents": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "save_steps": 2,
        "output_dir": str(output_dir),
    }
    overrides = [f"--override={key}={json.dumps(value)}" for key, value in (small | settings).items()]
    return ["--config", str(ROOT / "configs" / "sft_tiny.json"), *overrides]


def losses(output_dir):
    with (output_dir / "losses.csv").open(newline="") as file:
        return [(row["loss_skip"], row["loss_dense"]) for row in csv.DictReader(file)]


def test_two_steps(finetune, tmp_path, capsys):
    assert finetune.main(arguments(tmp_path)) == 0
    printed = capsys.readouterr().out
    assert "% full" in printed
    assert printed.count("identical bit for bit") == 3
    rows = losses(tmp_path)
    assert len(rows) == 2
    assert all(skip == dense for skip, dense in rows)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["runs"]["skip"]["mask_bytes"] == 256 * 4
    assert report["runs"]["dense"]["mask_bytes"] == 256 * 256


def test_a_wrong_mask_fails_the_comparison(finetune, tmp_path, monkeypatch, capsys):
    correct = integration.Switch._dense_mask
    monkeypatch.setattr(
        integration.Switch,
        "_dense_mask",
        lambda self, indices, *rest: correct(self, indices * 0 + 256, *rest),
    )
    assert finetune.main(arguments(tmp_path)) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_an_interrupted_run_continues_to_the_same_bits(finetune, tmp_path, monkeypatch):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert finetune.main(arguments(whole, max_steps=4)) == 0

    end_of_step = finetune.Recorder.on_step_end

    def interrupt(self, args, state, control, **rest):
        end_of_step(self, args, state, control, **rest)
        if state.global_step == 3 and "dense" in args.output_dir:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finetune.Recorder, "on_step_end", interrupt)
        with pytest.raises(KeyboardInterrupt):
            finetune.main(arguments(resumed, max_steps=4))
    with pytest.raises(SystemExit, match="interrupted run with other settings"):
        finetune.main(arguments(resumed, max_steps=4, seed=1))
    assert finetune.main(arguments(resumed, max_steps=4)) == 0
    assert losses(resumed) == losses(whole)

    # Interrupted between the last step and the evaluation.
    (resumed / "report.json").unlink()
    (resumed / "dense" / "result.json").unlink()
    assert finetune.main(arguments(resumed, max_steps=4)) == 0
    assert losses(resumed) == losses(whole)


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
        (["--config={tmp}/none.json"], "--config: {tmp}/none.json cannot be read: No such file or directory"),
        (["--config={tmp}"], "--config: {tmp} cannot be read: Is a directory"),
        (
            ["--config={tmp}/text"],
            "--config: {tmp}/text is not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        (["--config={tmp}/list"], "--config: {tmp}/list: expected one JSON object, got list"),
        (["--config={tmp}/little"], "--config: {tmp}/little lacks hidden_size, intermediate_size, "),
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


def test_questions_carry_signatures_and_order_is_fixed(finetune):
    samples = list(finetune.standard_library_samples())
    assert samples == list(finetune.standard_library_samples()), "the order changes"
    question, answer = next(s for s in samples if s[0].startswith("bisect.insort_left("))
    assert question == "bisect.insort_left(a, x, lo=0, hi=None, *, key=None)\n"
    assert answer.startswith("Insert item x in list a")
