"""The README's examples run as they stand."""

import re
from pathlib import Path

import pytest

pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")

from paddle_flashmask.integrations import paddlenlp as integration

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture(autouse=True)
def _switched_off_afterwards():
    yield
    integration.disable()


def test_attention_example(capsys):
    names = {}
    exec(EXAMPLES[0], names)
    assert names["out"].shape == [1, 8192, 8, 64]
    assert names["lse"].shape == [1, 8, 8192]
    assert "elements a cell" in capsys.readouterr().out


def test_packing_example():
    class Trainer:
        calls = 0

        def train(self):
            self.calls += 1

    names = {"token_ids": [([5, 6, 7], [8, 9])], "trainer": Trainer()}
    exec(EXAMPLES[1], names)
    assert names["trainer"].calls == 1
    assert names["samples"][0]["input_ids"].shape == (8192,)
