"""``hicache-guard replay``: a record of a server's allocator, made again on this machine's CPU."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hicache_guard import checkouts, children
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.modes import Mode
from hicache_guard.core.record import BYTES_VAR, RECORD_VAR, Record, read_record
from hicache_guard.replay.play import choose
from hicache_guard.repro import picture

MODES = tuple(mode.value for mode in Mode if mode is not Mode.OFF)
#: Verdicts that are exit status 0.
GOOD = ("reproduced", "clean")


def replay(
    file: Annotated[
        Path, typer.Argument(help="A record; its older half (.1) is found where it goes before.")
    ],
    guard: Annotated[
        str, typer.Option(help=f"Mode of the guard in the replay: {', '.join(MODES)}.")
    ] = "observe",
    allocator: Annotated[
        int | None,
        typer.Option(help="Which allocator of the record. Default: of the first violation."),
    ] = None,
    shrink: Annotated[
        bool, typer.Option("--shrink", help="Find the fewest operations that still show it.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write what was shrunk to this file, as a program.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> int:
    """Replay a record (HICACHE_GUARD_RECORD) on the allocator of its SGLang release, on this CPU.

    Exit status 0 where the recorded violation came again, or a clean record is clean; 1 where not;
    2 for bad input.
    """
    if guard not in MODES:
        raise ConfigError(f"unknown mode {guard!r}; choose from {', '.join(MODES)}")
    if out is not None:
        shrink = True
        if out.is_dir() or not out.parent.is_dir():
            raise ConfigError(f"cannot write {str(out)!r}: it is a folder, or in none")
    record = read_record(file)
    chosen = choose(record, allocator)
    tree = checkouts.require(record.release)
    answer = _played(file, guard, chosen.number, shrink, out, tree)
    played, shrunk = answer["played"], answer.get("shrunk")
    if out is not None and shrunk is not None:
        out.write_text(shrunk["program"])
    if as_json:
        facts = {
            "release": record.release,
            "mode": record.mode,
            "guard": guard,
            "allocator": chosen.number,
            "whole": record.whole,
            "unreadable": record.unreadable,
        }
        print(json_module.dumps(facts | answer))
    else:
        out_console = picture.console()
        _show(out_console, record, chosen.text, guard, played)
        if shrink:
            _show_shrunk(out_console, shrunk, out)
    good = played["verdict"] in GOOD
    return 0 if good and not (shrink and played["target"] and shrunk is None) else 1


def _played(
    file: Path, guard: str, allocator: int, shrink: bool, out: Path | None, tree: Path
) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "hicache_guard.replay.worker", str(file)]
    command += ["--guard", guard, "--allocator", str(allocator)]
    if shrink:
        command.append("--shrink")
    if out is not None:
        command += ["--out", str(out)]
    environment = checkouts.environment(tree)
    for name in (RECORD_VAR, BYTES_VAR):  # a replay is not to be recorded, least of all there
        environment.pop(name, None)
    done = children.run(command, env=environment, stdout=subprocess.PIPE)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise ConfigError("the replay ended with an error, which is above")
    answer: dict[str, Any] = json_module.loads(lines[-1])
    if "error" in answer:
        raise ConfigError(str(answer["error"]))
    return answer


def _show(out: Console, record: Record, allocator: str, guard: str, played: dict[str, Any]) -> None:
    head = record.head
    when = datetime.fromtimestamp(float(head["time"])).isoformat(" ", "seconds")
    out.print(Text(f"A record of SGLang {record.release}\n", picture.HEAD))
    began = "" if record.whole else ", which begins with the state at its time"
    out.print(
        f"Rank {head['rank']}, process {head['pid']} on {head['host']}, {when}, "
        f"HICACHE_GUARD={record.mode}{began}. {allocator}."
    )
    if record.unreadable:
        out.print(f"{record.unreadable} bytes at the end unreadable, and left out.")
    calls = sum(1 for _ in record.calls)
    out.print(
        f"{played['made']} of {calls} calls made again in {played['seconds']:.1f} s, "
        f"guard in {guard}.\n"
    )
    target = played["target"]
    if target and "text" in target:
        out.print(Text(f"Recorded, in call {target['n']}", picture.HEAD))
        out.print(picture.report(out, target["text"]))
    elif target:
        raised = target["raised"]
        out.print(f"Recorded: {raised['type']} in call {target['n']}, at {raised['at']}\n")
    if played["differs"]:
        differs = played["differs"]
        out.print(
            Text(
                f"diverged at call {differs['call']}, {differs['do']} ({differs['at']}): recorded "
                f"{differs['recorded']}; now {differs['now']}",
                picture.BAD,
            )
        )
    if played["found"] and played["verdict"] != "reproduced":
        found = played["found"][0]
        out.print(Text(f"Found, in call {found['call']}", picture.HEAD))
        out.print(picture.report(out, found["text"]))
    for fault, count in played["elsewhere"].items():
        out.print(f"{count} {fault} recorded outside the allocator's calls; not replayed.")
    out.print(Text(_verdict(played), picture.GOOD if played["verdict"] in GOOD else picture.BAD))


def _verdict(played: dict[str, Any]) -> str:
    verdict = str(played["verdict"])
    if verdict == "clean":
        return "✓ clean: no violation recorded, and none found"
    if verdict == "reproduced":
        target = played["target"]
        what = target.get("fault") or target["raised"]["type"]
        more = ""
        if played["recorded"] > 1 and not played["stopped"]:
            more = f"; {played['alike']} of {played['recorded']} violations as recorded"
        if played["raised"]:
            more += f"; ended as recorded, {played['raised']['type']} at {played['raised']['at']}"
        return f"✓ reproduced: {what} in call {target['n']}, the same page and slots{more}"
    if verdict == "diverged":
        return "✗ diverged: not the same release, or the record lacks a call"
    if verdict == "empty":
        return (
            "✗ empty: no call was recorded; see `hicache-guard doctor` for hooks that are missing"
        )
    return "✗ not reproduced"


def _show_shrunk(out: Console, shrunk: dict[str, Any] | None, place: Path | None) -> None:
    if shrunk is None:
        out.print(
            Text("✗ not shrunk: by themselves, on new pools, the calls do not show it", picture.BAD)
        )
        return
    out.print(
        f"\nShrunk from {shrunk['of']} operations to {shrunk['operations']}, on {shrunk['full']} "
        f"full and {shrunk['window']} window slots, pages of {shrunk['page']}."
    )
    if place is not None:
        out.print(f"Written to {place}: run it with that release on PYTHONPATH.")
    else:
        out.print("")
        print(shrunk["program"])
