"""SGLang's own plugin door: the hooks come in by it, and a failure ends the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hicache_guard import checkouts

LOAD = """
from sglang.srt.plugins import load_plugins
load_plugins()
from hicache_guard.adapters.hooks import hooks, running_release
states = {hook.status.value for hook in hooks(running_release())}
print(sorted(states))
"""


def _load(version: str, mode: str, code: str = LOAD) -> subprocess.CompletedProcess[str]:
    if not checkouts.is_fetched(version):
        pytest.skip(f"SGLang {version} is not fetched; run hicache-guard releases fetch {version}")
    environment = checkouts.environment(checkouts.require(version))
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
