"""Our names stay ours: what an install makes importable, and what the repository root shadows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _python(code: str, *, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheel, built as pip builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [sys.executable, *command, "--wheel-dir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_wheel_holds_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.split("/")[0] for name in archive.namelist()}
        files = set(archive.namelist())
    assert {name for name in names if not name.endswith(".dist-info")} == {"hicache_guard"}
    for folder in ("core", "adapters", "cli", "repro", "patches"):
        assert f"hicache_guard/{folder}/__init__.py" in files
    assert "hicache_guard/py.typed" in files
    assert "hicache_guard/patches/fingerprints.json" in files
    assert "hicache_guard/dashboards/grafana.json" in files
    assert "hicache_guard/topologies/4p2d.toml" in files
    assert "hicache_guard/topologies/models/deepseek-v4-pro.toml" in files
    assert "hicache_guard/nodes/templates/run.sh.j2" in files


def test_wheel_install_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import hicache_guard.repro.cases as c; print(c.__file__)"
    done = _python(code, cwd=tmp_path, path=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "site") in done.stdout


@pytest.mark.parametrize("compiler", [None, "/bin/false"])
def test_wheel_without_a_compiler_has_the_torch_code_only(
    compiler: str | None, tmp_path: Path
) -> None:
    """The extension is optional: where it cannot be built the rest installs, and says so."""
    if compiler is None and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "*.so", "tests")
    shutil.copytree(ROOT, tree, ignore=ignored)
    environment = {**os.environ, **({} if compiler is None else {"CC": compiler})}
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [sys.executable, *command, "--wheel-dir", str(tmp_path), str(tree)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        built = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(tmp_path / "site")
    assert len(built) == (2 if compiler is None else 0)
    # An editable install of ours would answer for what the wheel lacks.
    code = (
        "import sys; sys.meta_path[:] = [m for m in sys.meta_path if 'ditable' not in repr(m)]; "
        "import hicache_guard.core.compiled as c; print(c.__file__, c.why_not())"
    )
    done = _python(code, cwd=tmp_path, path=str(tmp_path / "site"))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "site") in done.stdout
    assert ("not built" in done.stdout) == (compiler is not None)


def test_editable_install_finds_the_top_level_folders() -> None:
    code = "import hicache_guard.repro, hicache_guard.patches; print(hicache_guard.repro.__file__)"
    done = _python(code, cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()


def test_root_does_not_shadow_the_kernels_package(tmp_path: Path) -> None:
    """A package called ``kernels``, as PyPI has one, is found before our folder of that name."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("HERE = 'from PyPI'\n")
    code = "import kernels; print(kernels.HERE)"
    done = _python(code, cwd=ROOT, path=str(tmp_path / "site"))
    assert done.stdout.strip() == "from PyPI", done.stderr


def test_kernels_folder_gives_nothing_under_that_name() -> None:
    """Without the package from PyPI, nothing of ours is importable as ``kernels``."""
    code = (
        "import kernels, importlib.util; "
        "assert kernels.__version__ == '0' and kernels.__path__ == []; "
        "assert importlib.util.find_spec('kernels.translate') is None"
    )
    done = _python(code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.sglang
def test_transformers_and_sglang_import_from_the_root() -> None:
    from hicache_guard import checkouts

    if not checkouts.is_fetched("0.5.23"):
        pytest.skip(
            "SGLang 0.5.23 is not fetched; run scripts/test or hicache-guard releases fetch"
        )
    code = (
        "import transformers; from transformers.utils import is_kernels_available as there; "
        "assert not there(), 'our folder passes for the kernels package'; "
        "import sglang; print(sglang.__file__)"
    )
    done = _python(code, cwd=ROOT, path=str(checkouts.require("0.5.23")))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "0.5.23" in done.stdout
