"""Exact attention for PaddlePaddle under rich masks, with O(N) mask memory and masked tiles never computed.

Everything is imported on first use (PEP 562), so that ``import paddle_flashmask.masks`` needs neither
Paddle nor the compiled operators.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddle_flashmask import integrations, masks, nn, packing, reference
    from paddle_flashmask._ops import load_operators
    from paddle_flashmask.functional import attention, flashmask_attention

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "attention",
    "flashmask_attention",
    "integrations",
    "load_operators",
    "masks",
    "nn",
    "packing",
    "reference",
]

_MODULES = {"integrations", "masks", "nn", "packing", "reference"}
_FUNCTIONS = {
    "attention": "paddle_flashmask.functional",
    "flashmask_attention": "paddle_flashmask.functional",
    "load_operators": "paddle_flashmask._ops",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _FUNCTIONS:
        value = getattr(importlib.import_module(_FUNCTIONS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
