"""What rows become: JSONL files in the shape of known data sets, and the text that every machine has."""

import json

import pytest

pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")

import build_samples
from training.samples import ByteTokenizer, build_rows, document, read_rows, standard_library

TOKENIZER = ByteTokenizer()


def text(ids):
    """Token ids as text, with </s> for the end of a sequence."""
    return "".join("</s>" if token == TOKENIZER.eos_token_id else chr(token) for token in ids)


def learnt(document):
    """What follows the positions that carry a loss."""
    return [text(document.labels[start:stop]) for start, stop in document.answers]


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def test_a_tulu_row_is_a_dialogue():
    system = {"role": "system", "content": "Be brief."}
    row = {"id": "1", "messages": [system, user("a?"), assistant("b"), user(" c? "), assistant("d\n")]}
    made = document("sft", row, TOKENIZER)
    assert text(made.input_ids) == (
        "<|system|>\nBe brief.\n<|user|>\na?\n<|assistant|>\nb</s>\n<|user|>\nc?\n<|assistant|>\nd"
    )
    assert learnt(made) == ["b</s>", "d</s>"]


def test_an_ultrafeedback_row_is_a_preference():
    start = [user("a?"), assistant("b"), user("c?")]
    row = {"prompt": "c?", "chosen": [*start, assistant("yes")], "rejected": [*start, assistant("no")]}
    made = document("dpo", row, TOKENIZER)
    question = "<|user|>\na?\n<|assistant|>\nb</s>\n<|user|>\nc?\n<|assistant|>"
    assert text(made.input_ids) == question + "\nyes" + "\nno"
    assert learnt(made) == ["yes</s>", "no</s>"]
    ranked = document("rm", row, TOKENIZER)
    assert text(ranked.input_ids) == question + "\n" + "yes</s>" + "no</s>"


def test_a_ranking_row_has_all_its_answers():
    made = document("rm", {"prompt": "a?", "answers": ["x", "y", "z"]}, TOKENIZER)
    assert text(made.input_ids) == "<|user|>\na?\n<|assistant|>\nx</s>y</s>z</s>"
    assert [text(made.input_ids[a:b]) for a, b in made.answers] == ["x</s>", "y</s>", "z</s>"]


def test_different_questions_are_refused():
    row = {"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("d")]}
    with pytest.raises(ValueError, match="chosen and rejected: expected the same messages before the last"):
        document("dpo", row, TOKENIZER)


def test_questions_carry_signatures_and_order_is_fixed():
    pairs = standard_library()
    assert pairs == standard_library.__wrapped__(), "the order changes"
    question, answer = next(pair for pair in pairs if pair[0].startswith("bisect.insort_left("))
    assert question == "bisect.insort_left(a, x, lo=0, hi=None, *, key=None)"
    assert answer.startswith("Insert item x in list a")


def test_files_hold_the_rows_that_are_built(tmp_path):
    build_samples.main([str(tmp_path)])
    for task in ("sft", "dpo", "rm"):
        rows = read_rows(tmp_path / f"{task}.jsonl")
        assert rows == list(build_rows(task))
        assert len(rows) > 1000
    assert all(2 <= len(row["answers"]) <= 6 for row in rows)
    assert {len(row["answers"]) for row in rows} == {2, 3, 4, 5, 6}
    assert all(len(set(row["answers"])) == len(row["answers"]) for row in rows)
    assert all(row["chosen"] != row["rejected"] for row in read_rows(tmp_path / "dpo.jsonl"))
    assert json.loads((tmp_path / "sft.jsonl").read_text().splitlines()[0])["messages"][0]["role"] == "user"
