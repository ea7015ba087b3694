"""The `Host` of Linux: rtnetlink through pyroute2, sysctls through /proc.

Theory of operation: each call opens a netlink socket of its own with a private event loop and closes it again, because
pyroute2's synchronous interface neither runs inside another loop nor may change threads. At start and stop that costs a
few milliseconds in all; nothing here is called while packets flow.
"""

import asyncio
import contextlib
import errno
import logging
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_interface, ip_network
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from dataplane.device.tun import is_attached
from dataplane.host import ALIAS, QUEUE_LENGTH, ROUTE_PROTOCOL, HostError, Interface
from routing.config import Address, Network

log = logging.getLogger(__name__)

_FAMILY = {4: AF_INET, 6: AF_INET6}
_IFF_UP = 1
_MAIN_TABLE = 254


@contextlib.contextmanager
def _netlink() -> Iterator[Any]:
    loop = asyncio.SelectorEventLoop()
    try:
        with IPRoute(use_event_loop=loop) as netlink:
            yield netlink
    finally:
        loop.run_until_complete(asyncio.sleep(0))  # lets the closed transport say goodbye
        loop.close()


class NetlinkHost:
    """See `dataplane.host.Host`."""

    def interfaces(self) -> list[Interface]:
        """From the dumps of links and addresses."""
        with _netlink() as netlink:
            links = list(netlink.get_links())
            addresses = list(netlink.get_addr())
        by_index: dict[int, list[IPv4Interface | IPv6Interface]] = {}
        for message in addresses:
            # On a point-to-point link IFA_ADDRESS is the peer's and IFA_LOCAL our own (rtnetlink(7)).
            address = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
            by_index.setdefault(message["index"], []).append(ip_interface(f"{address}/{message['prefixlen']}"))
        found = [_interface(link, tuple(by_index.get(link["index"], ()))) for link in links]
        return sorted(found, key=lambda interface: interface.index)

    def default_interface(self, family: int) -> str | None:
        """Of the default routes in the main table, the one with the lowest metric."""
        with _netlink() as netlink:
            routes = [
                route
                for route in netlink.get_routes(family=_FAMILY[family], table=_MAIN_TABLE)
                if route["dst_len"] == 0 and _outgoing(route) is not None
            ]
            best = min(routes, key=lambda route: route.get_attr("RTA_PRIORITY") or 0, default=None)
            return None if best is None else _link_name(netlink, _outgoing(best))

    def interface_towards(self, address: Address) -> str | None:
        """By asking the kernel's routing (RTM_GETROUTE)."""
        with _netlink() as netlink:
            try:
                answer = netlink.route("get", dst=str(address))
            except NetlinkError:
                return None
            index = next((route.get_attr("RTA_OIF") for route in answer), None)
            return None if index is None else _link_name(netlink, index)

    def configure_device(self, name: str, addresses: Sequence[Address], mtu: int, superpacket_limit: int) -> None:
        """By one message per property."""
        with _netlink() as netlink:
            index = _link_index(netlink, name)
            ipv6 = any(address.version == 6 for address in addresses)
            hint = f" (is IPv6 switched off? see net.ipv6.conf.{name}.disable_ipv6)" if ipv6 else ""
            with _explained(f"cannot set up the device {name}{hint}"):
                netlink.link("set", index=index, mtu=mtu, txqlen=QUEUE_LENGTH, ifalias=ALIAS)
                with _ignored(errno.EOPNOTSUPP):  # a wish: longer superpackets cost a second system call, no more
                    netlink.link("set", index=index, gso_max_size=superpacket_limit)
                for address in addresses:
                    with _ignored(errno.EEXIST):
                        netlink.addr("add", index=index, address=str(address), prefixlen=address.max_prefixlen)
                netlink.link("set", index=index, state="up")
        _accept_own_source(name)

    def add_route(self, network: Network, device: str) -> None:
        """In the main table, link scope, marked by protocol number."""
        with _netlink() as netlink:
            index = _link_index(netlink, device)
            try:
                netlink.route("add", dst=str(network), oif=index, proto=ROUTE_PROTOCOL, scope=253, family=_family(network))
            except NetlinkError as error:
                if error.code != errno.EEXIST:
                    raise HostError(f"cannot add the route to {network} by {device}: {_strerror(error)}") from error
                self._require_ours(netlink, network, device)

    def _require_ours(self, netlink: Any, network: Network, device: str) -> None:
        if (network, device) not in _our_routes(netlink):
            raise HostError(
                f"a route to {network} exists that is not ours (see: ip route show {network}); remove it, or use another "
                "network"
            )

    def routes(self) -> list[tuple[Network, str]]:
        """Of the main table."""
        with _netlink() as netlink:
            return _our_routes(netlink)

    def remove_ours(self) -> list[str]:
        """Links go with their addresses and routes; routes of ours that are left go after them."""
        removed = []
        ours = [interface for interface in self.interfaces() if interface.alias == ALIAS and interface.kind == "tun"]
        busy = [interface.name for interface in ours if is_attached(interface.name)]
        if busy:
            raise HostError(
                f"a process is attached to {busy[0]}: a node is running, perhaps with another --run-dir; stop it first"
            )
        with _netlink() as netlink:
            for interface in ours:
                with _explained(f"cannot remove the device {interface.name}"), _ignored(errno.ENODEV):
                    netlink.link("del", index=interface.index)
                removed.append(f"device {interface.name}")
            for network, device in _our_routes(netlink):
                with _explained(f"cannot remove the route to {network}"), _ignored(errno.ESRCH):
                    netlink.route(
                        "del",
                        dst=str(network),
                        oif=_link_index(netlink, device),
                        proto=ROUTE_PROTOCOL,
                        family=_family(network),
                    )
                removed.append(f"route {network} dev {device}")
        return removed


def _interface(link: Any, addresses: tuple[IPv4Interface | IPv6Interface, ...]) -> Interface:
    info = link.get_attr("IFLA_LINKINFO")
    kind = (info.get_attr("IFLA_INFO_KIND") if info is not None else None) or ""
    port = None
    if kind == "vxlan" and (data := info.get_attr("IFLA_INFO_DATA")) is not None:
        port = data.get_attr("IFLA_VXLAN_PORT")
    return Interface(
        name=link.get_attr("IFLA_IFNAME"),
        index=link["index"],
        mtu=link.get_attr("IFLA_MTU"),
        addresses=addresses,
        is_up=bool(link["flags"] & _IFF_UP),
        kind=kind,
        alias=link.get_attr("IFLA_IFALIAS") or "",
        udp_port=port,
    )


def _outgoing(route: Any) -> Any:
    """The index of the interface that a route leaves by; of several next hops the first; None for a blackhole."""
    hops = route.get_attr("RTA_MULTIPATH") or []
    return route.get_attr("RTA_OIF") or (hops[0]["oif"] if hops else None)


def _family(network: Network) -> int:
    return _FAMILY[network.version]


def _link_index(netlink: Any, name: str) -> int:
    found = netlink.link_lookup(ifname=name)
    if not found:
        raise HostError(f"there is no device {name}")
    index: int = found[0]
    return index


def _link_name(netlink: Any, index: int) -> str:
    name: str = netlink.get_links(index)[0].get_attr("IFLA_IFNAME")
    return name


def _our_routes(netlink: Any) -> list[tuple[Network, str]]:
    found: list[tuple[Network, str]] = []
    for family in (AF_INET, AF_INET6):
        for route in netlink.get_routes(family=family, table=_MAIN_TABLE, proto=ROUTE_PROTOCOL):
            destination = route.get_attr("RTA_DST")
            if route["proto"] == ROUTE_PROTOCOL and destination is not None and route.get_attr("RTA_OIF") is not None:
                network = ip_network((ip_address(destination), route["dst_len"]))
                found.append((network, _link_name(netlink, route.get_attr("RTA_OIF"))))
    return found


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
        path.write_text("1", encoding="ascii")
    except OSError as error:
        log.warning("cannot set %s (%s): ICMP errors to this host's pods will not arrive", path, error.strerror)
