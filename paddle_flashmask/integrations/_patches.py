"""What the adapters share: replacing attributes of a framework and giving them back; warning of versions."""

from __future__ import annotations

import functools
import warnings
from typing import Any

_INHERITED = object()


class Patches:
    """Attributes of other people's modules and classes, replaced until `restore`."""

    def __init__(self) -> None:
        self._replaced: list[
            tuple[Any, str, Any]
        ] = []  # (owner, name, its own value or _INHERITED), in order

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value`."""
        self._replaced.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Every attribute is what it was, inherited ones included."""
        while self._replaced:
            owner, name, value = self._replaced.pop()
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@functools.cache
def warn_if_unknown(framework: str, version: str, supported: tuple[str, ...]) -> None:
    """Warn, once, of a version that the tests do not run with."""
    if version not in supported:
        warnings.warn(
            f"{framework} {version} is not tested with paddle_flashmask ({', '.join(supported)} is); "
            "check that packed and separate documents give the same loss",
            stacklevel=3,
        )
