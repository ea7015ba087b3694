"""Several hosts in network namespaces of one machine: real devices, real processes, nothing left behind.

Theory of operation: a `Lab` owns namespaces with names that nobody else uses. One is the underlay, a bridge; each
host is a namespace with ``eth0`` on that bridge, and each pod a namespace behind its host's bridge ``cni0``, as the
CNI plugins ``bridge`` and ``host-local`` would make it. Everything is done with iproute2's ``ip``, so that what the
lab does can be done by hand, and leaving the lab's context kills the processes and deletes the namespaces, which
takes every device with it.

Addresses (documentation prefixes, RFC 5737 and RFC 3849): host N is 192.0.2.N and 2001:db8::N.
"""

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any

_NETNS_DIR = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
UNDERLAY_MTU = 1500
_SETTLE_SECONDS = 5.0


class LabError(Exception):
    """The lab cannot be set up; the text holds the command that failed and what it said."""


def missing() -> str | None:
    """Why no lab can be had here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root (or a user namespace: unshare -Urnm)"
    if shutil.which("ip") is None:
        return "the command ip is missing (Debian package iproute2)"
    return None


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Run the body with this thread in `namespace`; sockets made there stay there. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if libc.setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {path}")
        finally:
            os.close(descriptor)

    home = Path(f"/proc/self/task/{threading.get_native_id()}/ns/net")
    back = os.open(home, os.O_RDONLY | os.O_CLOEXEC)
    try:
        enter(_NETNS_DIR / namespace)
        try:
            yield
        finally:
            if libc.setns(back, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot go back to the old namespace")
    finally:
        os.close(back)


@dataclass
class Namespace:
    """A network namespace of the lab, named `name`."""

    lab: "Lab"
    name: str

    def ip(self, *commands: str) -> None:
        """Run each of `commands` with ``ip -n NAME``; raises LabError on the first that fails."""
        script = "\n".join(commands)
        _call(["ip", "-n", self.name, "-batch", "-"], script, what=script)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program in here to its end; output is captured as text."""
        defaults: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
        return subprocess.run(self._command(command), **(defaults | options))  # noqa: PLW1510 - check is in the defaults

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Start a program in here; the lab ends it at the latest when it closes."""
        process: subprocess.Popen[str] = subprocess.Popen(self._command(command), text=True, **options)
        self.lab.processes.append(process)
        return process

    def _command(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def settle(self) -> None:
        """Wait until every IPv6 address can be used.

        The kernel finishes one in the background, also with nodad: until its local route is there (net/ipv6/addrconf.c,
        addrconf_dad_work), packets for it are not delivered.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        while not self._is_settled():
            if time.monotonic() > deadline:
                raise LabError(f"an IPv6 address in {self.name} does not become usable")
            time.sleep(0.005)

    def _is_settled(self) -> bool:
        shown = self.run(["ip", "-6", "-j", "addr", "show", "up"]).stdout
        routes = self.run(["ip", "-6", "-j", "route", "show", "table", "local"]).stdout
        local = {route["dst"] for route in json.loads(routes or "[]")}
        own = [address for link in json.loads(shown or "[]") for address in link.get("addr_info", ())]
        return all(not address.get("tentative") and address["local"] in local for address in own if address)

    def sysctl(self, settings: Mapping[str, str]) -> None:
        """Write /proc/sys entries, named with slashes."""
        with inside(self.name):
            for name, value in settings.items():
                Path("/proc/sys", name).write_text(value, encoding="ascii")


@dataclass
class Pod(Namespace):
    """A pod: a namespace with ``eth0`` behind its host's bridge."""

    ipv4: IPv4Address | None = None
    ipv6: IPv6Address | None = None


@dataclass
class Host(Namespace):
    """A host of the lab: ``eth0`` on the underlay, forwarding on."""

    number: int = 0
    pods: list[Pod] = field(default_factory=list)

    @property
    def ipv4(self) -> IPv4Address:
        """Its address on the underlay."""
        return IPv4Address("192.0.2.0") + self.number

    @property
    def ipv6(self) -> IPv6Address:
        """Its IPv6 address on the underlay."""
        return IPv6Address("2001:db8::") + self.number

    def add_pod(self, subnet: IPv4Network | None, ipv6_subnet: IPv6Network | None = None, mtu: int = 1450) -> Pod:
        """A pod with the tenth address of each subnet (the eleventh for the next pod …); the bridge has the first."""
        number = len(self.pods)
        pod = Pod(self.lab, self.lab.new_namespace(f"{self.name.rpartition('-')[2]}p{number}"))
        link = f"veth{number}"
        if not self.pods:
            self.ip(f"link add cni0 mtu {mtu} type bridge", "link set cni0 up")
        self.ip(
            f"link add {link} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {pod.name}",
            f"link set {link} master cni0 up",
        )
        pod.ip("link set lo up", "link set eth0 up")
        nets: list[IPv4Network | IPv6Network] = [net for net in (subnet, ipv6_subnet) if net is not None]
        for net in nets:
            gateway, address = net.network_address + 1, net.network_address + 10 + number
            nodad = " nodad" if net.version == 6 else ""
            if not self.pods:
                self.ip(f"addr add {gateway}/{net.prefixlen} dev cni0{nodad}")
            pod.ip(f"addr add {address}/{net.prefixlen} dev eth0{nodad}", f"route add default via {gateway}")
            if isinstance(address, IPv4Address):
                pod.ipv4 = address
            else:
                pod.ipv6 = address
        pod.settle()
        self.settle()
        self.pods.append(pod)
        return pod

    def add_kernel_vxlan(
        self, subnet: IPv4Network, ipv6_subnet: IPv6Network | None = None, mtu: int = UNDERLAY_MTU - 50
    ) -> str:
        """A kernel VXLAN device ``flannel.1`` as flannel makes it (VNI 1, port 8472, no learning); returns its MAC."""
        self.ip(
            f"link add flannel.1 mtu {mtu} type vxlan id 1 dev eth0 local {self.ipv4} dstport 8472 nolearning",
            "link set flannel.1 up",
            f"addr add {subnet.network_address}/32 dev flannel.1",
        )
        if ipv6_subnet is not None:
            self.ip(f"addr add {ipv6_subnet.network_address}/128 dev flannel.1 nodad")
        shown = self.run(["cat", "/sys/class/net/flannel.1/address"])
        return shown.stdout.strip()

    def add_kernel_peer(self, subnet: IPv4Network | IPv6Network, address: IPv4Address, mac: str) -> None:
        """Tell the kernel VXLAN device of a peer, in flannel's way: permanent neighbour and FDB entry, onlink route."""
        gateway = subnet.network_address
        self.ip(
            f"neigh replace {gateway} lladdr {mac} dev flannel.1 nud permanent",
            f"route replace {subnet} via {gateway} dev flannel.1 onlink",
        )
        _call(["bridge", "-n", self.name, "fdb", "replace", mac, "dev", "flannel.1", "dst", str(address)])


class Lab:
    """Hosts on one underlay. Use as a context manager; `label` makes the names readable."""

    def __init__(self, label: str = "lab", mtu: int = UNDERLAY_MTU) -> None:
        self._prefix = f"{label}{os.getpid():x}"
        self._mtu = mtu
        self._namespaces: list[str] = []
        self.processes: list[subprocess.Popen[str]] = []
        self.hosts: list[Host] = []

    def __enter__(self) -> "Lab":
        reason = missing()
        if reason is not None:
            raise LabError(reason)
        try:
            self.underlay = Namespace(self, self.new_namespace("net"))
            self.underlay.ip(f"link add br0 mtu {self._mtu} type bridge", "link set br0 up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def new_namespace(self, suffix: str) -> str:
        """Make a namespace and return its name; the lab deletes it."""
        name = f"{self._prefix}-{suffix}"
        _call(["ip", "netns", "add", name])
        self._namespaces.append(name)
        return name

    def add_host(self, *, mtu: int | None = None, ipv6: bool = True) -> Host:
        """The next host, with a default route by ``eth0``."""
        number = len(self.hosts) + 1
        host = Host(self, self.new_namespace(f"h{number}"), number)
        mtu = mtu or self._mtu
        host.sysctl({
            "net/ipv4/ip_forward": "1",
            "net/ipv6/conf/all/forwarding": "1",
            "net/ipv6/conf/default/accept_dad": "0",
        })  # fmt: skip
        self.underlay.ip(
            f"link add h{number} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {host.name}",
            f"link set h{number} master br0 up",
        )
        host.ip(
            "link set lo up",
            "link set eth0 up",
            f"addr add {host.ipv4}/24 dev eth0",
            "route add default via 192.0.2.254 dev eth0",
        )
        if ipv6:
            host.ip(f"addr add {host.ipv6}/64 dev eth0 nodad")
            host.settle()
        self.hosts.append(host)
        return host

    def close(self) -> None:
        """End the processes, delete the namespaces. May be called twice."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self.processes.clear()
        while self._namespaces:
            name = self._namespaces.pop()
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _call(command: Sequence[str], script: str | None = None, what: str | None = None) -> None:
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{what or ' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
