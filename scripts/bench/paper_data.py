"""The paper's random masks for its experiments beside the kernel tables (its appendix). NumPy only.

Latency against sparsity: documents, and questions with answers, at 32K tokens until every bucket of block
sparsity has its samples. End to end: one question with 1 (SFT, LoRA), 2 (DPO) or 6 (RM) answers per document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from paddle_flashmask import masks
from paddle_flashmask.masks import registry

Document = tuple[int, tuple[int, ...]]  # tokens of a question and of its answers

BUCKET = 0.05
IDLE_DRAWS = 2000  # so many in a row that fill nothing, and buckets that are still short stay short
TILE = 128  # rows and columns of the tiles that sparsity counts


@dataclass(frozen=True)
class Sample:
    """One mask by what it is made of."""

    kind: str  # causal_document, share_question, document
    documents: tuple[Document, ...]

    @property
    def mask(self) -> masks.ColumnMask:
        """The mask."""
        if self.kind == "share_question":
            return masks.share_question(self.documents)
        lengths = [question + sum(answers) for question, answers in self.documents]
        return masks.document(lengths) if self.kind == "document" else masks.causal_document(lengths)

    @cached_property
    def rho(self) -> float:
        """The mask's ``block_sparsity(128)``; that takes a hundred times as long at 32 K tokens.

        Only tiles below the diagonal need a thought in causal masks, and there all of a row's tile comes
        after all of a column's: they see each other where both touch the same document.
        """
        tiles = -(-sum(question + sum(answers) for question, answers in self.documents) // TILE)
        visible = np.zeros((tiles, tiles), bool)
        start = 0
        for question, answers in self.documents:
            parts = [question, *answers] if self.kind == "share_question" else [question + sum(answers)]
            end = start + sum(parts)
            for number, length in enumerate(parts):
                # All of the document sees its question; an answer is seen by itself alone.
                columns = slice(start // TILE, -(-(start + length) // TILE))
                last_row = end if number == 0 else start + length
                visible[start // TILE : -(-last_row // TILE), columns] = True
                start += length
        if self.kind != "document":
            visible = np.tril(visible)
        return 1 - float(visible.mean())

    @property
    def hidden(self) -> float:
        """About the share of hidden elements: a little more than rho."""
        visible, seqlen = 0.0, 0
        for question, answers in self.documents:
            length = question + sum(answers)
            seqlen += length
            if self.kind == "share_question":
                visible += question**2 / 2 + sum(answer * question + answer**2 / 2 for answer in answers)
            else:
                visible += length**2 / (1 if self.kind == "document" else 2)
        return 1 - visible / seqlen**2


# The kernel benchmark's masks whose sparsity in the paper's tables the registry's data does not give.
PUBLISHED_SUFFIX = "_published"
PUBLISHED = tuple(
    f"{name}{PUBLISHED_SUFFIX}" for name in ("share_question", "prefix_lm_document", "prefix_lm_causal")
)


@lru_cache(maxsize=8)
def published_data(seqlen: int, seed: int) -> registry.TokenData:
    """Return the registry's documents with other splits, so that sparsities are those of the paper's tables.

    A question and its 2 to 6 answers are cut at random places; a prefix takes 10 to 30 % of its document.
    """
    data = registry.token_data(seqlen, seed)
    rng = np.random.default_rng(seed + 2)
    documents, prefixes = [], []
    for length in data.lengths.tolist():
        question, *answers = cut(rng, length, min(int(rng.integers(3, 8)), length))
        documents.append((question, tuple(answers)))
        prefixes.append(int(length * rng.uniform(0.1, 0.3)))
    return replace(data, documents=tuple(documents), prefixes=np.array(prefixes, np.int64))


def published_prefix(seqlen: int) -> int:
    """Return the prefix of the paper's causal mask with a prefix, in tokens."""
    return seqlen // 2


def published_mask(name: str, seqlen: int, seed: int) -> masks.ColumnMask:
    """Return a mask of PUBLISHED."""
    data = published_data(seqlen, seed)
    if name.startswith("share_question"):
        return masks.share_question(data.documents)
    if name.startswith("prefix_lm_document"):
        return masks.prefix_lm_document(data.lengths, data.prefixes)
    return masks.prefix_lm_causal(seqlen, published_prefix(seqlen))


@dataclass(frozen=True)
class SparsitySetting:
    """How the masks of one kind are drawn: numbers of documents, samples wanted, buckets from lowest to 1."""

    documents: tuple[int, int]
    samples: int
    lowest: float

    @property
    def buckets(self) -> int:
        """How many buckets there are."""
        return round((1 - self.lowest) / BUCKET)

    def bucket_of(self, rho: float) -> int:
        """Return a sparsity's bucket."""
        return min(max(int((rho - self.lowest) / BUCKET), 0), self.buckets - 1)


SPARSITY_SETTINGS = {
    "causal_document": SparsitySetting((2, 20), 182, 0.5),
    "share_question": SparsitySetting((1, 5), 175, 0.5),
    "document": SparsitySetting((2, 10), 374, 0.0),
}


def sparsity_samples(kind: str, seqlen: int = 32768, per_bucket: int | None = None) -> list[Sample]:
    """Draw masks until every bucket is full; those that cannot be filled stay short (the paper's ten
    documents, for one, cannot hide more than 0.9 of a document mask).

    Args:
        kind: of SPARSITY_SETTINGS.
        seqlen: tokens.
        per_bucket: samples; None: as many as add up to the paper's.
    """
    setting = SPARSITY_SETTINGS[kind]
    rng = np.random.default_rng(0)
    share, rest = divmod(setting.samples, setting.buckets)
    room = [per_bucket or share + (bucket < rest) for bucket in range(setting.buckets)]
    found: list[Sample] = []
    idle = 0
    while any(room) and idle < IDLE_DRAWS:
        idle += 1
        lengths = cut(rng, seqlen, int(rng.integers(setting.documents[0], setting.documents[1] + 1)))
        if kind == "share_question":
            parts = [cut(rng, length, min(int(rng.integers(3, 8)), length)) for length in lengths]
            documents = tuple((part[0], tuple(part[1:])) for part in parts)
        else:
            documents = tuple((length, ()) for length in lengths)
        sample = Sample(kind, documents)
        bucket = setting.bucket_of(sample.rho)
        if room[bucket]:
            idle = 0
            room[bucket] -= 1
            found.append(sample)
    return found


def cut(rng: np.random.Generator, total: int, parts: int, minimum: int = 1) -> list[int]:
    """Cut a length into so many random parts, none shorter than the minimum, uniformly."""
    spare = total - parts * minimum
    cuts = np.sort(rng.integers(0, spare + 1, parts - 1))
    return [minimum + int(size) for size in np.diff(np.concatenate([[0], cuts, [spare]]))]


@dataclass(frozen=True)
class Task:
    """One way to train: the mask's kind, answers per document, least document and most padding in tokens."""

    kind: str
    answers: int
    minimum: int
    padding: int


TASKS = {
    "sft": Task("causal_document", 1, 128, 128),
    "lora": Task("causal_document", 1, 128, 128),
    "dpo": Task("share_question", 2, 128, 128),
    "rm": Task("share_question", 6, 512, 512),
}
TRAINING_SAMPLES, TRAINING_BINS = 240, 10


def training_samples(name: str, seqlen: int, count: int = TRAINING_SAMPLES) -> list[Sample]:
    """Draw the paper's synthetic training data for one task and length; the last document is padding.

    From the 1 to 10 documents (RM: up to 3 to 4 K tokens, 4 to 8 K), each with one question and the task's
    answers, 10 to 20 % of the question each.
    """
    task = TASKS[name]
    rng = np.random.default_rng([seqlen, task.answers])
    most = (3 if seqlen <= 4096 else 4) if name == "rm" and seqlen <= 8192 else 10
    samples = []
    for _ in range(count):
        padding = int(rng.integers(0, min(task.padding, seqlen // 4) + 1))
        fitting = max(1, (seqlen - padding) // task.minimum)
        number = int(rng.integers(1, min(most, fitting) + 1))
        lengths = cut(rng, seqlen - padding, number, min(task.minimum, (seqlen - padding) // number))
        documents = [_split(rng, length, task.answers) for length in lengths]
        if padding:
            documents.append((padding, ()))
        samples.append(Sample(task.kind, tuple(documents)))
    return samples


def _split(rng: np.random.Generator, length: int, answers: int) -> Document:
    low, high = (share * length / (1 + share * answers) for share in (0.1, 0.2))
    sizes = tuple(max(1, int(rng.uniform(low, high))) for _ in range(answers))
    return length - sum(sizes), sizes


def binned(samples: list[Sample], bins: int = TRAINING_BINS) -> list[tuple[Sample, int]]:
    """Put samples into bins of equal width of sparsity; each bin's middle one, and how many it stands for."""
    ordered = sorted(samples, key=lambda sample: sample.hidden)
    low, high = ordered[0].hidden, ordered[-1].hidden
    width = (high - low) / bins or 1.0
    found: dict[int, list[Sample]] = {}
    for sample in ordered:
        found.setdefault(min(int((sample.hidden - low) / width), bins - 1), []).append(sample)
    return [(members[len(members) // 2], len(members)) for members in found.values()]


def token_arrays(sample: Sample) -> dict[str, np.ndarray]:
    """Per token: the number of its document, and of its answer (0 in the question), int32 ``[S]``."""
    documents = [(question, *answers) for question, answers in sample.documents]
    parts = [size for sizes in documents for size in sizes]
    numbers = np.concatenate([np.arange(len(sizes), dtype=np.int32) for sizes in documents])
    lengths = [sum(sizes) for sizes in documents]
    return {
        "document": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        "answer": np.repeat(numbers, parts),
    }


def make_rule(kind: str, tokens: Mapping[str, Any]) -> Callable[..., Any]:
    """Return when row i sees column j, as FlexAttention takes it; of what token_arrays returned."""
    document, answer = tokens["document"], tokens["answer"]
    if kind == "document":
        return lambda i, j: document[i] == document[j]
    if kind == "causal_document":
        return lambda i, j: (document[i] == document[j]) & (j <= i)
    return lambda i, j: (
        (document[i] == document[j]) & (j <= i) & ((answer[j] == 0) | (answer[i] == answer[j]))
    )
