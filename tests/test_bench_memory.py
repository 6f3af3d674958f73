"""What masks cost in memory and time: what is measured, written down and refused."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import memory
import paper_data
from bench_rows import PROVENANCE, RUN
from provenance import Log


@pytest.mark.parametrize("part", memory.PARTS)
def test_each_part_of_memory_is_written_down_alone(part: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = memory_row(
        part, "ours", 4096, {"mask": "causal_document", "batch": "new mask"}.get(part, "peak"), 1.0
    )
    for rows in ([row], [memory_row(part, "ours", 4096, "", 0, "out of memory")]):
        assert memory.render(rows).startswith("# Memory")
        memory.draw(rows, tmp_path / "x.png")


def memory_row(
    part: str, name: str, seqlen: int, quantity: str, value: float, note: str = ""
) -> dict[str, str]:
    row = {"part": part, "name": name, "seqlen": str(seqlen), "quantity": quantity, "value": str(value)}
    return PROVENANCE | row | {"unit": "", "status": "failed" if note else "ok", "note": note}


def test_memory_is_written_down(tmp_path: Path) -> None:
    rows = [
        memory_row("mask", "ours", 4096, "causal_document", 2**14),
        memory_row("mask", "flex", 4096, "causal_document", 2**20),
        memory_row("peak", "ours", 4096, "peak", 2**25),
        memory_row("peak", "ours", 4096, "time", 1.5),
        memory_row("peak", "dense", 4096, "", 0, "out of memory"),
        memory_row("batch", "ours", 4096, "new mask", 0.25),
        memory_row("batch", "ours", 4096, "first call", 7.5),
        memory_row("layer", "ours", 4096, "parameters of a layer", 2**28),
        memory_row("layer", "ours", 4096, "input of a layer", 2**25),
        memory_row("layer", "ours", 4096, "peak of a layer", 2**30),
    ]
    text = memory.render(rows)
    assert "| 4K | 16 KiB |  |  |  | 16 MiB | 32 MiB | 1 MiB |" in text
    assert "| 4K | 32 MiB | out of memory |  |" in text
    assert "| 4K | 1.50 | out of memory |  |" in text
    assert "| 4K | 0.25 |  |" in text
    assert "| 4K | 8.00 | 1.00 |  |  | 1.00 | 10.00 |" in text
    assert "nan" not in text
    assert "- peak, dense: 8K, 16K, 32K, 64K, 128K, 256K, 512K, 1M\n- peak, flex: 4K, 8K," in text
    assert "- layer, ours: 8K, 16K, 32K, 64K, 128K, 256K\n" in text
    assert "## Failures\n\n- peak, dense: out of memory (4K)\n" in text
    mended = [memory_row("peak", "flex", 4096, "", 0, "no"), memory_row("peak", "flex", 4096, "peak", 1.0)]
    assert "Failures" not in memory.render(mended)
    reason = [memory_row("peak", "flex", 4096, "", 0, "RuntimeError: a | b")]
    assert "| 4K |  |  | RuntimeError: a / b |" in memory.render(reason)
    every = [
        memory_row(part, name, n, "", 0, "no room")
        for part in memory.PARTS
        for n in memory.LENGTHS
        for name in memory.NAMES_OF[part]
    ]
    text = memory.render(every)
    assert "Not run" not in text
    assert "| 4K | no room | no room | no room | no room | 16 MiB | 32 MiB | no room |" in text
    assert "| 4K |  |  | no room |  | no room |  |" in text
    pytest.importorskip("matplotlib")
    memory.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").exists()


@pytest.mark.parametrize("wrong", ["", "o", "dq", "dk", "dv"])
@pytest.mark.parametrize("seqlen", [300, 70000])
def test_memory_counts_right_results_and_gradients_only(
    wrong: str, seqlen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    import experiment
    import measure

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        doubled = [x + (x - x.detach()) * (wrong == name) for name, x in zip("qkv", inputs, strict=True)]
        gradients_only = sum(((x - x.detach()) for x in doubled), torch.zeros(()))
        return gradients_only + (1.1 if wrong == "o" else 1.0)

    wrong = wrong.removeprefix("d")
    # In place of the definition, so that long sequences take no time: o is 1, and so are its gradients.
    tensors = [torch.ones(1, seqlen, 1, 1).requires_grad_() for _ in range(3)] + [torch.ones(1, seqlen, 1, 1)]
    head = torch.ones(seqlen, 1)
    expected = dict.fromkeys(("o", "dq", "dk", "dv"), head)
    monkeypatch.setattr(measure, "reference_head", lambda *args: expected)
    sample = memory.documents(seqlen)
    if not wrong:
        experiment.check(attend, sample, tensors)
        return
    name = wrong if wrong == "o" else f"d{wrong}"
    with pytest.raises(measure.WrongResultError, match=f"^{name}: off by"):
        experiment.check(attend, sample, tensors)


def test_lengths_are_those_of_the_paper_and_up_to_a_million_tokens() -> None:
    items = memory.items_of(memory.PARTS, memory.NAMES, None)
    lengths = {key: [n for *of, n in items if of == [*key]] for key in {item[:2] for item in items}}
    assert lengths.keys() == {(part, name) for part in memory.PARTS for name in memory.NAMES_OF[part]}
    for (part, _), found in lengths.items():
        assert found[0] == (8192 if part == "batch" else 4096)
        assert found[-1] == (262144 if part == "layer" else 2**20)
        steps = {longer // shorter for shorter, longer in pairwise(found)}
        assert steps <= {2, 4}
    names = [name for _, name, _ in items]
    assert "flex" not in names[: -names.count("flex")]  # what compiles comes last
    assert memory.items_of(["batch"], ["flex"], [512]) == [("batch", "flex", 512)]


def test_of_memory_what_is_asked_for_and_left_is_measured(tmp_path: Path) -> None:
    log = Log(tmp_path / "x.csv", memory.COLUMNS, RUN)

    def wanted(*names: str, retry: bool = False) -> list[str]:
        experiment = memory.Experiment(None, log, retry=retry)
        items = memory.items_of(["peak"], names, [4096])
        return [name for part, name, seqlen in items if experiment.is_wanted(part, name, seqlen)]

    key = {"part": "peak", "seqlen": 4096}
    assert wanted(*memory.NAMES) == ["ours", "dense", "flex"]
    assert wanted("flex") == ["flex"]
    log.add({**key, "name": "ours", "status": "ok"})
    log.add({**key, "name": "flex", "status": "failed"})
    assert wanted("ours", "flex", "dense") == ["dense"]
    assert wanted("ours", "flex", "dense", retry=True) == ["dense", "flex"]
    log.add({**key, "name": "flex", "status": "ok"})
    assert wanted("flex", retry=True) == []
    # What failed and was mended is written as what it is now; of failures, the last.
    rows = [memory_row("peak", "flex", 4096, "", 0, note) for note in ("no", "never")]
    assert "| 4K |  |  | never |" in memory.render(rows)
    mended = [*rows, memory_row("peak", "flex", 4096, "peak", 2**21)]
    assert "| 4K |  |  | 2 MiB |" in memory.render(mended)
    # Rows of an earlier run change nothing where they stand behind.
    before = [memory_row("peak", "flex", 4096, "", 0, "once"), memory_row("peak", "flex", 4096, "peak", 1.0)]
    before = [row | {"started": "2025-12-31"} for row in before]
    assert "| 4K |  |  | never |" in memory.render([*rows, *before[:1]])
    text = memory.render([*mended, *before])
    assert "| 4K |  |  | 2 MiB |" in text
    assert "Failures" not in text


class DyingWorker(memory.Worker):
    """Loses its process with all that is dense."""

    def __call__(self, item: memory.Item) -> None:
        import paddle  # noqa: F401  # the library is linked to it

        if item[1] == "dense":
            os._exit(3)
        super().__call__(item)


def test_of_memory_a_lost_process_is_a_row_and_the_rest_is_measured(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "Worker", DyingWorker)
    files = ["--csv", str(tmp_path / "x.csv"), "--library", str(library), "--commit", "1", "--no-report"]
    options = ["--parts", "peak", "batch", "--names", "ours", "dense", "--lengths", "256", "--limit", "200"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files])
    memory.main()
    rows = Log(tmp_path / "x.csv", memory.COLUMNS).rows
    assert [(row["part"], row["name"]) for row in rows if row["status"] == "ok"] == [
        *[("peak", "ours")] * 2,
        *[("batch", "ours")] * 3,
    ]
    [row] = [row for row in rows if row["status"] == "failed"]
    assert (row["name"], row["note"]) == ("dense", "its process ended with exit code 3")
    memory.main()  # nothing is left
    assert Log(tmp_path / "x.csv", memory.COLUMNS).rows == rows


def test_peaks_are_without_what_libraries_keep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first matrix product of a process leaves a workspace behind."""
    torch = pytest.importorskip("torch")
    import experiment
    import measure

    kept = [0]
    reference = measure.reference_head

    def reference_head(*arguments: object) -> dict[str, torch.Tensor]:
        kept[0] = 2**25
        return reference(*arguments)

    def peak_memory(self: experiment.Device, job: Callable[[], object]) -> int:
        job()
        return kept[0] + 1000

    monkeypatch.setattr(measure, "reference_head", reference_head)
    monkeypatch.setattr(experiment.Device, "allocated", lambda self: kept[0])
    monkeypatch.setattr(experiment.Device, "peak_memory", peak_memory)
    monkeypatch.setattr(experiment, "load", lambda *arguments: None)
    unused = __file__  # a file that is there
    files = ["--csv", str(tmp_path / "x.csv"), "--library", unused, "--commit", "1", "--no-report"]
    options = ["--parts", "peak", "--names", "dense", "--lengths", "256"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files])
    memory.main()
    [peak, _] = Log(tmp_path / "x.csv", memory.COLUMNS).rows
    assert (peak["quantity"], peak["value"]) == ("peak", "1000")


@pytest.mark.parametrize("part", ["peak", "batch", "layer"])
def test_no_part_of_memory_counts_wrong_results(
    part: str, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch_attention

    forward = torch_attention.Attention.forward
    monkeypatch.setattr(torch_attention.Attention, "forward", lambda *a: tuple(x + 0.1 for x in forward(*a)))
    files = ["--csv", str(tmp_path / "x.csv"), "--library", str(library), "--commit", "1", "--no-report"]
    monkeypatch.setattr(
        sys,
        "argv",
        ["x.py", "--device", "cpu", "--names", "ours", "--parts", part, "--lengths", "256", *files],
    )
    memory.main()
    [row] = [row for row in Log(tmp_path / "x.csv", memory.COLUMNS).rows if row["name"] == "ours"]
    assert row["status"] == "failed"
    assert row["note"].startswith("WrongResultError: o: off by")


def test_a_layer_without_a_mask_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    import experiment

    monkeypatch.setattr(experiment, "load", lambda *arguments: None)
    unused = __file__  # a file that is there
    files = ["--csv", str(tmp_path / "x.csv"), "--library", unused, "--commit", "1", "--no-report"]
    options = ["--names", "no mask", "--lengths", "256"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files, "--retry"])
    sdpa = experiment.sdpa
    monkeypatch.setattr(experiment, "sdpa", lambda *tensors, **options: sdpa(*tensors, **options) * 1.1)
    memory.main()
    monkeypatch.setattr(experiment, "sdpa", sdpa)
    memory.main()
    failed, *rows = Log(tmp_path / "x.csv", memory.COLUMNS).rows
    assert failed["note"].startswith("WrongResultError: o: off by")
    assert [row["status"] for row in rows] == ["ok"] * 3


def test_a_batch_prepares_later_masks_with_what_was_compiled_for_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something compiled without gradients is compiled again where they are wanted."""
    torch = pytest.importorskip("torch")
    import experiment

    modes, lengths = [], []
    block_mask = memory.Experiment.block_mask

    def recorded(self: memory.Experiment, sample: paper_data.Sample) -> object:
        modes.append(torch.is_grad_enabled())
        lengths.append(sum(question for question, _ in sample.documents))
        return block_mask(self, sample)

    monkeypatch.setattr(memory.Experiment, "block_mask", recorded)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(experiment, "load", lambda *arguments: None)
    unused = __file__  # a file that is there
    files = ["--csv", str(tmp_path / "x.csv"), "--library", unused, "--commit", "1", "--no-report"]
    options = ["--names", "flex", "--parts", "batch", "--lengths", "256"]
    monkeypatch.setattr(sys, "argv", ["x.py", "--device", "cpu", *options, *files])
    memory.main()
    rows = Log(tmp_path / "x.csv", memory.COLUMNS).rows
    assert [row["quantity"] for row in rows] == ["first mask", "first call", "new mask"]
    assert modes == [False] * 5
    assert lengths == [memory.FEW_TOKENS, *[256] * 4]  # the first for what a process does once


def test_a_device_holds_no_memory_that_counts_in_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs to empty L2 is made when it is wanted; here, without a GPU, that would raise."""
    pytest.importorskip("torch")
    import experiment
    import measure

    monkeypatch.setattr(measure, "card_and_driver", lambda: ("a card", "1"))
    monkeypatch.setattr(experiment, "load", lambda *a: None)
    arguments = argparse.Namespace(device="cuda", binary=None, kernels="cuda", commit="1")
    assert experiment.Device(arguments, "").run.card == "a card"


def test_letting_peers_compile_takes_no_library_of_ours(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import experiment

    known = {"device": "cpu", "binary": tmp_path / "none.so", "kernels": "cuda", "commit": "1"}
    assert experiment.Device(argparse.Namespace(prepare=2, **known), "").run.commit == "1"
    with pytest.raises(OSError, match=r"none\.so"):
        experiment.Device(argparse.Namespace(prepare=None, **known), "")
