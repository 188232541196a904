"""Real SGLang releases on this machine: fetched from PyPI as wheels and unpacked as checkouts.

A wheel holds the tree of a checkout (``sglang/…``); nothing of it is installed. A release is
fetched wholly or not at all: it is unpacked beside its place and moved there at the end.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from hicache_guard.core.errors import ConfigError

HOME_VAR = "HICACHE_GUARD_HOME"

#: Releases that the catalogue is run on; each is described in ``adapters.releases``.
SUPPORTED = (
    "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1",
    "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip


def home() -> Path:
    """Where fetched releases lie: ``$HICACHE_GUARD_HOME``, or the user's cache folder."""
    chosen = os.environ.get(HOME_VAR)
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hicache-guard"


def place_of(version: str) -> Path:
    """Where ``version`` lies, or would. Raises ConfigError for a release we do not support."""
    if version not in SUPPORTED:
        raise ConfigError(
            f"SGLang {version!r} is not supported; choose one of {', '.join(SUPPORTED)}"
        )
    return home() / "releases" / version


def is_fetched(version: str) -> bool:
    return (place_of(version) / "sglang" / "version.py").is_file()


def require(version: str) -> Path:
    """The tree of a fetched release. Raises ConfigError where it is not here."""
    place = place_of(version)
    if not is_fetched(version):
        raise ConfigError(
            f"SGLang {version} is not on this machine; run `hicache-guard releases fetch {version}`"
        )
    return place


def fetch(version: str, say: Callable[[str], None] = lambda text: None) -> Path:
    """Make sure that ``version`` is here; ``say`` hears what is being done. Idempotent."""
    place = place_of(version)
    if is_fetched(version):
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {place.parent} ({error.strerror}); "
            f"set {HOME_VAR} to a writable folder"
        ) from None
    with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=place.parent) as scratch:
        say(f"fetching SGLang {version} from PyPI")
        wheel = _download(version, Path(scratch) / "wheel")
        say(f"unpacking SGLang {version}")
        tree = Path(scratch) / "tree"
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(tree)
        except (zipfile.BadZipFile, OSError) as error:
            raise ConfigError(f"cannot unpack SGLang {version}: {error}") from None
        try:
            tree.rename(place)
        except OSError:
            if not is_fetched(version):  # else another process was faster, and its copy is as good
                shutil.rmtree(place, ignore_errors=True)
                tree.rename(place)
    return place


#: What pip says of a network that is not there, before "No matching distribution found".
_UNREACHABLE = ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "Retrying (Retry")


def _download(version: str, folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check",
        "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"sglang=={version}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = done.stderr.strip() or "no wheel came"
        if any(sign in errors for sign in _UNREACHABLE):
            raise ConfigError(
                f"cannot fetch SGLang {version}: PyPI is not reachable from here; copy "
                f"{place_of(version)} from a machine where `hicache-guard releases fetch` worked"
            )
        raise ConfigError(f"cannot fetch SGLang {version} from PyPI: {errors.splitlines()[-1]}")
    return wheels[0]


def environment(tree: Path) -> dict[str, str]:
    """The environment in which a subprocess runs the SGLang unpacked at ``tree`` on a CPU.

    The caller's ``SGLANG_…`` and ``HICACHE_GUARD`` settings are left out: an outcome is stated for
    a release's defaults.
    """
    keep = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SGLANG_") and name != "HICACHE_GUARD"
    }
    keep["PYTHONPATH"] = str(tree)
    keep["PYTHONDONTWRITEBYTECODE"] = "1"
    keep["PYTHONWARNINGS"] = "ignore"
    keep["HF_HUB_OFFLINE"] = "1"
    # Up to 0.5.21 page allocation is a Triton kernel; interpreted, it runs on a CPU.
    keep["TRITON_INTERPRET"] = "1"
    return keep
