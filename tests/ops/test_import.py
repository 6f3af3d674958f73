"""What importing the package does, and which Paddle it agrees to run with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import paddle
import pytest

import paddle_flashmask


def run_python(code: str, *, cwd: Path | None = None) -> str:
    """What a fresh interpreter prints; its error output where it fails."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=300, check=False)
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("module", ["paddle_flashmask", "paddle_flashmask.masks"])
def test_importing_masks_does_not_import_paddle(module):
    assert run_python(f"import sys, {module}; print('paddle' in sys.modules)") == "False\n"


def test_masks_work_where_paddle_cannot_be_imported():
    hide = "import sys; sys.modules['paddle'] = None"
    code = f"{hide}; import paddle_flashmask as fm; print(fm.masks.causal(4).shape)"
    assert run_python(code) == "(1, 1, 4, 4)\n"


@pytest.mark.parametrize(
    "first", ["paddle_flashmask.functional", "paddle_flashmask.nn", "paddle_flashmask._ops"]
)
def test_attention_is_the_function_whatever_is_imported_first(first):
    code = f"import {first}; import paddle_flashmask as fm; print(fm.attention.__name__, fm.__version__)"
    assert run_python(code) == f"attention {paddle_flashmask.__version__}\n"


def test_every_name_is_there_and_listed():
    for name in paddle_flashmask.__all__:
        assert getattr(paddle_flashmask, name) is not None
        assert name in dir(paddle_flashmask)
    with pytest.raises(AttributeError, match="module 'paddle_flashmask' has no attribute 'nothing'"):
        _ = paddle_flashmask.nothing


class TestLoading:
    CALL = "import paddle_flashmask; paddle_flashmask.load_operators(); print('loaded')"

    @pytest.fixture
    def copy(self, tmp_path: Path) -> Path:
        """A copy of the package that a fresh interpreter in ``tmp_path`` imports instead."""
        source = Path(paddle_flashmask.__file__).parent
        return shutil.copytree(
            source, tmp_path / "paddle_flashmask", ignore=shutil.ignore_patterns("__pycache__")
        )

    def test_a_copy_loads(self, copy):
        assert run_python(self.CALL, cwd=copy.parent) == "loaded\n"

    def test_another_paddle_is_refused_before_the_library_is_opened(self, copy):
        (copy / "_build_info.py").write_text("PADDLE_BUILD = '9.9.9 (CUDA 99.0)'\n")
        (copy / "_C.so").write_text("opening this would fail in another way")
        error = run_python(self.CALL, cwd=copy.parent).splitlines()[-1]
        assert error.startswith(
            "ImportError: paddle_flashmask was built against Paddle 9.9.9 (CUDA 99.0), "
            f"but this is Paddle {paddle.__version__} (CUDA {paddle.version.cuda()}); run pip install"
        )

    def test_a_package_without_its_library_says_how_to_build_it(self, copy):
        (copy / "_C.so").unlink()
        error = run_python(self.CALL, cwd=copy.parent).splitlines()[-1]
        assert error.startswith("ImportError: paddle_flashmask's operators are not built: no ")
        assert "run pip install" in error

    def test_loading_twice_registers_once(self):
        paddle_flashmask.load_operators()
        paddle_flashmask.load_operators()
