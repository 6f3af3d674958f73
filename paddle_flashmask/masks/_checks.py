"""Checks of arguments: each error names the argument, what was expected and what came."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

INT32_MAX = 2**31 - 1


def as_int(name: str, value: Any, *, minimum: int = 0, maximum: int = INT32_MAX) -> int:
    """``value`` as a Python int in [minimum, maximum]; bool and float are refused."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {describe(value)}") from None
    if not minimum <= number <= maximum:
        raise ValueError(f"{name}: expected an integer in [{minimum}, {maximum}], got {number}")
    return number


def as_bool(name: str, value: Any) -> bool:
    """``value`` as a Python bool; anything but a boolean is refused."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {describe(value)}")
    return bool(value)


def as_integer_array(name: str, value: Any, ranks: Iterable[int]) -> NDArray[Any]:
    """``value`` as an array of int32, or else of int64, whose number of dimensions is one of ``ranks``.

    uint64, which int64 cannot hold, is refused; an empty list, which has no dtype, is not.
    """
    array = as_array(name, value)
    untyped = not array.size and not hasattr(value, "dtype")
    if not untyped and not (array.dtype.kind in "iu" and np.can_cast(array.dtype, np.int64)):
        raise TypeError(f"{name}: expected integers that int64 holds, got dtype {array.dtype}")
    check_rank(name, array, ranks)
    return array if array.dtype == np.int32 else array.astype(np.int64)


def plain_integers(rows: Sequence[Any], values: Sequence[Any]) -> NDArray[np.int64] | None:
    """The integers of many rows, int64 ``[n]``; None where something is to be looked at one by one.

    That is unless the rows are lists, tuples or arrays, and the values integers in [0, INT32_MAX]. A million
    of them are checked together here, without a call and a name for each.
    """
    numbers = set(map(type, values))
    if not set(map(type, rows)) <= {list, tuple, np.ndarray} or bool in numbers:
        return None
    if not all(issubclass(number, (int, np.integer)) for number in numbers):
        return None
    try:
        array = np.fromiter(values, np.int64, len(values))
    except OverflowError:
        return None
    return array if not array.size or 0 <= array.min() <= array.max() <= INT32_MAX else None


def as_array(name: str, value: Any) -> NDArray[Any]:
    """``value`` as an array of any dtype; what is ragged is refused."""
    try:
        return np.asarray(value)
    except ValueError:
        raise ValueError(
            f"{name}: expected an array, got {type(value).__name__} with rows of different lengths"
        ) from None


def check_rank(name: str, array: NDArray[Any], ranks: Iterable[int]) -> None:
    """Raise unless ``array`` has one of these numbers of dimensions."""
    expected = tuple(ranks)
    if array.ndim not in expected:
        dims = " or ".join(map(str, expected))
        raise ValueError(f"{name}: expected {dims} dimensions, got shape {list(array.shape)}")


def as_lengths(name: str, value: Any, seqlen: Any = None) -> tuple[NDArray[np.int64], int]:
    """Lengths that add up to at most ``seqlen`` (by default to exactly that), and that ``seqlen``."""
    lengths = as_integer_array(name, value, (1,))
    if lengths.size and (int(lengths.min()) < 0 or int(lengths.max()) > INT32_MAX):
        raise ValueError(
            f"{name}: expected lengths in [0, {INT32_MAX}], got {int(lengths.min())} to {int(lengths.max())}"
        )
    lengths = lengths.astype(np.int64)
    total = int(lengths.sum())
    if seqlen is None:
        return lengths, as_int(f"sum of {name}", total)
    seqlen = as_int("seqlen", seqlen)
    if total > seqlen:
        raise ValueError(f"{name}: expected a sum of at most seqlen={seqlen}, got {total}")
    return lengths, seqlen


def as_range(name: str, value: Any, seqlen: int) -> tuple[int, int]:
    """``value`` as (start, stop) with 0 <= start <= stop <= seqlen."""
    start, stop = as_pair(name, value, "(start, stop)")
    start, stop = as_int(f"{name} start", start), as_int(f"{name} stop", stop)
    if not start <= stop <= seqlen:
        raise ValueError(f"{name}: expected 0 <= start <= stop <= {seqlen}, got ({start}, {stop})")
    return start, stop


def as_pair(name: str, value: Any, meaning: str) -> tuple[Any, Any]:
    """``value`` as two things."""
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise TypeError(f"{name}: expected a pair {meaning}, got {describe(value)}")
    if len(value) != 2:
        raise ValueError(f"{name}: expected a pair {meaning}, got {len(value)} values")
    return value[0], value[1]


def as_sequence(name: str, value: Any, of: str) -> Sequence[Any]:
    """``value`` as a sequence; strings and scalars are refused."""
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise TypeError(f"{name}: expected a sequence of {of}, got {describe(value)}")
    return value  # type: ignore[return-value]


def describe(value: Any) -> str:
    """A short account of an unexpected value."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
