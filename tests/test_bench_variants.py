"""Variants of the kernels: what their descriptions mean, and what they refuse."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts" / "bench"))

import variants
from variants import Edit, parse_variants

UNIT = "sm90_forward_d128_bf16"


def test_edits_of_one_name_belong_together():
    values = [f"a:{UNIT}:2, 128=2, 144", "b:other:1=2", "a:other:1=3"]
    assert parse_variants(values) == {
        "a": [Edit(UNIT, "2, 128", "2, 144"), Edit("other", "1", "3")],
        "b": [Edit("other", "1", "2")],
    }


@pytest.mark.parametrize("value", ["", "a", "a:b", "a:b:c", "a:b:=c", ":b:c=d", "a::c=d", "unedited:b:c=d"])
def test_other_descriptions_are_refused(value: str):
    with pytest.raises(ValueError, match="expected NAME:UNIT:OLD=NEW"):
        parse_variants([value])


def test_an_edit_must_change_the_source():
    assert Edit(UNIT, "128, 2, 128", "128, 2, 144").apply("<128, 2, 128, 2>") == "<128, 2, 144, 2>"
    with pytest.raises(ValueError, match=f"{UNIT}: expected '96' in it"):
        Edit(UNIT, "96", "80").apply("<128>")


def test_the_documented_examples_apply_to_the_sources() -> None:
    notes = (variants.ROOT / "docs" / "kernel-notes.md").read_text()
    examples = re.findall(r'--variant "([^"]+)"', (variants.__doc__ or "") + notes)
    assert len(examples) > 2
    for edits in map(parse_variants, ([example] for example in examples)):
        for edit in next(iter(edits.values())):
            source = variants.ROOT / "csrc" / "instantiations" / f"{edit.unit}.cu"
            assert edit.apply(source.read_text()) != source.read_text()
