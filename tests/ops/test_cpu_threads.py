"""How many threads the CPU kernel takes through Paddle, whose import sets OMP_NUM_THREADS."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Says how many threads a call may take, then keeps calling until it is told to stop.
CHILD = """
import ctypes, select, sys
import paddle, paddle_flashmask as fm
from paddle_flashmask import _ops

q = paddle.randn([1, 2048, 4, 64])
fm.attention(q, q, q)  # whatever else is started once, is
print(ctypes.CDLL(str(_ops._LIBRARY)).flashmask_cpu_threads(), flush=True)
while not select.select([sys.stdin], [], [], 0.0)[0]:
    fm.attention(q, q, q)
"""

PROCESSORS = len(os.sched_getaffinity(0))


def threads_seen(pid: int, *, enough: int, seconds: float) -> tuple[int, int]:
    """The fewest and the most threads that a process has at any moment, watched until they are ``enough``
    apart (and a little longer, for more), at most for ``seconds``."""
    tasks = Path(f"/proc/{pid}/task")
    counts = [len(list(tasks.iterdir()))]
    end = time.monotonic() + seconds
    settled = time.monotonic() + 0.5
    while time.monotonic() < end and (max(counts) - min(counts) < enough or time.monotonic() < settled):
        counts.append(len(list(tasks.iterdir())))
    return min(counts), max(counts)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, PROCESSORS),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "1", "FLASHMASK_NUM_THREADS": "4"}, 4),
    ],
    ids=str,
)
def test_attention_takes_the_threads_that_the_user_gave_it(variables: dict[str, str], expected: int) -> None:
    ours = ("OMP_NUM_THREADS", "FLASHMASK_NUM_THREADS")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | variables
    command = [sys.executable, "-W", "ignore", "-c", CHILD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout
        assert child.stdout.readline() == f"{expected}\n"
        fewest, most = threads_seen(child.pid, enough=expected - 1, seconds=20)
        child.communicate("\n", timeout=60)
    assert child.returncode == 0
    assert most - fewest == expected - 1
