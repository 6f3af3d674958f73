"""In which order jobs take turns. No torch."""

from __future__ import annotations

from itertools import cycle, islice


def balanced_orders(count: int) -> list[list[int]]:
    """Return orders of ``count`` jobs in which each follows each other one equally often (Williams' design).

    A card near its power limit remembers what ran just before: after a job that draws little it clocks higher
    for a while. In one fixed order the same job always profits from its neighbour (seen on an H200: the same
    kernel 6 % faster behind a light job than behind a heavy one).

    Args:
        count: of jobs, at least 1.

    Returns:
        ``count`` orders of an even number of jobs, twice as many of an odd one.
    """
    assert count > 0, "there is somebody whose turn it is"
    zigzag = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    orders = [[(job + shift) % count for job in zigzag] for shift in range(count)]
    return orders + [order[::-1] for order in orders] if count % 2 else orders


def balanced_rounds(count: int, rounds: int) -> int:
    """Return how many rounds balance ``count`` jobs: ``rounds``, rounded up to whole sets of orders."""
    orders = len(balanced_orders(count))
    return -(-rounds // orders) * orders


def orders_of(count: int, rounds: int) -> list[list[int]]:
    """Return the orders of ``count`` jobs in so many rounds; balanced for ``balanced_rounds`` of them."""
    return list(islice(cycle(balanced_orders(count)), rounds))
