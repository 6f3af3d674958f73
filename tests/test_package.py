"""The package as users install it: a wheel, built from the source distribution, run away from the sources."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import paddle_flashmask

ROOT = Path(__file__).parent.parent

SMALL_CALL = """
import paddle
import paddle_flashmask as fm
from paddle_flashmask.reference import attention_reference

mask = fm.masks.causal_document([40, 3, 30])
q, k, v = (paddle.randn([1, 73, 2, 16]) for _ in range(3))
out = fm.attention(q, k, v, mask=mask)
expected, _ = attention_reference(q.numpy(), k.numpy(), v.numpy(), mask)
assert abs(out.numpy() - expected).max() < 1e-5
print(fm.__file__)
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy of the sources, so that nothing the tree happens to hold goes in by accident."""
    pytest.importorskip("paddle")
    pytest.importorskip("setuptools")
    work = tmp_path_factory.mktemp("package")
    sources = work / "sources"
    ignored = shutil.ignore_patterns(
        ".*", "build", "outputs", "__pycache__", "*.egg-info", "_C.so", "_build_info.py"
    )
    shutil.copytree(ROOT, sources, ignore=ignored)
    code = (
        "import warnings; from setuptools import build_meta; "
        "warnings.filterwarnings('error', '.*`project[.]'); "  # what setuptools deprecates of pyproject.toml
        f"build_meta.build_sdist({str(work)!r})"
    )
    run(sys.executable, "-W", "ignore", "-c", code, cwd=sources)
    (sdist,) = work.glob("*.tar.gz")
    return sdist


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    options = ("-q", "--no-deps", "--no-build-isolation", "--wheel-dir", sdist.parent)
    run(sys.executable, "-m", "pip", "wheel", *options, sdist, cwd=sdist.parent)
    (wheel,) = sdist.parent.glob("*.whl")
    return wheel


def test_the_source_distribution_can_be_built_tested_and_read(sdist):
    """Whole folders, since a test without its helpers is no use; and nothing that a build makes."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("configs", "csrc", "docs", "paddle_flashmask", "requirements", "scripts", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    made = {"_C.so", "_build_info.py"}
    wanted = {
        str(path.relative_to(ROOT))
        for path in files
        if path.name not in made and path.suffix != ".pyc" and not path.name.startswith(".")
    }
    wanted |= {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "pyproject.toml", "setup.py"}
    assert wanted <= names
    assert not [name for name in names if Path(name).name in made]


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"paddle_flashmask"}
    package = ROOT / "paddle_flashmask"
    sources = {str(path.relative_to(ROOT)) for path in package.rglob("*.py")} | {"paddle_flashmask/py.typed"}
    compiled = {"paddle_flashmask/_C.so", "paddle_flashmask/_build_info.py"}
    assert {name for name in names if name.startswith("paddle_flashmask/")} == sources | compiled
    assert not any("cp3" in name for name in names)
    assert wheel.name.startswith(f"paddle_flashmask-{paddle_flashmask.__version__}-")


@pytest.mark.slow
def test_the_wheel_runs(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    printed = run(sys.executable, "-W", "ignore", "-c", SMALL_CALL, cwd=tmp_path)
    assert printed.strip() == str(tmp_path / "paddle_flashmask" / "__init__.py")
