"""Traffic by peer: for each route of a table, what was sent to it and received from it, and when it was last heard.

Theory of operation: the loop that tallies a batch's verdicts (``dataplane.batch``) adds each forwarded packet to the
numbers of its row, PEER_NUMBERS of them side by side, so that a packet costs one line of the cache and nothing is looked up
for it. This object owns those numbers for one table. A new table gets a new object, which takes over the numbers of each
route that is still there, the same subnet behind the same address, so that they never fall; most rows of a table that
follows another hold the very same route, and are copied as one block.

Counted is what a direction counts (``dataplane.engine.Direction``): a packet is what was received in one piece, so a
superpacket from the device is one packet and its bytes; of what the underlay brings each inner packet is one, before
packets are merged, and the headers that are saved by merging are no bytes. A packet is counted when its verdict is final:
one whose datagrams were refused is not sent, and one that the device refused is not received. So the numbers of all routes
and `others` add up to what the direction forwarded.

`others` is what belongs to no route of the table: routes that are gone, and senders whose sources are not checked.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dataplane.batch import PEER_NUMBERS
from routing.route import Route
from routing.table import Table

NANOSECONDS = 1_000_000_000


class RouteTraffic(NamedTuple):
    """What passed, inner packets and their bytes. `last_heard` is when the route's VTEP sent something last that was
    accepted, in seconds since the epoch, None if never. A `route` of None is for `Traffic.others`."""

    route: Route | None
    sent_packets: int
    sent_bytes: int
    received_packets: int
    received_bytes: int
    last_heard: float | None


class Traffic:
    """The numbers for `table`, those of `before` among them."""

    def __init__(self, table: Table, before: "Traffic | None" = None) -> None:
        self.table = table
        size = 8 * PEER_NUMBERS * (len(table.routes) + 1)
        self.sent = array("q", bytes(size))
        """By row: packets, bytes, and a time that is not used; behind the last row `others`."""
        self.received = array("q", bytes(size))
        """By row: packets, bytes, and when the last one came, in nanoseconds of the engine's clock."""
        if before is not None:
            self._take_over(before)

    def _take_over(self, before: "Traffic") -> None:
        old, new = before.table.routes, self.table.routes
        rows = min(len(old), len(new))
        moved = [row for row, was, now in zip(range(rows), old, new, strict=False) if was is not now]
        arrived, gone = [*moved, *range(rows, len(new))], {*moved, *range(rows, len(old))}
        places = [(row, before._place_of(self.table, row)) for row in arrived]
        for mine, theirs in ((self.sent, before.sent), (self.received, before.received)):
            mine[: PEER_NUMBERS * rows] = theirs[: PEER_NUMBERS * rows]
            for row, place in places:
                mine[_numbers(row)] = theirs[_numbers(place)] if place >= 0 else _NOTHING
            others = theirs[_numbers(len(old))]
            for row in gone.difference(place for _, place in places):
                for index, number in enumerate(theirs[_numbers(row)][:2]):
                    others[index] += number
            mine[_numbers(len(new))] = others

    def _place_of(self, table: Table, row: int) -> int:
        """The row that row `row` of `table` had here, or -1."""
        place = self.table.row_of(table.routes[row].subnet)
        return place if place >= 0 and self.table.endpoints[place] == table.endpoints[row] else -1

    def report(self, now: float, epoch: float) -> Iterator[RouteTraffic]:
        """Row by row. `now` is the engine's clock, in seconds, and `epoch` the same moment in seconds since the epoch."""
        heard = self._heard_by_vtep()
        started = epoch - now
        sent, received = self.sent, self.received
        for row, (route, vtep) in enumerate(zip(self.table.routes, self.table.vtep, strict=False)):
            at = PEER_NUMBERS * row
            last = heard.get(vtep)
            when = None if last is None else round(started + last / NANOSECONDS, 3)
            yield RouteTraffic(route, sent[at], sent[at + 1], received[at], received[at + 1], when)

    @property
    def others(self) -> RouteTraffic:
        """What belongs to no route."""
        at = PEER_NUMBERS * len(self.table.routes)
        return RouteTraffic(None, self.sent[at], self.sent[at + 1], self.received[at], self.received[at + 1], None)

    def _heard_by_vtep(self) -> dict[int, int]:
        """When each VTEP was last heard, behind whatever subnet; those that never were are not there."""
        packets, times = self.received[::PEER_NUMBERS], self.received[2::PEER_NUMBERS]
        heard: dict[int, int] = {}
        for row in _rows_with(packets):
            vtep = self.table.vtep[row]
            heard[vtep] = max(times[row], heard.get(vtep, times[row]))
        return heard


_NOTHING = array("q", bytes(8 * PEER_NUMBERS))


def _numbers(row: int) -> slice:
    return slice(PEER_NUMBERS * row, PEER_NUMBERS * (row + 1))


def _rows_with(packets: Sequence[int]) -> list[int]:
    """The rows that counted something, without the last, which is no route's."""
    return [row for row, count in enumerate(packets[:-1]) if count]
