"""The table in step with the peers: each change of the peers makes a new one, with as much work as there is change.

Theory of operation: the routes of each lease are planned when it is added or changed (``routing.route``), and kept. The
new table is the old one with the routes of those leases exchanged (`Table.changed`), which for ten thousand leases takes
half a millisecond, where planning and building everything takes forty. What comes out is what that would give.

Two leases may claim one subnet; then the one with the later key has it (``routing.table.build``). As long as that is so,
everything is built anew at each change.

A peer's former addresses count for a while (``routing.grace``); when one ends, `update` without changes makes the table
that holds then.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from routing.config import Address
from routing.grace import GRACE_SECONDS, Grace
from routing.lease import Lease
from routing.leaseset import Changes
from routing.route import Route, Unreachable, plan
from routing.table import Identity, Table, build


@dataclass(frozen=True, slots=True)
class _Planned:
    """A lease, its routes, why there are not more of them, and the former addresses that count."""

    lease: Lease
    routes: tuple[Route, ...]
    unreachable: tuple[Unreachable, ...]
    former: tuple[Address, ...]


class Planner:
    """`table` is that of a node, `identity`, whose underlay has the given `families` (4, 6), and the peers of now."""

    def __init__(self, identity: Identity, families: Collection[int], grace_seconds: float = GRACE_SECONDS) -> None:
        self.table: Table = build(identity, [])
        self._identity = identity
        self._families = frozenset(families)
        self._planned: dict[str, _Planned] = {}
        self._contested = False
        """Whether a subnet may have more than one claim."""
        self._unreachable: set[str] = set()
        self._former: dict[str, tuple[Address, ...]] = {}
        self._grace = Grace(grace_seconds)

    @property
    def unreachable(self) -> list[Unreachable]:
        """The leases without a route for one of their subnets, by key."""
        return [one for key in sorted(self._unreachable) for one in self._planned[key].unreachable]

    @property
    def next_update(self) -> float | None:
        """When the table changes although no lease does, on the clock of `update`; None if it does not."""
        return self._grace.next_end

    def update(self, changes: Changes, now: float) -> Table:
        """The table after `changes`, at `now` in seconds of a monotonic clock; `table` itself if nothing of it changes."""
        self._grace.follow(changes, now)
        former = self._grace.former(now)
        leases = {lease.key: lease for lease in (*changes.added, *changes.changed)}
        for key in {*former, *self._former}:
            if key in self._planned and former.get(key, ()) != self._planned[key].former:
                leases.setdefault(key, self._planned[key].lease)
        self._former = former
        gone = [old.routes for lease in changes.removed if (old := self._forget(lease.key)) is not None]
        gone += [old.routes for key in leases if (old := self._forget(key)) is not None]
        new = [route for key, lease in leases.items() for route in self._plan(key, lease)]
        self._make([route for routes in gone for route in routes], new)
        return self.table

    def _forget(self, key: str) -> _Planned | None:
        self._unreachable.discard(key)
        return self._planned.pop(key, None)

    def _plan(self, key: str, lease: Lease) -> tuple[Route, ...]:
        former = self._former.get(key, ())
        routes, unreachable = plan([lease], self._identity.framing, self._families, {key: former} if former else {})
        self._planned[key] = _Planned(lease, tuple(routes), tuple(unreachable), former)
        if unreachable:
            self._unreachable.add(key)
        else:
            self._unreachable.discard(key)
        return self._planned[key].routes

    def _make(self, gone: Collection[Route], new: Collection[Route]) -> None:
        if self._contested or len(gone) + len(new) > self.table.count // 4:
            self._build()
            return
        left = {route.subnet for route in gone}
        subnets = {route.subnet for route in new}
        if len(subnets) < len(new) or any(self.table.row_of(subnet) >= 0 for subnet in subnets - left):
            self._build()
            return
        self.table = self.table.changed(left, new)

    def _build(self) -> None:
        routes = list(_in_order(self._planned))
        self.table = build(self._identity, routes)
        self._contested = self.table.count < len(routes)


def _in_order(planned: dict[str, _Planned]) -> Iterable[Route]:
    for key in sorted(planned):
        yield from planned[key].routes
