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


def test_unknown_settings_are_refused(finetune, tmp_path):
    with pytest.raises(ValueError, match="unknown settings: max_step"):
        finetune.main(arguments(tmp_path, max_step=3))


def test_questions_carry_signatures_and_order_is_fixed(finetune):
    samples = list(finetune.standard_library_samples())
    assert samples == list(finetune.standard_library_samples()), "the order changes"
    question, answer = next(s for s in samples if s[0].startswith("bisect.insort_left("))
    assert question == "bisect.insort_left(a, x, lo=0, hi=None, *, key=None)\n"
    assert answer.startswith("Insert item x in list a")
