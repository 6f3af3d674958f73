"""Work that may hang, or take its process down: a time limit in this process, or others that may be lost."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

# What is not ready by then hangs: 25 to 30 s to compile are usual, and a new process imports torch first.
READY_SECONDS = 180.0


@contextlib.contextmanager
def time_limit(seconds: float = READY_SECONDS) -> Iterator[None]:
    """Raise TimeoutError where the body, run by the main thread, takes longer; C++ returns first."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def apart(
    act: Callable[[Any], None], items: Iterable[Any], workers: int, limit: float = READY_SECONDS
) -> Iterator[tuple[Any, float, str]]:
    """Call ``act`` with each item in so many other processes, each taking the next one when it is done.

    A process that takes longer than ``limit`` seconds for an item is killed. A caller that stops asking for
    more waits for what is being done, and no more is begun.

    Yields:
        an item, the seconds that it took, and why it failed, "" where it did not, as they come.
    """
    waiting, done = deque(items), queue.SimpleQueue[tuple[Any, float, str]]()
    count = len(waiting)
    with ThreadPoolExecutor(workers) as pool:
        servers = [pool.submit(_serve, act, waiting, done.put, limit) for _ in range(min(workers, count))]
        try:
            for _ in range(count):
                yield done.get()
        finally:
            waiting.clear()
        for server in servers:
            server.result()


def _serve(
    act: Callable[[Any], None], waiting: deque[Any], report: Callable[[Any], None], limit: float
) -> None:
    """Hand items to one process after another: a new one where one has died."""
    context = multiprocessing.get_context("spawn")
    process = None
    while True:
        try:
            item = waiting.popleft()
        except IndexError:
            break
        start = time.monotonic()
        try:
            if process is None:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(act, theirs), daemon=True)
                process.start()
                theirs.close()
            ours.send(item)
            if ours.poll(limit):
                reason = ours.recv()
            else:
                process.kill()
                process.join()
                reason, process = f"took longer than {limit:g} s", None
        except (EOFError, OSError):
            assert process is not None, "it was started"
            process.join()
            reason, process = f"its process ended with exit code {process.exitcode}", None
        report((item, time.monotonic() - start, reason))
    if process is not None:
        ours.send(None)
        process.join()


def _work(act: Callable[[Any], None], connection: Connection) -> None:
    for item in iter(connection.recv, None):
        try:
            act(item)
            reason = ""
        except Exception as failure:
            reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
        connection.send(reason)
