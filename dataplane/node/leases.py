"""What follows from the store: the node's own lease, and the table of its peers.

Theory of operation. `follow` takes each snapshot of the store and swaps in a new table if a peer changed. `keep` renews
the lease before its end, tells the store when our address has changed, and takes a lease anew when it is lost. That it
is lost is not proved by a snapshot alone, which may be older than our own last write: the store is asked to renew it,
which it refuses for a lease that is not ours. Then the policy decides: end, or take one anew. The same subnet is asked
for first, so that a store whose data was wiped gets back what was in it; until there is a lease again the node does not
call itself ready, its peers are followed as before, whoever has its subnet now among them, and packets go on by what is
known.

While the store is away nothing happens to the table. Renewal begins at the latest at half of the lease's life, so that
a store may be away for long before the lease ends (flannel's last-hour renewal loses it to an outage of one hour). It
is due by the wall clock, in which the lease says its end, or by the time that has passed, whichever comes first: the
wall clock may be set.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from dataplane.node.settings import STOP
from dataplane.node.state import State
from dataplane.node.waiting import first_of
from routing.allocator import NoFreeSubnetError, Subnets
from routing.lease import Lease, LeaseAttributes
from routing.leaseset import Changes, LeaseSet
from routing.planner import Planner
from routing.stores import LeaseLostError, StoreError, SubnetStore

log = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0
_LONGEST_SLEEP_SECONDS = 60.0


class LeaseKeeper:
    """Keeps `state.lease`, `state.peers` and `state.table`.

    `moved` is called with the former lease after another subnet had to be taken, to bring the host in line.
    """

    def __init__(
        self,
        state: State,
        store: SubnetStore,
        *,
        moved: Callable[[Lease], Awaitable[None]],
        sleep: Callable[[float], Awaitable[None]],
        now: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._state = state
        self._store = store
        self._moved = moved
        self._sleep = sleep
        self._now = now
        self._monotonic = monotonic
        self._planner: Planner | None = None
        self._planned = asyncio.Event()
        self._granted = 0.0
        """When the lease was taken or renewed last, by the monotonic clock."""
        self._life = 0.0
        """How long it lasted then, in seconds."""
        self._last: Sequence[Lease] = ()
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()  # around writing the lease, by whichever of the two tasks

    async def acquire(self, previous: Subnets) -> None:
        """Take the lease of a node that starts. Raises StoreError, NoFreeSubnetError."""
        await self._take(previous)
        self._state.has_lease = True

    async def _take(self, previous: Subnets) -> None:
        state = self._state
        state.lease = await self._store.acquire(state.config, state.wanted, previous)
        state.peers = LeaseSet(state.lease.key)
        self._note_granted()
        log.info("lease %s until %s", state.lease.key, _date(state.lease.expiration))

    async def watch(self) -> AsyncIterator[Sequence[Lease]]:
        """The store's snapshots, of which the first has been taken in."""
        leases = self._store.watch()
        try:
            self._last = await anext(leases)
            await self._require_own_lease(self._last)
        except BaseException:
            await close(leases)
            raise
        self._plan(self._state.peers.replace(self._last))
        return leases

    def _note_granted(self) -> None:
        self._granted = self._monotonic()
        expiration = self._state.lease.expiration
        self._life = float("inf") if expiration is None else expiration - self._now()

    async def follow(self, leases: AsyncIterator[Sequence[Lease]]) -> None:
        """Swap in a new table after each change in the store."""
        async for snapshot in leases:
            self._last = snapshot
            if self._state.has_lease and not self._is_ours(snapshot):
                await self._ask_whose_lease_it_is()
            self._take_over(snapshot)

    async def _ask_whose_lease_it_is(self) -> None:
        async with self._lock:
            try:
                await self._renew()
            except LeaseLostError:
                raise
            except StoreError as error:
                log.warning("whether the lease %s is still ours cannot be told: %s", self._state.lease.key, error)

    def _take_over(self, snapshot: Sequence[Lease]) -> None:
        changes = self._state.peers.replace(snapshot)
        if not changes:
            return
        for verb, leases_of in (("added", changes.added), ("removed", changes.removed), ("changed", changes.changed)):
            for lease in leases_of:
                log.debug("peer %s: %s at %s", verb, lease.key, lease.attributes.public_ip)
        self._plan(changes)
        self._state.engine.table = self._state.table
        log.info(
            "peers: %d added, %d removed, %d changed; %d in all",
            len(changes.added), len(changes.removed), len(changes.changed), len(self._state.table.routes),
        )  # fmt: skip

    def _plan(self, changes: Changes) -> None:
        """Make the table that follows from `changes`; a peer that cannot be reached is reported when it becomes so."""
        state = self._state
        if self._planner is None:
            self._planner = Planner(state.identity(), state.underlay.families)
        state.table = self._planner.update(changes, self._monotonic())
        unreachable = self._planner.unreachable
        for one in unreachable:
            if one not in state.unreachable:
                log.warning("no route to %s: %s", one.lease.key, one.reason)
        state.unreachable = unreachable
        self._planned.set()

    async def forget_former_addresses(self) -> None:
        """A peer that has another address may still be heard from the old one for a moment; see to the end of that."""
        while True:
            self._planned.clear()
            assert self._planner is not None
            end = self._planner.next_update
            if end is None:
                await self._planned.wait()
            else:
                await self._sleep(max(0.0, end - self._monotonic()))
                self._plan(Changes())
                self._state.engine.table = self._state.table

    def want(self, attributes: LeaseAttributes) -> None:
        """Let our lease say `attributes` of us; `keep` sees to it."""
        self._state.wanted = attributes
        self._changed.set()

    async def keep(self) -> None:
        """Renew the lease in time, update it when we have changed, take one when it is lost; while that fails, again every
        few seconds."""
        while True:
            await self._wait_until_due()
            async with self._lock:
                done = await self._attempt("lease", self._regain)
                if done:
                    done = await self._attempt("lease", self._renew_if_due)
                    done = await self._attempt("address", self._update) and done
            if not done:
                await self._sleep(_RETRY_SECONDS)

    async def _attempt(self, concern: str, act: Callable[[], Awaitable[None]]) -> bool:
        """Whether `act` could be done; if not, that is a trouble. Raises LeaseLostError if the policy says so."""
        try:
            await act()
        except LeaseLostError:
            raise
        except (StoreError, NoFreeSubnetError) as error:
            what = "could not be brought up to date" if self._state.has_lease else "is lost, and none could be taken"
            self._state.troubles.note(concern, f"the lease {what}: {error}")
            return False
        self._state.troubles.note(concern, None)
        return True

    def _remaining(self) -> float:
        """Seconds until the renewal is due; infinite for a reservation."""
        expiration = self._state.lease.expiration
        if expiration is None:
            return float("inf")
        margin = min(self._state.settings.renew_margin, self._life / 2)
        passed = self._monotonic() - self._granted
        return min(expiration - self._now(), self._life - passed) - margin

    async def _wait_until_due(self) -> None:
        """In parts, since the wall clock may be set meanwhile."""
        state = self._state
        while state.has_lease and state.wanted == state.lease.attributes and (remaining := self._remaining()) > 0:
            await first_of(self._sleep(min(remaining, _LONGEST_SLEEP_SECONDS)), self._changed)

    async def _update(self) -> None:
        state = self._state
        wanted = state.wanted
        if not state.has_lease or wanted == state.lease.attributes:
            return
        try:
            state.lease = await self._store.update(state.lease, wanted)
        except LeaseLostError as error:
            self._lose(error)
        else:
            log.warning("lease %s: this node is at %s now", state.lease.key, wanted.public_ip or wanted.public_ipv6)

    async def _renew_if_due(self) -> None:
        if self._remaining() <= 0:
            await self._renew()

    async def _renew(self) -> None:
        """Also how to find out whether the lease is ours. Raises StoreError, and LeaseLostError if the policy says so."""
        state = self._state
        if not state.has_lease:
            return
        try:
            state.lease = await self._store.renew(state.lease)
        except LeaseLostError as error:
            self._lose(error)
        else:
            self._note_granted()
            state.renewed += 1
            log.info("lease %s renewed until %s", state.lease.key, _date(state.lease.expiration))

    def _lose(self, error: LeaseLostError) -> None:
        """The lease is lost because of `error`: raise it, or let `keep` take another one, as the policy says."""
        state = self._state
        if state.settings.lost_lease == STOP:
            raise error
        log.error("%s; taking a lease anew", error)
        state.has_lease = False
        self._become("")
        self._changed.set()

    def _become(self, own_key: str) -> None:
        """Plan for a node whose lease has `own_key`, by the peers that were seen last."""
        state = self._state
        state.peers = LeaseSet(own_key)
        self._planner = None
        self._plan(state.peers.replace(self._last))
        state.engine.table = state.table

    async def _regain(self) -> None:
        """Take a lease if we have none: the former subnet if it is free. Raises StoreError, NoFreeSubnetError."""
        state = self._state
        if state.has_lease:
            return
        former = state.lease
        await self._take(Subnets(former.subnet, former.ipv6_subnet))
        self._become(state.lease.key)
        if state.lease.key == former.key:
            log.warning("the lease %s is this node's again", former.key)
        else:
            await self._moved(former)
        state.has_lease = True

    def _is_ours(self, snapshot: Sequence[Lease]) -> bool:
        """Whether `snapshot` has our lease, as ours."""
        own = self._state.lease
        found = next((lease for lease in snapshot if lease.key == own.key), None)
        return found is not None and found.held_by(own.attributes)

    async def _require_own_lease(self, snapshot: Sequence[Lease]) -> None:
        """At start: two nodes must not announce one subnet. Raises LeaseLostError."""
        if not self._is_ours(snapshot):
            self._state.lease = await self._store.renew(self._state.lease)


async def close(iterator: AsyncIterator[object]) -> None:
    """End an asynchronous generator."""
    ending = getattr(iterator, "aclose", None)
    if ending is not None:
        await ending()


def _date(expiration: float | None) -> str:
    if expiration is None:
        return "for ever"
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(expiration))
