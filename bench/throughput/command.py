"""The command: rounds of contenders in turn."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from bench.throughput import measures, report
from bench.throughput.contenders import Contender, ContenderError, Registry, template
from bench.throughput.hosts import End, two_hosts
from dataplane.lab import Lab, LabError, missing

_MEASURES: dict[str, Callable[[End, End, float], measures.Numbers]] = {
    "TCP, one flow": measures.tcp,
    "TCP, 8 flows": lambda a, b, seconds: measures.tcp(a, b, seconds, "-P", "8"),
    "TCP, both directions": lambda a, b, seconds: measures.tcp(a, b, seconds, "--bidir"),
    "UDP, 64 bytes": lambda a, b, seconds: measures.udp(a, b, seconds, 64),
    "UDP, 1400 bytes": lambda a, b, seconds: measures.udp(a, b, seconds, 1400),
    "idle RTT": lambda a, b, seconds: measures.idle_rtt(a, b, int(seconds * 100)),
}


@click.command()
@click.option("--rounds", default=3, show_default=True, help="How often each contender is measured, in turn.")
@click.option("--seconds", default=4.0, show_default=True, help="Length of each measurement.")
@click.option("--only", multiple=True, metavar="TEXT", help="Contenders whose name contains TEXT; repeatable.")
@click.option("--measure", "wanted", multiple=True, metavar="TEXT", help="Measures whose name contains TEXT.")
@click.option("--contender", multiple=True, metavar="NAME=COMMAND",
              help="Another program, started on each host by COMMAND, in which {local}, {remote}, {overlay}, "
              "{remote_overlay}, {subnet}, {number} and {folder} are filled in.")  # fmt: skip
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write every number there.")
def throughput(
    rounds: int,
    seconds: float,
    only: tuple[str, ...],
    wanted: tuple[str, ...],
    contender: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Two hosts in network namespaces; kernel VXLAN, this program and others between them, in turn."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    reason = missing()
    if reason is not None:
        raise click.ClickException(reason)
    registry = Registry.default()
    for text in contender:
        name, equals, command = text.partition("=")
        if not equals:
            raise click.UsageError(f"--contender {text!r} is not NAME=COMMAND")
        registry.contenders.append(template(name, command))
    chosen = [one for one in registry.contenders if not only or any(text in one.name for text in only)]
    names = [name for name in _MEASURES if not wanted or any(text in name for text in wanted)]
    results: dict[str, dict[str, list[measures.Numbers]]] = {}
    for one in chosen:
        if one.missing is not None:
            console.print(f"[yellow]{one.name} is left out: {one.missing} is not installed")
    for number in range(rounds):
        for one in (each for each in chosen if each.missing is None):
            console.print(f"[dim]round {number + 1} of {rounds}: {one.name}")
            try:
                _measure(one, names, seconds, results.setdefault(one.name, {}))
            except (ContenderError, LabError, measures.MeasureError) as error:
                console.print(f"[red]{one.name}: {error}", markup=True)
    console.print(report.machine())
    report.print_tables(console, results)
    if json_path is not None:
        report.write_json(json_path, results, sys.argv)


def _measure(one: Contender, names: list[str], seconds: float, results: dict[str, list[measures.Numbers]]) -> None:
    """All measures for one contender, on fresh hosts."""
    with tempfile.TemporaryDirectory(prefix="pyflannel-dp-bench-") as folder, Lab("bench") as lab:
        first, second = two_hosts(lab)
        one.connect(first, second, Path(folder))
        for name in names:
            results.setdefault(name, []).append(_MEASURES[name](first, second, seconds))
