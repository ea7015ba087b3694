"""The demo: three hosts on one machine, two of them pyflannel-dp nodes, one a kernel VXLAN device that knows nothing of us.

Theory of operation: the hosts, nodes and pods are a `Topology`. One ping is followed through packet sockets at six places
of its way, ordered by the kernel's timestamps. Leaving the lab removes it all.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from dataplane.control import ControlError
from dataplane.describe import describe_frame, describe_packet
from dataplane.lab import Host, LabError, Pod, inside, missing
from dataplane.lab.command import interruptible, no_tun_here
from dataplane.lab.topology import HostPlan, Running, Runs, Topology

TOPOLOGY = Topology(
    hosts=(
        HostPlan("h1", pods=1),
        HostPlan("h2", pods=1),
        HostPlan("h3", Runs.KERNEL, pods=1, subnet=IPv4Network("10.244.200.0/24")),
    ),
    ipv6_network=IPv6Network("fd00:10:244::/48"),
)
_CHUNK = 1 << 20
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h, SO_TIMESTAMPNS_OLD
_ETH_P_ALL = 3


class DemoError(Exception):
    """Something that the demo is to prove does not hold, or it could not be built."""


@dataclass
class _Site:
    """One host of the demo: its pod, and for a node what it said of itself."""

    host: Host
    pod: Pod
    title: str
    device: str = "flannel.1"
    peers: dict[str, str] = field(default_factory=dict)


def run(megabytes: int) -> int:
    """Show it on the terminal; returns the exit code."""
    console = Console()
    reason = _reason_not_to_run()
    if reason is not None:
        if os.geteuid() != 0:
            return _rerun_in_user_namespace(console, megabytes, reason)
        console.print(f"[red]the demo cannot run: {escape(reason)}")
        return 1
    try:
        with interruptible(), tempfile.TemporaryDirectory(prefix="pyflannel-dp-demo-") as folder:
            _show(console, Path(folder), megabytes)
    except (DemoError, LabError, ControlError, OSError) as error:
        console.print(f"[red]the demo failed: {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        console.print("[yellow]interrupted; everything is removed")
        return 130
    return 0


def _reason_not_to_run() -> str | None:
    if shutil.which("ping") is None:
        return "the command ping is missing (Debian package iputils-ping)"
    return no_tun_here() or missing()


def _rerun_in_user_namespace(console: Console, megabytes: int, reason: str) -> int:
    """Without root: the same in a user namespace, where that is allowed."""
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--"]
    able = (
        shutil.which("unshare") is not None
        and os.access("/dev/net/tun", os.R_OK | os.W_OK)
        and shutil.which("ip") is not None
        and subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode == 0
    )
    if not able or os.environ.get("PYFLANNEL_DP_IN_USER_NAMESPACE"):
        console.print(f"[red]the demo cannot run: {escape(reason)}")
        console.print(
            "Run it as root (sudo ./dev demo). Or let an administrator allow user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1 or user.max_user_namespaces=10000) and open /dev/net/tun (chmod 0666)."
        )
        return 1
    console.print("not root: running in a user namespace")
    inner = 'mount -t tmpfs tmpfs /run && exec "$@"'
    program = [sys.executable, "-m", "dataplane.cli", "demo", "--megabytes", str(megabytes)]
    environment = os.environ | {"PYFLANNEL_DP_IN_USER_NAMESPACE": "1"}
    return subprocess.run([*unshare, "sh", "-c", inner, "sh", *program], env=environment, check=False).returncode


def _show(console: Console, folder: Path, megabytes: int) -> None:
    started = time.monotonic()
    console.rule("[bold]1. three hosts")
    with TOPOLOGY.bring_up(folder, "pfdemo") as running:
        sites = _sites(running)
        _show_sites(console, sites)
        console.rule("[bold]2. one ping, step by step")
        _follow_ping(console, sites[0], sites[1])
        console.rule("[bold]3. everybody pings everybody")
        pings = _ping_all(console, sites)
        console.rule("[bold]4. data over TCP")
        transfers = _transfer_all(console, sites, megabytes)
        console.rule("[bold]what was proved")
        _summarize(console, running, pings, transfers, time.monotonic() - started)


def _sites(running: Running) -> list[_Site]:
    sites = []
    for plan in running.topology.hosts:
        host = running.hosts[plan.name]
        site = _Site(host, host.pods[0], "kernel VXLAN device")
        if plan.runs is Runs.NODE:
            answer = running.status(host)
            site.device = answer["device"]["name"]
            site.title = f"pyflannel-dp, {site.device}"
            site.peers = {peer["subnet"]: f"{peer['address']} {peer['mac']}" for peer in answer["peers"]}
        sites.append(site)
    return sites


def _show_sites(console: Console, sites: list[_Site]) -> None:
    table = Table("host", "runs", "underlay", "pod")
    for site in sites:
        addresses = "\n".join(str(one) for one in (site.pod.ipv4, site.pod.ipv6) if one is not None)
        table.add_row(f"host {site.host.number}", site.title, str(site.host.ipv4), addresses)
    console.print(table)


def _follow_ping(console: Console, here: _Site, there: _Site) -> None:
    a, b = here.host.number, there.host.number
    lease, vtep = next(peer for peer in here.peers.items() if there.pod.ipv4 in ip_network(peer[0]))
    places = [
        (here.pod.name, "eth0", f"the pod on host {a}", "the ping leaves the pod"),
        (here.host.name, here.device, f"host {a}, {here.device}", f"the kernel routes it into the TUN {here.device}"),
        (here.host.name, "eth0", f"host {a}, eth0", f"pyflannel-dp finds {lease} at {vtep}, wraps the packet, sends"),
        (there.host.name, "eth0", f"host {b}, eth0", "it arrives from the underlay"),
        (there.host.name, there.device, f"host {b}, {there.device}", "pyflannel-dp checks it, strips it, writes it"),
        (there.pod.name, "eth0", f"the pod on host {b}", "the ping arrives"),
    ]
    with contextlib.ExitStack() as stack:
        taps = [(stack.enter_context(_tap(name, device)), place, what, device) for name, device, place, what in places]
        pattern = os.urandom(8).hex()
        done = here.pod.run(["ping", "-c", "1", "-W", "2", "-p", pattern, str(there.pod.ipv4)])
        if done.returncode:
            raise DemoError(f"the ping got no answer: {done.stdout}{done.stderr}")
        caught = [
            (moment, place, what, lines)
            for tap, place, what, device in taps
            for moment, lines in _caught(tap, bytes.fromhex(pattern), device.startswith("flannel"))
        ]
    caught.sort(key=lambda one: one[0])
    if len(caught) != 2 * len(places):
        raise DemoError(f"the ping was to be seen {2 * len(places)} times on its way, not {len(caught)} times")
    first = caught[0][0]
    for number, (moment, place, what, lines) in enumerate(caught, 1):
        text = f"{place}: {what if number <= len(places) else 'the answer'}"
        console.print(f"[bold cyan]{number:3d}.[/] {escape(text)}  [dim]+{(moment - first) / 1000:.0f} µs")
        if number <= len(places):
            for line in lines:
                console.print(f"       [green]{escape(line)}", highlight=False)


@contextlib.contextmanager
def _tap(namespace: str, device: str) -> Iterator[socket.socket]:
    """A packet socket on `device`, with kernel timestamps."""
    with inside(namespace):
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        tap.bind((device, _ETH_P_ALL))
    with tap:
        tap.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        tap.setblocking(False)
        yield tap


def _caught(tap: socket.socket, pattern: bytes, is_tun: bool) -> list[tuple[int, list[str]]]:
    """What the tap saw of our ping: time in ns, and the headers in words."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            frame, extra, _, _ = tap.recvmsg(65535, socket.CMSG_SPACE(16))
            if pattern in frame and extra:
                seconds, nanoseconds = (int.from_bytes(extra[0][2][i : i + 8], sys.byteorder) for i in (0, 8))
                lines = describe_packet(frame) if is_tun else describe_frame(frame)
                found.append((seconds * 10**9 + nanoseconds, lines))
    return found


def _ping_all(console: Console, sites: list[_Site]) -> int:
    pairs = [(a, b) for a in sites for b in sites if a is not b]
    jobs = [(a, b, b.pod.ipv4) for a, b in pairs] + [
        (a, b, b.pod.ipv6) for a, b in pairs if a.pod.ipv6 is not None and b.pod.ipv6 is not None
    ]
    with Progress(TextColumn("{task.description}"), BarColumn(), console=console, transient=True) as progress:
        task = progress.add_task("pings", total=len(jobs))
        for a, b, address in jobs:
            done = a.pod.run(["ping", "-c", "3", "-i", "0.05", "-W", "2", str(address)])
            if done.returncode or " 0% packet loss" not in done.stdout:
                raise DemoError(f"host {a.host.number} → {address} (host {b.host.number}): {done.stdout}{done.stderr}")
            rtt = done.stdout.rsplit("=", 1)[1].split("/")[1]
            console.print(f"  host {a.host.number} → host {b.host.number}  {address}  [green]3 of 3[/], {rtt} ms")
            progress.advance(task)
    return len(jobs)


@dataclass(frozen=True)
class _Transfer:
    title: str
    byte_count: int
    seconds: float


def _transfer_all(console: Console, sites: list[_Site], megabytes: int) -> list[_Transfer]:
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        for a, b in ((sites[0], sites[1]), (sites[1], sites[2]), (sites[2], sites[0])):
            title = f"host {a.host.number} → host {b.host.number}, {megabytes} MB"
            task = progress.add_task(title, total=megabytes * _CHUNK)
            results.append(_transfer(title, a.pod, b.pod, megabytes, partial(progress.advance, task)))
    return results


def _transfer(title: str, source: Pod, target: Pod, megabytes: int, advance: Callable[[float], None]) -> _Transfer:
    """Send random bytes by TCP from pod to pod, and compare their hashes."""
    with inside(target.name):
        listener = socket.create_server((str(target.ipv4), 0))
    received = hashlib.sha256()

    def receive() -> None:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(_CHUNK):
                received.update(data)

    sent = hashlib.sha256()
    chunk = os.urandom(_CHUNK)
    with listener:
        receiver = threading.Thread(target=receive)
        receiver.start()
        with inside(source.name):
            connection = socket.socket()
        started = time.monotonic()
        with connection:
            connection.connect(listener.getsockname())
            for _ in range(megabytes):
                connection.sendall(chunk)
                sent.update(chunk)
                advance(_CHUNK)
        receiver.join()
    if sent.digest() != received.digest():
        raise DemoError(f"{title}: what arrived is not what was sent")
    return _Transfer(title, megabytes * _CHUNK, time.monotonic() - started)


def _summarize(console: Console, running: Running, pings: int, transfers: list[_Transfer], seconds: float) -> None:
    nodes: list[dict[str, Any]] = [running.status(name) for name in running.nodes]
    for number, node in enumerate(nodes, 1):
        for direction in ("outbound", "inbound"):
            counted = sum(node[direction]["verdicts"].values())
            if counted != node[direction]["received"]:
                raise DemoError(f"host {number}, {direction}: {json.dumps(node[direction])} does not add up")
    proofs = [
        f"{pings} pairs of pods reach each other, IPv4 and IPv6, both directions, 3 of 3 pings each",
        "one ping was followed byte by byte through TUN, VXLAN and back",
        *(f"{one.title}: equal SHA-256, {one.byte_count * 8 / one.seconds / 1e9:.2f} Gbit/s" for one in transfers),
        "a kernel VXLAN device and two pyflannel-dp nodes understand each other",
        f"of {sum(n[d]['received'] for n in nodes for d in ('outbound', 'inbound'))} packets each has its verdict",
    ]
    for proof in proofs:
        console.print(f"  [green]✓[/] {escape(proof)}")
    console.print(f"[dim]{seconds:.0f} s; everything is removed again")
