"""Where the inner packet is: what a capture holds around an IP packet, and what an overlay's datagram holds.

Theory of operation: each link type has a function that finds the first byte behind its header and what should stand there.
From there the packet's own header says how long it is, so padding, a frame check sequence and whatever else follows are
left out. A header that is not all there shows as an IndexError, in one place; whether the capture's snap length or the
packet's sender is to blame follows from the length on the wire.

Link types and their headers: the registry of tcpdump.org (LINKTYPE_*). Nothing here copies or changes a packet.
"""

from collections.abc import Callable, Collection
from enum import IntEnum
from typing import NamedTuple

from bench.replay.capture import Record
from encap import ip, ipudp, vxlan
from encap.faults import Fault
from encap.fields import (
    ETHERNET_TYPE,
    ETHERTYPE_IPV4,
    ETHERTYPE_IPV6,
    IPV4_PROTOCOL,
    IPV6_HEADER_LENGTH,
    IPV6_NEXT_HEADER,
    PROTOCOL_UDP,
    UDP_HEADER_LENGTH,
    UDP_LENGTH,
    Octets,
    load16,
    load32,
)
from routing.route import FRAMING_IP, FRAMING_VXLAN

IANA_VXLAN_PORT = 4789
"""What RFC 7348 gave VXLAN; flannel keeps the port that Linux had before."""

VXLAN_PORTS = frozenset({vxlan.DEFAULT_PORT, IANA_VXLAN_PORT})
IP_PORTS = frozenset({ipudp.DEFAULT_PORT})


class Unusable(IntEnum):
    """Why a record holds no IP packet that can be replayed."""

    NOT_IP = 1
    CUT = 2
    UNKNOWN_LINK_TYPE = 3
    MALFORMED = 4


MEANING = {
    Unusable.NOT_IP: "not an IP packet",
    Unusable.CUT: "cut by the capture's snap length",
    Unusable.UNKNOWN_LINK_TYPE: "captured with a link type that is not known here",
    Unusable.MALFORMED: "an IP packet whose lengths contradict each other",
}
"""One phrase per reason, for people."""


class Datagram(NamedTuple):
    """The payload of a UDP datagram of an overlay: a VXLAN header and what follows, or the inner packet itself."""

    framing: str
    """`FRAMING_VXLAN` or `FRAMING_IP`."""
    offset: int
    length: int


_ANY, _NONE = 0, -1  # in place of a version: that which the packet states, and what is not IP
_VERSIONS = {ETHERTYPE_IPV4: 4, ETHERTYPE_IPV6: 6}
_VLAN_TAGS = frozenset({0x8100, 0x88A8, 0x9100})  # IEEE 802.1Q, 802.1ad, and what was in use for the latter before
_VLAN_TAG_LENGTH = 4

_NULL_HEADER_LENGTH = 4
_FAMILIES = {2: 4, 10: 6, 24: 6, 28: 6, 30: 6}
# AF_INET is 2 wherever there is one; AF_INET6 is 10 on Linux, 24 on NetBSD and OpenBSD, 28 on FreeBSD, 30 on macOS.

_SLL_PROTOCOL, _SLL_HEADER_LENGTH = 14, 16
_SLL2_PROTOCOL, _SLL2_HEADER_LENGTH = 0, 20


def inner_packet(record: Record) -> tuple[int, int] | Unusable:
    """Offset and length of the IP packet in the record's data, or why there is none."""
    find = _LINK_TYPES.get(record.link_type)
    if find is None:
        return Unusable.UNKNOWN_LINK_TYPE
    data = record.data
    try:
        at, version = find(data)
        if version == _NONE:
            return Unusable.NOT_IP
        stated = data[at] >> 4
    except IndexError:
        return _too_short(record, len(data) + 1)
    if stated != version != _ANY:
        return Unusable.MALFORMED
    length = ip.stated_length(data, at, len(data) - at)
    fault = ip.check(data, at, min(length, len(data) - at))
    if fault == Fault.NOT_IP:
        return Unusable.NOT_IP
    if fault == Fault.TRUNCATED:
        return _too_short(record, at + length)
    if fault or _is_jumbogram(data, at, length):
        return Unusable.MALFORMED
    return at, length


def encapsulated(
    data: Octets,
    offset: int,
    length: int,
    vxlan_ports: Collection[int] = VXLAN_PORTS,
    ip_ports: Collection[int] = IP_PORTS,
) -> Datagram | None:
    """The overlay's datagram in the IP packet data[offset:offset + length], told by its destination port; or None.

    The packet is one that `inner_packet` found. A fragment is none: only together do fragments hold a datagram. Extension
    headers are not looked behind, since no overlay sends any. Checksums are not verified.
    """
    if data[offset] >> 4 == 4:
        protocol, start = data[offset + IPV4_PROTOCOL], (data[offset] & 0x0F) * 4
        if ip.is_fragment(data, offset):
            return None
    else:
        protocol, start = data[offset + IPV6_NEXT_HEADER], IPV6_HEADER_LENGTH
    room = length - start
    if protocol != PROTOCOL_UDP or room < UDP_HEADER_LENGTH:
        return None
    port, size = load16(data, offset + start + 2), load16(data, offset + start + UDP_LENGTH)
    if not UDP_HEADER_LENGTH <= size <= room:
        return None
    if port in vxlan_ports:
        framing = FRAMING_VXLAN
    elif port in ip_ports:
        framing = FRAMING_IP
    else:
        return None
    return Datagram(framing, offset + start + UDP_HEADER_LENGTH, size - UDP_HEADER_LENGTH)


def _too_short(record: Record, needed: int) -> Unusable:
    """Why a record that should have `needed` bytes has less."""
    is_cut = len(record.data) < record.original_length and needed <= record.original_length
    return Unusable.CUT if is_cut else Unusable.MALFORMED


def _is_jumbogram(data: Octets, at: int, length: int) -> bool:
    """IPv6 with a payload length of 0 and a hop-by-hop header, where its true length stands (RFC 2675 section 2)."""
    return length == IPV6_HEADER_LENGTH and data[at] >> 4 == 6 and data[at + IPV6_NEXT_HEADER] == 0


# --- one function a link type: data → where the packet begins, and its version


def _ethertype(data: Octets, field: int, at: int) -> tuple[int, int]:
    """Behind an ethertype at `field`, and as many VLAN tags as there are from `at`. Lengths (802.3) are no ethertypes."""
    ethertype = load16(data, field)
    while ethertype in _VLAN_TAGS:
        ethertype = load16(data, at + 2)
        at += _VLAN_TAG_LENGTH
    return at, _VERSIONS.get(ethertype, _NONE)


def _ethernet(data: Octets) -> tuple[int, int]:
    return _ethertype(data, ETHERNET_TYPE, ETHERNET_TYPE + 2)


def _linux_cooked(data: Octets) -> tuple[int, int]:
    return _ethertype(data, _SLL_PROTOCOL, _SLL_HEADER_LENGTH)


def _linux_cooked_2(data: Octets) -> tuple[int, int]:
    return _ethertype(data, _SLL2_PROTOCOL, _SLL2_HEADER_LENGTH)


def _raw(_: Octets) -> tuple[int, int]:
    return 0, _ANY


def _ipv4(_: Octets) -> tuple[int, int]:
    return 0, 4


def _ipv6(_: Octets) -> tuple[int, int]:
    return 0, 6


def _loop(data: Octets) -> tuple[int, int]:
    """OpenBSD's loopback: an address family in network byte order."""
    return _NULL_HEADER_LENGTH, _FAMILIES.get(load32(data, 0), _NONE)


def _null(data: Octets) -> tuple[int, int]:
    """BSD's loopback: the same in the byte order of the machine that captured. No family needs more than two bytes."""
    family = load32(data, 0)
    if family >> 16:
        family = int.from_bytes(data[:_NULL_HEADER_LENGTH], "little")
    return _NULL_HEADER_LENGTH, _FAMILIES.get(family, _NONE)


_LINK_TYPES: dict[int, Callable[[Octets], tuple[int, int]]] = {
    0: _null,
    1: _ethernet,
    12: _raw,  # what DLT_RAW is on most systems; it should not be in a file, and is
    14: _raw,  # the same on OpenBSD
    101: _raw,
    108: _loop,
    113: _linux_cooked,
    228: _ipv4,
    229: _ipv6,
    276: _linux_cooked_2,
}
