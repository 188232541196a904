"""SGLang's own plugin door: the hooks come in by it, and a failure ends the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import fetched

from hicache_guard import checkouts
from hicache_guard.repro import trees

HERE = Path(__file__).parent

LOAD = """
from sglang.srt.plugins import load_plugins
load_plugins()
from hicache_guard.adapters.hooks import hooks, running_release
states = {hook.status.value for hook in hooks(running_release())}
print(sorted(states))
"""


def _load(version: str, mode: str, code: str = LOAD) -> subprocess.CompletedProcess[str]:
    environment = checkouts.environment(fetched(version))
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**environment, "HICACHE_GUARD": mode},
        capture_output=True,
        text=True,
    )


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("mode", "states"), [("enforce", "['applied']"), ("off", "['not installed']")]
)
def test_plugin_installs_every_hook_in_the_mode_asked_for(mode: str, states: str) -> None:
    done = _load("0.5.23", mode)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == states


@pytest.mark.sglang
def test_plugin_that_cannot_install_ends_the_process() -> None:
    """SGLang swallows plugin errors. Mutation: raise instead of SystemExit, and this goes on."""
    done = _load("0.5.23", "shout")
    assert done.returncode != 0
    assert "unknown guard mode 'shout'" in done.stderr
    assert "Traceback" not in done.stderr


MOVED = """
import sglang.srt.mem_cache.allocator.swa as swa
del swa.SWATokenToKVPoolAllocator.free_swa
import hicache_guard
from hicache_guard.core.errors import UnguardedError
for mode in ("enforce", "strict"):
    try:
        hicache_guard.install(mode)
    except UnguardedError as error:
        print(mode, "refused:", error)
vars_before = dict(vars(swa.SWATokenToKVPoolAllocator))
hicache_guard.install("observe")
print("observe went on")
hicache_guard.uninstall()
"""


@pytest.mark.sglang
def test_missing_seam_refuses_in_enforce_and_strict_only() -> None:
    done = _load("0.5.23", "off", MOVED)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    assert lines[0].startswith("enforce refused:")
    assert "SWATokenToKVPoolAllocator.free_swa" in lines[0]
    assert lines[1].startswith("strict refused:")
    assert lines[2] == "observe went on"


# ---------------------------------------------------------------- spawned, as a scheduler is


def _spawned(tree: Path, mode: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", str(HERE / "real" / "spawned.py")],
        env={**checkouts.environment(tree), "HICACHE_GUARD": mode, **more},
        capture_output=True,
        text=True,
    )


def _without_free_swa(place: Path) -> Path:
    """0.5.23 by links, but for one file, in which a method that must be hooked has moved."""
    subprocess.run(["cp", "-rs", str(fetched("0.5.23").resolve()), str(place)], check=True)
    file = place / "sglang/srt/mem_cache/allocator/swa.py"
    text = file.read_text()
    file.unlink()
    file.write_text(text.replace("def free_swa(", "def free_window("))
    return place


@pytest.mark.sglang
@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_spawned_process_is_guarded_by_the_plugin(version: str) -> None:
    done = _spawned(fetched(version), "strict")
    assert done.stdout.splitlines()[-4:] == [
        "plugins loaded", "guarded", "GuardViolation double-free", "exit code 0",
    ], done.stderr[-2000:]  # fmt: skip


@pytest.mark.sglang
def test_spawned_process_with_a_missing_hook_does_not_start(tmp_path: Path) -> None:
    """SGLang would go on. Mutation seen: UnguardedError let through ``load`` fails this."""
    done = _spawned(_without_free_swa(tmp_path / "tree"), "enforce")
    assert done.stdout.splitlines() == ["exit code 1"]
    lines = [line for line in done.stderr.splitlines() if "hicache-guard" in line]
    assert len(lines) == 1, done.stderr[-2000:]
    assert "SWATokenToKVPoolAllocator.free_swa" in lines[0]
    assert "hicache-guard doctor" in lines[0]
    assert "HICACHE_GUARD=observe" in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.sglang
@pytest.mark.parametrize("mode", ["strict", "observe"])
def test_unknown_release_goes_on_in_observe_only(mode: str, tmp_path: Path) -> None:
    """Observe never stops a server. Mutation seen: refusing whatever the mode fails this."""
    place = tmp_path / "tree"
    subprocess.run(["cp", "-rs", str(fetched("0.5.23").resolve()), str(place)], check=True)
    file = place / "sglang/_version.py"
    text = file.read_text()
    file.unlink()
    file.write_text(text.replace("0.5.23", "0.5.99"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from sglang.srt.plugins import load_plugins\n"
         "load_plugins()\nprint('went on')"],
        env={**checkouts.environment(place), "HICACHE_GUARD": mode},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert (done.returncode == 0) == (mode == "observe"), done.stderr[-2000:]
    assert ("went on" in done.stdout) == (mode == "observe")
    assert len([line for line in done.stderr.splitlines() if "0.5.99" in line]) == 1
    assert "Traceback" not in done.stderr


REPLACED = """
from sglang.srt.plugins import load_plugins
load_plugins()
from hicache_guard.repro.pools import allocator_classes, build
allocator, _ = allocator_classes()
allocator.free_swa = lambda self, free_index: None
build()
print("built")
"""


@pytest.mark.sglang
@pytest.mark.parametrize("mode", ["strict", "observe"])
def test_hook_that_another_plugin_replaced_is_missed_when_an_allocator_is_built(mode: str) -> None:
    """Mutation seen: no ``require_complete`` in ``attach`` fails this."""
    done = _load("0.5.23", mode, REPLACED)
    told = [line for line in done.stderr.splitlines() if "1 hook is not in place" in line]
    assert len(told) == 1, done.stderr[-2000:]
    assert "SWATokenToKVPoolAllocator.free_swa" in told[0]
    assert "Traceback" not in done.stderr
    assert ("built" in done.stdout) == (mode == "observe")
    assert (done.returncode == 0) == (mode == "observe")


# ---------------------------------------------------------------- doctor


def _doctor(*arguments: str, **more: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hicache_guard.cli.main", "doctor", "--json", *arguments],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _ways(report: dict[str, Any]) -> set[tuple[str, str | None]]:
    return {(hook["status"], hook["route"]) for hook in report["hooks"]}


@pytest.mark.sglang
def test_doctor_says_how_each_hook_came_in(tmp_path: Path) -> None:
    fetched("0.5.23")
    status, report = _doctor("--release", "0.5.23")
    assert status == 0
    assert _ways(report) == {("applied", "plugin"), ("not needed", None)}
    assert report["plugin"] == ""

    status, report = _doctor("--release", "0.5.23", SGLANG_PLUGINS="other")
    assert status == 1
    assert _ways(report) == {("missing", None), ("not needed", None)}
    assert "SGLANG_PLUGINS=other leaves it out" in report["plugin"]

    broken = _without_free_swa(tmp_path / "tree")
    status, report = _doctor(**checkouts.environment(broken))
    assert status == 1
    gone = [hook for hook in report["hooks"] if hook["detail"]]
    assert [(hook["method"], hook["status"]) for hook in gone] == [("free_swa", "missing")]
    assert "free_swa" in report["error"]

    with trees.tree("0.5.23", "patch") as patched:
        status, report = _doctor(SGLANG_PLUGINS="other", **checkouts.environment(patched))
    assert status == 0
    assert _ways(report) == {("applied", "patch"), ("not needed", None)}
    assert report["plugin"] == "", "nothing is to be done"


@pytest.mark.sglang
@pytest.mark.parametrize(("layout", "plugins"), [("wheel", ""), ("checkout", "other")])
def test_doctor_lists_the_hooks_of_a_patched_tree_that_lacks_one(layout: str, plugins: str) -> None:
    """A checkout's decorations are seen before its plugins. Mutation seen: no second run."""
    fetched("0.5.23")
    with trees.tree("0.5.23", "patch") as patched:
        if layout == "checkout":
            (patched / "sglang/_version.py").unlink()
        file = patched / "sglang/srt/mem_cache/allocator/swa.py"
        file.write_text(file.read_text().replace("def free_swa(", "def free_window("))
        status, report = _doctor(SGLANG_PLUGINS=plugins, **checkouts.environment(patched))
    assert status == 1
    missing = [hook["method"] for hook in report["hooks"] if hook["status"] == "missing"]
    assert missing == ["free_swa"]
    assert ("applied", "patch") in _ways(report)
    assert report["mode"] == "strict"
    assert "SWATokenToKVPoolAllocator.free_swa" in report["error"]
