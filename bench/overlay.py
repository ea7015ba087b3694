"""Overlay networks in memory: packets a second through two nodes, and what a large one costs.

Theory of operation: `through_two_nodes` lets one host send UDP packets in bursts that the queues hold, and counts what the
other host received, by the wall clock; everything is in that time: device, judgement, encapsulation, fake network, the way
back out, delivery. `mesh` builds an overlay and lets every node ping every other one.
"""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import click

from bench.throughput.report import machine
from dataplane.overlay import Overlay, inner

_BURST = 500  # less than the device's queue


@dataclass(frozen=True)
class Mesh:
    """What an overlay of `nodes` nodes and `leases` leases took; memory is the whole process's at its peak."""

    nodes: int
    leases: int
    build_seconds: float
    pings: int
    answered: int
    ping_seconds: float
    peak_mebibytes: float


def through_two_nodes(
    packets: int, length: int, link: str = "", now: Callable[[], float] = time.perf_counter
) -> tuple[int, float]:
    """Packets delivered and seconds taken; `length` is the inner packet's, `link` what the link is like."""
    with Overlay(record=0, link=link) as overlay:
        first, second = overlay.add_nodes(2)
        overlay.settle()
        packet = inner.udp(first.pod(), 1000, second.pod(), 2000, bytes(length - 28))
        started = now()
        for _ in range(packets // _BURST):
            for _ in range(_BURST):
                first.send(packet)
            overlay.settle()
        return second.verdicts["inbound"]["forwarded"], now() - started


def mesh(nodes: int, leases: int, now: Callable[[], float] = time.perf_counter) -> Mesh:
    """Build it, and let all ping all."""
    started = now()
    with Overlay(record=0) as overlay:
        overlay.add_nodes(nodes)
        overlay.add_leases(leases - nodes)
        overlay.settle()
        built = now()
        answered = overlay.pings_all()
        done = now()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Mesh(nodes, leases, built - started, nodes * (nodes - 1), answered, done - built, peak)


@click.command()
@click.option("--nodes", type=click.IntRange(2, 60_000), default=1000, show_default=True, help="Nodes of the mesh.")
@click.option("--leases", type=click.IntRange(2, 65_000), help="Leases in all.  [default: as many as nodes]")
@click.option("--packets", type=click.IntRange(_BURST), default=200_000, show_default=True, help="Through two nodes.")
def overlay(nodes: int, leases: int | None, packets: int) -> None:
    """Overlay networks in memory: packets a second, and a mesh of many nodes."""
    click.echo(str(machine()))
    for length, link in ((64, ""), (1400, ""), (64, "loss=10%,delay=1ms")):
        delivered, seconds = through_two_nodes(packets, length, link)
        click.echo(f"two nodes, {length} bytes, {link or 'perfect link'}: {delivered / seconds:,.0f} packets/s delivered")
    one = mesh(nodes, max(leases or nodes, nodes))
    click.echo(
        f"{one.nodes} nodes, {one.leases} leases: built in {one.build_seconds:.2f} s; {one.answered} of {one.pings} pings "
        f"answered in {one.ping_seconds:.1f} s; {one.peak_mebibytes:.0f} MiB at the peak"
    )
