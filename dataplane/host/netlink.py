"""The `Host` of Linux: rtnetlink, sysctls through /proc.

Theory of operation: things are set through pyroute2, and read by ``reading``, for speed. Each call that sets something
opens a netlink socket of its own with a private event loop and closes it again, because pyroute2's synchronous interface
neither runs inside another loop nor may change threads. That happens at start and where something is mended.
"""

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from dataplane.device.tun import is_attached
from dataplane.host import QUEUE_LENGTH, ROUTE_PROTOCOL, HostError, Interface, Watch, reading, require_mark
from dataplane.host.reading import FAMILIES, interface_by_index
from dataplane.host.watch import INTERVAL_SECONDS, NetlinkWatch
from routing.config import Address, Network

log = logging.getLogger(__name__)

_SCOPE_LINK, _SCOPE_NOWHERE = 253, 255


@contextlib.contextmanager
def _netlink() -> Iterator[Any]:
    """A socket. What is refused unexpectedly, such as by a link that has just gone, becomes a HostError."""
    loop = asyncio.SelectorEventLoop()
    try:
        with IPRoute(use_event_loop=loop) as netlink:
            yield netlink
    except NetlinkError as error:
        raise HostError(f"cannot set up interfaces and routes: {_strerror(error)}") from error
    except OSError as error:
        raise HostError(f"cannot talk to the kernel about interfaces and routes: {error.strerror}") from error
    finally:
        loop.run_until_complete(asyncio.sleep(0))  # lets the closed transport say goodbye
        loop.close()


class NetlinkHost:
    """See `dataplane.host.Host`. `mark` as of `dataplane.host.mark_of`; a watch makes a call each `interval` seconds at
    most."""

    def __init__(self, mark: str, *, interval: float = INTERVAL_SECONDS) -> None:
        self.mark = require_mark(mark)
        self._interval = interval

    def interfaces(self, names: Collection[str] | None = None) -> list[Interface]:
        """From the dumps of links and addresses, or by name one by one."""
        return reading.interfaces(names)

    def default_interface(self, family: int) -> str | None:
        """Of the default routes in the main table, the one with the lowest metric."""
        defaults = reading.routes(family, prefix_length=0)
        best = min(defaults, key=lambda route: route.metric, default=None)
        return None if best is None else _link_name(best.index)

    def interface_towards(self, address: Address) -> str | None:
        """By asking the kernel's routing (RTM_GETROUTE)."""
        with _netlink() as netlink:
            try:
                answer = netlink.route("get", dst=str(address))
            except NetlinkError:
                return None
        index = next((route.get_attr("RTA_OIF") for route in answer), None)
        return None if index is None else _link_name(index)

    def configure_device(self, name: str, addresses: Sequence[Address], mtu: int, superpacket_limit: int) -> None:
        """By one message per property."""
        with _netlink() as netlink:
            index = self._configurable(name)
            ipv6 = any(address.version == 6 for address in addresses)
            hint = f" (is IPv6 switched off? see net.ipv6.conf.{name}.disable_ipv6)" if ipv6 else ""
            with _explained(f"cannot set up the device {name}{hint}"):
                netlink.link("set", index=index, mtu=mtu, txqlen=QUEUE_LENGTH, ifalias=self.mark)
                with _ignored(errno.EOPNOTSUPP):  # a wish: longer superpackets cost a second system call, no more
                    netlink.link("set", index=index, gso_max_size=superpacket_limit)
                for address in addresses:
                    with _ignored(errno.EEXIST):
                        netlink.addr("add", index=index, address=str(address), prefixlen=address.max_prefixlen)
                _remove_other_addresses(netlink, index, addresses)
                netlink.link("set", index=index, state="up")
        _accept_own_source(name)

    def _configurable(self, name: str) -> int:
        """The index of the TUN `name`, which is ours, or new. Raises HostError."""
        found = _require_link(name)
        if found.kind != "tun" or found.alias not in {"", self.mark}:
            raise HostError(f"the device {name} is not ours any more (see: ip -d link show {name})")
        return found.index

    def add_route(self, network: Network, device: str) -> None:
        """In the main table, link scope, marked by protocol number."""
        with _netlink() as netlink, _explained(f"cannot add the route to {network} by {device}"):
            index = _require_link(device).index
            if not _add_route(netlink, network, index):
                self._make_way(netlink, network, index)

    def _make_way(self, netlink: Any, network: Network, index: int) -> None:
        """There is a route to `network` already: let one of ours, from an earlier start, go. Raises HostError."""
        others = {other for one, other in _with_our_protocol() if one == network}
        if index in others:
            return
        for other in others & set(self._names_of_ours(others)):
            _remove_route(netlink, network, other)
            if _add_route(netlink, network, index):
                return
        raise HostError(
            f"a route to {network} exists that is not ours (see: ip route show {network}); remove it, or use another "
            "network"
        )

    def remove_route(self, network: Network, device: str) -> None:
        """By network, device and protocol number; whatever its scope."""
        link = next(iter(reading.interfaces([device])), None)
        if link is not None and link.alias == self.mark:
            with _netlink() as netlink, _explained(f"cannot remove the route to {network}"):
                _remove_route(netlink, network, link.index)

    def routes(self) -> list[tuple[Network, str]]:
        """Of the main table."""
        found = _with_our_protocol()
        names = self._names_of_ours({index for _, index in found})
        return [(network, names[index]) for network, index in found if index in names]

    def _names_of_ours(self, indices: Collection[int]) -> dict[int, str]:
        """Of the links with these indices, the names of those with our mark."""
        links = [interface_by_index(index) for index in indices]
        return {link.index: link.name for link in links if link is not None and link.alias == self.mark}

    def remove_device(self, name: str) -> None:
        """Its addresses and routes go with it."""
        found = next(iter(self.interfaces([name])), None)
        if found is None:
            return
        if not self._owns(found):
            raise HostError(f"the device {name} is not ours (see: ip -d link show {name})")
        self._remove([found])

    def remove_ours(self) -> list[str]:
        """Devices go with their addresses and routes."""
        ours = [interface for interface in self.interfaces() if self._owns(interface)]
        self._remove(ours)
        return [f"device {interface.name}" for interface in ours]

    def _owns(self, interface: Interface) -> bool:
        return interface.alias == self.mark and interface.kind == "tun"

    def _remove(self, devices: Sequence[Interface]) -> None:
        busy = next((device.name for device in devices if is_attached(device.name)), None)
        if busy is not None:
            raise HostError(f"a process is attached to {busy}: a node is running; stop it first")
        with _netlink() as netlink:
            for device in devices:
                with _explained(f"cannot remove the device {device.name}"), _ignored(errno.ENODEV):
                    netlink.link("del", index=device.index)

    def watch(self, changed: Callable[[], None]) -> Watch:
        """By the kernel's multicast groups, of the namespace of the thread that calls this."""
        return NetlinkWatch(changed, self._interval)


def _require_link(name: str) -> Interface:
    found = next(iter(reading.interfaces([name])), None)
    if found is None:
        raise HostError(f"there is no device {name}")
    return found


def _link_name(index: int) -> str | None:
    link = interface_by_index(index)
    return None if link is None else link.name


def _remove_other_addresses(netlink: Any, index: int, addresses: Sequence[Address]) -> None:
    """Remove what is not in `addresses` of their families; not link-local ones."""
    families = {address.version for address in addresses}
    wanted = {ip_interface(address) for address in addresses}
    for one in reading.addresses(index):
        own = one.interface
        if own not in wanted and own.version in families and not own.ip.is_link_local:
            with _ignored(errno.EADDRNOTAVAIL):  # a secondary one goes with its primary one
                netlink.addr("del", index=index, address=str(one.peer), local=str(own.ip), prefixlen=own.network.prefixlen)


def _add_route(netlink: Any, network: Network, index: int) -> bool:
    """False if there is one to `network` already, whoever's."""
    family = FAMILIES[network.version]
    try:
        netlink.route("add", dst=str(network), oif=index, proto=ROUTE_PROTOCOL, scope=_SCOPE_LINK, family=family)
    except NetlinkError as error:
        if error.code == errno.EEXIST:
            return False
        raise
    return True


def _remove_route(netlink: Any, network: Network, index: int) -> None:
    family = FAMILIES[network.version]
    with _ignored(errno.ESRCH):
        netlink.route("del", dst=str(network), oif=index, proto=ROUTE_PROTOCOL, scope=_SCOPE_NOWHERE, family=family)


def _with_our_protocol() -> list[tuple[Network, int]]:
    """Network and link index of the routes in the main table that have our protocol number, whoever's the link is."""
    found = (route for version in FAMILIES for route in reading.routes(version, ROUTE_PROTOCOL))
    return list(dict.fromkeys((route.network, route.index) for route in found if not route.is_multipath))


def _strerror(error: NetlinkError) -> str:
    return str(error.args[1] if len(error.args) > 1 else error)


@contextlib.contextmanager
def _ignored(code: int) -> Iterator[None]:
    """Nothing happens on the netlink error `code`: what was asked for is so already."""
    try:
        yield
    except NetlinkError as error:
        if error.code != code:
            raise


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except NetlinkError as error:
        hint = "; run as root or with CAP_NET_ADMIN" if error.code == errno.EPERM else ""
        raise HostError(f"{what}: {_strerror(error)}{hint}") from error


def _accept_own_source(name: str) -> None:
    """Let the host accept our ICMP errors, whose source is the device's own address.

    Without it they are martians (net/ipv4/fib_frontend.c, fib_validate_source) and a ping to a subnet without a lease
    hangs. Peers cannot abuse it: the engine refuses inner sources outside their subnets.
    """
    path = Path(f"/proc/sys/net/ipv4/conf/{name}/accept_local")
    try:
        if path.read_text(encoding="ascii").strip() != "1":  # it may have become read-only meanwhile
            path.write_text("1", encoding="ascii")
    except OSError as error:
        log.warning("cannot set %s (%s): ICMP errors to this host's pods will not arrive", path, error.strerror)
