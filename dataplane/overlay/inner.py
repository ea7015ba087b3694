"""Inner packets: those that a host in memory sends and understands. Whole IP packets, checksums included.

A checksum is right if the one's complement sum of all that it covers, itself included, is 0xFFFF (RFC 1071). A host checks
every packet that it gets, so what occurs most, plain UDP, is checked by the compiled functions that coalescing has for it,
and the rest as one big integer modulo 65 535, which is that sum.

Only what a test needs to say "does this reach that": ICMP echo and UDP, IPv4 and IPv6, without options. Whoever needs more
builds it with scapy and sends the bytes.
"""

from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from encap import coalesce, ip
from encap.checksum import internet_checksum
from encap.fields import (
    IPV4_CHECKSUM,
    IPV4_HEADER_LENGTH,
    IPV4_PROTOCOL,
    IPV4_SOURCE,
    IPV6_HEADER_LENGTH,
    IPV6_NEXT_HEADER,
    IPV6_SOURCE,
    PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
    PROTOCOL_UDP,
    UDP_CHECKSUM,
    UDP_HEADER_LENGTH,
    UDP_LENGTH,
    load16,
    store16,
)
from routing.config import Address

TTL = 64
ECHO_REQUEST = {4: 8, 6: 128}
"""ICMP type by IP version (RFC 792, RFC 4443 4.1)."""
ECHO_REPLY = {4: 0, 6: 129}
_ICMP_HEADER_LENGTH = 8
_PROTOCOL_OF_ICMP = {4: PROTOCOL_ICMP, 6: PROTOCOL_ICMPV6}


class Parsed(NamedTuple):
    """An inner packet, as far as it is understood: `body` is what stands behind the IP header."""

    source: Address
    destination: Address
    protocol: int
    body: bytes

    @property
    def is_icmp(self) -> bool:
        """Of the ICMP that belongs to its IP version."""
        return self.protocol == _PROTOCOL_OF_ICMP[self.source.version] and len(self.body) >= _ICMP_HEADER_LENGTH

    @property
    def is_udp(self) -> bool:
        """UDP with a whole header."""
        return self.protocol == PROTOCOL_UDP and len(self.body) >= UDP_HEADER_LENGTH


class BadChecksumError(ValueError):
    """A checksum is wrong, of the IPv4 header, of ICMP or of UDP."""


def parse(packet: bytes) -> Parsed | None:
    """The packet, or None if it is a fragment, has extension headers, or is broken: a simple host drops those.

    Raises BadChecksumError. What stands behind the length that UDP tells is left out, as in Linux (udp_rcv).
    """
    length = len(packet)
    if ip.check(packet, 0, length):
        return None
    source: Address
    destination: Address
    is_ipv4 = packet[0] >> 4 == 4
    if is_ipv4:
        header_length, protocol, addresses_at = (packet[0] & 0x0F) * 4, packet[IPV4_PROTOCOL], IPV4_SOURCE
        source, destination = IPv4Address(packet[12:16]), IPv4Address(packet[16:20])
    else:
        header_length, protocol, addresses_at = IPV6_HEADER_LENGTH, packet[IPV6_NEXT_HEADER], IPV6_SOURCE
        source, destination = IPv6Address(packet[8:24]), IPv6Address(packet[24:40])
    if (
        protocol == PROTOCOL_UDP
        and coalesce.candidate(packet, 0, length)
        and coalesce.has_good_checksum(packet, 0, length)
        and not ip.partial_checksum(packet, 0, length)  # which coalescing takes for right
    ):
        return Parsed(source, destination, protocol, packet[header_length:])
    if is_ipv4:
        if not _is_right(packet[:header_length]):
            raise BadChecksumError("of the IPv4 header")
        if ip.is_fragment(packet, 0):
            return None
    found = Parsed(source, destination, protocol, packet[header_length:])
    addresses = packet[addresses_at : addresses_at + (8 if is_ipv4 else 32)]
    if protocol == PROTOCOL_UDP and found.is_udp:
        return _udp_checked(found, addresses)
    if found.is_icmp:
        body = found.body
        if not (_is_right(body) if is_ipv4 else _is_right(addresses + body, protocol + len(body))):
            raise BadChecksumError("of ICMP")
    return found


def _udp_checked(packet: Parsed, addresses: bytes) -> Parsed | None:
    length = load16(packet.body, UDP_LENGTH)
    if not UDP_HEADER_LENGTH <= length <= len(packet.body):
        return None
    body = packet.body[:length]
    if not load16(body, UDP_CHECKSUM):
        if packet.source.version == 6:  # which must have one (RFC 8200 8.1); over IPv4 its sender wanted none (RFC 768)
            raise BadChecksumError("of UDP")
    elif not _is_right(addresses + body, packet.protocol + length):
        raise BadChecksumError("of UDP")
    return packet._replace(body=body)


def _is_right(covered: bytes, rest: int = 0) -> bool:
    """Whether the checksum in `covered` is right, with `rest` to be added."""
    return _checksum(covered, rest) == 0


def _checksum(covered: bytes | bytearray, rest: int = 0) -> int:
    """That over all of `covered`, with `rest` to be added."""
    return internet_checksum(covered, 0, len(covered), rest)


def echo(
    source: Address, destination: Address, identifier: int, sequence: int, payload: bytes, *, reply: bool = False
) -> bytes:
    """An ICMP echo request, or the reply to one."""
    kind = (ECHO_REPLY if reply else ECHO_REQUEST)[source.version]
    message = bytearray(bytes([kind, 0, 0, 0]) + identifier.to_bytes(2, "big") + sequence.to_bytes(2, "big") + payload)
    protocol = _PROTOCOL_OF_ICMP[source.version]
    is_ipv4 = source.version == 4
    store16(message, 2, _checksum(message) if is_ipv4 else _transport_checksum(source, destination, protocol, message))
    return _ip_header(source, destination, protocol, len(message)) + bytes(message)


def udp(source: Address, source_port: int, destination: Address, port: int, payload: bytes) -> bytes:
    """A UDP datagram. Raises ValueError if it is too long for one."""
    length = UDP_HEADER_LENGTH + len(payload)
    if length + IPV4_HEADER_LENGTH > 65535:
        raise ValueError(f"{len(payload)} bytes do not fit into one UDP datagram")
    datagram = bytearray(
        source_port.to_bytes(2, "big") + port.to_bytes(2, "big") + length.to_bytes(2, "big") + b"\0\0" + payload
    )
    store16(datagram, 6, _transport_checksum(source, destination, PROTOCOL_UDP, datagram) or 0xFFFF)
    return _ip_header(source, destination, PROTOCOL_UDP, length) + bytes(datagram)


def _transport_checksum(source: Address, destination: Address, protocol: int, message: bytearray) -> int:
    """With the pseudo-header (RFC 768, RFC 8200 8.1)."""
    return _checksum(source.packed + destination.packed + message, protocol + len(message))


def _ip_header(source: Address, destination: Address, protocol: int, length: int) -> bytes:
    """Of a packet that may not be fragmented (IPv4: DF), as hosts send them."""
    if source.version == 4:
        header = bytearray(
            bytes([0x45, 0]) + (IPV4_HEADER_LENGTH + length).to_bytes(2, "big") + bytes([0, 0, 0x40, 0, TTL])
        )
        header += bytes([protocol, 0, 0]) + source.packed + destination.packed
        store16(header, IPV4_CHECKSUM, _checksum(header))
        return bytes(header)
    return bytes([0x60, 0, 0, 0]) + length.to_bytes(2, "big") + bytes([protocol, TTL]) + source.packed + destination.packed
