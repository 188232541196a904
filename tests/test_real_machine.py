"""Random legal and illegal operations on real allocators, checked against the plain-Python oracle.

The machine itself is ``real/machine.py``; ``python -P tests/real/machine.py --random`` with a
release on the path looks for new examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RELEASES = ("0.5.12", "0.5.23")


@pytest.mark.sglang
@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(
    "mode", ["observe", "enforce", "strict", "observe, collected", "enforce, collected"]
)
def test_machine(on_release: Callable[[str], Any], version: str, mode: str) -> None:
    """ "Collected" is what runs on a device, and on a CPU without the compiled books."""
    result = on_release(version)[f"machine {mode}"]
    assert not result["error"], result["error"]
    found = result["found"]
    assert not found["failure"], found["failure"]
    seen = found["seen"]
    # Not an empty run: each kind of operation came up, and a good part of them was illegal.
    assert seen["examples"] >= 30
    assert seen["illegal"] >= 20
    assert {"extend", "decode", "tail", "finish", "evict", "tree", "load", "again"} <= set(seen)
    if mode == "strict":
        assert seen["raised"] >= 20
