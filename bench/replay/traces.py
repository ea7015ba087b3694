"""Synthetic captures: inner IP packets made from a seed, for replays that need no capture from elsewhere.

Theory of operation: a trace is an endless generator of packets, each with the time since the one before; `generate` takes
as many as are wanted, and `write` puts them into a pcap file (nanoseconds, link type raw IP). All randomness comes from one
generator that is seeded with the trace's name and the seed, and only through its methods whose results Python promises to
keep (`random`, `getrandbits`, `randbytes`), so equal arguments give equal files.

Packets are put together by struct, and checksums from sums of parts: the one's complement sum of 16-bit words is the bytes
as one number modulo 65 535, which Python computes in C. Payloads are windows into one block of text.

Addresses: node N has 10.244.N.0/24 and fd00:10:244:N::/64. Packets go from pods of node 1 to pods of nodes 2 to 41;
answers, where a trace has them, come back. Whole packets have at most `MTU` bytes, what VXLAN leaves of 1500.

In every trace but `hostile` all packets are valid. `hostile` goes round in `HOSTILE`, whose kinds are named by what is
wrong with them or odd about them; what is not the point of a kind is right in it.
"""

import struct
from base64 import b64encode
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

from encap.fields import (
    IPV4_CHECKSUM,
    IPV4_DONT_FRAGMENT,
    IPV4_FRAGMENT,
    IPV4_HEADER_LENGTH,
    IPV4_MORE_FRAGMENTS,
    IPV4_SOURCE,
    IPV4_TOTAL_LENGTH,
    IPV6_HEADER_LENGTH,
    IPV6_PAYLOAD_LENGTH,
    PROTOCOL_ICMP,
    PROTOCOL_ICMPV6,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    TCP_CHECKSUM,
    TCP_DATA_OFFSET,
    TCP_HEADER_LENGTH,
    UDP_CHECKSUM,
    UDP_HEADER_LENGTH,
    UDP_LENGTH,
)

MTU = 1450
BEGINNING_NS = 1_700_000_000_000_000_000
"""The time of the first packet, roughly."""

_Packets = Iterator[tuple[int, bytes]]

_PEERS = 40
_PODS = 250
_FRAME_OVERHEAD = 18  # Ethernet header and frame check sequence: what a frame's size counts beside the packet
_SMALL = 64 - _FRAME_OVERHEAD
_MEDIUM = 570 - _FRAME_OVERHEAD
_SERVICE = 20001  # the first of 8 ports that stand for no protocol
_FLOWS = 100_000
_STRIDE = 61_803  # has no factor in common with _FLOWS: steps of this width come to each flow once in _FLOWS packets
_TIMESTAMPS_LENGTH = 12  # the TCP option with its padding (RFC 7323 appendix A)
_MSS = MTU - IPV4_HEADER_LENGTH - TCP_HEADER_LENGTH - _TIMESTAMPS_LENGTH
_ACK, _PSH = 0x10, 0x08

_HOP_BY_HOP, _ROUTING, _FRAGMENT, _NO_NEXT, _DESTINATION_OPTIONS = 0, 43, 44, 59, 60
_MORE = IPV4_MORE_FRAGMENTS

_IPV4 = struct.Struct("!BBHHHBBH8s")
_IPV6 = struct.Struct("!IHBB32s")
_UDP = struct.Struct("!HHHH")
_TCP = struct.Struct("!HHIIBBHHH")
_ECHO = struct.Struct("!BBHHH")
_TIMESTAMPS = struct.Struct("!BBBBII")

_PCAP_HEADER = struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 262_144, 101)
_PCAP_PACKET = struct.Struct("<IIII")
_WRITTEN_AT_ONCE = 1 << 20


class Trace(NamedTuple):
    """A kind of traffic."""

    meaning: str
    """In a phrase, for people."""
    packets: Callable[[Random], _Packets]
    """Endless: nanoseconds since the packet before, and the packet."""


def generate(name: str, seed: int, packets: int) -> Iterator[tuple[int, bytes]]:
    """The first `packets` of trace `name`: time in nanoseconds since 1970, never falling, and the packet.

    Raises ValueError for a name that is not in `TRACES`.
    """
    if name not in TRACES:
        raise ValueError(f"no trace is called {name!r}; there are {', '.join(TRACES)}")
    return _timed(TRACES[name].packets(Random(f"{name} {seed}")), packets)


def write(path: Path | str, name: str, seed: int, packets: int) -> None:
    """Write `generate`'s packets into a pcap file. Raises ValueError as it does, and OSError."""
    trace = generate(name, seed, packets)
    with open(path, "wb") as file:
        waiting = bytearray(_PCAP_HEADER)
        for time_ns, packet in trace:
            seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
            waiting += _PCAP_PACKET.pack(seconds, nanoseconds, len(packet), len(packet))
            waiting += packet
            if len(waiting) >= _WRITTEN_AT_ONCE:
                file.write(waiting)
                waiting.clear()
        file.write(waiting)


def _timed(packets: _Packets, count: int) -> Iterator[tuple[int, bytes]]:
    time_ns = BEGINNING_NS
    for gap_ns, packet in islice(packets, count):
        time_ns += gap_ns
        yield time_ns, packet


# --- making packets


def _sum(data: bytes) -> int:
    """The one's complement sum of `data` as 16-bit words, an odd last byte being a high half (RFC 1071)."""
    return (int.from_bytes(data, "big") << (8 * (len(data) & 1))) % 65535


def _checksum(total: int) -> int:
    """The complement of a sum that is not of zeros only, so that 0 modulo 65 535 means 0xFFFF."""
    return 65535 - (total % 65535 or 65535)


def _put(data: bytes, at: int, value: int) -> bytes:
    """`data` with the 16-bit field at `at` changed."""
    return data[:at] + value.to_bytes(2, "big") + data[at + 2 :]


def _pod(version: int, node: int, pod: int) -> bytes:
    if version == 4:
        return bytes((10, 244, node, pod))
    return struct.pack("!HHHHQ", 0xFD00, 0x10, 0x244, node, pod)


def _pair(version: int, pod: int = 2, peer: int = 2, peer_pod: int = 2) -> bytes:
    """Source and destination as they stand in a header. Their length tells the version."""
    return _pod(version, 1, pod) + _pod(version, peer, peer_pod)


def _back(pair: bytes) -> bytes:
    half = len(pair) // 2
    return pair[half:] + pair[:half]


def _ip(
    pair: bytes, protocol: int, body: bytes, *, identification: int = 0, fragment: int = IPV4_DONT_FRAGMENT,
    ttl: int = 64, options: bytes = b"",
) -> bytes:  # fmt: skip
    """An IP packet. `identification`, `fragment` and `options` are for IPv4."""
    if len(pair) == 32:
        return _IPV6.pack(6 << 28, len(body), protocol, ttl, pair) + body
    words = (IPV4_HEADER_LENGTH + len(options)) // 4
    fields = (64 + words, 0, 4 * words + len(body), identification & 0xFFFF, fragment, ttl, protocol)
    total = _sum(_IPV4.pack(*fields, 0, pair) + options)
    return _IPV4.pack(*fields, _checksum(total), pair) + options + body


def _pseudo(pair: bytes, protocol: int, length: int) -> int:
    return _sum(pair) + protocol + length


def _udp(pair: bytes, ports: tuple[int, int], payload: bytes) -> bytes:
    """A UDP header and payload. A checksum of 0 would mean that there is none (RFC 768)."""
    length = UDP_HEADER_LENGTH + len(payload)
    total = _pseudo(pair, PROTOCOL_UDP, length) + sum(ports) + length + _sum(payload)
    return _UDP.pack(*ports, length, _checksum(total) or 0xFFFF) + payload


def _tcp(
    pair: bytes, ports: tuple[int, int], payload: bytes, *, sequence: int = 1, acknowledgment: int = 1, flags: int = _ACK,
    options: bytes = b"", urgent: int = 0,
) -> bytes:  # fmt: skip
    """A TCP header with `options`, a multiple of four bytes, and payload."""
    length = TCP_HEADER_LENGTH + len(options)
    fields = (*ports, sequence & 0xFFFF_FFFF, acknowledgment & 0xFFFF_FFFF, length << 2, flags, 502)
    total = _pseudo(pair, PROTOCOL_TCP, length + len(payload)) + _sum(payload)
    total += _sum(_TCP.pack(*fields, 0, urgent) + options)
    return _TCP.pack(*fields, _checksum(total), urgent) + options + payload


def _echo(pair: bytes, identifier: int, sequence: int, payload: bytes) -> bytes:
    """An ICMP or ICMPv6 echo request; only the latter's checksum covers a pseudo-header."""
    kind, total = 8, 0
    if len(pair) == 32:
        kind, total = 128, _pseudo(pair, PROTOCOL_ICMPV6, _ECHO.size + len(payload))
    total += (kind << 8) + identifier + sequence + _sum(payload)
    return _ECHO.pack(kind, 0, _checksum(total), identifier, sequence) + payload


class _Payloads:
    """Windows into a block of random text: tools take random bytes for all kinds of protocols, and call them malformed."""

    _LENGTH = 1 << 16

    def __init__(self, rng: Random) -> None:
        self._random = rng.random
        self._block = b64encode(rng.randbytes(self._LENGTH // 4 * 3))

    def take(self, length: int) -> bytes:
        start = int(self._random() * (self._LENGTH - length))
        return self._block[start : start + length]


class _Flow(NamedTuple):
    pair: bytes
    ports: tuple[int, int]
    is_tcp: bool

    def packet(self, number: int, length: int, payloads: _Payloads) -> bytes:
        """Packet `number` of the flow, `length` bytes long."""
        header = IPV4_HEADER_LENGTH if len(self.pair) == 8 else IPV6_HEADER_LENGTH
        if self.is_tcp:
            payload = payloads.take(length - header - TCP_HEADER_LENGTH)
            body = _tcp(self.pair, self.ports, payload, sequence=number * 1460, flags=_ACK | _PSH)
            return _ip(self.pair, PROTOCOL_TCP, body, identification=number)
        body = _udp(self.pair, self.ports, payloads.take(length - header - UDP_HEADER_LENGTH))
        return _ip(self.pair, PROTOCOL_UDP, body, identification=number)


def _flow(number: int, version: int = 4, *, is_tcp: bool) -> _Flow:
    """Flow `number` of at least 100 000, each with other addresses or ports."""
    pair = _pair(version, 2 + number % _PODS, 2 + number // _PODS % _PEERS, 2 + number * 7 % _PODS)
    return _Flow(pair, (32768 + number // (_PODS * _PEERS), _SERVICE + number % 8), is_tcp)


# --- traffic


def _gap(rng: Random, mean_ns: int) -> int:
    return 1 + int(rng.random() * 2 * mean_ns)


def _imix(rng: Random) -> _Packets:
    """Each dozen has 7 small, 4 medium and 1 large packet, in an order of its own."""
    payloads = _Payloads(rng)
    flows = [_flow(number, is_tcp=False) for number in range(256)]
    number = 0
    while True:
        sizes = [_SMALL] * 7 + [_MEDIUM] * 4 + [MTU]
        while sizes:
            number += 1
            size = sizes.pop(int(rng.random() * len(sizes)))
            yield _gap(rng, 2000), flows[rng.getrandbits(8)].packet(number, size, payloads)


def _small(rng: Random) -> _Packets:
    """Packets of 64-byte frames, in 4096 flows."""
    payloads = _Payloads(rng)
    flows = [_flow(number, is_tcp=number % 4 == 0) for number in range(4096)]
    number = 0
    while True:
        number += 1
        yield _gap(rng, 500), flows[rng.getrandbits(12)].packet(number, _SMALL, payloads)


def _bulk(rng: Random) -> _Packets:
    """8 TCP connections in bursts of full segments, then an acknowledgment for every other segment coming back."""
    payloads = _Payloads(rng)
    flows = [_flow(number, is_tcp=True) for number in range(8)]
    sent = [rng.getrandbits(32) for _ in flows]
    numbers = [rng.getrandbits(16) for _ in flows]
    clock = rng.getrandbits(31)
    while True:
        which = rng.getrandbits(3)
        clock += 1
        ends = []
        for left in reversed(range(2 + int(rng.random() * 43))):
            payload = payloads.take(_MSS if left or rng.random() < 0.8 else 1 + int(rng.random() * _MSS))
            yield 200, _segment(flows[which], numbers[which], sent[which], clock, payload, is_last=left == 0)
            sent[which] += len(payload)
            numbers[which] += 1
            ends.append(sent[which])
        for end in ends[-1::-2][::-1]:
            yield _gap(rng, 400), _acknowledgment(flows[which], end, numbers[which], clock)


def _segment(flow: _Flow, number: int, sequence: int, clock: int, payload: bytes, *, is_last: bool) -> bytes:
    body = _tcp(
        flow.pair, flow.ports, payload, sequence=sequence, flags=_ACK | (_PSH if is_last else 0), options=_timestamps(clock)
    )
    return _ip(flow.pair, PROTOCOL_TCP, body, identification=number)


def _acknowledgment(flow: _Flow, sequence: int, number: int, clock: int) -> bytes:
    pair = _back(flow.pair)
    body = _tcp(pair, (flow.ports[1], flow.ports[0]), b"", acknowledgment=sequence, options=_timestamps(clock + 5))
    return _ip(pair, PROTOCOL_TCP, body, identification=number)


def _timestamps(clock: int) -> bytes:
    """Two NOPs and the option, as Linux writes it."""
    return _TIMESTAMPS.pack(1, 1, 8, 10, clock & 0xFFFF_FFFF, (clock - 1) & 0xFFFF_FFFF)


def _many_flows(rng: Random) -> _Packets:
    """100 000 flows, each with a packet in every 100 000."""
    payloads = _Payloads(rng)
    sizes = (_SMALL, _SMALL, 120, 300, _MEDIUM, MTU)
    which, number = 0, 0
    while True:
        which = (which + _STRIDE) % _FLOWS
        number += 1
        size = sizes[int(rng.random() * len(sizes))]
        yield _gap(rng, 1000), _flow(which, is_tcp=which % 3 != 0).packet(number, size, payloads)


def _dual(rng: Random) -> _Packets:
    """IPv4 and IPv6: UDP, TCP and echo requests of all sizes."""
    payloads = _Payloads(rng)
    number = 0
    while True:
        number += 1
        version = 4 + 2 * rng.getrandbits(1)
        flow = _flow(rng.getrandbits(9), version, is_tcp=rng.getrandbits(1) == 1)
        if rng.random() < 0.1:
            body = _echo(flow.pair, flow.ports[0], number & 0xFFFF, payloads.take(56))
            packet = _ip(flow.pair, PROTOCOL_ICMP if version == 4 else PROTOCOL_ICMPV6, body, identification=number)
        else:
            packet = flow.packet(number, 64 + int(rng.random() * (MTU - 63)), payloads)
        yield _gap(rng, 2000), packet


def _fragments(rng: Random) -> _Packets:
    """UDP datagrams and echo requests in fragments, every fourth with its last fragment first; whole packets between."""
    payloads = _Payloads(rng)
    number = 0
    while True:
        number += 1
        version = 4 + 2 * rng.getrandbits(1)
        flow = _flow(rng.getrandbits(9), version, is_tcp=False)
        payload = payloads.take(MTU + int(rng.random() * 6000))
        protocol, body = PROTOCOL_UDP, _udp(flow.pair, flow.ports, payload)
        if version == 4 and rng.random() < 0.2:
            protocol, body = PROTOCOL_ICMP, _echo(flow.pair, flow.ports[0], number & 0xFFFF, payload)
        parts = _cut(flow.pair, protocol, body, number)
        if rng.random() < 0.25:
            parts.reverse()
        for part in parts:
            yield 300, part
        yield _gap(rng, 5000), flow.packet(number, _SMALL if version == 4 else 66, payloads)


def _cut(pair: bytes, protocol: int, body: bytes, identification: int) -> list[bytes]:
    """`body` in fragments of at most `MTU` bytes (RFC 791 3.2, RFC 8200 4.5); offsets count 8 bytes."""
    is_ipv4 = len(pair) == 8
    room = (MTU - (IPV4_HEADER_LENGTH if is_ipv4 else IPV6_HEADER_LENGTH + 8)) // 8 * 8
    parts = []
    for at in range(0, len(body), room):
        part, more = body[at : at + room], at + room < len(body)
        if is_ipv4:
            fragment = at // 8 | (_MORE if more else 0)
            parts.append(_ip(pair, protocol, part, identification=identification, fragment=fragment))
        else:
            parts.append(_ip(pair, _FRAGMENT, _fragment_header(protocol, at, identification, more=more) + part))
    return parts


def _fragment_header(protocol: int, at: int, identification: int, *, more: bool) -> bytes:
    return struct.pack("!BBHI", protocol, 0, at | more, identification)


# --- hostile


def _hostile(rng: Random) -> _Packets:
    while True:
        for make in HOSTILE.values():
            yield _gap(rng, 2000), make(rng)


def _ports(rng: Random) -> tuple[int, int]:
    return 1024 + rng.getrandbits(15), 1024 + rng.getrandbits(15)


def _u(rng: Random, version: int = 4, *, pair: bytes = b"", size: int = 32, ttl: int = 64) -> bytes:
    """A valid UDP packet, for something to be done to it."""
    pair = pair or _pair(version)
    return _ip(pair, PROTOCOL_UDP, _udp(pair, _ports(rng), rng.randbytes(size)), ttl=ttl)


def _optional(rng: Random, options: bytes, peer: int = 2) -> bytes:
    """A UDP packet with IPv4 `options`, which in the end goes to node `peer`: that is what its checksum covers."""
    return _ip(_pair(4), PROTOCOL_UDP, _udp(_pair(4, peer=peer), _ports(rng), rng.randbytes(32)), options=options)


def _t(rng: Random, version: int = 4, *, size: int = 32, flags: int = _ACK, urgent: int = 0) -> bytes:
    """A valid TCP packet, likewise."""
    pair = _pair(version)
    return _ip(pair, PROTOCOL_TCP, _tcp(pair, _ports(rng), rng.randbytes(size), flags=flags, urgent=urgent))


def _headed(packet: bytes) -> bytes:
    """An IPv4 packet with its header checksum made right for what was changed in its first 20 bytes."""
    return _put(packet, IPV4_CHECKSUM, _checksum(_sum(packet[:IPV4_CHECKSUM] + packet[IPV4_SOURCE:IPV4_HEADER_LENGTH])))


def _field(packet: bytes, at: int, value: int) -> bytes:
    """An IPv4 packet with a 16-bit field of its header changed."""
    return _headed(_put(packet, at, value))


def _first(packet: bytes, value: int) -> bytes:
    """A packet with another first byte: version, and header length of IPv4."""
    return bytes((value,)) + packet[1:]


def _wrong(packet: bytes, at: int) -> bytes:
    """A packet with a checksum at `at` that is wrong, and not 0 either, which UDP would take for none."""
    return _put(packet, at, int.from_bytes(packet[at : at + 2], "big") ^ 0x0110 or 0x0111)


def _from(rng: Random, source: bytes, destination: bytes = b"") -> bytes:
    version = 4 if len(source) == 4 else 6
    return _u(rng, pair=source + (destination or _pod(version, 2, 2)))


def _to(rng: Random, destination: bytes) -> bytes:
    return _from(rng, _pod(4 if len(destination) == 4 else 6, 1, 2), destination)


def _part(rng: Random, fragment: int, size: int) -> bytes:
    """An IPv4 fragment of random bytes."""
    return _ip(_pair(4), PROTOCOL_UDP, rng.randbytes(size), identification=rng.getrandbits(16), fragment=fragment)


def _chain(rng: Random, *headers: tuple[int, bytes], length: int | None = None, peer: int = 2) -> bytes:
    """A UDP packet behind IPv6 extension `headers`, each its type and what follows its next-header byte.

    `length` cuts what is behind the IPv6 header; `peer` as for `_optional`.
    """
    types = [kind for kind, _ in headers] + [PROTOCOL_UDP]
    extensions = b"".join(bytes((following,)) + rest for (_, rest), following in zip(headers, types[1:], strict=True))
    packet = _ip(_pair(6), types[0], extensions + _udp(_pair(6, peer=peer), _ports(rng), rng.randbytes(32)))
    if length is None:
        return packet
    return _put(packet[: IPV6_HEADER_LENGTH + length], IPV6_PAYLOAD_LENGTH, length)


def _unreachable(rng: Random) -> bytes:
    """An ICMP error about a packet of which less is quoted than RFC 792 asks for."""
    body = struct.pack("!BBHI", 3, 1, 0, 0) + _u(rng)[: IPV4_HEADER_LENGTH + 3]
    return _ip(_pair(4), PROTOCOL_ICMP, _put(body, 2, _checksum(_sum(body))))


_PADDED = bytes((0, 1, 4, 0, 0, 0, 0))  # the rest of an option header of 8 bytes: PadN fills it (RFC 8200 4.2)
_ROUTE_TYPE_0 = bytes((2, 0, 1, 0, 0, 0, 0)) + _pod(6, 3, 2)  # RFC 5095 forbids it

HOSTILE: dict[str, Callable[[Random], bytes]] = {
    "empty": lambda _: b"",
    "one byte": lambda _: b"\x45",
    "IPv4 header cut": lambda rng: _u(rng)[: 1 + int(rng.random() * 19)],
    "IPv6 header cut": lambda rng: _u(rng, 6)[: 1 + int(rng.random() * 39)],
    "version 0": lambda rng: _first(_u(rng), 0x05),
    "version 5": lambda rng: _first(_u(rng), 0x55),
    "version 15": lambda rng: _first(_u(rng), 0xF5),
    "IPv4 header length 0": lambda rng: _headed(_first(_u(rng), 0x40)),
    "IPv4 header length 16": lambda rng: _headed(_first(_u(rng), 0x44)),
    "IPv4 header longer than the packet": lambda rng: _headed(_first(_u(rng, size=4), 0x4F)),
    "IPv4 total length 0": lambda rng: _field(_u(rng), IPV4_TOTAL_LENGTH, 0),
    "IPv4 total length below the header's": lambda rng: _field(_u(rng), IPV4_TOTAL_LENGTH, 19),
    "IPv4 total length too long": lambda rng: _field(_u(rng), IPV4_TOTAL_LENGTH, 61 + rng.getrandbits(15)),
    "IPv4 total length too short": lambda rng: _field(_u(rng), IPV4_TOTAL_LENGTH, 59 - rng.getrandbits(4)),
    "IPv4 header alone": lambda _: _ip(_pair(4), PROTOCOL_UDP, b""),
    "IPv6 payload length too long": lambda rng: _put(_u(rng, 6), IPV6_PAYLOAD_LENGTH, 41 + rng.getrandbits(15)),
    "IPv6 payload length too short": lambda rng: _put(_u(rng, 6), IPV6_PAYLOAD_LENGTH, 39 - rng.getrandbits(4)),
    "IPv6 payload length 0": lambda rng: _put(_u(rng, 6), IPV6_PAYLOAD_LENGTH, 0),
    "IPv6 header alone": lambda _: _ip(_pair(6), _NO_NEXT, b""),
    "IPv4 checksum wrong": lambda rng: _wrong(_u(rng), IPV4_CHECKSUM),
    "UDP checksum wrong": lambda rng: _wrong(_u(rng), IPV4_HEADER_LENGTH + UDP_CHECKSUM),
    "TCP checksum wrong": lambda rng: _wrong(_t(rng), IPV4_HEADER_LENGTH + TCP_CHECKSUM),
    "IPv6 UDP checksum wrong": lambda rng: _wrong(_u(rng, 6), IPV6_HEADER_LENGTH + UDP_CHECKSUM),
    "IPv6 TCP checksum wrong": lambda rng: _wrong(_t(rng, 6), IPV6_HEADER_LENGTH + TCP_CHECKSUM),
    "UDP checksum 0": lambda rng: _put(_u(rng), IPV4_HEADER_LENGTH + UDP_CHECKSUM, 0),
    "IPv6 UDP checksum 0": lambda rng: _put(_u(rng, 6), IPV6_HEADER_LENGTH + UDP_CHECKSUM, 0),
    "UDP length 0": lambda rng: _put(_u(rng), IPV4_HEADER_LENGTH + UDP_LENGTH, 0),
    "UDP length 7": lambda rng: _put(_u(rng), IPV4_HEADER_LENGTH + UDP_LENGTH, 7),
    "UDP length too long": lambda rng: _put(_u(rng), IPV4_HEADER_LENGTH + UDP_LENGTH, 0xFFFF),
    "UDP length too short": lambda rng: _put(_u(rng), IPV4_HEADER_LENGTH + UDP_LENGTH, 20),
    "UDP header cut": lambda rng: _ip(_pair(4), PROTOCOL_UDP, rng.randbytes(1 + int(rng.random() * 7))),
    "UDP without payload": lambda rng: _u(rng, size=0),
    "TCP header cut": lambda rng: _ip(_pair(4), PROTOCOL_TCP, rng.randbytes(1 + int(rng.random() * 19))),
    "TCP header length 0": lambda rng: _put(_t(rng), IPV4_HEADER_LENGTH + TCP_DATA_OFFSET, 0x0010),
    "TCP header longer than the packet": lambda rng: _put(_t(rng, size=8), IPV4_HEADER_LENGTH + TCP_DATA_OFFSET, 0xF010),
    "TCP with no flags": lambda rng: _t(rng, flags=0),
    "TCP with all flags": lambda rng: _t(rng, flags=0xFF, urgent=7),
    "TTL 0": lambda rng: _u(rng, ttl=0),
    "TTL 1": lambda rng: _u(rng, ttl=1),
    "hop limit 0": lambda rng: _u(rng, 6, ttl=0),
    "hop limit 1": lambda rng: _u(rng, 6, ttl=1),
    "IPv4 multicast": lambda rng: _to(rng, bytes((224, 0, 0, 251))),
    "IPv4 broadcast": lambda rng: _to(rng, b"\xff" * 4),
    "IPv6 multicast": lambda rng: _to(rng, b"\xff\x02" + bytes(13) + b"\x01"),
    "to 0.0.0.0": lambda rng: _to(rng, bytes(4)),
    "to the loopback": lambda rng: _to(rng, bytes((127, 0, 0, 1))),
    "to IPv6 unspecified": lambda rng: _to(rng, bytes(16)),
    "from 0.0.0.0": lambda rng: _from(rng, bytes(4)),
    "from the loopback": lambda rng: _from(rng, bytes((127, 0, 0, 1))),
    "from IPv4 multicast": lambda rng: _from(rng, bytes((224, 0, 0, 1))),
    "from elsewhere": lambda rng: _from(rng, bytes((198, 51, 100, rng.getrandbits(8)))),
    "from an IPv4-mapped address": lambda rng: _from(rng, bytes(10) + b"\xff\xff" + _pod(4, 1, 2)),
    "from a link-local address": lambda rng: _from(rng, b"\xfe\x80" + bytes(13) + b"\x01"),
    "from its destination": lambda rng: _from(rng, _pod(4, 2, 2)),
    "option: router alert": lambda rng: _optional(rng, bytes((148, 4, 0, 0))),
    "option: record route": lambda rng: _optional(rng, bytes((7, 39, 4)) + bytes(37)),
    "option: source route": lambda rng: _optional(rng, bytes((131, 7, 4)) + _pod(4, 3, 2) + b"\x00", peer=3),
    "option of length 0": lambda rng: _optional(rng, bytes((7, 0, 4, 0))),
    "option longer than the header": lambda rng: _optional(rng, bytes((7, 255, 4, 0))),
    "extension: hop-by-hop": lambda rng: _chain(rng, (_HOP_BY_HOP, _PADDED)),
    "extension: destination options": lambda rng: _chain(rng, (_DESTINATION_OPTIONS, _PADDED)),
    "extension: routing type 0": lambda rng: _chain(rng, (_ROUTING, _ROUTE_TYPE_0), peer=3),
    "extension: atomic fragment": lambda rng: _chain(rng, (_FRAGMENT, _fragment_header(0, 0, 7, more=False)[1:])),
    "extension: 24 of them": lambda rng: _chain(rng, *[(_DESTINATION_OPTIONS, _PADDED)] * 24),
    "extension longer than the packet": lambda rng: _chain(rng, (_DESTINATION_OPTIONS, b"\xff" + _PADDED[1:])),
    "extension cut": lambda rng: _chain(rng, (_DESTINATION_OPTIONS, _PADDED), length=1 + int(rng.random() * 7)),
    "jumbogram": lambda rng: _put(_chain(rng, (_HOP_BY_HOP, bytes((0, 0xC2, 4, 0, 0, 0, 48)))), IPV6_PAYLOAD_LENGTH, 0),
    "fragment: first": lambda rng: _part(rng, _MORE, 64),
    "fragment: tiny first": lambda rng: _part(rng, _MORE, 8),
    "fragment: first not a multiple of 8": lambda rng: _part(rng, _MORE, 13),
    "fragment: overlapping": lambda rng: _part(rng, _MORE | 3, 64),
    "fragment: beyond 65535": lambda rng: _part(rng, 0x1FFF, 64),
    "fragment: DF and MF": lambda rng: _part(rng, IPV4_DONT_FRAGMENT | _MORE, 64),
    "reserved flag": lambda rng: _field(_u(rng), IPV4_FRAGMENT, 0x8000),
    "protocol 255": lambda rng: _ip(_pair(4), 255, rng.randbytes(32)),
    "ICMP error with a cut quote": _unreachable,
    "IPv4 in IPv4": lambda rng: _ip(_pair(4), 4, _u(rng)),
    "65535 bytes": lambda rng: _u(rng, size=65535 - 28),
    "larger than the MTU": lambda rng: _u(rng, size=MTU - 27),
}
"""Kind → a packet of it. The trace has them in this order, again and again."""

TRACES: dict[str, Trace] = {
    "imix": Trace("frames of 64, 570 and 1518 bytes, 7 : 4 : 1, the last cut to the MTU", _imix),
    "small": Trace("frames of 64 bytes in 4096 flows, UDP and some TCP", _small),
    "bulk": Trace("8 TCP connections in bursts of full segments, acknowledgments back", _bulk),
    "flows": Trace("100 000 flows, UDP and TCP, of mixed sizes", _many_flows),
    "dual": Trace("IPv4 and IPv6: UDP, TCP and echo requests of all sizes", _dual),
    "fragments": Trace("IPv4 and IPv6 fragments, some in reverse order, and whole packets between", _fragments),
    "hostile": Trace("headers cut, lengths and checksums wrong, odd addresses, options and fragments", _hostile),
}
