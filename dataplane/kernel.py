"""The kernel's side of a batch: the loops around the system calls that carry packets.

Theory of operation: a loop goes on until it is done or until one call is refused, and then tells where it stopped and why
(`error`); what a refusal means is for the device or the underlay to say, which go on behind it. So the loops, which run
for every packet, are compiled, and hold no policy.

The four calls are methods of `Kernel` of their own, so that a test can put a kernel in their place that refuses.
"""

import socket
from collections.abc import Sequence
from typing import TypeAlias

from dataplane import syscalls
from dataplane.batch import MAX_PACKET_LENGTH, Batch
from dataplane.verdict import Verdict
from encap import fields
from encap.fields import Octets, WritableOctets
from encap.vnet import load_native16

_FORWARDED = int(Verdict.FORWARDED)
_MAX_LENGTH = MAX_PACKET_LENGTH
_VNET = syscalls.VNET_LENGTH
_ADDRESS = 8  # in what `receive` tells

Road: TypeAlias = tuple[Sequence[socket.socket], bytes]
"""The sockets of a family, and a struct sockaddr."""


class Kernel:
    """The system calls, and the loops around them. `error` is the errno that the last loop stopped with, or 0."""

    def __init__(self) -> None:
        self.error = 0
        self.told = memoryview(bytearray(syscalls.TOLD_LENGTH))
        self.told_c = self.told

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
            length = self.receive(receiver, batch.data_c, batch.free_slot(), _MAX_LENGTH, self.told_c)
            if length < 0:
                self.error = -length
                break
            if is_ipv4:
                source = fields.load32(self.told_c, _ADDRESS)
            else:
                high = fields.load64(self.told_c, _ADDRESS)
                source = high << 64 | fields.load64(self.told_c, _ADDRESS + 8)
            batch.add(length, origins[source], load_native16(self.told_c, 0))
        return self.error

    def send_trains(self, batch: Batch, first: int, roads: dict[int, Road]) -> int:
        """Send the FORWARDED trains of `batch` from number `first` on; returns which one was refused, or the count.

        `roads` has for each row the sockets that it may leave by, of which the train's lane takes one, and the struct
        sockaddr that it goes to.
        """
        self.error = 0
        for i in range(first, batch.count):
            if batch.verdict_c[i] != _FORWARDED:
                continue
            senders, to = roads[batch.peer_c[i]]
            sender = senders[batch.flow_c[i] % len(senders)]
            sent = self.send(sender, batch.data_c, batch.offset_c[i], batch.length_c[i], batch.stride_c[i], to)
            if sent < 0:
                self.error = -sent
                return i
        return batch.count

    def read_packet(self, fd: int, vnet: WritableOctets, vnet_at: int, data: WritableOctets, at: int, room: int) -> int:
        """See ``dataplane.syscalls``, as with the following."""
        return syscalls.read_packet(fd, vnet, vnet_at, data, at, room)

    def write_packet(self, fd: int, vnet: Octets, vnet_at: int, data: Octets, at: int, length: int) -> int:
        """One writev."""
        return syscalls.write_packet(fd, vnet, vnet_at, data, at, length)

    def receive(self, receiver: socket.socket, data: WritableOctets, at: int, room: int, told: WritableOctets) -> int:
        """One recvmsg."""
        return syscalls.receive(receiver, data, at, room, told)

    def send(self, sender: socket.socket, data: Octets, at: int, length: int, stride: int, to: bytes) -> int:
        """One sendmsg."""
        return syscalls.send(sender, data, at, length, stride, to)
