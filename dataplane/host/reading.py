"""Links, addresses and routes as the kernel tells them (rtnetlink(7)), read fast.

Theory of operation: a request, and a walk over the answer that looks at what is wanted and at nothing else. The kernel is
asked to leave out what it can. On a host with 220 links and 2000 routes of others a look takes 15 ms; with a library that
makes an object of each attribute it was 220, with the interpreter lock held, for which the engine's packets wait. And the
machine is looked at whenever a pod comes or goes.
"""

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_interface, ip_network

from dataplane.host import HostError, Interface
from dataplane.host import rtnetlink as rt
from dataplane.host.rtnetlink import Channel, RefusedError, Request, attribute, attributes
from routing.config import Address, Network

FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_VERSIONS = {family: version for version, family in FAMILIES.items()}

_Message = tuple[tuple[int, ...], memoryview]
"""The fields of its head, and its attributes."""


@dataclass(frozen=True)
class OwnAddress:
    """An address of the link `index`; `peer` is the other end's on a point-to-point link, else the same."""

    index: int
    interface: IPv4Interface | IPv6Interface
    peer: Address


@dataclass(frozen=True)
class UnicastRoute:
    """A route of the main table that leads to the link `index`, of several next hops to the first."""

    network: Network
    index: int
    metric: int
    is_multipath: bool


def interfaces(names: Collection[str] | None = None) -> list[Interface]:
    """All, or those of `names` that there are, by index. Raises HostError."""
    with _kernel() as kernel:
        if names is None:
            body = rt.LINK.pack(*[0] * 5) + attribute(rt.IFLA_EXT_MASK, rt.RTEXT_FILTER_SKIP_STATS)
            links = _ask(kernel, Request(rt.RTM_GETLINK, rt.NLM_F_DUMP, body), rt.LINK)
            owned = _addresses(kernel, 0)
        else:
            named = [attribute(rt.IFLA_IFNAME, os.fsencode(name) + b"\0") for name in names]
            links = [link for name in named for link in _one_link(kernel, 0, name)]
            owned = [address for head, _ in links for address in _addresses(kernel, head[2])]
    by_index: dict[int, list[IPv4Interface | IPv6Interface]] = {}
    for one in owned:
        by_index.setdefault(one.index, []).append(one.interface)
    found = [_interface(head, data, tuple(by_index.get(head[2], ()))) for head, data in links]
    return sorted(found, key=lambda interface: interface.index)


def interface_by_index(index: int) -> Interface | None:
    """Without its addresses. Raises HostError."""
    with _kernel() as kernel:
        return next((_interface(head, data, ()) for head, data in _one_link(kernel, index, b"")), None)


def addresses(index: int) -> list[OwnAddress]:
    """Those of the link `index`. Raises HostError."""
    with _kernel() as kernel:
        return _addresses(kernel, index)


def routes(version: int, protocol: int = 0, *, prefix_length: int | None = None) -> list[UnicastRoute]:
    """Those of the main table, of IPv4 or IPv6 (`version`): with `protocol`, and to networks of `prefix_length`, if given.

    Raises HostError.
    """
    family = FAMILIES[version]
    request = Request(rt.RTM_GETROUTE, rt.NLM_F_DUMP, rt.ROUTE.pack(family, 0, 0, 0, rt.RT_TABLE_MAIN, protocol, 0, 0, 0))
    with _kernel() as kernel:
        messages = _ask(kernel, request, rt.ROUTE, missing=errno.ENOENT)
    found = (
        _route(version, head[1], attributes(data))
        for head, data in messages
        # A kernel without the family answers with all that it has.
        if head[0] == family and head[7] == rt.RTN_UNICAST and prefix_length in {None, head[1]}
    )
    return [route for route in found if route is not None]


def link_towards(address: Address) -> int | None:
    """The index of the link that packets to `address` leave by; None if there is no route. Raises HostError."""
    head = rt.ROUTE.pack(FAMILIES[address.version], address.max_prefixlen, *[0] * 7)
    request = Request(rt.RTM_GETROUTE, 0, head + attribute(rt.RTA_DST, address.packed))
    with _kernel() as kernel:
        try:
            ((_, data),) = _ask(kernel, request, rt.ROUTE)
        except RefusedError:  # which code depends on what kind of route forbids it
            return None
    index = attributes(data).get(rt.RTA_OIF)
    return None if index is None else _number(index)


def _one_link(kernel: Channel, index: int, name: bytes) -> list[_Message]:
    """Of this index, or of the name, which is an attribute; empty if there is none."""
    return _ask(kernel, Request(rt.RTM_GETLINK, 0, rt.LINK.pack(0, 0, index, 0, 0) + name), rt.LINK, missing=errno.ENODEV)


def _interface(head: tuple[int, ...], data: memoryview, own: tuple[IPv4Interface | IPv6Interface, ...]) -> Interface:
    _, _, index, flags, _ = head
    found = attributes(data)
    info = _nested(found, rt.IFLA_LINKINFO)
    kind = _text(info.get(rt.IFLA_INFO_KIND))
    port = _nested(info, rt.IFLA_INFO_DATA).get(rt.IFLA_VXLAN_PORT) if kind == "vxlan" else None
    return Interface(
        name=_text(found[rt.IFLA_IFNAME]),
        index=index,
        mtu=_number(found[rt.IFLA_MTU]),
        addresses=own,
        is_up=bool(flags & rt.IFF_UP),
        kind=kind,
        alias=_text(found.get(rt.IFLA_IFALIAS)),
        udp_port=int.from_bytes(port, "big") if port is not None else None,
        has_carrier=bool(flags & rt.IFF_LOWER_UP),
        queue_length=_number(found.get(rt.IFLA_TXQLEN)),
        superpacket_limit=_number(found.get(rt.IFLA_GSO_MAX_SIZE)),
        accepts_own_source=_accepts_own_source(found),
    )


def _accepts_own_source(link: dict[int, memoryview]) -> bool:
    """The sysctl accept_local, from the array of them all that the kernel shows with a link that has IPv4."""
    sysctls = _nested(_nested(link, rt.IFLA_AF_SPEC), socket.AF_INET).get(rt.IFLA_INET_CONF, memoryview(b""))
    at = 4 * (rt.IPV4_DEVCONF_ACCEPT_LOCAL - 1)
    return bool(_number(sysctls[at : at + 4]))


def _addresses(kernel: Channel, index: int) -> list[OwnAddress]:
    """Of one link, with 0 of all."""
    request = Request(rt.RTM_GETADDR, rt.NLM_F_DUMP, rt.ADDRESS.pack(0, 0, 0, 0, index))
    listed = []
    for head, data in _ask(kernel, request, rt.ADDRESS, missing=errno.ENODEV):
        family, length, _, _, holder = head
        if family in _VERSIONS and index in {0, holder}:
            found = attributes(data)
            peer = found[rt.IFA_ADDRESS]
            own = ip_address(bytes(found.get(rt.IFA_LOCAL, peer)))
            listed.append(OwnAddress(holder, ip_interface((own, length)), ip_address(bytes(peer))))
    return listed


def _route(version: int, length: int, found: dict[int, memoryview]) -> UnicastRoute | None:
    """To a network of this prefix length; None if it leads nowhere."""
    destination = found.get(rt.RTA_DST)
    address = bytes(destination) if destination is not None else bytes(4 if version == 4 else 16)
    hops, index = found.get(rt.RTA_MULTIPATH), found.get(rt.RTA_OIF)
    if index is None and hops is None:
        return None
    return UnicastRoute(
        ip_network((address, length)),
        _number(index) if index is not None else rt.NEXT_HOP.unpack_from(hops or b"")[0],
        _number(found.get(rt.RTA_PRIORITY)),
        hops is not None,
    )


def _ask(kernel: Channel, request: Request, head: struct.Struct, *, missing: int = 0) -> list[_Message]:
    """The answer to a request; empty if the kernel says `missing`. Raises OSError."""
    try:
        return [(head.unpack_from(payload), payload[head.size :]) for payload in kernel.ask(request)]
    except RefusedError as error:
        if error.errno != missing:
            raise
        return []


def _nested(found: dict[int, memoryview], kind: int) -> dict[int, memoryview]:
    return attributes(found.get(kind, memoryview(b"")))


def _number(value: memoryview | None) -> int:
    """0 if there is none."""
    number: int = struct.unpack("=I", value)[0] if value else 0
    return number


def _text(value: memoryview | None) -> str:
    """Up to the final zero; an alias need not be text."""
    return "" if value is None else bytes(value).rstrip(b"\0").decode(errors="surrogateescape")


@contextlib.contextmanager
def _kernel() -> Iterator[Channel]:
    """To ask the kernel, of the network namespace of this thread. Its refusals become a HostError."""
    try:
        with Channel() as channel:
            yield channel
    except OSError as error:
        raise HostError(f"cannot read the interfaces and routes: {error.strerror or error}") from error
