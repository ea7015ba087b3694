"""One superpacket becomes the packets in it.

Theory of operation: with offloads on, a TUN hands over a TCP or UDP packet of up to 65 535 bytes, with a virtio-net header
that says how to cut it. `check` judges that header against the packet once; `segment` then writes packet number `index`
anywhere: a copy of the headers and its share of the payload, with its own length, IP identification, sequence number,
flags and complete checksums. Segments are independent of one another, so a caller may stop after any of them.

The header's own length field is not believed: on a forwarding path it can cover the whole first packet (as
wireguard-go found, tun/tun_linux.go); the transport header says how long it is. What changes per segment follows the
kernel (net/ipv4/tcp_offload.c, udp_offload.c): IPv4 identification + index; TCP sequence + index * size, FIN and PSH
only on the last segment, CWR only on the first. IPv4 options and IPv6 extension headers stand before `start` and are
copied as they are.
"""

from collections.abc import Iterator

from encap import checksum, fields
from encap.faults import Fault
from encap.fields import (
    IPV4_HEADER_LENGTH,
    IPV4_IDENTIFICATION,
    IPV4_SOURCE,
    IPV4_TOTAL_LENGTH,
    IPV6_HEADER_LENGTH,
    IPV6_PAYLOAD_LENGTH,
    IPV6_SOURCE,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    TCP_CHECKSUM,
    TCP_DATA_OFFSET,
    TCP_FLAGS,
    TCP_HEADER_LENGTH,
    TCP_SEQUENCE,
    UDP_CHECKSUM,
    UDP_HEADER_LENGTH,
    UDP_LENGTH,
    Octets,
    WritableOctets,
)
from encap.vnet import GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, VnetHeader

_BAD_OFFLOAD = int(Fault.BAD_OFFLOAD)
_FIN_AND_PSH = 0x09
_CWR = 0x80


def check(buf: Octets, at: int, length: int, gso_type: int, gso_size: int, start: int) -> int:
    """The length of all headers of the superpacket buf[at:at + length], or minus a Fault.

    `gso_type`, `gso_size` and `start` (csum_start) are of its virtio-net header. BAD_OFFLOAD: the type is unknown or of
    the other IP version, the size is zero, or the headers do not fit.
    """
    version = buf[at] >> 4
    least = (buf[at] & 0x0F) * 4 if version == 4 else IPV6_HEADER_LENGTH
    if gso_size <= 0 or start < max(least, IPV4_HEADER_LENGTH):
        return -_BAD_OFFLOAD
    if (gso_type == GSO_TCPV4 and version == 4) or (gso_type == GSO_TCPV6 and version == 6):
        if start + TCP_HEADER_LENGTH > length:
            return -_BAD_OFFLOAD
        transport = (buf[at + start + TCP_DATA_OFFSET] >> 4) * 4
        if transport < TCP_HEADER_LENGTH:
            return -_BAD_OFFLOAD
    elif gso_type == GSO_UDP_L4:
        transport = UDP_HEADER_LENGTH
    else:
        return -_BAD_OFFLOAD
    return start + transport if start + transport <= length else -_BAD_OFFLOAD


def count(length: int, header_length: int, gso_size: int) -> int:
    """How many packets are in a superpacket of `length` bytes; at least one."""
    return max(1, (length - header_length + gso_size - 1) // gso_size)


def segment(
    source: Octets, at: int, length: int, header_length: int, start: int, gso_size: int, index: int,
    target: WritableOctets, target_at: int,
) -> int:  # fmt: skip
    """Write packet number `index` of the superpacket source[at:at + length] at `target_at`; returns its length.

    `header_length` is what `check` returned, `start` where the transport header begins. Raises IndexError if `target` is
    too short.
    """
    done = index * gso_size
    payload = min(gso_size, length - header_length - done)
    fields.move(target, target_at, source, at, header_length)
    fields.move(target, target_at + header_length, source, at + header_length + done, payload)
    whole = header_length + payload
    transport = target_at + start
    transport_length = whole - start
    is_last = header_length + done + payload == length
    if header_length - start == UDP_HEADER_LENGTH:
        fields.store16(target, transport + UDP_LENGTH, transport_length)
        protocol = PROTOCOL_UDP
        field = transport + UDP_CHECKSUM
    else:
        fields.store32(target, transport + TCP_SEQUENCE, fields.load32(target, transport + TCP_SEQUENCE) + done)
        flags = target[transport + TCP_FLAGS]
        if not is_last:
            flags &= ~_FIN_AND_PSH
        if index:
            flags &= ~_CWR
        target[transport + TCP_FLAGS] = flags & 0xFF
        protocol = PROTOCOL_TCP
        field = transport + TCP_CHECKSUM
    if target[target_at] >> 4 == 4:
        fields.store16(target, target_at + IPV4_TOTAL_LENGTH, whole)
        fields.store16(
            target, target_at + IPV4_IDENTIFICATION, fields.load16(target, target_at + IPV4_IDENTIFICATION) + index
        )
        checksum.write_ipv4_header_checksum(target, target_at, (target[target_at] & 0x0F) * 4)
        pseudo = checksum.pseudo_sum(target, target_at + IPV4_SOURCE, 8, protocol, transport_length)
    else:
        fields.store16(target, target_at + IPV6_PAYLOAD_LENGTH, whole - IPV6_HEADER_LENGTH)
        pseudo = checksum.pseudo_sum(target, target_at + IPV6_SOURCE, 32, protocol, transport_length)
    fields.store16(target, field, 0)
    value = checksum.fold(pseudo + fields.sum_words(target, transport, transport_length)) ^ 0xFFFF
    if not value and protocol == PROTOCOL_UDP:
        value = 0xFFFF  # RFC 768: zero would mean that there is no checksum
    fields.store16(target, field, value)
    return whole


def segments(packet: memoryview, vnet: VnetHeader, scratch: memoryview) -> Iterator[memoryview]:
    """Each packet of the superpacket `packet`, one after the other in `scratch`; for what does not happen often.

    Raises ValueError if `vnet` does not fit the packet.
    """
    header_length = check(packet, 0, len(packet), vnet.gso_type, vnet.gso_size, vnet.csum_start)
    if header_length < 0:
        raise ValueError(f"{vnet} does not fit a packet of {len(packet)} bytes")
    for index in range(count(len(packet), header_length, vnet.gso_size)):
        length = segment(packet, 0, len(packet), header_length, vnet.csum_start, vnet.gso_size, index, scratch, 0)
        yield scratch[:length]
