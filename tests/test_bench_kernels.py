"""``hicache-guard bench kernels``: its cases are what they say, and its budgets those of the task.

That it measures needs a GPU: ``test_it_measures``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from hicache_guard.cli import bench
from hicache_guard.repro.bench_kernels import WINDOW, Batch, translate_bytes

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_batch_is_all_live_and_scattered(page_size: int) -> None:
    """Else nothing would be loaded, or neighbours would be."""
    batch = Batch.of(16, page_size, torch.device("cpu"))
    _, run = batch.translation()
    table = run()
    full = batch.req_to_token.long().reshape(-1)
    assert torch.equal(table.slots.long(), batch.books.mapping[full])
    assert bool((table.slots > 0).all())
    assert table.indptr[-1] == 16 * WINDOW
    steps = table.slots.long().diff()
    assert int((steps != 1).sum()) >= 16 * (WINDOW // page_size) // 2


def _translation(entries: int, ratio: float, bandwidth: float) -> dict[str, Any]:
    return {"what": "translate", "entries": entries, "ratio": ratio, "bandwidth": bandwidth}


@pytest.mark.parametrize(
    ("row", "over"),
    [
        (_translation(1 << 15, 1.1, 0.01), False),
        (_translation(1 << 15, 1.11, 0.01), True),
        (_translation(1 << 14, 9.0, 0.01), False),
        (_translation(1 << 20, 1.0, 0.8), False),
        (_translation(1 << 20, 1.0, 0.79), True),
        ({"what": "decode", "ratio": 1.03}, False),
        ({"what": "decode", "ratio": 1.04}, True),
    ],
)
def test_budgets(row: dict[str, Any], over: bool) -> None:
    """At most 1.1 from 32k entries on, at least 80% of a copy at 1M; decode at most 1.03.

    Mutation: each limit moved by one hundredth, or the number of entries by one.
    """
    assert bool(bench.over_kernels({"times": [row]})) is over


def test_bytes_are_those_of_the_books() -> None:
    """Of a slot and the five books that are read for it, and of the two results."""
    batch = Batch.of(1, 1, torch.device("cpu"))
    books = batch.books
    read = (batch.req_to_token, books.mapping, books.stamp, books.owner, books.full_born)
    table = batch.translation()[1]()
    each = sum(
        kept.element_size() for kept in (*read, books.window_born, table.slots, table.expected)
    )
    assert translate_bytes(10) == 10 * each


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so() -> None:
    command = [sys.executable, "-m", "hicache_guard.cli.main", "bench", "kernels"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "GPU" in done.stderr


@pytest.mark.gpu
@needs_gpu
def test_it_measures() -> None:
    command = [sys.executable, "-P", "-m", "hicache_guard.repro.bench_kernels", "--rounds", "5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])["times"]
    assert all(row["ours_us"] > 0 and row["plain_us"] > 0 for row in rows)
