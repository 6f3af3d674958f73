"""Packing against PaddleNLP's own: preference data, zero padding, collators, element by element."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("paddlenlp", reason="needs PaddleNLP: bash scripts/setup_env.sh train")

from paddlenlp.datasets import ZeroPaddingMapDataset
from paddlenlp.datasets.zero_padding_dataset import generate_greedy_packs
from paddlenlp.trl import preference_collate_fn, preprocess_preference_data

from paddle_flashmask.integrations import paddlenlp as integration
from paddle_flashmask.masks import ColumnMask
from paddle_flashmask.packing import greedy_packs, pack, preference_document, reward_document, sft_document

END = 1
words = st.text("abcdefgh", min_size=1, max_size=9)


class Tokenizer:
    """A token a letter, without a chat template: what PaddleNLP's preprocessing asks of a tokenizer."""

    chat_template = None
    eos_token_id = END

    def encode(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}


def ids(text, end=False):
    return Tokenizer().encode(text, False)["input_ids"] + [END] * end


def paddlenlp_preference(question, chosen, rejected, flash_mask):
    data = {"src": [question], "tgt": [], "response": [chosen, rejected], "sort": [1, 0]}
    lengths = SimpleNamespace(max_seq_len=1000, max_prompt_len=500)
    return preprocess_preference_data(data, Tokenizer(), lengths, SimpleNamespace(flash_mask=flash_mask))


@settings(max_examples=50)
@given(st.lists(st.tuples(words, words, words), min_size=1, max_size=8), st.integers(30, 60))
@pytest.mark.parametrize("flash_mask", [True, False])
def test_dpo_batches_are_paddlenlps(flash_mask, samples, length):
    packed = pack([preference_document(ids(q), ids(c, True), ids(r, True)) for q, c, r in samples], length)
    ours = integration.collate(integration.preference_features(packed))

    theirs = []
    for members in packed.documents:  # each packs what we packed together
        records = [paddlenlp_preference(*samples[i], flash_mask) for i in members]
        theirs += ZeroPaddingMapDataset(records, None, length).new_data
    theirs = preference_collate_fn(theirs, max_seq_len=length)

    indices = ours.pop(integration.INDICES)
    seen = ColumnMask.from_startend_row_indices(indices[..., None], causal=True).to_dense()
    if flash_mask:
        their_indices = theirs.pop(integration.INDICES)
        assert indices.shape == their_indices.shape
        # Padding columns start at row 0 here; there they repeat the last column's, with the same effect.
        padding = ours["input_ids"][:, None] == 0
        np.testing.assert_array_equal(indices[~padding], their_indices[~padding])
        theirs["attention_mask"] = ColumnMask.from_startend_row_indices(
            their_indices[..., None], causal=True
        ).to_dense()
    np.testing.assert_array_equal(seen, theirs.pop("attention_mask"))
    assert set(ours) == set(theirs)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


@settings(max_examples=50)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=8), st.integers(20, 60))
def test_sft_batches_are_paddlenlps(samples, length):
    documents = [sft_document(ids(q), ids(a, True)) for q, a in samples]
    packed = pack(documents, length)
    for sample, members in zip(integration.features(packed), packed.documents, strict=True):
        records = [
            {
                "input_ids": documents[i].input_ids.tolist(),
                "labels": documents[i].labels.tolist(),
                "position_ids": documents[i].position_ids.tolist(),
                integration.INDICES: [len(documents[i])] * len(documents[i]),
            }
            for i in members
        ]
        (theirs,) = ZeroPaddingMapDataset(records, None, length).new_data
        used = len(theirs["input_ids"])
        assert set(theirs) == set(sample)
        for name, values in theirs.items():
            np.testing.assert_array_equal(sample[name][..., :used].ravel(), values, err_msg=name)


@pytest.mark.parametrize("mean", [100, 300, 1000])
def test_greedy_packs_fill_as_well_as_paddlenlps(rng, mean):
    """Not so for every input: neither strategy is optimal."""
    lengths = np.clip(rng.exponential(mean, 1000), 1, 2048).astype(int).tolist()
    theirs = generate_greedy_packs([{"input_ids": [0] * length} for length in lengths], 2048)
    assert len(greedy_packs(lengths, 2048)) <= sum(map(bool, theirs))


def test_only_preferences_make_preference_features():
    packed = pack([preference_document([2], [3], [4]), reward_document([5], [[6], [7], [8]])], 16)
    with pytest.raises(
        ValueError, match=r"expected preference documents, got one with 3 answers \(document 1"
    ):
        integration.preference_features(packed)
