"""The command line: bad input is one line and exit status 2, with nothing half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from hicache_guard import checkouts
from hicache_guard.core.errors import ConfigError


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "hicache_guard.cli.main", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "nonsense"),
        (["repro", "C99"], "C99"),
        (["repro", "C1", "--mode", "loud"], "loud"),
        (["repro", "C1", "--release", "0.4.0"], "0.4.0"),
        (["repro", "25805-churn", "--requests", "0"], "requests"),
        (["repro", "25805-churn", "--requests", "many"], "requests"),
        (["releases", "fetch"], "--all"),
        (["releases", "fetch", "0.5.12", "../../etc"], "../../etc"),
        (["doctor", "--mode", "loud"], "loud"),
        (["doctor", "--release", "9.9"], "9.9"),
        (["bench", "allocator", "--rounds", "-1"], "rounds"),
        (["bench", "allocator", "--release", "9.9"], "9.9"),
        (["demo", "--release", "9.9"], "9.9"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = _run(*arguments, HICACHE_GUARD_HOME=str(tmp_path))
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("hicache-guard: ")
    assert says in done.stderr
    assert not list(tmp_path.iterdir()), "something was written"


def test_missing_release_says_how_to_get_it(tmp_path: Path) -> None:
    done = _run("repro", "C1", "--release", "0.5.12", HICACHE_GUARD_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "releases fetch 0.5.12" in done.stderr


def test_unwritable_home_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    done = _run("releases", "fetch", "0.5.12", HICACHE_GUARD_HOME=str(blocked))
    assert done.returncode == 2
    assert "HICACHE_GUARD_HOME" in done.stderr


def test_releases_lists_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "releases" / "0.5.13" / "sglang"
    tree.mkdir(parents=True)
    (tree / "version.py").write_text("")
    done = _run("releases", "list", "--json", HICACHE_GUARD_HOME=str(tmp_path))
    here = {row["version"] for row in json.loads(done.stdout) if row["fetched"]}
    assert here == {"0.5.13"}
    monkeypatch.setenv("HICACHE_GUARD_HOME", str(tmp_path))
    assert checkouts.require("0.5.13") == tree.parent
    with pytest.raises(ConfigError, match=r"fetch 0\.5\.12"):
        checkouts.require("0.5.12")


def test_fetch_leaves_nothing_behind_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: without the scratch folder a broken wheel leaves a half-unpacked release."""
    monkeypatch.setenv("HICACHE_GUARD_HOME", str(tmp_path))

    def broken(version: str, folder: Path) -> Path:
        folder.mkdir(parents=True)
        wheel = folder / "sglang.whl"
        wheel.write_bytes(b"PK not a wheel")
        return wheel

    monkeypatch.setattr(checkouts, "_download", broken)
    with pytest.raises(ConfigError, match=r"0\.5\.12"):
        checkouts.fetch("0.5.12")
    assert not checkouts.is_fetched("0.5.12")
    assert not list((tmp_path / "releases").iterdir())


def test_sglang_settings_of_the_caller_do_not_leak_into_a_reproduction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_INVARIANT_CHECK", "2")
    monkeypatch.setenv("HICACHE_GUARD", "strict")
    environment = checkouts.environment(Path("/somewhere"))
    assert "SGLANG_INVARIANT_CHECK" not in environment
    assert "HICACHE_GUARD" not in environment
    assert environment["PYTHONPATH"] == "/somewhere"


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interruption_is_one_line_and_leaves_no_child(sign: int, tmp_path: Path) -> None:
    """Seen to fail: the child's traceback was all that was said, and it outlived its parent.

    So it did where ``main.run`` left SIGTERM as it is.
    """
    pid = tmp_path / "pid"
    endless = (
        "import os, pathlib, time;"
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    script = (
        "import sys; from hicache_guard.cli import main, repro; from hicache_guard import children;"
        f"repro._program = lambda *a: children.run([sys.executable, '-c', {endless!r}]).returncode;"
        "sys.argv = ['hicache-guard', 'repro', '25805']; main.run()"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", script], stderr=subprocess.PIPE, text=True
    )
    for _ in range(600):
        if pid.exists() and pid.read_text():
            break
        time.sleep(0.05)
    process.send_signal(sign)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors.splitlines()) == (130, ["hicache-guard: interrupted"])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_unreachable_index_is_said(tmp_path: Path) -> None:
    """Seen to fail: pip's last words are "No matching distribution found"."""
    done = _run(
        "releases", "fetch", "0.5.12", HICACHE_GUARD_HOME=str(tmp_path), PIP_NO_INDEX="0",
        PIP_INDEX_URL="https://127.0.0.1:9/simple", PIP_FIND_LINKS="", PIP_RETRIES="1",
    )  # fmt: skip
    assert done.returncode == 2
    assert "PyPI is not reachable" in done.stderr
    assert list((tmp_path / "releases").iterdir()) == []


def test_doctor_without_sglang_says_what_there_is(tmp_path: Path) -> None:
    done = _run("doctor", PYTHONPATH="")
    assert done.returncode == 2
    assert "checks on a CPU" in done.stdout
    assert done.stderr.startswith("hicache-guard: no SGLang to import")


def test_version_is_that_of_the_package() -> None:
    for argument in ("version", "--version"):
        assert _run(argument).stdout.strip() == metadata.version("hicache-guard")


def test_that_nobody_reads_is_no_fault_of_a_server() -> None:
    """Exit status 1 is a fault. Mutation: rich's own way out, which is 1."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hicache_guard.cli.main", "releases", "list"],
        stdout=writer,
        stderr=subprocess.PIPE,
    )
    os.close(writer)
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr
