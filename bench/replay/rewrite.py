"""Make any captured packet fit the overlay: new addresses, with every checksum as right, or as wrong, as it was.

Theory of operation. The source goes to a host in the sending node's subnet, the destination to a host in a peer's. Where an
address goes depends on nothing but the address, its role and the seed, so that a capture of any length needs no table, and
a host is the same host throughout. Which peer is a keyed hash of the whole address. The host number in the subnet is the
address's own low bits, turned by a keyed hash of its high bits: hosts that shared a subnet stay apart, instead of meeting
by chance as they would if the whole number were hashed.

When two addresses meet. Let n be the hosts that a subnet has (two less than its size, as the first and the last address are
given to nobody), and p the number of peers. Two hosts of one original subnet that is no larger than the new one never meet.
Any other two meet with odds of 1 in n as sources, 1 in p·n as destinations; so does whatever in its own subnet would be the
first or the last address and may be a host in a larger one. Two flows become one only if sources and destinations meet, and
protocol and ports agree anyway: 1 in p·n² for two unrelated pairs, which for p = 2 and /24 is 1 in 129 032.

Checksums are updated, not computed (RFC 1624, equation 3): of IPv4 headers, and of TCP, UDP, UDP-Lite, DCCP and ICMPv6,
which cover the addresses by their pseudo-header. In one's complement arithmetic, integers modulo 65 535, a header's sum
moves by the difference of the addresses, and so does the checksum; whoever was valid stays so. What is computed once for a
pair of addresses (the new pair and the differences) is remembered for `_PAIRS` pairs and forgotten all at once.

Left as it is: TTL and everything else in the packet, including the packets that ICMP errors quote and what tunnels carry;
a packet whose header is not there in full, or of a family that the overlay lacks.
"""

import struct
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv4Network, IPv6Network
from typing import Final, TypeAlias

from encap.fields import (
    IPV4_CHECKSUM,
    IPV4_FRAGMENT_OFFSET,
    IPV4_HEADER_LENGTH,
    IPV6_HEADER_LENGTH,
    IPV6_SOURCE,
    PROTOCOL_ICMPV6,
    PROTOCOL_TCP,
    PROTOCOL_UDP,
    TCP_CHECKSUM,
    UDP_CHECKSUM,
    Octets,
    WritableOctets,
)

Network: TypeAlias = IPv4Network | IPv6Network

_PAIRS = 1 << 15
"""Address pairs remembered, about 400 bytes each."""

_ADDRESSES = 1 << 13
"""Addresses remembered in each role, for the one that meets many others."""

_IPV4 = struct.Struct("!B5xHxBH8s")
"""Of an IPv4 header: version and header length, fragment word, protocol, checksum, both addresses."""

_IPV4_NEW = struct.Struct("!H8s")
"""The checksum and the addresses behind it."""

_IPV6 = struct.Struct("!6xBx32s")
"""Of an IPv6 header: next header, both addresses."""

_IPV6_NEW = struct.Struct("!32s")
_WORD = struct.Struct("!H")

_PROTOCOL_DCCP = 33
_PROTOCOL_UDP_LITE = 136

_CHECKSUM_FIELDS: Final = {
    PROTOCOL_TCP: TCP_CHECKSUM,
    PROTOCOL_UDP: UDP_CHECKSUM,
    _PROTOCOL_DCCP: 6,
    _PROTOCOL_UDP_LITE: 6,
}
"""Where the transport header's checksum is (RFC 9293 3.1, RFC 768, RFC 4340 5.1, RFC 3828 3.1)."""

_CHECKSUM_FIELDS_6: Final = _CHECKSUM_FIELDS | {PROTOCOL_ICMPV6: 2}
"""ICMP's checksum covers a pseudo-header over IPv6 only (RFC 4443 2.3)."""

_HOP_BY_HOP, _ROUTING, _FRAGMENT, _AUTHENTICATION, _DESTINATION_OPTIONS = 0, 43, 44, 51, 60
_EXTENSIONS: Final = frozenset((_HOP_BY_HOP, _ROUTING, _FRAGMENT, _AUTHENTICATION, _DESTINATION_OPTIONS))
_NO_TRANSPORT = -1

_END_OF_OPTIONS, _NO_OPERATION = 0, 1
_LOOSE_SOURCE_ROUTE, _STRICT_SOURCE_ROUTE = 131, 137

_ADDRESS_BYTES = {4: 4, 6: 16}


class Rewriter:
    """Rewrites packets in place; both lists may hold networks of both families.

    A family that is in neither list is not touched. With `keep_multicast` a destination that is multicast, or IPv4's
    255.255.255.255, stays as it is, for the path to refuse; otherwise it becomes a host as any other. Raises ValueError for
    a family with senders but no receivers, or the other way round.
    """

    def __init__(
        self,
        source_subnets: Iterable[Network],
        destination_subnets: Iterable[Network],
        seed: int,
        *,
        keep_multicast: bool = False,
    ) -> None:
        sources, destinations = list(source_subnets), list(destination_subnets)
        self.versions: frozenset[int] = frozenset(network.version for network in sources)
        """The families that are rewritten, 4 and 6."""
        if self.versions != {network.version for network in destinations}:
            raise ValueError("source and destination subnets are of different families")
        key = blake2b(str(seed).encode()).digest()
        self._sources = {version: _Hosts(sources, version, key, b"source") for version in self.versions}
        self._destinations = {version: _Hosts(destinations, version, key, b"destination") for version in self.versions}
        self._keep_multicast = keep_multicast
        self._pairs: dict[bytes, tuple[bytes, int, int]] = {}

    def rewrite(self, packet: WritableOctets, at: int, length: int) -> None:
        """Give packet[at:at + length] its new addresses; nothing outside of it is read or written."""
        if length < IPV4_HEADER_LENGTH:
            return
        version = packet[at] >> 4
        if version == 4 and 4 in self.versions:
            self._rewrite4(packet, at, at + length)
        elif version == 6 and 6 in self.versions and length >= IPV6_HEADER_LENGTH:
            self._rewrite6(packet, at, at + length)

    def _rewrite4(self, packet: WritableOctets, at: int, end: int) -> None:
        first, fragment, protocol, checksum, pair = _IPV4.unpack_from(packet, at)
        start = at + (first & 0x0F) * 4
        if start < at + IPV4_HEADER_LENGTH:
            return
        new, difference, source_difference = self._pairs.get(pair) or self._learn(pair)
        _IPV4_NEW.pack_into(packet, at + IPV4_CHECKSUM, _updated(checksum, difference), new)
        if fragment & IPV4_FRAGMENT_OFFSET:
            return  # the transport header went with the first fragment
        place = _CHECKSUM_FIELDS.get(protocol)
        if place is not None and start + place + 2 <= end:
            if start > at + IPV4_HEADER_LENGTH and _is_source_routed(packet, at + IPV4_HEADER_LENGTH, start):
                difference = source_difference
            _update_transport(packet, start + place, protocol, difference)

    def _rewrite6(self, packet: WritableOctets, at: int, end: int) -> None:
        protocol, pair = _IPV6.unpack_from(packet, at)
        new, difference, source_difference = self._pairs.get(pair) or self._learn(pair)
        _IPV6_NEW.pack_into(packet, at + IPV6_SOURCE, new)
        start = at + IPV6_HEADER_LENGTH
        if protocol in _EXTENSIONS:
            protocol, start, arrives = walk_extensions(packet, start, end, protocol)
            if not arrives:
                difference = source_difference
        place = _CHECKSUM_FIELDS_6.get(protocol)
        if place is not None and start + place + 2 <= end:
            _update_transport(packet, start + place, protocol, difference)

    def _learn(self, pair: bytes) -> tuple[bytes, int, int]:
        """The new addresses for the old, by how much sums over both change, and over the source alone."""
        size = len(pair) // 2
        version = 4 if size == _ADDRESS_BYTES[4] else 6
        source, destination = int.from_bytes(pair[:size], "big"), int.from_bytes(pair[size:], "big")
        new_source = self._sources[version].host(source)
        if self._keep_multicast and _is_multicast(pair[size:]):
            new_destination = destination
        else:
            new_destination = self._destinations[version].host(destination)
        # 65 536 is 1 modulo 65 535, so that a number is there what the sum of its 16-bit digits is.
        source_difference = (new_source - source) % 65535
        difference = (source_difference + new_destination - destination) % 65535
        learnt = new_source.to_bytes(size, "big") + new_destination.to_bytes(size, "big"), difference, source_difference
        if len(self._pairs) >= _PAIRS:
            self._pairs.clear()
        self._pairs[pair] = learnt
        return learnt


class _Hosts:
    """Where the addresses of one family go in one role."""

    def __init__(self, networks: Iterable[Network], version: int, key: bytes, role: bytes) -> None:
        self._key = key
        self._role = role
        self._subnets: list[tuple[int, int, int, int]] = []
        self.host = lru_cache(_ADDRESSES)(self._host)
        """The new address of an address."""

        for network in networks:
            if network.version == version:
                host_bits = network.max_prefixlen - network.prefixlen
                # As small as this, nothing can be spared for the network's own and the broadcast address (RFC 3021).
                spared = 1 if host_bits >= 2 else 0
                first = int(network.network_address) + spared
                self._subnets.append((first, host_bits, spared, (1 << host_bits) - 2 * spared))

    def _host(self, address: int) -> int:
        first, host_bits, spared, count = self._subnets[self._hash(b"subnet", address) % len(self._subnets)]
        number = (address & ((1 << host_bits) - 1)) - spared
        if not 0 <= number < count:
            number = self._hash(b"edge", address)
        return first + (number + self._hash(b"turn", address >> host_bits)) % count

    def _hash(self, use: bytes, value: int) -> int:
        told = blake2b(self._role + use + value.to_bytes(16, "big"), digest_size=16, key=self._key)
        return int.from_bytes(told.digest(), "big")


def walk_extensions(packet: Octets, start: int, end: int, protocol: int) -> tuple[int, int, bool]:
    """From the IPv6 extension header `protocol` at `start` to the transport header (RFC 8200 4, RFC 4302 2.2).

    Returns its protocol, where it begins, and whether the packet's destination is the one that its checksum covers: with
    segments left in a routing header that is another (RFC 8200 8.1). The protocol is -1 in a later fragment, and an
    extension header's where that one is cut off. A home address (RFC 6275) is not looked for.
    """
    arrives = True
    while protocol in _EXTENSIONS and start + 8 <= end:
        size = 8 + 8 * packet[start + 1]
        if protocol == _FRAGMENT:
            if (packet[start + 2] << 8 | packet[start + 3]) >> 3:
                return _NO_TRANSPORT, start, arrives
            size = 8
        elif protocol == _AUTHENTICATION:
            size = 8 + 4 * packet[start + 1]
        elif protocol == _ROUTING and packet[start + 3]:
            arrives = False
        protocol = packet[start]
        start += size
    return protocol, start, arrives


def _is_source_routed(packet: Octets, at: int, end: int) -> bool:
    """Whether among the IPv4 options packet[at:end] is a source route that is not used up (RFC 791 3.1).

    The pseudo-header then holds the last address of the route, as with IPv6, and not the packet's destination.
    """
    while at + 2 < end and packet[at] != _END_OF_OPTIONS:
        if packet[at] == _NO_OPERATION:
            at += 1
            continue
        size = packet[at + 1]
        if packet[at] == _LOOSE_SOURCE_ROUTE or packet[at] == _STRICT_SOURCE_ROUTE:
            return packet[at + 2] <= size
        at += max(size, 2)
    return False


def _updated(checksum: int, difference: int) -> int:
    """`checksum` after the sum under it grew by `difference` < 65 535 (RFC 1624, equation 3)."""
    total = (checksum ^ 0xFFFF) + difference
    return ((total & 0xFFFF) + (total >> 16)) ^ 0xFFFF


def _update_transport(packet: WritableOctets, field: int, protocol: int, difference: int) -> None:
    (checksum,) = _WORD.unpack_from(packet, field)
    if protocol == PROTOCOL_UDP or protocol == _PROTOCOL_UDP_LITE:
        if checksum == 0:
            return  # none was computed, and none may be made up (RFC 768)
        _WORD.pack_into(packet, field, _updated(checksum, difference) or 0xFFFF)
    else:
        _WORD.pack_into(packet, field, _updated(checksum, difference))


def _is_multicast(address: bytes) -> bool:
    """Whether nobody owns it alone (RFC 5771, RFC 919, RFC 4291 2.7)."""
    if len(address) == _ADDRESS_BYTES[4]:
        return address[0] >> 4 == 0xE or address == b"\xff\xff\xff\xff"
    return address[0] == 0xFF
