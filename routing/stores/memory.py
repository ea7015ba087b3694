"""Leases in memory, for many nodes of one process: the twin of the stores that outlive it.

Theory of operation: a `LeaseBook` is what the store's server would be. It is plain code without tasks: it decides, holds
the leases, and calls its listeners after each change; ended leases leave it when `expire` is called, for which whoever
owns the clock is told the next moment. A `MemoryStore` is one node's view of it in the form of a `SubnetStore`.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from routing import allocator
from routing.allocator import Subnets
from routing.config import NetworkConfig, parse_config
from routing.lease import Lease, LeaseAttributes
from routing.stores import LEASE_SECONDS, LeaseLostError, StoreError
from routing.stores.checks import key_of, owner_of, require_address_of_one, reservation


class LeaseBook:
    """All leases of an overlay whose network configuration is `config_text`. `now` is in seconds.

    Raises ConfigError if the configuration makes no sense.
    """

    def __init__(
        self,
        config_text: str,
        *,
        lease_seconds: float = LEASE_SECONDS,
        now: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.config = parse_config(config_text)
        self.config_text = config_text
        self.lease_seconds = lease_seconds
        self.version = 0
        """Counts the changes that a watcher would see."""
        self._now = now
        self._rng = rng
        self._leases: dict[str, Lease] = {}
        self._listeners: list[Callable[[], None]] = []

    def now(self) -> float:
        """The time that expirations are measured by."""
        return self._now()

    def leases(self) -> list[Lease]:
        """Those that are valid now, by key."""
        now = self._now()
        return [self._leases[key] for key in sorted(self._leases) if not _has_ended(self._leases[key], now)]

    def acquire(self, attributes: LeaseAttributes, previous: Subnets) -> Lease:
        """As `SubnetStore.acquire`. Raises NoFreeSubnetError."""
        self.expire()
        decision = allocator.decide(self.config, list(self._leases.values()), attributes, previous, self._rng)
        for obsolete in decision.obsolete:
            del self._leases[obsolete.key]
        lease = decision.lease(attributes, self._now() + self.lease_seconds)
        self._leases[lease.key] = lease
        self._changed()
        return lease

    def reserve(self, leases: Sequence[Lease]) -> None:
        """Enter `leases` as they are, as an operator does by hand; one without expiration is a reservation.

        Raises StoreError, with nothing entered, if one of their keys is taken.
        """
        taken = next((lease.key for lease in leases if lease.key in self._leases), None)
        if taken is not None:
            raise StoreError(f"the subnet {taken} is taken")
        self._leases.update({lease.key: lease for lease in leases})
        self._changed()

    def renew(self, lease: Lease) -> Lease:
        """As `SubnetStore.renew`. Raises LeaseLostError."""
        current = self._require_ours(lease)
        if current.expiration is None:
            return current
        renewed = replace(current, expiration=self._now() + self.lease_seconds)
        self._leases[lease.key] = renewed  # nobody is told: to a watcher a renewal is no change
        return renewed

    def update(self, lease: Lease, attributes: LeaseAttributes) -> Lease:
        """As `SubnetStore.update`. Raises LeaseLostError, StoreError."""
        current = self._require_ours(lease)
        require_address_of_one(self.leases(), lease.key, attributes)
        end = None if current.expiration is None else self._now() + self.lease_seconds
        updated = self._leases[lease.key] = replace(current, attributes=attributes, expiration=end)
        self._changed()
        return updated

    def release(self, lease: Lease) -> None:
        """As `SubnetStore.release`."""
        current = self._leases.get(lease.key)
        if current is not None and current.held_by(lease.attributes) and current.expiration is not None:
            del self._leases[lease.key]
            self._changed()

    def enter(self, lease: Lease) -> None:
        """Write `lease` in place of the one with its key, if there is one."""
        self._leases[lease.key] = lease
        self._changed()

    def remove(self, key: str) -> Lease:
        """Remove the lease `key`, whoever holds it. Raises StoreError if there is none."""
        lease = self._leases.pop(key, None)
        if lease is None:
            raise StoreError(f"there is no lease {key}")
        self._changed()
        return lease

    def set_config(self, config_text: str) -> None:
        """Another network configuration. Raises ConfigError."""
        self.config = parse_config(config_text)
        self.config_text = config_text

    def expire(self) -> None:
        """Forget the leases that have ended."""
        now = self._now()
        ended = [key for key, lease in self._leases.items() if _has_ended(lease, now)]
        for key in ended:
            del self._leases[key]
        if ended:
            self._changed()

    def holds(self, lease: Lease) -> bool:
        """Whether `lease` is valid now, and still its holder's."""
        current = self._leases.get(lease.key)
        return current is not None and not _has_ended(current, self._now()) and current.held_by(lease.attributes)

    def next_expiration(self) -> float | None:
        """When the first lease ends that is not renewed until then; None if none does."""
        return min((lease.expiration for lease in self._leases.values() if lease.expiration is not None), default=None)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change; returns what makes it stop."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _require_ours(self, lease: Lease) -> Lease:
        current = self._leases.get(lease.key)
        if current is None or _has_ended(current, self._now()):
            raise LeaseLostError(f"the lease {lease.key} is gone from the store, or has ended")
        if not current.held_by(lease.attributes):
            raise LeaseLostError(f"the lease {lease.key} belongs to {owner_of(current)} now")
        return current

    def _changed(self) -> None:
        self.version += 1
        for listener in tuple(self._listeners):
            listener()


class MemoryStore:
    """The `SubnetStore` and `Registry` on `book`. `sleep` waits for leases to end."""

    def __init__(self, book: LeaseBook, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._book = book
        self._sleep = sleep

    async def config(self) -> NetworkConfig:
        """The book's."""
        return self._book.config

    async def acquire(self, config: NetworkConfig, attributes: LeaseAttributes, previous: Subnets) -> Lease:
        """At once."""
        return self._book.acquire(attributes, previous)

    async def renew(self, lease: Lease) -> Lease:
        """At once."""
        return self._book.renew(lease)

    async def update(self, lease: Lease, attributes: LeaseAttributes) -> Lease:
        """At once."""
        return self._book.update(lease, attributes)

    async def release(self, lease: Lease) -> None:
        """At once."""
        self._book.release(lease)

    async def list_leases(self) -> Sequence[Lease]:
        """At once."""
        return self._book.leases()

    async def reserve(self, subnets: Subnets, attributes: LeaseAttributes | None) -> Lease:
        """At once."""
        lease = reservation(self._book.config, self._book.leases(), subnets, attributes)
        self._book.enter(lease)
        return lease

    async def remove(self, subnets: Subnets) -> Lease:
        """At once."""
        self._book.expire()
        return self._book.remove(key_of(subnets))

    async def config_text(self) -> str:
        """The book's."""
        return self._book.config_text

    async def write_config(self, text: str) -> None:
        """The book's from now on."""
        self._book.set_config(text)

    def report(self) -> dict[str, Any]:
        """There is nothing to say."""
        return {"kind": "memory", "away_since": None, "skipped": 0}

    async def close(self) -> None:
        """Nothing is kept open."""

    async def watch(self) -> AsyncIterator[Sequence[Lease]]:
        """A snapshot now and after each change."""
        changed = asyncio.Event()
        stop_listening = self._book.listen(changed.set)
        expiring = asyncio.ensure_future(self._expire())
        last: Sequence[Lease] | None = None
        try:
            while True:
                changed.clear()
                leases = self._book.leases()
                if leases != last:
                    last = leases
                    yield leases
                await changed.wait()
        finally:
            stop_listening()
            expiring.cancel()
            await asyncio.gather(expiring, return_exceptions=True)

    async def _expire(self) -> None:
        """Look for ended leases when the next one can have ended, and at least once a minute."""
        while True:
            moment = self._book.next_expiration()
            wait = _LONGEST_SLEEP_SECONDS if moment is None else moment - self._book.now()
            await self._sleep(min(max(wait, 0.0), _LONGEST_SLEEP_SECONDS))
            self._book.expire()


_LONGEST_SLEEP_SECONDS = 60.0


def _has_ended(lease: Lease, now: float) -> bool:
    return lease.expiration is not None and lease.expiration <= now
