"""The system calls that carry packets.

Theory of operation: uncompiled these functions go through ``os`` and ``socket``. The compiled loops of
``dataplane.kernel`` take the functions of the same names from ``syscalls.pxd``, which are inline C: no argument is boxed,
no address is turned into text and back, and a call that finds nothing raises nothing. Idle round trips are where that
counts: what is touched once in 5 ms is in no cache (docs/performance.md).

All of them return the number of bytes moved, or minus an errno, and raise IndexError where an access would lie beyond
a buffer. Descriptors and sockets are in non-blocking mode.
"""

import errno
import functools
import os
import socket
import struct
import sys
from typing import TypeAlias

from encap.fields import Octets, WritableOctets
from encap.vnet import VNET_LENGTH
from routing.table import Endpoint

TOLD_LENGTH = 24
"""What `receive` tells of a datagram: 0 the segment size of a run (UDP_GRO) in the machine's byte order, 2 bytes, or 0;
8 the source address, 4 or 16 bytes."""

MAX_STRIDE = 65535
MAX_MESSAGES = 32
"""Received in one call."""

MAX_GROUP = 64
"""Trains in one call, as many as UDP_SEGMENT takes datagrams."""

Integers: TypeAlias = "memoryview[int]"
"""32-bit integers, as the columns of a batch are."""

_UDP_SEGMENT = 103
_ANCILLARY_BYTES = socket.CMSG_SPACE(4)
_IPV4 = struct.Struct("=H2s4s8x")
_IPV6 = struct.Struct("=H2s4s16sI")


def _require(at: int, length: int, size: int) -> None:
    if at < 0 or length < 0 or at + length > size:
        raise IndexError("access beyond the buffer")


def read_packet(fd: int, vnet: WritableOctets, vnet_at: int, data: WritableOctets, at: int, room: int) -> int:
    """Readv a packet of a TUN: its virtio-net header to `vnet_at` in `vnet`, at most `room` bytes to `at` in `data`."""
    _require(vnet_at, VNET_LENGTH, len(vnet))
    _require(at, room, len(data))
    try:
        return os.readv(fd, (vnet[vnet_at : vnet_at + VNET_LENGTH], data[at : at + room]))
    except OSError as error:
        return -(error.errno or errno.EIO)


def write_packet(fd: int, vnet: Octets, vnet_at: int, data: Octets, at: int, length: int) -> int:
    """Writev one packet to a TUN, behind its virtio-net header."""
    _require(vnet_at, VNET_LENGTH, len(vnet))
    _require(at, length, len(data))
    try:
        return os.writev(fd, (vnet[vnet_at : vnet_at + VNET_LENGTH], data[at : at + length]))
    except OSError as error:
        return -(error.errno or errno.EIO)


def receive(receiver: socket.socket, data: WritableOctets, at: int, room: int, told: WritableOctets) -> int:
    """Recvmsg a datagram, or a run of them, to `at` in `data`; `told` gets TOLD_LENGTH bytes about it."""
    _require(at, room, len(data))
    _require(0, TOLD_LENGTH, len(told))
    try:
        length, ancillary, _, source = receiver.recvmsg_into((data[at : at + room],), _ANCILLARY_BYTES)
    except OSError as error:
        return -(error.errno or errno.EIO)
    stride = int.from_bytes(ancillary[0][2], sys.byteorder) if ancillary else 0
    told[:2] = stride.to_bytes(2, sys.byteorder)
    address = socket.inet_pton(receiver.family, source[0].partition("%")[0])
    told[8 : 8 + len(address)] = address
    return length


def receive_many(
    receiver: socket.socket, data: WritableOctets, at: int, apart: int, room: int, count: int, told: WritableOctets
) -> int:
    """Recvmmsg up to `count` times what `receive` does once, to places `apart` bytes from each other.

    `told` gets TOLD_LENGTH bytes for each, whose bytes 4 to 8 are its length in the machine's byte order. Returns how many
    there were, or minus an errno if there was none. At most MAX_MESSAGES.
    """
    if not 0 < count <= MAX_MESSAGES:
        raise IndexError("no such number of messages")
    _require(at, room, len(data))
    _require(at + (count - 1) * apart, room, len(data))
    _require(0, TOLD_LENGTH * count, len(told))
    for k in range(count):
        one = told[k * TOLD_LENGTH : (k + 1) * TOLD_LENGTH]
        length = receive(receiver, data, at + k * apart, room, one)
        if length < 0:
            return k or length
        one[4:8] = length.to_bytes(4, sys.byteorder)
    return count


def send(sender: socket.socket, data: Octets, at: int, length: int, stride: int, to: bytes) -> int:
    """Send data[at:at + length] as datagrams of `stride` bytes, the last maybe shorter, to the struct sockaddr `to`.

    No datagram has more than 65 535 bytes, so what is longer is too long for any path: EMSGSIZE.
    """
    _require(at, length, len(data))
    if stride != length and not 0 < stride <= MAX_STRIDE:
        return -errno.EMSGSIZE
    try:
        if stride == length:
            return sender.sendto(data[at : at + length], _endpoint(to))
        segments = ((socket.IPPROTO_UDP, _UDP_SEGMENT, stride.to_bytes(2, sys.byteorder)),)
        return sender.sendmsg((data[at : at + length],), segments, 0, _endpoint(to))
    except OSError as error:
        return -(error.errno or errno.EIO)


def send_group(
    sender: socket.socket, data: Octets, offsets: Integers, lengths: Integers, order: Integers, count: int, stride: int,
    to: bytes,
) -> int:  # fmt: skip
    """Send the trains order[0] to order[count - 1], at those offsets and of those lengths in `data`, as one.

    Datagrams have `stride` bytes, of which only the last may have fewer. At most MAX_GROUP trains.
    """
    if not 0 < count <= MAX_GROUP:
        raise IndexError("no group of that size")
    parts = []
    for k in range(count):
        at, length = offsets[order[k]], lengths[order[k]]
        _require(at, length, len(data))
        parts.append(data[at : at + length])
    if not 0 < stride <= MAX_STRIDE:
        return -errno.EMSGSIZE
    try:
        segments = ((socket.IPPROTO_UDP, _UDP_SEGMENT, stride.to_bytes(2, sys.byteorder)),)
        return sender.sendmsg(parts, segments, 0, _endpoint(to))
    except OSError as error:
        return -(error.errno or errno.EIO)


def sockaddr(endpoint: Endpoint) -> bytes:
    """`endpoint` as the kernel takes it: struct sockaddr_in or sockaddr_in6 (ip(7), ipv6(7))."""
    if len(endpoint) == 2:
        return _IPV4.pack(socket.AF_INET, endpoint[1].to_bytes(2, "big"), socket.inet_pton(socket.AF_INET, endpoint[0]))
    host, port, flow, scope = endpoint
    address = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return _IPV6.pack(socket.AF_INET6, port.to_bytes(2, "big"), flow.to_bytes(4, "big"), address, scope)


@functools.lru_cache(4096)
def _endpoint(to: bytes) -> Endpoint:
    """What `sockaddr` was made of."""
    if len(to) == _IPV4.size:
        _, port, address = _IPV4.unpack(to)
        return socket.inet_ntop(socket.AF_INET, address), int.from_bytes(port, "big")
    _, port, flow, address, scope = _IPV6.unpack(to)
    return socket.inet_ntop(socket.AF_INET6, address), int.from_bytes(port, "big"), int.from_bytes(flow, "big"), scope
