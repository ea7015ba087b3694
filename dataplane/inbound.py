"""Datagrams become packets for the device.

Theory of operation, per datagram: `strip` finds the inner packet behind the framing; `admit` decides whether its source
may send it and whether it is for us; `decapsulate` then changes bytes: in the ip framing one comes off the TTL, and the
packet gets its virtio-net header, in the room that the stripped header left.

Two things that look like attacks are normal on one host, where a kernel VXLAN peer's packets reach us over veth: the inner
TCP or UDP checksum is only the pseudo-header sum, and one datagram holds an inner TCP packet of up to 64 900 bytes, since
nothing on the way made the segmentation that the peer's device left for later. Both are handed on to the kernel in the
same state: NEEDS_CSUM, and a segment size that fits the device's MTU.
"""

from dataplane.batch import Batch
from dataplane.verdict import Verdict
from encap.fields import (
    IPV4_DESTINATION,
    IPV4_SOURCE,
    IPV6_DESTINATION,
    IPV6_SOURCE,
    TCP_CHECKSUM,
    TCP_DATA_OFFSET,
    Octets,
    WritableOctets,
    load32,
    load64,
)
from encap.ip import check, decrement_ttl, partial_checksum, stated_length, ttl
from encap.vnet import FLAG_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, VNET_LENGTH
from encap.vnet import store as store_vnet
from encap.vxlan import MINIMUM_ETHERNET_PAYLOAD
from encap.vxlan import check as check_vxlan
from routing.table import Table

_FORWARDED = int(Verdict.FORWARDED)
_TTL_EXPIRED = int(Verdict.TTL_EXPIRED)
_MULTICAST = int(Verdict.MULTICAST)
_LIMITED_BROADCAST = 0xFFFFFFFF
_UNKNOWN_VTEP = int(Verdict.UNKNOWN_VTEP)
_SPOOFED_SOURCE = int(Verdict.SPOOFED_SOURCE)
_NOT_FOR_US = int(Verdict.NOT_FOR_US)


def strip(data: Octets, at: int, length: int, table: Table) -> int:
    """The length of the inner packet of the datagram data[at:at + length], or minus its verdict.

    The packet starts `table.header_length` bytes behind `at`. Ethernet padding behind a short packet is cut off.
    """
    if table.is_vxlan:
        fault = check_vxlan(data, at, length, table.vni, table.mac_a, table.mac_b)
        if fault:
            return -fault
        at += table.header_length
        length -= table.header_length
        if length <= MINIMUM_ETHERNET_PAYLOAD:
            length = min(length, stated_length(data, at, length))
    fault = check(data, at, length)
    return -fault if fault else length


def admit(data: Octets, at: int, origin: int, table: Table) -> int:
    """0 if the IP packet at `at`, which came from VTEP number `origin` (or -1), may come in, else its verdict."""
    if data[at] >> 4 == 4:
        destination = load32(data, at + IPV4_DESTINATION)
        if destination >> 28 == 0xE or destination == _LIMITED_BROADCAST:
            return _MULTICAST
        if not table.check_sources:
            return 0
        row = table.find4(load32(data, at + IPV4_SOURCE))
        ours = table.is_own4(destination)
    else:
        high = load64(data, at + IPV6_DESTINATION)
        if high >> 56 == 0xFF:
            return _MULTICAST
        if not table.check_sources:
            return 0
        row = table.find6(load64(data, at + IPV6_SOURCE), load64(data, at + IPV6_SOURCE + 8))
        ours = table.is_own6(high, load64(data, at + IPV6_DESTINATION + 8))
    if row < 0 or table.vtep[row] != origin:
        return _SPOOFED_SOURCE
    return 0 if ours else _NOT_FOR_US


def write_vnet_header(data: WritableOctets, at: int, length: int, mtu: int) -> None:
    """The virtio-net header in front of the packet at `at`, for a device whose MTU is `mtu` bytes."""
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
    flags = FLAG_NEEDS_CSUM if where else 0
    store_vnet(data, at - VNET_LENGTH, flags, gso_type, header_length, gso_size, start, csum_offset)


def decapsulate(batch: Batch, table: Table, mtu: int) -> int:
    """Judge every datagram of `batch`, and make packets of those that come in; returns how many do.

    Reads `peer` (the VTEP number of the outer source). Sets `verdict`; where the inner packet could be found, `offset` and
    `length` are its own. `mtu` is the device's, in bytes.
    """
    data = batch.data
    offset = batch.offset
    length = batch.length
    peer = batch.peer
    verdict = batch.verdict
    forwarded = 0
    for i in range(batch.count):
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
        refusal = admit(data, at, peer[i], table)
        if not refusal and not table.is_vxlan and ttl(data, at) <= 1:
            refusal = _TTL_EXPIRED
        if refusal:
            verdict[i] = refusal
            continue
        if not table.is_vxlan:
            decrement_ttl(data, at)
        write_vnet_header(data, at, inner_length, mtu)
        verdict[i] = _FORWARDED
        forwarded += 1
    return forwarded
