"""``hicache-guard doctor``: what is here, and hook by hook whether the guard is in place."""

from __future__ import annotations

import json as json_module
import os
import platform
import subprocess
import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hicache_guard import __version__, checkouts, children
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.modes import ENV_VAR, Mode

_PLUGIN_GROUP = "sglang.srt.plugins"
#: SGLang loads only the plugins that this names; all where it names none.
_FILTER = "SGLANG_PLUGINS"
_STYLES = {
    "applied": "green",
    "when imported": "green",
    "not needed": "dim",
    "missing": "bold red",
}


def doctor(
    release: Annotated[
        str | None,
        typer.Option(help="A fetched release. Default: the SGLang of this environment."),
    ] = None,
    mode: Annotated[str, typer.Option(help="The mode to try.")] = "strict",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> int:
    """Start a fresh process as a server would, and list each hook. Exit 1 where one is missing."""
    if Mode.parse(mode) is Mode.OFF:
        raise ConfigError("in mode off no hook is installed; try observe, enforce or strict")
    environment = dict(os.environ)
    if release is not None:
        environment = checkouts.environment(checkouts.require(release))
        if _FILTER in os.environ:
            environment[_FILTER] = os.environ[_FILTER]
    try:
        report = _report(environment, mode)
    except ConfigError:
        if not as_json:
            _show_environment(_environment())  # whatever is wrong, this is what there is
        raise
    report["environment"] = _environment()
    missing = [hook for hook in report["hooks"] if hook["status"] == "missing"]
    if as_json:
        print(json_module.dumps(report))
    else:
        _show(report, missing)
    return 1 if missing else 0


def _report(environment: dict[str, str], mode: str) -> dict[str, Any]:
    """What ``hook_report`` says in ``mode``.

    Where a patched source ends it there, observe goes on, so that each hook can be looked at.
    """
    report = _run(environment, mode)
    refused = report.get("refused")
    if refused:
        report = _run(environment, Mode.OBSERVE.value)
        if "refused" in report:
            raise ConfigError(refused)
        report |= {"mode": mode, "error": refused}
    return report


def _run(environment: dict[str, str], mode: str) -> dict[str, Any]:
    done = children.run(
        [sys.executable, "-P", "-m", "hicache_guard.cli.hook_report"],
        env={**environment, ENV_VAR: mode},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if done.returncode == 2:
        raise ConfigError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise ConfigError(f"SGLang cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    report: dict[str, Any] = json_module.loads(done.stdout.splitlines()[-1])
    return report


def _environment() -> dict[str, str]:
    facts = {"python": platform.python_version(), "hicache-guard": __version__}
    for name in ("torch", "triton", "transformers", "flashinfer-python"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    entries = [entry.value for entry in metadata.entry_points(group=_PLUGIN_GROUP)]
    facts["plugin entry point"] = ", ".join(entries) or "none"
    facts["checks on a CPU"] = _cpu_checks()
    facts[_FILTER] = os.environ.get(_FILTER, "(unset: all)")
    facts[ENV_VAR] = os.environ.get(ENV_VAR, "(unset: off)")
    return facts


def _cpu_checks() -> str:
    from hicache_guard.core import compiled  # brings torch

    why_not = compiled.why_not()
    return "compiled" if why_not is None else f"collected, in torch ({why_not})"


def _show_environment(facts: dict[str, str]) -> None:
    table = Table("what", "found", title="Environment")
    for name, value in facts.items():
        table.add_row(name, value)
    Console().print(table)


def _show(report: dict[str, Any], missing: list[dict[str, str]]) -> None:
    console = Console()
    _show_environment(report["environment"])
    table = Table("class", "hook", "status", title=f"SGLang {report['version']}, {report['mode']}")
    for hook in report["hooks"]:
        hook["seam"] = hook["seam"].rpartition(".")[2]
        how = hook["route"] or hook["detail"]
        status = hook["status"] + (f" ({how})" if how else "")
        table.add_row(hook["seam"], hook["method"], f"[{_STYLES[hook['status']]}]{status}")
    console.print(table)
    if report["plugin"]:
        console.print(f"The plugin was not loaded: {report['plugin']}", soft_wrap=True)
    if report["error"]:
        console.print(f"A server would not start: {report['error']}", soft_wrap=True)
    if missing:
        console.print(f"[bold red]{len(missing)} hooks are not in place[/]")
    else:
        needed = [hook for hook in report["hooks"] if hook["status"] != "not needed"]
        later = sum(hook["status"] == "when imported" for hook in needed)
        more = f", {later} of them when their module is imported" if later else ""
        console.print(f"[green]all {len(needed)} hooks are in place[/]{more}")
