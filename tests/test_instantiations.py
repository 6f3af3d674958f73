"""What scripts/generate_instantiations.py refuses in configs/kernels.toml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import generate_instantiations as generate
import pytest

Config = dict[str, Any]


@pytest.fixture
def config() -> Config:
    return generate.tomllib.loads(generate.CONFIG.read_text())


def test_the_file_is_taken(config: Config) -> None:
    units = generate.entries(config)
    assert {(unit.architecture, unit.kind) for unit in units} == {
        (architecture, kind)
        for architecture in ("sm80", "sm90")
        for kind in ("few_rows_forward", "forward", "backward")
    }


def test_the_split_plan_knows_the_kernels_beside(config: Config) -> None:
    """split_plan_of() of sm90/forward_launch.cuh compares with kernels of so many consumers."""
    beside = {
        (entry["head_dim"][0], entry["tiles"]["consumers"])
        for entry in config["sm90"]["forward"]
        if {"plain", "bare"} & set(entry["variants"])
    }
    text = (generate.ROOT / "csrc" / "sm90" / "forward_launch.cuh").read_text()
    assert "kOthers = Config::kHeadDim == 64 || Config::kHeadDim == 128 ? 3 : 2" in text
    assert beside == {(dim, 3 if dim in (64, 128) else 2) for dim in (64, 96, 128, 192, 256)}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda config: config.update(sm81=config.pop("sm80")),
        lambda config: config.update(sm81={}),
        lambda config: config["sm80"].pop("backward"),
        lambda config: config["sm80"].update(sideward=[]),
        lambda config: config["sm80"]["forward"][0].update(tile={}),
        lambda config: config["sm80"]["forward"][0]["tiles"].update(warp=4),
        lambda config: config["sm80"]["forward"][0]["tiles"].update(warps=4.5),
        lambda config: config["sm80"]["forward"][0].update(variants=["plane"]),
    ],
)
def test_the_unexpected_is_refused(config: Config, spoil: Callable[[Config], None]) -> None:
    spoil(config)
    with pytest.raises(ValueError, match=r"sm8|file has"):
        generate.entries(config)
