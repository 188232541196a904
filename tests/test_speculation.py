"""Drafts on the embedded server: verified as the release's kernels do it, and told by an audit.

The oracles are the release's own Triton kernels, interpreted, and for the windows of drafts the
definition: what a draft sees is what it would see at the end of its own branch.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from programs import fetched
from typer.testing import CliRunner

from hicache_guard.audit import judge
from hicache_guard.audit.judge import Comparison, Verdict
from hicache_guard.audit.plan import Answer, Ask
from hicache_guard.audit.scenarios import SCENARIOS
from hicache_guard.cli.main import app
from hicache_guard.core.errors import ConfigError
from hicache_guard.embedded import replacements
from hicache_guard.embedded.server import Server

SPECULATION = next(scenario for scenario in SCENARIOS if scenario.name == "speculation")
GUARD = str(Path(sys.executable).with_name("hicache-guard"))


# -- without a server ------------------------------------------------------------------------------


def test_drafts_are_handled_as_by_the_kernels_of_the_release() -> None:
    """Mutations: in each function of ``speculation`` in turn, something off by one; ``depths``."""
    found = json.loads(programs.output_of("0.5.23", "real/draft_kernels.py"))
    assert found.pop("accepted") >= 5, "drafts that are always wrong test nothing"
    assert {name for name, apart in found.items() if apart > 1e-6} == set()
    assert len(found) == 8


@pytest.mark.parametrize("window", [-1, 8])
def test_a_draft_sees_what_it_would_at_the_end_of_its_branch(window: int) -> None:
    """Mutations: ``depths`` ignored (with a window); its window one token longer."""
    known, nodes, width = 12, 6, 8
    seen = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate((0, 0, 1, 3, 2), start=1):
        seen[node] |= seen[parent]
    torch.manual_seed(0)
    q, new_k, new_v = torch.randn(3, nodes, 1, width).unbind()
    k, v = torch.randn(2, known, 1, width).unbind()
    slots = torch.arange(known)
    mask = torch.cat([torch.ones(nodes, known, dtype=torch.bool), seen], dim=1)
    out = torch.zeros_like(q)
    ends = torch.tensor([0, nodes]), torch.tensor([0, known]), torch.tensor([0, mask.numel()])
    replacements.extend_attention(
        q, new_k, new_v, out, k, v, ends[0], ends[1], slots, mask.flatten(), True, ends[2],
        nodes, 1.0, 1.0, sliding_window_size=window, depths=True,
    )  # fmt: skip
    for node in range(nodes):
        branch = seen[node].nonzero().flatten()
        keys, values = torch.cat([k, new_k[branch]]), torch.cat([v, new_v[branch]])
        if window >= 0:
            keys, values = keys[-window - 1 :], values[-window - 1 :]
        weights = (keys[:, 0] @ q[node, 0] / width**0.5).softmax(dim=0)
        assert torch.allclose(out[node, 0], weights @ values[:, 0], atol=1e-6)


def answered(accepted: int, made: int) -> tuple[Answer, Comparison]:
    ask = Ask("r1", (1, 2, 3), 1)
    warm = Answer(ask, (7,), (-1.0,), cached=2, finish="length", drafts=(accepted, made))
    return warm, judge.compare(warm, Answer(ask, (7,), (-1.0,)))


@pytest.mark.parametrize(
    ("accepted", "made", "verdict", "why"),
    [
        (0, 20, Verdict.NOT_TESTED, "no draft was accepted, of 20"),
        (0, 0, Verdict.NOT_TESTED, "no draft was accepted, of 0"),
        (20, 20, Verdict.NOT_TESTED, "no draft was rejected, of 20"),
        (3, 20, Verdict.EQUAL, "3 of 20 drafts were accepted"),
    ],
)
def test_without_drafts_of_both_kinds_nothing_was_tested(
    accepted: int, made: int, verdict: Verdict, why: str
) -> None:
    """Mutation: ``missed`` not looked at."""
    warm, compared = answered(accepted, made)
    found = judge.judge([warm], [compared], 1e-3, missed=SPECULATION.missed([warm]))
    assert found.verdict is verdict
    assert why in found.why
    # It is no condition of other scenarios.
    assert judge.judge([warm], [compared], 1e-3).verdict is Verdict.EQUAL


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--speculative", "oracle"], "choose one of ngram, ngram-tree"),
        (["--speculative", "ngram", "--attention", "torch_native"], "choose triton"),
        (["--fault", "drafts-left"], "add --speculative ngram"),
    ],
)
def test_what_cannot_speculate_is_a_complaint(wrong: list[str], said: str, tmp_path: Path) -> None:
    fetched("0.5.23")
    done = CliRunner().invoke(app, ["audit", "--keep", str(tmp_path), *wrong])
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)


# -- servers ---------------------------------------------------------------------------------------


def audited(
    folder: Path, *arguments: str, only: str = "speculation"
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status of an audit, and its scenarios by name."""
    fetched("0.5.23")
    command = [GUARD, "audit", "--json", "--keep", str(folder), "--speculative", "ngram"]
    command += ["--only", "shared-prefix", "--only", only, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.stdout, done.stderr
    return done.returncode, {row["name"]: row for row in json.loads(done.stdout)["scenarios"]}


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--guard", "off"),
        ("--guard", "enforce"),
        ("--guard", "observe", "--speculative", "ngram-tree", "--page-size", "1"),
    ],
    ids=" ".join,
)
def test_a_server_that_speculates_is_healthy(arguments: tuple[str, ...], tmp_path: Path) -> None:
    status, found = audited(tmp_path, *arguments)
    assert status == 0, found
    row = found["speculation"]
    assert row["verdict"] == "noise"
    assert row["hits"] >= 8
    assert 50 < row["drafts"]["accepted"] < row["drafts"]["made"]
    # What both cold readings and answers have in common would not show without this.
    assert found["reference"]["largest"] < 2e-4
    traces = [trace.read_text() for trace in tmp_path.glob("*trace.jsonl*")]
    assert any('"kind":"match"' in trace for trace in traces) == ("off" not in arguments)
    assert not any('"kind":"violation"' in trace for trace in traces)


@pytest.mark.sglang
@pytest.mark.slow
def test_the_live_upstream_fault_of_drafts_is_found(tmp_path: Path) -> None:
    """SGLang #39287: the kernel counts the window of a draft from its index in the tree."""
    status, found = audited(tmp_path, "--attention", "triton-uneven")
    assert status == 1
    assert found["speculation"]["verdict"] == "fault"
    assert found["speculation"]["smallest"]["requests"] == 1


@pytest.mark.sglang
@pytest.mark.slow
def test_streaming_sessions_that_speculate_are_found_at_fault(tmp_path: Path) -> None:
    """0.5.23 without overlap takes a turn's last token for cached, whose KV was not computed."""
    status, found = audited(tmp_path, only="streaming-sessions")
    assert status == 1
    assert found["streaming-sessions"]["verdict"] == "fault"
    assert found["streaming-sessions"]["smallest"]["requests"] == 2


@pytest.mark.sglang
@pytest.mark.slow
def test_drafts_that_are_left_behind_are_found_by_their_scenario(tmp_path: Path) -> None:
    status, found = audited(tmp_path, "--fault", "drafts-left", "--no-shrink")
    assert status == 1
    bad = {name for name, row in found.items() if row["verdict"] == "fault"}
    assert bad == {"speculation"}


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["embedded", "serve", "--folder"], ["audit", "--keep"]], ids=" ".join
)
def test_a_release_that_cannot_says_so_in_one_line(command: list[str], tmp_path: Path) -> None:
    fetched("0.5.12")
    command = [GUARD, *command, str(tmp_path), "--release", "0.5.12", "--speculative", "ngram"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Ngram speculative decoding only supports CUDA device" in done.stderr


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.5.19", "0.5.20", "0.5.22", "0.5.23"])
def test_answers_are_the_same_with_drafts_and_without(version: str, tmp_path: Path) -> None:
    fetched(version)
    motif = random.Random(0).choices(range(10, 1000), k=5)
    told = []
    for speculative in (None, "ngram"):
        folder = tmp_path / str(speculative)
        with Server(version, page_size=16, speculative=speculative, folder=folder) as server:
            told.append([server.generate(motif * 30, 60) for _ in range(2)])
    without, drafted = told
    assert [each["output_ids"] for each in drafted] == [each["output_ids"] for each in without]
    assert drafted[1]["meta_info"]["spec_num_correct_drafts"] > 20
