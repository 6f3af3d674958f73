"""Runs cases of the kernel benchmark: makes implementations ready, checks them, times them, keeps rows."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from cells import (
    EQUAL_DOCUMENTS,
    LONG_DOCUMENTS,
    Case,
    Row,
    append_rows,
    batched,
    deterministic,
    idle_indices,
    is_done,
    masking_cases,
)
from implementations import PEERS, Data, Job, batched_job, idle_indices_job, own_job
from kernel_calls import CudaLibrary
from limits import time_limit
from measure import Clock, Reference, card_and_driver, check, reference_heads
from provenance import make_run, versions

from paddle_flashmask.masks import ColumnMask

# Medians of six runs of packed and batched documents have differed by 2 % from one time to the next.
SEARCH_SECONDS = 1.0


@dataclass(frozen=True)
class Outcome:
    """How an implementation of one case came through its check."""

    job: Job | None  # None: it failed
    reason: str
    error: float


class Bench:
    """Measures cases on the current device and appends their rows to the CSV file."""

    def __init__(self, arguments: argparse.Namespace, command: str, earlier: list[Row]):
        self.arguments = arguments
        self.earlier = earlier
        self.binary = CudaLibrary(arguments.binary, arguments.kernels)
        self.clock = Clock(arguments.rounds)
        card, driver = card_and_driver()
        self.run = make_run(arguments.kernels, card, driver, versions(), command, arguments.commit)
        self.peers = []
        for name in arguments.peers:
            missing = PEERS[name].missing()
            if missing is None:
                self.peers.append(name)
            else:
                print(f"{name} is left out: {missing}")
        self.data: Data | None = None

    def implementations(self, case: Case, direction: str) -> list[str]:
        """Names of what runs this case in this direction, ours first."""
        ours = self.arguments.kernels
        names = [ours]
        if case.mask == EQUAL_DOCUMENTS:
            return [*names, batched(ours)]
        if self.arguments.bars and case in [other for _, other in masking_cases(case.head_dim)]:
            names.append(idle_indices(ours))
        if self.arguments.deterministic and direction == "backward" and case.mask != LONG_DOCUMENTS:
            names.append(deterministic(ours))
        return names + [name for name in self.peers if case.mask in PEERS[name].masks]

    def is_measured(self, case: Case, direction: str) -> bool:
        """Whether an earlier run has all of this case and direction."""
        names = self.implementations(case, direction)
        return is_done(self.earlier, self.run, case, direction, names, self.seconds(case))

    def seconds(self, case: Case) -> float:
        """How long each implementation of a case is timed: longer where a bar is a few percent wide."""
        return max(self.arguments.seconds, SEARCH_SECONDS if case.mask == EQUAL_DOCUMENTS else 0.0)

    def left(self, case: Case, direction: str) -> list[str]:
        """Names of what is run; of what has been measured (causal, for others to be judged by) ours only."""
        names = self.implementations(case, direction)
        return names[:1] if self.is_measured(case, direction) else names

    def measure(self, case: Case, directions: list[str]) -> None:
        """Check and time everything that runs a case; append its rows and print a line per direction."""
        if self.data is None or not self.data.serves(case):
            self.data = None  # before the next one is made
            self.data = Data(case)
        mask = case.build_mask()
        moments = [time.monotonic()]
        reference = reference_heads(self.data.tensors, mask)
        torch.cuda.synchronize()
        moments.append(time.monotonic())
        builders = self._builders(case, mask, self.data)
        names = dict.fromkeys(name for d in directions for name in self.left(case, d))
        outcomes = {name: self._make(builders[name], reference) for name in names}
        del reference
        moments.append(time.monotonic())
        for direction in directions:
            rows = self._time(case, direction, mask, outcomes)
            append_rows(self.arguments.csv, rows)
            print(summary_line(case, direction, rows), flush=True)
        moments.append(time.monotonic())
        took = (f"{end - start:.1f}" for start, end in pairwise(moments))
        print("  took {} s for the reference, {} s to make and check, {} s to time".format(*took), flush=True)
        outcomes.clear()
        if any(name.startswith("flex") for name in self.peers):
            torch._dynamo.reset()  # each mask is compiled anew
        gc.collect()
        torch.cuda.empty_cache()

    def _builders(self, case: Case, mask: ColumnMask, data: Data) -> dict[str, Callable[[], Job]]:
        ours = self.arguments.kernels
        backward = "backward" in self.arguments.directions
        builders: dict[str, Callable[[], Job]] = {
            ours: partial(own_job, self.binary, mask, data, backward=backward),
            deterministic(ours): partial(own_job, self.binary, mask, data, deterministic=True),
            idle_indices(ours): partial(
                idle_indices_job, self.binary, data, causal=case.mask == "causal", backward=backward
            ),
            batched(ours): partial(batched_job, self.binary, data),
        }
        peers = {name: partial(PEERS[name].job, case, data, backward=backward) for name in self.peers}
        return builders | peers

    def _make(self, build: Callable[[], Job], reference: Reference) -> Outcome:
        """Make a job ready and check its results. Whatever is raised is this implementation's result."""
        try:
            with time_limit():
                job = build()
            error = check(job.results, reference)
        except Exception as failure:
            torch.cuda.synchronize()  # raises where the device itself is lost: the run ends
            reason = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
            return Outcome(None, reason, float("nan"))
        job.results.clear()
        return Outcome(job, "", error)

    def _time(self, case: Case, direction: str, mask: ColumnMask, outcomes: dict[str, Outcome]) -> list[Row]:
        here = {name: outcomes[name] for name in self.left(case, direction)}
        jobs = {name: out.job.directions[direction] for name, out in here.items() if out.job is not None}
        timings, matmul_tflops = self.clock.take_turns(jobs, self.seconds(case)) if jobs else ({}, 0.0)
        rho, area = mask.block_sparsity(128), mask.visible_area()
        rows = []
        for name, outcome in here.items():
            common = {
                "run": self.run,
                "case": case,
                "direction": direction,
                "implementation": name,
                "status": "failed" if outcome.job is None else "ok",
                "reason": outcome.reason,
                "rho": rho,
                "visible_area": area,
                "seconds": self.seconds(case),
            }
            if outcome.job is None:
                rows.append(Row(**common))
                continue
            timing = timings[name]
            rows.append(
                Row(
                    **common,
                    warmups=timing.warmups,
                    repetitions=len(timing.samples),
                    milliseconds=timing.median,
                    fastest=min(timing.samples),
                    slowest=max(timing.samples),
                    tflops=case.flops(direction, rho) / timing.median / 1e9,
                    matmul_tflops=matmul_tflops,
                    error=outcome.error,
                    mask_bytes=outcome.job.mask_bytes,
                    workspace_bytes=outcome.job.workspace_bytes.get(direction, 0),
                )
            )
        return rows


def summary_line(case: Case, direction: str, rows: list[Row]) -> str:
    """One line for a case that has just been measured."""
    parts = [
        f"{row.implementation} {row.milliseconds:.2f} ms {row.tflops:.0f}"
        if row.ok
        else f"{row.implementation} FAILED: {row.reason[:60]}"
        for row in rows
    ]
    return f"{case.mask} S={case.seqlen} D={case.head_dim} {direction}: " + " | ".join(parts)
