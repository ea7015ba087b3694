"""Compares what came out of the tunnel with what went in, byte by byte; compiled, since it stands in the measured loop.

Theory of operation: packets that are laid out one after the other come out in the same order, so the packets that a batch
sent and the pieces that were accepted are walked in step. In the vxlan framing nothing may differ. In the ip framing both
ends take one off the TTL, as the two routers that they are, so the TTL is two less, and the header is summed anew: its
checksum must be right if it was right before.
"""

from dataplane.batch import Batch
from dataplane.verdict import Verdict
from encap import fields
from encap.fields import IPV4_CHECKSUM, IPV4_TTL, IPV6_HOP_LIMIT, Octets

_FORWARDED = int(Verdict.FORWARDED)
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
        if pieces.verdict_c[j] != _FORWARDED or not is_same(
            sent.data_c, sent.offset_c[i], sent.length_c[i], pieces.data_c, pieces.offset_c[j], pieces.length_c[j], is_vxlan
        ):
            wrong += 1
        i += 1
    while i < sent.count:
        wrong += sent.verdict_c[i] == _FORWARDED
        i += 1
    return wrong


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
    was_right = fields.sum_words(a, a_at, header_length) == 0xFFFF
    is_right = fields.sum_words(b, b_at, header_length) == 0xFFFF
    behind = IPV4_CHECKSUM + 2
    return (
        fields.equal(a, a_at, b, b_at, IPV4_TTL)
        and a[a_at + IPV4_TTL] == b[b_at + IPV4_TTL] + _HOPS
        and a[a_at + IPV4_TTL + 1] == b[b_at + IPV4_TTL + 1]
        and was_right == is_right
        and fields.equal(a, a_at + behind, b, b_at + behind, a_length - behind)
    )
