"""ICMP errors sent back to the inner source.

Theory of operation: `may_answer` decides whether a packet may be answered at all, by the rules of RFC 1122 3.2.2 and
RFC 4443 2.4(e); the builders then lay out a whole IP packet that quotes as much of the offender as the RFCs allow (576
bytes in all for IPv4, 1280 for IPv6). Rates are the caller's business. This is not a hot path: answers are rate-limited
to far fewer than Python can make.
"""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from encap.checksum import internet_checksum, pseudo_sum, write_ipv4_header_checksum
from encap.fields import (
    IPV4_DESTINATION,
    IPV4_DONT_FRAGMENT,
    IPV4_FRAGMENT,
    IPV4_FRAGMENT_OFFSET,
    IPV4_HEADER_LENGTH,
    IPV4_PROTOCOL,
    IPV4_SOURCE,
    IPV4_TOTAL_LENGTH,
    IPV6_DESTINATION,
    IPV6_HEADER_LENGTH,
    IPV6_NEXT_HEADER,
    IPV6_PAYLOAD_LENGTH,
    IPV6_SOURCE,
    PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
    Octets,
    load16,
    store16,
)

_QUOTE_LIMIT_IPV4 = 576 - IPV4_HEADER_LENGTH - 8
_QUOTE_LIMIT_IPV6 = 1280 - IPV6_HEADER_LENGTH - 8
_TTL = 64
_IPV4_ERROR_TYPES = frozenset({3, 4, 5, 11, 12})
_IPV6_FRAGMENT = 44
_ICMPV6_REDIRECT = 137
_IPV6_EXTENSIONS = frozenset({0, 43, 60})


@dataclass(frozen=True)
class ErrorKind:
    """An ICMP error in both families: (type, code) for IPv4 and for IPv6."""

    ipv4: tuple[int, int]
    ipv6: tuple[int, int]


NO_ROUTE = ErrorKind(ipv4=(3, 0), ipv6=(1, 0))
"""Network unreachable; no route to destination (RFC 792, RFC 4443 3.1)."""

TIME_EXCEEDED = ErrorKind(ipv4=(11, 0), ipv6=(3, 0))
"""Time to live or hop limit exceeded in transit."""

TOO_BIG = ErrorKind(ipv4=(3, 4), ipv6=(2, 0))
"""Fragmentation needed with next-hop MTU (RFC 1191 section 4); packet too big (RFC 4443 3.2)."""


def may_answer(packet: Octets) -> bool:
    """Whether an ICMP error about `packet` (a whole IP packet that passed `ip.check`) may be sent.

    Not about ICMP errors and redirects, fragments other than the first, packets to a multicast or broadcast address,
    or packets whose source is not one host. An echo request is no error and may be answered about.
    """
    return _may_answer_ipv4(packet) if packet[0] >> 4 == 4 else _may_answer_ipv6(packet)


def _may_answer_ipv4(packet: Octets) -> bool:
    destination = IPv4Address(bytes(packet[IPV4_DESTINATION : IPV4_DESTINATION + 4]))
    if destination.is_multicast or destination == IPv4Address("255.255.255.255"):
        return False
    if packet[IPV4_SOURCE] in {0, 127} or packet[IPV4_SOURCE] >= 224:
        return False  # net zero, loopback, multicast, class E and the limited broadcast: none is one host
    if load16(packet, IPV4_FRAGMENT) & IPV4_FRAGMENT_OFFSET:
        return False
    if packet[IPV4_PROTOCOL] != PROTOCOL_ICMP:
        return True
    type_at = (packet[0] & 0x0F) * 4
    return type_at < len(packet) and packet[type_at] not in _IPV4_ERROR_TYPES


def _may_answer_ipv6(packet: Octets) -> bool:
    source = IPv6Address(bytes(packet[IPV6_SOURCE : IPV6_SOURCE + 16]))
    destination = IPv6Address(bytes(packet[IPV6_DESTINATION : IPV6_DESTINATION + 16]))
    if destination.is_multicast or source.is_multicast or source.is_unspecified or source.is_loopback:
        return False
    protocol, at = packet[IPV6_NEXT_HEADER], IPV6_HEADER_LENGTH
    while at + 8 <= len(packet) and (protocol in _IPV6_EXTENSIONS or protocol == _IPV6_FRAGMENT):
        if protocol == _IPV6_FRAGMENT:
            if load16(packet, at + 2) & 0xFFF8:
                return False
            protocol, at = packet[at], at + 8
        else:
            protocol, at = packet[at], at + 8 + 8 * packet[at + 1]
    if protocol != PROTOCOL_ICMPV6:
        return True
    return at < len(packet) and packet[at] >= 128 and packet[at] != _ICMPV6_REDIRECT


def error(kind: ErrorKind, packet: Octets, source: IPv4Address | IPv6Address, mtu: int = 0) -> bytes:
    """An ICMP error of `kind` about `packet`, from `source` (of the packet's family) to the packet's source.

    `mtu` is the next-hop MTU in bytes for TOO_BIG. Returns a whole IP packet with all checksums in place.
    """
    if packet[0] >> 4 == 4:
        return _error_ipv4(kind.ipv4, packet, source, mtu)
    return _error_ipv6(kind.ipv6, packet, source, mtu)


def _error_ipv4(type_and_code: tuple[int, int], packet: Octets, source: IPv4Address | IPv6Address, mtu: int) -> bytes:
    quote = bytes(packet[:_QUOTE_LIMIT_IPV4])
    out = bytearray(IPV4_HEADER_LENGTH + 8) + quote
    out[0] = 0x45
    out[1] = 0xC0  # precedence internetwork control, as RFC 1812 4.3.2.5 asks of routers
    store16(out, IPV4_TOTAL_LENGTH, len(out))
    store16(out, IPV4_FRAGMENT, IPV4_DONT_FRAGMENT)  # atomic, so that the identification of 0 means nothing (RFC 6864)
    out[8] = _TTL
    out[IPV4_PROTOCOL] = PROTOCOL_ICMP
    out[IPV4_SOURCE : IPV4_SOURCE + 4] = source.packed
    out[IPV4_DESTINATION : IPV4_DESTINATION + 4] = packet[IPV4_SOURCE : IPV4_SOURCE + 4]
    write_ipv4_header_checksum(out, 0, IPV4_HEADER_LENGTH)
    icmp = IPV4_HEADER_LENGTH
    out[icmp], out[icmp + 1] = type_and_code
    store16(out, icmp + 6, mtu)
    store16(out, icmp + 2, internet_checksum(out, icmp, len(out) - icmp))
    return bytes(out)


def _error_ipv6(type_and_code: tuple[int, int], packet: Octets, source: IPv4Address | IPv6Address, mtu: int) -> bytes:
    quote = bytes(packet[:_QUOTE_LIMIT_IPV6])
    out = bytearray(IPV6_HEADER_LENGTH + 8) + quote
    out[0] = 0x60
    icmp = IPV6_HEADER_LENGTH
    store16(out, IPV6_PAYLOAD_LENGTH, len(out) - icmp)
    out[IPV6_NEXT_HEADER] = PROTOCOL_ICMPV6
    out[7] = _TTL
    out[IPV6_SOURCE : IPV6_SOURCE + 16] = source.packed
    out[IPV6_DESTINATION : IPV6_DESTINATION + 16] = packet[IPV6_SOURCE : IPV6_SOURCE + 16]
    out[icmp], out[icmp + 1] = type_and_code
    out[icmp + 4 : icmp + 8] = mtu.to_bytes(4, "big")
    pseudo = pseudo_sum(out, IPV6_SOURCE, 32, PROTOCOL_ICMPV6, len(out) - icmp)
    store16(out, icmp + 2, internet_checksum(out, icmp, len(out) - icmp, pseudo))
    return bytes(out)
