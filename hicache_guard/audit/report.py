"""An audit as plain data: what ``--json`` prints, and what the page and the summary show.

Format 1. Lengths are in tokens, times in seconds, ``delta`` is warm less cold log-probability.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hicache_guard import __version__
from hicache_guard.audit import judge
from hicache_guard.audit.audit import COLD, Audit, Result
from hicache_guard.audit.judge import Comparison
from hicache_guard.audit.play import OURS
from hicache_guard.audit.script import program
from hicache_guard.core.matches import MatchRecord, read_trace
from hicache_guard.core.occupancy import states_of

FORMAT = 1
#: Most matches of a trace that are told.
MOST = 2000
#: Whose a page is, by its letter in a trace.
OWNERS = {"f": "free", "l": "live", "t": "tree"}


def as_data(audit: Audit, command: str) -> dict[str, Any]:
    """All of an audit that anybody needs to see; of prompts only the smallest that show a fault.

    ``command`` is how it was called.
    """
    requests, tokens = audit.asked
    found: dict[str, Any] = {
        "format": FORMAT,
        "hicache_guard": __version__,
        "started": datetime.fromtimestamp(audit.started, UTC).isoformat(timespec="seconds"),
        "url": audit.url,
        "command": command,
        "seed": audit.seed,
        "verdict": audit.verdict.value,
        "broken": audit.broken,
        "seconds": round(audit.seconds, 3),
        "requests": requests,
        "tokens": tokens,
        "engine": audit.facts.rows(),
        "noise": None,
        "scenarios": [_scenario(result, audit) for result in audit.results],
    }
    if audit.noise is not None:
        found["noise"] = {
            "samples": [_finite(sample) for sample in audit.noise.samples],
            "limit": audit.noise.limit,
            "plausible": audit.noise.plausible,
            "false_alarms": judge.FALSE_ALARMS,
            "comparisons": audit.noise.comparisons,
        }
    return found


def traced(files: Iterable[Path]) -> dict[str, Any]:
    """What a guarded server's traces say of the audit's own matches, for ``data["trace"]``."""
    matches: dict[tuple[Any, ...], dict[str, Any]] = {}
    ownership: list[_Pages] = []
    for file in files:
        seen: list[_Pages] = []
        for record in read_trace(file):
            with suppress(LookupError, TypeError, ValueError, AttributeError):  # not what we write
                if record["kind"] == "pages":
                    seen.append((float(record["time"]), [*_pages(record)]))
                elif record["kind"] == "match" and record["request"].startswith(OURS):
                    match = _match(MatchRecord.from_trace(record))
                    # The ranks of a server that computes in parts all tell the same matches.
                    matches.setdefault((*map(str, [*match.values()][1:]),), match)
        ownership = ownership or seen
    told = sorted(matches.values(), key=lambda match: float(match["time"]))[-MOST:]
    since = told[0]["time"] if told else math.inf
    return {"matches": told, "ownership": [*_changes(ownership, since)]}


def _match(match: MatchRecord) -> dict[str, Any]:
    return {
        "time": match.time,
        "request": match.request,
        "matched": match.claimed,
        "proved": min(match.proved.values(), default=0),
        "by_group": dict(match.proved),
        "clipped": match.clip,
    }


#: When a look was taken at the pages; of each the pool, its number, and whose it was.
_Pages = tuple[float, list[tuple[str, int, str]]]


def _pages(record: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
    for side in ("full", "window"):
        step = int(record[side]["step"])
        for place, letter in enumerate(states_of(record[side]["pages"])):
            yield side, 1 + place * step, letter


def _changes(looks: Iterable[_Pages], since: float) -> Iterator[dict[str, Any]]:
    """Each page when it is first seen, and when it changed hands."""
    known: dict[tuple[str, int], str] = {}
    for when, pages in looks:
        for side, page, letter in pages if when >= since else ():
            if known.get((side, page)) != letter:
                known[side, page] = letter
                yield {"time": when, "side": side, "page": page, "state": OWNERS[letter]}


def _scenario(result: Result, audit: Audit) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": result.name,
        "purpose": result.purpose,
        "verdict": result.judgement.verdict.value,
        "why": result.judgement.why,
        "limit": result.limit,
        "cold": result.name in COLD,
        "seconds": round(result.seconds, 3),
        "requests": len(result.answers),
        "hits": sum(answer.cached > 0 for answer in result.answers),
        "due": sum(answer.ask.due > 0 for answer in result.answers),
        "cached_tokens": sum(answer.cached for answer in result.answers),
        "drafts": {
            name: sum(answer.drafts[part] for answer in result.answers)
            for part, name in enumerate(("accepted", "made"))
        },
        "failed": [answer.error for answer in result.answers if answer.error],
        "largest": _finite(max((each.largest for each in result.comparisons), default=0.0)),
        "mean": _finite(
            sum(each.mean for each in result.comparisons) / max(1, len(result.comparisons))
        ),
        "divergence": _finite(
            max((max(each.divergence, default=0.0) for each in result.comparisons), default=0.0)
        ),
        "comparisons": [_comparison(each) for each in result.comparisons],
        "smallest": None,
    }
    if result.smallest is not None:
        name = f"{result.name}-{result.smallest.seed}.py"
        found["smallest"] = {
            "name": name,
            "requests": sum(1 for _ in result.smallest.asks()),
            "tokens": result.smallest.prompt_tokens,
            "program": program(
                result.smallest, name=name, url=audit.url, limit=result.limit,
                title=f"{result.name}: {result.judgement.why}",
            ),
        }  # fmt: skip
    return found


def _comparison(each: Comparison) -> dict[str, Any]:
    warm = each.warm
    return {
        "request": warm.ask.name,
        "prompt": len(warm.ask.prompt),
        "due": warm.ask.due,
        "cached": warm.cached,
        "cached_from": warm.cached_from,
        "seconds": round(warm.seconds, 4),
        "deltas": [_finite(delta) for delta in each.deltas],
        "unread": list(each.cold.unread),
        "divergence": [_finite(one) for one in each.divergence],
        "flips": [asdict(flip) for flip in each.flips],
        "wavers": list(each.wavers),
    }


def _finite(number: float) -> float:
    """JSON has no infinity; no log-probability is this far from another."""
    return number if math.isfinite(number) else 1e9
