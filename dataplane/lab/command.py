"""The command ``pyflannel-dp lab``: a topology brought up for working in it by hand, until Ctrl-C.

Theory of operation: `Topology.bring_up` does the work; this shows what came of it, with each command that leads into it
on a line of its own so that it can be copied, and waits. An interrupt is an exception, raised once: from there on nothing
interrupts the tidying up.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from dataplane.control import ControlError
from dataplane.lab.hosts import Host
from dataplane.lab.namespace import LabError, missing
from dataplane.lab.topology import Running, Runs, Topology
from dataplane.underlay.link import describe_link

_LOOK_SECONDS = 0.5
_RUNS = {Runs.NODE: "pyflannel-dp", Runs.KERNEL: "kernel VXLAN", Runs.NOTHING: "nothing"}


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt in the body; after the first both are ignored until the process ends."""
    previous = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _interrupt:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _interrupt(*_: object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def no_tun_here() -> str | None:
    """Why no node can run here, or None."""
    if Path("/dev/net/tun").exists():
        return None
    return "/dev/net/tun does not exist: load the module (modprobe tun), or pass the device into the container"


def run(topology: Topology) -> int:
    """Bring it up, show it, wait for Ctrl-C, remove it. Returns the exit code."""
    has_nodes = any(host.runs is Runs.NODE for host in topology.hosts)
    reason = missing() or (no_tun_here() if has_nodes else None)
    if reason is not None:
        return _fail(f"there can be no lab here: {reason}")
    console = Console()
    is_up = False
    try:
        with interruptible(), topology.bring_up() as running:
            _show(console, running)
            is_up = True
            _watch(console, running)
    except (LabError, ControlError, OSError) as error:
        return _fail(f"the lab failed: {error}")
    except KeyboardInterrupt:
        console.print("\neverything is removed")
        return 0 if is_up else 130


def _fail(text: str) -> int:
    print(f"pyflannel-dp: {text}", file=sys.stderr)  # noqa: T201 - the command line's way to fail
    return 1


def _show(console: Console, running: Running) -> None:
    table = Table(*(Column(name, overflow="fold") for name in ("host", "runs", "underlay", "overlay", "pods")))
    for plan in running.topology.hosts:
        host = running.hosts[plan.name]
        overlay = running.subnets[plan.name].networks if plan.name in running.subnets else []
        pods = [str(address) for pod in host.pods for address in (pod.ipv4, pod.ipv6) if address is not None]
        underlay = [str(host.ipv4), *([str(host.ipv6)] if running.topology.has_ipv6_underlay(plan) else ())]
        table.add_row(plan.name, _RUNS[plan.runs], *("\n".join(map(str, column)) for column in (underlay, overlay, pods)))
    console.print(table)
    for title, lines in (
        ("links", _links(running.topology)),
        ("enter a host", [(f"ip netns exec {host.name} sh", host.label) for host in running.hosts.values()]),
        ("enter a pod", [line for host in running.hosts.values() for line in _pods(host)]),
        ("ask a node", [(f"pyflannel-dp status --run-dir {running.run_dir(name)}", name) for name in running.nodes]),
        ("its log", [(str(running.log(name)), name) for name in running.nodes]),
    ):
        if lines:
            console.print(f"[bold]{title}")
        for text, what in lines:
            console.print(f"  [green]{escape(text)}[/]  [dim]{escape(what)}", highlight=False, soft_wrap=True)
    console.print("Ctrl-C ends the lab and removes everything.")


def _links(topology: Topology) -> list[tuple[str, str]]:
    links = [(describe_link(link.spec), f"{link.source} → {link.target}") for link in topology.links]
    return links if topology.link.is_perfect else [(describe_link(topology.link), "where nothing else is said"), *links]


def _pods(host: Host) -> list[tuple[str, str]]:
    return [(f"ip netns exec {pod.name} sh", f"{pod.ipv4} on {host.label}") for pod in host.pods]


def _watch(console: Console, running: Running) -> NoReturn:
    """Wait, and tell of nodes that end meanwhile, which may be what somebody wants to see."""
    ended: set[str] = set()
    while True:
        for name, process in running.nodes.items():
            if name not in ended and process.poll() is not None:
                ended.add(name)
                console.print(f"[yellow]the node on host {name} ended with exit code {process.returncode}")
        time.sleep(_LOOK_SECONDS)
