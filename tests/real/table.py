"""Prints a table: the machine of ``machine.py`` on every supported release, in every mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hicache_guard import checkouts

HERE = Path(__file__).resolve().parent


def main() -> int:
    print("| release | mode | examples | operations | of them illegal | outcome |")
    print("|---|---|---|---|---|---|")
    wrong = 0
    for version in checkouts.SUPPORTED:
        print(f"{version}: random operations", file=sys.stderr)
        environment = checkouts.environment(checkouts.require(version))
        environment["PYTHONPATH"] += os.pathsep + str(HERE.parent)
        command = [sys.executable, "-P", str(HERE / "machine.py"), "--examples", "60", "--random"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        rows = [json.loads(line) for line in lines if line.startswith('{"mode"')]
        held = [not found for found in _failures(lines)]
        if done.returncode or len(rows) != 3 or len(held) != 3:
            print(f"| {version} | | | | | **did not run** |")
            print(done.stderr[-2000:], file=sys.stderr)
            wrong += 1
            continue
        for row, fine in zip(rows, held, strict=True):
            seen = row["seen"]
            outcome = "all held" if fine else "**failed**"
            cells = (seen["examples"], seen["operations"], seen["illegal"], outcome)
            print(f"| {version} | {row['mode']} | " + " | ".join(map(str, cells)) + " |")
            wrong += not fine
        if not all(held):
            print(done.stdout[-4000:], file=sys.stderr)
    return 1 if wrong else 0


def _failures(lines: list[str]) -> list[str]:
    """What stands before each mode's line: the failure, or nothing where all held."""
    failures, text = [], ""
    for line in lines:
        if line.startswith('{"mode"'):
            failures.append("" if text.strip() == "all held" else text)
            text = ""
        else:
            text += line + "\n"
    return failures


if __name__ == "__main__":
    sys.exit(main())
