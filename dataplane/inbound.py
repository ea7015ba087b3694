"""Datagrams become packets for the device, and packets become superpackets.

Theory of operation, in four passes. `unpack` finds the datagrams in what was received: one buffer may hold many of one
size (UDP_GRO). `decapsulate` judges each (`strip` finds the inner packet behind the framing, `admit` decides whether its
source may send it and whether it is for us) and takes one off the TTL in the ip framing. `coalesce` merges runs of
packets of one flow, so that one write hands them to the kernel, and `write_vnet_headers` prepares the rest.

Two things that look like attacks are normal on one host, where a kernel VXLAN peer's packets reach us over veth: the inner
TCP or UDP checksum is only the pseudo-header sum, and one datagram holds an inner packet of up to 64 900 bytes, since
nothing on the way made the segmentation that the peer's device left for later. Both are handed on to the kernel in the
same state: NEEDS_CSUM, and a segment size, that of the device's MTU for TCP, the one that UDP_GRO told for UDP.
"""

from dataplane.batch import MAX_PACKET_LENGTH, Batch
from dataplane.verdict import Verdict
from encap import fields
from encap.coalesce import Coalescer
from encap.fields import (
    IPV4_DESTINATION,
    IPV4_SOURCE,
    IPV6_DESTINATION,
    IPV6_SOURCE,
    TCP_CHECKSUM,
    TCP_DATA_OFFSET,
    UDP_CHECKSUM,
    UDP_HEADER_LENGTH,
    Octets,
    WritableOctets,
)
from encap.ip import check, decrement_ttl, partial_checksum, stated_length, ttl
from encap.vnet import FLAG_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, VNET_LENGTH
from encap.vnet import store as store_vnet
from encap.vxlan import check as check_vxlan
from routing.table import Table

_FORWARDED = int(Verdict.FORWARDED)
_TTL_EXPIRED = int(Verdict.TTL_EXPIRED)
_MULTICAST = int(Verdict.MULTICAST)
_LIMITED_BROADCAST = 0xFFFFFFFF
_UNKNOWN_VTEP = int(Verdict.UNKNOWN_VTEP)
_SPOOFED_SOURCE = int(Verdict.SPOOFED_SOURCE)
_NOT_FOR_US = int(Verdict.NOT_FOR_US)
WRITTEN = -1
"""In the column `last`: the virtio-net header of this entry is written."""
_WRITTEN = WRITTEN


def strip(data: Octets, at: int, length: int, table: Table) -> int:
    """The length of the inner packet of the datagram data[at:at + length], or minus its verdict.

    The packet starts `table.header_length` bytes behind `at`. Padding behind the packet is cut off, as
    Linux does (pskb_trim_rcsum): it belongs to the Ethernet frame.
    """
    if table.is_vxlan:
        fault = check_vxlan(data, at, length, table.vni, table.mac_a, table.mac_b)
        if fault:
            return -fault
        at += table.header_length
        length -= table.header_length
        length = min(length, stated_length(data, at, length))
    fault = check(data, at, length)
    return -fault if fault else length


def admit(data: Octets, at: int, origin: int, table: Table) -> int:
    """The row of the IP packet at `at`, which came from VTEP number `origin` (or -1), or minus its verdict.

    The row is that of the inner source; the one behind the table's last if sources are not checked and there is none.
    """
    if data[at] >> 4 == 4:
        destination = fields.load32(data, at + IPV4_DESTINATION)
        if destination >> 28 == 0xE or destination == _LIMITED_BROADCAST:
            return -_MULTICAST
        row = table.find4(fields.load32(data, at + IPV4_SOURCE))
        ours = table.is_own4(destination)
    else:
        high = fields.load64(data, at + IPV6_DESTINATION)
        if high >> 56 == 0xFF:
            return -_MULTICAST
        row = table.find6(fields.load64(data, at + IPV6_SOURCE), fields.load64(data, at + IPV6_SOURCE + 8))
        ours = table.is_own6(high, fields.load64(data, at + IPV6_DESTINATION + 8))
    if not table.check_sources:
        return row if row >= 0 else table.count
    if row < 0 or table.vtep[row] != origin:
        return -_SPOOFED_SOURCE
    return row if ours else -_NOT_FOR_US


def write_vnet_header(
    vnet: WritableOctets, vnet_at: int, data: Octets, at: int, length: int, mtu: int, stride: int
) -> None:
    """The virtio-net header of the packet at `at`, for a device whose MTU is `mtu` bytes, at `vnet_at` in `vnet`.

    `stride` is the segment size of an inner UDP superpacket, 0 for any other packet.
    """
    where = partial_checksum(data, at, length)
    start = where >> 8
    csum_offset = where & 0xFF
    header_length = 0
    gso_type = 0
    gso_size = 0
    if csum_offset == TCP_CHECKSUM and length > mtu:
        header_length = start + (data[at + start + TCP_DATA_OFFSET] >> 4) * 4
        if header_length < mtu:
            gso_type = GSO_TCPV4 if data[at] >> 4 == 4 else GSO_TCPV6
            gso_size = mtu - header_length
    elif csum_offset == UDP_CHECKSUM and stride and length > start + UDP_HEADER_LENGTH + stride:
        header_length = start + UDP_HEADER_LENGTH
        gso_type = GSO_UDP_L4
        gso_size = stride
    flags = FLAG_NEEDS_CSUM if where else 0
    store_vnet(vnet, vnet_at, flags, gso_type, header_length, gso_size, start, csum_offset)


def unpack(batch: Batch, pieces: Batch, table: Table, first: int) -> int:
    """Find the datagrams in the buffers of `batch` from number `first` on; returns the number of the first not unpacked.

    A buffer with a stride holds datagrams of that size, the last maybe shorter, if the first one's inner length agrees.
    Over veth the kernel may tell the segment size of an inner UDP superpacket instead, and the buffer is one datagram; then
    the piece keeps that size as its stride. What agrees with neither is one piece, which the judgement will refuse.
    """
    data = batch.data_c
    offset = batch.offset_c
    length = batch.length_c
    peer = batch.peer_c
    stride = batch.stride_c
    out_offset = pieces.offset_c
    out_length = pieces.length_c
    out_peer = pieces.peer_c
    out_stride = pieces.stride_c
    out_last = pieces.last_c
    tunnel = table.header_length
    capacity = pieces.capacity
    count = 0
    i = first
    while i < batch.count:
        at = offset[i]
        end = at + length[i]
        size = stride[i]
        inner_size = 0
        if size <= 0 or size >= length[i]:
            size = max(length[i], 1)
        elif length[i] < tunnel or stated_length(data, at + tunnel, length[i] - tunnel) != size - tunnel:
            inner_size = size
            size = length[i]
        if count and count + max((length[i] + size - 1) // size, 1) > capacity:
            break
        while True:
            if count == capacity:
                break
            out_offset[count] = at
            out_length[count] = min(size, end - at)
            out_peer[count] = peer[i]
            out_stride[count] = inner_size
            out_last[count] = offset[i] + MAX_PACKET_LENGTH
            count += 1
            at += size
            if at >= end:
                break
        i += 1
    pieces.count = count
    return i


def decapsulate(pieces: Batch, table: Table) -> int:
    """Judge every datagram of `pieces`, and make packets of those that come in; returns how many do.

    Reads `peer` (the VTEP number of the outer source). Sets `verdict` and `head`; where the inner packet could be found,
    `offset` and `length` are its own; of a packet that comes in `peer` becomes its row.
    """
    data = pieces.data_c
    offset = pieces.offset_c
    length = pieces.length_c
    peer = pieces.peer_c
    verdict = pieces.verdict_c
    head = pieces.head_c
    forwarded = 0
    for i in range(pieces.count):
        head[i] = i
        if table.check_sources and peer[i] < 0:
            verdict[i] = _UNKNOWN_VTEP
            continue
        inner_length = strip(data, offset[i], length[i], table)
        if inner_length < 0:
            verdict[i] = -inner_length
            continue
        at = offset[i] + table.header_length
        offset[i] = at
        length[i] = inner_length
        row = admit(data, at, peer[i], table)
        if row >= 0 and not table.is_vxlan and ttl(data, at) <= 1:
            row = -_TTL_EXPIRED
        if row < 0:
            verdict[i] = -row
            continue
        if not table.is_vxlan:
            decrement_ttl(data, at)
        peer[i] = row
        verdict[i] = _FORWARDED
        forwarded += 1
    return forwarded


def coalesce(pieces: Batch, coalescer: Coalescer, mtu: int) -> int:
    """Merge runs of forwarded packets of one flow; returns how many packets were merged into another.

    Sets `head` of a merged packet to the entry that it went into and its `length` to 0; that entry's `length` and
    virtio-net header, and its `last` to WRITTEN. Packets that are to be segmented already (a kernel peer's, longer
    than `mtu` or with a stride) stay as they are.
    """
    data = pieces.data_c
    offset = pieces.offset_c
    length = pieces.length_c
    stride = pieces.stride_c
    verdict = pieces.verdict_c
    head = pieces.head_c
    last = pieces.last_c
    merged = 0
    coalescer.reset()
    for i in range(pieces.count):
        if verdict[i] != _FORWARDED:
            continue
        is_plain = length[i] <= mtu and not stride[i]
        item = coalescer.item
        if item >= 0 and is_plain and coalescer.append(data, offset[i], length[i]) == 0:
            head[i] = item
            length[i] = 0
            merged += 1
            continue
        _finish(pieces, coalescer, item)
        if is_plain:
            coalescer.begin(i, data, offset[i], length[i], last[i])
        else:
            coalescer.reset()
    _finish(pieces, coalescer, coalescer.item)
    return merged


def _finish(pieces: Batch, coalescer: Coalescer, item: int) -> None:
    if item >= 0 and coalescer.segments > 1:
        pieces.length_c[item] = coalescer.length
        pieces.last_c[item] = _WRITTEN
        coalescer.finish(pieces.data_c, pieces.vnet_c, item * VNET_LENGTH)


def write_vnet_headers(pieces: Batch, mtu: int) -> None:
    """The virtio-net header of every packet that is to be written and has none yet; `mtu` is the device's, in bytes."""
    for i in range(pieces.count):
        if pieces.verdict_c[i] == _FORWARDED and pieces.head_c[i] == i and pieces.last_c[i] != _WRITTEN:
            write_vnet_header(
                pieces.vnet_c, i * VNET_LENGTH, pieces.data_c, pieces.offset_c[i], pieces.length_c[i], mtu,
                pieces.stride_c[i],
            )  # fmt: skip
