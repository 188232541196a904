"""Runs of ``churn_scale`` as one HTML page: a table, and how the guard's cost grows, as plots.

Plots are inline SVG in colours of the page, light or dark; no script, and nothing from the network.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hicache_guard.repro.churn_report import (
    POOL,
    WINDOW,
    Measured,
    Run,
    faults,
    growth_rows,
    part_rows,
    rows,
)

_WIDTH, _HEIGHT = 460, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 40
Point = tuple[float, float]


@dataclass(frozen=True)
class Plot:
    """One plot; each of ``series`` is a name and its points. ``dots`` are not joined."""

    title: str
    about: str
    across: str
    up: str
    series: Sequence[tuple[str, Sequence[Point]]]
    log: bool = False
    dots: bool = False
    #: A line at this height: what there is to compare with.
    line: float | None = None


def page(measured: Measured) -> str:
    """The whole page."""
    run = measured.main
    head = run.head
    title = f"Churn on SGLang {head['release']}"
    plots = "".join(_figure(plot) for plot in _plots(measured) if any(s for _, s in plot.series))
    mode = head["mode"]
    body = (
        f"<h1>{_text(title)}</h1>\n<p>{_text(_verdict(run))}</p>\n",
        f"<p class='soft'>{_text(_how(run))}</p>\n",
        _grid(("", "guard off", mode), rows(run)),
        "<h2>Cost</h2>\n<p class='soft'>CPU seconds of the functions that touch KV, guarded by "
        "unguarded; 1 would be free.</p>\n",
        _grid(("CPU seconds", "guard off", mode, "ratio"), part_rows(run)),
        f"<div class='plots'>{plots}</div>\n",
        _grown_table(measured),
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body><main>\n"
        f"{''.join(body)}</main></body>\n</html>\n"
    )


def _grown_table(measured: Measured) -> str:
    grown = growth_rows(measured)
    names = ("run", "guard off", "guarded", "ratio", "faults, guard off", "faults, guarded")
    return f"<h2>Runs in which one thing grows</h2>\n{_grid(names, grown)}" if grown else ""


def _text(value: object) -> str:
    return html.escape(str(value))


def _verdict(run: Run) -> str:
    told = []
    for mode, name in (("off", "Without the guard"), (run.head["mode"], "With it")):
        line = run.last(mode)
        if line is None:
            told.append(f"{name}: nothing was measured.")
            continue
        wrong = ", ".join(f"{count:,} {kind}" for kind, count in faults(line).items())
        told.append(f"{name}: {wrong or 'no fault'} in {line['finished']:,} requests.")
    ratio = run.ratio()
    if ratio is not None:
        told.append(f"The guard costs {ratio:.2f} times the CPU time.")
    return " ".join(told)


def _how(run: Run) -> str:
    head, scale = run.head, run.head["scale"]
    return (
        f"{head['date']}, {head['machine']}; {head['tree']} tree, {scale['slots']:,} full slots in "
        f"pages of {scale['page_size']}, a window of {scale['window']:,} tokens, requests of up to "
        f"{scale['longest']:,} tokens, seed {head['seed']}; {head['requests']:,} requests were "
        "asked for."
    )


def _grid(names: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>'
        + "".join(f"<td>{_text(cell)}</td>" for cell in row[1:])
        + "</tr>\n"
        for row in lines
    )
    return (
        f"<div class='scroll'><table><thead><tr>{head}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>\n"
    )


# --- plots ---------------------------------------------------------------------------------


def _plots(measured: Measured) -> list[Plot]:
    run = measured.main
    ratios = run.ratios()
    served = [guarded["finished"] for _, guarded in run.pairs()]
    over = [(served[at], ratio) for at, (_, ratio) in enumerate(ratios)]
    return [
        Plot("Over the run", "Each point is a slice of requests that both modes served.",
             "requests", "cost", [("cost", over)], dots=True, line=1.0),
        Plot("By the size of the tree", "The same slices, by what the tree held at their end.",
             "tokens in the tree", "cost", [("cost", [*map(_pair, ratios)])], dots=True, line=1.0),
        Plot("By the size of the pool", "Runs of their own, all else equal.", "full slots", "cost",
             [("cost", _grown(measured, POOL, "slots"))], log=True, line=1.0),
        Plot("By the window", "Runs of their own, all else equal.", "tokens of the window", "cost",
             [("cost", _grown(measured, WINDOW, "window"))], log=True, line=1.0),
        Plot("Faults", "What the oracle found, summed over the run.", "requests", "faults",
             [(mode, _faults_of(run, mode)) for mode in ("off", run.head["mode"])]),
        Plot("Memory", "Peak resident memory of each process, its KV included.", "requests", "MiB",
             [(mode, _memory_of(run, mode)) for mode in ("off", run.head["mode"])]),
    ]  # fmt: skip


def _pair(pair: tuple[int, float]) -> Point:
    return float(pair[0]), pair[1]


def _grown(measured: Measured, name: str, what: str) -> list[Point]:
    points = []
    for run in measured.runs[1:]:
        ratio = run.ratio()
        if run.head["name"].startswith(name) and ratio is not None:
            points.append((float(run.head["scale"][what]), ratio))
    return points


def _faults_of(run: Run, mode: str) -> list[Point]:
    return [
        (line["finished"], float(sum(faults(line).values()))) for line in run.slices.get(mode, ())
    ]


def _memory_of(run: Run, mode: str) -> list[Point]:
    return [(line["finished"], line["peak_rss"] / 2**20) for line in run.slices.get(mode, ())]


def _figure(plot: Plot) -> str:
    everything = [point for _, points in plot.series for point in points]
    place_x = _place([x for x, _ in everything], _LEFT, _WIDTH - _RIGHT, log=plot.log)
    heights = [y for _, y in everything] + [0.0]
    place_y = _place(heights + ([plot.line] if plot.line else []), _HEIGHT - _BOTTOM, _TOP)
    drawn = [_axes(plot, everything, place_x, place_y, max(heights))]
    for number, (name, points) in enumerate(plot.series):
        marks = "".join(
            f'<circle cx="{place_x(x):.1f}" cy="{place_y(y):.1f}" r="{2 if plot.dots else 3.5}">'
            f"<title>{_text(name)}: {_number(x)}, {y:.3g}</title></circle>"
            for x, y in points
        )
        path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in points)
        joined = "" if plot.dots else f'<polyline points="{path}"/>'
        drawn.append(f'<g class="s{number}">{joined}{marks}</g>')
    legend = ""
    if len(plot.series) > 1:
        names = (
            f'<li class="s{at}">{_text(name)}</li>' for at, (name, _) in enumerate(plot.series)
        )
        legend = f"<ul>{''.join(names)}</ul>"
    return (
        f"<figure><figcaption><b>{_text(plot.title)}</b> {_text(plot.about)}</figcaption>{legend}"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_text(plot.title)}">'
        f"{''.join(drawn)}</svg></figure>\n"
    )


def _place(
    values: Sequence[float], low: float, high: float, *, log: bool = False
) -> Callable[[float], float]:
    """Where on the page a value lies; the least of ``values`` at ``low``, the most at ``high``."""
    scale = math.log10 if log else float
    least, most = scale(min(values)), scale(max(values))
    span = most - least or 1.0
    inset = 0.06 * (high - low) if log else 0.0
    return lambda value: low + inset + (scale(value) - least) / span * (high - low - 2 * inset)


def _axes(
    plot: Plot,
    points: Sequence[Point],
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
    highest: float,
) -> str:
    bottom = _HEIGHT - _BOTTOM
    parts = [f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - _RIGHT}"/>']
    for value in _ticks(max(highest, plot.line or 0.0)):
        y = place_y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{_number(value)}</text>')
    across = sorted({x for x, _ in points})
    shown = across if plot.log else [x for x in _ticks(across[-1]) if x >= across[0]] or across[-1:]
    for value in shown:
        parts.append(
            f'<text class="mid" x="{place_x(value):.1f}" y="{bottom + 16}">{_number(value)}</text>'
        )
    if plot.line is not None:
        y = place_y(plot.line)
        parts.append(f'<path class="even" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text class="mid soft" x="{middle}" y="{_HEIGHT - 6}">{_text(plot.across)}</text>'
    )
    return "".join(parts)


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to ``most``, some four of them."""
    if most <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= most / 4.5)
    return [step * at for at in range(int(most / step + 1e-9) + 1)]


def _number(value: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (value >= size and value % size == 0):
            return f"{value / size:.3g}{letter}"
    return f"{value:.4g}"


_STYLE = """
:root{--bg:#fff;--ink:#1b1f24;--soft:#5a6572;--line:#d5dae0;--a:#b3541e;--b:#1f6feb}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--ink:#e4e8ed;--soft:#97a3b0;--line:#343b44;
--a:#f0944d;--b:#6cb0ff}}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1020px;margin:0 auto;padding:1rem clamp(14px,3vw,32px) 3rem}
h1{line-height:1.15;margin:.6em 0 .3em}h2{margin:2rem 0 .3rem}
.soft{color:var(--soft)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums;font-size:.93rem}
th,td{padding:.3rem .9rem .3rem 0;text-align:right;vertical-align:top}
th[scope=row],thead th:first-child{text-align:left;font-weight:500}
tbody tr{border-top:1px solid var(--line)}
.plots{display:grid;gap:1.6rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr))}
figure{margin:0}figcaption{font-size:.9rem;min-height:2.6em}svg{width:100%;height:auto}
figure ul{list-style:none;display:flex;gap:1rem;padding:0;margin:.2rem 0;font-size:.85rem}
li.s0{color:var(--a)}li.s1{color:var(--b)}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}svg .soft{fill:var(--soft)}
.mid{text-anchor:middle}.end{text-anchor:end}
svg path{fill:none}.axis{stroke:var(--soft)}.grid{stroke:var(--line);stroke-width:.6}
.even{stroke:var(--soft);stroke-dasharray:4 3}
polyline{fill:none;stroke-width:1.6}
.s0 polyline{stroke:var(--a)}.s0 circle{fill:var(--a)}.s1 polyline{stroke:var(--b)}
.s1 circle{fill:var(--b)}
"""
