"""One HTML page that holds everything: ratios, charts, tables, the machine, the command line.

Theory of operation: one chart a measure, and the tables; ``bench.html`` makes a page of them that stands by
itself. Ratios come first, since absolute numbers move from run to run.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import html
from bench.throughput import report
from bench.throughput.report import Rounds

_PANELS = 2
"""Numbers of a measure that are drawn; the table has all."""

_FIRST_COLOUR, _OTHER_COLOUR = "#8a8f98", "#2f6fb0"


def write(path: Path, rounds: Rounds, command: Sequence[str], notes: Sequence[str] = ()) -> None:
    """Write the page; `notes` say what was left out or failed. Raises PageError and OSError."""
    path.write_text(render(rounds, report.machine(), command, notes), encoding="utf-8")


def render(rounds: Rounds, machine: Mapping[str, Any], command: Sequence[str], notes: Sequence[str] = ()) -> str:
    """The page. Raises PageError if matplotlib is missing."""
    first = next(iter(rounds), "nothing")
    repeats = max((len(results) for one in rounds.values() for results in one.values()), default=0)
    parts = [
        *html.opening("Throughput", f"Throughput, compared with {first}"),
        html.note(f"Medians of {repeats} alternating rounds; bars and brackets from the least to the greatest."),
        "<h2>Ratios</h2>",
        _ratio_table(rounds),
        *(html.note(one) for one in notes),
        "<h2>Charts</h2>",
        *(f"<h3>{html.text(measure)}</h3>{_chart(rounds, measure)}" for measure in report.measures(rounds)),
        "<h2>Numbers</h2>",
        *(f"<h3>{html.text(measure)}</h3>{_number_table(rounds, measure)}" for measure in report.measures(rounds)),
        *html.closing(machine, command),
    ]
    return "\n".join(parts) + "\n"


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
    return html.table(["", *heads], rows)


def _number_table(rounds: Rounds, measure: str) -> str:
    names = report.numbers(rounds, measure)
    rows = [
        [contender, *(report.cell(rounds, contender, measure, name) for name in names)]
        for contender, results in rounds.items()
        if results.get(measure)
    ]
    return html.table(["", *map(report.readable, names)], rows)


def write_charts(folder: Path, rounds: Rounds) -> None:
    """Write each measure's chart as a file of its own, ``tcp-one-flow.svg``. Raises PageError and OSError."""
    for measure in report.measures(rounds):
        name = "-".join(re.findall("[a-z0-9]+", measure.lower()))
        (folder / f"{name}.svg").write_bytes(_draw(rounds, measure))


def _chart(rounds: Rounds, measure: str) -> str:
    return html.image(measure, _draw(rounds, measure))


def _draw(rounds: Rounds, measure: str) -> bytes:
    """Bars of the medians of the first numbers, with the spread as error bars."""
    names = report.numbers(rounds, measure)[:_PANELS]
    contenders = [contender for contender, results in rounds.items() if results.get(measure)]
    middle = report.medians(rounds)
    figure = html.matplotlib("figure").Figure(figsize=(11, 0.8 + 0.36 * len(contenders)), layout="constrained")
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
    return html.svg(figure)
