"""The stale translation of SGLang PR #25889, and what its correction left, step by step.

Window KV is written at window rows, to which the full slots of a batch must be translated first.
DeepSeek-V4's pool translates in the first layer and remembers the rows for all later ones. What it
remembers is worth nothing once the mapping was replaced, or written in place, or another batch was
the last to ask; yet 0.5.12 uses it. 0.5.12.post1 forgets it when the mapping is replaced, and only
then. Later releases remember nothing in the pool.

Source: the fault catalogue, rows C2 and C3. The methods that translate, remember and write are
those of the release on the path; only the fused store on the GPU is replaced, by one that notes who
wrote which row.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from hicache_guard.core.errors import GuardViolation
from hicache_guard.core.report import Violation
from hicache_guard.repro import fused_store, outcomes, picture, pools
from hicache_guard.repro.catalogue import UNGUARDED
from hicache_guard.repro.matrix import MODES

PAGE = 4
ROWS = 24

#: Full slots of the two batches, each one page of one request.
BATCHES = {"X": (4, 5, 6, 7), "Y": (12, 13, 14, 15)}


class Rows:
    """The window rows of each layer, in place of the store on the GPU: who wrote which."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.written: dict[int, dict[int, str]] = {}

    def set_key_buffer_fused(self, layer: int, rows: torch.Tensor, writer: str) -> None:
        named = rows.tolist()
        if any(not 0 <= row < self.count for row in named):
            raise outcomes.OutOfRange(f"rows {_span(named)} in a pool of {self.count}")
        self.written.setdefault(layer, {}).update(dict.fromkeys(named, writer))


@dataclass
class Step:
    """One step of a scene, the rows of the layer that it wrote, and what is wrong with them."""

    words: str
    drawn: Text | None = None
    fault: str = ""


class Stage:
    """A pool, its mapping, and the steps taken: what a scene acts on."""

    def __init__(self) -> None:
        self.pool: Any = fused_store.remembering_pool(ROWS)
        self.rows = Rows(ROWS)
        self.pool.swa_kv_pool = self.rows
        self.slots = {name: pools.slots(*slots) for name, slots in BATCHES.items()}
        self.owner: dict[int, str] = {}
        self.steps: list[Step] = []

    def replace_mapping(self, words: str, *, rows: int = ROWS, **starts: int) -> None:
        """Register a new mapping (and pool of ``rows`` rows), a run of rows for each batch."""
        if rows != self.rows.count:
            self.rows = self.pool.swa_kv_pool = Rows(rows)
        self.mapping = torch.zeros(ROWS + 1, dtype=torch.int64)
        self._enter(starts)
        self.pool.register_mapping(self.mapping)
        self.steps.append(Step(words))

    def write_mapping(self, words: str, **starts: int) -> None:
        """Change the entries of batches in the mapping that is registered."""
        self._enter(starts)
        self.steps.append(Step(words))

    def _enter(self, starts: dict[str, int]) -> None:
        for name, start in starts.items():
            self.mapping[self.slots[name]] = torch.arange(start, start + PAGE)
        self.owner = {
            int(row): name for name in BATCHES for row in self.mapping[self.slots[name]] if row
        }

    def write_kv(self, layer: int, batch: str) -> None:
        """One layer writes the window KV of a batch, through the release's own method."""
        words = (
            f"Layer {layer} writes the window KV of {batch} (full slots {_span(BATCHES[batch])})."
        )
        step = Step(words)
        self.steps.append(step)
        try:
            self.pool.set_swa_key_buffer_radix_fused(layer, self.slots[batch], batch)
        except outcomes.OutOfRange as error:
            step.fault = f"OUT OF RANGE: the write goes to {error}"
        step.drawn = self._draw(layer)
        mine = [row for row, name in self.owner.items() if name == batch]
        got = [row for row, name in self.rows.written.get(layer, {}).items() if name == batch]
        if not step.fault and sorted(got) != sorted(mine):
            others = {self.owner[row] for row in got if row in self.owner} - {batch}
            whose = f"rows of {' and '.join(sorted(others))}" if others else "nobody's rows"
            step.fault = (
                f"WRONG ROWS: {batch}'s KV of layer {layer} is in rows {_span(got)}, {whose}; its "
                f"own rows {_span(mine)} were not written"
            )

    def _draw(self, layer: int) -> Text:
        written = self.rows.written.get(layer, {})
        cells = []
        for row in range(PAGE, self.rows.count):
            owner, writer = self.owner.get(row, "."), written.get(row, " ")
            wrong = writer not in (owner, " ")
            style = picture.BAD if wrong else picture.GOOD if writer != " " else ""
            text = f"{owner}:{writer}" if owner != "." or wrong else "."
            cells.append(picture.Cell(row, text, style or picture.DIM, wrong))
        return picture.framed([picture.strip(f"layer {layer} row", cells, 10)], ())


def _span(numbers: Sequence[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}"


# -- the scenes ------------------------------------------------------------------------------------


def replaced(stage: Stage) -> None:
    """C2."""
    stage.replace_mapping("The mapping gives X the rows 8 to 11.", X=8)
    stage.write_kv(0, "X")
    stage.replace_mapping(
        "The mapping is replaced, as after a load-back that rebuilds it: X has rows 16 to 19 now, "
        "and rows 8 to 11 are Y's.",
        X=16,
        Y=8,
    )
    stage.write_kv(1, "X")


def shrunk(stage: Stage) -> None:
    """C2b."""
    stage.replace_mapping("The mapping gives X the rows 16 to 19.", X=16)
    stage.write_kv(0, "X")
    stage.replace_mapping(
        "Pool and mapping are replaced by smaller ones: 12 rows, of which X has 8 to 11.",
        rows=12,
        X=8,
    )
    stage.write_kv(1, "X")


def in_place(stage: Stage) -> None:
    """C3."""
    stage.replace_mapping("The mapping gives X the rows 8 to 11.", X=8)
    stage.write_kv(0, "X")
    stage.write_mapping(
        "The mapping is written in place, as by a load-back or an allocation: X has rows 16 to 19 "
        "now, and rows 8 to 11 are Y's.",
        X=16,
        Y=8,
    )
    stage.write_kv(1, "X")


def other_batch(stage: Stage) -> None:
    """C3b."""
    stage.replace_mapping("The mapping gives X rows 8 to 11 and Y rows 16 to 19.", X=8, Y=16)
    stage.write_kv(0, "X")
    stage.write_kv(1, "Y")


#: Row of the catalogue to its title and its steps.
SCENES: dict[str, tuple[str, Callable[[Stage], None]]] = {
    "C2": ("the mapping is replaced between two layers", replaced),
    "C2b": ("it is replaced by that of a smaller pool", shrunk),
    "C3": ("it is written in place", in_place),
    "C3b": ("another batch writes first at a later layer", other_batch),
}


# -- playing them ----------------------------------------------------------------------------------


@dataclass
class Telling:
    """One scene in one mode. ``outcome`` is right, wrong rows, out of range or raised."""

    scene: str
    mode: str
    steps: list[Step] = field(default_factory=list)
    reports: list[Violation] = field(default_factory=list)
    outcome: str = "right"
    untouched: bool = True
    written: dict[int, dict[int, str]] = field(default_factory=dict)

    @property
    def fault(self) -> str:
        return next((step.fault for step in self.steps if step.fault), "")


def tell(scene: str, mode: str) -> Telling:
    """Play one scene on a fresh pool with the hooks of ``mode``.

    Raises outcomes.NotInThisRelease where the release remembers no translations.
    """
    from hicache_guard.adapters import hooks

    telling = Telling(scene, mode)
    hooks.uninstall()
    if mode != "off":
        hooks.install(mode, on_report=telling.reports.append)
    try:
        stage = Stage()
        try:
            SCENES[scene][1](stage)
        except GuardViolation as violation:
            telling.outcome = "raised"
            if violation.violation not in telling.reports:
                telling.reports.append(violation.violation)
            telling.untouched = 1 not in stage.rows.written  # layer 1 is the one that goes wrong
    finally:
        hooks.uninstall()
    telling.steps, telling.written = stage.steps, stage.rows.written
    if telling.fault:
        out_of_range = telling.fault.startswith("OUT OF RANGE")
        telling.outcome = "out of range" if out_of_range else "wrong rows"
    return telling


_OUTCOMES = {"S": "wrong rows", "range": "out of range", "ok": "right"}


def problems(telling: Telling, off: Telling, release: str) -> list[str]:
    """Why a mode did not do what it must in this scene; empty where it did."""
    wrong = []
    known = _OUTCOMES[UNGUARDED[telling.scene][release]]
    mode, count = telling.mode, len(telling.reports)
    if known == "right" and count:
        wrong.append(f"false alarm: {telling.reports[0].fault.value}")
    if mode in ("off", "observe") or known == "right":
        must = known
    else:
        must = "right" if mode == "enforce" else "raised"
    if telling.outcome != must:
        wrong.append(f"{telling.outcome}, and must be {must}")
    if known != "right" and mode != "off" and not count:
        wrong.append("nothing reported")
    if mode == "observe" and telling.written != off.written:
        wrong.append("behaviour differs from the unguarded release")
    if not telling.untouched:
        wrong.append("rows were written although it raised")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Play every scene in each mode. Returns 0 if every mode did as it must, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)

    from hicache_guard.adapters.hooks import running_version

    pools.quiet()
    torch.set_num_threads(1)
    logging.getLogger("hicache_guard").addHandler(logging.NullHandler())  # reports are shown here
    release = running_version()
    out = picture.console()
    told: list[Telling] = []
    wrong: dict[tuple[str, str], list[str]] = {}
    try:
        for scene in SCENES:
            off = tell(scene, "off")
            for mode in options.modes:
                telling = off if mode == "off" else tell(scene, mode)
                told.append(telling)
                wrong[scene, mode] = problems(telling, off, release)
    except outcomes.NotInThisRelease as missing:
        if options.json:
            print(json.dumps({"report": 25889, "release": release, "here": False, "right": True}))
        else:
            out.print(f"PR #25889 on SGLang {release}: not there ({missing}).")
        return 0
    if options.json:
        print(json.dumps(_as_json(told, wrong, release)))
    else:
        _show(out, told, wrong, release)
    return 1 if any(wrong.values()) else 0


# -- showing them ----------------------------------------------------------------------------------


def _show(
    out: Console, told: list[Telling], wrong: dict[tuple[str, str], list[str]], release: str
) -> None:
    out.print(Text(f"PR #25889 on SGLang {release}\n", picture.HEAD))
    out.print(
        f"DeepSeek-V4's pool with {ROWS} window rows in pages of {PAGE}; the first is padding. "
        "Rows are found in layer 0 and remembered for later layers. Each write is made by "
        "mem_cache/deepseek_v4_memory_pool.py:set_swa_key_buffer_radix_fused.\n"
    )
    legend = (
        "X:X  a row of X, written by X    Y:X  a row of Y, WRITTEN BY X    X:   not written yet"
    )
    out.print(Text(legend, picture.DIM))
    for scene, (title, _) in SCENES.items():
        out.print(picture.chapter(f"{scene}: {title}"))
        for telling in told:
            if telling.scene == scene:
                _show_scene(out, telling)
    rows = []
    for telling in told:
        cells = (telling.scene, telling.mode, telling.outcome, str(len(telling.reports)))
        rows.append((cells, not wrong[telling.scene, telling.mode]))
    out.print()
    columns = ("case", "mode", "outcome", "violations counted")
    out.print(picture.verdicts(f"SGLang {release}", columns, rows))
    for (scene, mode), reasons in wrong.items():
        for reason in reasons:
            out.print(Text(f"{scene}, {mode}: {reason}", picture.BAD))


def _show_scene(out: Console, telling: Telling) -> None:
    """The steps where nothing guards; else the last one, and what the guard says."""
    last = telling.steps[-1]
    if telling.mode == "off":
        for number, step in enumerate(telling.steps, 1):
            out.print(picture.hanging(out, f"{number:>3}", Text(step.words)))
            _show_rows(out, step)
        out.print(f"     off: {telling.outcome}.")
        return
    reported = f"{len(telling.reports)} reported" if telling.reports else "nothing reported"
    if telling.mode == "enforce" and telling.reports:
        out.print(f"     {telling.mode}: {telling.outcome}; {reported}. The same step now:")
        _show_rows(out, last)
    elif telling.outcome == "raised":
        out.print(f"     {telling.mode}: raised before a row of that layer was written:")
        out.print(picture.report(out, str(telling.reports[0])))
    else:
        out.print(f"     {telling.mode}: {telling.outcome}; {reported}.")


def _show_rows(out: Console, step: Step) -> None:
    if step.drawn is not None:
        out.print(step.drawn)
    if step.fault:
        out.print(picture.hanging(out, "", Text(step.fault, picture.BAD)))


def _as_json(
    told: list[Telling], wrong: dict[tuple[str, str], list[str]], release: str
) -> dict[str, Any]:
    scenes: dict[str, dict[str, Any]] = {scene: {} for scene in SCENES}
    for telling in told:
        scenes[telling.scene][telling.mode] = {
            "outcome": telling.outcome,
            "fault": telling.fault,
            "violations": len(telling.reports),
            "kinds": sorted({report.fault.value for report in telling.reports}),
            "report": str(telling.reports[0]) if telling.reports else "",
            "state_unchanged": telling.untouched,
            "wrong": wrong[telling.scene, telling.mode],
        }
    return {
        "report": 25889,
        "release": release,
        "here": True,
        "scenes": scenes,
        "right": not any(wrong.values()),
    }


if __name__ == "__main__":
    sys.exit(main())
