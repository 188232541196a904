"""Run by ``flags`` on a release, in a process of its own: does its parser take these command lines?

Argument: a JSON file with ``lines`` (command lines), ``variables`` (names of the environment) and
``router`` (whether the lines are of SGLang's router). Prints one JSON object: for each line what is
wrong with it, or nothing, and the variables that the release's source does not name.

The parser is the release's own. Names are looked up first, whole: argparse would take a shortened
one, which is short for two flags tomorrow. Nothing is constructed from what was parsed, which would
look for a GPU and for the model.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any, NoReturn


class _Complaint(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Complaint(message)


def main() -> int:
    asked = json.loads(Path(sys.argv[1]).read_text())
    parser = _Parser(prog="sglang", add_help=False)
    if asked["router"]:
        module: Any = importlib.import_module("sglang_router.router_args")
        module.RouterArgs.add_cli_args(parser)
    else:
        module = importlib.import_module("sglang.srt.server_args")
        module.ServerArgs.add_cli_args(parser)
    complaints = [_complaint(parser, line) for line in asked["lines"]]
    print(json.dumps({"complaints": complaints, "unnamed": _unnamed(asked["variables"])}))
    return 0


def _complaint(parser: _Parser, line: list[str]) -> str:
    known = [name for action in parser._actions for name in action.option_strings]
    for word in line:
        if re.match(r"--[a-z]", word) and word.partition("=")[0] not in known:
            near = difflib.get_close_matches(word, known, 1)
            return f"there is no {word}" + (f"; the nearest is {near[0]}" if near else "")
    try:
        parser.parse_args(line)
    except _Complaint as complaint:
        return str(complaint)
    except (ValueError, TypeError, KeyError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _unnamed(variables: list[str]) -> list[str]:
    """Those that stand nowhere in the release's source."""
    left = set(variables)
    spec = importlib.util.find_spec("sglang")
    if not left or spec is None or spec.origin is None:
        return sorted(left)
    for file in sorted((Path(spec.origin).parent / "srt").rglob("*.py")):
        text = file.read_text(errors="replace")
        left = {name for name in left if not re.search(rf"\b{name}\b", text)}
        if not left:
            break
    return sorted(left)


if __name__ == "__main__":
    sys.exit(main())
