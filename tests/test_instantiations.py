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
        (architecture, kind) for architecture in ("sm80", "sm90") for kind in ("forward", "backward")
    }


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
