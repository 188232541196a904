"""An audit as one HTML page: the verdict in words first, then what it rests on.

The page asks the network for nothing and is readable without scripts. All that comes from a server
goes through ``_text``; should that ever fail, the page's content policy runs no script but ours.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
import shlex
import unicodedata
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

Data = dict[str, Any]

#: In the order of what a reader has to know.
VERDICTS = ("fault", "no hits", "noise", "equal", "not tested")
#: What stands for an infinite difference in the data.
INFINITE = 1e9
#: Levels of heat, as multiples of the limit; what is over 1 is a fault.
HEAT = (0.01, 0.1, 1 / 3, 1.0, 3.0, 30.0, 1000.0)
HEAT_NAMES = (
    "0", "≤ 0.01", "≤ 0.1", "≤ ⅓", "≤ 1: noise",
    "≤ 3: fault", "≤ 30", "≤ 1000", "more",
)  # fmt: skip
#: Most columns of a heat map; neighbours are put together beyond, and the largest of them shown.
COLUMNS = 240
#: Most rows of a table of details.
ROWS = 40
SOURCES = ("device", "host", "storage")
STATES = ("tree", "live", "free")


def page(data: Data) -> str:
    """The whole page of an audit as ``report.as_data`` gives it, with its ``trace`` if there is."""
    # Not sorted within a verdict: scenarios are played in an order that means something.
    scenarios = sorted(data["scenarios"], key=lambda one: VERDICTS.index(one["verdict"]))
    parts = (
        _verdict(data, scenarios),
        _summary(data, scenarios),
        _details(data, scenarios),
        _noise(data, scenarios),
        _trace(data),
        _engine(data),
        _reproduce(data, scenarios),
    )
    ours = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{ours}'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(_title(data))}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        '<button class="theme" type="button" data-js hidden aria-label="Dark or light page">'
        '<span aria-hidden="true">◐</span></button>\n'
        f"<main>\n{''.join(part for part in parts if part)}</main>\n{_footer(data)}"
        f'<div id="tip" role="status" hidden></div>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n'
    )


# Text


def _text(value: object) -> str:
    """For HTML text and attributes; what is invisible, or turns text around, is spelled out."""

    def shown(mark: str) -> str:
        hidden = mark not in "\n\t" and unicodedata.category(mark) in ("Cc", "Cf", "Cs", "Co", "Cn")
        return f"\\u{ord(mark):04x}" if hidden else mark

    text = str(value)
    return html.escape(text if text.isascii() and text.isprintable() else "".join(map(shown, text)))


#: A minus sign, not a hyphen.
_MINUS = "\u2212"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _number(value: float, digits: int = 2) -> str:
    """Some digits of a number that may be tiny, huge or infinite."""
    if abs(value) >= INFINITE or math.isnan(value):
        return f"{_MINUS}∞" if value < 0 else "∞"
    if value == 0:
        return "0"
    sign, size = _MINUS if value < 0 else "", abs(value)
    digits_of, power = f"{size:.{digits - 1}e}".split("e")
    if -3 <= int(power) < digits:
        return sign + f"{float(f'{size:.{digits - 1}e}'):.{max(0, digits - 1 - int(power))}f}"
    if 0 <= int(power) < 6:
        return sign + f"{size:,.0f}"
    return f"{sign}{digits_of}·10{str(int(power)).translate(_RAISED)}"


def _exact(value: float) -> str:
    """For tooltips: short, with its sign, as any program reads it."""
    return ("+" if value > 0 else "-") + "inf" if abs(value) >= INFINITE else f"{value:+.3g}"


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _rows(pairs: Iterable[tuple[str, str]]) -> str:
    """Pairs of a name and HTML, for a ``dl``."""
    return "".join(f"<div><dt>{_text(name)}</dt><dd>{value}</dd></div>" for name, value in pairs)


def _section(name: str, title: str, *content: str) -> str:
    return (
        f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>\n'
        f"{''.join(content)}</section>\n"
    )


def _kind(verdict: str) -> str:
    """The class of what has a verdict's colours."""
    return _text("k-" + verdict.replace(" ", "-"))


def _badge(verdict: str) -> str:
    return f'<span class="badge {_kind(verdict)}">{_text(verdict)}</span>'


# (1) The verdict


def _limit(data: Data, scenario: Data) -> float:
    """Beyond which a difference is a fault; without noise nothing can be called one."""
    if data["noise"] is None:
        return math.inf
    return float(scenario["limit"])


def _wrong(data: Data, scenario: Data) -> bool:
    """Whether it is a fault for its answers, not only for requests that failed."""
    return bool(scenario["verdict"] == "fault" and scenario["largest"] > _limit(data, scenario))


def _title(data: Data) -> str:
    return f"{_found(data)[1]} {data['url']}"


def _found(data: Data) -> tuple[str, str, str]:
    """A kind of verdict, what the audit found as a headline, and sentences of what it means."""
    tested = [one for one in data["scenarios"] if one["verdict"] != "not tested"]
    of_tested = f"of {_many(len(tested), 'tested scenario')}"
    missed = sum(one["verdict"] == "no hits" for one in tested)
    if data["verdict"] == "fault":
        headline, meaning = _fault(data, tested, of_tested)
        also = f" In {missed}, the cache was not hit where it should be." if missed else ""
        return "fault", headline, meaning + also
    if data["verdict"] == "no hits":
        return (
            "no hits",
            "No hits: the cache is not used where it should be.",
            f"In {missed} {of_tested}, prompts that had just been cached were computed again, "
            "most of them or most of each. No answer was wrong; what the cache should save is paid "
            "for again.",
        )
    warm = [one for one in tested if not one["cold"]]
    hits = sum(one["hits"] for one in warm)
    if not hits:
        return (
            "not tested",
            "Not tested: nothing is known of this cache.",
            "No answer came from the cache. That says nothing for it, and nothing against it.",
        )
    from_cache = f"Answers from the cache ({_many(hits, 'hit')} in {_many(len(warm), 'scenario')})"
    if data["verdict"] == "equal":
        return (
            "equal",
            "Equal: the cache does not change the answers.",
            f"{from_cache} are those of a server without one: the same log-probabilities to the "
            "last digit.",
        )
    return (
        "noise",
        "Only noise: the cache does not change the answers.",
        f"{from_cache} differ from cold ones by rounding only: by "
        f"{_number(max(one['largest'] for one in warm))} at most in log-probability, where up to "
        f"{_number(data['noise']['limit'])} is the noise of this server.",
    )


def _fault(data: Data, tested: Sequence[Data], of_tested: str) -> tuple[str, str]:
    faults = [one for one in tested if one["verdict"] == "fault"]
    wrong = [one for one in faults if _wrong(data, one)]
    warm = [one for one in wrong if not one["cold"]]
    if not wrong:
        failed = sum(len(one["failed"]) for one in faults)
        if not failed:
            return ("Fault: the answers are not what was asked for.", f"{faults[0]['why']}.")
        return (
            "Fault: the server fails requests.",
            f"{_many(failed, 'request')} failed in {len(faults)} {of_tested}. The answers that "
            "came are right as far as they were compared.",
        )
    if any(one["largest"] >= INFINITE for one in wrong):
        by = "by more than any number says: log-probabilities are not finite"
    else:
        times = max(one["largest"] / _limit(data, one) for one in wrong)
        by = f"by up to {_number(times)} times what rounding explains"
    if not warm:
        return (
            "Fault: the answers are wrong even without the cache.",
            f"What this server computes cold is off {by}. Until that is mended, nothing can be "
            "said of its cache.",
        )
    return (
        "Fault: the cache changes the answers.",
        f"In {len(warm)} {of_tested}, the server does not answer from its prefix cache what it "
        f"answers without one; it is off {by}. Whoever hits this cache can be given wrong tokens."
        f"{_besides(faults, wrong, warm)}",
    )


def _besides(faults: Sequence[Data], wrong: Sequence[Data], warm: Sequence[Data]) -> str:
    """What else there is to say where the cache changes answers."""
    said = ""
    if any(one["smallest"] is not None for one in warm):
        said += " A program below shows this on its own."
    if len(wrong) > len(warm):
        said += " Cold answers are off too: look at those first."
    if len(faults) > len(wrong):
        said += f" {len(faults) - len(wrong)} more are at fault for another reason."
    return said


def _verdict(data: Data, scenarios: Sequence[Data]) -> str:
    kind, headline, meaning = _found(data)
    if data["broken"]:
        unfinished = f"The audit could not be finished: {data['broken']}"
        if kind in ("fault", "no hits"):
            meaning = f"{meaning} {unfinished}"
        else:
            meaning = (
                f"Nothing can be said of what was left. Until then: {headline} {meaning}"
                if kind != "not tested"
                else "No scenario was over by then: there is no verdict on the cache."
            )
            kind, headline = "broken", unfinished
    untested = [one["name"] for one in scenarios if one["verdict"] == "not tested"]
    note = f'<p class="note">Not tested: {_text(", ".join(untested))}.</p>' if untested else ""
    long = " long" if len(headline) > 80 else ""
    return (
        f'<header class="hero {_kind(kind)}{long}"><p class="over">Audit of a prefix cache</p>\n'
        f"<h1>{_text(headline)}</h1>\n<p class='lede'>{_text(meaning)}</p>{note}\n"
        f"{_counts(scenarios)}<dl class='facts'>{_rows(_facts(data))}</dl></header>\n"
    )


def _counts(scenarios: Sequence[Data]) -> str:
    counts = Counter(one["verdict"] for one in scenarios)
    shown = "".join(
        f"<li><b>{counts[verdict]}</b> {_badge(verdict)}</li>"
        for verdict in VERDICTS
        if counts[verdict]
    )
    return f'<ul class="counts" aria-label="Scenarios by verdict">{shown}</ul>' if shown else ""


def _facts(data: Data) -> list[tuple[str, str]]:
    engine = data["engine"]
    found = [
        ("Server", f"<code>{_text(data['url'])}</code>"),
        ("Model", f"<code>{_text(engine.get('model', 'unknown'))}</code>"),
        ("Engine", f"SGLang {_text(engine.get('version', 'unknown'))}"),
        ("Date", _date(data["started"])),
        ("Requests", f"{data['requests']:,}"),
        ("Tokens", f"{data['tokens']:,}"),
        ("Duration", _duration(data["seconds"])),
    ]
    if data["noise"]:
        found.append(("False alarms", _false_alarms(data["noise"])))
    return found


def _false_alarms(noise: Data) -> str:
    rate = round(1 / noise["false_alarms"])
    return f"1 in {rate:,} audits of a healthy server, if noise is as assumed"


def _date(told: str) -> str:
    try:
        when = datetime.fromisoformat(told)
    except ValueError:
        return _text(told)
    shown = f"{when.day} {when:%B %Y, %H:%M} {when.tzname() or ''}"
    return f'<time datetime="{_text(told)}">{_text(shown.strip())}</time>'


# (2) The table


def _summary(data: Data, scenarios: Sequence[Data]) -> str:
    if not scenarios:
        return _section("scenarios", "Scenarios", "<p>None was played.</p>")
    names = ("Scenario", "Verdict", "Requests", "Hits", "Cached tokens", "Largest&nbsp;Δ",
             "Mean&nbsp;Δ", "KL", "Time", "Why")  # fmt: skip
    head = "".join(f'<th scope="col" role="columnheader">{name}</th>' for name in names)
    rows = (_summary_row(data, one, number) for number, one in enumerate(scenarios))
    return _section(
        "scenarios",
        "Scenarios",
        '<p class="about">Δ is by how much the log-probability of a generated token is another, '
        "up or down, warm than cold; KL the largest Kullback-Leibler divergence of cold from warm, "
        "in nats. The mark below a largest Δ shows where it lies around the limit of noise (the "
        "line), on a log scale.</p>\n"
        f'<table class="summary" role="table"><thead role="rowgroup"><tr role="row">{head}</tr>'
        f'</thead>\n<tbody role="rowgroup">{"".join(rows)}</tbody></table>\n',
    )


def _summary_row(data: Data, scenario: Data, number: int) -> str:
    tested = scenario["verdict"] != "not tested"
    name = _text(scenario["name"])
    name = f'<a href="#s{number}">{name}</a>' if tested else name
    purpose = f"<small>{_text(scenario['purpose'])}</small>" if scenario["purpose"] else ""
    gauge = _gauge(scenario["largest"], _limit(data, scenario)) if scenario["comparisons"] else ""
    cells = (
        ("Requests", f"{scenario['requests']:,}"),
        ("Hits", f"{scenario['hits']:,}"),
        ("Cached tokens", f"{scenario['cached_tokens']:,}"),
        ("Largest&nbsp;Δ", _number(scenario["largest"]) + gauge),
        ("Mean&nbsp;Δ", _number(scenario["mean"])),
        ("KL", _number(scenario["divergence"])),
        ("Time", _duration(scenario["seconds"])),
    )
    shown = "".join(
        f'<td role="cell" class="n" data-label="{label}">{value if tested else "&ndash;"}</td>'
        for label, value in cells
    )
    return (
        f'<tr role="row" class="{_kind(scenario["verdict"])}">'
        f'<th scope="row" role="rowheader">{name}{purpose}</th>'
        f'<td role="cell" class="v">{_badge(scenario["verdict"])}</td>{shown}'
        f'<td role="cell" class="why">{_text(scenario["why"])}</td></tr>\n'
    )


def _gauge(value: float, limit: float) -> str:
    """Where a value lies around the limit: four decades on each side of it."""
    ratio = value / limit
    place = 50 + 12 * min(4.0, max(-4.0, math.log10(ratio) if ratio > 0 else -4.0))
    return (
        '<svg class="gauge" viewBox="0 0 100 10" aria-hidden="true">'
        f'<path class="axis" d="M2 5H98"/><path class="tick" d="M50 0V10"/>'
        f'<circle class="f{_heat(value, limit)}" r="4" cy="5" cx="{place:.0f}"/></svg>'
    )


# (3) Each scenario


def _details(data: Data, scenarios: Sequence[Data]) -> str:
    tested = [one for one in scenarios if one["verdict"] != "not tested"]
    if not tested:
        return ""
    legend = "".join(
        f'<li><i class="b{level}"></i>{name}</li>' for level, name in enumerate(HEAT_NAMES)
    )
    sources = sorted({_source(name) for one in tested for name in _sources(one)})
    bars = "".join(f'<li><i class="s-{kind}"></i>{_SOURCE_NAMES[kind]}</li>' for kind in sources)
    return _section(
        "answers",
        "Answer by answer",
        '<p class="about">Each row is a request: its prompt and how much of it the cache gave, '
        "then Δ at each generated position, coloured by its size against the limit of noise.</p>\n"
        '<div class="legends">'
        f'<ul class="legend" aria-label="Colours of Δ"><li class="h">Δ / limit</li>{legend}'
        '<li><i class="flipped"></i>cold would be another token</li></ul>\n'
        f'<ul class="legend" aria-label="Marks of a prompt"><li class="h">Prompt</li>{bars}'
        '<li><i class="s-rest"></i>computed</li><li><i class="s-missed"></i>due, but not found</li>'
        '<li><i class="due"></i>due up to here</li></ul></div>\n'
        '<p class="tools" data-js hidden><button type="button" data-all>Open all</button></p>\n',
        *(_scenario(data, one, number) for number, one in enumerate(scenarios) if one in tested),
    )


_SOURCE_NAMES = {
    "device": "from the device",
    "host": "from the host",
    "storage": "from storage",
    "other": "from elsewhere",
    "untold": "cached, not said where",
}


def _source(name: str) -> str:
    return name if name in SOURCES or name == "untold" else "other"


def _sources(scenario: Data) -> set[str]:
    return {name for each in scenario["comparisons"] for name, _ in _cached_parts(each)}


def _cached_parts(each: Data) -> list[tuple[str, int]]:
    """The cached tokens of a request by where they were, in a fixed order."""
    order = {name: place for place, name in enumerate(SOURCES)}
    told = sorted(each["cached_from"].items(), key=lambda part: (order.get(part[0], 9), part[0]))
    rest = each["cached"] - sum(count for _, count in told)
    return [part for part in (*told, ("untold", rest)) if part[1] > 0]


def _scenario(data: Data, scenario: Data, number: int) -> str:
    limit = _limit(data, scenario)
    bad = scenario["verdict"] in ("fault", "no hits")
    content = (
        f'<p class="purpose">{_text(scenario["purpose"])}.</p>' if scenario["purpose"] else "",
        f'<p class="because">{_text(scenario["why"])}</p>',
        _failures(scenario),
        _answers(scenario, limit),
        _flips(scenario, limit),
        _smallest(scenario, data["url"]),
    )
    return (
        f"<details{' open' if bad else ''} class='{_kind(scenario['verdict'])}'>"
        f"<summary><span class='name'>{_text(scenario['name'])}</span> "
        f"{_badge(scenario['verdict'])} <span class='brief'>"
        f"{_many(scenario['requests'], 'request')}, {_many(scenario['hits'], 'hit')}, largest Δ "
        f"{_number(scenario['largest'])}</span></summary>\n"
        f'<div class="inside" id="s{number}">{"".join(content)}</div></details>\n'
    )


def _failures(scenario: Data) -> str:
    failed = scenario["failed"]
    if not failed:
        return ""
    counts: Counter[str] = Counter(failed)
    shown = "".join(
        f"<li>{f'<b>{count} &times;</b> ' if count > 1 else ''}<code>{_text(error)}</code></li>"
        for error, count in counts.most_common(ROWS)
    )
    return f'<h3>{_many(len(failed), "request")} failed</h3><ul class="failed">{shown}</ul>\n'


def _answers(scenario: Data, limit: float) -> str:
    comparisons = scenario["comparisons"]
    if not comparisons:
        return "<p>No answer could be compared.</p>\n"
    positions = max(1, *(len(each["deltas"]) for each in comparisons))
    step = math.ceil(positions / COLUMNS)
    columns = math.ceil(positions / step)
    longest = max(1, *(each["prompt"] for each in comparisons))
    rows = "".join(_answer(each, limit, step, columns, longest) for each in comparisons)
    together = f", {step} to a cell" if step > 1 else ""
    return (
        f'<table class="answers" style="--n:{columns}">'
        f"<caption>{_many(len(comparisons), 'answer')} compared with cold ones; limit of noise "
        f"{_number(limit, 3)}</caption>"
        '<colgroup><col class="c-name"><col class="c-bar"><col class="c-map"><col class="c-n">'
        '<col class="c-kl"></colgroup>\n<thead><tr><th scope="col">Request</th>'
        f'<th scope="col">Prompt <span class="axis">0 &ndash; {longest:,} tokens</span></th>'
        f'<th scope="col">Δ <span class="axis">positions 0 &ndash; {positions - 1:,}{together}'
        "</span></th>"
        '<th scope="col" class="n">Largest</th><th scope="col" class="n">KL</th></tr></thead>\n'
        f"<tbody>{rows}</tbody></table>\n"
    )


def _answer(each: Data, limit: float, step: int, columns: int, longest: int) -> str:
    deltas: list[float] = each["deltas"]
    at = max(range(len(deltas)), key=lambda place: abs(deltas[place]), default=0)
    largest = abs(deltas[at]) if deltas else 0.0
    off = ' class="off"' if largest > limit else ""
    where = f'<span class="at">{f"at {at}" if largest else ""}</span>'
    return (
        f'<tr{off}><th scope="row">{_text(each["request"])}</th>'
        f'<td class="bar">{_bar(each, longest)}</td>'
        f'<td class="map">{_strip(each, limit, step, columns)}</td>'
        f'<td class="n">{_number(largest)}{where}</td>'
        f'<td class="n kl">{_number(max(each["divergence"], default=0.0))}</td></tr>\n'
    )


def _bar(each: Data, longest: int) -> str:
    """The prompt to scale, what the cache gave of it, and what it should have given."""
    place = 0
    marks = [f'<rect class="s-rest" width="{each["prompt"]}" height="10"/>']
    parts = _cached_parts(each)
    for name, count in parts:
        marks.append(f'<rect class="s-{_source(name)}" x="{place}" width="{count}" height="10"/>')
        place += count
    missed = each["due"] - each["cached"]
    if missed > 0:
        marks.append(f'<rect class="s-missed" x="{place}" width="{missed}" height="10"/>')
    if each["due"]:
        marks.append(f'<path class="due" d="M{each["due"]} -1V11"/>')
    told = ", ".join(f"{count:,} from {name}" for name, count in parts if name != "untold")
    said = f"{each['cached']:,} of {each['prompt']:,} tokens cached" + (
        f" ({told})" if told else ""
    )
    said += f", {each['due']:,} due" if each["due"] else ""
    short = f"{each['cached']:,} / {each['prompt']:,}"
    lacks = f' <b class="lack">{_MINUS}{missed:,}</b>' if missed > 0 else ""
    return (
        f'<svg viewBox="0 -1 {longest} 12" preserveAspectRatio="none" role="img" '
        f'aria-label="{_text(said)}"><title>{_text(said)}</title>{"".join(marks)}</svg>'
        f"<span>{short}{lacks}</span>"
    )


def _heat(delta: float, limit: float) -> int:
    """The level of heat of a difference; from 5 on it is a fault."""
    return 1 + bisect_left(HEAT, abs(delta) / limit) if delta else 0


def _strip(each: Data, limit: float, step: int, columns: int) -> str:
    """A row of the heat map: a path for each colour. Its title is all of its numbers."""
    cells = [
        max(each["deltas"][start : start + step], key=abs)
        for start in range(0, len(each["deltas"]), step)
    ]
    runs: dict[int, list[str]] = defaultdict(list)
    start = 0
    levels = [_heat(delta, limit) for delta in cells]
    for place in range(1, len(levels) + 1):
        if place == len(levels) or levels[place] != levels[start]:
            runs[levels[start]].append(f"M{start} 0h{place - start}")
            start = place
    paths = [f'<path class="h{level}" d="{"".join(runs[level])}"/>' for level in sorted(runs)]
    flips = sorted({flip["position"] // step for flip in each["flips"]})
    if flips:
        paths.append(f'<path class="flip" d="{"".join(f"M{at} .42h1" for at in flips)}"/>')
    over = sum(level > 4 for level in levels)
    said = f"{_many(len(cells), 'cell')}, {over} over the limit"
    name = _text(each["request"])
    return (
        f'<svg viewBox="0 -.5 {columns} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{said}" data-step="{step}"><title>{name}, warm less cold:\n'
        f"{' '.join(map(_exact, cells))}</title>{''.join(paths)}</svg>"
    )


def _flips(scenario: Data, limit: float) -> str:
    found = [(each, flip) for each in scenario["comparisons"] for flip in each["flips"]]
    if not found:
        return ""
    found.sort(key=lambda pair: -pair[1]["margin"])
    ties = sum(flip["margin"] <= limit for _, flip in found)
    rows = "".join(
        f'<tr><th scope="row">{_text(each["request"])}</th><td class="n">{flip["position"]:,}</td>'
        f'<td class="n">{_text(flip["token"])}</td><td class="n">{_text(flip["instead"])}</td>'
        f'<td class="n">{_number(flip["margin"], 3)}</td><td>'
        f"{'yes, a tie' if flip['margin'] <= limit else '<b>no</b>'}</td></tr>\n"
        for each, flip in found[:ROWS]
    )
    more = f"<p>And {_many(len(found) - ROWS, 'smaller one')}.</p>" if len(found) > ROWS else ""
    about = f"; {ties} of them ties within noise, that rounding may decide" if ties else ""
    return (
        f"<h3>{_many(len(found), 'flip')}</h3><p>Tokens that cold would have been others{about}. "
        "The margin is by how much, in log-probability.</p>"
        '<div class="scroll"><table class="plain"><thead><tr><th scope="col">Request</th>'
        '<th scope="col" class="n">Position</th><th scope="col" class="n">Answered</th>'
        '<th scope="col" class="n">Cold</th><th scope="col" class="n">Margin</th>'
        f'<th scope="col">Within noise</th></tr></thead><tbody>{rows}</tbody></table></div>{more}\n'
    )


def _smallest(scenario: Data, url: str) -> str:
    smallest = scenario["smallest"]
    if smallest is None:
        return ""
    text: str = smallest["program"]
    file = base64.b64encode(text.encode("utf-8", "backslashreplace")).decode()
    name = _text(smallest["name"])
    return (
        f"<h3>Smallest reproduction: {_many(smallest['requests'], 'request')}, "
        f"{_many(smallest['tokens'], 'token')}</h3>\n"
        f"{_command(_run_of(smallest, url))}"
        f'<div class="program"><p class="tools"><span class="file">{name}</span>'
        '<button type="button" data-copy data-js hidden>Copy</button>'
        f'<a class="button" download="{name}" href="data:text/x-python;base64,{file}">Download</a>'
        f'</p><pre tabindex="0" aria-label="Program {name}">{_text(text)}</pre></div>\n'
    )


# (4) The noise


def _noise(data: Data, scenarios: Sequence[Data]) -> str:
    noise = data["noise"]
    if noise is None:
        return _section("noise", "Noise", "<p>It was not measured.</p>")
    samples = noise["samples"]
    implausible = sum(sample > noise["plausible"] for sample in samples)
    facts = [
        ("Samples", f"{len(samples):,}"),
        ("Largest", _number(max(samples, default=0.0), 3)),
        ("Limit of noise", _number(noise["limit"], 3)),
        ("Plausible rounding", _number(noise["plausible"], 3)),
        ("Comparisons provided for", f"{noise['comparisons']:,}"),
        ("False alarms", _false_alarms(noise)),
    ]
    if implausible:
        facts.append(("No rounding", f"<b>{_many(implausible, 'sample')} beyond plausible</b>"))
    warm = [
        max(map(abs, each["deltas"]), default=0.0)
        for one in scenarios
        if not one["cold"]
        for each in one["comparisons"]
    ]
    return _section(
        "noise",
        "Noise",
        '<div class="noise"><div>'
        '<p class="about">Computed twice without the cache, in batches of other shapes, the same '
        "tokens differ by rounding: this is how much. Beyond the limit a warm answer is a fault; "
        "beyond the plausible bound no rounding of this type explains even a cold one.</p>"
        f"<dl>{_rows(facts)}</dl></div>\n<figure>{_histogram(noise, warm)}<figcaption>Largest Δ "
        "of an answer: cold against cold upwards, from the cache downwards; each to its own "
        "scale.</figcaption></figure></div>\n",
    )


#: The histogram: bins to a decade, its width, and the height of each of its halves.
_BINS, _WIDE, _HIGH = 4, 480, 112


def _bin(value: float, limit: float) -> int:
    """Bins are counted from the limit: below 0 is what is not beyond it."""
    return math.ceil(math.log10(value / limit) * _BINS - 1e-9) - 1


def _histogram(noise: Data, warm: Sequence[float]) -> str:
    """Cold samples upwards and warm answers downwards over one log axis."""
    limit, plausible = float(noise["limit"]), float(noise["plausible"])
    samples: list[float] = noise["samples"]
    bins = [_bin(one, limit) for one in (*samples, *warm, limit, plausible) if 0 < one < INFINITE]
    # One more at each end: for what is 0, and for what is infinite.
    first, last = min(bins) - 1, max(bins) + 1
    scale = _WIDE / (last - first + 1)

    def bin_of(value: float) -> int:
        return last if value >= INFINITE else _bin(value, limit) if value > 0 else first

    def place(value: float) -> float:
        return (math.log10(value / limit) * _BINS - first) * scale

    above, below = Counter(map(bin_of, samples)), Counter(map(bin_of, warm))
    ends = "".join(
        _tick((bin_ - first + 0.5) * scale, name)
        for bin_, name in ((first, "0"), (last, "∞"))
        if above[bin_] or below[bin_]
    )
    lines = _mark("limit", limit, place(limit), -_HIGH - 30) + _mark(
        "plausible", plausible, place(plausible), -_HIGH - 12
    )
    said = (
        f"{len(samples)} cold samples, {len(warm)} warm answers; limit {_number(limit)}, "
        f"plausible up to {_number(plausible)}"
    )
    return (
        f'<svg class="histogram" viewBox="0 {-_HIGH - 32} {_WIDE} {2 * _HIGH + 56}" role="img" '
        f'aria-label="{_text(said)}">{_bars(above, first, scale, -1)}'
        f'{_bars(below, first, scale, 1)}<path class="axis" d="M0 0H{_WIDE}"/>'
        f"{_decades(limit, first, last, place)}{ends}{lines}</svg>"
    )


def _tick(x: float, name: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{_HIGH + 18}">{name}</text>'


def _decades(limit: float, first: int, last: int, place: Callable[[float], float]) -> str:
    low = math.ceil(math.log10(limit) + (first + 1.3) / _BINS)
    high = math.floor(math.log10(limit) + (last - 0.3) / _BINS)
    powers = range(low, high + 1, max(1, math.ceil((high - low + 1) / 8)))
    return "".join(
        _tick(place(10.0**power), f"10{str(power).translate(_RAISED)}" if power else "1")
        for power in powers
    )


def _mark(kind: str, value: float, x: float, y: float) -> str:
    """An upright line with its name, to the side where there is room."""
    left = x > _WIDE / 2
    return (
        f'<path class="{kind}" d="M{x:.1f} {y}V{_HIGH}"/><text class="{kind}" y="{y + 10}" '
        f'x="{x + (-5 if left else 5):.1f}" text-anchor="{"end" if left else "start"}">{kind} '
        f"{_number(value)}</text>"
    )


def _bars(counts: Counter[int], first: int, scale: float, way: int) -> str:
    """Bars up (way -1) or down (1); those beyond the limit with their number."""
    most = max(counts.values(), default=1)
    marks = []
    for bin_, count in sorted(counts.items()):
        high = max(4.0, (_HIGH - 14) * count / most)
        x = (bin_ - first) * scale
        kind = "over" if bin_ >= 0 else "cold" if way < 0 else "warm"
        marks.append(
            f'<rect class="{kind}" x="{x + 0.5:.1f}" width="{scale - 1:.1f}" '
            f'y="{-high if way < 0 else 0:.1f}" height="{high:.1f}"><title>{count}</title></rect>'
        )
        if kind == "over":
            y = high + 13 if way > 0 else -high - 4
            marks.append(
                f'<text class="tick over" x="{x + scale / 2:.1f}" y="{y:.1f}">{count}</text>'
            )
    return "".join(marks)


# (5) The guard's trace


def _trace(data: Data) -> str:
    trace = data.get("trace")
    if not trace:
        return ""
    times = [one["time"] for one in (*trace["matches"], *trace["ownership"])]
    if not times:
        return ""
    start, end = min(times), max(times)
    return _section(
        "trace",
        "What the guard saw",
        _matches(trace["matches"]),
        *(_ownership(trace, side, start, end) for side in ("full", "window")),
    )


def _matches(matches: Sequence[Data]) -> str:
    if not matches:
        return ""
    ordered = sorted(matches, key=lambda one: one["time"])
    most = max(1, *(one["matched"] for one in ordered))
    bars: dict[str, list[str]] = defaultdict(list)
    tips = []
    for place, one in enumerate(ordered):
        x = place + 0.5
        if one["matched"]:
            bars["matched" if one["clipped"] is None else "clipped"].append(
                f"M{x} {most}v{-one['matched']}"
            )
        if one["proved"]:
            bars["proved"].append(f"M{x} {most}v{-one['proved']}")
        tips.append(f"{one['request']}: {one['matched']:,} matched, {one['proved']:,} proved")
    paths = "".join(
        f'<path class="m-{kind}" d="{"".join(bars[kind])}"/>'
        for kind in ("matched", "clipped", "proved")
        if bars[kind]
    )
    clipped = [one for one in ordered if one["clipped"] is not None]
    said = f"{_many(len(ordered), 'match').replace('matchs', 'matches')}, {len(clipped)} clipped"
    lines = "\n".join(_text(tip.replace("\n", " ")) for tip in tips)
    return (
        f"<h3>Matched and proved</h3><p>{said}: what the tree claimed of a request's prompt, and "
        "what of it the guard could prove.</p>"
        '<ul class="legend"><li><i class="m-proved"></i>proved</li><li><i class="m-clipped"></i>'
        "matched, but not proved</li></ul>"
        f'<div class="chart"><span class="y"><span>{most:,} tokens</span><span>0</span></span>'
        f'<svg class="matches" viewBox="0 0 {len(ordered)} {most}" preserveAspectRatio="none" '
        f'role="img" aria-label="{said}" data-lines><title>Requests in order of time\n{lines}'
        f'</title>{paths}</svg><span class="x"><span>first match</span><span>last</span></span>'
        f"</div>{_clipped(clipped)}\n"
    )


def _clipped(clipped: Sequence[Data]) -> str:
    if not clipped:
        return ""
    groups = sorted({name for one in clipped for name in one["by_group"]})
    head = "".join(f'<th scope="col" class="n">{_text(name)}</th>' for name in groups)
    rows = "".join(
        f'<tr><th scope="row">{_text(one["request"])}</th><td class="n">{one["matched"]:,}</td>'
        f'<td class="n">{one["proved"]:,}</td>'
        + "".join(f'<td class="n">{one["by_group"].get(name, 0):,}</td>' for name in groups)
        + f"<td>{_text(one['clipped'])}</td></tr>\n"
        for one in clipped[:ROWS]
    )
    more = f"<p>And {len(clipped) - ROWS:,} more.</p>" if len(clipped) > ROWS else ""
    return (
        '<div class="scroll"><table class="plain"><caption>Clipped matches</caption><thead><tr>'
        '<th scope="col">Request</th><th scope="col" class="n">Matched</th><th scope="col" '
        f'class="n">Proved</th>{head}<th scope="col">Why</th></tr></thead><tbody>{rows}</tbody>'
        f"</table></div>{more}"
    )


def _ownership(trace: Data, side: str, start: float, end: float) -> str:
    """A row for each page of a pool that changed hands, coloured by whose it was."""
    events = sorted(
        (one for one in trace["ownership"] if one["side"] == side), key=lambda one: one["time"]
    )
    if not events:
        return ""
    pages = sorted({one["page"] for one in events})
    row = {number: place for place, number in enumerate(pages)}
    scale = 1000 / max(end - start, 1e-9)
    runs: dict[str, list[str]] = defaultdict(list)
    since: dict[int, Data] = {}

    def close(one: Data, until: float) -> None:
        x = round((one["time"] - start) * scale)
        wide = max(1, round((until - start) * scale) - x)
        runs[one["state"]].append(f"M{x} {row[one['page']]}h{wide}")

    for one in events:
        if one["page"] in since:
            close(since[one["page"]], one["time"])
        since[one["page"]] = one
    for one in since.values():
        close(one, end)
    paths = "".join(
        f'<path class="o-{state}" d="{"".join(runs[state])}"/>' for state in STATES if runs[state]
    )
    cuts = "".join(
        f"M{round((one['time'] - start) * scale)} -.5V{len(pages)}"
        for one in trace["matches"]
        if one["clipped"] is not None
    )
    if cuts:
        paths += f'<path class="cut" d="{cuts}"/>'
    legend = "".join(f'<li><i class="o-{state}"></i>{name}</li>' for state, name in _STATE_NAMES)
    high = min(420, max(60, 8 * len(pages)))
    said = f"{_many(len(pages), 'page')} of the {side} pool over {_duration(end - start)}"
    return (
        f'<h3>Pages of the {side} pool</h3><ul class="legend">{legend}<li><i class="cut"></i>a '
        'match was clipped</li></ul><div class="chart"><span class="y">'
        f"<span>page {pages[0]:,}</span><span>{pages[-1]:,}</span>"
        f'</span><svg class="pages" style="height:{high}px" viewBox="0 -.5 1000 {len(pages)}" '
        f'preserveAspectRatio="none" role="img" aria-label="{_text(said)}">{paths}</svg>'
        f'<span class="x"><span>0 s</span><span>{_duration(end - start)}</span></span></div>\n'
    )


_STATE_NAMES = (("live", "of a request"), ("tree", "of the tree"), ("free", "free"))


# (6) and (7)


def _engine(data: Data) -> str:
    if not data["engine"]:
        return ""
    rows = "".join(
        f'<tr><th scope="row">{_text(name.replace("_", " "))}</th><td>{_assumed(value)}</td></tr>\n'
        for name, value in data["engine"].items()
    )
    return _section(
        "engine",
        "The engine",
        '<p class="about">What the server says of itself. What it does not say was assumed, and is '
        "marked.</p>"
        f'<table class="engine"><tbody>{rows}</tbody></table>\n',
    )


def _assumed(value: str) -> str:
    told, found, _ = value.partition(" (assumed)")
    return f"{_text(told)} <em>assumed</em>" if found else _text(value)


def _reproduce(data: Data, scenarios: Sequence[Data]) -> str:
    smallest = [one["smallest"] for one in scenarios if one["smallest"] is not None]
    programs = (
        "<p>Each fault on its own, with the programs above:</p>"
        + "".join(_command(_run_of(one, data["url"])) for one in smallest)
        if smallest
        else ""
    )
    return _section(
        "again",
        "To do it again",
        "<p>The whole audit with the same prompts:</p>",
        _command(data["command"]),
        programs,
    )


def _run_of(smallest: Data, url: str) -> str:
    return f"python {shlex.quote(smallest['name'])} {shlex.quote(url)}"


def _command(line: str) -> str:
    return (
        f'<div class="command"><pre tabindex="0">{_text(line)}</pre>'
        '<button type="button" data-copy data-js hidden>Copy</button></div>\n'
    )


def _footer(data: Data) -> str:
    return (
        f"<footer>hicache-guard {_text(data['hicache_guard'])}, audit format "
        f"{_text(data['format'])}, seed {_text(data['seed'])}</footer>\n"
    )


_LIGHT = """--bg:#f6f6f3;--card:#fff;--ink:#191d22;--soft:#565e68;--line:#dcdfe2;--link:#0b57a4;
--fault:#b0191f;--fault-bg:#fdeceb;--no-hits:#8a4b00;--no-hits-bg:#fff3dd;--noise:#1b6a51;
--noise-bg:#e6f4ee;--equal:#1a6b2f;--equal-bg:#e5f4e7;--not-tested:#5d646c;--not-tested-bg:#eceeef;
--broken:#7a2a8c;--broken-bg:#f7ebfa;
--h0:#eff2f4;--h1:#e2e9f0;--h2:#cfdae5;--h3:#b7c7d8;--h4:#9bb0c6;--h5:#f5b52e;--h6:#ee701f;
--h7:#d01c2c;--h8:#7d0047;
--rest:#e4e7ea;--device:#3d7fc4;--host:#7a5cc0;--storage:#2a9186;--other:#8a8f45;--untold:#5b88b4;
--missed:#f0b9a8;--due:#191d22;--live:#e08a2b;--tree:#4a8ac7;--free:#e4e7ea"""
_DARK = """--bg:#0f1215;--card:#171b20;--ink:#e8eaed;--soft:#a3abb5;--line:#2d343c;--link:#8abdf5;
--fault:#ff8a83;--fault-bg:#3a1618;--no-hits:#f5b95f;--no-hits-bg:#352508;--noise:#7fd3b3;
--noise-bg:#10291f;--equal:#86d696;--equal-bg:#122a18;--not-tested:#a0a7af;--not-tested-bg:#242a30;
--broken:#dda6ec;--broken-bg:#2d1735;
--h0:#1f252c;--h1:#24303c;--h2:#2b3c4d;--h3:#345069;--h4:#426684;--h5:#c98a16;--h6:#ff8a33;
--h7:#ff4d4d;--h8:#ffc6ec;
--rest:#2b3239;--device:#5b9fe3;--host:#a287ea;--storage:#46b8ab;--other:#b6bb62;--untold:#7ba5cf;
--missed:#7d3a2c;--due:#fff;--live:#f0a04b;--tree:#5b9fe3;--free:#2b3239"""
_KINDS = "".join(
    f".k-{kind}{{--k:var(--{kind});--kb:var(--{kind}-bg)}}"
    for kind in ("fault", "no-hits", "noise", "equal", "not-tested", "broken")
)
_PAINT = "".join(
    f".h{level}{{stroke:var(--h{level})}}.f{level}{{fill:var(--h{level})}}"
    f".b{level}{{background:var(--h{level})}}"
    for level in range(9)
) + "".join(
    f"rect.s-{kind}{{fill:var(--{kind})}}i.s-{kind}{{background:var(--{kind})}}"
    for kind in ("rest", "missed", "device", "host", "storage", "other", "untold")
)
_STYLE = re.sub(
    r"\s*\n\s*",
    "\n",
    f"""
:root{{color-scheme:light;{_LIGHT}}}
@media screen and (prefers-color-scheme:dark){{
:root:not([data-theme=light]){{color-scheme:dark;{_DARK}}}}}
@media screen{{:root[data-theme=dark]{{color-scheme:dark;{_DARK}}}}}
{_KINDS}
{_PAINT}
"""
    """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-behavior:smooth}
body{margin:0;background:var(--bg);color:var(--ink);
 font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Helvetica Neue",sans-serif}
main,footer{max-width:1240px;margin:0 auto;padding:0 clamp(14px,3vw,32px)}
code,pre,.file{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
 font-size:.86em;overflow-wrap:anywhere}
a{color:var(--link)}
:focus-visible{outline:2px solid var(--link);outline-offset:2px}
h1,h2,h3{line-height:1.18;text-wrap:balance;overflow-wrap:anywhere}
h2{font-size:1.5rem;margin:0 0 .5rem;letter-spacing:-.012em}
h3{font-size:1.02rem;margin:1.6rem 0 .4rem}
section{margin:3rem 0}
.about{color:var(--soft);max-width:76ch;margin:0 0 1rem}
.hero{margin:clamp(16px,3vw,32px) 0 0;padding:clamp(20px,4vw,44px);border-radius:14px;
 background:var(--kb);border-left:8px solid var(--k)}
.hero h1{font-size:clamp(1.8rem,1.1rem + 3.1vw,3.3rem);margin:.1em 0 .35em;color:var(--k);
 letter-spacing:-.022em;line-height:1.08}
.hero.long h1{font-size:clamp(1.4rem,1rem + 1.6vw,2.1rem)}
.over{margin:0;color:var(--soft);font-size:.86rem}
.lede{font-size:clamp(1.05rem,1rem + .4vw,1.28rem);max-width:66ch;margin:0;overflow-wrap:anywhere}
.note{color:var(--soft);margin:.8rem 0 0;max-width:76ch;overflow-wrap:anywhere}
.counts{list-style:none;display:flex;flex-wrap:wrap;gap:.4rem 1.2rem;padding:0;margin:1.3rem 0 0}
.counts b{font-size:1.25rem;font-variant-numeric:tabular-nums;margin-right:.15rem}
dl{margin:0}dt{color:var(--soft);font-size:.82rem}dd{margin:0;overflow-wrap:anywhere}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,215px),1fr));
 gap:.9rem 1.6rem;margin-top:1.5rem;padding-top:1.2rem;border-top:1px solid var(--line)}
.badge{display:inline-block;white-space:nowrap;color:var(--k);background:var(--kb);font-weight:650;
 border:1px solid var(--k);border-radius:99px;padding:0 .62em;font-size:.82rem;line-height:1.6}
.k-fault>.v .badge,.k-no-hits>.v .badge,details.k-fault>summary .badge,
details.k-no-hits>summary .badge
 {color:var(--card);background:var(--k)}
table{border-collapse:collapse;width:100%;font-size:.92rem}
caption{text-align:left;color:var(--soft);padding:.3rem 0 .5rem;font-size:.88rem}
th{text-align:left;font-weight:600;vertical-align:top}
td{vertical-align:top}
thead th{color:var(--soft);font-size:.8rem;font-weight:600;vertical-align:bottom;line-height:1.25;
 border-bottom:1px solid var(--line)}
th,td{padding:.5rem .55rem}
tbody tr+tr>*{border-top:1px solid var(--line)}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.scroll{overflow-x:auto}
.summary{background:var(--card);border-radius:10px;border:1px solid var(--line);
 border-collapse:separate;border-spacing:0}
.summary thead th:nth-child(n+3):nth-child(-n+9){text-align:right}
.summary tbody th{min-width:10.5rem}
.summary small{display:block;color:var(--soft);font-weight:400;font-size:.8rem;line-height:1.35}
.summary .why{min-width:13rem;max-width:24rem;font-size:.86rem;line-height:1.42;
 overflow-wrap:anywhere}
.summary tr.k-fault>*,.summary tr.k-no-hits>*{background:var(--kb)}
.summary tr.k-fault>th,.summary tr.k-no-hits>th{box-shadow:inset 5px 0 var(--k)}
.summary tr.k-fault .why,.summary tr.k-no-hits .why{color:var(--k);font-weight:600}
.summary tr.k-not-tested>*{color:var(--not-tested);font-weight:400}
.gauge{display:block;width:72px;height:8px;margin:.2rem 0 0 auto}
.gauge .axis{stroke:var(--soft);opacity:.4;stroke-width:2}
.gauge .tick{stroke:var(--ink);stroke-width:2}
.legends{display:grid;gap:.35rem;margin:0 0 1rem}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.15rem .95rem;padding:0;margin:.3rem 0;
 font-size:.83rem;color:var(--soft)}
.legend .h{font-weight:650;color:var(--ink);min-width:4.2rem}
.legend i{display:inline-block;width:1.15em;height:.8em;margin-right:.4em;border-radius:2px;
 vertical-align:-.04em;print-color-adjust:exact;-webkit-print-color-adjust:exact}
i.b0{box-shadow:inset 0 0 0 1px var(--line)}
i.flipped{background:linear-gradient(var(--h4) 60%,var(--ink) 60%)}
.legend i.due{width:2px;height:1.1em;background:var(--due);border-radius:0;vertical-align:-.2em}
details{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:0 0 .6rem}
details.k-fault,details.k-no-hits{border-left:5px solid var(--k)}
summary{cursor:pointer;padding:.6rem .9rem;display:flex;flex-wrap:wrap;gap:.2rem .7rem;
 align-items:baseline}
summary::before{content:"▸";color:var(--soft);transition:transform .12s}
details[open]>summary::before{transform:rotate(90deg)}
summary::-webkit-details-marker{display:none}
summary .name{font-weight:650;overflow-wrap:anywhere}
summary .brief{color:var(--soft);font-size:.88rem}
.inside{padding:.1rem .9rem 1.1rem;scroll-margin-top:4.5rem}
.inside>p{margin:.2rem 0 .5rem;max-width:86ch;overflow-wrap:anywhere}
.purpose{color:var(--soft)}
.k-fault>.inside>.because,.k-no-hits>.inside>.because{color:var(--k);font-weight:600}
.failed{margin:.2rem 0 .8rem;padding-left:1.2rem;overflow-wrap:anywhere}
.answers{table-layout:fixed;line-height:1.25;margin-top:.6rem;font-size:.86rem}
.answers th,.answers td{padding:.16rem .5rem;vertical-align:middle;border-top:0!important}
.answers .map{padding-block:.06rem}
.answers thead th{padding-bottom:.4rem;vertical-align:bottom}
.answers tbody th{font-weight:500;overflow-wrap:anywhere}
.answers .axis{font-weight:400;margin-left:.35em}
.c-name{width:7%}.c-bar{width:33%}.c-n{width:12.5%}.c-kl{width:9%}
.bar svg{width:calc(100% - 8.9rem);height:11px;vertical-align:middle;overflow:visible}
.bar span{display:inline-block;width:8.6rem;padding-left:.6rem;white-space:nowrap;
 font-variant-numeric:tabular-nums;color:var(--soft);font-size:.82rem}
.bar .lack{color:var(--no-hits)}
.bar .due{stroke:var(--due);stroke-width:2;vector-effect:non-scaling-stroke}
.map svg{display:block;width:min(100%,calc(var(--n)*26px));height:19px;cursor:crosshair}
.map path{stroke-width:1;fill:none;shape-rendering:crispEdges}
.map .flip{stroke:var(--ink);stroke-width:.16}
.at{display:inline-block;min-width:3.3em;text-align:left;padding-left:.4em;
 color:var(--soft);font-weight:400;font-size:.8rem}
.off>th,.off>.n:not(.kl){font-weight:750;color:var(--fault)}
.off>th::before{content:"● "}
.plain td,.plain th{white-space:nowrap}
.plain{width:auto;font-size:.88rem}.plain td,.plain th{padding:.26rem .8rem .26rem 0}
button,.button{font:inherit;font-size:.84rem;color:var(--ink);background:var(--card);cursor:pointer;
 border:1px solid var(--soft);border-radius:6px;padding:.18rem .7rem;text-decoration:none;
 display:inline-block}
[hidden]{display:none!important}
button:hover,.button:hover{border-color:var(--link);color:var(--link)}
.tools{display:flex;gap:.5rem;align-items:center;margin:.3rem 0}
.program{border:1px solid var(--line);border-radius:8px;overflow:hidden;margin:.5rem 0 1rem}
.program .tools{padding:.4rem .6rem;margin:0;border-bottom:1px solid var(--line);flex-wrap:wrap}
.file{flex:1;color:var(--soft);min-width:8rem}
pre{margin:0;padding:.7rem .8rem;overflow:auto;max-height:24rem;background:var(--bg);
 line-height:1.45;overflow-wrap:normal;tab-size:4;font-size:.8rem}
.command{display:flex;gap:.5rem;align-items:center;margin:.4rem 0}
.command pre{flex:1;min-width:0;white-space:pre-wrap;overflow-wrap:anywhere;border-radius:6px;
 border:1px solid var(--line);background:var(--card)}
.inside .command pre{background:var(--bg)}
.noise{display:grid;grid-template-columns:minmax(0,5fr) minmax(0,7fr);gap:2rem;align-items:start}
.noise dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:.8rem 1.2rem}
.noise dl b{color:var(--fault)}
figure{margin:0}figcaption{color:var(--soft);font-size:.86rem;margin-top:.3rem}
.histogram{width:100%;height:auto;display:block;overflow:visible}
.histogram text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
.histogram text.tick{text-anchor:middle}
.histogram .axis{stroke:var(--soft)}
.histogram .cold{fill:var(--h4)}.histogram .warm{fill:var(--noise)}.histogram .over{fill:var(--h7)}
.histogram path.limit{stroke:var(--fault);stroke-width:1.5}
.histogram text.over,.histogram text.limit{fill:var(--fault);font-weight:650}
.histogram path.plausible{stroke:var(--soft);stroke-dasharray:4 3}
.chart{display:grid;grid-template-columns:auto minmax(0,1fr);gap:.2rem .6rem;font-size:.8rem;
 color:var(--soft);margin:.4rem 0 1rem;font-variant-numeric:tabular-nums}
.chart .y,.chart .x{display:flex;justify-content:space-between}
.chart .y{flex-direction:column;text-align:right}.chart .x{grid-column:2}
.chart svg{width:100%;background:var(--card);border:1px solid var(--line)}
.chart path{fill:none;stroke-width:1;shape-rendering:crispEdges}
.matches{height:170px;cursor:crosshair}
.matches path{stroke-width:.8}
.m-matched{stroke:var(--device)}.m-clipped{stroke:var(--h7)}.m-proved{stroke:var(--device)}
i.m-clipped{background:var(--h7)}i.m-proved{background:var(--device)}
.o-live{stroke:var(--live)}.o-tree{stroke:var(--tree)}.o-free{stroke:var(--free)}
i.o-live{background:var(--live)}i.o-tree{background:var(--tree)}i.o-free{background:var(--free)}
.chart .cut{stroke:var(--h7);stroke-width:2;vector-effect:non-scaling-stroke}
.legend i.cut{width:2px;height:1.1em;background:var(--h7);vertical-align:-.2em}
.engine{max-width:860px;background:var(--card);border:1px solid var(--line)}
.engine th{width:13rem;color:var(--soft);font-weight:500}.engine td{overflow-wrap:anywhere}
.engine th,.engine td{padding:.3rem .8rem}
.engine em{color:var(--no-hits);font-size:.85em;margin-left:.4em}
footer{color:var(--soft);font-size:.84rem;padding-top:1rem;padding-bottom:2.5rem}
.theme{position:fixed;top:12px;right:12px;z-index:2;border-radius:99px;width:2.4rem;height:2.4rem;
 padding:0;font-size:1.15rem;line-height:1}
#tip{position:fixed;z-index:3;pointer-events:none;background:var(--ink);color:var(--bg);
 padding:.25rem .55rem;border-radius:6px;font-size:.82rem;max-width:min(26rem,90vw);
 font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
@media screen and (max-width:1040px){
.summary,.summary tbody,.summary tr,.summary th,.summary td{display:block}
.summary thead{position:absolute;clip-path:inset(50%);height:1px;width:1px;overflow:hidden}
.summary tbody tr{display:grid;grid-template-columns:repeat(auto-fill,minmax(74px,1fr));
 padding:.6rem .7rem;gap:.1rem .6rem}
.summary tbody tr.k-fault,.summary tbody tr.k-no-hits{background:var(--kb);
 box-shadow:inset 5px 0 var(--k)}
.summary tbody tr>*{border:0!important;padding:.12rem .2rem;box-shadow:none!important}
.summary tbody tr+tr{border-top:1px solid var(--line)}
.summary th,.summary .why,.summary .v{grid-column:1/-1;max-width:none!important}
.summary .n{text-align:left}.summary .n::before{content:attr(data-label);display:block;
 color:var(--soft);font-size:.74rem}
.summary .k-not-tested .n{display:none}
.gauge{margin-left:0}
.noise{grid-template-columns:minmax(0,1fr);gap:1rem}
}
@media screen and (max-width:760px){
.answers colgroup,.answers thead{display:none}
.answers,.answers caption,.answers tbody,.answers tr,.answers td,.answers th{display:block}
.answers tr{display:grid;grid-template-columns:minmax(0,1fr) auto auto;padding:.35rem 0}
.answers tbody tr+tr{border-top:1px solid var(--line)}
.answers th,.answers td{padding:.12rem .1rem}
.facts{grid-template-columns:repeat(auto-fill,minmax(min(100%,150px),1fr));gap:.7rem 1rem}
.answers .bar,.answers .map{grid-column:1/-1}.answers th{grid-area:1/1}
.answers .n{grid-row:1;padding-left:.8rem}.answers .n.kl::before{content:"KL ";color:var(--soft)}
.answers .n:not(.kl)::before{content:"Δ ";color:var(--soft);font-weight:400}
.map svg{width:100%}
.engine th{width:42%}
.inside{padding-inline:.7rem}
}
@media print{
html{font-size:11px}body{background:#fff;font-size:1rem}.theme,button,.button,#tip{display:none!important}
main{max-width:none;padding:0}section{margin:1.4rem 0}
.hero,.badge,.summary *,svg{print-color-adjust:exact;-webkit-print-color-adjust:exact}
tr,figure,.hero,.chart,.command{break-inside:avoid}h2,h3,summary,.legend{break-after:avoid}
pre{max-height:9cm;overflow:hidden;white-space:pre-wrap;overflow-wrap:anywhere}
}
@media (prefers-reduced-motion:reduce){*{transition:none!important;scroll-behavior:auto!important}}
""",
)

_SCRIPT = """
(() => {
  const all = (what) => [...document.querySelectorAll(what)];
  const root = document.documentElement, tip = document.getElementById("tip");
  all("[data-js]").forEach((each) => { each.hidden = false; });

  const system = matchMedia("(prefers-color-scheme: dark)");
  document.querySelector(".theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  const opener = document.querySelector("[data-all]");
  opener?.addEventListener("click", () => {
    const closed = all("details").some((each) => !each.open);
    all("details").forEach((each) => { each.open = closed; });
    opener.textContent = closed ? "Close all" : "Open all";
  });
  const reveal = () => {
    const found = /^#s\\d+$/.test(location.hash) && document.querySelector(location.hash);
    if (found) { found.parentElement.open = true; found.scrollIntoView(); }
  };
  addEventListener("hashchange", reveal);
  reveal();

  const copy = async (pre) => {
    try {
      await navigator.clipboard.writeText(pre.textContent);
      return true;
    } catch {
      getSelection().selectAllChildren(pre);
      return document.execCommand("copy");
    }
  };
  all("[data-copy]").forEach((button) => button.addEventListener("click", async () => {
    const done = await copy(button.closest(".command, .program").querySelector("pre"));
    button.textContent = done ? "Copied" : "Select and copy";
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  }));

  // A chart's title holds all of its numbers; with a script, one at a time is shown.
  const told = new WeakMap();
  const numbers = (chart) => {
    if (!told.has(chart)) {
      const [head, ...lines] = chart.querySelector("title").textContent.split("\\n");
      const values = "lines" in chart.dataset ? lines : lines.join(" ").split(" ");
      told.set(chart, { head, values });
      chart.querySelector("title").remove();
    }
    return told.get(chart);
  };
  const words = (chart, at) => {
    const { head, values } = numbers(chart);
    if (!values[at]) return "";
    if ("lines" in chart.dataset) return values[at];
    const step = Number(chart.dataset.step), first = at * step;
    const place = step > 1 ? `positions ${first} to ${first + step - 1}` : `position ${first}`;
    return `${head.replace(":", ` at ${place}:`)} ${values[at]}`;
  };
  document.addEventListener("pointermove", (event) => {
    const chart = event.target.closest?.("svg[data-step], svg[data-lines]");
    let text = "";
    if (chart) {
      const box = chart.getBoundingClientRect();
      const share = (event.clientX - box.left) / box.width;
      text = words(chart, Math.floor(share * chart.viewBox.baseVal.width));
    }
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const above = event.clientY - tip.offsetHeight - 12;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 4 ? above : event.clientY + 18}px`;
  });
})();
"""
