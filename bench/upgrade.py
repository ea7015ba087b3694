"""What an upgrade costs the traffic: a node is stopped and started again, many times, under a ping every millisecond.

Theory of operation: two hosts on one veth, each with a node. The first node gets SIGTERM, and as soon as its process has
ended the next one is started, as a service manager does it. A ping from the second host to the first goes on all the time;
an upgrade's gap is the longest time between two replies from shortly before the signal until shortly after the new node is
ready, or until the end of that time if none has come by then. Replies have to come after the last upgrade, too: traffic
that never returns is no result but a failure. `ip monitor` on the first host counts what became of its link and routes,
which are to stay untouched.
"""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import click

from bench.throughput.hosts import NETWORK, End, two_hosts
from dataplane.lab import Lab

_REPLY = re.compile(r"^\[(\d+\.\d+)\] \d+ bytes from", re.MULTILINE)
_LOST = re.compile(r"^Deleted .*(flannel|10\.244\.)", re.MULTILINE)
_MARGIN_SECONDS = 0.1
_RETURN_SECONDS = 0.5  # what traffic has for its return after the last upgrade
_DEADLINE_SECONDS = 20.0


@dataclass(frozen=True)
class Result:
    """The gap of each upgrade, in seconds, and how many links, addresses or routes of the overlay were deleted in all."""

    gaps: tuple[float, ...]
    deletions: int


def gap(replies: Sequence[float], since: float, until: float) -> float:
    """The longest time between two of the `replies` in a row, of which the later came after `since` and the earlier before
    `until`. Where there is none before `since`, or none after `until`, these count as if there were one at that moment."""
    first = [] if replies and replies[0] <= since else [since]
    last = [] if replies and replies[-1] >= until else [until]
    times = [*first, *replies, *last]
    return max(later - earlier for earlier, later in pairwise(times) if later > since and earlier < until)


def gaps_of(replies: Sequence[float], windows: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """The gap in each of the `windows`. Raises ClickException if traffic has not returned after the last of them."""
    end = windows[-1][1]
    if not replies or replies[-1] <= end:
        last = f"the last one came {end - replies[-1]:.1f} s before that" if replies else "there never was one"
        raise click.ClickException(f"no reply after the last upgrade ({last}): traffic has not returned")
    return tuple(gap(replies, *window) for window in windows)


def measure(rounds: int) -> Result:
    """Upgrade `rounds` times."""
    with tempfile.TemporaryDirectory(prefix="pyflannel-dp-bench-") as name, Lab("upgrade") as lab:
        folder = Path(name)
        here, there = two_hosts(lab)
        process = _start(here, there, folder)
        _start(there, here, folder)
        windows: list[tuple[float, float]] = []
        with (
            open(folder / "ping", "w", encoding="ascii") as pings,
            open(folder / "events", "w", encoding="utf-8") as events,
        ):
            pinging = there.namespace.popen(["ping", "-nD", "-i", "0.001", str(here.overlay)], stdout=pings)
            watching = here.namespace.popen(["ip", "monitor", "link", "address", "route"], stdout=events)
            time.sleep(1.0)
            for _ in range(rounds):
                stopped = time.time()
                process.send_signal(signal.SIGTERM)
                process.wait(_DEADLINE_SECONDS)
                process = _start(here, there, folder)
                time.sleep(_MARGIN_SECONDS)
                windows.append((stopped - _MARGIN_SECONDS, time.time()))
            time.sleep(_RETURN_SECONDS)
            for one in (pinging, watching):
                one.send_signal(signal.SIGINT)
                one.wait(_DEADLINE_SECONDS)
        replies = [float(one) for one in _REPLY.findall((folder / "ping").read_text(encoding="ascii"))]
        deletions = len(_LOST.findall((folder / "events").read_text(encoding="utf-8")))
    return Result(gaps_of(replies, windows), deletions)


def _start(here: End, there: End, folder: Path) -> "subprocess.Popen[str]":
    """A node on `here`, ready when this returns."""
    run_dir = folder / f"run{here.number}"
    log = folder / f"log{here.number}"
    with open(log, "w", encoding="utf-8") as output:
        process = here.namespace.popen(
            [
                sys.executable, "-m", "dataplane.cli", "--store", "static", "--iface", "eth0",
                "--network", str(NETWORK), "--subnet", str(here.subnet), "--peer", f"{there.subnet}={there.underlay}",
                "--run-dir", str(run_dir),
            ],
            stderr=output,
        )  # fmt: skip
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while "ready: " not in (said := log.read_text(encoding="utf-8")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise click.ClickException(f"the node on host {here.number} did not become ready: {said}")
        time.sleep(0.002)
    return process


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=50, show_default=True, help="How many upgrades.")
def upgrade(rounds: int) -> None:
    """How long traffic stands still while a node is replaced, under a ping every millisecond."""
    result = measure(rounds)
    gaps = sorted(result.gaps)
    click.echo(
        f"{rounds} upgrades, gap: median {1000 * median(gaps):.0f} ms ({1000 * gaps[0]:.0f} … {1000 * gaps[-1]:.0f}); "
        f"{result.deletions} links, addresses or routes deleted"
    )
