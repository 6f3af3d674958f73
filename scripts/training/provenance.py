"""Where a page's numbers come from: the lines at its top."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path

from paddle_flashmask._processor import processor_fields

ROOT = Path(__file__).parents[2]


def provenance(command: str) -> str:
    """The command, then date, commit, machine and versions, as Markdown."""
    git = ("git", "-C", str(ROOT))
    changed = " and changes" if _output(*git, "status", "--porcelain", "--untracked-files=no") else ""
    versions = ", ".join(f"{name} {version(name)}" for name in ("paddlepaddle", "paddlenlp"))
    return f"""    {command}

- date: {date.today().isoformat()}; commit: {_output(*git, "rev-parse", "--short", "HEAD")}{changed}
- machine: {_machine()}
- versions: Python {platform.python_version()}, {versions}"""


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _machine() -> str:
    """How many processors this process may use, and their model."""
    fields = processor_fields()
    return (
        f"{len(os.sched_getaffinity(0))} cores, {fields.get('model name', platform.machine())} "
        f"(family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"
    )
