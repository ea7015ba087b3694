"""A copy of the leases in etcd that is kept as etcd's is.

Theory of operation: all leases are listed at one revision, and a watch begins behind it, so that nothing is lost in
between and nothing is seen twice. Whatever ends the watch (a compaction, a restart, the loss of the leader, a dead
connection, a permission withdrawn), the leases are listed again and the watch begins anew: the copy cannot tell what it
missed, nor whether etcd has lost its data and begun to count from 1 again. Meanwhile the copy stays as it was. Each round
waits longer than the one before, up to `LONGEST_DELAY`, until a watch has lasted.

An entry that has not changed since it was parsed is not parsed again.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from routing.lease import Lease
from routing.stores import StoreAwayError, StoreError
from routing.stores.etcd import etcd_pb2 as pb
from routing.stores.etcd.client import WATCH, Client, Stream
from routing.stores.etcd.keyspace import Keyspace, RestartError, end_of
from routing.stores.etcd.schema import Entry, Schema

log = logging.getLogger(__name__)

FIRST_DELAY = 0.1
LONGEST_DELAY = 5.0
_RESTARTS = 3


class Delays:
    """Seconds to wait between attempts: doubling, up to a limit, each shortened by up to half so that nodes spread out."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next = FIRST_DELAY

    def next(self) -> float:
        """The next one."""
        delay = self._next
        self._next = min(2 * delay, LONGEST_DELAY)
        return delay * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the shortest again."""
        self._next = FIRST_DELAY


async def list_entries(keyspace: Keyspace, schema: Schema, known: dict[bytes, Entry]) -> tuple[int, dict[bytes, Entry]]:
    """All that is below ``subnets/`` and the revision that it has been read at; `known` need not be parsed again."""
    for _ in range(_RESTARTS):
        entries: dict[bytes, Entry] = {}
        revision = 0
        try:
            async for at, page in keyspace.pages(schema.subnets):
                revision = at
                entries.update({found.key: read_entry(schema, known, found) for found in page})
        except RestartError:
            continue
        return revision, entries
    raise StoreAwayError("etcd compacts its history faster than the leases can be read")


def read_entry(schema: Schema, known: dict[bytes, Entry], found: pb.KeyValue) -> Entry:
    """`found`, parsed unless it is `known`."""
    entry = known.get(found.key)
    return entry if entry is not None and entry.is_of(found) else schema.read(found)


class Follower:
    """The copy. `entries` are what is known at the beginning; `changed` is set when `leases` may give something else."""

    def __init__(
        self,
        client: Client,
        schema: Schema,
        entries: dict[bytes, Entry],
        *,
        now: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        self.entries = entries
        self.revision = 0
        self.relists = 0
        self.away_since: float | None = None
        self.trouble: str | None = None
        self.changed = asyncio.Event()
        self._client = client
        self._keyspace = Keyspace(client)
        self._schema = schema
        self._now = now
        self._sleep = sleep
        self._delays = Delays(rng)

    def leases(self) -> list[Lease]:
        """Those in the copy, by key."""
        found = ((key, self.entries[key].lease) for key in sorted(self.entries))
        return [lease for _, lease in found if lease is not None]

    async def list(self) -> None:
        """Read all of them. Raises StoreError."""
        self.revision, self.entries = await list_entries(self._keyspace, self._schema, self.entries)
        self.changed.set()

    async def run(self) -> None:
        """Follow from the last `list` on; never ends by itself."""
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            try:
                await self._watch()
            except StoreError as error:
                self._note_away(error)
            if clock() - begun > LONGEST_DELAY:
                self._delays.reset()
            await self._list_again()

    async def _list_again(self) -> None:
        while True:
            await self._sleep(self._delays.next())
            try:
                await self.list()
            except StoreError as error:
                self._note_away(error)
            else:
                self.relists += 1
                return

    async def _watch(self) -> None:
        """Follow until it fails, which raises StoreError."""
        prefix = self._schema.subnets
        wanted = pb.WatchCreateRequest(
            key=prefix, range_end=end_of(prefix), start_revision=self.revision + 1, progress_notify=True
        )
        async with self._client.stream(WATCH, pb.WatchRequest(create_request=wanted)) as stream:
            await self._follow(stream)

    async def _follow(self, stream: Stream[pb.WatchResponse]) -> None:
        response = stream.first
        while True:
            self._require_watch(response)
            self._note_back()
            self._apply(response.events)
            self.revision = max(self.revision, response.header.revision)
            response = await stream.read()

    def _require_watch(self, response: pb.WatchResponse) -> None:
        if response.compact_revision:
            raise StoreAwayError(f"etcd has forgotten what happened before revision {response.compact_revision}")
        if response.canceled:
            self._client.forget_token()  # etcd 3.4 calls it a lack of permission when a token is not good
            raise StoreError(f"etcd refuses to tell of changes: {response.cancel_reason or 'it gives no reason'}")

    def _apply(self, events: Sequence[pb.Event]) -> None:
        for event in events:
            key = event.kv.key
            known = self.entries.get(key)
            if event.type == pb.Event.DELETE:
                self.entries.pop(key, None)
                is_changed = known is not None and known.lease is not None
            else:
                entry = self.entries[key] = read_entry(self._schema, self.entries, event.kv)
                is_changed = known is None or known.lease != entry.lease
            if is_changed:
                self.changed.set()

    def _note_away(self, error: StoreError) -> None:
        if self.away_since is None:
            self.away_since = self._now()
            log.warning("%s; going on with the %d leases known", str(error), len(self.entries))
        self.trouble = str(error)

    def _note_back(self) -> None:
        if self.away_since is not None:
            log.info("etcd at %s answers again, after %.1f s", self._client.endpoint, self._now() - self.away_since)
        self.away_since = self.trouble = None
