"""Runs cases of the catalogue on the SGLang release that is on the path, each in a child process.

Importing a release takes over ten seconds, so it happens once and every case runs in a fork of it:
a case that kills its process, as some do on unguarded releases, ends nothing but itself. A patched
source reads its mode as it is imported, so there it happens once a mode, in a fork of what takes
the longest. Writes one JSON object a line; read by ``matrix``.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

#: Seconds that a case may take; the slowest needs under two.
CASE_LIMIT = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=None)
    parser.add_argument("--modes", nargs="*", default=["off", "observe", "enforce", "strict"])
    parser.add_argument("--route", default="install")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(1)  # a forked child cannot use threads that its parent started
    from hicache_guard.repro.cases import CASES
    from hicache_guard.repro.pools import quiet

    quiet()
    keys = options.cases if options.cases is not None else list(CASES)
    if options.route == "source":
        for mode in options.modes:
            _import_in_child(keys, mode)
        return
    _import_everything()
    for key in keys:
        for mode in options.modes:
            _report(key, mode, options.route)


def _import_in_child(keys: list[str], mode: str) -> None:
    importlib.import_module("sglang.srt.server_args")  # and all that it needs, but no seam
    from hicache_guard.adapters import patched

    assert not patched.decorations, "a seam was imported before its mode was known"
    child = os.fork()
    if child == 0:
        os.environ["HICACHE_GUARD"] = mode
        _import_everything()
        for key in keys:
            _report(key, mode, "source")
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"importing the patched source in mode {mode} failed")


def _import_everything() -> None:
    """Import each seam now, once, and not in every child."""
    from hicache_guard.adapters.hooks import running_release

    for module in running_release().modules:
        importlib.import_module(module)


def _report(key: str, mode: str, route: str) -> None:
    from hicache_guard.repro.cases import CASES

    result = _in_child(CASES[key], mode, route)
    print(json.dumps({"case": key, "mode": mode, **result}), flush=True)


def _in_child(run: Callable[[], Any], mode: str, route: str) -> dict[str, Any]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(CASE_LIMIT)
        with os.fdopen(writer, "w") as pipe:
            json.dump(_run(run, mode, route), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"outcome": "died", "detail": signal.Signals(os.WTERMSIG(status)).name}
    if not text:
        return {"outcome": "died", "detail": f"exit status {os.waitstatus_to_exitcode(status)}"}
    result: dict[str, Any] = json.loads(text)
    return result


def _guard(mode: str, route: str, on_report: Callable[[Any], None]) -> None:
    """Put the hooks in place by ``route``, and make sure that it was by no other."""
    from hicache_guard.adapters import hooks, state

    if route == "install":
        if mode != "off":
            hooks.install(mode, on_report=on_report)
        return
    if route == "plugin":
        from sglang.srt.plugins import load_plugins

        os.environ["HICACHE_GUARD"] = mode
        load_plugins()
    came_by = {hook.route for hook in hooks.hooks(hooks.running_release())}
    expected = None if mode == "off" else {"source": "patch"}.get(route, route)
    if came_by != {expected}:
        raise RuntimeError(f"the hooks came by {came_by}, not by {expected}")
    if mode != "off":
        state.choose(dataclasses.replace(state.settings(), on_report=on_report))


def _run(run: Callable[[], Any], mode: str, route: str) -> dict[str, Any]:
    from hicache_guard.core.errors import GuardViolation
    from hicache_guard.core.report import Violation
    from hicache_guard.repro import outcomes
    from hicache_guard.repro.audit import fingerprint

    reports: list[Violation] = []
    _guard(mode, route, reports.append)
    if mode == "strict":
        _note_state_before_each_operation()
    result: dict[str, Any] = {}
    try:
        run()
        result["ended"] = "returned"
    except outcomes.NotInThisRelease as missing:
        return {"outcome": "-", "detail": str(missing)}
    except GuardViolation as violation:
        bench = _bench()
        whole = bench is None or fingerprint(bench.allocator) == bench.before_raise
        told = bool(reports) and str(reports[-1]) == str(violation)
        result.update(ended="raised", whole=whole, told=told, violation=str(violation))
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        result.update(ended="asserted", where=f"{os.path.basename(frame.filename)}: {frame.line}")
    except (outcomes.WrongSlot, outcomes.OutOfRange) as error:
        result.update(ended=type(error).__name__, where=str(error))
    except Exception as error:
        return {"outcome": "error", "detail": f"{type(error).__name__}: {error}"}
    bench = _bench()
    steps = bench.steps if bench is not None else []
    faults = [fault for step in steps for fault in step.faults]
    result["outcome"] = _outcome(result["ended"], faults)
    result["faults"] = faults
    result["states"] = [step.state for step in steps]
    kinds = [report.fault.value for report in reports]
    result["detected"] = sorted(set(kinds))
    result["count"] = len(kinds)
    return result


def _note_state_before_each_operation() -> None:
    """A step such as an eviction makes several allocator calls; the promise is for each of them."""
    from hicache_guard.adapters import link
    from hicache_guard.repro.audit import fingerprint

    class Noted(link.Snapshot):
        def __init__(self, owner: link.AllocatorLink) -> None:
            super().__init__(owner)
            bench = _bench()
            if bench is not None and owner.allocator() is bench.allocator:
                bench.before_raise = fingerprint(bench.allocator)

    link.Snapshot = Noted  # type: ignore[misc,assignment]


def _bench() -> Any:
    """The bench of the case that just ran in this process, where it uses an allocator."""
    from hicache_guard.repro.pools import Bench

    return next((bench for bench in Bench.built if bench.allocator is not None), None)


def _outcome(ended: str, faults: list[str]) -> str:
    """The letters of the catalogue: S silent corruption, L leak, A assertion, ok."""
    if ended == "raised":
        return "raised"
    if ended in ("WrongSlot", "OutOfRange"):
        return "S" if ended == "WrongSlot" else "range"
    silent = ""
    if any("lost pages" not in fault for fault in faults):
        silent = "S"
    elif faults:
        silent = "L"
    if ended == "asserted":
        return silent + "A"
    return silent or "ok"


if __name__ == "__main__":
    main()
