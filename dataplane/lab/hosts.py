"""Hosts on one underlay, and pods behind them.

Theory of operation: one namespace of the lab is the underlay, which holds the outer ends of the hosts' ``eth0`` and what
joins them (`wires`). Each host is a namespace, and each pod one behind its host's bridge ``cni0``, as the CNI plugins
``bridge`` and ``host-local`` would make it. Leaving the lab's context kills the processes and deletes the namespaces,
which takes every device with it.
"""

import itertools
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

from dataplane.lab.namespace import LabError, Namespace, call, kill_all_inside, missing, namespace_exists
from dataplane.lab.wires import Wire, Wires
from dataplane.underlay.link import LinkCounts, LinkSpec, parse_link

UNDERLAY_MTU = 1500
_FIRST_POD = 10


def room_for_pods(prefix_length: int, bits: int) -> int:
    """How many pods a subnet can hold: their addresses begin with the tenth, and the last is nobody's."""
    return max(0, (1 << (bits - prefix_length)) - 1 - _FIRST_POD)


@dataclass
class Pod(Namespace):
    """A pod: a namespace with ``eth0`` behind its host's bridge."""

    ipv4: IPv4Address | None = None
    ipv6: IPv6Address | None = None


@dataclass
class Host(Namespace):
    """A host of the lab: ``eth0`` on the underlay, forwarding on. `label` is what its lab calls it."""

    number: int = 0
    label: str = ""
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
        pod = Pod(self.lab, self.lab.new_namespace(f"{self.label}p{number}"))
        pod.sysctl({"net/ipv6/conf/default/accept_dad": "0"})  # else the link-local address takes its time
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
            gateway, address = net.network_address + 1, net.network_address + _FIRST_POD + number
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
        call(["bridge", "-n", self.name, "fdb", "replace", mac, "dev", "flannel.1", "dst", str(address)])


class Lab:
    """Hosts on one underlay. Use as a context manager; `label` makes the names readable.

    `link` is how every ordered pair of hosts is joined, unless `impair` says otherwise; `seed` fixes what chance does.
    """

    def __init__(self, label: str = "lab", mtu: int = UNDERLAY_MTU, *, link: LinkSpec | None = None, seed: int = 0) -> None:
        self._prefix = self._stem = f"{label}{os.getpid():x}"
        self._mtu = mtu
        self._link = link or LinkSpec()
        self._seed = seed
        self._namespaces: list[str] = []
        self._wires: Wires | None = None
        self.processes: list[subprocess.Popen[str]] = []
        self.hosts: list[Host] = []

    def __enter__(self) -> "Lab":
        reason = missing()
        if reason is not None:
            raise LabError(reason)
        for number in itertools.count(2):
            if not namespace_exists(f"{self._prefix}-net"):
                break
            self._prefix = f"{self._stem}-{number}"  # this process has a lab of that label already
        try:
            self.underlay = Namespace(self, self.new_namespace("net"))
            self._wires = Wires(self.underlay, self._mtu, self._link, self._seed)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def wires(self) -> Wires:
        """What joins the hosts, once the lab is entered."""
        assert self._wires is not None
        return self._wires

    def new_namespace(self, suffix: str) -> str:
        """Make a namespace and return its name; the lab deletes it."""
        name = f"{self._prefix}-{suffix}"
        self._namespaces.append(name)  # before it is there, since an interrupt may come in between
        try:
            call(["ip", "netns", "add", name])
        except LabError:  # it is another's
            self._namespaces.remove(name)
            raise
        return name

    def add_host(self, *, label: str = "", mtu: int | None = None, ipv6: bool = True) -> Host:
        """The next host, with a default route by ``eth0``; called `label`, or h1, h2 …"""
        number = len(self.hosts) + 1
        label = label or f"h{number}"
        host = Host(self, self.new_namespace(label), number, label)
        mtu = mtu or self._mtu
        host.sysctl({
            "net/ipv4/ip_forward": "1",
            "net/ipv6/conf/all/forwarding": "1",
            "net/ipv6/conf/default/accept_dad": "0",
        })  # fmt: skip
        self.underlay.ip(f"link add h{number} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {host.name}")
        self.wires.attach(Wire(label, f"h{number}", host.name))
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

    def impair(self, source: Host, target: Host, spec: LinkSpec | str, *, both: bool = False) -> None:
        """From now on frames from `source` to `target` cross a link like `spec`; with `both`, also those back.

        Text is read as by `parse_link`. Frames that are on their way already arrive as they would have.
        """
        spec = parse_link(spec) if isinstance(spec, str) else spec
        self.wires.impair(source.label, target.label, spec)
        if both:
            self.wires.impair(target.label, source.label, spec)

    def partition(self, *groups: Sequence[Host]) -> None:
        """Let nothing pass between hosts of different `groups`, until `heal`. Other partitions stay."""
        self.wires.partition([[host.label for host in group] for group in groups])

    def heal(self) -> None:
        """End all partitions: each pair has the link again that it had, or was given meanwhile."""
        self.wires.heal()

    def link_counts(self) -> Mapping[tuple[str, str], LinkCounts]:
        """What became of the frames, by ordered pair of labels. Empty while there is no relay."""
        return self.wires.counts()

    def close(self) -> None:
        """End the processes, also those that others started in here, and delete the namespaces. May be called twice."""
        if self._wires is not None:
            self._wires.close()
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self.processes.clear()
        kill_all_inside(self._namespaces)
        while self._namespaces:
            name = self._namespaces.pop()
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
