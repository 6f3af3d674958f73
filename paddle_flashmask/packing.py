"""Packing: many short documents become few sequences of one length, and a mask keeps them apart.

A pipeline in two steps, NumPy only:

1. one function per task turns a tokenised sample into a `Document`:

   | task | function | what it holds |
   |---|---|---|
   | supervised fine-tuning | `sft_document` | question, answer |
   | the same, several turns | `dialogue_document` | question, answer, question, answer, ... |
   | direct preference optimisation (DPO) | `preference_document` | question, chosen answer, rejected answer |
   | reward modelling (RM) | `reward_document` | question, 2 to 6 answers |

2. `pack` fills sequences of `max_length` tokens with whole documents, greedily, and says how full they are.

No token attends outside its own document, so a packed sequence gives the losses and gradients that its
documents give one by one. Where several answers share a question (the paper's shared-question mask), none
sees another, and each one's positions continue those of the question. The model computes what it would if
every answer came after a question of its own, and the question only once.

For SFT and DPO, token ids, labels, positions and row ends are PaddleNLP's, element by element.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paddle_flashmask.masks._checks import as_int, as_integer_array, as_pair, as_sequence, describe

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
        answers: int64 [A, 2], the positions [start, stop) of each answer: those that hold its tokens in
            `reward_document`, otherwise those that predict them.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    row_end: NDArray[np.int32]
    answers: NDArray[np.int64]

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
        answers: for each sequence and each of its documents, int64 [A, 2]: `Document.answers`, as positions
            in the sequence.
        skipped: the documents longer than S, which are left out.
        num_tokens: tokens of all packed documents, that is N * S without the padding.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    startend_row_indices: NDArray[np.int32]
    documents: tuple[tuple[int, ...], ...]
    answers: tuple[tuple[NDArray[np.int64], ...], ...]
    skipped: tuple[int, ...]
    num_tokens: int

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def fill_rate(self) -> float:
        """Share of the N * S positions that hold a document's token, in [0, 1]."""
        return self.num_tokens / self.input_ids.size if self.input_ids.size else 0.0

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """Boolean [N, S]: which positions have a loss, that is a label."""
        return self.labels != IGNORE_INDEX


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
    return _dialogue([_token_ids("question", question), _token_ids("answer", answer)])


def dialogue_document(turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Document:
    """A document of several turns for supervised fine-tuning: `sft_document`, with a loss on every answer.

    Args:
        turns: (question, answer) pairs of token ids, at least one pair, as in `sft_document`. An answer sees
            every earlier turn.

    Raises:
        TypeError: turns that are not a sequence of pairs, or what `sft_document` raises.
        ValueError: no turn, one that is not a pair, or what `sft_document` raises.
    """
    parts = []
    for i, turn in enumerate(as_sequence("turns", turns, "(question, answer) pairs")):
        question, answer = as_pair(f"turns[{i}]", turn, "(question, answer)")
        parts.append(_token_ids(f"turns[{i}] question", question))
        parts.append(_token_ids(f"turns[{i}] answer", answer))
    if not parts:
        raise ValueError("turns: expected at least one (question, answer) pair, got none")
    return _dialogue(parts)


def preference_document(question: Sequence[int], chosen: Sequence[int], rejected: Sequence[int]) -> Document:
    """A document for DPO: one question, and the chosen and the rejected answer, which do not see each other.

    Each answer starts with the question's last token, so that each predicts its own first token, and lacks
    its own last token, which has nothing left to predict:

        question 1 2 3, chosen 4 5, rejected 6 7

        input_ids      1   2 | 3  4 | 3  6        1   █·····
        labels         -   - | 4  5 | 6  7        2   ██····
        position_ids   0   1 | 2  3 | 2  3        3   ███···
        row_end        6   6 | 4  4 | 6  6        4   ████··
        answers              [2, 4)  [4, 6)       3   ██··█·
                                                  6   ██··██

    Args:
        question: token ids, at least one.
        chosen: token ids of the better answer, at least one, with the end-of-sequence token if the model is
            to learn it.
        rejected: the same of the worse answer.

    Raises:
        TypeError: a question or answer that is not a sequence of integers.
        ValueError: an empty one.
    """
    prompt = _token_ids("question", question)
    branches = [_token_ids("chosen", chosen), _token_ids("rejected", rejected)]
    shared = prompt[:-1]
    document = _shared_question(shared, [np.append(prompt[-1:], branch[:-1]) for branch in branches])
    document.labels[len(shared) :] = np.concatenate(branches)
    return document


def reward_document(question: Sequence[int], answers: Sequence[Sequence[int]]) -> Document:
    """A document for reward modelling: one question and 2 to 6 answers, none of which sees another.

    Every token is an input and none a label: an answer's reward is read at its last position.

    Args:
        question: token ids, at least one.
        answers: token ids of each answer, at least one token each; better answers first, for losses by rank.

    Raises:
        TypeError: a question or answer that is not a sequence of integers.
        ValueError: an empty one, or fewer than 2 or more than 6 answers.
    """
    prompt = _token_ids("question", question)
    branches = [
        _token_ids(f"answers[{i}]", answer)
        for i, answer in enumerate(as_sequence("answers", answers, "answers"))
    ]
    if not 2 <= len(branches) <= 6:
        raise ValueError(f"answers: expected 2 to 6 answers, got {len(branches)}")
    return _shared_question(prompt, branches)


def _token_ids(name: str, value: Sequence[int]) -> NDArray[np.int64]:
    """``value`` as int64 [n], n >= 1."""
    tokens = as_integer_array(name, as_sequence(name, value, "token ids"), (1,)).astype(np.int64)
    if len(tokens) == 0:
        raise ValueError(f"{name}: expected at least one token, got none")
    return tokens


def _dialogue(parts: list[NDArray[np.int64]]) -> Document:
    """Questions and answers in turn, one causal document; position i predicts token i + 1."""
    tokens = np.concatenate(parts)
    n = len(tokens) - 1
    answers = np.cumsum([len(part) for part in parts]).reshape(-1, 2) - 1  # of each turn: last positions
    labels = np.full(n, IGNORE_INDEX, dtype=np.int64)
    for start, stop in answers:
        labels[start:stop] = tokens[start + 1 : stop + 1]
    positions = np.arange(n, dtype=np.int64)
    return Document(tokens[:-1], labels, positions, np.full(n, n, dtype=np.int32), answers)


def _shared_question(question: NDArray[np.int64], branches: list[NDArray[np.int64]]) -> Document:
    """A question and the branches that continue it, each of which sees the question and itself; no labels."""
    stops = len(question) + np.cumsum([len(branch) for branch in branches])
    starts = stops - [len(branch) for branch in branches]
    n = int(stops[-1])
    row_end = np.full(n, n, dtype=np.int32)
    positions = np.arange(n, dtype=np.int64)
    for start, stop in zip(starts, stops, strict=True):
        row_end[start:stop] = stop
        positions[start:stop] -= start - len(question)
    labels = np.full(n, IGNORE_INDEX, dtype=np.int64)
    tokens = np.concatenate([question, *branches])
    return Document(tokens, labels, positions, row_end, np.stack([starts, stops], axis=1))


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
    answers: list[tuple[NDArray[np.int64], ...]] = []
    for row, indices in enumerate(members):
        start = 0
        shifted = []
        for document in (documents[i] for i in indices):
            here = slice(start, start + len(document))
            input_ids[row, here] = document.input_ids
            labels[row, here] = document.labels
            position_ids[row, here] = document.position_ids
            row_end[row, here] = document.row_end + start
            shifted.append(document.answers + start)
            start += len(document)
        answers.append(tuple(shifted))
    return PackedSequences(
        input_ids=input_ids,
        labels=labels,
        position_ids=position_ids,
        startend_row_indices=row_end[:, None, :, None],
        documents=members,
        answers=tuple(answers),
        skipped=tuple(i for i, document in enumerate(documents) if len(document) > max_length),
        num_tokens=sum(len(documents[i]) for i in fitting),
    )
