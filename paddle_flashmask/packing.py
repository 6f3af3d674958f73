"""Packing: many short documents become few sequences of one length, and a mask keeps them apart.

A pipeline in two steps, NumPy only:

1. one function per task turns a tokenised sample into a `Document` (`sft_document` for question and answer);
2. `pack` fills sequences of `max_length` tokens with whole documents, greedily, and says how full they are.

No token attends outside its own document, so a packed sequence gives the losses and gradients that its
documents give one by one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paddle_flashmask.masks._checks import as_int, as_integer_array, as_sequence, describe

IGNORE_INDEX = -100
"""The label of a position without a loss: what Paddle's and PaddleNLP's cross entropies ignore."""


@dataclass(frozen=True)
class Document:
    """One training sample of n tokens, everything relative to its own first token.

    Attributes:
        input_ids: int64 [n].
        labels: int64 [n], the token that follows each position, `IGNORE_INDEX` where there is no loss.
        position_ids: int64 [n].
        row_end: int32 [n]; the first row below the diagonal that does not see this column (the paper's LTS).
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    row_end: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class PackedSequences:
    """N sequences of S tokens each, padded at the end.

    Attributes:
        input_ids: int64 [N, S]; padding holds `pad_token_id`.
        labels: int64 [N, S], already shifted: a position's label is the token after it. Ignored in padding.
        position_ids: int64 [N, S], restarting in every document; padding is 0.
        startend_row_indices: int32 [N, 1, S, 1] for causal attention. Padding columns are masked from row 0,
            so nothing sees padding, and padding sees nothing.
        documents: for each sequence, which of the given documents it holds, in order.
        skipped: the documents longer than S, which are left out.
        num_tokens: tokens of all packed documents, that is N * S without the padding.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    startend_row_indices: NDArray[np.int32]
    documents: tuple[tuple[int, ...], ...]
    skipped: tuple[int, ...]
    num_tokens: int

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def fill_rate(self) -> float:
        """Share of the N * S positions that hold a document's token, in [0, 1]."""
        return self.num_tokens / self.input_ids.size if self.input_ids.size else 0.0


def sft_document(question: Sequence[int], answer: Sequence[int]) -> Document:
    """A document for supervised fine-tuning: it attends causally, and only the answer's tokens carry a loss.

    Inputs are all tokens but the last, which has nothing left to predict; that is PaddleNLP's convention too.

    Args:
        question: token ids, at least one (the first answer token is predicted from the question's last).
        answer: token ids, at least one, with the end-of-sequence token if the model is to learn it.

    Raises:
        TypeError: a question or answer that is not a sequence of integers.
        ValueError: an empty one.
    """
    parts = []
    for name, part in (("question", question), ("answer", answer)):
        parts.append(as_integer_array(name, as_sequence(name, part, "token ids"), (1,)).astype(np.int64))
        if len(parts[-1]) == 0:
            raise ValueError(f"{name}: expected at least one token, got none")
    tokens = np.concatenate(parts)
    labels = tokens[1:].copy()
    labels[: len(parts[0]) - 1] = IGNORE_INDEX
    n = len(labels)
    return Document(tokens[:-1], labels, np.arange(n, dtype=np.int64), np.full(n, n, dtype=np.int32))


def greedy_packs(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Put items into bins of `max_length`: each, in the order given, into the fullest bin with room for it.

    Args:
        lengths: of the items, each in [1, max_length].
        max_length: capacity of a bin.

    Returns:
        For each bin the indices of its items. O(n log n) comparisons; deterministic.

    Raises:
        TypeError: a length or ``max_length`` that is not an integer.
        ValueError: a length outside [1, max_length].
    """
    lengths = as_integer_array("lengths", as_sequence("lengths", lengths, "integers"), (1,)).tolist()
    max_length = as_int("max_length", max_length, minimum=1)
    packs: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free space, bin), sorted
    for item, length in enumerate(lengths):
        if not 1 <= length <= max_length:
            raise ValueError(f"lengths[{item}]: expected a length in [1, {max_length}], got {length}")
        fit = bisect_left(spaces, (length, 0))
        if fit < len(spaces):
            space, pack = spaces.pop(fit)
            packs[pack].append(item)
        else:
            space, pack = max_length, len(packs)
            packs.append([item])
        insort(spaces, (space - length, pack))
    return packs


def pack(documents: Sequence[Document], max_length: int, *, pad_token_id: int = 0) -> PackedSequences:
    """Pack whole documents into sequences of `max_length` tokens (`greedy_packs`).

    Documents longer than `max_length` are skipped and listed in the result; none is ever cut.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: `max_length` is not positive, or a document is empty.
    """
    for i, document in enumerate(as_sequence("documents", documents, "Documents")):
        if not isinstance(document, Document):
            raise TypeError(f"documents[{i}]: expected a Document, got {describe(document)}")
        if len(document) == 0:
            raise ValueError(f"documents[{i}]: expected at least one token, got none")
    max_length = as_int("max_length", max_length, minimum=1)
    pad_token_id = as_int("pad_token_id", pad_token_id, minimum=-(2**31))
    fitting = [i for i, document in enumerate(documents) if len(document) <= max_length]
    packs = greedy_packs([len(documents[i]) for i in fitting], max_length)
    members = tuple(tuple(fitting[item] for item in bin_) for bin_ in packs)

    shape = (len(members), max_length)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    row_end = np.zeros(shape, dtype=np.int32)
    for row, indices in enumerate(members):
        start = 0
        for document in (documents[i] for i in indices):
            here = slice(start, start + len(document))
            input_ids[row, here] = document.input_ids
            labels[row, here] = document.labels
            position_ids[row, here] = document.position_ids
            row_end[row, here] = document.row_end + start
            start += len(document)
    return PackedSequences(
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        startend_row_indices=row_end[:, None, :, None],
        documents=members,
        skipped=tuple(i for i, document in enumerate(documents) if len(document) > max_length),
        num_tokens=sum(len(documents[i]) for i in fitting),
    )
