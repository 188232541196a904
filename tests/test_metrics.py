"""Our counters in a Prometheus directory of several processes, and in SGLang's own /metrics."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import timeit
import types
from collections.abc import Iterator
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from programs import in_ci, output_of
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from prometheus_client.parser import text_string_to_metric_families

from hicache_guard.adapters import metrics
from hicache_guard.adapters.metrics import METRICS, Publisher, full_name, labels_of, publisher_for
from hicache_guard.core.faults import Fault
from hicache_guard.core.matches import MatchTally
from hicache_guard.core.tally import Tally

HERE = Path(__file__).parent

#: One scheduler: ``PUBLISH`` runs with a publisher over ``matches`` and ``faults``.
SCHEDULER = """
import sys
from hicache_guard.adapters.metrics import Publisher
from hicache_guard.core.faults import Fault
from hicache_guard.core.matches import MatchRecord, MatchTally
from hicache_guard.core.tally import Tally

assert "prometheus_client" not in sys.modules, "it would not see the directory of a later setting"
rank = sys.argv[1]
matches, faults = MatchTally(), Tally()
labels = {"tp_rank": rank, "pp_rank": "0", "dp_rank": "0"}
"""


def _scheduler(folder: Path, code: str, rank: str = "0") -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCHEDULER + code, rank],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def _scrape(folder: Path) -> str:
    """As ``add_prometheus_middleware`` of SGLang does."""
    registry = CollectorRegistry()
    collector: Any = multiprocess.MultiProcessCollector
    collector(registry, path=str(folder))
    scraped: str = generate_latest(registry).decode()
    return scraped


def _samples(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Value by sample name and labels, of the guard's counters."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("hicache_guard_"):
                assert family.type == "counter"
                labels = tuple(sorted(sample.labels.items()))
                found.setdefault(sample.name, {})[labels] = sample.value
    return found


def _value(text: str, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    wanted = set(labels.items())
    samples = _samples(text)[full_name(name)]
    return sum(value for given, value in samples.items() if wanted <= set(given))


TWO = """
matches.proved(600, 512)
publisher = Publisher([matches], [faults], labels)
matches.clipped(MatchRecord(
    0.0, "r", 600, {"full": 512, "window": 448}, 0, {"full": 512, "window": 256}, 256,
    "window-unproved: page 7", 1, 2,
))
faults.violations[Fault.DOUBLE_FREE] += 2
faults.waits += 3
publisher.publish()
publisher.publish()
"""


def test_two_schedulers_are_scraped_together_and_told_apart(tmp_path: Path) -> None:
    """Mutations: counts added again at each publish; ranks left out; prometheus_client imported
    with our module; no known label values at 0."""
    for rank in ("0", "1"):
        _scheduler(tmp_path, TWO, rank)
    text = _scrape(tmp_path)
    assert set(_samples(text)) == {full_name(name) for name in METRICS}
    for rank in ("0", "1"):
        assert _value(text, "matches", tp_rank=rank) == 2
        assert _value(text, "hit_tokens", tp_rank=rank) == 768
        assert _value(text, "violations", tp_rank=rank, fault="double-free") == 2
    assert _value(text, "matches") == 4
    assert _value(text, "proved_tokens", group="window") == 2 * 768
    assert _value(text, "proved_tokens", group="full") == 2 * 1024
    assert _value(text, "clips", reason="window-unproved") == 2
    assert _value(text, "false_hit_tokens_avoided") == 2 * 192
    assert _value(text, "host_waits") == 6
    for name, metric in METRICS.items():
        found = {dict(labels).get(metric.label or "") for labels in _samples(text)[full_name(name)]}
        assert found >= set(metric.known), "a rate does not see a series begin"


SAME = """
first = Publisher([matches], [faults], labels)
other = MatchTally()
second = Publisher([other], [], labels)
matches.proved(10, 10)
other.proved(10, 5)
first.publish()
second.publish()
matches.proved(10, 10)
first.publish()
"""


def test_two_trees_of_one_process_add_up(tmp_path: Path) -> None:
    """A draft model has a tree of its own. Mutation: without the cache a second counter of the same
    name is refused, and without a registry each writes its own value over the other's."""
    _scheduler(tmp_path, SAME)
    assert _value(_scrape(tmp_path), "hit_tokens") == 25


SOON = """
import time, threading
publisher = Publisher([matches], [faults], labels, every=0.05)
alone = threading.active_count()
for _ in range(3):
    matches.proved(10, 10)
    publisher.maybe_publish()
    publisher.maybe_publish()
    time.sleep(0.5)
assert threading.active_count() == alone + 1
"""


def test_what_is_counted_last_is_published_too(tmp_path: Path) -> None:
    """Without another call. Mutations: publish only when a call finds it due; never ask again."""
    _scheduler(tmp_path, SOON)
    assert _value(_scrape(tmp_path), "matches") == 3


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Counters of this process in a registry of their own."""
    import prometheus_client

    registry = CollectorRegistry()
    plain = prometheus_client.Counter

    def counter(name: str, says: str, labels: tuple[str, ...]) -> Any:
        return plain(name, says, labels, registry=registry)

    monkeypatch.setattr(prometheus_client, "Counter", counter)
    metrics._counters.cache_clear()
    yield
    metrics._counters.cache_clear()


LABELS = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}


@pytest.mark.usefixtures("_fresh")
def test_asking_costs_next_to_nothing() -> None:
    """0.04 microseconds here; 0.2 is what it may cost by itself."""
    publisher = Publisher([MatchTally()], [Tally()], LABELS, every=60)
    publisher.maybe_publish()
    runs = timeit.repeat(publisher.maybe_publish, number=20_000, repeat=20)
    assert min(runs) / 20_000 < 0.4e-6


@pytest.mark.usefixtures("_fresh")
def test_publishing_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Mutations: raise into the server; log at each publication."""
    matches = MatchTally()
    publisher = Publisher([matches], [Tally()], LABELS)
    vars(publisher)["_counters"] = {}
    matches.proved(1, 1)
    publisher.publish()
    publisher.publish()
    publisher.maybe_publish()
    assert len(caplog.records) == 1


def test_counts_may_grow_while_they_are_read() -> None:
    """By the publishing thread. Mutation: iterate over the dictionaries themselves."""
    matches, faults = MatchTally(), Tally()
    stop, errors = threading.Event(), []

    def read() -> None:
        try:
            while not stop.is_set():
                matches.snapshot()
                metrics._fault_counts(faults)
        except RuntimeError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        until = time.monotonic() + 0.5
        while time.monotonic() < until and not errors:
            for fault in Fault:
                matches.clips[fault.value] += 1
                faults.violations[fault] += 1
            matches.clips.clear()
            faults.violations.clear()
    finally:
        stop.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert not errors


def _tree(**labels: str) -> Any:
    return types.SimpleNamespace(metrics_collector=types.SimpleNamespace(labels=labels))


@pytest.mark.usefixtures("_fresh")
def test_without_metrics_there_is_no_publisher(caplog: pytest.LogCaptureFixture) -> None:
    off = types.SimpleNamespace(metrics_collector=None)
    assert publisher_for(off, [MatchTally()], []) is None
    assert publisher_for(object(), [MatchTally()], []) is None
    assert not caplog.records
    assert publisher_for(_tree(cache_type="RadixCache"), [MatchTally()], []) is not None
    # Other label names in the same process cannot be: said, and the server goes on.
    assert publisher_for(_tree(cluster="a"), [MatchTally()], []) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("title", "ranks"),
    [
        ("sglang::scheduler", ("0", "0", "0")),
        ("sglang::scheduler_TP3", ("3", "0", "0")),
        ("sglang::scheduler_DP1_PP2_ATTN_CP4_MOE_DP5_TP13_EP6", ("13", "2", "1")),
        ("sglang::scheduler_MOE_DP5_TP1", ("1", "0", "0")),
        ("python -m pytest", ("7", "0", "0")),
        (None, ("7", "0", "0")),
    ],
)
def test_ranks_are_those_of_the_process_title(
    title: str | None, ranks: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is none, what the tree's metrics say. Mutation: MOE_DP5 taken for a DP rank."""
    if title is None:
        monkeypatch.delitem(sys.modules, "setproctitle", raising=False)
    else:
        library = types.SimpleNamespace(getproctitle=lambda: title)
        monkeypatch.setitem(sys.modules, "setproctitle", library)
    theirs = {"cache_type": "RadixCache", "tp_rank": 7, "cluster": "a", "group": "b"}
    labels = labels_of(types.SimpleNamespace(labels=theirs))
    assert labels.pop("cluster") == "a"
    assert labels == dict(zip(("tp_rank", "pp_rank", "dp_rank"), ranks, strict=True))


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.23", of=("0.5.12", "0.5.23")))
def test_sglang_serves_our_counters(version: str) -> None:
    """Real trees in two schedulers, SGLang's own directory and route. 13 to 17 s a release here,
    nearly all of it imports."""
    printed = output_of(version, "real/metrics.py")
    text = printed[printed.index("# HELP") :]
    assert set(_samples(text)) == {full_name(name) for name in METRICS}
    for rank in ("0", "1"):
        labels = {"dp_rank": rank, "pp_rank": "0", "tp_rank": "3"}
        assert _value(text, "hit_tokens", **labels) == 512 + int(rank)
        assert _value(text, "violations", fault="double-free", **labels) == 1
    assert _value(text, "hit_tokens") == 1025


# -- the dashboard


def _dashboard() -> Any:
    place = resources.files("hicache_guard").joinpath("dashboards/grafana.json")
    return json.loads(place.read_text())


def _expressions() -> list[str]:
    return [target["expr"] for panel in _dashboard()["panels"] for target in panel["targets"]]


def test_dashboard_asks_for_metrics_that_exist() -> None:
    """And for each of them, by labels that they have. Mutation: a counter is renamed."""
    known = {full_name(name) for name in METRICS}
    asked = {name for text in _expressions() for name in re.findall(r"hicache_guard_\w+", text)}
    assert asked == known
    for text in _expressions():
        allowed = {"instance", "tp_rank", "pp_rank", "dp_rank"}
        allowed |= {METRICS[n].label or "" for n in re.findall(r"hicache_guard_(\w+)_total", text)}
        for ranged in re.findall(r"by \(([^)]*)\)", text):
            assert set(ranged.split(", ")) <= allowed, text
        assert text.count("(") == text.count(")")
        assert text.count("{") == text.count("}")
    for variable in _dashboard()["templating"]["list"]:
        used = re.findall(r"hicache_guard_\w+", json.dumps(variable))
        assert set(used) <= known


def test_dashboard_uses_only_its_own_variables() -> None:
    dashboard = _dashboard()
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert "datasource" in variables
    used = set(re.findall(r"\$\{?([a-z_]+)", json.dumps(dashboard)))
    assert used - {"__all", "__rate_interval", "__range"} == variables
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_dashboard_panels_are_apart() -> None:
    panels = _dashboard()["panels"]
    assert _dashboard()["schemaVersion"] >= 39
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


def test_every_fault_is_a_series_from_the_start() -> None:
    assert set(METRICS["violations"].known) == {fault.value for fault in Fault}
