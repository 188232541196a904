"""What an audit asks fits the server that it asks: any window, page, pool and context.

The bounds are the server's own: SGLang refuses a prompt that does not fit its context or its pool,
and matches whole pages, at most all but one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hicache_guard.audit.facts import LEAST_CONTEXT, LEAST_VOCABULARY, Facts
from hicache_guard.audit.plan import Ask
from hicache_guard.audit.scenarios import SCENARIOS, Scenario

#: What facts.ask says of 0.5.12 with the model mimo: its pool is small beside four windows.
MIMO = {"window": 128, "page": 16, "context": 1008, "full_pool": 1024, "window_pool": 819}


def _facts(**known: Any) -> Facts:
    usual = Facts(
        version="0.5.23", model="m", architecture="A", dtype="float32", window=32, page=1, chunk=0,
        context=4096, vocabulary=1000, full_pool=8192, window_pool=4096, running=8, tree="",
        hierarchical="write_back", host_tokens=16384, speculative="EAGLE", disaggregation="no",
        storage="no", streaming=True, overlap=True, attention="", router="no", parallel="",
    )  # fmt: skip
    return replace(usual, **known)


@st.composite
def _servers(draw: st.DrawFn) -> Facts:
    page = draw(st.sampled_from((1, 2, 16, 64, 256)))
    full = draw(st.integers(LEAST_CONTEXT // page + 2, 4096)) * page
    return _facts(
        page=page,
        window=draw(st.integers(1, 8192)),
        full_pool=full,
        window_pool=draw(st.integers(1, full // page)) * page,
        context=min(draw(st.integers(LEAST_CONTEXT, 1 << 17)), full - 2 * page),
        chunk=draw(st.sampled_from((0, 1, 16, 512, 8192))),
        vocabulary=draw(st.integers(LEAST_VOCABULARY, 1 << 18)),
        running=draw(st.integers(1, 4096)),
        host_tokens=draw(st.integers(0, 2 * full)),
    )


def _lengths(asks: list[Ask]) -> Iterator[tuple[Ask, int]]:
    """Each ask, and how long its prompt is with all that comes before it."""
    known: dict[str, int] = {}
    for ask in asks:
        before = known[ask.after] if ask.after else 0  # what it follows was asked before
        length = before + len(ask.prompt)
        known[ask.name] = length + ask.tokens
        yield ask, length


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(facts=_servers(), seed=st.integers())
@example(facts=_facts(**MIMO), seed=0)
@example(facts=_facts(window=1024, context=2000), seed=0)
def test_a_plan_fits_its_server(scenario: Scenario, facts: Facts, seed: int) -> None:
    """Or the scenario says why it cannot be tried there.

    Mutations: eight of the prompts of a filled pool, however many there are; answers as long as
    they like beside a prompt; turns of a session as long as a window.
    """
    if scenario.needs(facts):
        return
    asks = list(scenario.plan(facts, seed).asks())
    if not asks:  # which the audit says
        assert scenario.name == "resume-points"
        assert facts.window > facts.context // 2
    assert len({ask.name for ask in asks}) == len(asks)
    for ask, length in _lengths(asks):
        assert len(ask.prompt) > 0
        assert ask.tokens > 0
        assert length + ask.tokens + 2 <= facts.context
        assert ask.due < length
        assert ask.due % facts.page == 0 or ask.session
        assert all(0 <= token < facts.vocabulary for token in ask.prompt)


class _Tier:
    """Prefixes of which the least recently used ones make room; a prompt is its first tokens."""

    def __init__(self, room: int, page: int) -> None:
        self.room, self.page = room, page
        self.kept: dict[tuple[int, ...], int] = {}

    def holds(self, key: tuple[int, ...]) -> bool:
        if key in self.kept:
            self.kept[key] = self.kept.pop(key)
        return key in self.kept

    def take(self, key: tuple[int, ...], tokens: int) -> None:
        self.kept[key] = max(-(-tokens // self.page) * self.page, self.kept.pop(key, 0))
        while sum(self.kept.values()) > self.room:
            self.kept.pop(next(iter(self.kept)))


def _served(facts: Facts, scenario: Scenario) -> list[str]:
    """From which tiers something comes back for longer prompts, of a server that writes through."""
    device = _Tier(facts.full_pool, facts.page)
    host = _Tier(facts.host_tokens * facts.window_pool // facts.full_pool, facts.page)
    files: dict[tuple[int, ...], tuple[int, ...]] = {}
    found = []
    for ask in scenario.plan(facts, 0).asks():
        key = ask.prompt[:8]
        if not device.holds(key) and files.get(key) != ask.prompt:
            found += ["host"] if host.holds(key) else ["storage"] if key in files else []
        host.holds(key)
        for tier in (device, host):
            tier.take(key, len(ask.prompt) + ask.tokens)
        files.setdefault(key, ask.prompt)
    return found


@pytest.mark.parametrize(("name", "tier"), [("load-back", "host"), ("storage", "storage")])
@settings(max_examples=60, deadline=None)
@given(
    page=st.sampled_from((1, 16, 64)),
    window=st.integers(16, 4096),
    pages=st.integers(64, 4096),
    windowed=st.floats(0.5, 1),
    ratio=st.floats(3, 4),
)
@example(page=16, window=64, pages=96, windowed=0.8, ratio=3.0)  # what `audit --hicache` starts
def test_a_tier_gives_back_what_it_is_asked_for(
    name: str, tier: str, page: int, window: int, pages: int, windowed: float, ratio: float
) -> None:
    """Expected by two plain caches that forget the least recently used.

    Mutations: so many prompts between that the host, too, has forgotten the old ones (as it was:
    half of the pool more than it holds, and a host of two pools); so few that the device has not.
    """
    full = page * pages
    facts = _facts(
        page=page, window=window, full_pool=full, window_pool=int(windowed * pages) * page,
        context=full - 2 * page, host_tokens=int(ratio * full), storage="file",
    )  # fmt: skip
    scenario = next(one for one in SCENARIOS if one.name == name)
    # Beside prompts of four windows there is no room for more of them in a pool of few windows.
    if scenario.needs(facts) or full < 24 * (window + page) or full < 1024:
        return
    assert _served(facts, scenario)[:1] == [tier]
