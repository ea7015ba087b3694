"""The immutable table that the hot path reads: longest prefix match and the allow-list of sources, in one object.

Theory of operation: all subnets of one family and prefix length stand in one open-addressing hash table (linear probing,
at most half full); a lookup tries the prefix lengths that occur, longest first, and ends at the first hit. A flannel
network has one length, so a lookup is one multiplication and, on average, one and a half probes, whatever the number of
leases; in the worst case it is one probe sequence for each length that occurs.

IPv4 slots are one 64-bit word, address << 32 | row + 1, so that 100 000 leases take 2 MiB; IPv6 slots are three, high
half, low half, row + 1. A row + 1 of 0 marks an empty slot. A *row* is the number of a route; per-row columns hold what
the loops need: the ready-made tunnel header and the number of the VTEP. VTEP numbers are given to underlay hosts, so
that "does the inner source live behind the outer source" is one comparison.

Control code builds a new Table and swaps the reference; nothing here changes after `build`. When few of many routes change,
`Table.changed` makes the new one from the old one: it copies the blocks, a few megabytes at most, and changes what changes.
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from typing import Literal, TypeAlias

from encap import vxlan
from encap.fields import ETHERTYPE_IPV4, ETHERTYPE_IPV6
from routing.config import Address, Network
from routing.route import FRAMING_VXLAN, Route

Endpoint: TypeAlias = tuple[str, int] | tuple[str, int, int, int]
"""A socket address as the ``socket`` module has it: two parts for IPv4, four for IPv6."""

UNKNOWN_VTEP = -1
NO_ROW = -1

_WORD = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_ROW_MASK = 0xFFFFFFFF
_MISSING_MAC = 1 << 48
_LIMITED_BROADCAST = 0xFFFFFFFF
_MAC_LENGTH = 6
_DESTINATION_MAC = 8  # in a tunnel header, behind the VXLAN header
_SOURCE_MAC = _DESTINATION_MAC + _MAC_LENGTH
_FEW = 8
"""So many changes are made to a copy whatever its size; of more routes, those of a quarter."""


@dataclass(frozen=True)
class Identity:
    """What this node is in the overlay: the rest of what the hot path must know, kept in the same table.

    `vtep_mac` and `vtep_mac_v6` are the own MACs on the IPv4 and the IPv6 underlay (None where there is none, and in
    the ip framing); `port` is the UDP port of all VTEPs. With `check_sources` off, any source is believed.
    """

    framing: str
    subnet: IPv4Network | None
    ipv6_subnet: IPv6Network | None
    port: int
    vni: int = vxlan.DEFAULT_VNI
    vtep_mac: bytes | None = None
    vtep_mac_v6: bytes | None = None
    check_sources: bool = True
    network: IPv4Network | None = None
    """The whole IPv4 overlay, whose broadcast address is nobody's host."""


def _spread(value: int) -> int:
    """35 well-mixed bits of a 64-bit value (Fibonacci hashing, Knuth 6.4)."""
    return ((value * _GOLDEN) & _WORD) >> 29


class Table:
    """See the module. Made by `build`; the attributes are for the loops in ``dataplane`` and read-only."""

    def __init__(self, identity: Identity, routes: Sequence[Route]) -> None:
        self._set_identity(identity)
        self.routes = tuple(routes)
        self.count = len(self.routes)
        self.own_row4 = self.own_row6 = NO_ROW
        hosts = [str(route.address) for route in routes]
        self.origins: dict[str, int] = _number_vteps(routes, hosts)
        """VTEP number by underlay host, in the text form of ipaddress."""
        self._next_vtep = self.count
        self.endpoints: list[Endpoint] = [_endpoint(host, identity.port) for host in hosts]
        """Where the packets of each row go."""
        self.vtep = memoryview(array("i", [self.origins[endpoint[0]] for endpoint in self.endpoints] or [0]))
        self.headers = memoryview(_headers(identity, routes) or bytearray(1))
        subnets = [route.subnet for route in routes]
        self._fill4([(row, subnet) for row, subnet in enumerate(subnets) if isinstance(subnet, IPv4Network)])
        self._fill6([(row, subnet) for row, subnet in enumerate(subnets) if isinstance(subnet, IPv6Network)])

    def _set_identity(self, identity: Identity) -> None:
        self.identity = identity
        self.is_vxlan = identity.framing == FRAMING_VXLAN
        self.header_length = vxlan.HEADER_LENGTH if self.is_vxlan else 0
        self.vni = identity.vni
        self.mac_a = _mac_number(identity.vtep_mac)
        self.mac_b = _mac_number(identity.vtep_mac_v6)
        self.check_sources = identity.check_sources
        self._set_own(identity.subnet, identity.ipv6_subnet)

    def _set_own(self, subnet: IPv4Network | None, ipv6_subnet: IPv6Network | None) -> None:
        network = self.identity.network
        self.broadcast4 = int(network.broadcast_address) if network else _LIMITED_BROADCAST
        self.has4 = subnet is not None
        self.own4 = int(subnet.network_address) if subnet else 0
        self.own4_mask = int(subnet.netmask) if subnet else 0
        own6 = int(ipv6_subnet.network_address) if ipv6_subnet else 0
        own6_mask = int(ipv6_subnet.netmask) if ipv6_subnet else 0
        self.has6 = ipv6_subnet is not None
        self.own6_high, self.own6_low = own6 >> 64, own6 & _WORD
        self.own6_mask_high, self.own6_mask_low = own6_mask >> 64, own6_mask & _WORD

    def _fill4(self, rows: list[tuple[int, IPv4Network]]) -> None:
        masks, bases, sizes, total = _layout(rows)
        self.masks4 = memoryview(array("Q", masks or [0]))
        self.bases4 = memoryview(array("q", bases or [0]))
        self.sizes4 = memoryview(array("q", sizes or [0]))
        self.lengths4 = len(masks)
        self.slots4 = memoryview(array("Q", bytes(8 * max(total, 1))))
        self.used4 = memoryview(array("q", bytes(8 * max(len(masks), 1))))
        index = {mask.bit_count(): i for i, mask in enumerate(masks)}
        for row, subnet in rows:
            self._insert4(index[subnet.prefixlen], int(subnet.network_address), row)

    def _insert4(self, length: int, key: int, row: int) -> None:
        base = self.bases4[length]
        last = self.sizes4[length] - 1
        slot = _spread(key) & last
        while self.slots4[base + slot] and self.slots4[base + slot] >> 32 != key:
            slot = (slot + 1) & last
        self.used4[length] += self.slots4[base + slot] == 0
        self.slots4[base + slot] = (key << 32) | (row + 1)

    def _remove4(self, length: int, key: int) -> None:
        """Empty the slot of `key`, which is there. What stands behind it moves up where it may (Knuth 6.4, algorithm R)."""
        base = self.bases4[length]
        last = self.sizes4[length] - 1
        slot = _spread(key) & last
        while self.slots4[base + slot] >> 32 != key or not self.slots4[base + slot]:
            slot = (slot + 1) & last
        self.used4[length] -= 1
        following = slot
        while True:
            self.slots4[base + slot] = 0
            while True:
                following = (following + 1) & last
                if not self.slots4[base + following]:
                    return
                home = _spread(self.slots4[base + following] >> 32) & last
                if (following - home) & last >= (following - slot) & last:
                    break
            self.slots4[base + slot] = self.slots4[base + following]
            slot = following

    def _fill6(self, rows: list[tuple[int, IPv6Network]]) -> None:
        masks, bases, sizes, total = _layout(rows)
        self.masks6_high = memoryview(array("Q", [mask >> 64 for mask in masks] or [0]))
        self.masks6_low = memoryview(array("Q", [mask & _WORD for mask in masks] or [0]))
        self.bases6 = memoryview(array("q", bases or [0]))
        self.sizes6 = memoryview(array("q", sizes or [0]))
        self.lengths6 = len(masks)
        self.slots6 = memoryview(array("Q", bytes(24 * max(total, 1))))
        self.used6 = memoryview(array("q", bytes(8 * max(len(masks), 1))))
        index = {mask.bit_count(): i for i, mask in enumerate(masks)}
        for row, subnet in rows:
            address = int(subnet.network_address)
            self._insert6(index[subnet.prefixlen], address >> 64, address & _WORD, row)

    def _insert6(self, length: int, high: int, low: int, row: int) -> None:
        base = self.bases6[length]
        last = self.sizes6[length] - 1
        slot = _spread(high ^ _spread(low)) & last
        at = 3 * (base + slot)
        while self.slots6[at + 2] and not (self.slots6[at] == high and self.slots6[at + 1] == low):
            slot = (slot + 1) & last
            at = 3 * (base + slot)
        self.used6[length] += self.slots6[at + 2] == 0
        self.slots6[at] = high
        self.slots6[at + 1] = low
        self.slots6[at + 2] = row + 1

    def _remove6(self, length: int, high: int, low: int) -> None:
        """As `_remove4`."""
        base = self.bases6[length]
        last = self.sizes6[length] - 1
        slot = _spread(high ^ _spread(low)) & last
        at = 3 * (base + slot)
        while not (self.slots6[at] == high and self.slots6[at + 1] == low and self.slots6[at + 2]):
            slot = (slot + 1) & last
            at = 3 * (base + slot)
        self.used6[length] -= 1
        following = slot
        while True:
            at = 3 * (base + slot)
            self.slots6[at] = self.slots6[at + 1] = self.slots6[at + 2] = 0
            while True:
                following = (following + 1) & last
                other = 3 * (base + following)
                if not self.slots6[other + 2]:
                    return
                home = _spread(self.slots6[other] ^ _spread(self.slots6[other + 1])) & last
                if (following - home) & last >= (following - slot) & last:
                    break
            self.slots6[at] = self.slots6[other]
            self.slots6[at + 1] = self.slots6[other + 1]
            self.slots6[at + 2] = self.slots6[other + 2]
            slot = following

    def changed(self, gone: Iterable[Network], new: Iterable[Route]) -> "Table":
        """A table without the routes to `gone`, and with those of `new` instead of the ones to the same subnets.

        It answers as the one that `build` makes of all these routes; rows and VTEPs may have other numbers. Routes that
        stay keep their rows, but for the last ones, which fill the rows of those that went.
        """
        added = {route.subnet: route for route in new}
        leaving = {row for row in map(self.row_of, {*gone}.difference(added)) if row >= 0}
        if not leaving and not added:
            return self
        other: Table = Table.__new__(Table)
        if other._derive(self, leaving, added):
            return other
        skipped = leaving | {self.own_row4, self.own_row6} | {self.row_of(subnet) for subnet in added}
        staying = [route for row, route in enumerate(self.routes) if row not in skipped]
        return Table(self.identity, [*staying, *added.values()])

    def _derive(self, base: "Table", leaving: set[int], added: dict[Network, Route]) -> bool:
        """Become `base` with those changes; False if that needs more room than it has, or is hardly less than all."""
        if base.own_row4 != NO_ROW or base.own_row6 != NO_ROW:
            return False
        if len(leaving) + len(added) > max(base.count // 4, _FEW):
            return False
        self._set_identity(base.identity)
        self._copy_slots(base)
        self.own_row4 = self.own_row6 = NO_ROW
        routes = list(base.routes)
        holes = sorted(leaving, reverse=True)
        touched: dict[int, Route] = {}
        for row in leaving:
            self._forget(routes[row].subnet)
        for subnet, route in added.items():
            row = base.row_of(subnet)
            if row < 0:
                row = holes.pop() if holes else len(routes)
                if not self._has_room_for(subnet):
                    return False
                self._enter(subnet, row)
            if row == len(routes):
                routes.append(route)
            routes[row] = touched[row] = route
        for row in holes:  # from the last on, so that the one that moves is never one that leaves
            moving = routes.pop()
            touched.pop(len(routes), None)
            if row < len(routes):
                routes[row] = touched[row] = moving
                self._enter(moving.subnet, row)
        self._finish(base, routes, touched, leaving)
        return True

    def _copy_slots(self, base: "Table") -> None:
        self._share_layout(base)
        self.slots4, self.slots6 = _copied(base.slots4, "Q"), _copied(base.slots6, "Q")
        self.used4, self.used6 = _copied(base.used4, "q"), _copied(base.used6, "q")

    def _has_room_for(self, subnet: Network) -> bool:
        """Whether one more of its prefix length leaves the slots half empty."""
        length = self._length_of(subnet)
        if length < 0:
            return False
        if isinstance(subnet, IPv4Network):
            return 2 * (self.used4[length] + 1) <= self.sizes4[length]
        return 2 * (self.used6[length] + 1) <= self.sizes6[length]

    def _enter(self, subnet: Network, row: int) -> None:
        """Let `subnet` have `row`."""
        address, length = int(subnet.network_address), self._length_of(subnet)
        if isinstance(subnet, IPv4Network):
            self._insert4(length, address, row)
        else:
            self._insert6(length, address >> 64, address & _WORD, row)

    def _forget(self, subnet: Network) -> None:
        address, length = int(subnet.network_address), self._length_of(subnet)
        if isinstance(subnet, IPv4Network):
            self._remove4(length, address)
        else:
            self._remove6(length, address >> 64, address & _WORD)

    def _finish(self, base: "Table", routes: list[Route], touched: dict[int, Route], leaving: set[int]) -> None:
        """The columns of `routes`, of which those in `touched` differ from `base`'s in their rows; `leaving` are gone."""
        identity, count, tunnel = base.identity, len(routes), base.header_length
        self.routes, self.count = tuple(routes), count
        self.endpoints = base.endpoints[:count]
        headers = bytearray(base.headers)[: count * tunnel]
        for row in sorted(touched):  # rows behind the old last one come in order
            self.endpoints[row : row + 1] = [_endpoint(str(routes[row].address), identity.port)]
            headers[row * tunnel : (row + 1) * tunnel] = _header(identity, routes[row])
        self.headers = memoryview(headers or bytearray(1))
        self._renumber(base, touched, leaving)

    def _renumber(self, base: "Table", touched: dict[int, Route], leaving: set[int]) -> None:
        """VTEP numbers: those that a route left, and those with hosts that a touched route has, are given out anew."""
        was = [row for row in {*leaving, *touched} if row < base.count]
        left = {int(base.vtep[row]) for row in was}
        hosts = {str(host) for route in touched.values() for host in route.public}
        left |= {base.origins[host] for host in hosts if host in base.origins}
        behind = base._rows_behind(left)
        origins = base.origins.copy()
        for row in {*behind, *was}:
            for host in base.routes[row].public:
                origins.pop(str(host), None)
        rows = sorted({row for row in behind if row < self.count} | set(touched))
        affected = [self.routes[row] for row in rows]
        numbers = _number_vteps(affected, [self.endpoints[row][0] for row in rows])
        first = base._next_vtep
        origins.update({host: first + number for host, number in numbers.items()})
        column = array("i", bytes(4 * max(self.count, 1)))
        kept = min(self.count, base.count)
        memoryview(column)[:kept] = memoryview(base.vtep)[:kept]
        for row in rows:
            column[row] = origins[self.endpoints[row][0]]
        self.origins, self.vtep, self._next_vtep = origins, memoryview(column), first + len(affected)

    def _rows_behind(self, vteps: set[int]) -> list[int]:
        """The rows whose VTEP has one of these numbers."""
        return [row for row in range(self.count) if self.vtep[row] in vteps]

    def seen_by(self, identity: Identity) -> "Table":
        """The same for another node with the same framing, port and VNI, whose own subnets its routes may hold.

        The new table leaves those out, and shares with this one all that does not depend on the node: a thousand nodes
        in one process need not each lay out what all of them know. The node's own underlay address is then a known
        VTEP, behind which no subnet lives. Raises ValueError if the nodes could not talk to each other.
        """
        if (identity.framing, identity.port, identity.vni) != (
            self.identity.framing, self.identity.port, self.identity.vni
        ):  # fmt: skip
            raise ValueError("a node with another framing, port or VNI needs a table of its own")
        other = Table.__new__(Table)
        other._share(self, identity)
        return other

    def _share(self, base: "Table", identity: Identity) -> None:
        self._set_identity(identity)
        self.routes, self.origins, self.endpoints, self.vtep = base.routes, base.origins, base.endpoints, base.vtep
        self.count = base.count
        self._share_layout(base)
        self._next_vtep = base._next_vtep
        self.slots4, self.slots6, self.used4, self.used6 = base.slots4, base.slots6, base.used4, base.used6
        self.own_row4 = NO_ROW if identity.subnet is None else base.row_of(identity.subnet)
        self.own_row6 = NO_ROW if identity.ipv6_subnet is None else base.row_of(identity.ipv6_subnet)
        self.headers = memoryview(_headers_from(base.headers, base.routes, identity))

    def _share_layout(self, base: "Table") -> None:
        self.masks4, self.bases4, self.sizes4, self.lengths4 = base.masks4, base.bases4, base.sizes4, base.lengths4
        self.masks6_high, self.masks6_low, self.lengths6 = base.masks6_high, base.masks6_low, base.lengths6
        self.bases6, self.sizes6 = base.bases6, base.sizes6

    def _length_of(self, subnet: Network) -> int:
        """The index of its prefix length among those that occur, or -1."""
        mask = int(subnet.netmask)
        if isinstance(subnet, IPv4Network):
            for length in range(self.lengths4):
                if self.masks4[length] == mask:
                    return length
        else:
            for length in range(self.lengths6):
                if self.masks6_high[length] == mask >> 64 and self.masks6_low[length] == mask & _WORD:
                    return length
        return -1

    def row_of(self, subnet: Network) -> int:
        """The row of exactly this subnet, or NO_ROW; a lookup would find a longer one that begins at the same address."""
        length, address = self._length_of(subnet), int(subnet.network_address)
        if length < 0:
            return -1
        if isinstance(subnet, IPv4Network):
            return self._slot4(length, address)
        return self._slot6(length, address >> 64, address & _WORD)

    def _slot4(self, length: int, key: int) -> int:
        """The row of the subnet of that prefix length that begins at `key`, or NO_ROW."""
        base = self.bases4[length]
        last = self.sizes4[length] - 1
        slot = _spread(key) & last
        entry = self.slots4[base + slot]
        while entry:
            if entry >> 32 == key:
                return (entry & _ROW_MASK) - 1
            slot = (slot + 1) & last
            entry = self.slots4[base + slot]
        return -1

    def _slot6(self, length: int, high: int, low: int) -> int:
        """As `_slot4`."""
        base = self.bases6[length]
        last = self.sizes6[length] - 1
        slot = _spread(high ^ _spread(low)) & last
        at = 3 * (base + slot)
        while self.slots6[at + 2]:
            if self.slots6[at] == high and self.slots6[at + 1] == low:
                return self.slots6[at + 2] - 1
            slot = (slot + 1) & last
            at = 3 * (base + slot)
        return -1

    def find4(self, address: int) -> int:
        """The row of the longest IPv4 subnet that holds `address` (32 bits), or NO_ROW."""
        for length in range(self.lengths4):
            key = address & self.masks4[length]
            base = self.bases4[length]
            last = self.sizes4[length] - 1
            slot = _spread(key) & last
            entry = self.slots4[base + slot]
            while entry:
                if entry >> 32 == key:
                    row = (entry & _ROW_MASK) - 1
                    if row != self.own_row4:
                        return row
                    break
                slot = (slot + 1) & last
                entry = self.slots4[base + slot]
        return -1

    def find6(self, high: int, low: int) -> int:
        """The row of the longest IPv6 subnet that holds the address in two 64-bit halves, or NO_ROW."""
        for length in range(self.lengths6):
            key_high = high & self.masks6_high[length]
            key_low = low & self.masks6_low[length]
            base = self.bases6[length]
            last = self.sizes6[length] - 1
            slot = _spread(key_high ^ _spread(key_low)) & last
            at = 3 * (base + slot)
            while self.slots6[at + 2]:
                if self.slots6[at] == key_high and self.slots6[at + 1] == key_low:
                    row = self.slots6[at + 2] - 1
                    if row != self.own_row6:
                        return row
                    break
                slot = (slot + 1) & last
                at = 3 * (base + slot)
        return -1

    def is_own4(self, address: int) -> bool:
        """Whether the IPv4 address lies in this node's subnet."""
        return self.has4 and address & self.own4_mask == self.own4

    def is_own6(self, high: int, low: int) -> bool:
        """Whether the IPv6 address lies in this node's subnet."""
        return self.has6 and high & self.own6_mask_high == self.own6_high and low & self.own6_mask_low == self.own6_low

    def route_to(self, address: Address) -> Route | None:
        """The route that packets for `address` take, or None; for people and tests, not for loops."""
        if isinstance(address, IPv4Address):
            row = self.find4(int(address))
        else:
            row = self.find6(int(address) >> 64, int(address) & _WORD)
        return self.routes[row] if row >= 0 else None


def build(identity: Identity, routes: Iterable[Route]) -> Table:
    """A table for `identity` with `routes`. Of two routes for one subnet the later one counts."""
    by_subnet = {(int(one.subnet.network_address), one.subnet.prefixlen, type(one.subnet)): one for one in routes}
    return Table(identity, list(by_subnet.values()))


def _mac_number(mac: bytes | None) -> int:
    """The MAC as a 48-bit number; without one, a number that no frame carries."""
    return int.from_bytes(mac, "big") if mac else _MISSING_MAC


def _endpoint(host: str, port: int) -> Endpoint:
    return (host, port, 0, 0) if ":" in host else (host, port)


def _header(identity: Identity, route: Route) -> bytes:
    """What goes in front of each packet of `route`."""
    if identity.framing != FRAMING_VXLAN:
        return b""
    own = (identity.vtep_mac, identity.vtep_mac_v6)
    source = (own[0] or own[1]) if isinstance(route.address, IPv4Address) else (own[1] or own[0])
    ethertype = ETHERTYPE_IPV6 if isinstance(route.subnet, IPv6Network) else ETHERTYPE_IPV4
    return vxlan.header(identity.vni, route.mac, source or b"", ethertype)


def _headers(identity: Identity, routes: Sequence[Route]) -> bytearray:
    """What goes in front of the packets of all routes: those of one kind differ in the address that they are for."""
    if identity.framing != FRAMING_VXLAN:
        return bytearray()
    parts: list[bytes] = []
    kinds: dict[tuple[type, type], tuple[bytes, bytes]] = {}
    for route in routes:
        kind = type(route.address), type(route.subnet)
        if kind not in kinds or len(route.mac) != _MAC_LENGTH:
            whole = _header(identity, route)
            kinds[kind] = whole[:_DESTINATION_MAC], whole[_SOURCE_MAC:]
        front, back = kinds[kind]
        parts += (front, route.mac, back)
    return bytearray().join(parts)


def _copied(column: memoryview, kind: Literal["Q", "q"]) -> memoryview:
    return memoryview(bytearray(column)).cast(kind)


def _headers_from(headers: memoryview, routes: Sequence[Route], identity: Identity) -> bytearray:
    """`headers`, made for the same routes, with the source addresses of the node `identity`.

    One address for all rows is written byte by byte of the address into all rows at once, which is a hundred times
    faster than row by row.
    """
    copied = bytearray(headers)
    if identity.framing != FRAMING_VXLAN or not routes:
        return copied
    own, own_v6 = identity.vtep_mac or identity.vtep_mac_v6, identity.vtep_mac_v6 or identity.vtep_mac
    if own is None or own_v6 is None:
        raise ValueError("a node of the vxlan framing needs a VTEP MAC")
    for i, octet in enumerate(own):
        copied[_SOURCE_MAC + i :: vxlan.HEADER_LENGTH] = bytearray([octet]) * len(routes)
    if own != own_v6:
        for row, route in enumerate(routes):
            if route.address.version == 6:
                at = row * vxlan.HEADER_LENGTH + _SOURCE_MAC
                copied[at : at + 6] = own_v6
    return copied


def _number_vteps(routes: Collection[Route], hosts: Sequence[str]) -> dict[str, int]:
    """A number for each VTEP, by each of its underlay hosts; routes that share a host share a VTEP. `hosts` are the routes'
    addresses, in the text form of ipaddress.

    A route with two hosts that were taken for two VTEPs joins them, so numbers are looked up through `same`.
    """
    numbers: dict[str, int] = {}
    same: dict[int, int] = {}

    def find(number: int) -> int:
        while number in same:
            number = same[number]
        return number

    for count, (route, text) in enumerate(zip(routes, hosts, strict=True)):
        if len(route.public) == 1:
            numbers.setdefault(text, count)
            continue
        public = [text if address is route.address else str(address) for address in route.public]
        known = {find(numbers[host]) for host in public if host in numbers}
        number = min(known, default=count)
        same.update({other: number for other in known if other != number})
        for host in public:
            numbers.setdefault(host, number)
    return {host: find(number) for host, number in numbers.items()} if same else numbers


def _layout(rows: Sequence[tuple[int, Network]]) -> tuple[list[int], list[int], list[int], int]:
    """Masks (longest prefix first), first slot and number of slots of each prefix length, and the slots in all."""
    counts: dict[int, int] = {}
    masks_by_length: dict[int, int] = {}
    for _, subnet in rows:
        length = subnet.prefixlen
        if length not in masks_by_length:
            masks_by_length[length] = int(subnet.netmask)
        mask = masks_by_length[length]
        counts[mask] = counts.get(mask, 0) + 1
    masks = sorted(counts, reverse=True)
    sizes = [1 << (2 * counts[mask] - 1).bit_length() for mask in masks]
    bases = [sum(sizes[:i]) for i in range(len(sizes))]
    return masks, bases, sizes, sum(sizes)


__all__ = ["NO_ROW", "UNKNOWN_VTEP", "Endpoint", "Identity", "Table", "build"]
