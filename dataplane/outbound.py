"""Packets from the device become datagrams, and datagrams become trains.

Theory of operation, in three passes. `judge_batch` decides for each packet (is it IP, where does it go, may it go) and
changes no byte. `Outbound.lay_out` then writes what goes on into an arena, packet by packet: the route's ready-made tunnel
header, and behind it a copy of the packet with its checksum finished; a superpacket is cut into its packets on the way. So
datagrams stand one behind the other, and a run of them for one endpoint, of one size but for a shorter last one, is a
*train* that one system call sends (UDP_SEGMENT): at most 64 of them and 65 507 bytes. Flows are spread over lanes, one for
each source port; a train has one lane, so a flow's packets stay in order.

When the arena is full, `lay_out` stops wherever it is, within a superpacket too, and goes on from there when it is called
again. What follows from a verdict (an ICMP error, a smaller path) is the engine's business; the received packet is still
as it was.
"""

from dataplane.batch import Batch, block
from dataplane.verdict import Verdict
from encap import checksum, fields
from encap.fields import IPV4_DESTINATION, IPV6_DESTINATION, Octets
from encap.ip import check, decrement_ttl, flow_hash, ttl
from encap.segment import check as check_superpacket
from encap.segment import count as count_segments
from encap.segment import segment
from encap.vnet import FLAG_NEEDS_CSUM, load_native16
from routing.table import Table

MAX_SEGMENTS = 64
"""Datagrams in one UDP_SEGMENT send (include/linux/udp.h, UDP_MAX_SEGMENTS, 128 since Linux 6.9)."""

MAX_TRAIN_LENGTH = 65507
"""What one send may hold: 65 535 less the outer headers."""

TRAINS = 512
ARENA_BYTES = 1 << 19

_FORWARDED = int(Verdict.FORWARDED)
_NO_ROUTE = int(Verdict.NO_ROUTE)
_TTL_EXPIRED = int(Verdict.TTL_EXPIRED)
_MULTICAST = int(Verdict.MULTICAST)
_BAD_OFFLOAD = int(Verdict.BAD_OFFLOAD)
_LIMITED_BROADCAST = 0xFFFFFFFF
_VNET_LENGTH = 10
_VNET_GSO_SIZE = 4
_VNET_CSUM_START = 6
_VNET_CSUM_OFFSET = 8
_MAX_TRAIN_LENGTH = MAX_TRAIN_LENGTH


def judge(data: Octets, at: int, length: int, table: Table) -> int:
    """The row that the packet data[at:at + length] goes to, or minus its verdict."""
    fault = check(data, at, length)
    if fault:
        return -fault
    if data[at] >> 4 == 4:
        destination = fields.load32(data, at + IPV4_DESTINATION)
        if destination >> 28 == 0xE or destination == _LIMITED_BROADCAST or destination == table.broadcast4:
            return -_MULTICAST
        row = table.find4(destination)
    else:
        high = fields.load64(data, at + IPV6_DESTINATION)
        if high >> 56 == 0xFF:
            return -_MULTICAST
        row = table.find6(high, fields.load64(data, at + IPV6_DESTINATION + 8))
    if row < 0:
        return -_NO_ROUTE
    if not table.is_vxlan and ttl(data, at) <= 1:
        return -_TTL_EXPIRED
    return row


def judge_offload(vnet: Octets, vnet_at: int, data: Octets, at: int, length: int) -> int:
    """0 if the virtio-net header at `vnet_at` fits the packet data[at:at + length], else BAD_OFFLOAD."""
    start = load_native16(vnet, vnet_at + _VNET_CSUM_START)
    if vnet[vnet_at + 1]:
        size = load_native16(vnet, vnet_at + _VNET_GSO_SIZE)
        return _BAD_OFFLOAD if check_superpacket(data, at, length, vnet[vnet_at + 1], size, start) < 0 else 0
    if vnet[vnet_at] & FLAG_NEEDS_CSUM:
        return _BAD_OFFLOAD if start + load_native16(vnet, vnet_at + _VNET_CSUM_OFFSET) + 2 > length else 0
    return 0


def judge_batch(batch: Batch, table: Table) -> int:
    """Judge every packet of `batch`; returns how many go on. Sets `verdict`, and of those that go on `peer` and `flow`."""
    data = batch.data_c
    vnet = batch.vnet_c
    offset = batch.offset_c
    length = batch.length_c
    peer = batch.peer_c
    flow = batch.flow_c
    verdict = batch.verdict_c
    forwarded = 0
    for i in range(batch.count):
        at = offset[i]
        row = judge(data, at, length[i], table)
        if row >= 0 and (vnet[i * _VNET_LENGTH] or vnet[i * _VNET_LENGTH + 1]):
            refusal = judge_offload(vnet, i * _VNET_LENGTH, data, at, length[i])
            if refusal:
                row = -refusal
        if row < 0:
            verdict[i] = -row
            continue
        flow[i] = flow_hash(data, at, length[i]) & 0x7FFFFFFF
        peer[i] = row
        verdict[i] = _FORWARDED
        forwarded += 1
    return forwarded


class Outbound:
    """Lays a judged batch out as `trains`. `lanes` is the number of source ports, `max_segments` 1 without UDP_SEGMENT."""

    def __init__(self, arena_bytes: int = ARENA_BYTES, trains: int = TRAINS) -> None:
        self.trains = Batch(trains, block(arena_bytes))
        self.lanes = 1
        self.max_segments = MAX_SEGMENTS
        self._packet = 0
        self._segment = 0
        self._train = -1
        self._position = 0
        self._segments = 0
        self._is_open = False

    def start(self, lanes: int, max_segments: int) -> None:
        """Begin a new batch."""
        self.lanes = lanes
        self.max_segments = max_segments
        self._packet = 0
        self._segment = 0

    def lay_out(self, batch: Batch, table: Table) -> bool:
        """Fill the arena with trains, from where the last call stopped; whether something is left for another call."""
        trains = self.trains
        data = batch.data_c
        vnet = batch.vnet_c
        offset = batch.offset_c
        length = batch.length_c
        verdict = batch.verdict_c
        peer = batch.peer_c
        flow = batch.flow_c
        arena = trains.data_c
        limit = len(arena)
        count = batch.count
        self._train = -1
        self._position = 0
        self._is_open = False
        finished = True
        while self._packet < count:
            i = self._packet
            if verdict[i] != _FORWARDED:
                self._packet += 1
                continue
            if not self._lay_out_packet(
                data, offset[i], length[i], vnet, i * _VNET_LENGTH, peer[i], flow[i], table, arena, limit
            ):
                finished = False
                break
            self._packet += 1
            self._segment = 0
        trains.count = self._train + 1
        return not finished

    def _lay_out_packet(
        self, data: Octets, at: int, length: int, vnet: Octets, vnet_at: int, row: int, flow: int, table: Table,
        arena: memoryview, limit: int,
    ) -> bool:  # fmt: skip
        """Write one packet or the rest of one superpacket; False if the arena or the trains are full before its end."""
        gso_type = vnet[vnet_at + 1]
        start = load_native16(vnet, vnet_at + _VNET_CSUM_START)
        size = length
        header_length = 0
        segments = 1
        if gso_type:
            size = load_native16(vnet, vnet_at + _VNET_GSO_SIZE)
            header_length = check_superpacket(data, at, length, gso_type, size, start)
            segments = count_segments(length, header_length, size)
        tunnel = table.header_length
        while self._segment < segments:
            target = self._position + tunnel
            if target + header_length + size > limit:
                return False
            if gso_type:
                written = segment(data, at, length, header_length, start, size, self._segment, arena, target)
            else:
                fields.move(arena, target, data, at, length)
                written = length
                if vnet[vnet_at] & FLAG_NEEDS_CSUM:
                    field = start + load_native16(vnet, vnet_at + _VNET_CSUM_OFFSET)
                    checksum.finish(arena, target + start, target + length, target + field)
            if tunnel:
                fields.move(arena, self._position, table.headers, row * tunnel, tunnel)
            else:
                decrement_ttl(arena, target)
            if not self._board(row, flow % self.lanes, tunnel + written):
                return False
            self._position += tunnel + written
            self._segment += 1
        return True

    def _board(self, row: int, lane: int, length: int) -> bool:
        """Let the datagram just written join the last train, or open a new one; False if there is no room for one."""
        train = self._train
        if (
            self._is_open
            and self.trains.peer_c[train] == row
            and self.trains.flow_c[train] == lane
            and length <= self.trains.stride_c[train]
            and self._segments < self.max_segments
            and self.trains.length_c[train] + length <= _MAX_TRAIN_LENGTH
        ):
            self.trains.length_c[train] += length
            self._segments += 1
            self._is_open = length == self.trains.stride_c[train]
        else:
            train += 1
            if train == self.trains.capacity:
                return False
            self._train = train
            self._segments = 1
            self._is_open = True
            self.trains.offset_c[train] = self._position
            self.trains.length_c[train] = length
            self.trains.stride_c[train] = length
            self.trains.peer_c[train] = row
            self.trains.flow_c[train] = lane
            self.trains.verdict_c[train] = _FORWARDED
            self.trains.head_c[train] = self._packet
        self.trains.last_c[train] = self._packet
        return True
