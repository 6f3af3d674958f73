"""Samples: rows of JSONL files, or the text that every machine has, and the documents they become.

A row is what the data sets hold that people fine-tune on:

| task | row | as in |
|---|---|---|
| sft, lora | `{"messages": MESSAGES}` | tulu-v2 SFT |
| dpo, rm | `{"chosen": MESSAGES, "rejected": MESSAGES}` | ultrafeedback_binarized |
| rm | `{"prompt": "...", "answers": ["best", ..., "worst"]}`, 2 to 6 answers | |

MESSAGES is `[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]`; chosen and
rejected differ in the last one only. Other keys are ignored.

The text that every machine has is the docstrings of Python's standard library: the question is the name and
signature of a function or class, the answer its docstring.
"""

from __future__ import annotations

import ast
import functools
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import Any

from paddle_flashmask.packing import (
    Document,
    PackedSequences,
    dialogue_document,
    pack,
    preference_document,
    reward_document,
)

Row = dict[str, Any]


class ByteTokenizer:
    """Text as UTF-8 bytes, and two tokens more, with PaddleNLP's interface. Nothing to download."""

    pad_token_id, eos_token_id = 256, 257
    pad_token, eos_token = "<pad>", "</s>"
    padding_side = "right"
    chat_template = None

    def __len__(self) -> int:
        return 258

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        """The token ids of `text`."""
        return {"input_ids": list(text.encode())}

    def save_pretrained(self, directory: str, **_: Any) -> None:
        """Nothing to save: PaddleNLP's trainer asks for this beside every checkpoint."""


@functools.cache
def standard_library() -> list[tuple[str, str]]:
    """(signature, docstring) of the standard library's documented classes and functions, in a fixed order."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return [pair for path in paths for pair in documented(ast.parse(path.read_bytes()), path.stem)]


def documented(parent: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """The documented definitions inside `parent`, outer before inner, as (name and signature, docstring)."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            qualified = f"{name}.{node.name}"
            if docstring := ast.get_docstring(node):
                signature = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
                yield f"{qualified}{signature}", docstring
            yield from documented(node, qualified)


NOISE = (0.1, 0.2, 0.4, 0.7, 1.0)


def build_rows(task: str) -> Iterator[Row]:
    """Rows for a task, made of docstrings.

    Ranked answers, best first, are the docstring with more and more of its letters replaced by random ones
    (`NOISE`): an order that a small model can learn in minutes. For "dpo" there are two, the docstring itself
    first. Samples of which two answers are the same by chance are left out.
    """
    random = Random(0)
    for signature, docstring in standard_library():
        if task in ("sft", "lora"):
            yield {"messages": conversation(signature, docstring)}
            continue
        shares = random.sample(NOISE, 1 if task == "dpo" else random.randint(1, 5))
        answers = [docstring, *(noisy(docstring, share, random) for share in sorted(shares))]
        if len(set(answers)) < len(answers):
            continue
        if task == "rm":
            yield {"prompt": signature, "answers": answers}
        else:
            chosen, rejected = (conversation(signature, answer) for answer in answers)
            yield {"prompt": signature, "chosen": chosen, "rejected": rejected}


def noisy(text: str, share: float, random: Random) -> str:
    """`text` with this share of its characters, on average, replaced by random letters."""
    return "".join(random.choice(ascii_lowercase) if random.random() < share else letter for letter in text)


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    """A conversation of one turn."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file in UTF-8; blank lines are left out.

    Raises:
        ValueError: a line that is not a JSON object.
    """
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected a JSON object, got {type(row).__name__}")
            rows.append(row)
    return rows


def document(task: str, row: Row, tokenizer: Any) -> Document:
    """What is packed for a row.

    Raises:
        ValueError: a row without what the task needs.
    """
    if task in ("sft", "lora"):
        return dialogue_document(_turns(row, "messages", tokenizer))
    if task == "rm" and "answers" in row:
        prompt = _ids(tokenizer, _render("user", _get(row, "prompt", str)) + ASSISTANT)
        answers = [_answer_ids(tokenizer, answer) for answer in _get(row, "answers", list)]
    else:
        prompt, chosen = _last_turn(row, "chosen", tokenizer)
        other, rejected = _last_turn(row, "rejected", tokenizer)
        if prompt != other:
            raise ValueError("chosen and rejected: expected the same messages before the last, got others")
        answers = [chosen, rejected]
    return reward_document(prompt, answers) if task == "rm" else preference_document(prompt, *answers)


Turn = tuple[list[int], list[int]]
ASSISTANT = "<|assistant|>\n"


def _render(role: str, content: str) -> str:
    """A message as the tulu format writes it. (Answers end with the end-of-sequence token.)"""
    return f"<|{role}|>\n{content.strip()}\n"


def _turns(row: Row, key: str, tokenizer: Any) -> list[Turn]:
    """The messages of a row as token ids: (what precedes an answer, answer)."""
    turns, question = [], ""
    for message in _get(row, key, list):
        role, content = _get(message, "role", str), _get(message, "content", str)
        if role == "assistant":
            turns.append((_ids(tokenizer, question + ASSISTANT), _answer_ids(tokenizer, content)))
            question = "\n"
        else:
            question += _render(role, content)
    if not turns:
        raise ValueError(f"{key}: expected a message of the assistant's, got none")
    return turns


def _last_turn(row: Row, key: str, tokenizer: Any) -> Turn:
    """Everything before the last answer, and that answer."""
    *earlier, (question, answer) = _turns(row, key, tokenizer)
    return [token for turn in earlier for part in turn for token in part] + question, answer


def _get(row: Row, key: str, kind: type) -> Any:
    """The value of a key, which must be there and of this type."""
    if not isinstance(row, dict) or not isinstance(row.get(key), kind):
        raise ValueError(f"expected a {kind.__name__} under {key!r}, got {json.dumps(row)[:100]}")
    return row[key]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _answer_ids(tokenizer: Any, text: str) -> list[int]:
    return [*_ids(tokenizer, text.strip()), tokenizer.eos_token_id]


def pack_rows(name: str, task: str, rows: list[Row], tokenizer: Any, max_length: int) -> PackedSequences:
    """The rows' documents, packed; says how full the sequences are.

    Raises:
        ValueError: a row that cannot be used, by its number, no row, or none that fits.
    """
    if not rows:
        raise ValueError(f"{name}: expected at least one sample, got none")
    documents = []
    for number, row in enumerate(rows, 1):
        try:
            documents.append(document(task, row, tokenizer))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} row {number}: {error}") from None
    packed = pack(documents, max_length, pad_token_id=tokenizer.pad_token_id)
    if not len(packed):
        raise ValueError(f"{name}: none of {len(rows)} samples has {max_length} tokens or fewer")
    print(
        f"{name}: {len(documents) - len(packed.skipped)} documents, {packed.num_tokens:,} tokens in "
        f"{len(packed)} sequences of {max_length}, {packed.fill_rate:.1%} full "
        f"({len(packed.skipped)} too long, skipped)"
    )
    return packed
