"""Inner packets: those that a host in memory sends and understands. Whole IP packets, checksums included.

Only what a test needs to say "does this reach that": ICMP echo and UDP, IPv4 and IPv6, without options. Whoever needs more
builds it with scapy and sends the bytes.
"""

from dataclasses import dataclass
from ipaddress import ip_address

from encap.checksum import internet_checksum, pseudo_sum, write_ipv4_header_checksum
from encap.fields import (
    IPV4_HEADER_LENGTH,
    IPV6_HEADER_LENGTH,
    PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
    PROTOCOL_UDP,
    UDP_HEADER_LENGTH,
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


@dataclass(frozen=True)
class Parsed:
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


def parse(packet: bytes) -> Parsed | None:
    """The packet, or None if it is a fragment, has extension headers, or is broken: a simple host drops those."""
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= IPV4_HEADER_LENGTH:
        header_length = (packet[0] & 0x0F) * 4
        if load16(packet, 6) & 0x3FFF:  # more fragments, or an offset
            return None
        source, destination, protocol = packet[12:16], packet[16:20], packet[9]
    elif version == 6 and len(packet) >= IPV6_HEADER_LENGTH:
        header_length = IPV6_HEADER_LENGTH
        source, destination, protocol = packet[8:24], packet[24:40], packet[6]
    else:
        return None
    return Parsed(ip_address(source), ip_address(destination), protocol, packet[header_length:])


def echo(
    source: Address, destination: Address, identifier: int, sequence: int, payload: bytes, *, reply: bool = False
) -> bytes:
    """An ICMP echo request, or the reply to one."""
    kind = (ECHO_REPLY if reply else ECHO_REQUEST)[source.version]
    message = bytearray(bytes([kind, 0, 0, 0]) + identifier.to_bytes(2, "big") + sequence.to_bytes(2, "big") + payload)
    protocol = _PROTOCOL_OF_ICMP[source.version]
    pseudo = _pseudo_sum(source, destination, protocol, len(message)) if source.version == 6 else 0
    store16(message, 2, internet_checksum(message, 0, len(message), pseudo))
    return _ip_header(source, destination, protocol, len(message)) + bytes(message)


def udp(source: Address, source_port: int, destination: Address, port: int, payload: bytes) -> bytes:
    """A UDP datagram. Raises ValueError if it is too long for one."""
    length = UDP_HEADER_LENGTH + len(payload)
    if length + IPV4_HEADER_LENGTH > 65535:
        raise ValueError(f"{len(payload)} bytes do not fit into one UDP datagram")
    datagram = bytearray(
        source_port.to_bytes(2, "big") + port.to_bytes(2, "big") + length.to_bytes(2, "big") + b"\0\0" + payload
    )
    checksum = internet_checksum(datagram, 0, length, _pseudo_sum(source, destination, PROTOCOL_UDP, length))
    store16(datagram, 6, checksum or 0xFFFF)
    return _ip_header(source, destination, PROTOCOL_UDP, length) + bytes(datagram)


def _pseudo_sum(source: Address, destination: Address, protocol: int, length: int) -> int:
    addresses = source.packed + destination.packed
    return pseudo_sum(addresses, 0, len(addresses), protocol, length)


def _ip_header(source: Address, destination: Address, protocol: int, length: int) -> bytes:
    """Of a packet that may not be fragmented (IPv4: DF), as hosts send them."""
    if source.version == 4:
        header = bytearray(
            bytes([0x45, 0]) + (IPV4_HEADER_LENGTH + length).to_bytes(2, "big") + bytes([0, 0, 0x40, 0, TTL])
        )
        header += bytes([protocol, 0, 0]) + source.packed + destination.packed
        write_ipv4_header_checksum(header, 0, IPV4_HEADER_LENGTH)
        return bytes(header)
    return bytes([0x60, 0, 0, 0]) + length.to_bytes(2, "big") + bytes([protocol, TTL]) + source.packed + destination.packed
