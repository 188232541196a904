"""Records of the churn of #25805, played again and shrunk; one JSON line a job. For test_replay."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hicache_guard.adapters import recording
from hicache_guard.adapters.hooks import running_version
from hicache_guard.adapters.link import link_of
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.record import BYTES_VAR, RECORD_VAR, read_record
from hicache_guard.replay.names import Namer
from hicache_guard.replay.play import Played, choose, play
from hicache_guard.replay.script import program
from hicache_guard.replay.shrink import shrink
from hicache_guard.replay.stage import Stage
from hicache_guard.repro import churn_25805

FOLDER = Path(sys.argv[1])
SEED = 25805


def record(name: str, mode: str, requests: int, page: int = 16, *, size: int | None = None) -> Path:
    """Serve requests until they are done or the release dies, with a record."""
    path = FOLDER / name
    os.environ[RECORD_VAR] = str(path)
    if size is not None:
        os.environ[BYTES_VAR] = str(size)
    recording._file_of.cache_clear()  # as a process of its own
    churn_25805.run_mode(mode, page, requests, SEED, running_version(), lambda *_: None)
    del os.environ[RECORD_VAR]
    os.environ.pop(BYTES_VAR, None)
    return path


def told(job: str, path: Path, played: Played, **more: Any) -> None:
    head = read_record(path)
    facts = dataclasses.asdict(played)
    facts["found"] = facts["found"][:1]
    facts |= {"part": head.head["part"], "calls": sum(1 for _ in head.calls)}
    print(json.dumps({"job": job, **facts, **more}), flush=True)


def replayed(path: Path, mode: str = "observe", watch: Any = None) -> Played:
    found = read_record(path)
    return play(found, choose(found, None), Stage(mode), mode, watch)


def falsified(path: Path) -> tuple[Path, int]:
    """The record with the first slot of one result changed, and the number of its call."""
    changed = path.with_name("falsified")
    lines = path.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    place, row = next(
        (place, row)
        for place, row in enumerate(rows)
        if row.get("k") == "return" and row["n"] >= 30 and row["gave"]
    )
    row["gave"]["q"] = " ".join(["17", *row["gave"]["q"].split()[1:]])
    lines[place] = json.dumps(row) + "\n"
    changed.write_text("".join(lines))
    return changed, int(row["n"])


def unmakeable(path: Path) -> str:
    """What is said of a record whose first argument nobody can make again."""
    lines = path.read_text().splitlines(keepends=True)
    row = json.loads(lines[2])
    row["args"][0] = {"?": "list"}
    changed = path.with_name("unmakeable")
    changed.write_text("".join([*lines[:2], json.dumps(row) + "\n", *lines[3:]]))
    try:
        replayed(changed)
    except ConfigError as error:
        return str(error)
    return ""


def unrecorded(name: str, *methods: str) -> Path:
    """A record made while the hooks of some methods do not record; of none, where none is named."""
    original = recording.around

    def around(hooked: Any) -> Any:
        return hooked if hooked.__name__ in methods or not methods else original(hooked)

    recording.around = around
    try:
        return record(name, "observe", 40)
    finally:
        recording.around = original


def unrestored() -> list[str]:
    """Tensors of a guard that another does not get with its state, each set to numbers of its own.

    All that the four books have are looked for, but what they keep for themselves.
    """
    stage = Stage("observe")
    links, kept = [], []
    for _ in range(2):
        allocator = stage.build(256, 128, 16, sort=False)
        link = link_of(allocator)
        assert link is not None
        links.append((allocator, link))
        books = {name: getattr(link.guard, name) for name in ("full", "window", "map", "witness")}
        kept.append({
            f"{book}.{name}": value
            for book, found in books.items()
            for name, value in vars(found).items()
            if isinstance(value, torch.Tensor) and not name.startswith("_")
        })  # fmt: skip
    for number, tensor in enumerate(kept[0].values()):
        tensor.copy_(torch.arange(tensor.numel()) % (50 + number))
    state = json.loads(json.dumps(recording.state_of(links[0][1])))
    recording.put_back(links[1][1], state, serial=7)
    return [name for name, tensor in kept[0].items() if not tensor.equal(kept[1][name])]


def main() -> None:
    torch.set_num_threads(1)
    logger = logging.getLogger("hicache_guard")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    churn_25805.import_release()

    path = record("churn", "observe", 300)
    found = read_record(path)
    allocator = choose(found, None)
    began = time.monotonic()
    stage = Stage("observe")
    namer = Namer(allocator, whole=found.whole)
    played = play(found, allocator, stage, "observe", namer)
    told("replay", path, played, whole_seconds=time.monotonic() - began)
    shrunk = shrink(namer.plan(played), stage)
    assert shrunk is not None
    text = program(shrunk, found, "shrunk.py")
    (FOLDER / "shrunk.py").write_text(text)
    print(json.dumps({"job": "shrink", **shrunk.facts()}), flush=True)

    false, number = falsified(path)
    told("falsified", false, replayed(false), falsified=number)
    told("no free", FOLDER / "a", replayed(unrecorded("a", "free")))
    told("nothing", FOLDER / "b", replayed(unrecorded("b")))
    print(json.dumps({"job": "unmakeable", "error": unmakeable(path)}), flush=True)
    for mode in ("enforce", "strict"):
        path = record(mode, mode, 40)
        told(mode, path, replayed(path))
        told(f"{mode} again", path, replayed(path, mode))
    path = record("rotated", "observe", 300, size=100_000)
    told("rotated", path, replayed(path))
    path = record("page 64", "observe", 60, 64)
    told("page 64", path, replayed(path))
    print(json.dumps({"job": "state", "names": unrestored()}), flush=True)


if __name__ == "__main__":
    main()
