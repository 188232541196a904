"""A real server is audited: healthy ones are found healthy, faulty ones are not.

The audit's own mutations are those of its parts; here the server is what is mutated: with a fault
injected it is found, and with the guard around the same fault its answers are those of a cold run.
``scripts/audit-faults`` does that for every fault there is, ``scripts/audit-nightly`` audits every
release and model.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import fetched

from hicache_guard.embedded.server import Server

GUARD = str(Path(sys.executable).with_name("hicache-guard"))
SHORT = ("--only", "shared-prefix", "--only", "resume-points")

pytestmark = pytest.mark.sglang


def audited(folder: Path, *arguments: str, version: str = "0.5.23") -> tuple[int, dict[str, Any]]:
    """The exit status of an audit, and its data."""
    fetched(version)
    command = [GUARD, "audit", "--json", "--release", version, "--keep", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["verdict"] for row in found["scenarios"] if row["requests"]}


def traced(folder: Path) -> Iterator[dict[str, Any]]:
    for file in folder.glob("*.jsonl*"):
        yield from map(json.loads, file.read_text().splitlines())


def from_tiers(found: dict[str, Any], scenario: str) -> int:
    """Tokens that came back from the host or from files."""
    compared = next(row for row in found["scenarios"] if row["name"] == scenario)["comparisons"]
    told = [each["cached_from"] for each in compared]
    return sum(each.get("host", 0) + each.get("storage", 0) for each in told)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.5.23 with all of our patches."""
    tree = tmp_path_factory.mktemp("patched") / "tree"
    shutil.copytree(fetched("0.5.23"), tree)
    subprocess.run([GUARD, "patch", "apply", str(tree)], check=True, capture_output=True)
    return tree


def test_a_guarded_and_patched_server_is_healthy(patched: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    status, found = audited(
        tmp_path, "--checkout", str(patched), "--guard", "enforce", "--html", str(page),
        "--hicache", "write_through", "--storage", "--only", "load-back", "--only", "storage",
        "--only", "full-pressure", *SHORT,
    )  # fmt: skip
    assert status == 0, found
    assert set(verdicts(found).values()) == {"noise"}, "also not `not tested`"
    assert min(from_tiers(found, "load-back"), from_tiers(found, "storage")) > 500
    assert "violation" not in {record["kind"] for record in traced(tmp_path)}
    hits = {row["name"]: row["hits"] for row in found["scenarios"]}
    assert hits["shared-prefix"] >= 8, "no hit, no audit"
    assert hits["full-pressure"] > 0
    # The cold run agrees with a forward pass in float64 that shares no code with SGLang.
    reference = next(row for row in found["scenarios"] if row["name"] == "reference")
    assert reference["largest"] < 2e-4
    assert "hicache-guard audit" in page.read_text()
    # Whose the pages were is drawn: a flush between two scenarios gives all of them back.
    pages = found["trace"]["ownership"]
    assert {one["state"] for one in pages} == {"free", "live", "tree"}
    assert {one["page"] for one in pages if one["side"] == "full"} == {*range(1, 97)}


def test_an_old_release_is_healthy(tmp_path: Path) -> None:
    status, found = audited(tmp_path, *SHORT, version="0.5.12")
    assert status == 0, found
    assert verdicts(found)["shared-prefix"] == "noise"


@pytest.mark.slow
def test_a_file_of_another_prefix_is_found(tmp_path: Path) -> None:
    """No guard proves what a storage gives back; the audit reads it again cold."""
    status, found = audited(
        tmp_path, "--hicache", "write_through", "--storage", "--fault", "storage-swapped",
        "--no-shrink", "--only", "storage",
    )  # fmt: skip
    assert status == 1
    assert verdicts(found)["storage"] == "fault"


@pytest.mark.parametrize("version", ["0.5.23", pytest.param("0.5.18", marks=pytest.mark.slow)])
def test_the_live_upstream_fault_is_found(version: str, tmp_path: Path) -> None:
    """C16: the release's own torch_native attention, on a stock release."""
    status, found = audited(
        tmp_path, "--attention", "torch_native-stock", "--only", "shared-prefix", version=version
    )
    assert status == 1
    assert verdicts(found)["shared-prefix"] == "fault"
    small = next(row for row in found["scenarios"] if row["name"] == "shared-prefix")["smallest"]
    assert small["requests"] == 1, "one request is enough"


@pytest.mark.slow
def test_the_program_that_is_left_shows_the_fault(tmp_path: Path) -> None:
    _, found = audited(tmp_path, "--attention", "torch_native-stock", "--only", "shared-prefix")
    small = next(row["smallest"] for row in found["scenarios"] if row["smallest"])
    with Server(
        "0.5.23", page_size=16, max_total_tokens=1536, swa_ratio=1.0, chunked_prefill_size=128,
        attention="torch_native-stock",
    ) as server:  # fmt: skip
        program = [sys.executable, str(tmp_path / small["name"]), server.url]
        again = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert again.returncode == 1, again.stderr


@pytest.mark.slow
def test_our_patch_mends_the_live_upstream_fault(patched: Path, tmp_path: Path) -> None:
    """C16 again, and the same attention in the patched source."""
    status, found = audited(
        tmp_path, "--attention", "torch_native-stock", "--only", "shared-prefix",
        "--checkout", str(patched),
    )  # fmt: skip
    assert status == 0, found
    assert verdicts(found)["shared-prefix"] == "noise"


@pytest.mark.slow
def test_a_server_that_is_launched_is_audited_with_its_trace(tmp_path: Path) -> None:
    """As on a node: the release's own launcher, its guard by the environment; then it is gone."""
    fetched("0.5.23")
    like = Server("0.5.23", page_size=16, folder=tmp_path / "like")
    options = {name: value for name, value in like.arguments.items() if name != "port"}
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [] if value is False else [flag, str(value)]
    command = [GUARD, "audit", "--json", "--keep", str(tmp_path), *SHORT, "--launch", "--", *words]
    environment = like.environment | {"HICACHE_GUARD": "enforce"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert verdicts(found)["shared-prefix"] == "noise"
    matches = found["trace"]["matches"]
    assert max(match["proved"] for match in matches) > 0
    assert {one["state"] for one in found["trace"]["ownership"]} == {"free", "live", "tree"}
    port = found["url"].rpartition(":")[2]
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(port)), timeout=5)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["tail-freed", "shifted"])
def test_an_injected_fault_is_found_and_contained(fault: str, tmp_path: Path) -> None:
    with_fault = ("--fault", fault, "--no-shrink", *SHORT)
    status, found = audited(tmp_path, *with_fault)
    assert status == 1
    assert verdicts(found)["shared-prefix"] == "fault"
    status, found = audited(tmp_path, *with_fault, "--guard", "enforce")
    assert status == 0, found
    assert set(verdicts(found).values()) == {"noise"}
