"""Churn at scale: its traffic, its judges, and a little of it on real releases.

Expectations come from closed forms (Zipf's law, ratios of made-up slices), from the other audit,
and from the releases: 0.5.12 goes wrong without the guard and 0.5.23 does not. That each judge sees
what it is for is shown by mutations in ``real/churn_scale.py``.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import rows_of

from hicache_guard.cli import churn
from hicache_guard.core.errors import ConfigError
from hicache_guard.repro import churn_report, traffic
from hicache_guard.repro.churn_oracle import Prefixes
from hicache_guard.repro.churn_page import page
from hicache_guard.repro.traffic import Arrival, Traffic

LONGEST, MANY = 1024, 12_000


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    return list(itertools.islice(Traffic(3, LONGEST), MANY))


# --- traffic -------------------------------------------------------------------------------------


def _facts(arrival: Arrival) -> tuple[Any, ...]:
    ends = arrival.gone_after, arrival.retracted_after, arrival.lost
    return arrival.kind, arrival.prompt.tobytes(), arrival.output.tobytes(), *ends


def test_the_same_seed_gives_the_same_traffic(arrivals: list[Arrival]) -> None:
    again = itertools.islice(Traffic(3, LONGEST), 2000)
    other = itertools.islice(Traffic(4, LONGEST), 2000)
    first = [_facts(arrival) for arrival in arrivals[:2000]]
    assert [_facts(arrival) for arrival in again] == first
    assert [_facts(arrival) for arrival in other] != first
    assert [arrival.number for arrival in arrivals] == list(range(MANY))


def test_prefixes_are_shared_by_zipfs_law(arrivals: list[Arrival]) -> None:
    """Rank r comes with probability 1/(r H): each count within five deviations of its binomial."""
    known = {prefix[:4].tobytes(): rank for rank, prefix in enumerate(Traffic(3, LONGEST).prefixes)}
    assert len(known) == traffic.PREFIXES
    shared = [arrival for arrival in arrivals if arrival.kind == "shared"]
    counts = Counter(known[arrival.prompt[:4].tobytes()] for arrival in shared)
    harmonic = sum(1 / rank for rank in range(1, traffic.PREFIXES + 1))
    for rank in (1, 2, 3, 5, 10, 30):
        chance = 1 / (rank * harmonic)
        expected = len(shared) * chance
        assert abs(counts[rank - 1] - expected) < 5 * math.sqrt(expected * (1 - chance)), rank
    beyond = sum(count for rank, count in counts.items() if rank >= traffic.PREFIXES // 2)
    expected = len(shared) * math.log(2) / harmonic  # H(n) - H(n/2) is nearly log 2
    assert abs(beyond - expected) < 5 * math.sqrt(expected)


def test_an_agents_prompt_is_all_that_was_said(arrivals: list[Arrival]) -> None:
    said: dict[int, tuple[int, Any]] = {}
    grown = 0
    for arrival in (arrival for arrival in arrivals if arrival.kind == "agent"):
        if arrival.turn:
            turn, before = said[arrival.session]
            assert arrival.turn == turn + 1
            assert len(arrival.prompt) > len(before)
            np.testing.assert_array_equal(arrival.prompt[: len(before)], before)
            grown += 1
        else:
            assert arrival.session not in said
        said[arrival.session] = arrival.turn, np.concatenate((arrival.prompt, arrival.output))
    assert grown > MANY * 0.35 / 2  # most turns are not the first


def test_requests_end_as_often_as_is_said(arrivals: list[Arrival]) -> None:
    def near(count: int, of: int, chance: float) -> bool:
        return abs(count - of * chance) < 5 * math.sqrt(of * chance)

    kinds = Counter(arrival.kind for arrival in arrivals)
    assert all(near(kinds[kind], MANY, share) for kind, share in traffic.SHARES.items())
    local = [arrival for arrival in arrivals if arrival.kind != "remote"]
    gone = [arrival for arrival in local if arrival.gone_after is not None]
    assert near(sum(a.gone_after == 0 for a in gone), len(local), traffic.PREFILL_ABORTS)
    assert near(sum(a.gone_after != 0 for a in gone), len(local), traffic.DECODE_ABORTS)
    lost = sum(arrival.lost for arrival in arrivals)
    assert near(lost, kinds["remote"], traffic.LOST_TRANSFERS)
    for arrival in arrivals:
        assert 1 <= len(arrival.output) <= traffic.MOST_OUTPUT
        assert 1 <= len(arrival.prompt) <= LONGEST - len(arrival.output)
        for moment in (arrival.gone_after, arrival.retracted_after):
            assert moment is None or 0 <= moment <= len(arrival.output)


# --- judges --------------------------------------------------------------------------------------


def test_the_number_of_a_prefix_is_its_tokens_in_order() -> None:
    prefixes = Prefixes(64)
    tokens = np.arange(5, 45, dtype=np.int32)
    numbers = prefixes.of(tokens)
    modulus = 1 << 64  # the definition, in whole numbers of Python
    by_hand = [
        sum(
            (int(t) + 1) * int(m) for t, m in zip(tokens[:end], prefixes._by_position, strict=False)
        )
        for end in range(1, 41)
    ]
    assert [int(number) % modulus for number in numbers] == [each % modulus for each in by_hand]
    for at in range(40):
        changed = tokens.copy()
        changed[at] += 1
        assert (prefixes.of(changed)[:at] == numbers[:at]).all()
        assert (prefixes.of(changed)[at:] != numbers[at:]).all()
    swapped = tokens.copy()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert prefixes.of(swapped)[4] != numbers[4]


def _scenes(version: str, *options: str) -> dict[str, list[dict[str, Any]]]:
    scenes: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(version, "real/churn_scale.py", *options):
        scenes.setdefault(row.pop("scene"), []).append(row)
    return scenes


@pytest.mark.sglang
def test_the_newest_release_serves_without_a_fault_and_every_hit_is_proved() -> None:
    served = _scenes("0.5.23", "--mutants", "--host")["served"]
    for host in (0.0, 2.0):
        bare, guarded = (row["counts"] for row in served if row["host"] == host)
        assert churn_report.faults(bare) == churn_report.faults(guarded) == {}
        assert guarded["violations"] == {}
        for name in ("finished", "hits", "hit_tokens", "computed_tokens", "loaded_back"):
            assert bare[name] == guarded[name], name
        assert min(bare[name] for name in ("hits", "aborted", "retracted", "lost_transfers")) > 0
        assert guarded["matches"]["evicted_tokens.full"] > 0
        assert guarded["matches"]["evicted_tokens.window"] > 0
        proved = guarded["matches"]["proved_tokens.window"]
        assert proved + guarded["loaded_back"] == guarded["hit_tokens"]
        assert (bare["loaded_back"] > 0) == (host > 0)


@pytest.mark.sglang
def test_a_pseudo_hit_is_noticed_though_every_page_is_in_its_place() -> None:
    """The mapping of the tree turned by no page changes nothing, by one page: wrong hits, and
    only those: the places of pages are as before."""
    still, turned = _scenes("0.5.23", "--mutants", "--host")["crossed"]
    assert still["wrong_hits"] == 0
    assert turned["wrong_hits"] > 0
    assert still["moved"] == turned["moved"] == {}


@pytest.mark.sglang
def test_a_page_in_two_places_is_counted_as_the_other_audit_says() -> None:
    clean, freed = _scenes("0.5.23", "--mutants", "--host")["agreed"]
    assert clean["said"] == clean["counted"] == {}
    assert freed["said"] == freed["counted"] == {"owned and free": 1}


@pytest.mark.sglang
def test_without_the_guard_the_oldest_release_goes_wrong() -> None:
    """#25805 under churn; the guard is what is removed. #29352 is of indices that are in order: no
    guard sees it, and it may befall the guarded run as well."""
    bare, guarded = (row["counts"] for row in _scenes("0.5.12", "--steps")["served"])
    assert bare["wrong_rows"] > 0
    assert churn_report.faults(guarded).keys() <= {"replaced prefixes"}
    assert guarded["violations"].get("stale-mapping", 0) > 0


@pytest.mark.sglang
def test_slots_of_a_decode_step_are_those_of_the_releases_kernel() -> None:
    steps = _scenes("0.5.12", "--steps")["step"]
    assert len(steps) == 12
    for step in steps:
        assert step["ours"] == step["kernel"], step


# --- what is made of it --------------------------------------------------------------------------


def _slice(mode: str, finished: int, seconds: float, tree: int, **changes: Any) -> dict[str, Any]:
    names = ("hits", "hit_tokens", "asked_tokens", "wrong_hits", "wrong_hit_tokens", "wrong_rows",
             "replaced_prefixes", "dirty_audits", "audits", "lost_with_server", "aborted",
             "retracted", "lost_transfers", "loaded_back", "computed_tokens",
             "guard_bytes")  # fmt: skip
    facts: dict[str, Any] = {"kind": "slice", "mode": mode, **dict.fromkeys(names, 0)}
    facts |= {"misplaced": {}, "deaths": {}, "violations": {}, "matches": {}, "peak_rss": 1 << 30}
    facts |= {"finished": finished, "seconds": {"cache": seconds}, "tree": tree}
    return facts | changes


def _head(name: str = "main", **scale: Any) -> dict[str, Any]:
    sizes = {"slots": 1000, "page_size": 64, "window": 128, "longest": 512, **scale}
    return {
        "kind": "run", "name": name, "date": "2026-11-30T00:00:00+00:00", "release": "0.5.23",
        "requests": 30, "mode": "enforce", "seed": 7, "machine": "<b>&", "tree": "unified",
        "scale": sizes,
    }  # fmt: skip


LINES = [
    _head(),
    _slice("off", 10, 1.0, 100),
    _slice("enforce", 10, 1.5, 100),
    _slice("off", 20, 3.0, 200, wrong_hits=2),
    _slice("enforce", 20, 4.0, 200),
    _slice("off", 30, 9.0, 300, wrong_hits=3),
    _head("pool of 1,000 slots", slots=1000),
    _slice("off", 10, 2.0, 100),
    _slice("enforce", 10, 3.0, 100),
]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """What a run wrote that was killed in the middle of a line."""
    path = tmp_path / "churn.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"kind": "sl')
    return path


def test_what_a_killed_run_measured_is_kept(written: Path) -> None:
    measured = churn_report.read(written)
    main, grown = measured.runs
    # Only slices that both served: 1.5/1, then (4 - 1.5)/(3 - 1), of all 4/3.
    assert main.ratios() == [(100, 1.5), (200, 1.25)]
    assert main.ratio() == pytest.approx(4 / 3)
    assert grown.ratio() == 1.5
    last = main.last("off")
    assert last is not None
    assert churn_report.faults(last) == {"wrong hits": 3}
    [told] = churn_report.growth_rows(measured)
    assert told[3] == "1.50"


def test_the_page_stands_alone(written: Path) -> None:
    text = page(churn_report.read(written))
    assert "3 wrong hits in 30 requests" in text
    assert "With it: no fault in 20 requests" in text
    assert "&lt;b&gt;&amp;" in text
    assert "<b>&" not in text
    assert len(re.findall("<svg", text)) == 5  # one kind of growth was not measured
    assert not re.search(r"https?://|<script|<link|<img|url\(", text)
    assert "prefers-color-scheme:dark" in text


@pytest.mark.parametrize("text", ["", "{}\n", '{"kind": "slice", "mode": "off"}\n', "no\n"])
def test_what_is_no_churn_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.jsonl"):
        churn_report.read(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slots": 1000}, "1,000 slots are too few"),
        ({"mode": "strictly"}, "unknown mode 'strictly'"),
        ({"release": "0.4.0"}, r"0\.4\.0"),
        ({"show": Path("/nowhere.jsonl")}, "cannot read '/nowhere.jsonl'"),
        ({"tree": "legacy", "host": 2.0}, "no host tier"),
        ({"tree": "b-tree"}, "unknown tree 'b-tree'"),
    ],
)
def test_bad_input_is_told_before_anything_is_started(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(churn, "_Worker", None)
    with pytest.raises(ConfigError, match=said):
        churn.churn(**options)


def test_bad_input_is_one_line() -> None:
    command = [sys.executable, "-P", "-m", "hicache_guard.cli.main", "churn", "--slots", "1000"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "too few" in done.stderr
    assert done.stderr.count("\n") == 1
