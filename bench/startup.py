"""How long a start takes, and what a node weighs: from exec to the first packet on the underlay, and resident memory."""

import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import click

from bench.throughput.hosts import NETWORK, End, two_hosts
from dataplane.lab import Lab, inside

_VXLAN_PORT = 8472


def measure_once() -> tuple[float, float]:
    """Seconds from exec to the first VXLAN datagram on the peer's socket, and the node's resident MiB then."""
    with tempfile.TemporaryDirectory(prefix="pyflannel-dp-bench-") as folder, Lab("start") as lab:
        here, there = two_hosts(lab)
        with inside(there.namespace.name):
            peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with inside(here.namespace.name):
            pod = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with peer, pod:
            peer.bind((str(there.underlay), _VXLAN_PORT))
            peer.settimeout(0.002)
            pod.setblocking(False)
            started = time.monotonic()
            process = here.namespace.popen(_command(here, there, Path(folder)))
            _send_until_received(pod, (str(there.overlay), 9), peer, started + 20)
            seconds = time.monotonic() - started
            pages = int(Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()[1])
    return seconds, pages * 4096 / 2**20


def _command(here: End, there: End, folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "dataplane.cli", "--store", "static", "--iface", "eth0",
        "--network", str(NETWORK), "--subnet", str(here.subnet), "--peer", f"{there.subnet}={there.underlay}",
        "--run-dir", str(folder / "run"), "--subnet-file", str(folder / "subnet.env"),
    ]  # fmt: skip


def _send_until_received(pod: socket.socket, target: tuple[str, int], peer: socket.socket, deadline: float) -> None:
    while time.monotonic() < deadline:
        try:
            pod.sendto(b"first", target)
        except OSError:
            time.sleep(0.001)  # no route yet
            continue
        try:
            if b"first" in peer.recv(2048):
                return
        except TimeoutError:
            continue
    raise click.ClickException("the node did not forward a packet within 20 s")


@click.command()
@click.option("--rounds", default=5, show_default=True)
def startup(rounds: int) -> None:
    """Time from start to the first packet forwarded, and resident memory then."""
    results = [measure_once() for _ in range(rounds)]
    _say("start to first packet", [seconds for seconds, _ in results], "s")
    _say("resident memory", [mebibytes for _, mebibytes in results], "MiB")


def _say(title: str, values: list[float], unit: str) -> None:
    click.echo(f"{title}: median {median(values):.3g} {unit} ({min(values):.3g} … {max(values):.3g})")
