"""Pictures: drawings in docstrings are true, show() and plot() draw what is there, the gallery is current."""

from __future__ import annotations

import doctest
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from paddle_flashmask import masks
from paddle_flashmask.masks import ColumnMask, causal, column_mask, constructors, full, registry


@pytest.mark.parametrize("module", [masks, column_mask, constructors], ids=lambda module: module.__name__)
def test_docstrings_are_true(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted > 0


@pytest.mark.parametrize("name", [name for name in masks.__all__ if name != "ColumnMask"])
def test_every_constructor_draws_its_matrix(name: str) -> None:
    assert f">>> {name}(" in getattr(masks, name).__doc__ or ".show()" in getattr(masks, name).__doc__


def shown(mask: ColumnMask, capsys: pytest.CaptureFixture[str], **options: int) -> list[str]:
    mask.show(**options)
    return capsys.readouterr().out.splitlines()


def test_show_draws_elements_or_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(causal(2, 3), capsys) == ["# # .", "# # #"]
    legend = "2 x 2 elements a cell: # visible, + partly, . masked"
    assert shown(causal(5), capsys, max_cells=3) == ["+ . .", "# + .", "# # #", legend]
    assert shown(full(0, 3), capsys) == ["(empty)"]
    assert len(shown(causal(8192), capsys)) == 32 + 1


def test_show_draws_the_asked_head(capsys: pytest.CaptureFixture[str]) -> None:
    mask = ColumnMask.stack_batch([ColumnMask.stack_heads([full(2), causal(2)]), causal(2)])
    assert shown(mask, capsys, batch=0, head=0) == ["# #", "# #"]
    assert shown(mask, capsys, batch=0, head=1) == shown(mask, capsys, batch=1, head=0) == ["# .", "# #"]


def test_plot_draws_the_blocks() -> None:
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    mask = causal(500, 700)
    ax = mask.plot(max_cells=10)
    (image,) = ax.get_images()
    np.testing.assert_array_equal(image.get_array(), mask.block_map(70, 70)[0, 0])
    assert ax.get_xlim() == (0, 700)
    assert ax.get_ylim() == (500, 0)
    _, own = plt.subplots()
    assert mask.plot(own) is own
    full(0, 4).plot()
    plt.close("all")


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"pip install paddle-flashmask\[plot\], or use show\(\)"):
        causal(4).plot()


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_gallery", ROOT / "scripts" / "make_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gallery_is_up_to_date(gallery: ModuleType) -> None:
    written = (ROOT / "docs" / "masks.md").read_text(encoding="utf-8")
    assert written == gallery.text(), "run python scripts/make_gallery.py"


def test_the_gallery_has_small_pictures(gallery: ModuleType) -> None:
    pictures = {path.stem: path.stat().st_size for path in (ROOT / "docs" / "images").glob("*.png")}
    assert set(registry.names()) <= set(pictures)
    assert max(pictures[name] for name in registry.names()) < 40_000


@pytest.mark.parametrize("name", [name for name in registry.names() if name != "hash_sparse"])
def test_the_gallerys_calls_make_its_masks(gallery: ModuleType, name: str) -> None:
    seqlen = 999
    names = {**vars(masks), "S": seqlen, "data": registry.token_data(seqlen, 0)}
    assert eval(gallery.CALLS[name], names) == registry.make(name, seqlen, 0)
