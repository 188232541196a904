"""Real releases for tests: one subprocess a release, started when the first test asks for it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for ``import oracle``; pytest's importlib mode adds nothing

from programs import rows_of  # noqa: E402


@functools.cache
def run_on(version: str) -> dict[str, Any]:
    """Job name to result of everything in ``real/serve.py`` on one release; skips without it."""
    return {result["job"]: result for result in rows_of(version, "real/serve.py")}


@pytest.fixture(scope="session")
def on_release() -> Callable[[str], dict[str, Any]]:
    """Results by release; see ``run_on``."""
    return run_on
