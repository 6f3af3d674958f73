"""The examples of docs/training.md run as they stand."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_flashmask.packing import sft_document

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
PADDLENLP, PADDLEFORMERS, LOOK, COMPARE = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
)


def test_paddlenlp_in_five_lines_and_a_look_at_the_mask(tmp_path, capsys):
    pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")
    pytest.importorskip("matplotlib")
    from paddlenlp.transformers import LlamaConfig, LlamaForCausalLM
    from paddlenlp.trl import SFTConfig, SFTTrainer

    rng = np.random.default_rng(0)
    token_ids = [(rng.integers(1, 9, 300), rng.integers(1, 9, n)) for n in (700, 1500, 4000)]
    sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=1, max_position_embeddings=8192, **sizes))
    args = SFTConfig(
        output_dir=str(tmp_path),
        device="cpu",
        max_steps=1,
        per_device_train_batch_size=1,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
    )
    tokenizer = SimpleNamespace(padding_side="right", model_max_length=8192)
    names = {
        "model": model,
        "trainer": SFTTrainer(model=model, args=args, tokenizer=tokenizer),
        "token_ids": token_ids,
        "documents": [sft_document(*pair) for pair in token_ids],
    }
    exec(PADDLENLP, names)
    assert names["switch"].calls == 1
    assert names["trainer"].state.global_step == 1
    names["samples"] = names["trainer"].train_dataset
    assert len(names["samples"]) == 1
    exec(LOOK, names)
    drawn = capsys.readouterr().out
    assert "<ColumnMask [1, 1, 8192, 8192], causal, C=1" in drawn
    assert "elements a cell" in drawn
    exec(COMPARE, names)


def test_paddleformers_script(monkeypatch):
    pytest.importorskip("paddleformers", reason="needs PaddleFormers: bash scripts/setup_env.sh formers")
    from paddleformers.cli.train import tuner
    from paddleformers.nn.attention.interface import AttentionInterface

    own = AttentionInterface._global_mapping["flashmask"]
    while_training = []
    monkeypatch.setattr(
        tuner, "run_tuner", lambda: while_training.append(AttentionInterface._global_mapping["flashmask"])
    )
    names = {}
    exec(PADDLEFORMERS, names)
    assert len(while_training) == 1
    assert while_training[0] is not own
    assert names["registration"].calls == 0
