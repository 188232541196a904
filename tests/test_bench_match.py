"""``hicache-guard bench match``: it measures what it says, and a slow match breaks its budget.

Times on a shared machine prove nothing here; what is checked is what was measured, and that the
budget sees a guard that is made slow.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import pytest

from hicache_guard import checkouts
from hicache_guard.cli import bench

#: Some three minutes that CI has not.
pytestmark = pytest.mark.slow

#: Trees that a release has.
TREES = {"0.5.12": {"legacy", "unified"}, "0.5.23": {"unified", "unified-rust"}}
#: Seconds that one run may take.
LIMIT = 300

#: The sizes of a quick run are made smaller yet; in the mutant the guard sleeps in each match.
PROGRAM = """
import sys, time
from hicache_guard.adapters import prefix_tree
from hicache_guard.adapters.link import Factory
from hicache_guard.repro import bench_match

bench_match.CALLS, bench_match.USUAL_BATCH, bench_match.CACHED = 1, 2, (1 << 11, 1 << 14)
if "--slow" in sys.argv:
    sys.argv.remove("--slow")
    bench_match.PAGE_SIZES = (64,)
    build = prefix_tree.match_prefix.build

    def slow(original):
        hooked = build(original)

        def match_prefix(tree, params):
            time.sleep(0.001)
            return hooked(tree, params)

        return match_prefix

    prefix_tree.match_prefix = Factory(slow)
bench_match.main()
"""


@functools.cache
def report_of(version: str, *options: str) -> dict[str, Any]:
    """What the benchmark prints on one release; skips without it."""
    if not checkouts.is_fetched(version):
        pytest.skip(f"SGLang {version} is not fetched; run hicache-guard releases fetch {version}")
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, "--quick", "--rounds", "3", *options],
        env=checkouts.environment(checkouts.require(version)),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.sglang
@pytest.mark.parametrize("version", TREES)
def test_everything_is_measured(version: str) -> None:
    rows = report_of(version)["times"]
    matched = {
        (row["tree"], row["page_size"], row["path"], row["hit"], row["what"], row["mode"])
        for row in rows
    }
    wanted = {
        (tree, page_size, path, hit, what, mode)
        for tree in TREES[version]
        for page_size in (1, 64)
        for path in ("node", "inside", "edge", "turns", "gap", "insert")
        for hit in (1024, 8192)
        for what in (["insert"] if path == "insert" else ["match", "schedule"])
        for mode in ("observe", "enforce")
        if path not in ("inside", "edge") or hit == 8192
        if path != "edge" or page_size == 1
    }
    assert matched == wanted
    assert len(rows) == len(wanted)
    for row in rows:
        assert row["unguarded_us"] > 0
        assert row["ratio"] == pytest.approx(row["guarded_us"] / row["unguarded_us"])


@pytest.mark.sglang
def test_a_slow_guard_breaks_the_budget() -> None:
    report = report_of("0.5.23", "--slow")
    bounded = [r for r in report["times"] if r["what"] == "match" and r["hit"] >= 8192]
    assert bench.over_match(report) == bounded


def _row(what: str, hit: int, ratio: float) -> dict[str, Any]:
    sizes = {"page_size": 1, "hit": hit, "cached": 1 << 16, "batch": 16}
    times = {"unguarded_us": 10.0, "guarded_us": 10.0 * ratio, "ratio": ratio}
    return {"tree": "unified", "path": "node", "mode": "observe", "what": what, **sizes, **times}


@pytest.mark.parametrize(
    ("row", "status"),
    [
        (_row("match", 8192, 1.25), 0),
        (_row("match", 8192, 1.26), 1),
        (_row("match", 1024, 9.0), 0),
        (_row("schedule", 8192, 9.0), 0),
        (_row("insert", 8192, 9.0), 0),
    ],
)
def test_the_status_is_that_of_the_budget(
    row: dict[str, Any],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = {"device": "CPU", "times": [row]}
    monkeypatch.setattr(bench, "_measured", lambda *arguments: report)
    assert bench.match(as_json=True) == status
    assert json.loads(capsys.readouterr().out) == report
    assert bench.match() == status
    assert f"{row['ratio']:.2f}" in capsys.readouterr().out
