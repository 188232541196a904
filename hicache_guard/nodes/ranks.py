"""Every rank that a topology has, beside what the ranks say of themselves.

A guarded rank writes a report (``adapters/rank_report``) into the folder of its run; one without
runs unguarded, or does not run. The folder is one that all nodes write to, or was collected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_guard.core.errors import ConfigError
from hicache_guard.core.modes import Mode
from hicache_guard.core.ranks import FORMAT

#: Where the reports lie in the folder of a run, and how each is called there.
FOLDER = "ranks"
_NAME = re.compile(r"(?P<server>[a-z]+\d+)\.node(?P<node>\d+)\.\d+\.json")


def place(server: str, node: int | str) -> str:
    """The report of a process of a server on a node, below the folder of a run."""
    return f"{FOLDER}/{server}.node{node}.{{pid}}.json"


@dataclass(frozen=True)
class Found:
    """A rank; ``wrong`` says what is, in a few words, or nothing."""

    name: str
    report: Mapping[str, Any]
    wrong: str


def compare(folder: Path) -> list[Found]:
    """The ranks of the run in a folder, those that should not be there last.

    Raises ConfigError where there is no run in it.
    """
    topology = _topology(folder / "topology.json")
    reports = list(_reports(folder / FOLDER))
    found = []
    for server in topology["servers"]:
        for rank in server["ranks"]:
            wanted = {name: rank[name] for name in ("dp", "pp", "tp")}
            key = (server["name"], rank["node"], wanted)
            mine = [each for each in reports if each[0] == key]
            # One that was restarted left its old report: the newest counts.
            mine.sort(key=lambda each: float(each[1].get("time") or 0))
            reports = [each for each in reports if each not in mine]
            report = mine[-1][1] if mine else {}
            found.append(Found(rank["name"], report, _wrong(report, topology)))
    for (name, node, rank), report in reports:
        wrong = report.get("unreadable") or "the topology has no such rank"
        found.append(Found(f"{topology['topology']}/{name}/node{node}/{rank}", report, wrong))
    return found


def _topology(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
        [rank["name"] for server in found["servers"] for rank in server["ranks"]]
    except OSError as error:
        raise ConfigError(
            f"cannot read {file}: {error.strerror}; name the folder of a run, where run.sh and "
            "`nodes render` leave topology.json"
        ) from None
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{file} is not what `nodes render` writes") from None
    return dict(found)


_Report = tuple[tuple[str, int, Any], dict[str, Any]]


def _reports(folder: Path) -> Iterator[_Report]:
    for file in sorted(folder.glob("*.json")):
        name = _NAME.fullmatch(file.name)
        try:
            report = json.loads(file.read_text())
            if name is None or report["v"] != FORMAT:
                raise ValueError
            yield (name["server"], int(name["node"]), report["rank"]), report
        except (OSError, ValueError, LookupError, TypeError):
            yield (file.name, -1, None), {"unreadable": f"{file.name} is no report of a rank"}


def _wrong(report: Mapping[str, Any], topology: Mapping[str, Any]) -> str:
    if not report:
        return "no report: it is unguarded, or did not start"
    if report["sglang"] != topology["release"]:
        return f"runs SGLang {report['sglang']}, not {topology['release']}"
    if report["mode"] != topology["guard"]:
        return f"guard {report['mode']}, not {topology['guard']}"
    if report["missing"]:
        return f"{len(report['missing'])} hooks are missing: {report['missing'][0]}"
    return ""


def guarded(folder: Path) -> bool:
    """Whether the run in a folder is one with a guard at all."""
    return bool(_topology(folder / "topology.json")["guard"] != Mode.OFF.value)
