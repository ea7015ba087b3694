"""Where the time of a packet goes: the stages of the sending and of the receiving daemon under one TCP flow.

Theory of operation: both daemons run as ``bench.profiled_node``, which times the stages of its engine and tells them in
its ``status``. They are asked before and after a run of iperf3, and /proc is read for user and system time; what lies in
between is divided by the bytes that arrived. The way of the data (outbound in the sender, inbound in the receiver) is shown
stage by stage, the way back, which carries acknowledgements, in one line.
"""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.processes import CpuTime, cpu_time, tree
from bench.profiled_node import STAGES
from bench.throughput.contenders import ContenderError, ourselves, run_dir
from bench.throughput.hosts import End, two_hosts
from bench.throughput.measures import MeasureError, iperf3
from dataplane.control import ControlError, ask
from dataplane.lab import Lab, LabError, missing

_UNIT_BYTES = 1 << 16


@dataclass(frozen=True)
class Profile:
    """One daemon during one run: stages in nanoseconds, by direction; calls of each; CPU time; the run itself."""

    nanoseconds: Mapping[str, Mapping[str, int]]
    calls: Mapping[str, Mapping[str, int]]
    cpu: CpuTime
    seconds: float
    received_bytes: int

    @property
    def busy_nanoseconds(self) -> int:
        """In the pumps of both directions."""
        return sum(sum(stages.values()) for stages in self.nanoseconds.values())

    def microseconds_per_unit(self, nanoseconds: float) -> float:
        """Of the time `nanoseconds`, what falls on 64 KiB of the flow."""
        return nanoseconds / 1e3 / (self.received_bytes / _UNIT_BYTES)


def profile_once(seconds: float, *options: str) -> tuple[Profile, Profile]:
    """Sender and receiver. Raises LabError, ContenderError, MeasureError and ControlError."""
    with tempfile.TemporaryDirectory(prefix="pyflannel-dp-bench-") as text, Lab("prof") as lab:
        folder = Path(text)
        ends = two_hosts(lab)
        ourselves("profiled", *options, module="bench.profiled_node").connect(*ends, folder)
        before = [_look(end, folder) for end in ends]
        report = iperf3(*ends, seconds)["end"]["sum_received"]
        after = [_look(end, folder) for end in ends]
    sender, receiver = (
        Profile(
            _difference(now[0]["nanoseconds"], then[0]["nanoseconds"]),
            _difference(now[0]["calls"], then[0]["calls"]),
            now[1] - then[1],
            report["seconds"],
            report["bytes"],
        )
        for now, then in zip(after, before, strict=True)
    )
    return sender, receiver


def _look(end: End, folder: Path) -> tuple[dict[str, Any], CpuTime]:
    answer = ask(run_dir(folder, end), "status")
    return answer["stages"], cpu_time(tree(end.processes)[0])


def _difference(
    after: Mapping[str, Mapping[str, int]], before: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    return {way: {stage: count - before[way][stage] for stage, count in stages.items()} for way, stages in after.items()}


def table(title: str, profile: Profile, way: str) -> Table:
    """Stage by stage along `way`, the other way in one line, and what the kernel says of CPU time."""
    busy = max(profile.busy_nanoseconds, 1)
    made = Table("stage", "what", "share", "µs per 64 KiB", "µs per call", "calls", title=title)

    def add(stage: str, what: str, nanoseconds: int, calls: int) -> None:
        made.add_row(
            stage, what, f"{100 * nanoseconds / busy:.1f} %", f"{profile.microseconds_per_unit(nanoseconds):.2f}",
            f"{nanoseconds / 1e3 / calls:.2f}" if calls else "", str(calls),
        )  # fmt: skip

    for stage, what in STAGES[way].items():
        add(stage, what, profile.nanoseconds[way][stage], profile.calls[way][stage])
    back = "inbound" if way == "outbound" else "outbound"
    pumps = profile.calls[back]["other"]
    add(f"all of {back}", "acknowledgements, by wakeup", sum(profile.nanoseconds[back].values()), pumps)
    made.add_section()
    wall = profile.seconds * 1e9
    made.add_row("in the pumps", f"{100 * busy / wall:.0f} % of the run", "100 %",
                 f"{profile.microseconds_per_unit(busy):.2f}", "", "")  # fmt: skip
    for name, used in (("user", profile.cpu.user), ("system", profile.cpu.system)):
        made.add_row(
            f"{name} time", f"{100 * used / profile.seconds:.0f} % of a core",
            f"{100 * used / max(profile.cpu.seconds, 1e-9):.1f} % of CPU",
            f"{profile.microseconds_per_unit(used * 1e9):.2f}", "", "",
        )  # fmt: skip
    return made


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--seconds", default=4.0, show_default=True, help="Length of the run.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def profile(seconds: float, options: tuple[str, ...]) -> None:
    """Where the time goes, stage by stage, under one TCP flow; OPTIONS go to the nodes, like --no-udp-segment."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    reason = missing()
    if reason is not None:
        raise click.ClickException(reason)
    try:
        sender, receiver = profile_once(seconds, *options)
    except (LabError, ContenderError, MeasureError, ControlError) as error:
        raise click.ClickException(str(error)) from None
    gigabits = sender.received_bytes * 8 / sender.seconds / 1e9
    console.print(f"{gigabits:.2f} Gbit/s while being timed, one TCP flow of {sender.seconds:.1f} s")
    console.print(table("sending daemon", sender, "outbound"))
    console.print(table("receiving daemon", receiver, "inbound"))
    console.print("[dim]Stages are timed by the wall clock, so they hold what a daemon waits for a core.")
