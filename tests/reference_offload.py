"""Slow twins of segmentation, coalescing and trains, and packets for them with every field settable.

Written from RFC 791, RFC 768, RFC 8200, RFC 9293 and from what the kernel does (Documentation/networking/
segmentation-offloads.rst, tcp_gso_segment, __udp_gso_segment, inet_gso_segment), and not from the code under test.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

import reference

TCP, UDP = 6, 17
FIN, SYN, RST, PSH, ACK, URG, ECE, CWR = (1 << bit for bit in range(8))
GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4 = 1, 4, 5
NEEDS_CSUM = 1
HOP_BY_HOP, DESTINATION_OPTIONS = 0, 60
PAD_8 = bytes([1, 4, 0, 0, 0, 0])
"""The body of an extension header of 8 bytes: one PadN option."""
PAD_16 = bytes([1, 12]) + bytes(12)


def word(number: int) -> bytes:
    return number.to_bytes(2, "big")


def number(octets: bytes) -> int:
    return int.from_bytes(octets, "big")


def pseudo_header(packet: bytes, protocol: int, length: int) -> bytes:
    if packet[0] >> 4 == 4:
        source, destination = packet[12:16], packet[16:20]
    else:
        source, destination = packet[8:24], packet[24:40]
    return reference.pseudo_header(str(ip_address(source)), str(ip_address(destination)), protocol, length)


def complete(packet: bytes, start: int, protocol: int) -> bytes:
    """`packet` with the right transport checksum."""
    field = start + {TCP: 16, UDP: 6}[protocol]
    bare = packet[:field] + b"\0\0" + packet[field + 2 :]
    transport = bare[start:]
    value = reference.internet_checksum(pseudo_header(packet, protocol, len(transport)) + transport)
    if value == 0 and protocol == UDP:
        value = 0xFFFF
    return bare[:field] + word(value) + bare[field + 2 :]


def partial(packet: bytes, start: int, protocol: int) -> bytes:
    """`packet` with its transport checksum as CHECKSUM_PARTIAL leaves it: the pseudo-header's sum, not complemented."""
    field = start + {TCP: 16, UDP: 6}[protocol]
    value = 0xFFFF - reference.internet_checksum(pseudo_header(packet, protocol, len(packet) - start))
    return packet[:field] + word(value) + packet[field + 2 :]


def with_ipv4_checksum(packet: bytes) -> bytes:
    length = (packet[0] & 15) * 4
    bare = packet[:10] + b"\0\0" + packet[12:length]
    return bare[:10] + word(reference.internet_checksum(bare)) + bare[12:] + packet[length:]


def packet(
    version: int = 4,
    protocol: int = TCP,
    payload: bytes = b"payload",
    *,
    source: str | None = None,
    destination: str | None = None,
    sport: int = 1000,
    dport: int = 2000,
    seq: int = 1000,
    ack: int = 9,
    flags: int = ACK,
    window: int = 500,
    options: bytes = b"",
    urgent: int = 0,
    reserved: int = 0,
    tos: int = 0,
    ttl: int = 64,
    fragment: int = 0x4000,
    identification: int = 0x1234,
    ip_options: bytes = b"",
    flow_label: int = 0,
    extensions: Sequence[tuple[int, bytes]] = (),
    checksum: str = "complete",
) -> bytes:
    """A packet; `extensions` are (type, body) of IPv6; `checksum` is complete, partial or zero."""
    if protocol == TCP:
        transport = struct.pack(
            ">HHIIBBHHH", sport, dport, seq, ack, (5 + len(options) // 4) << 4 | reserved, flags, window, 0, urgent
        )
        transport += options + payload
    else:
        transport = struct.pack(">HHHH", sport, dport, 8 + len(payload), 0) + payload
    if version == 4:
        start = 20 + len(ip_options)
        header = struct.pack(
            ">BBHHHBBH", 0x40 | start // 4, tos, start + len(transport), identification, fragment, ttl, protocol, 0
        )
        addresses = ip_address(source or "10.1.1.5").packed + ip_address(destination or "10.1.2.5").packed
        whole = with_ipv4_checksum(header + addresses + ip_options + transport)
    else:
        chain = b""
        kinds = [kind for kind, _ in extensions] + [protocol]
        for (_, body), following in zip(extensions, kinds[1:], strict=True):
            chain += bytes([following, (2 + len(body)) // 8 - 1]) + body
        start = 40 + len(chain)
        header = struct.pack(">IHBB", 6 << 28 | tos << 20 | flow_label, len(chain) + len(transport), kinds[0], ttl)
        addresses = ip_address(source or "fd00:0:0:1::5").packed + ip_address(destination or "fd00:0:0:2::5").packed
        whole = header + addresses + chain + transport
    if checksum == "zero":
        return whole
    return (complete if checksum == "complete" else partial)(whole, start, protocol)


@dataclass(frozen=True)
class Shape:
    """A kind of packet to be segmented; `make` builds one."""

    version: int
    protocol: int
    ip_options: bytes = b""
    extensions: tuple[tuple[int, bytes], ...] = ()
    options: bytes = b""

    @property
    def start(self) -> int:
        if self.version == 4:
            return 20 + len(self.ip_options)
        return 40 + sum(2 + len(body) for _, body in self.extensions)

    @property
    def header_length(self) -> int:
        return self.start + (20 + len(self.options) if self.protocol == TCP else 8)

    @property
    def gso_type(self) -> int:
        if self.protocol == UDP:
            return GSO_UDP_L4
        return GSO_TCPV4 if self.version == 4 else GSO_TCPV6

    def make(self, payload: bytes, **fields) -> bytes:
        fields = {"checksum": "partial"} | fields
        return packet(
            self.version,
            self.protocol,
            payload,
            ip_options=self.ip_options,
            extensions=self.extensions,
            options=self.options,
            **fields,
        )


TIMESTAMPS = bytes.fromhex("0101080a0000000100000002")
SHAPES = {
    "tcp4": Shape(4, TCP),
    "tcp4 timestamps": Shape(4, TCP, options=TIMESTAMPS),
    "tcp4 all options": Shape(4, TCP, ip_options=b"\x01" * 40, options=b"\x01" * 40),
    "tcp4 IP options": Shape(4, TCP, ip_options=b"\x01" * 8),
    "udp4": Shape(4, UDP),
    "udp4 IP options": Shape(4, UDP, ip_options=b"\x01" * 4),
    "tcp6": Shape(6, TCP),
    "tcp6 timestamps": Shape(6, TCP, options=TIMESTAMPS),
    "tcp6 hop-by-hop": Shape(6, TCP, extensions=((HOP_BY_HOP, PAD_8),)),
    "tcp6 hop-by-hop, destination": Shape(6, TCP, extensions=((HOP_BY_HOP, PAD_8), (DESTINATION_OPTIONS, PAD_16))),
    "udp6": Shape(6, UDP),
    "udp6 destination": Shape(6, UDP, extensions=((DESTINATION_OPTIONS, PAD_16),)),
}


def body(length: int) -> bytes:
    """Payload in which no place looks like another."""
    return b"".join(word(7919 * i & 0xFFFF) for i in range(length // 2 + 1))[:length]


def segments(superpacket: bytes, gso_type: int, size: int, start: int) -> list[bytes]:
    """The packets on the wire. All headers stand before the payload, which is shared out `size` bytes at a time."""
    protocol = UDP if gso_type == GSO_UDP_L4 else TCP
    header_length = start + (8 if protocol == UDP else (superpacket[start + 12] >> 4) * 4)
    headers, payload = superpacket[:header_length], superpacket[header_length:]
    shares = [payload[i : i + size] for i in range(0, len(payload), size)] or [b""]
    out = []
    for index, share in enumerate(shares):
        ip, transport = bytearray(headers[:start]), bytearray(headers[start:])
        if protocol == UDP:
            transport[4:6] = word(8 + len(share))
        else:
            transport[4:8] = ((number(transport[4:8]) + index * size) % 2**32).to_bytes(4, "big")
            if index + 1 < len(shares):
                transport[13] &= 0xFF - FIN - PSH
            if index > 0:
                transport[13] &= 0xFF - CWR
        length = len(headers) + len(share)
        if ip[0] >> 4 == 4:
            ip[2:4] = word(length)
            ip[4:6] = word((number(ip[4:6]) + index) % 2**16)
            ip = bytearray(with_ipv4_checksum(bytes(ip)))
        else:
            ip[4:6] = word(length - 40)
        out.append(complete(bytes(ip + transport) + share, start, protocol))
    return out


def join(packets: Sequence[bytes]) -> tuple[bytes, tuple[int, int, int, int, int, int]]:
    """The superpacket of `packets`, and the fields of its virtio-net header; the packets are known to fit together."""
    first = packets[0]
    version = first[0] >> 4
    start = 20 if version == 4 else 40
    protocol = first[9] if version == 4 else first[6]
    header_length = start + (8 if protocol == UDP else (first[start + 12] >> 4) * 4)
    whole = bytearray(first[:header_length] + b"".join(packet[header_length:] for packet in packets))
    if protocol == UDP:
        whole[start + 4 : start + 6] = word(len(whole) - start)
    else:
        whole[start + 13] |= packets[-1][start + 13] & PSH
    if version == 4:
        whole[2:4] = word(len(whole))
        whole = bytearray(with_ipv4_checksum(bytes(whole)))
    else:
        whole[4:6] = word(len(whole) - 40)
    gso_type = GSO_UDP_L4 if protocol == UDP else GSO_TCPV4 if version == 4 else GSO_TCPV6
    size = len(first) - header_length
    vnet = (NEEDS_CSUM, gso_type, header_length, size, start, 6 if protocol == UDP else 16)
    return partial(bytes(whole), start, protocol), vnet


def vxlan_header(vni: int, destination: bytes, source: bytes, version: int) -> bytes:
    """RFC 7348 section 5, and the inner Ethernet header."""
    ethertype = word(0x0800 if version == 4 else 0x86DD)
    return b"\x08\0\0\0" + vni.to_bytes(3, "big") + b"\0" + destination + source + ethertype


def one_hop_less(packet: bytes) -> bytes:
    if packet[0] >> 4 == 6:
        return packet[:7] + bytes([packet[7] - 1]) + packet[8:]
    return with_ipv4_checksum(packet[:8] + bytes([packet[8] - 1]) + packet[9:])


@dataclass(frozen=True)
class Datagram:
    """One datagram for the underlay: its row and lane, the packet that it came from, and its bytes."""

    row: int
    lane: int
    packet: int
    octets: bytes


def trains(datagrams: Sequence[Datagram], most: int) -> list[list[Datagram]]:
    """What UDP_SEGMENT can send at once: one endpoint, one socket, all of the first one's size but a shorter last one."""
    out: list[list[Datagram]] = []
    for datagram in datagrams:
        if out:
            train = out[-1]
            size = len(train[0].octets)
            total = sum(len(other.octets) for other in train) + len(datagram.octets)
            fits = (
                (train[0].row, train[0].lane) == (datagram.row, datagram.lane)
                and all(len(other.octets) == size for other in train)
                and len(datagram.octets) <= size
                and len(train) < most
                and total <= 65507
            )
            if fits:
                train.append(datagram)
                continue
        out.append([datagram])
    return out


def stated_length(packet: bytes) -> int | None:
    """How long the IP packet says it is, None if it does not say."""
    if len(packet) >= 20 and packet[0] >> 4 == 4:
        return number(packet[2:4])
    if len(packet) >= 40 and packet[0] >> 4 == 6:
        return 40 + number(packet[4:6])
    return None


def datagrams(buffer: bytes, stride: int, tunnel: int) -> Iterator[tuple[bytes, int]]:
    """The datagrams in one received buffer, each with the segment size of what is inside (0: none)."""
    if stride <= 0 or stride >= len(buffer):
        yield buffer, 0
    elif stated_length(buffer[tunnel:]) == stride - tunnel:
        for at in range(0, len(buffer), stride):
            yield buffer[at : at + stride], 0
    else:
        yield buffer, stride
