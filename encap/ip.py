"""An inner packet as the overlay sees it: is it IP, how long, which flow, whose checksum.

Theory of operation: `check` judges the fixed header and the lengths once; everything else here expects a packet that
passed it and therefore needs no checks of its own. Nothing looks further into a packet than it must: extension headers
are walked only to find a transport checksum, options are stepped over by the header length.

Sources: RFC 791, RFC 8200, RFC 1624 (TTL), RFC 6438 (flow identification for tunnels).
"""

from encap import checksum, fields
from encap.faults import Fault
from encap.fields import (
    IPV4_CHECKSUM,
    IPV4_DESTINATION,
    IPV4_FRAGMENT,
    IPV4_FRAGMENT_OFFSET,
    IPV4_HEADER_LENGTH,
    IPV4_MORE_FRAGMENTS,
    IPV4_PROTOCOL,
    IPV4_SOURCE,
    IPV4_TOTAL_LENGTH,
    IPV4_TTL,
    IPV6_DESTINATION,
    IPV6_HEADER_LENGTH,
    IPV6_HOP_LIMIT,
    IPV6_NEXT_HEADER,
    IPV6_PAYLOAD_LENGTH,
    IPV6_SOURCE,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    TCP_CHECKSUM,
    TCP_HEADER_LENGTH,
    UDP_CHECKSUM,
    UDP_HEADER_LENGTH,
    Octets,
    WritableOctets,
)

_NOT_IP = int(Fault.NOT_IP)
_TRUNCATED = int(Fault.TRUNCATED)
_BAD_LENGTH = int(Fault.BAD_LENGTH)

_HOP_BY_HOP = 0
_DESTINATION_OPTIONS = 60
_LOW_32_BITS = 0xFFFFFFFF
_MIX_1 = 0x85EBCA6B
_MIX_2 = 0xC2B2AE35


def check(buf: Octets, at: int, length: int) -> int:
    """Judge the IP header of the packet buf[at:at + length]: 0 if its lengths fit the buffer exactly, else a Fault.

    NOT_IP: the version is neither 4 nor 6. TRUNCATED: the packet says that it is longer than what is there.
    BAD_LENGTH: its lengths contradict each other, or bytes follow the packet.
    """
    if length < 1:
        return _TRUNCATED
    version = buf[at] >> 4
    if version == 4:
        if length < IPV4_HEADER_LENGTH:
            return _TRUNCATED
        header_length = (buf[at] & 0x0F) * 4
        total = fields.load16(buf, at + IPV4_TOTAL_LENGTH)
        if header_length < IPV4_HEADER_LENGTH or total < header_length:
            return _BAD_LENGTH
    elif version == 6:
        if length < IPV6_HEADER_LENGTH:
            return _TRUNCATED
        total = fields.load16(buf, at + IPV6_PAYLOAD_LENGTH) + IPV6_HEADER_LENGTH
    else:
        return _NOT_IP
    if total > length:
        return _TRUNCATED
    return _BAD_LENGTH if total < length else 0


def stated_length(buf: Octets, at: int, length: int) -> int:
    """How long the packet at `at` says it is, or `length` where too little is there to say; for trimming padding."""
    if length >= IPV4_HEADER_LENGTH and buf[at] >> 4 == 4:
        return fields.load16(buf, at + IPV4_TOTAL_LENGTH)
    if length >= IPV6_HEADER_LENGTH and buf[at] >> 4 == 6:
        return fields.load16(buf, at + IPV6_PAYLOAD_LENGTH) + IPV6_HEADER_LENGTH
    return length


def is_fragment(buf: Octets, at: int) -> bool:
    """Whether the IPv4 packet at `at` is one of several fragments, the first included."""
    return fields.load16(buf, at + IPV4_FRAGMENT) & (IPV4_MORE_FRAGMENTS | IPV4_FRAGMENT_OFFSET) != 0


def ttl(buf: Octets, at: int) -> int:
    """TTL or hop limit of the packet at `at`."""
    return buf[at + IPV4_TTL] if buf[at] >> 4 == 4 else buf[at + IPV6_HOP_LIMIT]


def decrement_ttl(buf: WritableOctets, at: int) -> None:
    """Take one from TTL or hop limit, which is at least 1, and update the IPv4 header checksum (RFC 1624).

    TTL and protocol share a 16-bit word, so the word under the checksum falls by 0x0100.
    """
    if buf[at] >> 4 == 6:
        buf[at + IPV6_HOP_LIMIT] -= 1
    else:
        old = fields.load16(buf, at + IPV4_TTL)
        fields.store16(buf, at + IPV4_TTL, old - 0x0100)
        fields.store16(
            buf, at + IPV4_CHECKSUM, checksum.replace_word(fields.load16(buf, at + IPV4_CHECKSUM), old, old - 0x0100)
        )


def _mix(value: int) -> int:
    """A 32-bit finalizer (the multiply-xorshift of MurmurHash3) so that every input bit reaches every output bit."""
    value &= _LOW_32_BITS
    value = ((value ^ (value >> 16)) * _MIX_1) & _LOW_32_BITS
    value = ((value ^ (value >> 13)) * _MIX_2) & _LOW_32_BITS
    return value ^ (value >> 16)


def flow_hash(buf: Octets, at: int, length: int) -> int:
    """A 32-bit hash of the inner flow, for the outer source port (RFC 7348 section 5, RFC 6438).

    Addresses, protocol and, for whole TCP and UDP packets, ports. Fragments hash without ports, the first one too, so
    that all parts of a datagram take one path and stay in order.
    """
    if buf[at] >> 4 == 4:
        protocol = buf[at + IPV4_PROTOCOL]
        addresses = _mix(fields.load32(buf, at + IPV4_SOURCE)) ^ (fields.load32(buf, at + IPV4_DESTINATION) * 3)
        transport = at + (buf[at] & 0x0F) * 4
        if is_fragment(buf, at):
            transport = at + length
    else:
        protocol = buf[at + IPV6_NEXT_HEADER]
        addresses = 0
        for word in range(4):
            source = fields.load32(buf, at + IPV6_SOURCE + 4 * word)
            destination = fields.load32(buf, at + IPV6_DESTINATION + 4 * word)
            addresses = _mix(addresses ^ source ^ (destination * 3))
        transport = at + IPV6_HEADER_LENGTH
    ports = 0
    if (protocol == PROTOCOL_TCP or protocol == PROTOCOL_UDP) and transport + 4 <= at + length:
        ports = fields.load32(buf, transport)
    return _mix(_mix(addresses) ^ ports ^ protocol)


def partial_checksum(buf: Octets, at: int, length: int) -> int:
    """Where the transport checksum of the packet is, if it is the pseudo-header sum alone; else 0.

    Returned as (transport header's distance from `at`) << 8 | (checksum field's distance from the transport header),
    which are csum_start and csum_offset of a virtio-net header; the second is 16 for TCP and 6 for UDP.

    Over veth the kernel hands inner TCP and UDP packets to a plain UDP socket with their checksums left for hardware
    that is not there (CHECKSUM_PARTIAL). A complete checksum equals the pseudo-header sum once in 65 536 packets;
    telling the kernel to finish that one yields the same value again, so the mistake is harmless.
    """
    if buf[at] >> 4 == 4:
        if is_fragment(buf, at):
            return 0
        protocol = buf[at + IPV4_PROTOCOL]
        start = (buf[at] & 0x0F) * 4
        addresses_at = at + IPV4_SOURCE
        addresses_length = 8
    else:
        protocol = buf[at + IPV6_NEXT_HEADER]
        start = IPV6_HEADER_LENGTH
        addresses_at = at + IPV6_SOURCE
        addresses_length = 32
        while (protocol == _HOP_BY_HOP or protocol == _DESTINATION_OPTIONS) and start + 8 <= length:
            protocol = buf[at + start]
            start += 8 + 8 * buf[at + start + 1]
    if protocol == PROTOCOL_TCP and start + TCP_HEADER_LENGTH <= length:
        field = TCP_CHECKSUM
    elif protocol == PROTOCOL_UDP and start + UDP_HEADER_LENGTH <= length:
        field = UDP_CHECKSUM
    else:
        return 0
    expected = checksum.pseudo_sum(buf, addresses_at, addresses_length, protocol, length - start)
    return (start << 8) | field if fields.load16(buf, at + start + field) == expected else 0
