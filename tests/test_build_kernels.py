"""What scripts/build_kernels.py compiles again, and that it looks at what was compiled before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import build_kernels
import pytest

COMPILER = """#!/bin/sh
echo "$0 $@" >> "{calls}"
echo "ptxas info: Compiling entry function 'kernel'"
echo "{spilled} bytes spill stores"
for last; do :; done
echo object > "$last"
exit {status}
"""


@pytest.fixture
def compile_with(tmp_path: Path) -> Callable[..., list[Path]]:
    """Compile one source by a made-up compiler; spills raise."""
    source = tmp_path / "kernel.cu"
    source.write_text("")

    def compile_with(
        name: str = "nvcc", *, spilled: int = 0, status: int = 0, flag: str = "-O3"
    ) -> list[Path]:
        compiler = tmp_path / name
        compiler.write_text(COMPILER.format(calls=tmp_path / "calls", spilled=spilled, status=status))
        compiler.chmod(0o755)

        def inspect(source: Path, log: str) -> None:
            found = [size for _, size in build_kernels.SPILL.findall(log) if int(size)]
            if found:
                raise build_kernels.SpillError(f"{source.name}: {found}")

        return build_kernels.compile_changed(
            [source], [], tmp_path / "objects", lambda _: [str(compiler), flag], jobs=1, inspect=inspect
        )

    return compile_with


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text().splitlines())


def test_what_is_up_to_date_is_left_alone(compile_with: Callable[..., list[Path]], tmp_path: Path) -> None:
    [built] = compile_with()
    assert built.read_text() == "object\n"
    assert compile_with() == [built]
    assert calls(tmp_path) == 1
    os.utime(tmp_path / "kernel.cu", ns=(0, built.stat().st_mtime_ns + 10**9))
    compile_with()
    assert calls(tmp_path) == 2


@pytest.mark.parametrize("change", [{"flag": "-O1"}, {"name": "other"}])
def test_another_command_compiles_again(
    compile_with: Callable[..., list[Path]], tmp_path: Path, change: dict[str, str]
) -> None:
    compile_with()
    compile_with(**change)
    assert calls(tmp_path) == 2


def test_spills_are_found_in_what_was_compiled_before(
    compile_with: Callable[..., list[Path]], tmp_path: Path
) -> None:
    for _ in range(2):
        with pytest.raises(build_kernels.SpillError):
            compile_with(spilled=8)
    assert calls(tmp_path) == 1
    [log] = (tmp_path / "objects").glob("*.log")
    log.write_text("")
    with pytest.raises(build_kernels.SpillError):
        compile_with(spilled=8)
    assert calls(tmp_path) == 2


def test_a_compiler_that_fails_leaves_no_object(
    compile_with: Callable[..., list[Path]], tmp_path: Path
) -> None:
    compile_with()
    with pytest.raises(build_kernels.subprocess.CalledProcessError):
        compile_with(status=1, flag="-O1")
    compile_with(flag="-O1")
    assert calls(tmp_path) == 3
