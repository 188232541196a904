"""What runs of ``churn_scale`` measured: from lines of JSON to numbers that can be compared.

A line is the head of a run, a slice of one mode (counts since the start), or the death of a mode's
process. A file that ends in the middle, or in the middle of a line, is as good as its whole lines.
A cost is a ratio of CPU seconds, guarded to unguarded, over the slices that both modes served.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hicache_guard.core.errors import ConfigError
from hicache_guard.repro.churn_scale import Scale

Line = dict[str, Any]

#: What is varied for the growth of cost, and the scale of those runs.
POOLS, POOLS_WINDOW, POOLS_LONGEST = (100_000, 1_000_000, 10_000_000), 512, 2048
WINDOWS, WINDOWS_SLOTS, WINDOWS_LONGEST = (128, 1024, 4096), 1_000_000, 8192
#: Runs whose names begin so vary one thing.
POOL, WINDOW = "pool of", "window of"


@dataclass
class Run:
    """One run: how it was made, and its slices by mode, oldest first."""

    head: Line
    slices: dict[str, list[Line]] = field(default_factory=dict)
    died: list[Line] = field(default_factory=list)

    def last(self, mode: str) -> Line | None:
        """All that a mode counted, or None where it has no slice."""
        lines = self.slices.get(mode)
        return lines[-1] if lines else None

    def pairs(self) -> Iterator[tuple[Line, Line]]:
        """Slices that both modes served: (unguarded, guarded)."""
        yield from zip(
            self.slices.get("off", ()), self.slices.get(self.head["mode"], ()), strict=False
        )

    def ratios(self) -> list[tuple[int, float]]:
        """For each slice the tokens in the tree at its end, and the ratio of its own seconds."""
        found, before = [], (0.0, 0.0)
        for bare, guarded in self.pairs():
            now = spent(bare), spent(guarded)
            found.append((guarded["tree"], (now[1] - before[1]) / (now[0] - before[0])))
            before = now
        return found

    def ratio(self) -> float | None:
        """The ratio over all slices that both modes served."""
        pairs = list(self.pairs())
        return spent(pairs[-1][1]) / spent(pairs[-1][0]) if pairs else None


class Measured:
    """All runs of one command."""

    def __init__(self) -> None:
        self.runs: list[Run] = []

    @property
    def main(self) -> Run:
        return self.runs[0]

    def take(self, line: Line) -> None:
        """The next line. Raises KeyError where it is none of ours."""
        if line["kind"] == "run":
            self.runs.append(Run(line))
        elif line["kind"] == "died":
            self.runs[-1].died.append(line)
        else:
            self.runs[-1].slices.setdefault(line["mode"], []).append(line)


def read(path: Path) -> Measured:
    """What ``--out`` wrote. Raises ConfigError where that is not it."""
    measured = Measured()
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from None
    for number, line in enumerate(lines[:-1], 1):  # what follows the last line's end is torn
        try:
            measured.take(json.loads(line))
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"line {number} of {str(path)!r} is none that `hicache-guard churn --out` wrote"
            ) from None
    if not measured.runs or not any(measured.main.slices.values()):
        raise ConfigError(f"{str(path)!r} has no slice yet; was the run ended before its first?")
    return measured


def growth(scale: Scale) -> Iterator[tuple[str, Scale]]:
    """The runs in which one thing grows, with their names."""
    for slots in POOLS:
        grown = replace(scale, slots=slots, window=POOLS_WINDOW, longest=POOLS_LONGEST, host=0.0)
        yield f"{POOL} {slots:,} slots", grown
    for window in WINDOWS:
        grown = replace(
            scale, slots=WINDOWS_SLOTS, window=window, longest=WINDOWS_LONGEST, host=0.0
        )
        yield f"{WINDOW} {window:,} tokens", grown


def spent(line: Line) -> float:
    """CPU seconds of the functions that touch KV, since the start."""
    return float(sum(line["seconds"].values()))


def faults(line: Line) -> dict[str, int]:
    """What the oracle found in a mode so far, by kind; empty where nothing."""
    found = {
        "wrong hits": line["wrong_hits"],
        "wrong rows": line["wrong_rows"],
        "replaced prefixes": line.get("replaced_prefixes", 0),
        "audits not clean": line["dirty_audits"],
        "server died": sum(line["deaths"].values()),
    }
    return {kind: count for kind, count in found.items() if count}


def of_mode(run: Run, mode: str) -> Line | None:
    """What one mode did in a run, as numbers to show."""
    line = run.last(mode)
    if line is None:
        return None
    matches = line["matches"]
    return {
        "requests": line["finished"],
        "requests_per_cpu_second": line["finished"] / spent(line),
        "cpu_seconds": spent(line),
        "asked_tokens": line["asked_tokens"],
        "hit_tokens": line["hit_tokens"],
        "computed_tokens": line["computed_tokens"],
        "loaded_back_tokens": line["loaded_back"],
        "proved_tokens": min(
            (count for name, count in matches.items() if name.startswith("proved_tokens.")),
            default=0,
        ),
        "clipped": sum(count for name, count in matches.items() if name.startswith("clips.")),
        "false_hit_tokens_avoided": matches.get("false_hit_tokens_avoided", 0),
        "aborted": line["aborted"],
        "retracted": line["retracted"],
        "lost_transfers": line["lost_transfers"],
        "audits": line["audits"],
        "faults": faults(line),
        "misplaced_pages": line["misplaced"],
        "wrong_hit_tokens": line["wrong_hit_tokens"],
        "deaths": line["deaths"],
        "lost_with_server": line["lost_with_server"],
        "violations": line["violations"],
        "peak_rss": line["peak_rss"],
        "guard_bytes": line["guard_bytes"],
        "tree_tokens": line["tree"],
        "process_died": next((each["why"] for each in run.died if each["mode"] == mode), None),
    }


def by_part(run: Run) -> dict[str, tuple[float, float]]:
    """CPU seconds of each part over the slices that both modes served: (unguarded, guarded)."""
    pairs = list(run.pairs())
    if not pairs:
        return {}
    bare, guarded = (line["seconds"] for line in pairs[-1])
    return {part: (bare.get(part, 0.0), seconds) for part, seconds in guarded.items()}


def rows(run: Run) -> list[tuple[str, str, str]]:
    """What a table tells of a run: (what, unguarded, guarded)."""
    both = [of_mode(run, mode) for mode in ("off", run.head["mode"])]
    told: list[tuple[str, Callable[[Line], str]]] = [
        ("requests", lambda of: f"{of['requests']:,}"),
        ("faults", lambda of: counts(of["faults"])),
        ("pages out of place, at most", lambda of: counts(of["misplaced_pages"])),
        ("deaths of the server", lambda of: counts(of["deaths"])),
        ("violations counted", lambda of: counts(of["violations"])),
        ("requests a CPU second", lambda of: f"{of['requests_per_cpu_second']:,.0f}"),
        ("tokens asked for", lambda of: f"{of['asked_tokens']:,}"),
        ("hit tokens", lambda of: f"{of['hit_tokens']:,}"),
        ("hit tokens that were wrong", lambda of: f"{of['wrong_hit_tokens']:,}"),
        ("tokens loaded back", lambda of: f"{of['loaded_back_tokens']:,}"),
        ("tokens proved", lambda of: _guarded(of, of["proved_tokens"])),
        ("matches clipped", lambda of: _guarded(of, of["clipped"])),
        ("clients gone, retractions", lambda of: f"{of['aborted']:,}, {of['retracted']:,}"),
        ("transfers that failed", lambda of: f"{of['lost_transfers']:,}"),
        ("audits of all pages", lambda of: f"{of['audits']:,}"),
        ("peak resident memory", lambda of: f"{of['peak_rss'] / 2**20:,.0f} MiB"),
        ("the guard's books", lambda of: _guarded(of, of["guard_bytes"] / 2**20, " MiB")),
    ]
    return [(name, *("-" if of is None else tell(of) for of in both)) for name, tell in told]  # type: ignore[misc]


def part_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """CPU seconds of the parts and of all: (part, unguarded, guarded, ratio), the largest first."""
    parts = sorted(by_part(run).items(), key=lambda each: -each[1][1])
    whole = tuple(sum(seconds[at] for _, seconds in parts) for at in range(2))
    return [
        (name, f"{bare:,.2f}", f"{guarded:,.2f}", f"{guarded / bare:.2f}" if bare >= 0.01 else "-")
        for name, (bare, guarded) in [*parts, ("all", whole)]
    ]


def growth_rows(measured: Measured) -> list[tuple[str, str, str, str, str, str]]:
    """The runs in which one thing grows: (run, unguarded, guarded, ratio, faults of both)."""
    found = []
    for run in measured.runs[1:]:
        bare, guarded = (of_mode(run, mode) for mode in ("off", run.head["mode"]))
        ratio = run.ratio()
        if bare is not None and guarded is not None and ratio is not None:
            times = [f"{1e6 / of['requests_per_cpu_second']:,.0f} µs" for of in (bare, guarded)]
            wrong = [counts(of["faults"]) for of in (bare, guarded)]
            found.append((run.head["name"], times[0], times[1], f"{ratio:.2f}", wrong[0], wrong[1]))
    return found


def counts(of: dict[str, int]) -> str:
    """Counts by kind in one line."""
    return ", ".join(f"{count:,} {kind}" for kind, count in sorted(of.items())) or "none"


def _guarded(of: Line, count: float, unit: str = "") -> str:
    """A count that only a guard has."""
    return f"{count:,.0f}{unit}" if of["guard_bytes"] else "-"


def summary(measured: Measured) -> Line:
    """Everything as one object."""
    return {
        "runs": [
            {
                **run.head,
                "ratio": run.ratio(),
                "median_ratio": _middle([ratio for _, ratio in run.ratios()]),
                "parts": by_part(run),
                "modes": {mode: of_mode(run, mode) for mode in ("off", run.head["mode"])},
            }
            for run in measured.runs
        ]
    }


def _middle(ratios: list[float]) -> float | None:
    return statistics.median(ratios) if ratios else None
