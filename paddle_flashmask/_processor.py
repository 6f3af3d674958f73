"""What Linux says of the processor."""

from __future__ import annotations

from pathlib import Path


def processor_fields() -> dict[str, str]:
    """``/proc/cpuinfo`` of the first processor by name; nothing where there is no such file."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return {}
    first = info.read_text().split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in first if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}
