"""A host in memory: the twin of ``netlink``, for tests of everything above it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_interface

from dataplane.host import ALIAS, ROUTE_PROTOCOL, HostError, Interface
from routing.config import Address, Network


@dataclass
class Route:
    """A route of any owner."""

    network: Network
    device: str
    protocol: int = 3  # RTPROT_BOOT, what an administrator's `ip route add` leaves


@dataclass
class MemoryHost:
    """A `Host` whose interfaces and routes are lists that a test fills."""

    links: list[Interface] = field(default_factory=list)
    table: list[Route] = field(default_factory=list)

    def interfaces(self) -> list[Interface]:
        """As filled in."""
        return sorted(self.links, key=lambda interface: interface.index)

    def default_interface(self, family: int) -> str | None:
        """The device of the first default route of `family`."""
        defaults = (route for route in self.table if route.network.prefixlen == 0 and route.network.version == family)
        return next((route.device for route in defaults), None)

    def interface_towards(self, address: Address) -> str | None:
        """By longest prefix over the routes and the interfaces' own networks."""
        connected = [Route(own.network, link.name) for link in self.links for own in link.addresses if link.is_up]
        holding = [
            route
            for route in (*connected, *self.table)
            if route.network.version == address.version and address in route.network
        ]
        best = max(holding, key=lambda route: route.network.prefixlen, default=None)
        return None if best is None else best.device

    def configure_device(self, name: str, addresses: Sequence[Address], mtu: int, superpacket_limit: int) -> None:
        """Sets the fields of the link `name`, which must be there."""
        link = self._link(name)
        wanted = (*link.addresses, *(ip_interface(address) for address in addresses))
        self.links[self.links.index(link)] = replace(
            link, addresses=tuple(dict.fromkeys(wanted)), mtu=mtu, alias=ALIAS, is_up=True
        )

    def add_route(self, network: Network, device: str) -> None:
        """Adds to `table`."""
        self._link(device)
        same = next((route for route in self.table if route.network == network), None)
        if same is None:
            self.table.append(Route(network, device, ROUTE_PROTOCOL))
        elif same.protocol != ROUTE_PROTOCOL or same.device != device:
            raise HostError(f"a route to {network} exists that is not ours; remove it, or use another network")

    def routes(self) -> list[tuple[Network, str]]:
        """Of `table`, by protocol."""
        return [(route.network, route.device) for route in self.table if route.protocol == ROUTE_PROTOCOL]

    def remove_ours(self) -> list[str]:
        """By alias and protocol."""
        gone = [link.name for link in self.links if link.alias == ALIAS and link.kind == "tun"]
        self.links = [link for link in self.links if link.name not in gone]
        self.table = [route for route in self.table if route.device not in gone]
        routes = [f"route {network} dev {device}" for network, device in self.routes()]
        self.table = [route for route in self.table if route.protocol != ROUTE_PROTOCOL]
        return [f"device {name}" for name in gone] + routes

    def _link(self, name: str) -> Interface:
        found = next((link for link in self.links if link.name == name), None)
        if found is None:
            raise HostError(f"there is no device {name}")
        return found
