"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
ATTENTION, PACKING, PADDLEFORMERS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def paddlenlp():
    pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")
    from paddle_flashmask.integrations import paddlenlp as integration

    yield integration
    integration.disable()


@pytest.mark.usefixtures("paddlenlp")
def test_attention_example(capsys):
    names = {}
    exec(ATTENTION, names)
    assert names["out"].shape == [1, 8192, 8, 64]
    assert names["lse"].shape == [1, 8, 8192]
    assert "elements a cell" in capsys.readouterr().out


def test_packing_example(paddlenlp):
    from paddle_flashmask.packing import preference_document

    class Trainer:
        calls = 0

        def train(self):
            self.calls += 1

    names = {"token_ids": [([5, 6, 7], [8, 9])], "trainer": Trainer()}
    exec(PACKING, names)
    assert names["trainer"].calls == 1
    assert names["samples"][0]["input_ids"].shape == (8192,)
    # The sentence after it.
    packed = names["pack"]([preference_document([5, 6, 7], [8, 9], [4])], 8192)
    assert "chosen_labels" in paddlenlp.preference_features(packed)[0]


def test_paddleformers_example():
    pytest.importorskip("paddleformers", reason="needs PaddleFormers: bash scripts/setup_env.sh formers")
    import paddle_flashmask as fm

    try:
        exec(PADDLEFORMERS, {"fm": fm})
        assert fm.integrations.paddleformers._registrations
    finally:
        fm.integrations.paddleformers.unregister()
