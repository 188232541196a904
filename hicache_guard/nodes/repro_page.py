"""A run on nodes as one HTML page: the verdict, what broke first, and what it rests on.

One self-contained file; it asks the network for nothing and runs no script. All text goes through
the template's escaping, and what comes from servers was made visible before (``findings.visible``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any

import jinja2

#: Verdicts as headlines.
HEADLINES = {
    "healthy": "Healthy: all requests were answered, and what was read again was right.",
    "fault": "Fault: the servers did not do what was asked.",
    "not finished": "Not finished: there is no verdict on these servers.",
    "not tested": "Not tested: nothing came back from the host.",
}
#: In the order in which they stand above each other in the timeline, from below.
_STACK = ("answered", "left", "failed", "lost")
_HIGH = 60


def page(data: Mapping[str, Any]) -> str:
    """The page of a run, from ``Run.data``."""
    return _template().render(
        data=data, headline=HEADLINES[data["verdict"]], bars=_bars(data["timeline"]), high=_HIGH
    )


@cache
def _template() -> jinja2.Template:
    source = resources.files("hicache_guard.nodes").joinpath("templates/repro.html.j2")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["clock"] = _clock
    environment.filters["thousands"] = lambda number: f"{number:,}"
    return environment.from_string(source.read_text(encoding="utf-8"))


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S.%f")[:-3]


def _bars(timeline: Mapping[str, Any]) -> list[tuple[int, float, float, str]]:
    """Column, upper edge, height and outcome of each rectangle."""
    columns = timeline["columns"]
    most = max((sum(column.values()) for column in columns), default=0) or 1
    found = []
    for place, column in enumerate(columns):
        top = float(_HIGH)
        for outcome in _STACK:
            if count := column.get(outcome, 0):
                # What is rare must be seen, too.
                height = max(count / most * _HIGH, 2.0 if outcome in ("failed", "lost") else 0.0)
                top = max(0.0, top - height)
                found.append((place, round(top, 2), round(height, 2), outcome))
    return found
