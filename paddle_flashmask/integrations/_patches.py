"""What the adapters share: replacing attributes of a framework and giving them back; warning of versions."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, MutableMapping
from typing import Any


class Patches:
    """Attributes and entries of other people's modules, classes and mappings, replaced until `restore`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []  # in the order of the replacements

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value`."""
        if name in vars(owner):
            self._undo.append(functools.partial(setattr, owner, name, vars(owner)[name]))
        else:  # inherited
            self._undo.append(functools.partial(delattr, owner, name))
        setattr(owner, name, value)

    def replace_entry(self, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        """Set `mapping[key]`, which is there, to `value`."""
        self._undo.append(functools.partial(mapping.__setitem__, key, mapping[key]))
        mapping[key] = value

    def restore(self) -> None:
        """Everything is what it was, inherited attributes included."""
        while self._undo:
            self._undo.pop()()


@functools.cache
def warn_if_unknown(framework: str, version: str, supported: tuple[str, ...]) -> None:
    """Warn, once, of a version that the tests do not run with."""
    if version not in supported:
        warnings.warn(
            f"{framework} {version} is not tested with paddle_flashmask ({', '.join(supported)} is); "
            "check that packed and separate documents give the same loss",
            stacklevel=3,
        )
