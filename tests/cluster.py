"""A cluster in a lab: real nodes as processes, pods, a kernel VXLAN host; and what tests do with it."""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

from dataplane.control import ControlError, ask
from dataplane.lab import Host, Lab, Pod, inside
from routing.lease import Lease, LeaseAttributes, VtepData, parse_mac

NODE = [sys.executable, "-m", "dataplane.cli"]
NETWORK = "10.244.0.0/16"
IPV6_NETWORK = "fd00:10:244::/48"
KERNEL_SUBNET = IPv4Network("10.244.200.0/24")
KERNEL_IPV6_SUBNET = IPv6Network("fd00:10:244:c8::/64")
DEADLINE = 15.0


def until(what: str, condition: Callable[[], object], seconds: float = DEADLINE) -> None:
    """Poll: the condition depends on other processes and the kernel, which tell nobody."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.01)


class Cluster:
    """Hosts of a `Lab`, of which some run nodes that share a local store below `folder`."""

    def __init__(self, lab: Lab, folder: Path, *options: str) -> None:
        self.lab, self.folder, self.options = lab, folder, options
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def arguments(self, host: Host) -> list[str]:
        return ["--store-dir", str(self.folder / "store"), *self.places(host), *self.options]

    def places(self, host: Host) -> list[str]:
        return ["--run-dir", str(self.run_dir(host)), "--subnet-file", str(self.subnet_file(host))]

    def run_dir(self, host: Host) -> Path:
        return self.folder / f"run{host.number}"

    def subnet_file(self, host: Host) -> Path:
        return self.folder / f"subnet{host.number}.env"

    def log(self, host: Host, begin: int = 0) -> str:
        """What the nodes of `host` have said, from the byte `begin` on."""
        path = self.folder / f"log{host.number}"
        return path.read_bytes()[begin:].decode() if path.exists() else ""

    def start(self, host: Host, *options: str, arguments: list[str] | None = None) -> None:
        """Start the node of `host` and wait until it is ready. What an earlier start left is there, as on any host."""
        if arguments is None:
            is_static = "static" in options  # which has no use for a folder of leases, and refuses it
            arguments = [*self.places(host), *self.options] if is_static else self.arguments(host)
        with open(self.folder / f"log{host.number}", "a") as log:
            begin = log.tell()
            process = host.popen([*NODE, *arguments, *options], stdout=log, stderr=log)
        self.processes[host.number] = process

        def ready() -> bool:
            assert process.poll() is None, self.log(host)
            return "ready: " in self.log(host, begin)

        until(f"the node on host {host.number}", ready)

    def stop(self, host: Host, number: signal.Signals = signal.SIGTERM) -> int:
        process = self.processes.pop(host.number)
        process.send_signal(number)
        return process.wait(DEADLINE)

    def status(self, host: Host) -> dict:
        return ask(self.run_dir(host), "status")

    def subnets(self, host: Host) -> tuple[IPv4Network | None, IPv6Network | None]:
        lease = self.status(host)["lease"]
        ipv4 = IPv4Network(lease["subnet"]) if lease["subnet"] else None
        return ipv4, IPv6Network(lease["ipv6_subnet"]) if lease["ipv6_subnet"] else None

    def add_pod(self, host: Host) -> Pod:
        return host.add_pod(*self.subnets(host), mtu=self.status(host)["device"]["mtu"])

    def wait_for_peers(self, host: Host, count: int) -> None:
        def known() -> bool:
            try:
                return len(self.status(host)["peers"]) >= count
            except ControlError:
                return False

        until(f"{count} peers on host {host.number}", known)

    def announce(self, subnet: IPv4Network, ipv6_subnet: IPv6Network | None, attributes: LeaseAttributes) -> None:
        """A reservation for a host that runs no node."""
        lease = Lease(subnet, ipv6_subnet, attributes)
        path = self.folder / "store" / "subnets" / lease.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(attributes.to_json())

    def add_kernel_host(self) -> tuple[Host, Pod]:
        """A host with a kernel VXLAN device, known to all nodes that run and knowing them."""
        host = self.lab.add_host()
        mtu = min(self.status(node)["device"]["mtu"] for node in self.lab.hosts if node.number in self.processes)
        mac = host.add_kernel_vxlan(KERNEL_SUBNET, KERNEL_IPV6_SUBNET, mtu)
        data = VtepData(parse_mac(mac), 1)
        self.announce(KERNEL_SUBNET, KERNEL_IPV6_SUBNET, LeaseAttributes(host.ipv4, None, "vxlan", data))
        for node in self.lab.hosts:
            if node.number in self.processes:
                own_mac = self.status(node)["lease"]["vtep_mac"]
                for subnet in self.subnets(node):
                    if subnet is not None:
                        host.add_kernel_peer(subnet, node.ipv4, own_mac)
        return host, host.add_pod(KERNEL_SUBNET, KERNEL_IPV6_SUBNET, mtu)


@contextlib.contextmanager
def cluster(folder: Path, *options: str, nodes: int = 2, start: bool = True) -> Iterator[Cluster]:
    """`nodes` hosts with a node each; with `start`, running, with a pod each, and knowing one another."""
    with Lab("tst") as lab:
        made = Cluster(lab, folder, *options)
        for _ in range(nodes):
            lab.add_host()
        if start:
            for host in lab.hosts:
                made.start(host)
            for host in lab.hosts:
                made.add_pod(host)
        if start and nodes > 1:
            for host in lab.hosts:
                made.wait_for_peers(host, (nodes - 1) * len([s for s in made.subnets(host) if s]))
        yield made


def add_up(status: dict) -> bool:
    """Packets received equal the sum of the verdicts, in both directions."""
    return all(status[way]["received"] == sum(status[way]["verdicts"].values()) for way in ("outbound", "inbound"))


def ping(source: Pod | Host, target: object, *options: str, count: int = 3) -> subprocess.CompletedProcess[str]:
    return source.run(["ping", "-n", "-c", str(count), "-i", "0.05", "-W", "2", *options, str(target)])


def pings(source: Pod | Host, target: object, *options: str) -> bool:
    """Whether all of three pings are answered."""
    return " 0% packet loss" in ping(source, target, *options).stdout


def transfer(source: Pod, target: Pod, version: int, megabytes: int) -> bool:
    """Send so much by TCP; whether the hashes agree."""
    address = str(target.ipv4 if version == 4 else target.ipv6)
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    with inside(target.name):
        listener = socket.create_server((address, 0), family=family)
    received, sent = hashlib.sha256(), hashlib.sha256()

    def receive() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(60)
            while data := connection.recv(1 << 20):
                received.update(data)

    with listener:
        listener.settimeout(20)
        receiver = threading.Thread(target=receive)
        receiver.start()
        with inside(source.name):
            connection = socket.socket(family)
        with connection:
            connection.settimeout(60)
            connection.connect(listener.getsockname())
            for _ in range(megabytes):
                chunk = os.urandom(1 << 20)
                connection.sendall(chunk)
                sent.update(chunk)
        receiver.join(90)
    return sent.digest() == received.digest()


@contextlib.contextmanager
def udp_sockets(source: Pod, target: Pod, version: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A socket in each pod; the first is connected to the second."""
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    with inside(target.name):
        receiver = socket.socket(family, socket.SOCK_DGRAM)
    with inside(source.name):
        sender = socket.socket(family, socket.SOCK_DGRAM)
    with receiver, sender:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        receiver.settimeout(5)
        receiver.bind((str(target.ipv4 if version == 4 else target.ipv6), 0))
        sender.connect(receiver.getsockname())
        yield sender, receiver


class Tap:
    """A packet socket on a device of a namespace: all frames that pass, with `caught` to read them."""

    def __init__(self, namespace: str, device: str) -> None:
        with inside(namespace):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            self._socket.bind((device, 3))
        self._socket.setblocking(False)

    def __enter__(self) -> "Tap":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def caught(self) -> list[bytes]:
        frames = []
        with contextlib.suppress(BlockingIOError):
            while True:
                frames.append(self._socket.recv(1 << 16))
        return frames


def write_pcap(path: Path, frames: list[bytes]) -> None:
    from scapy.utils import PcapWriter

    with PcapWriter(str(path), linktype=1) as writer:
        for frame in frames:
            writer.write(frame)


def tshark(path: Path, *fields: str, display_filter: str = "") -> list[dict[str, str]]:
    """The given fields of each frame as tshark sees them, VXLAN on 8472, all checksums verified."""
    command = ["tshark", "-n", "-r", str(path), "-d", "udp.port==8472,vxlan", "-T", "fields", "-E", "separator=|"]
    for option in ("ip.check_checksum:TRUE", "udp.check_checksum:TRUE", "tcp.check_checksum:TRUE"):
        command += ["-o", option]
    if display_filter:
        command += ["-Y", display_filter]
    for name in fields:
        command += ["-e", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [dict(zip(fields, line.split("|"), strict=True)) for line in done.stdout.splitlines()]


def traceroute(source: Pod, target: object) -> list[str]:
    done = source.run(["traceroute", "-n", "-q", "1", "-w", "2", "-m", "8", str(target)])
    return re.findall(r"^\s*\d+\s+(\S+)", done.stdout, re.MULTILINE)


def run_node(host: Host, *options: str, prefix: tuple[str, ...] = (), **run_options) -> subprocess.CompletedProcess[str]:
    """Run a node that is to fail, to its end."""
    return host.run([*prefix, *NODE, *options], timeout=DEADLINE, **run_options)


def interfaces_and_routes(host: Host) -> str:
    """Links, addresses and routes of a host, without what moves by itself."""
    shown = []
    for what in (["link"], ["addr"], ["route"], ["-6", "route"]):
        text = host.run(["ip", "-j", *what, "show"]).stdout
        for one in json.loads(text or "[]"):
            for moving in ("stats", "stats64", "valid_life_time", "preferred_life_time", "expires", "operstate"):
                one.pop(moving, None)
            shown.append(json.dumps(one, sort_keys=True))
    return "\n".join(sorted(shown))
