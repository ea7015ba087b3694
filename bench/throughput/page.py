"""One HTML page that holds everything: ratios, charts, tables, the machine, the command line.

Theory of operation: matplotlib, imported only when a page is wanted, draws one chart a measure as SVG, which goes into the
page as a data URI; with the style in its head the page refers to nothing outside itself, and can be mailed or archived.
Ratios come first, since absolute numbers move from run to run.
"""

import base64
import html
import importlib
import io
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.throughput import report
from bench.throughput.report import Rounds

_PANELS = 2
"""Numbers of a measure that are drawn; the table has all."""

_FIRST_COLOUR, _OTHER_COLOUR = "#8a8f98", "#2f6fb0"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 70em; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2em } h3 { font-size: 1em; margin-top: 2em }
table { border-collapse: collapse; margin: 0.5em 0 } .wide { overflow-x: auto }
th, td { padding: 0.25em 0.8em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: bottom }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
img { max-width: 100% } code { background: #f2f2f2; padding: 0.1em 0.3em; overflow-wrap: anywhere }
p.note { color: #666 }
"""


class PageError(Exception):
    """No page can be made; the text says what to do."""


def require_matplotlib() -> None:
    """Raises PageError if it is missing: better before an hour of measuring than after it."""
    _matplotlib("figure")


def write(path: Path, rounds: Rounds, command: Sequence[str], notes: Sequence[str] = ()) -> None:
    """Write the page; `notes` say what was left out or failed. Raises PageError and OSError."""
    path.write_text(render(rounds, report.machine(), command, notes), encoding="utf-8")


def render(rounds: Rounds, machine: Mapping[str, Any], command: Sequence[str], notes: Sequence[str] = ()) -> str:
    """The page. Raises PageError if matplotlib is missing."""
    first = next(iter(rounds), "nothing")
    repeats = max((len(results) for one in rounds.values() for results in one.values()), default=0)
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Throughput</title><style>{_STYLE}</style></head><body>',
        f"<h1>Throughput, compared with {_text(first)}</h1>",
        f'<p class="note">Medians of {repeats} alternating rounds; bars and brackets from the least to the greatest.</p>',
        "<h2>Ratios</h2>",
        _ratio_table(rounds),
        *(f'<p class="note">{_text(note)}</p>' for note in notes),
        "<h2>Charts</h2>",
        *(f"<h3>{_text(measure)}</h3>{_chart(rounds, measure)}" for measure in report.measures(rounds)),
        "<h2>Numbers</h2>",
        *(f"<h3>{_text(measure)}</h3>{_number_table(rounds, measure)}" for measure in report.measures(rounds)),
        "<h2>Machine</h2>",
        _table([], [[key, str(value)] for key, value in machine.items()]),
        f"<h2>Command</h2><p><code>{_text(command_line(command))}</code></p>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def command_line(command: Sequence[str]) -> str:
    """`command` (sys.argv) as one types it."""
    if command and Path(command[0]).name == "__main__.py":
        return shlex.join(["python", "-m", Path(command[0]).parent.name, *command[1:]])
    return shlex.join([Path(command[0]).name, *command[1:]]) if command else ""


def _ratio_table(rounds: Rounds) -> str:
    """Contenders down, measures across."""
    of_measure = report.ratios(rounds)
    heads = []
    for measure in of_measure:
        counts = report.numbers(rounds, measure)[0]
        direction = "less is better" if report.less_is_better(counts) else "more is better"
        heads.append(f"{measure}: {report.readable(counts)} ({direction})")
    rows = [
        [contender, *(f"{one[contender]:.2f}" if contender in one else "" for one in of_measure.values())]
        for contender in rounds
    ]
    return _table(["", *heads], rows)


def _number_table(rounds: Rounds, measure: str) -> str:
    names = report.numbers(rounds, measure)
    rows = [
        [contender, *(report.cell(rounds, contender, measure, name) for name in names)]
        for contender, results in rounds.items()
        if results.get(measure)
    ]
    return _table(["", *map(report.readable, names)], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = f"<tr>{''.join(f'<th>{_text(one)}</th>' for one in heads)}</tr>" if heads else ""
    body = "".join(f"<tr>{''.join(f'<td>{_text(one)}</td>' for one in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{head}{body}</table></div>'


def write_charts(folder: Path, rounds: Rounds) -> None:
    """Write each measure's chart as a file of its own, ``tcp-one-flow.svg``. Raises PageError and OSError."""
    for measure in report.measures(rounds):
        name = "-".join(re.findall("[a-z0-9]+", measure.lower()))
        (folder / f"{name}.svg").write_bytes(_draw(rounds, measure))


def _chart(rounds: Rounds, measure: str) -> str:
    drawing = base64.b64encode(_draw(rounds, measure)).decode("ascii")
    return f'<img alt="{_text(measure)}" src="data:image/svg+xml;base64,{drawing}">'


def _draw(rounds: Rounds, measure: str) -> bytes:
    """Bars of the medians of the first numbers, with the spread as error bars."""
    names = report.numbers(rounds, measure)[:_PANELS]
    contenders = [contender for contender, results in rounds.items() if results.get(measure)]
    middle = report.medians(rounds)
    figure = _matplotlib("figure").Figure(figsize=(11, 0.8 + 0.36 * len(contenders)), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        values = [middle[contender][measure].get(name, 0.0) for contender in contenders]
        ends = [report.spread(rounds, contender, measure, name) or (0.0, 0.0) for contender in contenders]
        below = [value - low for value, (low, _) in zip(values, ends, strict=True)]
        above = [high - value for value, (_, high) in zip(values, ends, strict=True)]
        places = range(len(contenders))
        colours = [_FIRST_COLOUR if one == next(iter(rounds)) else _OTHER_COLOUR for one in contenders]
        axes.barh(places, values, xerr=(below, above), color=colours, ecolor="#222222", capsize=3, height=0.65)
        reach = max((high for _, high in ends), default=0.0)
        for place, value, (_, high) in zip(places, values, ends, strict=True):
            axes.text(high + reach * 0.02, place, report.figure(value), va="center", fontsize=8)
        axes.set_xlim(0, reach * 1.15 or 1)
        axes.set_yticks(list(places), contenders, fontsize=9)
        axes.set_title(report.readable(name), fontsize=9)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(len(contenders) - 0.5, -0.5)  # the panels share it: inverted once, whatever their number
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _matplotlib(module: str) -> Any:
    """A module of matplotlib, by name: neither the node nor mypy needs it to be installed."""
    try:
        return importlib.import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise PageError(
            f"a page needs matplotlib ({error}): {Path(sys.executable).name} -m pip install 'pyflannel-dp[bench]'"
        ) from None


def _text(text: str) -> str:
    return html.escape(text)
