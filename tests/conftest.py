"""Real releases for tests: one subprocess a release, started when the first test asks for it."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
gc.set_threshold(100_000, 20, 50)  # syntax trees are millions of objects without cycles
sys.path.insert(0, str(HERE))  # for ``import oracle``; pytest's importlib mode adds nothing

from programs import rows_of  # noqa: E402

#: Files that take a minute and more, the longest first: begun late, one would run alone at the end.
LONG = (
    "test_real_tree_machine", "test_catalogue", "test_patch_cli", "test_audit_embedded",
    "test_nodes_rehearsal",
    "test_real_engine", "test_patch_transaction", "test_core_compiled", "test_embedded",
    "test_kernels_stream", "test_kernels_translate", "test_plugin", "test_backports",
    "test_patch_releases", "test_real_pseudo_hits", "test_real_machine", "test_kernels_window",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first; needs ``--no-loadscope-reorder``, or the most tests come first."""
    place = {name: index for index, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


@functools.cache
def run_on(version: str) -> dict[str, Any]:
    """Job name to result of everything in ``real/serve.py`` on one release; skips without it."""
    return {result["job"]: result for result in rows_of(version, "real/serve.py")}


@pytest.fixture(scope="session")
def on_release() -> Callable[[str], dict[str, Any]]:
    """Results by release; see ``run_on``."""
    return run_on
