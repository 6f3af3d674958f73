"""How the benchmarks' peers are made ready: in processes of their own, and with which blocks."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import flex_masks
from cells import TWELVE, Case, paper_case
from limits import apart, time_limit
from prepare import items_of


def test_items_that_fail_or_take_their_process_down_do_not_stop_the_others() -> None:
    items = ["pass", "raise ValueError('no\\nway')", "import os; os._exit(3)", "0", "'', ''"]
    found = {item: reason for item, _, reason in apart(exec, items, workers=2)}
    assert found == {
        **dict.fromkeys(items, ""),
        items[1]: "ValueError: no way",
        items[2]: "its process ended with exit code 3",
    }
    assert [*apart(exec, [], workers=2)] == []


def test_what_takes_too_long_is_killed_and_the_others_go_on() -> None:
    items = ["while True: pass", "0"]
    found = {item: reason for item, _, reason in apart(exec, items, workers=1, limit=5)}
    assert found == {items[0]: "took longer than 5 s", items[1]: ""}


def test_no_more_is_begun_for_a_caller_that_has_left(tmp_path: Path) -> None:
    done = apart(exec, ["pass", "import time; time.sleep(2)", f"open({str(tmp_path / 'x')!r}, 'w')"], 1)
    next(done)
    done.close()
    assert [*tmp_path.iterdir()] == []


def test_a_time_limit_ends_what_hangs_and_nothing_later() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match=r"took longer than 0\.05 s"), time_limit(0.05):
        time.sleep(10)
    with time_limit(0.05):
        pass
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) is before


def test_what_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Needs torch, which only benchmarks do."""
    pytest.importorskip("torch")
    import implementations

    monkeypatch.setattr(implementations.Peer, "missing", lambda peer: None)
    cases = [paper_case(mask, seqlen, 64) for mask in ("full", "document") for seqlen in (8192, 32768)]
    again = [paper_case("document", 8192, 64, seed=1)]
    assert items_of(cases + again, ["flex", "cudnn", "fa2"]) == [(case, "flex") for case in cases]
    names = ["flashinfer_sparse_16", "flashinfer_dense", "flashinfer_sparse"]
    once = [("flashinfer_sparse", cases[i]) for i in (0, 2)] + [
        ("flashinfer_dense", cases[i]) for i in (0, 2)
    ]
    assert items_of(cases, names) == [(case, name) for name, case in once]
    blockwise = [
        paper_case("causal_blockwise", 8192, 64, seed) for seed in range(2)
    ]  # its last document's number
    assert items_of(blockwise, ["flex"]) == [(case, "flex") for case in blockwise]


@pytest.fixture
def implementations():
    """The module of the peers; it needs torch."""
    pytest.importorskip("torch")
    import implementations

    return implementations


def test_what_hangs_while_it_is_made_fails_with_its_reason(implementations, monkeypatch) -> None:
    import runner
    import torch

    monkeypatch.setattr(runner, "time_limit", lambda: time_limit(0.05))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bench = runner.Bench.__new__(runner.Bench)  # its constructor needs a GPU
    outcome = bench._make(lambda: time.sleep(10), {})
    assert (outcome.job, outcome.reason) == (None, "TimeoutError: took longer than 0.05 s")


def test_a_peer_that_breaks_on_import_is_left_out(implementations, tmp_path, monkeypatch) -> None:
    (tmp_path / "a_broken_peer.py").write_text("raise RuntimeError('another version')")
    monkeypatch.syspath_prepend(tmp_path)
    peer = implementations.Peer((), None, heads_first=True, module="a_broken_peer")
    assert peer.missing() == "RuntimeError: another version"


@pytest.mark.parametrize("mask", [mask for mask in TWELVE if mask != "full"])
def test_block_masks_are_create_block_masks(mask: str, implementations) -> None:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    case = Case(mask, 1024, 64, 1, 1, seed=1)
    tokens = {name: torch.from_numpy(array) for name, array in flex_masks.token_arrays(1024, 1).items()}
    rule = flex_masks.make_rule(mask, 1024, tokens)
    cpu = torch.device("cpu")
    found = implementations.make_block_mask(case.build_mask(), rule, cpu)
    expected = create_block_mask(lambda b, h, i, j: rule(i, j), None, None, 1024, 1024, device="cpu")
    assert found.seq_lengths == expected.seq_lengths
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE
    for side in ("kv", "q", "full_kv", "full_q"):
        counts, wanted = (getattr(x, f"{side}_num_blocks") for x in (found, expected))
        assert torch.equal(counts, wanted)
        assert counts.dtype == wanted.dtype
        indices, wanted = (getattr(x, f"{side}_indices") for x in (found, expected))
        assert (indices.shape, indices.stride(), indices.dtype) == (
            wanted.shape,
            wanted.stride(),
            wanted.dtype,
        )
        for row, count in enumerate(counts[0, 0].tolist()):  # beyond, nothing is read
            assert torch.equal(indices[0, 0, row, :count], wanted[0, 0, row, :count])


@pytest.mark.parametrize("kv_heads", [0, 1])
def test_tensors_to_compile_with_are_like_those_that_are_timed(kv_heads: int, implementations) -> None:
    case = Case("causal", 64, 16, 2, 2, kv_heads=kv_heads)
    shared, apart_ = (implementations.Data(case, "cpu", shared=x) for x in (True, False))
    for layout in ("tensors", "heads_first"):
        ours, wanted = getattr(shared, layout), getattr(apart_, layout)
        assert len({id(x) for x in ours}) == 4
        assert [(x.shape, x.stride(), x.dtype) for x in ours] == [
            (x.shape, x.stride(), x.dtype) for x in wanted
        ]
        assert len({x.data_ptr() for x in ours}) == (2 if kv_heads else 1)
        assert len({x.data_ptr() for x in wanted}) == 4
