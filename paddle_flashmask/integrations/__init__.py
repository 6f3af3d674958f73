"""Adapters for training frameworks, one module each. None is imported before it is asked for.

Each loads on first use, and imports its framework only in `enable()` or `register()`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["paddleformers", "paddlenlp"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
