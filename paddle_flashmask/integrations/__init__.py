"""Adapters for training frameworks, one module each. None is imported before it is asked for.

`paddle_flashmask.integrations.paddlenlp` loads on first use and imports PaddleNLP only in `enable()`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["paddlenlp"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
