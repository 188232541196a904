"""A run on nodes from beginning to verdict: ask, read again, collect, judge.

All that is known is in the journal, so a run can be taken up again; what is made of it, the
results, the merged events and the report, is written anew at the end of each.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hicache_guard import __version__
from hicache_guard.audit import facts as facts_of
from hicache_guard.audit import judge, play
from hicache_guard.audit.audit import Auditor, Watcher, looked_at
from hicache_guard.audit.facts import Facts
from hicache_guard.audit.judge import Comparison, Judgement, Noise, Verdict
from hicache_guard.audit.plan import Answer, Ask
from hicache_guard.audit.scenarios import none_from
from hicache_guard.audit.wire import LostError, RefusedError, Wire, WireError
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.matches import read_trace
from hicache_guard.nodes import findings, repro_page
from hicache_guard.nodes.findings import LogFile
from hicache_guard.nodes.ledger import JournalError, Ledger
from hicache_guard.nodes.load import Client, Probe, answer_of
from hicache_guard.nodes.workloads import Cycles, Recycling

FORMAT = 1
#: The files of a run.
JOURNAL, RESULTS, MERGED, REPORT = "journal.jsonl", "results.jsonl", "merged.jsonl", "report.html"
#: Most bad events that a report shows one by one.
SHOWN = 200
#: What of a server makes it another one.
_IDENTITY = (
    "version", "model", "dtype", "window", "page", "context", "vocabulary", "full_pool",
    "window_pool", "host_tokens", "speculative", "disaggregation",
)  # fmt: skip
#: Bad events, by kind.
_BAD = ("failed", "lost", "violation", "traceback", "broken", "corrupt")

Workload = Recycling | Cycles


@dataclass(frozen=True)
class Options:
    """How a run is made; times in seconds.

    ``urls`` are asked, in turns; ``watch`` are only looked at, as the servers behind a router.
    """

    urls: Sequence[str]
    out: Path
    watch: Sequence[str] = ()
    resume: bool = False
    concurrency: int = 64
    timeout: float = 120.0
    patience: float = 30.0
    in_a_row: int = 8
    probe: float = 5.0
    key: str | None = None
    logs: Sequence[LogFile] = ()
    traces: Sequence[Path] = ()
    window: int | None = None
    vocabulary: int | None = None


@dataclass
class _Row:
    """A verdict on some of the answers."""

    name: str
    judgement: Judgement
    answers: list[Answer] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)


class Run:
    """One run. ``play`` asks, ``data`` is what came of it, ``write`` keeps that."""

    def __init__(
        self, options: Options, workload: Callable[[Facts], Workload], watcher: Watcher
    ) -> None:
        """Raises ConfigError where it cannot be begun, and WireError where nobody answers."""
        self.options, self.watcher = options, watcher
        for file in options.traces:
            read_trace(file)  # or the whole run would be for nothing
        self.wires = [Wire(url, key=options.key, timeout=options.timeout) for url in options.urls]
        self.watched = [
            Wire(url, key=options.key, timeout=min(options.timeout, 5 * options.probe))
            for url in dict.fromkeys([*options.urls, *options.watch])
        ]
        self.facts = self._facts()
        self.workload = workload(self.facts)
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {options.out}: {error.strerror}") from None
        identity = {name: getattr(self.facts, name) for name in _IDENTITY}
        self.ledger = Ledger(
            options.out / JOURNAL, self.workload.config | identity, resume=options.resume
        )
        self.answers = _Answers(self.ledger, self.workload)
        self.client = Client(
            self.wires,
            self.ledger,
            self.answers.ask,
            concurrency=options.concurrency,
            in_a_row=options.in_a_row,
            patience=options.patience,
            told=lambda _number, _answer: watcher.goes_on(),
        )
        self._found: tuple[list[_Row], list[dict[str, Any]]] = [], []
        #: Why answers were not read again, if they were not.
        self.unread = ""
        self.up: dict[str, bool] = {}

    def _facts(self) -> Facts:
        """Of the first that tells; a router may not know what the servers behind it are."""
        said: WireError | None = None
        for wire in self.watched:
            try:
                return facts_of.ask(
                    wire, window=self.options.window, vocabulary=self.options.vocabulary
                )
            except WireError as error:
                said = said or error
        assert said is not None
        raise said

    # -- asking ----------------------------------------------------------------------------------

    def play(self) -> None:
        """Ask all that is not answered yet. Never raises for what servers or disks do."""
        try:
            self._session()
            for record in self.ledger.orphans:  # nobody waits for these any more
                for wire in self.wires:
                    if wire.url == record["url"]:
                        wire.abort(record["rid"])
            if self.workload.checked:
                self._noise()
            probe = Probe(self.watched, self.ledger, self.options.probe)
            with probe:
                self._rounds()
            self.up = probe.up
        except JournalError as error:
            self.client.stop(str(error))
        except KeyboardInterrupt:
            self.client.stop("interrupted")

    def _session(self) -> None:
        logs = [[log.name, str(log.path.absolute()), log.start] for log in self.options.logs]
        self.ledger.note("session", urls=[wire.url for wire in self.wires], logs=logs)

    def _noise(self) -> None:
        """What cold answers differ by, measured once a run."""
        if self.ledger.noted("noise"):
            return
        audit = Auditor(self.wires[0], self.facts, self.watcher, self.workload.seed).run({})
        if audit.noise is None:
            failed = audit.broken != "interrupted"
            self.client.stop(f"the noise could not be measured: {audit.broken}", failed=failed)
            return
        cold = audit.results[0].judgement
        samples = [sample if math.isfinite(sample) else 1e9 for sample in audit.noise.samples]
        self.ledger.note("noise", samples=samples, verdict=cold.verdict.value, why=cold.why)

    def _rounds(self) -> None:
        left = self.workload.requests - len(self.ledger.outcomes)
        again = sum(number not in self.ledger.reads for number in self.workload.checked)
        self.watcher.begins("requests", left + again)
        for steps in self.workload.rounds:
            for step in steps:
                if self.client.broken:
                    return
                if any(number not in self.ledger.outcomes for number in step):
                    self.client.ask(step)
            self._read(number for step in steps for number in step)

    def _read(self, numbers: Iterable[int]) -> None:
        """Cold readings of what was answered; one at a time, so that they are like each other."""
        session = len(self.ledger.noted("session"))
        for number in numbers:
            if self.client.broken or self.unread or number not in self.workload.checked:
                continue
            answer = self.answers.get(number)
            if answer is None or not answer.whole or number in self.ledger.reads:
                continue
            rid = f"{self.client.space}-{number}.0{session}"
            wire = self.wires[number % len(self.wires)]
            try:
                cold = play.reread(wire, answer, rid=rid)
                found = looked_at(wire, judge.compare(answer, cold), self._known_noise)
            except (LostError, RefusedError) as error:
                self.client.stop(f"a cold reading failed: {error}", failed=True)
            except WireError as error:
                self.unread = str(error)
            else:
                top = [[*each.items()] for each in cold.top]
                self.ledger.note(
                    "read", n=number, logprobs=cold.logprobs, top=top, unread=cold.unread,
                    wavers=found.wavers,
                )  # fmt: skip
                self.watcher.goes_on()

    # -- what came of it -------------------------------------------------------------------------

    def _rows(self) -> list[_Row]:
        noted = self.ledger.noted("noise")
        if not noted:
            return []
        found = Judgement(Verdict(noted[-1]["verdict"]), noted[-1]["why"])
        rows = [_Row("cold", found)]
        for name, numbers in self._groups():
            answers = [self.answers[number] for number in numbers]
            pairs = [
                replace(judge.compare(answer, cold), wavers=self.answers.wavers(number))
                for number, answer in zip(numbers, answers, strict=True)
                if (cold := self.answers.cold(number, answer)) is not None
            ]
            warm = name.endswith(("load-back", "rewrite"))
            missed = none_from("host", "storage")(answers) if name.endswith("load-back") else ""
            judged = judge.judge(
                answers, pairs, self.limit, noise=self._known_noise, warm=warm, missed=missed
            )
            rows.append(_Row(name, judged, answers, pairs))
        return rows

    def _groups(self) -> list[tuple[str, list[int]]]:
        """The answers that are judged together."""
        groups: dict[str, list[int]] = {}
        for number in sorted(self.workload.checked):
            name = "checked answers"
            if isinstance(self.workload, Cycles):
                place = self.workload.place(number)
                name = f"cycle {place.cycle + 1}: {place.phase}"
            if number in self.ledger.outcomes:
                groups.setdefault(name, []).append(number)
        return [*groups.items()]

    @property
    def limit(self) -> float:
        """The largest difference that is no fault."""
        return self._known_noise.limit

    @property
    def _known_noise(self) -> Noise:
        count = max(1, len(self.workload.checked))
        return judge.noise(self._samples, dtype=self.facts.dtype, comparisons=count)

    @property
    def _samples(self) -> list[float]:
        noted = self.ledger.noted("noise")
        return list(noted[-1]["samples"]) if noted else []

    def data(self) -> dict[str, Any]:
        """All of the run that a reader needs, as plain data."""
        records = [*self.ledger.outcomes.values()]
        began = min((record["begun"] for record in records), default=time.time())
        sessions = self.ledger.noted("session")
        began = min([began, *(each["time"] for each in sessions[:1])])
        rows = self._rows()
        events, unmerged = self._events(began, rows)
        self._found = rows, events
        down = [url for url, up in self.up.items() if not up]
        # A server that was only too busy to say so is none that broke.
        bad = [
            event
            for event in events
            if event["kind"] in _BAD or (event["kind"] == "down" and event["url"] in down)
        ]
        counts = Counter(_outcome(record) for record in records)
        counts["refused"] = self.ledger.closings["refused"]
        counts["asked again"] = sum(tries - 1 for tries in self.ledger.tries.values() if tries > 1)
        verdict = self._verdict(rows, bad, down)
        why = self._why(rows, bad, down, verdict)
        return {
            "format": FORMAT,
            "hicache_guard": __version__,
            "workload": self.workload.config["workload"],
            "verdict": verdict,
            "why": why,
            "broken": findings.visible(self.client.broken),
            "unread": findings.visible(self.unread),
            "unmerged": unmerged,
            "started": datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
            "seconds": round(max((r["time"] for r in records), default=began) - began, 3),
            "sessions": len(sessions),
            "run": self.ledger.run,
            "command": shlex.join(["hicache-guard", *sys.argv[1:]]),
            "urls": [wire.url for wire in self.wires],
            "down": down,
            "probes_missed": sum(
                event["kind"] == "down" and event["url"] not in down for event in events
            ),
            "planned": self.workload.requests,
            "counts": dict(counts),
            "hits": sum(record.get("cached", 0) > 0 for record in records),
            "cached_tokens": sum(record.get("cached", 0) for record in records),
            "prompt_tokens": sum(record.get("prompt", 0) for record in records),
            "tokens": sum(len(record.get("output", ())) for record in records),
            "lowest_concurrency": int(self.client.gate.lowest),
            "config": self.workload.config,
            "engine": self.facts.rows(),
            "limit": self.limit,
            "judged": [_judged(row) for row in rows],
            "kinds": dict(Counter(event["kind"] for event in bad)),
            "first": bad[0] | {"after": _before(records, bad[0]["time"])} if bad else None,
            "bad": bad[:SHOWN],
            "timeline": _timeline(records, began),
        }

    def _verdict(self, rows: Sequence[_Row], bad: Sequence[Any], down: Sequence[str]) -> str:
        if bad or down or self.client.failed or any(row.judgement.verdict.bad for row in rows):
            return "fault"
        if self.client.broken or self.unread or len(self.ledger.outcomes) < self.workload.requests:
            return "not finished"
        warm = [row for row in rows if row.name.endswith("load-back")]
        if warm and all(row.judgement.verdict is Verdict.NOT_TESTED for row in warm):
            return "not tested"
        return "healthy"

    def _why(
        self, rows: Sequence[_Row], bad: Sequence[Any], down: Sequence[str], verdict: str
    ) -> list[str]:
        """The verdict in sentences."""
        done, planned = len(self.ledger.outcomes), self.workload.requests
        found = [f"{done:,} of {planned:,} requests are over"]
        kinds = Counter(event["kind"] for event in bad)
        for kind, says in (
            ("failed", "{} failed"), ("lost", "{} were lost"),
            ("violation", "the guard reported {} violations"),
            ("traceback", "logs have {} tracebacks"), ("broken", "logs say {} times what broke"),
        ):  # fmt: skip
            if kinds[kind]:
                found.append(says.format(f"{kinds[kind]:,}"))
        found += [
            f"{row.name}: {row.judgement.verdict.value}: {row.judgement.why}"
            for row in rows
            if row.judgement.verdict.bad
        ]
        found += [f"{url} does not answer any more" for url in down]
        if self.client.broken:
            found.append(f"the run ended early: {self.client.broken}")
        if self.unread:
            found.append(f"answers could not be read again: {self.unread}")
        warm_rows = [row for row in rows if row.name.endswith("load-back")]
        if verdict == "not tested":
            found.append(warm_rows[0].judgement.why)
        return [findings.visible(each) for each in found]

    def _events(self, began: float, rows: Sequence[_Row]) -> tuple[list[dict[str, Any]], list[str]]:
        """All that happened, whoever told it, in the order of time; and what was not read."""
        events = [_event(record) for record in [*self.ledger.outcomes.values()]]
        events += [
            _event(record)
            for record in self.ledger.notes
            if record["kind"] in ("refused", "health") or record.get("again")
        ]
        for row in rows:
            for each in row.comparisons:
                if each.beyond(self.limit):
                    record = self.ledger.outcomes[int(each.warm.ask.name)]
                    text = f"off by {each.largest:.3g} with {each.warm.cached} tokens cached"
                    events.append(_event(record) | {"kind": "corrupt", "text": text})
        unmerged = []
        first = (self.ledger.noted("session") or [{"logs": []}])[0]["logs"]
        starts = {(name, path): start for name, path, start in first}
        for log in self.options.logs:
            start = starts.get((log.name, str(log.path.absolute())), log.start)
            try:
                events += findings.logged(LogFile(log.name, log.path, start), began)
            except ConfigError as error:
                unmerged.append(str(error))
        for file in self.options.traces:
            try:
                events += findings.traced([file], began)
            except ConfigError as error:
                unmerged.append(str(error))
        urls = {event["n"]: event.get("url") for event in events if event["source"] == "client"}
        for event in events:
            event.setdefault("url", urls.get(event["n"]))
        return sorted(events, key=lambda event: float(event["time"])), unmerged

    def results(self) -> list[dict[str, Any]]:
        """One row for each request that was planned."""
        off = {
            int(each.warm.ask.name): each.largest
            for row in self._found[0]
            for each in row.comparisons
        }
        rows = []
        for number in range(self.workload.requests):
            record = self.ledger.outcomes.get(number)
            row: dict[str, Any] = {"n": number, "tries": self.ledger.tries[number]}
            if isinstance(self.workload, Cycles):
                place = self.workload.place(number)
                row |= {"cycle": place.cycle + 1, "phase": place.phase}
            if record is None:
                rows.append(row | {"outcome": "not asked"})
                continue
            row |= {"outcome": _outcome(record), "rid": record["rid"], "url": record["url"]}
            row |= {"begun": record["begun"], "ended": record["time"]}
            names = ("finish", "seconds", "prompt", "cached", "due", "error")
            row |= {name: record[name] for name in names if name in record}
            row["tokens"] = len(record.get("output", ()))
            if number in off:
                row["delta"] = _finite(off[number])
            rows.append(row)
        return rows

    def write(self, data: Mapping[str, Any]) -> list[str]:
        """Write the files of the run, after ``data``; what could not be written, and why."""
        texts = {
            RESULTS: (json.dumps(row) + "\n" for row in self.results()),
            MERGED: (json.dumps(event) + "\n" for event in self._found[1]),
            REPORT: iter([repro_page.page(data)]),
        }
        unwritten = []
        for name, lines in texts.items():
            try:
                _replace(self.options.out / name, lines)
            except OSError as error:
                unwritten.append(f"{self.options.out / name}: {error.strerror or error}")
        return unwritten

    def end(self) -> None:
        self.ledger.end()


class _Answers(Mapping[int, Answer]):
    """Answers by number, made of the ledger when they are asked for."""

    def __init__(self, ledger: Ledger, workload: Workload) -> None:
        self.ledger, self.workload = ledger, workload

    def __getitem__(self, number: int) -> Answer:
        record = self.ledger.outcomes[number]
        ask = self.workload.ask(number, self, self._fresh)
        return answer_of(ask, record)

    def __contains__(self, number: object) -> bool:
        return number in self.ledger.outcomes

    def __iter__(self) -> Iterator[int]:
        return iter(self.ledger.outcomes)

    def __len__(self) -> int:
        return len(self.ledger.outcomes)

    def ask(self, number: int) -> Ask:
        return self.workload.ask(number, self, self._fresh)

    def _fresh(self, number: int) -> bool:
        return number not in self.ledger.before

    def cold(self, number: int, warm: Answer) -> Answer | None:
        """The cold reading of an answer, where there is one."""
        record = self.ledger.reads.get(number)
        if record is None:
            return None
        return Answer(
            warm.ask,
            warm.output,
            tuple(record["logprobs"]),
            tuple({int(token): value for token, value in top} for top in record["top"]),
            finish="reread",
            unread=tuple(record["unread"]),
        )

    def wavers(self, number: int) -> tuple[float, ...]:
        """What more cold readings of an answer differ by, where there are any."""
        return tuple(self.ledger.reads[number].get("wavers", ()))


def _outcome(record: Mapping[str, Any]) -> str:
    return "lost" if record["kind"] == "lost" else str(record["outcome"])


def _event(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of the journal as one of the merged events."""
    kind = str(record["kind"])
    if kind == "ended":
        kind = _outcome(record)
    elif kind == "health":
        kind = "up" if record["up"] else "down"
    elif record.get("again"):
        kind = "asked again"
    text = record.get("error") or f"{record.get('cached', 0)} of {record.get('prompt', 0)} cached"
    event = {
        "time": record["time"], "kind": kind, "source": "client", "rank": "",
        "rid": record.get("rid"), "n": record.get("n"), "text": findings.visible(text),
        "url": record["url"],
    }  # fmt: skip
    if kind in ("up", "down"):
        event["text"] = f"the server is {kind}"
    if "begun" in record:
        event["begun"] = record["begun"]
    return event


def _before(records: Iterable[Mapping[str, Any]], when: float) -> int:
    """How many requests had been answered by then."""
    return sum(
        record["time"] < when and record.get("outcome") in ("answered", "left")
        for record in records
    )


def _judged(row: _Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "verdict": row.judgement.verdict.value,
        "why": findings.visible(row.judgement.why),
        "requests": len(row.answers),
        "read": len(row.comparisons),
        "due": sum(answer.ask.due > 0 for answer in row.answers),
        "hits": sum(answer.cached > 0 for answer in row.answers),
        "cached_tokens": sum(answer.cached for answer in row.answers),
        "from": dict(sum((Counter(answer.cached_from) for answer in row.answers), Counter())),
        "largest": _finite(max((each.largest for each in row.comparisons), default=0.0)),
        "divergence": _finite(
            max((max(each.divergence, default=0.0) for each in row.comparisons), default=0.0)
        ),
    }


#: Columns of the timeline.
_COLUMNS = 120


def _timeline(records: Sequence[Mapping[str, Any]], began: float) -> dict[str, Any]:
    """Outcomes by time: the seconds of a column, and the counts of each."""
    end = max((record["time"] for record in records), default=began)
    step = max((end - began) / _COLUMNS, 1e-3)
    columns: list[Counter[str]] = [Counter() for _ in range(_COLUMNS)]
    for record in records:
        at = min(_COLUMNS - 1, max(0, int((record["time"] - began) / step)))
        columns[at][_outcome(record)] += 1
    return {"step": step, "columns": [dict(column) for column in columns]}


def _finite(number: float) -> float:
    """JSON has no infinity; no log-probability is this far from another."""
    return number if math.isfinite(number) else 1e9


def _replace(path: Path, lines: Iterable[str]) -> None:
    """Write a file beside ``path`` and put it in its place: all of it or nothing."""
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as out:
            out.writelines(lines)
        os.chmod(fresh, 0o644)
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise
