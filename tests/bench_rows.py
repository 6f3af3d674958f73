"""Where made-up rows of measurements come from."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts" / "bench"))

from cells import Run

RUN = Run("2026-01-01T00:00:00Z", "sm90", "abc", "123", "NVIDIA H200", "1.0", "2.11", "python x.py")
PROVENANCE = {"card": "a card", "sources": "abc", "commit": "1", "kernels": "sm90", "driver": "1"}
PROVENANCE |= {"torch": "2", "started": "2026-01-01", "command": "python x.py"}
