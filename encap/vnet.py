"""The virtio-net header that stands before a packet on a TUN opened with IFF_VNET_HDR.

Layout (include/uapi/linux/virtio_net.h, ``struct virtio_net_hdr``), 10 bytes, fields in the machine's byte order:

    0  u8   flags        1 = NEEDS_CSUM: the checksum at csum_start + csum_offset is partial
    1  u8   gso_type     0 = none, 1 = TCP over IPv4, 4 = TCP over IPv6, 5 = UDP (UDP_L4)
    2  u16  hdr_len      length of IP and transport header; on reads it is a hint not to be trusted
    4  u16  gso_size     payload bytes of one segment
    6  u16  csum_start   from the start of the packet
    8  u16  csum_offset  from csum_start

Until a TUN's offloads are switched on, reads carry ten zero bytes; writes may use the fields at any time.
"""

import struct
import sys
from typing import NamedTuple

from encap.fields import Octets, WritableOctets

VNET_LENGTH = 10
FLAG_NEEDS_CSUM = 1
GSO_NONE = 0
GSO_TCPV4 = 1
GSO_TCPV6 = 4
GSO_UDP_L4 = 5

_LITTLE_ENDIAN = 1 if sys.byteorder == "little" else 0
_FORMAT = struct.Struct("=BBHHHH")


class VnetHeader(NamedTuple):
    """The six fields, for tests and for devices that have no kernel behind them."""

    flags: int
    gso_type: int
    hdr_len: int
    gso_size: int
    csum_start: int
    csum_offset: int


def parse(buf: Octets, at: int) -> VnetHeader:
    """The header at `at`. Raises struct.error if fewer than 10 bytes are there."""
    return VnetHeader(*_FORMAT.unpack_from(buf, at))


def load_native16(buf: Octets, at: int) -> int:
    """The 16-bit field at `at` in the machine's byte order."""
    return (buf[at + 1] << 8) | buf[at] if _LITTLE_ENDIAN else (buf[at] << 8) | buf[at + 1]


def _store_native16(buf: WritableOctets, at: int, value: int) -> None:
    if _LITTLE_ENDIAN:
        buf[at] = value & 0xFF
        buf[at + 1] = (value >> 8) & 0xFF
    else:
        buf[at] = (value >> 8) & 0xFF
        buf[at + 1] = value & 0xFF


def store(
    buf: WritableOctets,
    at: int,
    flags: int,
    gso_type: int,
    hdr_len: int,
    gso_size: int,
    csum_start: int,
    csum_offset: int,
) -> None:
    """Write the header at `at`. Every field is written each time: a stale one would speak for another packet."""
    buf[at] = flags
    buf[at + 1] = gso_type
    _store_native16(buf, at + 2, hdr_len)
    _store_native16(buf, at + 4, gso_size)
    _store_native16(buf, at + 6, csum_start)
    _store_native16(buf, at + 8, csum_offset)
