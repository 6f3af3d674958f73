"""Writes docs/masks.md and docs/images/*.png: every named mask, drawn.

    python scripts/make_gallery.py

Run it after changing a mask, the registry or the text below: a test compares docs/masks.md with what it
writes.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from paddle_flashmask.masks import ColumnMask, registry

DOCS = Path(__file__).resolve().parent.parent / "docs"
SEQLEN = 8192
SEED = 0

# How to make each named mask with the public functions, over S tokens. `data` is registry.token_data(S).
CALLS = {
    "full": "full(S)",
    "causal": "causal(S)",
    "sliding_window": "sliding_window(S, S // 16)",
    "causal_document": "causal_document(data.lengths)",
    "document": "document(data.lengths)",
    "share_question": "share_question(data.documents)",
    "global_sliding_window": "global_sliding_window(S, S // 32, S // 32)",
    "causal_blockwise": "causal_blockwise(data.lengths)",
    "prefix_lm_document": "prefix_lm_document(data.lengths, data.prefixes)",
    "prefix_lm_causal": "prefix_lm_causal(S, int(0.14 * S))",
    "qk_sparse": "dropped(S, range(int(0.3 * S), int(0.34 * S)), (int(0.3 * S), int(0.34 * S)))",
    "random_eviction": "random_eviction(data.evict_at)",
    "hash_sparse": "hash_sparse(query_buckets, key_buckets)[0]",
    "qk_sparse_ranges": "qk_sparse(S, [(1, S // 3), (S // 3 + 1, 2 * S // 3), (2 * S // 3 + 1, S)])",
    "two_sided_window": "sliding_window(S, S // 16, causal=False)",
    "document_window": "document(data.lengths) & sliding_window(S, S // 16)",
}

HEAD = """\
# Masks

<!-- Written by scripts/make_gallery.py: edit that, not this. -->

A `ColumnMask` says which query rows see which key columns, for masks in which the rows that do *not* see a
column form at most two intervals. It needs memory for four numbers per column, not for a matrix.

```python
from paddle_flashmask import masks

mask = masks.causal_document([1024, 3072, 4096])                # by a constructor,
mask = masks.causal(8192) & masks.document([1024, 3072, 4096])  # or by composition: visible in both,
mask = masks.causal(8192) | masks.document([1024, 3072, 4096])  # or visible in either
mask = masks.ColumnMask.from_dense(boolean_matrix)              # or from whatever else fits
indices, causal = mask.to_startend_row_indices()                # what kernels, and Paddle's own call, take
mask.show()                                                     # text, as below
mask.plot()                                                     # matplotlib
```

Every off-by-one (which end of a window counts, what a prefix holds, what padding sees) is stated and drawn in
one place: `help(masks.constructors)`.

Below are the named masks of `masks.registry`, the twelve of the FlashMask paper first, over S = {seqlen}
tokens of random documents. In the drawings a cell is {cell} x {cell} elements: `#` visible,
`+` partly visible, `.` masked. C is how many values per column the kernels read; rho is the share of
128 x 128 tiles that they skip.

| mask | row i sees column j iff | causal | C | visible | rho |
|---|---|---|---|---|---|
"""


def text() -> str:
    """The whole of docs/masks.md."""
    parts = [HEAD.format(seqlen=SEQLEN, cell=SEQLEN // 32)]
    parts += [_table_row(entry) for entry in registry.REGISTRY.values()]
    parts += [_section(entry) for entry in registry.REGISTRY.values()]
    return "".join(parts)


def _table_row(entry: registry.NamedMask) -> str:
    mask = entry.build(SEQLEN, SEED)
    indices, causal = mask.to_startend_row_indices()
    cells = (
        f"[{entry.name}](#{entry.name})",
        entry.rule.replace("|", "\\|"),
        "yes" if causal else "no",
        "none" if indices is None else str(indices.shape[-1]),
        f"{100 * mask.visible_area() / SEQLEN**2:.1f} %",
        f"{mask.block_sparsity():.2f}",
    )
    return f"| {' | '.join(cells)} |\n"


def _section(entry: registry.NamedMask) -> str:
    drawing = io.StringIO()
    with contextlib.redirect_stdout(drawing):
        entry.build(SEQLEN, SEED).show()
    matrix = drawing.getvalue().rsplit("\n", 2)[0]  # without the legend, which the head explains
    return f"""
## {entry.name}

Row i sees column j iff {entry.rule}.

```python
{CALLS[entry.name]}
```

![{entry.name}](images/{entry.name}.png)

```text
{matrix}
```
"""


def write_image(name: str, mask: ColumnMask, path: Path) -> None:
    """A small picture, the same bytes every time for the same matplotlib."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(2.8, 2.8), layout="constrained")
    mask.plot(ax, max_cells=128)
    ax.set_title(name, fontsize=9)
    ax.tick_params(labelsize=6)
    ax.xaxis.label.set_size(7)
    ax.yaxis.label.set_size(7)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    """Writes the text and the pictures."""
    import matplotlib as mpl

    mpl.use("agg")
    assert set(CALLS) == set(registry.REGISTRY), "CALLS and the registry name the same masks"
    images = DOCS / "images"
    images.mkdir(parents=True, exist_ok=True)
    for name in registry.names():
        write_image(name, registry.make(name, SEQLEN, SEED), images / f"{name}.png")
    (DOCS / "masks.md").write_text(text(), encoding="utf-8")
    print(f"wrote {DOCS / 'masks.md'} and {len(CALLS)} pictures")


if __name__ == "__main__":
    main()
