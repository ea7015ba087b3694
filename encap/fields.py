"""Header offsets, and loads and stores of big-endian fields.

Theory of operation: a header is a run of octets in a caller's buffer; its fields are named by their offset from the
start of the header. Loads and stores are bounds-checked (an access beyond the buffer raises IndexError, compiled or
not): the judging functions check lengths first, so an IndexError is a defect of ours and never a property of a packet.

Sources of the layouts: IPv4 RFC 791 3.1, IPv6 RFC 8200 3, UDP RFC 768, TCP RFC 9293 3.1, Ethernet IEEE 802.3.
"""

from typing import TypeAlias

Octets: TypeAlias = bytes | bytearray | memoryview
"""What the functions here read: any C-contiguous buffer of unsigned bytes."""

WritableOctets: TypeAlias = bytearray | memoryview
"""What the functions here write."""

ETHERNET_HEADER_LENGTH = 14
ETHERNET_DESTINATION = 0
ETHERNET_SOURCE = 6
ETHERNET_TYPE = 12
ETHERTYPE_IPV4 = 0x0800
ETHERTYPE_IPV6 = 0x86DD

IPV4_HEADER_LENGTH = 20
IPV4_TOTAL_LENGTH = 2
IPV4_FRAGMENT = 6
IPV4_TTL = 8
IPV4_PROTOCOL = 9
IPV4_CHECKSUM = 10
IPV4_SOURCE = 12
IPV4_DESTINATION = 16
IPV4_DONT_FRAGMENT = 0x4000
IPV4_MORE_FRAGMENTS = 0x2000
IPV4_FRAGMENT_OFFSET = 0x1FFF

IPV6_HEADER_LENGTH = 40
IPV6_PAYLOAD_LENGTH = 4
IPV6_NEXT_HEADER = 6
IPV6_HOP_LIMIT = 7
IPV6_SOURCE = 8
IPV6_DESTINATION = 24

UDP_HEADER_LENGTH = 8
UDP_CHECKSUM = 6
TCP_HEADER_LENGTH = 20
TCP_DATA_OFFSET = 12
TCP_CHECKSUM = 16

PROTOCOL_ICMP = 1
PROTOCOL_TCP = 6
PROTOCOL_UDP = 17
PROTOCOL_ICMPV6 = 58


def load16(buf: Octets, at: int) -> int:
    """The 16-bit big-endian field at `at`. Raises IndexError beyond the buffer."""
    return (buf[at] << 8) | buf[at + 1]


def load32(buf: Octets, at: int) -> int:
    """The 32-bit big-endian field at `at`. Raises IndexError beyond the buffer."""
    return (load16(buf, at) << 16) | load16(buf, at + 2)


def load64(buf: Octets, at: int) -> int:
    """The 64-bit big-endian field at `at`. Raises IndexError beyond the buffer."""
    return (load32(buf, at) << 32) | load32(buf, at + 4)


def store16(buf: WritableOctets, at: int, value: int) -> None:
    """Write the low 16 bits of `value`, big-endian, at `at`. Raises IndexError beyond the buffer."""
    buf[at] = (value >> 8) & 0xFF
    buf[at + 1] = value & 0xFF
