"""Packets from the device become datagrams.

Theory of operation, per packet: `judge` decides (is it IP, where does it go, may it go) and returns either a row of the
table or a verdict; `encapsulate` then changes bytes: in the ip framing one comes off the TTL, and the route's ready-made
header is copied in front of the packet. Nothing is moved and nothing is allocated.

What follows from a verdict (an ICMP error, a smaller path) is the engine's business.
"""

from dataplane.batch import Batch
from dataplane.verdict import Verdict
from encap.fields import IPV4_DESTINATION, IPV6_DESTINATION, Octets, load32, load64
from encap.ip import check, decrement_ttl, flow_hash, ttl
from routing.table import Table

_FORWARDED = int(Verdict.FORWARDED)
_NO_ROUTE = int(Verdict.NO_ROUTE)
_TTL_EXPIRED = int(Verdict.TTL_EXPIRED)
_MULTICAST = int(Verdict.MULTICAST)
_LIMITED_BROADCAST = 0xFFFFFFFF


def judge(data: Octets, at: int, length: int, table: Table) -> int:
    """The row that the packet data[at:at + length] goes to, or minus its verdict."""
    fault = check(data, at, length)
    if fault:
        return -fault
    if data[at] >> 4 == 4:
        destination = load32(data, at + IPV4_DESTINATION)
        if destination >> 28 == 0xE or destination == _LIMITED_BROADCAST or destination == table.broadcast4:
            return -_MULTICAST
        row = table.find4(destination)
    else:
        high = load64(data, at + IPV6_DESTINATION)
        if high >> 56 == 0xFF:
            return -_MULTICAST
        row = table.find6(high, load64(data, at + IPV6_DESTINATION + 8))
    if row < 0:
        return -_NO_ROUTE
    if not table.is_vxlan and ttl(data, at) <= 1:
        return -_TTL_EXPIRED
    return row


def encapsulate(batch: Batch, table: Table) -> int:
    """Judge every packet of `batch`, and make datagrams of those that go on; returns how many do.

    Sets `verdict`, and for packets that go on `peer` (the row), `flow`, `offset` and `length` (of the datagram).
    """
    data = batch.data
    offset = batch.offset
    length = batch.length
    peer = batch.peer
    flow = batch.flow
    verdict = batch.verdict
    headers = table.headers
    header_length = table.header_length
    forwarded = 0
    for i in range(batch.count):
        at = offset[i]
        row = judge(data, at, length[i], table)
        if row < 0:
            verdict[i] = -row
            continue
        flow[i] = flow_hash(data, at, length[i]) & 0x7FFFFFFF
        if header_length:
            for k in range(header_length):
                data[at - header_length + k] = headers[row * header_length + k]
        else:
            decrement_ttl(data, at)
        offset[i] = at - header_length
        length[i] += header_length
        peer[i] = row
        verdict[i] = _FORWARDED
        forwarded += 1
    return forwarded
