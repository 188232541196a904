"""Plays one record on the SGLang release that is on the path; prints one JSON object.

Started by ``hicache-guard replay``, with the release that the record names.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from hicache_guard.core.errors import GuardError
from hicache_guard.core.record import read_record
from hicache_guard.replay.names import Namer
from hicache_guard.replay.play import choose, play
from hicache_guard.replay.script import program
from hicache_guard.replay.shrink import shrink
from hicache_guard.replay.stage import Stage


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--guard", default="observe")
    parser.add_argument("--allocator", type=int)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet = logging.getLogger("hicache_guard")
    quiet.addHandler(logging.NullHandler())  # reports are shown by whoever started this
    quiet.propagate = False
    try:
        print(json.dumps(_answer(options)))
    except GuardError as error:
        print(json.dumps({"error": str(error)}))
    return 0


def _answer(options: Any) -> dict[str, Any]:
    record = read_record(options.record)
    allocator = choose(record, options.allocator)
    stage = Stage(options.guard)
    namer = Namer(allocator, whole=record.whole)
    played = play(record, allocator, stage, options.guard, namer if options.shrink else None)
    answer: dict[str, Any] = {"played": dataclasses.asdict(played)}
    if options.shrink:
        shrunk = shrink(namer.plan(played), stage)
        answer["shrunk"] = None
        if shrunk is not None:
            text = program(shrunk, record=record, name=options.out.name if options.out else "")
            answer["shrunk"] = {**shrunk.facts(), "program": text}
    return answer


if __name__ == "__main__":
    sys.exit(main())
