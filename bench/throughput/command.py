"""The command: rounds of contenders in turn."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from bench import html
from bench.throughput import measures, page, report
from bench.throughput.contenders import Contender, ContenderError, Registry, template
from bench.throughput.hosts import End, two_hosts
from dataplane.lab import Lab, LabError, missing

_Results = dict[str, dict[str, list[measures.Numbers]]]
_MEASURES: dict[str, Callable[[End, End, float], measures.Numbers]] = {
    "TCP, one flow": measures.tcp,
    "TCP, 8 flows": lambda a, b, seconds: measures.tcp(a, b, seconds, "-P", "8"),
    "TCP, moderate (500 Mbit/s)": lambda a, b, seconds: measures.tcp(a, b, seconds, "-b", "500M"),
    "TCP, both directions": lambda a, b, seconds: measures.tcp(a, b, seconds, "--bidir"),
    "UDP, 64 bytes": lambda a, b, seconds: measures.udp(a, b, seconds, 64),
    "UDP, 1400 bytes": lambda a, b, seconds: measures.udp(a, b, seconds, 1400),
    "idle RTT": lambda a, b, seconds: measures.idle_rtt(a, b, int(seconds * 100)),
}


def _in_a_folder(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file whose folder is missing before the long work, not after it."""
    if path is not None and not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {path.parent}", ctx, param)
    return path


def _file_option(*names: str, text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(*names, type=click.Path(path_type=Path, dir_okay=False), callback=_in_a_folder, help=text)


@click.command()
@click.option("--rounds", default=3, show_default=True, help="How often each contender is measured, in turn.")
@click.option("--seconds", default=4.0, show_default=True, help="Length of each measurement.")
@click.option("--only", multiple=True, metavar="TEXT", help="Contenders whose name contains TEXT; repeatable.")
@click.option("--measure", "wanted", multiple=True, metavar="TEXT", help="Measures whose name contains TEXT.")
@click.option("--contender", multiple=True, metavar="NAME=COMMAND",
              help="Another program, started on each host by COMMAND, in which {local}, {remote}, {overlay}, "
              "{remote_overlay}, {subnet}, {number} and {folder} are filled in.")  # fmt: skip
@_file_option("--json", "json_path", text="Write every number there.")
@_file_option("--report", "page_path", text="Write a page with charts there (HTML; needs matplotlib).")
@click.option("--charts", "charts_folder", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="FOLDER",
              help="Write the charts there, an SVG each (needs matplotlib).")  # fmt: skip
def throughput(
    rounds: int,
    seconds: float,
    only: tuple[str, ...],
    wanted: tuple[str, ...],
    contender: tuple[str, ...],
    json_path: Path | None,
    page_path: Path | None,
    charts_folder: Path | None,
) -> None:
    """Two hosts in network namespaces; kernel VXLAN, this program and others between them, in turn."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    reason = missing()
    if reason is not None:
        raise click.ClickException(reason)
    if page_path is not None or charts_folder is not None:
        try:
            html.require_matplotlib()
        except html.PageError as error:
            raise click.ClickException(str(error)) from None
    chosen = [one for one in _contenders(contender) if not only or any(text in one.name for text in only)]
    names = [name for name in _MEASURES if not wanted or any(text in name for text in wanted)]
    if not chosen or not names:
        raise click.UsageError("no contender or no measure has a name like that")
    results, notes = _take_turns(console, chosen, names, rounds, seconds)
    console.print(report.machine())
    report.print_tables(console, results)
    if json_path is not None:
        report.write_json(json_path, results, sys.argv)
    if page_path is not None:
        page.write(page_path, results, sys.argv, notes)
    if charts_folder is not None:
        page.write_charts(charts_folder, results)


def _contenders(more: tuple[str, ...]) -> list[Contender]:
    """Ours, and `more` as ``--contender`` takes them. Raises UsageError."""
    found = Registry.default().contenders
    for text in more:
        name, equals, command = text.partition("=")
        if not equals:
            raise click.UsageError(f"--contender {text!r} is not NAME=COMMAND")
        found.append(template(name, command))
    return found


def _take_turns(
    console: Console, contenders: list[Contender], names: list[str], rounds: int, seconds: float
) -> tuple[_Results, list[str]]:
    """The rounds, and what is to be said about contenders that were left out or failed."""
    results: _Results = {}
    notes: list[str] = []

    def note(text: str, style: str) -> None:
        notes.append(text)
        console.print(f"[{style}]{escape(text)}")

    for one in contenders:
        if one.missing is not None:
            note(f"{one.name} is left out: {one.missing} is not installed", "yellow")
    present = [one for one in contenders if one.missing is None]
    for one in present:
        results[one.name] = {}  # in this order, whoever comes first in a round
    for number in range(rounds):
        # Each round begins with another: on a shared machine whoever follows the hungriest finds it slowed down.
        turn = number % max(len(present), 1)
        for one in present[turn:] + present[:turn]:
            console.print(f"[dim]round {number + 1} of {rounds}: {escape(one.name)}")
            try:
                _measure(one, names, seconds, results[one.name])
            except (ContenderError, LabError, measures.MeasureError, subprocess.CalledProcessError) as error:
                note(f"{one.name}, round {number + 1}: {error}", "red")
    return results, notes


def _measure(one: Contender, names: list[str], seconds: float, results: dict[str, list[measures.Numbers]]) -> None:
    """All measures for one contender, on fresh hosts."""
    with tempfile.TemporaryDirectory(prefix="pyflannel-dp-bench-") as folder, Lab("bench") as lab:
        first, second = two_hosts(lab)
        one.connect(first, second, Path(folder))
        for name in names:
            results.setdefault(name, []).append(_MEASURES[name](first, second, seconds))
