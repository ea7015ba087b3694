"""Header offsets, and loads and stores of big-endian fields.

Theory of operation: a header is a run of octets in a caller's buffer; its fields are named by their offset from the
start of the header. Loads and stores are bounds-checked (an access beyond the buffer raises IndexError, compiled or
not): the judging functions check lengths first, so an IndexError is a defect of ours and never a property of a packet.

This file is what runs where nothing is compiled, and what Python code calls. The compiled modules take the same functions
from ``fields.pxd``, as inline C with one bounds check a call.

Sources of the layouts: IPv4 RFC 791 3.1, IPv6 RFC 8200 3, UDP RFC 768, TCP RFC 9293 3.1, Ethernet IEEE 802.3.
"""

import struct
from typing import TypeAlias

_UNSIGNED_32 = struct.Struct("!I")
_UNSIGNED_64 = struct.Struct("!Q")

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
IPV4_IDENTIFICATION = 4
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
UDP_LENGTH = 4
UDP_CHECKSUM = 6
TCP_HEADER_LENGTH = 20
TCP_SEQUENCE = 4
TCP_ACKNOWLEDGMENT = 8
TCP_DATA_OFFSET = 12
TCP_FLAGS = 13
TCP_WINDOW = 14
TCP_CHECKSUM = 16
TCP_URGENT_POINTER = 18

PROTOCOL_ICMP = 1
PROTOCOL_TCP = 6
PROTOCOL_UDP = 17
PROTOCOL_ICMPV6 = 58


def load16(buf: Octets, at: int) -> int:
    """The 16-bit big-endian field at `at`. Raises IndexError beyond the buffer."""
    return (buf[at] << 8) | buf[at + 1]


def load32(buf: Octets, at: int) -> int:
    """The 32-bit big-endian field at `at`. Raises IndexError beyond the buffer."""
    try:
        value: int = _UNSIGNED_32.unpack_from(buf, at)[0]
    except struct.error:
        raise IndexError("access beyond the buffer") from None
    return value


def load64(buf: Octets, at: int) -> int:
    """The 64-bit big-endian field at `at`. Raises IndexError beyond the buffer."""
    try:
        value: int = _UNSIGNED_64.unpack_from(buf, at)[0]
    except struct.error:
        raise IndexError("access beyond the buffer") from None
    return value


def store16(buf: WritableOctets, at: int, value: int) -> None:
    """Write the low 16 bits of `value`, big-endian, at `at`. Raises IndexError beyond the buffer."""
    buf[at] = (value >> 8) & 0xFF
    buf[at + 1] = value & 0xFF


def store32(buf: WritableOctets, at: int, value: int) -> None:
    """Write the low 32 bits of `value`, big-endian, at `at`. Raises IndexError beyond the buffer."""
    store16(buf, at, value >> 16)
    store16(buf, at + 2, value)


def move(target: WritableOctets, target_at: int, source: Octets, source_at: int, length: int) -> None:
    """Copy `length` bytes; the two places may overlap. Raises IndexError, with nothing copied, beyond either buffer."""
    if target_at < 0 or source_at < 0 or length < 0 or target_at + length > len(target) or source_at + length > len(source):
        raise IndexError("move beyond a buffer")
    target[target_at : target_at + length] = source[source_at : source_at + length]


def equal(a: Octets, a_at: int, b: Octets, b_at: int, length: int) -> bool:
    """Whether the `length` bytes at both places are the same. Raises IndexError beyond either buffer."""
    if a_at < 0 or b_at < 0 or length < 0 or a_at + length > len(a) or b_at + length > len(b):
        raise IndexError("comparison beyond a buffer")
    return a[a_at : a_at + length] == b[b_at : b_at + length]


def sum_words(buf: Octets, at: int, length: int) -> int:
    """The one's complement sum of the 16-bit big-endian words of buf[at:at + length], folded to 16 bits (RFC 1071).

    An odd last byte is the high half of a word. Raises IndexError beyond the buffer.

    A big integer modulo 65 535 is the sum of its 16-bit digits with end-around carry, and Python computes that in C; a
    sum that is not zero is 65 535 rather than 0, as the carry would have it.
    """
    if at < 0 or length < 0 or at + length > len(buf):
        raise IndexError("sum beyond the buffer")
    number = int.from_bytes(buf[at : at + length], "big") << (8 * (length & 1))
    return (number % 65535 or 65535) if number else 0
