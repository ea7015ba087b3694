"""The leases of a flannel network that keeps them in etcd: flannel's schema, without its traps.

Theory of operation: nothing is written blindly. A key that shall be new is created only if it is not there; one that is
there is replaced or removed only at the revision that it was last seen at, and what was found instead is looked at: still
ours by public address, and the attempt is made again; somebody else's, and the lease is lost. The answer to a write may be
lost and the write be made twice (``keyspace``); therefore an etcd lease that was asked for, but is not known to be in use,
is kept as the spare for the next attempt, and given back once it is certain that nothing hangs on it.

A key without an etcd lease is a reservation. It is never given one: taking it up changes its value, if need be, and nothing
else. (flannel asks etcd how long lease 0 has left, is told -1, and writes the key anew with an ordinary lease.)

The node's own writes are made one at a time. `watch` follows in a task of its own (``following``), and gives the newest
snapshot whenever the consumer is ready for one.
"""

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from routing import allocator
from routing.allocator import Decision, Subnets
from routing.config import ConfigError, NetworkConfig, parse_config
from routing.lease import Lease, LeaseAttributes
from routing.stores import LEASE_SECONDS, LeaseLostError, StoreAwayError, StoreError
from routing.stores.checks import key_of, owner_of, require_address_of_one, reservation
from routing.stores.etcd import etcd_pb2 as pb
from routing.stores.etcd.claims import CLAIM_SECONDS, Claims
from routing.stores.etcd.client import Client
from routing.stores.etcd.credentials import Credentials
from routing.stores.etcd.endpoints import Endpoint
from routing.stores.etcd.following import Follower, list_entries
from routing.stores.etcd.keyspace import ChangedError, Keyspace, new_lease_id
from routing.stores.etcd.schema import DEFAULT_PREFIX, Entry, Schema

log = logging.getLogger(__name__)

_ATTEMPTS = 200
"""How often a write is tried again that others were faster with. Each failure is somebody else's success: of 50 nodes that
start together for 50 subnets the last has met 49 of them."""

_LONGEST_JITTER = 0.5
_QUESTIONS_AT_ONCE = 64


@dataclass(frozen=True)
class _Held:
    """The own lease as it was seen last in etcd."""

    mod_revision: int
    lease_id: int


class EtcdStore:
    """The `SubnetStore` and `Registry` in etcd.

    `identity` tells this node from all others and stays the same when it is started again. `now` gives seconds since the
    epoch; `sleep` and `rng` are for waiting before an attempt is made again. Belongs to one event loop; nothing is asked of
    etcd before the first call. Raises ValueError for a prefix or a time that makes no sense.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        prefix: str = DEFAULT_PREFIX,
        credentials: Credentials | None = None,
        *,
        identity: str,
        lease_seconds: float = LEASE_SECONDS,
        claim_seconds: float = CLAIM_SECONDS,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        if not lease_seconds >= 1 or not identity:
            raise ValueError(f"a lease of {lease_seconds} s for the node {identity!r} makes no sense")
        self._rng = rng or random.Random()
        self._now = now
        self._sleep = sleep
        self._lease_seconds = lease_seconds
        self._schema = Schema(prefix)
        self._client = Client(endpoints, credentials or Credentials(), self._rng)
        self._keyspace = Keyspace(self._client)
        self._claims = Claims(self._keyspace, self._schema, identity, seconds=claim_seconds, sleep=sleep)
        self._changing = asyncio.Lock()
        self._held: dict[str, _Held] = {}
        self._attempted: dict[str, LeaseAttributes] = {}
        self._spare: int | None = None
        self._entries: dict[bytes, Entry] = {}
        self._follower: Follower | None = None

    # the network configuration

    async def config(self) -> NetworkConfig:
        """The configuration in ``PREFIX/config``. Raises StoreAwayError while there is none: somebody will write it."""
        text = await self.config_text()
        try:
            return parse_config(text)
        except ConfigError as error:
            raise ConfigError(f"{self._schema.config.decode()} in etcd: {error}") from None

    async def config_text(self) -> str:
        """``PREFIX/config`` as it is."""
        found = await self._keyspace.get(self._schema.config)
        key = self._schema.config.decode()
        if found is None:
            raise StoreAwayError(
                f"there is no network configuration at {key} in etcd: write it with "
                f"`pyflannel-dp leases config --set FILE` or `etcdctl put {key} '{{...}}'`"
            )
        try:
            return found.value.decode()
        except UnicodeDecodeError as error:
            raise StoreError(f"{key} in etcd is no text: {error}") from None

    async def write_config(self, text: str) -> None:
        """Write ``PREFIX/config``, whether there is one or not."""
        parse_config(text)
        await self._keyspace.put(self._schema.config, text.encode())

    # the node's own lease

    async def acquire(self, config: NetworkConfig, attributes: LeaseAttributes, previous: Subnets) -> Lease:
        """Claim the public address, then decide on what is there and write it, again for as long as others are faster."""
        async with self._changing, self._spare_given_back():
            address = _address(attributes)
            await self._claims.take(address)
            for attempt in range(_ATTEMPTS):
                entries = await self._list()
                found = (self._schema.taken(key, entry) for key, entry in entries.items())
                leases = [lease for lease in found if lease is not None]
                decision = allocator.decide(config, leases, attributes, previous, self._rng)
                try:
                    lease = await self._carry_out(decision, entries, attributes)
                except ChangedError:
                    log.debug("another node was faster with %s", decision.subnets)
                    await self._sleep(self._rng.uniform(0, min(0.02 * (attempt + 1), _LONGEST_JITTER)))
                else:
                    await self._claims.keep_only(address)
                    return lease
        raise StoreAwayError(f"{_ATTEMPTS} attempts to take a subnet failed because others were faster")

    async def _carry_out(self, decision: Decision, entries: dict[bytes, Entry], attributes: LeaseAttributes) -> Lease:
        """Write what was decided on `entries`. Raises ChangedError if they are no longer so."""
        key, reuse = key_of(decision.subnets), decision.reuse
        revision, old_lease_id = 0, 0
        if reuse is not None:
            present = entries[self._schema.lease(key)]
            revision, old_lease_id = present.mod_revision, present.lease_id
            log.info("the lease %s of this node's public address is taken up again", key)
        obsolete = {name: entries[name] for name in (self._schema.lease(lease.key) for lease in decision.obsolete)}
        if reuse is not None and not old_lease_id:
            if reuse.attributes == attributes and not obsolete:
                self._held[key] = _Held(revision, 0)
                return reuse
            lease_id, expiration = 0, math.inf  # a reservation, which decision.lease leaves one
        else:
            lease_id, expiration = await self._grant()
        value, others = attributes.to_json().encode(), [(name, entry.mod_revision) for name, entry in obsolete.items()]
        written = await self._keyspace.swap(self._schema.lease(key), revision, value, lease_id, others)
        self._take_over(key, _Held(written, lease_id))
        for idle in (old_lease_id, *(entry.lease_id for entry in obsolete.values())):
            await self._give_back(idle)
        return decision.lease(attributes, expiration)

    async def renew(self, lease: Lease) -> Lease:
        """Attach the lease's key to a new etcd lease, if it is as we wrote it."""
        async with self._changing, self._spare_given_back():
            held = self._held.get(lease.key) if lease.expiration is not None else None
            held = held or self._require_ours(lease, await self._keyspace.get(self._schema.lease(lease.key)))
            for _ in range(_ATTEMPTS):
                if not held.lease_id:
                    return replace(lease, expiration=None)
                lease_id, expiration = await self._grant()
                changed = await self._write(lease, held.mod_revision, lease.attributes, lease_id)
                if changed is None:
                    await self._give_back(held.lease_id)
                    return replace(lease, expiration=expiration)
                held = self._require_ours(lease, changed.present)
        raise StoreAwayError(f"{lease.key} in etcd changes faster than it can be renewed")

    async def update(self, lease: Lease, attributes: LeaseAttributes) -> Lease:
        """Claim the new address, write the value with the etcd lease that the key has, and give the old claim back."""
        async with self._changing:
            entries = await self._list()
            require_address_of_one((one.lease for one in entries.values() if one.lease is not None), lease.key, attributes)
            await self._claims.take(_address(attributes))
            present = await self._keyspace.get(self._schema.lease(lease.key))
            for _ in range(_ATTEMPTS):
                held = self._require_ours(lease, present)
                self._attempted[lease.key] = attributes  # if the answer is lost, this may be what is found later
                changed = await self._write(lease, held.mod_revision, attributes, held.lease_id)
                if changed is None:
                    del self._attempted[lease.key]
                    await self._claims.keep_only(_address(attributes))
                    return replace(lease, attributes=attributes, expiration=lease.expiration if held.lease_id else None)
                present = changed.present
        raise StoreAwayError(f"{lease.key} in etcd changes faster than it can be updated")

    async def release(self, lease: Lease) -> None:
        """Remove the lease if it is ours and no reservation."""
        async with self._changing:
            name = self._schema.lease(lease.key)
            present = await self._keyspace.get(name)
            for _ in range(_ATTEMPTS):
                try:
                    held = self._require_ours(lease, present)
                except LeaseLostError:
                    return
                if not held.lease_id:
                    return
                try:
                    await self._keyspace.remove(name, held.mod_revision)
                except ChangedError as error:
                    present = error.present
                else:
                    self._held.pop(lease.key, None)
                    await self._give_back(held.lease_id)
                    return
        raise StoreAwayError(f"{lease.key} in etcd changes faster than it can be removed")

    async def _write(self, lease: Lease, revision: int, attributes: LeaseAttributes, lease_id: int) -> ChangedError | None:
        """Write the value of `lease` at `revision`; what was found instead, or None if it is done."""
        try:
            written = await self._keyspace.swap(
                self._schema.lease(lease.key), revision, attributes.to_json().encode(), lease_id
            )
        except ChangedError as error:
            return error
        self._take_over(lease.key, _Held(written, lease_id))
        return None

    def _take_over(self, key: str, held: _Held) -> None:
        self._held[key] = held
        if held.lease_id == self._spare:
            self._spare = None

    def _require_ours(self, lease: Lease, present: pb.KeyValue | None) -> _Held:
        """`present`, which is what `lease.key` holds now. Raises LeaseLostError unless it is the node's of `lease`."""
        self._held.pop(lease.key, None)
        where = self._schema.lease(lease.key).decode()
        if present is None:
            raise LeaseLostError(f"the lease {where} is gone from etcd, or has ended")
        found = self._schema.read(present).lease
        if found is None:
            raise LeaseLostError(f"the lease {where} is lost: what etcd has there is no lease")
        attempted = self._attempted.get(lease.key)
        if not found.held_by(lease.attributes) and not (attempted is not None and found.held_by(attempted)):
            raise LeaseLostError(f"the lease {where} belongs to {owner_of(found)} now")
        held = self._held[lease.key] = _Held(present.mod_revision, present.lease)
        return held

    # etcd leases

    async def _grant(self) -> tuple[int, float]:
        """An etcd lease, and when it ends: the spare, which it stays until `_take_over`."""
        begun = self._now()
        seconds = max(1, math.ceil(self._lease_seconds))
        if self._spare is not None:
            left = await self._keyspace.keep_alive(self._spare)
            if left:
                return self._spare, begun + left
        self._spare = new_lease_id()
        return self._spare, begun + await self._keyspace.grant(self._spare, seconds)

    @contextlib.asynccontextmanager
    async def _spare_given_back(self) -> AsyncIterator[None]:
        """Give the spare back at the end, unless nobody knows whether something hangs on it."""
        try:
            yield
        except (StoreAwayError, asyncio.CancelledError):
            raise
        except BaseException:
            await self._give_spare_back()
            raise
        await self._give_spare_back()

    async def _give_spare_back(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            await self._give_back(spare)

    async def _give_back(self, lease_id: int) -> None:
        """Let an etcd lease go that we need no more. It would end by itself, hence no trouble is worth telling."""
        if lease_id:
            with contextlib.suppress(StoreError):
                await self._keyspace.revoke_if_idle(lease_id)

    # all leases

    async def watch(self) -> AsyncIterator[Sequence[Lease]]:
        """A snapshot now and after each change."""
        follower = Follower(self._client, self._schema, self._entries, now=self._now, sleep=self._sleep, rng=self._rng)
        await follower.list()
        self._entries = {}
        self._follower = follower
        running = asyncio.create_task(follower.run())
        running.add_done_callback(lambda _: follower.changed.set())
        last: list[Lease] | None = None
        try:
            while True:
                follower.changed.clear()
                leases = follower.leases()
                if leases != last:
                    last = leases
                    yield leases
                await follower.changed.wait()
                if running.done():
                    running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _list(self) -> dict[bytes, Entry]:
        known = self._follower.entries if self._follower is not None else self._entries
        _, entries = await list_entries(self._keyspace, self._schema, known)
        if self._follower is None:
            self._entries = entries
        return entries

    async def list_leases(self) -> Sequence[Lease]:
        """All, each with its end, which etcd is asked for once a lease."""
        gate = asyncio.Semaphore(_QUESTIONS_AT_ONCE)
        return [
            one
            for one in await asyncio.gather(*(self._with_end(entry, gate) for entry in (await self._list()).values()))
            if one
        ]

    async def _with_end(self, entry: Entry, gate: asyncio.Semaphore) -> Lease | None:
        """The lease with its expiration, None for junk and for what has ended meanwhile."""
        if entry.lease is None or not entry.lease_id:
            return entry.lease
        async with gate:
            left = await self._keyspace.time_to_live(entry.lease_id)
        return replace(entry.lease, expiration=self._now() + left) if left >= 0 else None

    # for the operator

    async def reserve(self, subnets: Subnets, attributes: LeaseAttributes | None) -> Lease:
        """Write the key without an etcd lease, if it is as it was seen; a running node goes on with what it finds then."""
        name = self._schema.lease(key_of(subnets))
        config = await self.config()
        for _ in range(_ATTEMPTS):
            entries = await self._list()
            leases = [entry.lease for entry in entries.values() if entry.lease is not None]
            lease = reservation(config, leases, subnets, attributes)
            present = entries.get(name)
            revision, lease_id = (present.mod_revision, present.lease_id) if present is not None else (0, 0)
            with contextlib.suppress(ChangedError):
                await self._keyspace.swap(name, revision, lease.attributes.to_json().encode(), 0)
                await self._give_back(lease_id)
                return lease
        raise StoreAwayError(f"{name.decode()} in etcd changes faster than it can be reserved")

    async def remove(self, subnets: Subnets) -> Lease:
        """Remove the key, if it holds a lease."""
        name = self._schema.lease(key_of(subnets))
        for _ in range(_ATTEMPTS):
            present = await self._keyspace.get(name)
            if present is None:
                raise StoreError(f"there is no lease {name.decode()} in etcd")
            entry = self._schema.read(present)
            if entry.lease is None:
                raise StoreError(f"{name.decode()} in etcd holds no lease: remove it with `etcdctl del {name.decode()}`")
            lease = await self._with_end(entry, asyncio.Semaphore())
            with contextlib.suppress(ChangedError):
                await self._keyspace.remove(name, entry.mod_revision)
                await self._give_back(entry.lease_id)
                return lease or entry.lease
        raise StoreAwayError(f"{name.decode()} in etcd changes faster than it can be removed")

    # the connection

    def report(self) -> dict[str, Any]:
        """The endpoint in use, since when etcd is away and why, how often the leases were listed again, and the claim."""
        follower = self._follower
        entries = follower.entries if follower is not None else self._entries
        return {
            "kind": "etcd",
            "endpoint": str(self._client.endpoint),
            "prefix": self._schema.prefix,
            "away_since": follower.away_since if follower is not None else None,
            "trouble": follower.trouble if follower is not None else None,
            "skipped": sum(entry.lease is None for entry in entries.values()),
            "relists": follower.relists if follower is not None else 0,
            "revision": follower.revision if follower is not None else None,
            "claim": self._claims.report(),
        }

    async def close(self) -> None:
        """Give the claims and the spare back, if etcd answers, and end all connections."""
        await self._claims.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._give_spare_back()
        await self._client.close()


def _address(attributes: LeaseAttributes) -> str:
    """What flannel knows the node by. Raises StoreError if there is none."""
    address = attributes.public_ip or attributes.public_ipv6
    if address is None:
        raise StoreError("a node without a public address cannot have a lease")
    return str(address)
