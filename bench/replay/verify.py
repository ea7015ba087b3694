"""Compares what came out of the tunnel with what went in, byte by byte; compiled, since it stands in the measured loop.

Theory of operation: in memory, packets that are laid out one after the other come out in the same order, so the packets
that a batch sent and the pieces that were found are walked in step (`count_differences`). An underlay keeps the order of
each lane alone, so behind one, pieces are recognised by their bytes (`Recogniser`).

In the vxlan framing nothing may differ. In the ip framing both ends take one off the TTL, as the two routers that they are,
so the TTL is two less, and the header's checksum follows: it must be as right as before, or wrong by as much. A packet with
a TTL of two is rightly refused by the second router.
"""

from array import array

from dataplane.batch import Batch
from dataplane.verdict import Verdict
from encap import fields
from encap.fields import IPV4_CHECKSUM, IPV4_TTL, IPV6_HOP_LIMIT, Octets

_FORWARDED = int(Verdict.FORWARDED)
_TTL_EXPIRED = int(Verdict.TTL_EXPIRED)
_HOPS = 2


def count_differences(sent: Batch, pieces: Batch, is_vxlan: bool) -> int:
    """How many of the packets that `sent` forwarded came out of `pieces` changed, or not at all."""
    wrong = 0
    i = 0
    for j in range(pieces.count):
        while i < sent.count and sent.verdict_c[i] != _FORWARDED:
            i += 1
        if i == sent.count:
            return wrong + pieces.count - j  # more came out than went in
        if not has_crossed(sent, i, pieces, j, is_vxlan):
            wrong += 1
        i += 1
    while i < sent.count:
        wrong += sent.verdict_c[i] == _FORWARDED
        i += 1
    return wrong


def has_crossed(sent: Batch, i: int, pieces: Batch, j: int, is_vxlan: bool) -> bool:
    """Whether piece `j` is what must become of packet `i` of `sent`, which was forwarded."""
    at = sent.offset_c[i]
    if pieces.verdict_c[j] == _FORWARDED:
        return is_same(sent.data_c, at, sent.length_c[i], pieces.data_c, pieces.offset_c[j], pieces.length_c[j], is_vxlan)
    if is_vxlan or pieces.verdict_c[j] != _TTL_EXPIRED:
        return False
    return sent.data_c[at + (IPV6_HOP_LIMIT if sent.data_c[at] >> 4 == 6 else IPV4_TTL)] == _HOPS


def is_same(a: Octets, a_at: int, a_length: int, b: Octets, b_at: int, b_length: int, is_vxlan: bool) -> bool:
    """Whether packet `b` is packet `a` after it has crossed the tunnel."""
    if a_length != b_length:
        return False
    if is_vxlan:
        return fields.equal(a, a_at, b, b_at, a_length)
    if a[a_at] >> 4 == 6:
        return (
            fields.equal(a, a_at, b, b_at, IPV6_HOP_LIMIT)
            and a[a_at + IPV6_HOP_LIMIT] == b[b_at + IPV6_HOP_LIMIT] + _HOPS
            and fields.equal(a, a_at + IPV6_HOP_LIMIT + 1, b, b_at + IPV6_HOP_LIMIT + 1, a_length - IPV6_HOP_LIMIT - 1)
        )
    header_length = (a[a_at] & 0x0F) * 4
    behind = IPV4_CHECKSUM + 2
    return (
        fields.equal(a, a_at, b, b_at, IPV4_TTL)
        and a[a_at + IPV4_TTL] == b[b_at + IPV4_TTL] + _HOPS
        and a[a_at + IPV4_TTL + 1] == b[b_at + IPV4_TTL + 1]
        and fields.sum_words(a, a_at, header_length) == fields.sum_words(b, b_at, header_length)
        and fields.equal(a, a_at + behind, b, b_at + behind, a_length - behind)
    )


class Recogniser:
    """Finds for each piece the packet that it is, where only packets of one lane, of `lanes`, keep their order.

    The next piece is mostly the next packet of the same lane, so there the search begins; what is not found there is looked
    for among all packets that did not come out yet.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.missing = 0
        """How many packets of the batch did not come out as they should have."""
        self.strange = 0
        """How many pieces are none of the packets."""
        self.reordered = 0
        """How many packets came out behind a later one of their lane."""
        self._latest = memoryview(array("i", bytes(4 * lanes)))

    def recognise(self, sent: Batch, pieces: Batch, is_vxlan: bool) -> None:
        """Work out the numbers for one batch. Uses the column `head` of `sent` for what was not found yet."""
        self.missing = 0
        self.strange = 0
        self.reordered = 0
        for i in range(sent.count):
            sent.head_c[i] = sent.verdict_c[i] == _FORWARDED
            self.missing += sent.head_c[i]
        for i in range(self.lanes):
            self._latest[i] = -1
        lane = -1
        found = 0
        for j in range(pieces.count):
            if lane >= 0:
                found = self._find(sent, found + 1, lane, pieces, j, is_vxlan)
            if lane < 0 or found < 0:
                found = self._find(sent, 0, -1, pieces, j, is_vxlan)
            if found < 0:
                self.strange += 1
                lane = -1
                continue
            lane = sent.flow_c[found] % self.lanes
            sent.head_c[found] = 0
            self.missing -= 1
            if found < self._latest[lane]:
                self.reordered += 1
            else:
                self._latest[lane] = found

    def _find(self, sent: Batch, first: int, lane: int, pieces: Batch, j: int, is_vxlan: bool) -> int:
        """The first packet from number `first` on, in `lane` (-1: in any), that piece `j` may be; -1 if there is none."""
        for i in range(first, sent.count):
            if (
                sent.head_c[i]
                and (lane < 0 or sent.flow_c[i] % self.lanes == lane)
                and has_crossed(sent, i, pieces, j, is_vxlan)
            ):
                return i
        return -1
