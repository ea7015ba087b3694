"""The kernel's side of a batch: the loops around the system calls that carry packets.

Theory of operation: a loop goes on until it is done or until one call is refused, and then tells where it stopped and why
(`error`); what a refusal means is for the device or the underlay to say. So the loops, which run for every packet, are
compiled, and hold no policy.

The calls are methods of `Kernel` of their own, so that a test can put a kernel in their place that refuses.
"""

import errno
import socket
import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias

from dataplane import syscalls
from dataplane.batch import MAX_PACKET_LENGTH, SLOT_SIZE, Batch
from dataplane.syscalls import MAX_GROUP, MAX_MESSAGES, Integers
from dataplane.verdict import Verdict
from encap import fields
from encap.fields import Octets, WritableOctets
from encap.vnet import VNET_LENGTH, load_native16

IN_RUN = 4096
"""More than any errno (include/linux/err.h, MAX_ERRNO)."""

_FORWARDED = int(Verdict.FORWARDED)
_IN_RUN = IN_RUN
_MAX_LENGTH = MAX_PACKET_LENGTH
_VNET = VNET_LENGTH
_MAX_GROUP = MAX_GROUP
_MAX_MESSAGES = MAX_MESSAGES
_TOLD = syscalls.TOLD_LENGTH
_SLOT_SIZE = SLOT_SIZE
_EAGAIN = errno.EAGAIN
_LITTLE_ENDIAN = sys.byteorder == "little"
_MAX_GROUP_LENGTH = 65507
_ADDRESS = 8  # in what `receive` tells

Road: TypeAlias = tuple[Sequence[socket.socket], bytes]
"""The sockets of a family, and a struct sockaddr."""


class Kernel:
    """The system calls, and the loops around them. `error` is the errno that the last loop stopped with, or 0."""

    def __init__(self) -> None:
        self.error = 0
        self.told = memoryview(bytearray(syscalls.TOLD_LENGTH * MAX_MESSAGES))
        self.told_c = self.told
        self._order = memoryview(array("i", bytes(4 * _MAX_GROUP)))
        self._order_c = self._order
        self._count = self._segments = self._length = self._peer = self._stride = 0
        self._is_open = False

    def read_packets(self, fd: int, batch: Batch) -> int:
        """Fill the free slots of `batch` from the TUN `fd`; returns `error`, EAGAIN if nothing more was there."""
        self.error = 0
        while batch.count < batch.limit:
            length = self.read_packet(fd, batch.vnet_c, batch.count * _VNET, batch.data_c, batch.free_slot(), _MAX_LENGTH)
            if length < 0:
                self.error = -length
                break
            batch.add(length - _VNET)
        return self.error

    def write_packets(self, fd: int, batch: Batch, first: int, superpackets: bool) -> int:
        """Write the FORWARDED packets of `batch` from number `first` on to the TUN `fd`; returns which one was refused.

        Without `superpackets` it stops, with an `error` of 0, at one. Returns the batch's count when all are written.
        """
        self.error = 0
        for i in range(first, batch.count):
            if batch.verdict_c[i] != _FORWARDED or batch.head_c[i] != i:
                continue
            if batch.vnet_c[i * _VNET + 1] and not superpackets:
                return i
            written = self.write_packet(fd, batch.vnet_c, i * _VNET, batch.data_c, batch.offset_c[i], batch.length_c[i])
            if written < 0:
                self.error = -written
                return i
        return batch.count

    def receive_datagrams(self, receiver: socket.socket, batch: Batch, origins: dict[int, int], is_ipv4: bool) -> int:
        """Fill the free slots of `batch` from `receiver`; returns `error`.

        `origins` has the VTEP number of a source address, which is given as a number, and knows an answer to any.
        """
        self.error = 0
        while batch.count < batch.limit:
            asked = min(batch.limit - batch.count, _MAX_MESSAGES)
            found = self.receive_many(
                receiver, batch.data_c, batch.free_slot(), _SLOT_SIZE, _MAX_LENGTH, asked, self.told_c
            )
            if found < 0:
                self.error = -found
                break
            for k in range(found):
                self._take(batch, k * _TOLD, origins, is_ipv4)
            if found < asked:
                self.error = _EAGAIN
                break
        return self.error

    def _take(self, batch: Batch, at: int, origins: dict[int, int], is_ipv4: bool) -> None:
        """Enter what was received in the next free slot, of which `told` tells at `at`."""
        if is_ipv4:
            source = fields.load32(self.told_c, at + _ADDRESS)
        else:
            high = fields.load64(self.told_c, at + _ADDRESS)
            source = high << 64 | fields.load64(self.told_c, at + _ADDRESS + 8)
        low, upper = load_native16(self.told_c, at + 4), load_native16(self.told_c, at + 6)
        length = low | upper << 16 if _LITTLE_ENDIAN else upper | low << 16
        batch.add(length, origins[source], load_native16(self.told_c, at))

    def send_trains(self, batch: Batch, roads: dict[int, Road], lanes: int, max_segments: int) -> int:
        """Send the FORWARDED trains of `batch`; returns how many were refused, whose verdict is then minus the errno,
        and less by IN_RUN if the call was about more than one datagram.

        `roads` has for each row the sockets that it may leave by, of which the train's lane takes one, and the struct
        sockaddr that it goes to. Lane by lane, trains that follow each other there, for one row and of one stride, go in
        one call, wherever they lie: that is what becomes of many flows of small packets, which are spread over the lanes
        in turn. Only the last datagram of a call may be shorter (UDP_SEGMENT), so a train that joins has the same stride,
        or is a single datagram no longer than it.
        """
        refused = 0
        for lane in range(lanes):
            self._begin()
            for i in range(batch.count):
                if batch.verdict_c[i] != _FORWARDED or batch.flow_c[i] % lanes != lane:
                    continue
                if not self._joins(batch, i, max_segments):
                    refused += self._flush(batch, roads, lane)
                    self._begin()
                self._join(batch, i)
            refused += self._flush(batch, roads, lane)
        return refused

    def _begin(self) -> None:
        self._count = 0
        self._segments = 0
        self._length = 0
        self._is_open = True

    def _joins(self, batch: Batch, i: int, max_segments: int) -> bool:
        """Whether train `i` may go in one call with those before it."""
        if not self._count:
            return True
        stride = batch.stride_c[i]
        return (
            self._is_open
            and batch.peer_c[i] == self._peer
            and (stride == self._stride or batch.length_c[i] <= min(self._stride, stride))
            and self._segments + _segments(batch.length_c[i], stride) <= max_segments
            and self._length + batch.length_c[i] <= _MAX_GROUP_LENGTH
            and self._count < _MAX_GROUP
            and batch.length_c[i] > 0
        )

    def _join(self, batch: Batch, i: int) -> None:
        if not self._count:
            self._peer = batch.peer_c[i]
            self._stride = batch.stride_c[i]
        self._order_c[self._count] = i
        self._count += 1
        self._segments += _segments(batch.length_c[i], batch.stride_c[i])
        self._length += batch.length_c[i]
        self._is_open = self._stride > 0 and self._length % self._stride == 0

    def _flush(self, batch: Batch, roads: dict[int, Road], lane: int) -> int:
        """Send the trains that were joined; returns how many were refused."""
        if not self._count:
            return 0
        senders, to = roads[self._peer]
        sender = senders[lane % len(senders)]
        if self._count == 1:
            i = self._order_c[0]
            sent = self.send(sender, batch.data_c, batch.offset_c[i], batch.length_c[i], batch.stride_c[i], to)
        else:
            sent = self.send_group(
                sender, batch.data_c, batch.offset_c, batch.length_c, self._order_c, self._count, self._stride, to
            )
        if sent >= 0:
            return 0
        if self._segments > 1:
            sent -= _IN_RUN
        for k in range(self._count):
            batch.verdict_c[self._order_c[k]] = sent
        return int(self._count)

    def read_packet(self, fd: int, vnet: WritableOctets, vnet_at: int, data: WritableOctets, at: int, room: int) -> int:
        """See ``dataplane.syscalls``, as with the following."""
        return syscalls.read_packet(fd, vnet, vnet_at, data, at, room)

    def write_packet(self, fd: int, vnet: Octets, vnet_at: int, data: Octets, at: int, length: int) -> int:
        """One writev."""
        return syscalls.write_packet(fd, vnet, vnet_at, data, at, length)

    def receive_many(
        self,
        receiver: socket.socket,
        data: WritableOctets,
        at: int,
        apart: int,
        room: int,
        count: int,
        told: WritableOctets,
    ) -> int:
        """One recvmmsg."""
        return syscalls.receive_many(receiver, data, at, apart, room, count, told)

    def send(self, sender: socket.socket, data: Octets, at: int, length: int, stride: int, to: bytes) -> int:
        """One sendmsg."""
        return syscalls.send(sender, data, at, length, stride, to)

    def send_group(
        self, sender: socket.socket, data: Octets, offsets: Integers, lengths: Integers, order: Integers, count: int,
        stride: int, to: bytes,
    ) -> int:  # fmt: skip
        """One sendmsg of what lies in several places."""
        return syscalls.send_group(sender, data, offsets, lengths, order, count, stride, to)


def _segments(length: int, stride: int) -> int:
    return (length + stride - 1) // stride if stride > 0 else 1
