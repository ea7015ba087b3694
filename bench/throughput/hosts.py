"""Two hosts joined by a veth pair of MTU 1500: the stage on which everything is measured."""

from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network

from dataplane.lab import Lab, Namespace

NETWORK = IPv4Network("10.244.0.0/16")


@dataclass
class End:
    """One of the two hosts. `processes` holds the numbers of the contender's daemons on it."""

    namespace: Namespace
    number: int
    processes: list[int] = field(default_factory=list)

    @property
    def underlay(self) -> IPv4Address:
        """Its address on the veth."""
        return IPv4Address("192.0.2.0") + self.number

    @property
    def subnet(self) -> IPv4Network:
        """Its subnet of the overlay."""
        return IPv4Network(f"10.244.{self.number}.0/24")

    @property
    def overlay(self) -> IPv4Address:
        """Its address in the overlay: the subnet's first, as flannel gives it to the device."""
        return self.subnet.network_address


def two_hosts(lab: Lab) -> tuple[End, End]:
    """Both ends, in namespaces of `lab`, with nothing between them yet."""
    first, second = (End(Namespace(lab, lab.new_namespace(f"b{number}")), number) for number in (1, 2))
    first.namespace.ip(f"link add eth0 mtu 1500 type veth peer name eth0 mtu 1500 netns {second.namespace.name}")
    for end in (first, second):
        end.namespace.sysctl({"net/ipv6/conf/all/disable_ipv6": "1"})
        end.namespace.ip("link set lo up", "link set eth0 up", f"addr add {end.underlay}/24 dev eth0")
    return first, second
