"""The requests that change links, addresses and routes.

Each is acknowledged by the kernel, and may be made twice: the second time it says that there is such a thing already
(EEXIST), or no such thing any more (ENODEV, EADDRNOTAVAIL, ESRCH).
"""

import socket

from dataplane.host import ROUTE_PROTOCOL
from dataplane.host import rtnetlink as rt
from dataplane.host.reading import FAMILIES, OwnAddress
from dataplane.host.rtnetlink import Request, attribute
from routing.config import Address, Network

_ADD = rt.NLM_F_ACK | rt.NLM_F_CREATE | rt.NLM_F_EXCL


def properties(index: int, mtu: int, queue_length: int, alias: str) -> Request:
    """MTU in bytes, queue length in packets, and alias of a link."""
    return _link(
        index,
        attribute(rt.IFLA_MTU, mtu)
        + attribute(rt.IFLA_TXQLEN, queue_length)
        + attribute(rt.IFLA_IFALIAS, alias.encode() + b"\0"),
    )


def superpackets(index: int, limit: int) -> Request:
    """How long a superpacket the kernel may hand to a link, in bytes. A kernel that cannot: EOPNOTSUPP."""
    return _link(index, attribute(rt.IFLA_GSO_MAX_SIZE, limit))


def own_source(index: int) -> Request:
    """Let in IPv4 packets whose source is an address of the host itself (accept_local).

    As the sysctl, but where /proc/sys is read-only, too (net/ipv4/devinet.c, inet_set_link_af).
    """
    ipv4 = attribute(rt.IFLA_INET_CONF, attribute(rt.IPV4_DEVCONF_ACCEPT_LOCAL, 1))
    return _link(index, attribute(rt.IFLA_AF_SPEC, attribute(socket.AF_INET, ipv4)))


def switched_on(index: int) -> Request:
    """The link up."""
    return Request(rt.RTM_NEWLINK, rt.NLM_F_ACK, rt.LINK.pack(0, 0, index, rt.IFF_UP, rt.IFF_UP))


def no_link(index: int) -> Request:
    """The link removed, with all that is on it."""
    return Request(rt.RTM_DELLINK, rt.NLM_F_ACK, rt.LINK.pack(0, 0, index, 0, 0))


def address(index: int, own: Address) -> Request:
    """An address of a link, as /32 or /128."""
    both = attribute(rt.IFA_ADDRESS, own.packed)
    if own.version == 4:
        both += attribute(rt.IFA_LOCAL, own.packed)
    head = rt.ADDRESS.pack(FAMILIES[own.version], own.max_prefixlen, 0, 0, index)
    return Request(rt.RTM_NEWADDR, _ADD, head + both)


def no_address(own: OwnAddress) -> Request:
    """The address removed."""
    head = rt.ADDRESS.pack(FAMILIES[own.interface.version], own.interface.network.prefixlen, 0, 0, own.index)
    both = attribute(rt.IFA_ADDRESS, own.peer.packed) + attribute(rt.IFA_LOCAL, own.interface.ip.packed)
    return Request(rt.RTM_DELADDR, rt.NLM_F_ACK, head + both)


def route(network: Network, index: int) -> Request:
    """A route to `network` by a link, with our protocol number, in the main table."""
    return _route(rt.RTM_NEWROUTE, _ADD, network, index, rt.RT_SCOPE_LINK, rt.RTN_UNICAST)


def no_route(network: Network, index: int) -> Request:
    """That removed, whatever its scope and type."""
    return _route(rt.RTM_DELROUTE, rt.NLM_F_ACK, network, index, rt.RT_SCOPE_NOWHERE, rt.RTN_UNSPEC)


def _route(kind: int, flags: int, network: Network, index: int, scope: int, leads: int) -> Request:
    head = rt.ROUTE.pack(
        FAMILIES[network.version], network.prefixlen, 0, 0, rt.RT_TABLE_MAIN, ROUTE_PROTOCOL, scope, leads, 0
    )
    where = attribute(rt.RTA_DST, network.network_address.packed) + attribute(rt.RTA_OIF, index)
    return Request(kind, flags, head + where)


def _link(index: int, changes: bytes) -> Request:
    return Request(rt.RTM_NEWLINK, rt.NLM_F_ACK, rt.LINK.pack(0, 0, index, 0, 0) + changes)
