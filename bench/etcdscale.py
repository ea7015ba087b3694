"""A node in a cluster of thousands: its start, its memory, and how soon one changed lease counts, idle and under traffic.

Theory of operation: a real etcd on a host of its own holds the leases, two hosts run nodes, and a fourth has two
addresses that play VTEPs. The lease of one subnet moves from one of these addresses to the other and back, while the
first host sends a datagram into that subnet every millisecond: a change is live when the first of them arrives at the
new address. It is counted from before the put, so etcd's own work is in it. Full traffic is one TCP flow of iperf3
between the two nodes.
"""

import asyncio
import json
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from statistics import median

import click

from bench.processes import resident_mebibytes
from dataplane.control import ask
from dataplane.lab import Host, Lab, inside
from routing.config import BACKEND_VXLAN
from routing.lease import Lease, LeaseAttributes, VtepData, derive_vtep_mac

_CONFIG = {"Network": "10.0.0.0/8", "SubnetLen": 24, "SubnetMin": "10.200.0.0", "Backend": {"Type": "vxlan"}}
_PREFIX = "/coreos.com/network"
_MOVING = IPv4Network("10.1.0.0/24")
_VXLAN_PORT = 8472
_SO_TIMESTAMPNS = 35  # include/uapi/asm-generic/socket.h; a struct timespec comes with each datagram
_TIMESPEC = struct.Struct("@ll")
_DEADLINE_SECONDS = 60.0


class _Stage:
    """The hosts, an etcd, and the nodes that were started."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.folder = folder
        self.etcd, self.first, self.second, self.sinks = (lab.add_host() for _ in range(4))
        self.stamp = folder / "stamp"
        self.url = f"http://{self.etcd.ipv4}:2379"
        self.addresses = (self.sinks.ipv4 + 100, self.sinks.ipv4 + 101)
        self.sinks.ip(*(f"addr add {address}/24 dev eth0" for address in self.addresses))
        with open(folder / "etcd.log", "w", encoding="utf-8") as log:
            self.etcd.popen(
                [
                    "etcd", "--data-dir", str(folder / "etcd"), "--listen-peer-urls", f"http://{self.etcd.ipv4}:2380",
                    "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def put(self, *arguments: str) -> None:
        """Run this module's `_put` beside etcd."""
        program = [sys.executable, "-m", "bench.etcdscale", self.url, str(self.stamp), *arguments]
        done = self.etcd.run(program)
        if done.returncode:
            raise click.ClickException(f"cannot write into etcd: {done.stderr}")

    def start(self, host: Host) -> tuple["subprocess.Popen[str]", float]:
        """A node, and the seconds until it is ready."""
        log = self.folder / f"log{host.number}"
        began = time.monotonic()
        with open(log, "w", encoding="utf-8") as output:
            process = host.popen(
                [sys.executable, "-m", "dataplane.cli", "--etcd-endpoints", self.url, "--run-dir", str(self.run_dir(host))],
                stderr=output,
            )
        while "ready: " not in (said := log.read_text(encoding="utf-8")):
            if process.poll() is not None or time.monotonic() > began + _DEADLINE_SECONDS:
                raise click.ClickException(f"the node did not become ready: {said}")
            time.sleep(0.002)
        return process, time.monotonic() - began

    def run_dir(self, host: Host) -> Path:
        """Where its control socket is."""
        return self.folder / f"run{host.number}"

    def overlay(self, host: Host) -> IPv4Address:
        """Its own address in the overlay."""
        return IPv4Network(ask(self.run_dir(host), "status")["lease"]["subnet"]).network_address

    def change_latencies(self, rounds: int) -> list[float]:
        """Seconds from before the put until packets go to the new address, for each of `rounds` moves."""
        with self._sockets() as receivers, self._stream():
            latencies = []
            for number in range(rounds):
                target = number % 2
                _drain(receivers[target])
                began = time.time()
                self.put("move", str(self.addresses[target]))
                arrived, put_at = _first_arrival(receivers[target], began, self.stamp)
                latencies.append(arrived - put_at)
        return latencies

    @contextmanager
    def _sockets(self) -> Iterator[list[socket.socket]]:
        with inside(self.sinks.name):
            receivers = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in self.addresses]
        try:
            for receiver, address in zip(receivers, self.addresses, strict=True):
                receiver.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
                receiver.bind((str(address), _VXLAN_PORT))
                receiver.settimeout(_DEADLINE_SECONDS)
            yield receivers
        finally:
            for receiver in receivers:
                receiver.close()

    @contextmanager
    def _stream(self) -> Iterator[None]:
        """A datagram into the moving subnet every millisecond, with the time in it."""
        with inside(self.first.name):
            sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        ended = threading.Event()

        def send() -> None:
            while not ended.wait(0.001):
                sender.sendto(b"%.6f" % time.time(), (str(_MOVING.network_address + 9), 9))

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            sender.close()


def _drain(receiver: socket.socket) -> None:
    receiver.setblocking(False)
    try:
        while True:
            receiver.recv(2048)
    except BlockingIOError:
        receiver.settimeout(_DEADLINE_SECONDS)


def _first_arrival(receiver: socket.socket, began: float, stamp: Path) -> tuple[float, float]:
    """When the first datagram that was sent after `began` arrived, and when the put began, which was later than `began`:
    `stamp` has it. The kernel notes when a datagram arrives; whoever reads it may come late."""
    while True:
        data, ancillary, _, _ = receiver.recvmsg(2048, _TIMESPEC.size * 4)
        if float(data[-17:]) >= began:
            seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2][: _TIMESPEC.size])
            return seconds + nanoseconds / 1e9, float(stamp.read_text(encoding="ascii"))


async def _put(url: str, stamp: str, what: str, argument: str) -> None:
    """Write leases into etcd: ``fill COUNT``, or ``move ADDRESS`` for the one that moves.

    When that began is noted in the file `stamp`: the start of this program is not etcd's doing, nor ours.
    """
    from routing.stores.etcd import Credentials, parse_endpoints  # noqa: PLC0415 - gRPC is for who measures this
    from routing.stores.etcd.client import Client  # noqa: PLC0415 - as above
    from routing.stores.etcd.keyspace import Keyspace  # noqa: PLC0415 - as above

    client = Client(parse_endpoints(url), Credentials(), random.Random())
    keyspace = Keyspace(client)
    await keyspace.get(b"x")  # the connection is there when the time is taken
    if what == "fill":
        await keyspace.put(f"{_PREFIX}/config".encode(), json.dumps(_CONFIG).encode())
        count = int(argument)
        for start in range(0, count, 200):
            numbers = range(start, min(start + 200, count))
            await asyncio.gather(
                *(
                    keyspace.put(*_lease(IPv4Network((0x0A020000 + (n << 8), 24)), IPv4Address(0xC6120000 + n)))
                    for n in numbers
                )
            )
    else:
        Path(stamp).write_text(f"{time.time():.6f}", encoding="ascii")
        await keyspace.put(*_lease(_MOVING, IPv4Address(argument)))
    await client.close()


def _lease(subnet: IPv4Network, address: IPv4Address) -> tuple[bytes, bytes]:
    lease = Lease(subnet, None, LeaseAttributes(address, None, BACKEND_VXLAN, VtepData(derive_vtep_mac(address), 1)))
    return f"{_PREFIX}/subnets/{lease.key}".encode(), lease.attributes.to_json().encode()


@contextmanager
def _full_traffic(stage: _Stage) -> Iterator[Callable[[], float]]:
    """One TCP flow from the first host to the second; gives what tells its Gbit/s at the end."""
    server = stage.second.popen(["iperf3", "-s", "-1"], stdout=subprocess.DEVNULL)
    time.sleep(0.3)
    client = stage.first.popen(
        ["iperf3", "-c", str(stage.overlay(stage.second)), "-t", "3600", "-i", "1", "-J"], stdout=subprocess.DEVNULL
    )
    before, began = ask(stage.run_dir(stage.first), "status")["outbound"]["forwarded_bytes"], time.monotonic()

    def rate() -> float:
        after = ask(stage.run_dir(stage.first), "status")["outbound"]["forwarded_bytes"]
        return float(8 * (after - before) / (time.monotonic() - began) / 1e9)

    try:
        time.sleep(1.0)
        yield rate
    finally:
        client.kill()
        server.kill()


@click.command()
@click.option(
    "--leases", type=click.IntRange(1, 40_000), default=10_000, show_default=True, help="How many peers there are."
)
@click.option("--rounds", type=click.IntRange(2), default=20, show_default=True, help="How often the one lease moves.")
def etcdscale(leases: int, rounds: int) -> None:
    """A node among thousands of leases in etcd: start, memory, and how soon a changed lease counts."""
    with tempfile.TemporaryDirectory(prefix="pyflannel-dp-bench-") as name, Lab("etcdscale") as lab:
        stage = _Stage(lab, Path(name))
        for count in (0, leases):
            stage.put("fill", str(count))
            process, seconds = stage.start(stage.first)
            click.echo(
                f"{count} leases: ready after {seconds:.2f} s, resident {resident_mebibytes(process.pid):.1f} MiB",
            )
            if count == 0:
                process.terminate()
                process.wait(_DEADLINE_SECONDS)
        stage.start(stage.second)
        _say("a changed lease counts, idle", stage.change_latencies(rounds))
        with _full_traffic(stage) as rate:
            _say("a changed lease counts, under traffic", stage.change_latencies(rounds))
            click.echo(f"traffic meanwhile: {rate():.2f} Gbit/s")
        status = ask(stage.run_dir(stage.first), "status")
        click.echo(
            f"resident {resident_mebibytes(process.pid):.1f} MiB; the loop was late by "
            f"{1000 * status['loop']['worst_lag_seconds']:.0f} ms at most"
        )


def _say(title: str, seconds: list[float]) -> None:
    values = sorted(1000 * one for one in seconds)
    click.echo(f"{title}: median {median(values):.0f} ms ({values[0]:.0f} … {values[-1]:.0f})")


if __name__ == "__main__":
    asyncio.run(_put(*sys.argv[1:5]))
