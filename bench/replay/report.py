"""A run for people: one screen in a terminal, or one page with charts.

Theory of operation: both begin with the same lines (`summary`) and show the same tables, so that they cannot disagree. The
page is one file that refers to nothing outside itself, made as `bench.html` makes all of them: matplotlib draws SVG,
which goes into the page as a data URI. Whatever a mode does not measure is left out.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench import html
from bench.replay.compare import Comparison, change_rows, quantity, single_rows
from bench.replay.results import LARGER, Run
from dataplane import verdict

_BAR = 10
"""Characters of the longest bar in a terminal."""

_MOST_VERDICTS = 9
_MOST_PROTOCOLS = 6
_COLOUR, _DARK = "#2f6fb0", "#222222"
_STYLE = ".summary td { text-align: left } .wrong { color: #b00020; font-weight: bold }"


def title(run: Run) -> str:
    """What was run."""
    return f"Replay of {run.trace.name}: {run.mode}, {run.pacing.pace}"


def summary(run: Run) -> list[tuple[str, str]]:
    """A run in a few lines, each with its name."""
    lines = [("rate", _rate(run)), ("delivery", _delivery(run)), ("latency", _latency(run)), ("pacing", _pacing(run))]
    lines += [("trace", _trace(run)), ("skipped", _skipped(run)), ("protocols", _protocols(run))]
    return [(name, text) for name, text in lines if text]


def is_wrong(run: Run) -> bool:
    """Whether the path did anything but carry the packets, or refuse them with a reason."""
    return any((run.delivery.lost, run.delivery.reordered, run.delivery.corrupted))


def _rate(run: Run) -> str:
    rates = run.packet_rates
    if not rates:
        return "nothing was measured"
    spread = ""
    if len(rates) > 1:
        spread = f" ({quantity(min(rates), 'pps')} … {quantity(max(rates), 'pps')} in {len(rates)} loops)"
    middle = quantity(run.median_packets_per_second, "pps")
    return f"{middle}{spread}, {quantity(run.median_bits_per_second, 'bit/s')} of inner packets"


def _delivery(run: Run) -> str:
    one = run.delivery
    counts = {"sent": one.sent, "delivered": one.delivered, "lost": one.lost}
    counts |= {"reordered": one.reordered, "corrupted": one.corrupted}
    return ", ".join(f"{name} {_count(value)}" for name, value in counts.items() if value is not None)


def _latency(run: Run) -> str:
    if run.latency is None:
        return ""
    return ", ".join(f"{name} {_microseconds(value)}" for name, value in run.latency.percentiles().items())


def _pacing(run: Run) -> str:
    late = run.pacing.lateness
    if late is None:
        return ""
    mean, p99 = _microseconds(late.mean_microseconds), _microseconds(late.p99_microseconds)
    return f"late by {mean} on average, p99 {p99}, at most {_microseconds(late.max_microseconds)}"


def _trace(run: Run) -> str:
    one = run.trace
    mean = f", {one.inner_bytes / one.packets:.0f} on average" if one.packets else ""
    size = quantity(one.inner_bytes, "B")
    return f"{_count(one.packets)} packets, {size}{mean}, captured in {one.duration_seconds:.3g} s"


def _skipped(run: Run) -> str:
    counts = run.trace.packets_skipped_by_reason
    return ", ".join(f"{reason} {_count(count)}" for reason, count in counts.items() if count)


def _protocols(run: Run) -> str:
    counts = run.trace.packets_by_protocol
    shares = [f"{name} {_share(count, run.trace.packets)}" for name, count in counts.items() if count]
    return ", ".join(shares[:_MOST_PROTOCOLS] + ["…"] * (len(shares) > _MOST_PROTOCOLS))


def _share(count: int, total: int) -> str:
    percent = 100 * count / total if total else 0.0
    return f"{percent:.0f} %" if percent >= 1 or not count else "< 1 %"


def _count(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _microseconds(value: float) -> str:
    if value >= 999_500:
        return f"{value / 1e6:.3g} s"
    return f"{value / 1e3:.3g} ms" if value >= 999.5 else f"{value:.3g} µs"


def _size_label(upper: str) -> str:
    return upper if upper == LARGER else f"≤ {upper}"


def _verdicts(run: Run) -> list[tuple[str, str, int]]:
    """Direction, verdict and count of those that happened, the most frequent first in each direction."""
    return [
        (direction, name, count)
        for direction, counts in run.verdicts.items()
        for name, count in sorted(counts.items(), key=lambda one: -one[1])
        if count
    ]


def _meaning(name: str) -> str:
    found = verdict.Verdict.__members__.get(name.upper())
    return verdict.MEANING[found] if found is not None else ""


# --- the terminal


def print_run(console: Console, run: Run) -> None:
    """One screen: the summary, and beside each other the stages, the sizes and the verdicts."""
    console.print(f"[bold]{escape(title(run))}")
    lines = Table.grid(padding=(0, 2))
    for name, text in summary(run):
        style = "bold red" if name == "delivery" and is_wrong(run) else "bold" if name == "rate" else ""
        lines.add_row(name, escape(text), style=style)
    console.print(lines)
    tables = [table for table in (_stage_table(run), _size_table(run), _verdict_table(run)) if table.row_count]
    console.print(Columns(tables, padding=(1, 4)))
    for note in run.notes:
        console.print(f"[yellow]{escape(note)}")


def _plain_table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 or head in {"verdict", ""} else "right", no_wrap=True)
    return table


def _bar(value: float, longest: float) -> str:
    return "█" * round(_BAR * value / longest) if longest else ""


def _stage_table(run: Run) -> Table:
    has_cycles = any(one.cycles_per_packet is not None for one in run.stages)
    table = _plain_table("stage", "ns/packet", *(["cycles"] if has_cycles else []), "")
    longest = max((one.ns_per_packet for one in run.stages), default=0.0)
    for one in run.stages:
        cycles = "" if one.cycles_per_packet is None else f"{one.cycles_per_packet:.0f}"
        cells = [f"{one.ns_per_packet:.1f}", *([cycles] if has_cycles else []), _bar(one.ns_per_packet, longest)]
        table.add_row(escape(one.name), *cells)
    return table


def _size_table(run: Run) -> Table:
    table = _plain_table("bytes", "packets", "")
    sizes = run.trace.packets_by_size_bytes
    total, longest = sum(sizes.values()), max(sizes.values(), default=0)
    for upper, count in sizes.items() if total else ():
        table.add_row(_size_label(upper), _share(count, total), _bar(count, longest))
    return table


def _verdict_table(run: Run) -> Table:
    table = _plain_table("direction", "verdict", "packets")
    found = _verdicts(run)
    for direction, name, count in found[:_MOST_VERDICTS]:
        table.add_row(escape(direction), escape(name.replace("_", " ")), _count(count))
    if len(found) > _MOST_VERDICTS:
        table.add_row("…", f"{len(found) - _MOST_VERDICTS} more", "")
    return table


# --- the page


def write_page(path: Path, run: Run, comparison: Comparison | None = None) -> None:
    """Raises bench.html.PageError if matplotlib is missing, and OSError."""
    path.write_text(render(run, comparison), encoding="utf-8")


def render(run: Run, comparison: Comparison | None = None) -> str:
    """The page, with the comparison if there is one. Raises PageError if matplotlib is missing."""
    html.require_matplotlib()
    parts = [
        *html.opening(title(run), title(run), _STYLE),
        _summary(run),
        *(html.note(one) for one in run.notes),
        *(_compared(comparison) if comparison is not None else ()),
        "<h2>Charts</h2>",
        *_charts(run),
        "<h2>Numbers</h2>",
        *_numbers(run),
        *html.closing({**run.machine, **run.settings}, run.command),
    ]
    return "\n".join(parts) + "\n"


def _summary(run: Run) -> str:
    rows = []
    for name, text in summary(run):
        mark = ' class="wrong"' if name == "delivery" and is_wrong(run) else ""
        rows.append(f"<tr{mark}><td>{html.text(name)}</td><td>{html.text(text)}</td></tr>")
    return f'<div class="wide"><table class="summary">{"".join(rows)}</table></div>'


def _compared(comparison: Comparison) -> list[str]:
    parts = ["<h2>Compared with the baseline</h2>"]
    parts.append(html.table(["rate", "baseline", "now", "change", "noise (95 %)", "verdict"], change_rows(comparison)))
    if comparison.singles:
        parts.append(html.table(["measured once", "baseline", "now", "change"], single_rows(comparison)))
    return parts + [html.note(one) for one in comparison.notes]


def _numbers(run: Run) -> list[str]:
    parts = []
    if run.stages:
        rows = [
            [one.name, f"{one.ns_per_packet:.1f}", "" if one.cycles_per_packet is None else f"{one.cycles_per_packet:.0f}"]
            for one in run.stages
        ]
        parts.append(html.table(["stage", "ns per packet", "cycles per packet"], rows))
    loops = [
        [str(i), _count(one.packets), f"{one.seconds:.4g}", quantity(one.packets_per_second, "pps"),
         quantity(one.bits_per_second, "bit/s")]
        for i, one in enumerate(run.loops, 1)
    ]  # fmt: skip
    parts.append(html.table(["loop", "packets", "seconds", "packets/s", "inner bits/s"], loops))
    verdicts = [
        [direction, name.replace("_", " "), _count(count), _meaning(name)] for direction, name, count in _verdicts(run)
    ]
    if verdicts:
        parts.append(html.table(["direction", "verdict", "packets", "meaning"], verdicts))
    return parts


def _charts(run: Run) -> list[str]:
    """A chart of everything that there is."""
    rows = len(run.stages)
    found = len(_verdicts(run))
    wanted: list[tuple[str, bool, float, Callable[[Any, Run], None]]] = [
        ("Rate of each loop", bool(run.loops), 2.8, _draw_loops),
        ("Stages", bool(rows), 0.8 + 0.36 * rows, _draw_stages),
        ("Latency", run.latency is not None and run.latency.packets > 0, 3.2, _draw_latency),
        ("Packet sizes", run.trace.packets > 0, 2.8, _draw_sizes),
        ("Verdicts", bool(found), 0.8 + 0.36 * found, _draw_verdicts),
    ]
    return [f"<h3>{head}</h3>{_chart(head, height, draw, run)}" for head, exists, height, draw in wanted if exists]


def _chart(head: str, height: float, draw: Callable[[Any, Run], None], run: Run) -> str:
    figure = html.matplotlib("figure").Figure(figsize=(11, height), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, run)
    return html.image(head, html.svg(figure))


def _draw_loops(axes: Any, run: Run) -> None:
    """From zero, so that noise looks as large as it is."""
    rates = run.packet_rates
    axes.plot(range(1, len(rates) + 1), rates, "o-", color=_COLOUR, markersize=4)
    axes.axhline(run.median_packets_per_second, color=_DARK, linewidth=0.8, linestyle="--")
    axes.set_ylim(0, max(rates) * 1.1 or 1)
    axes.yaxis.set_major_formatter(lambda value, _: quantity(value, "pps") if value else "0")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("loop (dashed: the median)", fontsize=9)


def _draw_stages(axes: Any, run: Run) -> None:
    names = [one.name for one in run.stages]
    labels = [
        f"{one.ns_per_packet:.1f} ns" + ("" if one.cycles_per_packet is None else f", {one.cycles_per_packet:.0f} cycles")
        for one in run.stages
    ]
    _bars(axes, names, [one.ns_per_packet for one in run.stages], labels)
    axes.set_xlabel("ns per packet", fontsize=9)


def _draw_latency(axes: Any, run: Run) -> None:
    """How many packets took longer than that: on logarithmic axes the tail is as visible as the middle."""
    assert run.latency is not None
    left = run.latency.packets
    uppers, longer = [], []
    for upper, count in run.latency.buckets_nanoseconds:
        uppers.append(max(upper, 1) / 1e3)
        longer.append(100 * left / run.latency.packets)
        left -= count
    axes.step(uppers, longer, where="pre", color=_COLOUR)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for name, value in run.latency.percentiles().items():
        axes.axvline(max(value, 1e-3), color=_DARK, linewidth=0.6, linestyle=":")
        axes.annotate(name, (max(value, 1e-3), 1), xycoords=("data", "axes fraction"), fontsize=8, rotation=90, va="top")
    axes.set_xlabel("µs", fontsize=9)
    axes.set_ylabel("% of packets that took as long or longer", fontsize=9)


def _draw_sizes(axes: Any, run: Run) -> None:
    sizes = run.trace.packets_by_size_bytes
    bars = axes.bar([_size_label(one) for one in sizes], list(sizes.values()), color=_COLOUR, width=0.8)
    axes.bar_label(bars, [_share(count, run.trace.packets) for count in sizes.values()], fontsize=8)
    axes.margins(y=0.12)  # for the labels
    axes.set_xlabel("bytes of an inner packet", fontsize=9)
    axes.set_ylabel("packets", fontsize=9)


def _draw_verdicts(axes: Any, run: Run) -> None:
    """Logarithmic: what goes wrong is rare."""
    found = _verdicts(run)
    names = [f"{direction}: {name.replace('_', ' ')}" for direction, name, _ in found]
    _bars(axes, names, [count for _, _, count in found], [_count(count) for _, _, count in found])
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, max(count for _, _, count in found) * 10)
    axes.set_xlabel("packets", fontsize=9)


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], labels: Sequence[str]) -> None:
    """Horizontal bars from top to bottom. By number and not by name: two of one name are two bars."""
    places = range(len(names))
    bars = axes.barh(places, values, color=_COLOUR, height=0.65)
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_yticks(list(places), names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, max(values) * 1.2 or 1)
