"""The `Host` of Linux: rtnetlink(7).

Theory of operation: what there is comes from ``reading``, what is to be goes out as requests of ``setting``. Each call
opens a socket of its own (``rtnetlink``) and closes it again, so it may come from any thread, and speaks of the network
namespace of that thread. That a request finds its work done already is no error: others may be at it as well.
"""

import contextlib
import errno
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from ipaddress import ip_interface

from dataplane.device.tun import is_attached
from dataplane.host import QUEUE_LENGTH, ROUTE_PROTOCOL, HostError, Interface, Watch, reading, require_mark, setting
from dataplane.host.reading import FAMILIES, interface_by_index
from dataplane.host.rtnetlink import Channel, RefusedError
from dataplane.host.watch import INTERVAL_SECONDS, NetlinkWatch
from routing.config import Address, Network

log = logging.getLogger(__name__)


@contextlib.contextmanager
def _netlink() -> Iterator[Channel]:
    """A socket. What is refused unexpectedly, such as by a link that has just gone, becomes a HostError."""
    try:
        with Channel() as kernel:
            yield kernel
    except RefusedError as error:
        raise HostError(f"cannot set up interfaces and routes: {error.strerror}") from error
    except OSError as error:
        raise HostError(f"cannot talk to the kernel about interfaces and routes: {error.strerror or error}") from error


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
        index = reading.link_towards(address)
        return None if index is None else _link_name(index)

    def configure_device(self, name: str, addresses: Sequence[Address], mtu: int, superpacket_limit: int) -> None:
        """By one message per property."""
        with _netlink() as kernel:
            index = self._configurable(name)
            ipv6 = any(address.version == 6 for address in addresses)
            hint = f" (is IPv6 switched off? see net.ipv6.conf.{name}.disable_ipv6)" if ipv6 else ""
            with _explained(f"cannot set up the device {name}{hint}"):
                kernel.ask(setting.properties(index, mtu, QUEUE_LENGTH, self.mark))
                with _ignored(errno.EOPNOTSUPP):  # a wish: longer superpackets cost a second system call, no more
                    kernel.ask(setting.superpackets(index, superpacket_limit))
                for address in addresses:
                    with _ignored(errno.EEXIST):
                        kernel.ask(setting.address(index, address))
                _remove_other_addresses(kernel, index, addresses)
                kernel.ask(setting.switched_on(index))
            _accept_own_source(kernel, index, name)

    def _configurable(self, name: str) -> int:
        """The index of the TUN `name`, which is ours, or new. Raises HostError."""
        found = _require_link(name)
        if found.kind != "tun" or found.alias not in {"", self.mark}:
            raise HostError(f"the device {name} is not ours any more (see: ip -d link show {name})")
        return found.index

    def add_route(self, network: Network, device: str) -> None:
        """In the main table, link scope, marked by protocol number."""
        with _netlink() as kernel, _explained(f"cannot add the route to {network} by {device}"):
            index = _require_link(device).index
            if not _add_route(kernel, network, index):
                self._make_way(kernel, network, index)

    def _make_way(self, kernel: Channel, network: Network, index: int) -> None:
        """There is a route to `network` already: let one of ours, from an earlier start, go. Raises HostError."""
        others = {other for one, other in _with_our_protocol() if one == network}
        if index in others:
            return
        for other in others & set(self._names_of_ours(others)):
            _remove_route(kernel, network, other)
            if _add_route(kernel, network, index):
                return
        raise HostError(
            f"a route to {network} exists that is not ours (see: ip route show {network}); remove it, or use another "
            "network"
        )

    def remove_route(self, network: Network, device: str) -> None:
        """By network, device and protocol number; whatever its scope."""
        link = next(iter(reading.interfaces([device])), None)
        if link is not None and link.alias == self.mark:
            with _netlink() as kernel, _explained(f"cannot remove the route to {network}"):
                _remove_route(kernel, network, link.index)

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
        with _netlink() as kernel:
            for device in devices:
                with _explained(f"cannot remove the device {device.name}"), _ignored(errno.ENODEV):
                    kernel.ask(setting.no_link(device.index))

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


def _remove_other_addresses(kernel: Channel, index: int, addresses: Sequence[Address]) -> None:
    """Remove what is not in `addresses` of their families; not link-local ones."""
    families = {address.version for address in addresses}
    wanted = {ip_interface(address) for address in addresses}
    for one in reading.addresses(index):
        own = one.interface
        if own not in wanted and own.version in families and not own.ip.is_link_local:
            with _ignored(errno.EADDRNOTAVAIL):  # a secondary one goes with its primary one
                kernel.ask(setting.no_address(one))


def _add_route(kernel: Channel, network: Network, index: int) -> bool:
    """False if there is one to `network` already, whoever's."""
    try:
        kernel.ask(setting.route(network, index))
    except RefusedError as error:
        if error.errno == errno.EEXIST:
            return False
        raise
    return True


def _remove_route(kernel: Channel, network: Network, index: int) -> None:
    with _ignored(errno.ESRCH):
        kernel.ask(setting.no_route(network, index))


def _with_our_protocol() -> list[tuple[Network, int]]:
    """Network and link index of the routes in the main table that have our protocol number, whoever's the link is."""
    found = (route for version in FAMILIES for route in reading.routes(version, ROUTE_PROTOCOL))
    return list(dict.fromkeys((route.network, route.index) for route in found if not route.is_multipath))


@contextlib.contextmanager
def _ignored(code: int) -> Iterator[None]:
    """Nothing happens on the refusal `code`: what was asked for is so already."""
    try:
        yield
    except RefusedError as error:
        if error.errno != code:
            raise


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except RefusedError as error:
        hint = "; run as root or with CAP_NET_ADMIN" if error.errno == errno.EPERM else ""
        raise HostError(f"{what}: {error.strerror}{hint}") from error


def _accept_own_source(kernel: Channel, index: int, name: str) -> None:
    """Let the host accept our ICMP errors, whose source is the device's own address.

    Without it they are martians (net/ipv4/fib_frontend.c, fib_validate_source) and a ping to a subnet without a lease
    hangs. Peers cannot abuse it: the engine refuses inner sources outside their subnets.
    """
    try:
        kernel.ask(setting.own_source(index))
    except RefusedError as error:
        log.warning(
            "cannot set accept_local of %s (%s): ICMP errors to this host's pods will not arrive", name, error.strerror
        )
