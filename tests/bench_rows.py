"""Made-up rows of measurements, and where they come from."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

import decode
import inference
from cells import Row, Run

RUN = Run("2026-01-01T00:00:00Z", "sm90", "abc", "123", "NVIDIA H200", "1.0", "2.11", "python x.py")
PROVENANCE = {"card": "a card", "sources": "abc", "commit": "1", "kernels": "sm90", "driver": "1"}
PROVENANCE |= {"torch": "2", "started": "2026-01-01", "command": "python x.py"}


def kernel_row(name: str, milliseconds: float, *, direction: str = "forward", share: float = 0.5) -> Row:
    case = inference.inference_case("document", 8192)
    tflops = case.flops(direction, 0.75) / milliseconds / 1e9
    timing = {"milliseconds": milliseconds, "tflops": tflops, "matmul_tflops": tflops / share}
    return Row(RUN, case, direction, name, "ok", "", rho=0.75, visible_area=1, seconds=1.0, **timing)


def decode_row(shape: decode.Shape, name: str, milliseconds: float | None, **more: str) -> dict[str, str]:
    place = {key: str(value) for key, value in shape._asdict().items()}
    status = decode.FAILED + ": no such kernel" if milliseconds is None else decode.OK
    values = {"implementation": name, "status": status, "milliseconds": str(milliseconds or "")}
    return {**PROVENANCE, **place, "head_dim": "128", "warmups": "10", "repetitions": "50", **values, **more}


def step_row(
    method: str, seconds: float, weight: int, number: int = 0, note: str = "", **others: str
) -> dict[str, str]:
    row = {"task": "sft", "seqlen": "4096", "layers": "2", "method": method, "weight": str(60 * weight)}
    row |= {"status": "failed" if note else "ok", "note": note, "bins": "2", "bin": str(number)}
    row["loss"] = "" if note else "2.5"
    measured = {"seconds": str(seconds), "repetitions": "1", "peak_bytes": str(2**31)}
    return PROVENANCE | row | measured | others
