"""Packets of one flow become one superpacket.

Theory of operation. A `Coalescer` holds at most one *item*: a packet that may still grow, and where it may grow to. `begin`
opens an item on a packet; `append` decides whether the next packet continues it, and if so moves its payload behind the
item's; `finish` makes the headers say what the item has become. Packets are offered in order and only the latest item
grows, so the order on the wire is the order into the device, within a flow and between flows.

A packet that is merged loses its own header, so everything in it must either be the same as in the item's, follow from its
place (sequence number, IPv4 identification, length), or be a checksum that was verified before: a damaged packet must not
come out with a fresh one. What is compared is what the kernel's own GRO compares (net/ipv4/tcp_offload.c tcp_gro_receive,
udp_offload.c, af_inet.c inet_gro_receive, ip6_offload.c), including the window and the flow label. Segmenting the result
gives the packets back, byte for byte; one exception is an IPv4 identification that does not count up in packets with DF,
where it means nothing (RFC 6864).
"""

from enum import IntEnum

from encap import checksum, fields
from encap.fields import (
    IPV4_DONT_FRAGMENT,
    IPV4_FRAGMENT,
    IPV4_HEADER_LENGTH,
    IPV4_IDENTIFICATION,
    IPV4_PROTOCOL,
    IPV4_SOURCE,
    IPV4_TOTAL_LENGTH,
    IPV6_HEADER_LENGTH,
    IPV6_NEXT_HEADER,
    IPV6_PAYLOAD_LENGTH,
    IPV6_SOURCE,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    TCP_ACKNOWLEDGMENT,
    TCP_CHECKSUM,
    TCP_DATA_OFFSET,
    TCP_FLAGS,
    TCP_HEADER_LENGTH,
    TCP_SEQUENCE,
    TCP_URGENT_POINTER,
    TCP_WINDOW,
    UDP_CHECKSUM,
    UDP_HEADER_LENGTH,
    UDP_LENGTH,
    Octets,
    WritableOctets,
)
from encap.vnet import FLAG_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4
from encap.vnet import store as store_vnet

MAX_LENGTH = 65535
MAX_UDP_SEGMENTS = 64
"""What kernels before 6.6 take of a UDP superpacket (UDP_MAX_SEGMENTS); later ones take 128."""


class Outcome(IntEnum):
    """What became of a packet offered to `append`: merged, or why not."""

    MERGED = 0
    NO_ITEM = 1
    NOT_A_CANDIDATE = 2
    OTHER_FLOW = 3
    OTHER_HEADERS = 4
    NOT_NEXT = 5
    ITEM_ENDED = 6
    TOO_LARGE = 7
    BAD_CHECKSUM = 8


_NO_ITEM = int(Outcome.NO_ITEM)
_NOT_A_CANDIDATE = int(Outcome.NOT_A_CANDIDATE)
_OTHER_FLOW = int(Outcome.OTHER_FLOW)
_OTHER_HEADERS = int(Outcome.OTHER_HEADERS)
_NOT_NEXT = int(Outcome.NOT_NEXT)
_ITEM_ENDED = int(Outcome.ITEM_ENDED)
_TOO_LARGE = int(Outcome.TOO_LARGE)
_BAD_CHECKSUM = int(Outcome.BAD_CHECKSUM)
_MAX_LENGTH = MAX_LENGTH
_MAX_UDP_SEGMENTS = MAX_UDP_SEGMENTS
_ACK = 0x10
_ACK_AND_PSH = 0x18
_PSH = 0x08


def candidate(buf: Octets, at: int, length: int) -> int:
    """The length of all headers of the packet if it could ever be merged, else 0.

    TCP with exactly ACK or ACK and PSH, or UDP; payload; directly in an IPv4 packet without options and not fragmented, or
    in an IPv6 packet without extension headers. The packet passed `ip.check`.
    """
    if buf[at] >> 4 == 4:
        if buf[at] & 0x0F != 5 or fields.load16(buf, at + IPV4_FRAGMENT) & 0x3FFF:
            return 0
        protocol = buf[at + IPV4_PROTOCOL]
        start = IPV4_HEADER_LENGTH
    else:
        protocol = buf[at + IPV6_NEXT_HEADER]
        start = IPV6_HEADER_LENGTH
    if protocol == PROTOCOL_TCP and length > start + TCP_HEADER_LENGTH:
        header_length = start + (buf[at + start + TCP_DATA_OFFSET] >> 4) * 4
        flags = buf[at + start + TCP_FLAGS]
        if (flags != _ACK and flags != _ACK_AND_PSH) or header_length < start + TCP_HEADER_LENGTH:
            return 0
        return header_length if length > header_length else 0
    if protocol == PROTOCOL_UDP and length > start + UDP_HEADER_LENGTH:
        return start + UDP_HEADER_LENGTH if fields.load16(buf, at + start + UDP_LENGTH) == length - start else 0
    return 0


def has_good_checksum(buf: Octets, at: int, length: int) -> bool:
    """Whether the checksums of a candidate are right; that of the transport header may be partial, thus still to be made.

    A UDP packet without a checksum has none that is right.
    """
    if buf[at] >> 4 == 4:
        if fields.sum_words(buf, at, IPV4_HEADER_LENGTH) != 0xFFFF:
            return False
        start = IPV4_HEADER_LENGTH
        protocol = buf[at + IPV4_PROTOCOL]
        pseudo = checksum.pseudo_sum(buf, at + IPV4_SOURCE, 8, protocol, length - start)
    else:
        start = IPV6_HEADER_LENGTH
        protocol = buf[at + IPV6_NEXT_HEADER]
        pseudo = checksum.pseudo_sum(buf, at + IPV6_SOURCE, 32, protocol, length - start)
    field = fields.load16(buf, at + start + (TCP_CHECKSUM if protocol == PROTOCOL_TCP else UDP_CHECKSUM))
    if protocol == PROTOCOL_UDP and field == 0:
        return False
    return field == pseudo or checksum.fold(pseudo + fields.sum_words(buf, at + start, length - start)) == 0xFFFF


class Coalescer:
    """See the module. `item` is the caller's number for the open item, -1 without one; `segments` how many it holds."""

    def __init__(self) -> None:
        self.item = -1
        self.length = 0
        self.segments = 0
        self._at = 0
        self._limit = 0
        self._header_length = 0
        self._start = 0
        self._size = 0
        self._is_tcp = False
        self._is_ipv4 = False
        self._is_verified = False
        self._has_ended = False

    def reset(self) -> None:
        """Forget the item; its packet stays as it is."""
        self.item = -1

    def begin(self, item: int, buf: Octets, at: int, length: int, limit: int) -> bool:
        """Open an item on the packet buf[at:at + length], which may grow up to `limit`; False if it cannot grow."""
        self.item = -1
        header_length = candidate(buf, at, length)
        if not header_length:
            return False
        self._is_ipv4 = buf[at] >> 4 == 4
        self._start = IPV4_HEADER_LENGTH if self._is_ipv4 else IPV6_HEADER_LENGTH
        protocol = buf[at + IPV4_PROTOCOL] if self._is_ipv4 else buf[at + IPV6_NEXT_HEADER]
        self._is_tcp = protocol == PROTOCOL_TCP
        self.item = item
        self.length = length
        self.segments = 1
        self._at = at
        self._limit = limit
        self._header_length = header_length
        self._size = length - header_length
        self._is_verified = False
        self._has_ended = self._is_tcp and buf[at + self._start + TCP_FLAGS] & _PSH != 0
        return True

    def decide(self, buf: Octets, at: int, length: int) -> int:
        """Whether the packet buf[at:at + length] continues the item; an `Outcome`, changing nothing but what is known."""
        if self.item < 0:
            return _NO_ITEM
        header_length = candidate(buf, at, length)
        if not header_length:
            return _NOT_A_CANDIDATE
        start = self._start
        if buf[at] >> 4 != buf[self._at] >> 4 or not self._is_same_flow(buf, at):
            return _OTHER_FLOW
        if header_length != self._header_length or not self._has_same_headers(buf, at):
            return _OTHER_HEADERS
        if self._is_tcp:
            expected = fields.load32(buf, self._at + start + TCP_SEQUENCE) + self.length - self._header_length
            if fields.load32(buf, at + start + TCP_SEQUENCE) != expected & 0xFFFFFFFF:
                return _NOT_NEXT
        payload = length - header_length
        if self._has_ended or payload > self._size:
            return _ITEM_ENDED
        if self.length + payload > _MAX_LENGTH or self._at + self.length + payload > self._limit:
            return _TOO_LARGE
        if not self._is_tcp and self.segments >= _MAX_UDP_SEGMENTS:
            return _TOO_LARGE
        if not self._is_verified:
            if not has_good_checksum(buf, self._at, self.length):
                self.item = -1
                return _BAD_CHECKSUM
            self._is_verified = True
        return 0 if has_good_checksum(buf, at, length) else _BAD_CHECKSUM

    def append(self, buf: WritableOctets, at: int, length: int) -> int:
        """Merge the packet buf[at:at + length] into the item if it continues it; an `Outcome`."""
        outcome = self.decide(buf, at, length)
        if outcome:
            return outcome
        payload = length - self._header_length
        if self._is_tcp and buf[at + self._start + TCP_FLAGS] & _PSH:
            buf[self._at + self._start + TCP_FLAGS] |= _PSH
            self._has_ended = True
        fields.move(buf, self._at + self.length, buf, at + self._header_length, payload)
        self.length += payload
        self.segments += 1
        if payload < self._size:
            self._has_ended = True
        return 0

    def finish(self, buf: WritableOctets, vnet: WritableOctets, vnet_at: int) -> None:
        """Close the item, which holds several packets: make its headers true, and write its virtio-net header."""
        at = self._at
        transport_length = self.length - self._start
        protocol = PROTOCOL_TCP if self._is_tcp else PROTOCOL_UDP
        if self._is_ipv4:
            fields.store16(buf, at + IPV4_TOTAL_LENGTH, self.length)
            checksum.write_ipv4_header_checksum(buf, at, IPV4_HEADER_LENGTH)
            pseudo = checksum.pseudo_sum(buf, at + IPV4_SOURCE, 8, protocol, transport_length)
            gso_type = GSO_TCPV4
        else:
            fields.store16(buf, at + IPV6_PAYLOAD_LENGTH, transport_length)
            pseudo = checksum.pseudo_sum(buf, at + IPV6_SOURCE, 32, protocol, transport_length)
            gso_type = GSO_TCPV6
        offset = TCP_CHECKSUM
        if not self._is_tcp:
            gso_type = GSO_UDP_L4
            offset = UDP_CHECKSUM
            fields.store16(buf, at + self._start + UDP_LENGTH, transport_length)
        fields.store16(buf, at + self._start + offset, pseudo)
        store_vnet(vnet, vnet_at, FLAG_NEEDS_CSUM, gso_type, self._header_length, self._size, self._start, offset)
        self.item = -1

    def _is_same_flow(self, buf: Octets, at: int) -> bool:
        """Protocol; addresses and ports, which stand in one run in a candidate; and for TCP the acknowledgment."""
        start = self._start
        mine = self._at
        protocol = IPV4_PROTOCOL if self._is_ipv4 else IPV6_NEXT_HEADER
        addresses = IPV4_SOURCE if self._is_ipv4 else IPV6_SOURCE
        if buf[at + protocol] != buf[mine + protocol]:
            return False
        if not fields.equal(buf, at + addresses, buf, mine + addresses, start + 4 - addresses):
            return False
        return not self._is_tcp or fields.equal(
            buf, at + start + TCP_ACKNOWLEDGMENT, buf, mine + start + TCP_ACKNOWLEDGMENT, 4
        )

    def _has_same_headers(self, buf: Octets, at: int) -> bool:
        """What must not differ between the packets of one superpacket."""
        start = self._start
        mine = self._at
        if self._is_ipv4:
            # Version, header length and TOS; TTL; flags. The identification counts up, or stands still with DF.
            if buf[at] != buf[mine] or buf[at + 1] != buf[mine + 1] or buf[at + 8] != buf[mine + 8]:
                return False
            fragment = fields.load16(buf, mine + IPV4_FRAGMENT)
            if fields.load16(buf, at + IPV4_FRAGMENT) != fragment:
                return False
            first = fields.load16(buf, mine + IPV4_IDENTIFICATION)
            identification = fields.load16(buf, at + IPV4_IDENTIFICATION)
            if identification != (first + self.segments) & 0xFFFF and not (
                fragment & IPV4_DONT_FRAGMENT and identification == first
            ):
                return False
        elif fields.load32(buf, at) != fields.load32(buf, mine) or buf[at + 7] != buf[mine + 7]:
            return False  # version, traffic class, flow label; hop limit
        if not self._is_tcp:
            return True
        at += start
        mine += start
        if buf[at + TCP_DATA_OFFSET] != buf[mine + TCP_DATA_OFFSET]:
            return False  # the reserved bits beside it
        if not fields.equal(buf, at + TCP_WINDOW, buf, mine + TCP_WINDOW, 2):
            return False
        # Urgent pointer and options, which stand behind it.
        rest = self._header_length - start - TCP_URGENT_POINTER
        return fields.equal(buf, at + TCP_URGENT_POINTER, buf, mine + TCP_URGENT_POINTER, rest)
