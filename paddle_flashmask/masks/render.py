"""Pictures of masks: text for terminals and docstrings, matplotlib for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ._checks import as_int

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .column_mask import ColumnMask

_SYMBOLS = np.array([".", "+", "#"])
_COLOURS = ("#e9ecef", "#8fb8de", "#1f4e79")  # masked, partial, unmasked


def _cells(mask: ColumnMask, max_cells: int, batch: int, head: int) -> tuple[NDArray[np.int8], int]:
    """The block map [row cells, column cells] of one sample and head, and the side of a cell in tokens."""
    max_cells = as_int("max_cells", max_cells, minimum=1)
    batch = as_int("batch", batch, maximum=mask.batch - 1)
    head = as_int("head", head, maximum=mask.heads - 1)
    block = max(1, -(-max(mask.seqlen_q, mask.seqlen_k) // max_cells))
    return mask.block_map(block, block)[batch, head], block


def draw(mask: ColumnMask, max_cells: int, batch: int, head: int) -> str:
    """The text of `ColumnMask.show`, with a legend where a cell is more than one element."""
    kinds, block = _cells(mask, max_cells, batch, head)
    lines = [" ".join(row) for row in _SYMBOLS[kinds]] if kinds.size else ["(empty)"]
    if block > 1:
        lines.append(f"{block} x {block} elements a cell: # visible, + partly, . masked")
    return "\n".join(lines)


def plot(mask: ColumnMask, ax: Axes | None, max_cells: int, batch: int, head: int) -> Axes:
    """`ColumnMask.plot`."""
    kinds, block = _cells(mask, max_cells, batch, head)
    try:
        import matplotlib.pyplot as plt
        from matplotlib.colors import ListedColormap
    except ImportError as error:
        raise ImportError(
            "ColumnMask.plot needs matplotlib: pip install paddle-flashmask[plot], or use show()"
        ) from error
    if ax is None:
        _, ax = plt.subplots(figsize=(4, 4), layout="constrained")
    rows, columns = kinds.shape[0] * block, kinds.shape[1] * block
    ax.imshow(
        kinds,
        cmap=ListedColormap(_COLOURS),
        vmin=0,
        vmax=2,
        interpolation="nearest",
        extent=(0, max(columns, 1), max(rows, 1), 0),
    )
    ax.set_xlim(0, max(mask.seqlen_k, 1))
    ax.set_ylim(max(mask.seqlen_q, 1), 0)
    ax.set_xlabel("key column")
    ax.set_ylabel("query row")
    return ax
