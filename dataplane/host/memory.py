"""A host in memory: the twin of ``netlink``, for tests of everything above it."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from typing import Any

from dataplane.host import ALIAS, QUEUE_LENGTH, ROUTE_PROTOCOL, HostError, Interface, require_mark
from dataplane.host.watch import Throttle
from routing.config import Address, Network


@dataclass
class Route:
    """A route of any owner."""

    network: Network
    device: str
    protocol: int = 3  # RTPROT_BOOT, what an administrator's `ip route add` leaves


@dataclass
class MemoryHost:
    """A `Host` whose interfaces and routes are lists that a test fills.

    Its methods tell the watchers; a test that changes `links` or `table` itself calls `notify`, or uses `alter` and
    `delete`. TUNs whose names are in `attached` have a process. Hosts that share the lists are one machine, seen by several
    nodes.
    """

    links: list[Interface] = field(default_factory=list)
    table: list[Route] = field(default_factory=list)
    mark: str = ALIAS
    attached: set[str] = field(default_factory=set)
    _watches: list["MemoryWatch"] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        require_mark(self.mark)

    def interfaces(self, names: Collection[str] | None = None) -> list[Interface]:
        """As filled in."""
        found = [interface for interface in self.links if names is None or interface.name in names]
        return sorted(found, key=lambda interface: interface.index)

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
        if link.kind != "tun" or link.alias not in {"", self.mark}:
            raise HostError(f"the device {name} is not ours any more")
        wanted = [ip_interface(address) for address in addresses]
        families = {address.version for address in addresses}
        kept = [own for own in link.addresses if own in wanted or not _is_ours(own, families)]
        self._replace(
            link,
            addresses=tuple(dict.fromkeys((*kept, *wanted))),
            mtu=mtu,
            alias=self.mark,
            is_up=True,
            queue_length=QUEUE_LENGTH,
            superpacket_limit=superpacket_limit,
            accepts_own_source=True,
        )

    def add_route(self, network: Network, device: str) -> None:
        """Adds to `table`."""
        self._link(device)
        same = next((route for route in self.table if route.network == network), None)
        if same is not None and (same.protocol, same.device) == (ROUTE_PROTOCOL, device):
            return
        if same is not None and same not in self._ours():
            raise HostError(f"a route to {network} exists that is not ours; remove it, or use another network")
        self.table[:] = [*(route for route in self.table if route is not same), Route(network, device, ROUTE_PROTOCOL)]
        self.notify()

    def remove_route(self, network: Network, device: str) -> None:
        """Removes from `table`."""
        ours = [route for route in self._ours() if (route.network, route.device) == (network, device)]
        self.table[:] = [route for route in self.table if route not in ours]
        self.notify()

    def routes(self) -> list[tuple[Network, str]]:
        """Of `table`, by protocol and the alias of the device."""
        return [(route.network, route.device) for route in self._ours()]

    def _ours(self) -> list[Route]:
        devices = {link.name for link in self.links if link.alias == self.mark}
        return [route for route in self.table if route.protocol == ROUTE_PROTOCOL and route.device in devices]

    def remove_device(self, name: str) -> None:
        """With the routes through it."""
        link = next((link for link in self.links if link.name == name), None)
        if link is None:
            return
        if link.alias != self.mark or link.kind != "tun":
            raise HostError(f"the device {name} is not ours")
        if name in self.attached:
            raise HostError(f"a process is attached to {name}")
        self.delete(name)

    def remove_ours(self) -> list[str]:
        """By alias."""
        ours = [link.name for link in self.links if link.alias == self.mark and link.kind == "tun"]
        busy = next((name for name in ours if name in self.attached), None)
        if busy is not None:
            raise HostError(f"a process is attached to {busy}")
        for name in ours:
            self.delete(name)
        return [f"device {name}" for name in ours]

    def watch(self, changed: Callable[[], None]) -> "MemoryWatch":
        """Told in the loop's next turn."""
        made = MemoryWatch(self._watches, changed)
        self._watches.append(made)
        return made

    def notify(self) -> None:
        """Tell the watchers that something has changed. From any thread."""
        for watch in list(self._watches):
            watch.notify()

    def alter(self, name: str, **changes: Any) -> None:
        """Change fields of a link, as an administrator or a cable would. Taken down, it loses what a link in Linux does:
        its routes and its IPv6 addresses."""
        link = self._link(name)
        if changes.get("is_up") is False:
            self.table[:] = [route for route in self.table if route.device != name]
            addresses = changes.get("addresses", link.addresses)
            changes["addresses"] = tuple(own for own in addresses if own.version == 4)
        self._replace(link, **changes)

    def delete(self, name: str) -> None:
        """Remove any link, with the routes through it."""
        self._link(name)
        self.links[:] = [link for link in self.links if link.name != name]
        self.table[:] = [route for route in self.table if route.device != name]
        self.notify()

    def _replace(self, link: Interface, **changes: Any) -> None:
        changed = replace(link, **changes)
        if changed != link:
            self.links[self.links.index(link)] = changed
            self.notify()

    def _link(self, name: str) -> Interface:
        found = next((link for link in self.links if link.name == name), None)
        if found is None:
            raise HostError(f"there is no device {name}")
        return found


def _is_ours(own: IPv4Interface | IPv6Interface, families: Collection[int]) -> bool:
    return own.version in families and not own.ip.is_link_local


class MemoryWatch:
    """A `Watch` that is in the list `all_of_host` until it is closed."""

    def __init__(self, all_of_host: list["MemoryWatch"], changed: Callable[[], None]) -> None:
        self._all_of_host = all_of_host
        self._loop = asyncio.get_running_loop()
        self._throttle = Throttle(changed, 0.0, self._loop)

    def notify(self) -> None:
        """From any thread."""
        self._loop.call_soon_threadsafe(self._throttle.trigger)

    def close(self) -> None:
        """See `Watch`."""
        self._throttle.close()
        if self in self._all_of_host:
            self._all_of_host.remove(self)
