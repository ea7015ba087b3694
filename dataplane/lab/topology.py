"""A whole lab as data: which hosts there are, what runs on them, how they are joined; and such a lab brought up.

Theory of operation: a `Topology` is checked when it is made, so that bringing it up fails only for reasons of the machine.
The nodes are real processes of this program that share a local store in a folder. A host with a kernel VXLAN device is
announced to them by a lease file written by hand, which is a reservation, before any of them chooses a subnet; it is told
of them as flanneld would. All nodes start at once; `Running` exists when each is ready and knows all its peers.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Any

from dataplane.control import ControlError, ask
from dataplane.lab.hosts import UNDERLAY_MTU, Host, Lab, Pod, room_for_pods
from dataplane.lab.namespace import LabError, until
from dataplane.underlay.link import LinkSpec
from encap.overhead import MINIMUM_IPV6_MTU, overhead
from encap.vxlan import HEADER_LENGTH
from routing.config import BACKEND_VXLAN, ConfigError, Network, NetworkConfig, Pool, parse_config
from routing.lease import Lease, LeaseAttributes, VtepData, parse_mac
from routing.route import FRAMING_VXLAN

MOST_HOSTS = 100
MOST_PODS = 50
DEFAULT_NETWORK = IPv4Network("10.244.0.0/16")
_HOST_NAME = re.compile(r"[a-z][a-z0-9-]{0,14}")
_START_SECONDS = 20.0


class TopologyError(ValueError):
    """The description of a lab makes no sense; the text says where, and what would do."""


class Runs(StrEnum):
    """What a host runs."""

    NODE = "node"
    KERNEL = "kernel"
    NOTHING = "nothing"


@dataclass(frozen=True)
class HostPlan:
    """A host. `options` are more options for its node; the subnets are those of a kernel VXLAN device, None for any."""

    name: str
    runs: Runs = Runs.NODE
    pods: int = 0
    options: tuple[str, ...] = ()
    mtu: int | None = None
    subnet: IPv4Network | None = None
    ipv6_subnet: IPv6Network | None = None


@dataclass(frozen=True)
class LinkPlan:
    """How frames get from the host `source` to the host `target`."""

    source: str
    target: str
    spec: LinkSpec


@dataclass(frozen=True)
class Subnets:
    """What a host of the overlay holds."""

    ipv4: IPv4Network | None
    ipv6: IPv6Network | None

    @property
    def networks(self) -> list[Network]:
        """Those that there are."""
        return [network for network in (self.ipv4, self.ipv6) if network is not None]


@dataclass(frozen=True)
class Topology:
    """A lab. `mtu` is the underlay's; `link` joins each ordered pair that `links` does not name. Raises TopologyError."""

    hosts: tuple[HostPlan, ...]
    network: IPv4Network = DEFAULT_NETWORK
    ipv6_network: IPv6Network | None = None
    framing: str = FRAMING_VXLAN
    mtu: int = UNDERLAY_MTU
    seed: int = 0
    options: tuple[str, ...] = ()
    link: LinkSpec = field(default_factory=LinkSpec)
    links: tuple[LinkPlan, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.hosts) <= MOST_HOSTS:
            raise TopologyError(f"there must be 1 to {MOST_HOSTS} hosts, not {len(self.hosts)}")
        self._check_names()
        for host in self.hosts:
            self._check_host(host)
        self._check_links()
        self.kernel_subnets()

    def _check_names(self) -> None:
        """Hosts and pods become namespaces, one of which is the underlay's."""
        taken = {"net": "the underlay"}
        for host in self.hosts:
            if not _HOST_NAME.fullmatch(host.name):
                raise TopologyError(
                    f"host {host.name!r}: a name is 1 to 15 small letters, digits and dashes, and begins with a letter"
                )
            names = {host.name: f"the host {host.name}"}
            names |= {f"{host.name}p{number}": f"a pod of the host {host.name}" for number in range(host.pods)}
            for name in names:
                if name in taken:
                    raise TopologyError(f"host {host.name!r}: the namespace {name} would be that of {taken[name]}, too")
            taken |= names

    def _check_host(self, host: HostPlan) -> None:
        if host.runs is Runs.NOTHING and host.pods:
            raise TopologyError(f"host {host.name!r} runs nothing, so it has no subnet that its pods could be in")
        for pool in self.config.pools:
            room = room_for_pods(pool.subnet_length, pool.network.max_prefixlen)
            if host.pods > room:
                raise TopologyError(
                    f"host {host.name!r} has {host.pods} pods, but the subnets of {pool.network} have room for {room}"
                )
        if host.runs is Runs.KERNEL and self.framing != FRAMING_VXLAN:
            raise TopologyError(f"host {host.name!r} runs a kernel VXLAN device, which needs the framing vxlan")
        if host.runs is not Runs.KERNEL and (host.subnet or host.ipv6_subnet):
            raise TopologyError(f"host {host.name!r}: a subnet is given to kernel hosts only; a node finds its own")
        if host.runs is not Runs.NODE and host.options:
            raise TopologyError(f"host {host.name!r} runs no node that could have options")
        if host.ipv6_subnet and not host.subnet:
            raise TopologyError(f"host {host.name!r} has an ipv6_subnet, and needs a subnet with it")

    def _check_links(self) -> None:
        names = {host.name for host in self.hosts}
        seen = set()
        for link in self.links:
            pair = (link.source, link.target)
            for name in pair:
                if name not in names:
                    raise TopologyError(f"the link from {link.source} to {link.target}: there is no host {name!r}")
            if link.source == link.target:
                raise TopologyError(f"the link from {link.source} to {link.target} joins a host with itself")
            if pair in seen:
                raise TopologyError(f"the link from {link.source} to {link.target} is described twice")
            seen.add(pair)

    def underlay_mtu(self, host: HostPlan) -> int:
        """The MTU of the host's eth0."""
        return host.mtu or self.mtu

    def has_ipv6_underlay(self, host: HostPlan) -> bool:
        """Whether its eth0 can have an IPv6 address."""
        return self.underlay_mtu(host) >= MINIMUM_IPV6_MTU

    @property
    def config(self) -> NetworkConfig:
        """The network configuration that the nodes will find. Raises TopologyError."""
        keys: dict[str, Any] = {"Network": str(self.network), "Backend": {"Type": BACKEND_VXLAN}}
        if self.ipv6_network is not None:
            keys |= {"EnableIPv6": True, "IPv6Network": str(self.ipv6_network)}
        try:
            return parse_config(json.dumps(keys))
        except ConfigError as error:
            raise TopologyError(str(error)) from None

    def kernel_subnets(self) -> dict[str, Subnets]:
        """Those of the kernel hosts, by name: as given, else the last that are free. Raises TopologyError."""
        config = self.config
        given = [host for host in self.hosts if host.subnet is not None]
        taken: set[Network] = set()
        for host in given:
            for pool, subnet in ((config.ipv4, host.subnet), (config.ipv6, host.ipv6_subnet)):
                _check_subnet(host.name, pool, subnet, taken)
        subnets = {host.name: Subnets(host.subnet, host.ipv6_subnet) for host in given}
        free, free_ipv6 = (_from_the_end(pool, taken) for pool in (config.ipv4, config.ipv6))
        for host in self.hosts:
            if host.runs is Runs.KERNEL and host not in given:
                ipv4, ipv6 = next(free, None), next(free_ipv6, None)
                if ipv4 is None or (ipv6 is None and config.ipv6):
                    raise TopologyError(f"host {host.name!r}: the network has no subnet left")
                subnets[host.name] = Subnets(IPv4Network(ipv4), IPv6Network(ipv6) if ipv6 else None)
        return subnets

    @contextlib.contextmanager
    def bring_up(self, folder: Path | None = None, label: str = "lab") -> Iterator["Running"]:
        """The lab, up and running; leaving the context removes it.

        Store, run folders and logs are in `folder`, without one in a temporary folder. Raises LabError.
        """
        with contextlib.ExitStack() as stack:
            if folder is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyflannel-dp-lab-")))
            lab = stack.enter_context(Lab(label, self.mtu, link=self.link, seed=self.seed))
            running = Running(self, lab, folder)
            running.start()
            yield running


class Running:
    """A topology that is up: `hosts` by name. Made by `Topology.bring_up`."""

    def __init__(self, topology: Topology, lab: Lab, folder: Path) -> None:
        self.topology, self.lab, self.folder = topology, lab, folder
        self.hosts: dict[str, Host] = {}
        self.subnets: dict[str, Subnets] = {}
        self.nodes: dict[str, subprocess.Popen[str]] = {}
        self._kernel_macs: dict[str, str] = {}

    @property
    def pods(self) -> list[Pod]:
        """All pods, host by host."""
        return [pod for host in self.hosts.values() for pod in host.pods]

    def run_dir(self, host: Host | str) -> Path:
        """The run folder of a node."""
        return self.folder / f"run-{_name(host)}"

    def log(self, host: Host | str) -> Path:
        """Where a node's output goes."""
        return self.folder / f"{_name(host)}.log"

    def status(self, host: Host | str) -> dict[str, Any]:
        """What the node on `host` says of itself. Raises ControlError if it does not."""
        return ask(self.run_dir(host), "status")

    def start(self) -> None:
        """Bring everything up. Raises LabError."""
        self._add_hosts()
        for name, subnets in self.topology.kernel_subnets().items():
            self._add_kernel_vxlan(name, subnets)
        for plan in self._plans(Runs.NODE):
            self._start_node(plan)
        for name in self.nodes:
            until(f"the start of the node on host {name}", partial(self._is_ready, name), _START_SECONDS)
            self.subnets[name] = _subnets_of(self.status(name))
        for name in self._kernel_macs:
            self._introduce_all(name)
        for name in self.nodes:
            until(f"host {name} hearing of its peers", partial(self._knows_all, name), _START_SECONDS)
        for plan in self.topology.hosts:
            for _ in range(plan.pods):
                subnets = self.subnets[plan.name]
                self.hosts[plan.name].add_pod(subnets.ipv4, subnets.ipv6, self._device_mtu(plan))

    def _plans(self, runs: Runs) -> Iterable[HostPlan]:
        return [plan for plan in self.topology.hosts if plan.runs is runs]

    def _add_hosts(self) -> None:
        for plan in self.topology.hosts:
            has_ipv6 = self.topology.has_ipv6_underlay(plan)
            self.hosts[plan.name] = self.lab.add_host(label=plan.name, mtu=plan.mtu, ipv6=has_ipv6)
        for link in self.topology.links:
            self.lab.impair(self.hosts[link.source], self.hosts[link.target], link.spec)

    def _add_kernel_vxlan(self, name: str, subnets: Subnets) -> None:
        host = self.hosts[name]
        plan = next(plan for plan in self.topology.hosts if plan.name == name)
        assert subnets.ipv4 is not None
        mac = host.add_kernel_vxlan(subnets.ipv4, subnets.ipv6, self._device_mtu(plan))
        attributes = LeaseAttributes(host.ipv4, None, BACKEND_VXLAN, VtepData(parse_mac(mac), 1))
        lease = Lease(subnets.ipv4, subnets.ipv6, attributes)
        leases = self.folder / "store" / "subnets"
        leases.mkdir(parents=True, exist_ok=True)
        (leases / lease.key).write_text(attributes.to_json(), encoding="utf-8")
        self.subnets[name] = subnets
        self._kernel_macs[name] = mac

    def _device_mtu(self, plan: HostPlan) -> int:
        """As the node says; a kernel VXLAN device gets what a node in its place would have."""
        if plan.runs is Runs.NODE:
            return int(self.status(plan.name)["device"]["mtu"])
        family = 4 if self.topology.ipv6_network is None else 6
        return self.topology.underlay_mtu(plan) - overhead(HEADER_LENGTH, family)

    def _start_node(self, plan: HostPlan) -> None:
        topology = self.topology
        networks = ["--network", str(topology.network)]
        if topology.ipv6_network is not None:
            networks += ["--ipv6-network", str(topology.ipv6_network)]
        command = [
            sys.executable, "-m", "dataplane.cli", "--backend", "udp", "--framing", topology.framing, *networks,
            "--store-dir", str(self.folder / "store"), "--run-dir", str(self.run_dir(plan.name)),
            "--subnet-file", str(self._subnet_file(plan.name)),
            *topology.options, *plan.options,
        ]  # fmt: skip
        self._subnet_file(plan.name).unlink(missing_ok=True)  # of a lab that had the folder before
        with open(self.log(plan.name), "w", encoding="utf-8") as log:
            self.nodes[plan.name] = self.hosts[plan.name].popen(command, stdout=log, stderr=log)

    def _subnet_file(self, name: str) -> Path:
        return self.folder / f"subnet-{name}.env"

    def _is_ready(self, name: str) -> bool:
        """A node writes its subnet file last."""
        if self.nodes[name].poll() is not None:
            said = self.log(name).read_text(encoding="utf-8").strip()
            raise LabError(f"the node on host {name} ended:\n{said}")
        return self._subnet_file(name).exists()

    def _introduce_all(self, kernel: str) -> None:
        """Tell the kernel VXLAN device on host `kernel` of all others."""
        for name, subnets in self.subnets.items():
            mac = self._kernel_macs.get(name) or self.status(name)["lease"]["vtep_mac"]
            for subnet in subnets.networks if name != kernel else ():
                self.hosts[kernel].add_kernel_peer(subnet, self.hosts[name].ipv4, mac)

    def _knows_all(self, name: str) -> bool:
        wanted = {str(subnet) for other, subnets in self.subnets.items() if other != name for subnet in subnets.networks}
        try:
            return wanted <= {peer["subnet"] for peer in self.status(name)["peers"]}
        except ControlError as error:
            raise LabError(f"the node on host {name}: {error}") from error


def _name(host: Host | str) -> str:
    return host if isinstance(host, str) else host.label


def _subnets_of(status: dict[str, Any]) -> Subnets:
    lease = status["lease"]
    return Subnets(
        IPv4Network(lease["subnet"]) if lease["subnet"] else None,
        IPv6Network(lease["ipv6_subnet"]) if lease["ipv6_subnet"] else None,
    )


def _check_subnet(name: str, pool: Pool | None, subnet: Network | None, taken: set[Network]) -> None:
    """Add `subnet` to `taken`, if it is one of the pool's and free."""
    if subnet is None:
        return
    if pool is None:
        raise TopologyError(f"host {name!r} has an ipv6_subnet, but there is no ipv6_network")
    if not pool.fits(subnet):
        raise TopologyError(
            f"host {name!r}: {subnet} is none of the network's subnets, which are /{pool.subnet_length} from "
            f"{pool.minimum} to {pool.maximum}"
        )
    if subnet in taken:
        raise TopologyError(f"host {name!r}: {subnet} is another host's already")
    taken.add(subnet)


def _from_the_end(pool: Pool | None, taken: set[Network]) -> Iterator[Network]:
    """The free subnets of a pool, the last first, where nodes that choose at random rarely look."""
    if pool is None:
        return
    size = 1 << (pool.network.max_prefixlen - pool.subnet_length)
    for start in range(int(pool.maximum), int(pool.minimum) - 1, -size):
        subnet = type(pool.network)((start, pool.subnet_length))
        if subnet not in taken:
            yield subnet
