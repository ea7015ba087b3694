"""Operations on etcd's keys and leases, each of which may be repeated when nobody knows whether it was carried out.

Theory of operation: an answer that is lost looks like a call that was. What is written is therefore written in a
transaction that compares the key's revision with the one that was seen last (0 for a key that is not there). If it has
another one by now, the answer has the key as it is: with exactly the value and etcd lease that were to be written, it was
our own earlier attempt. Identifiers of etcd leases are chosen here, so that asking twice gives one.
"""

import secrets
from collections.abc import AsyncIterator, Sequence

from routing.stores import StoreError
from routing.stores.etcd import etcd_pb2 as pb
from routing.stores.etcd.client import GRANT, KEEP_ALIVE, PUT, RANGE, REVOKE, TIME_TO_LIVE, TXN, Client, EtcdError

PAGE = 500
"""How many keys are read with one call: parsing them holds the event loop, which carries packets, for about 15 ms."""


class ChangedError(Exception):
    """The key is not, or no longer, as expected. `present` is what is there now, None for nothing."""

    def __init__(self, present: pb.KeyValue | None) -> None:
        super().__init__("the key has changed")
        self.present = present


class RestartError(Exception):
    """The revision that pages are read at is gone."""


def new_lease_id() -> int:
    """An identifier of an etcd lease that nobody else has."""
    return secrets.randbits(62) + 1


def end_of(prefix: bytes) -> bytes:
    """The first key behind all those that begin with `prefix`, which does not end with a byte 0xFF."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


class Keyspace:
    """The operations, over `client`. All raise StoreAwayError and StoreError as `Client.call` does."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def get(self, key: bytes) -> pb.KeyValue | None:
        """The key now."""
        found = (await self._client.call(RANGE, pb.RangeRequest(key=key))).kvs
        return found[0] if found else None

    async def put(self, key: bytes, value: bytes) -> None:
        """Write without looking."""
        await self._client.call(PUT, pb.PutRequest(key=key, value=value))

    async def pages(self, prefix: bytes) -> AsyncIterator[tuple[int, Sequence[pb.KeyValue]]]:
        """All keys that begin with `prefix` by pages, with the one revision that all are read at. Raises RestartError."""
        key, revision = prefix, 0
        while True:
            request = pb.RangeRequest(key=key, range_end=end_of(prefix), limit=PAGE, revision=revision)
            try:
                page = await self._client.call(RANGE, request)
            except EtcdError as error:
                if error.is_compacted:
                    raise RestartError from error
                raise
            revision = revision or page.header.revision
            yield revision, page.kvs
            if not page.more:
                return
            key = page.kvs[-1].key + b"\0"

    async def swap(
        self,
        key: bytes,
        revision: int,
        value: bytes,
        lease_id: int,
        obsolete: Sequence[tuple[bytes, int]] = (),
    ) -> int:
        """Write `key` if its revision is still `revision`, and remove the keys of `obsolete`, which have theirs too.

        Returns the key's new revision. Raises ChangedError, with nothing done.
        """
        request = pb.TxnRequest(
            compare=[_is_at(key, revision), *(_is_at(other, at) for other, at in obsolete)],
            success=[
                pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease_id)),
                *(_removal(other) for other, _ in obsolete),
            ],
            failure=[pb.RequestOp(request_range=pb.RangeRequest(key=key))],
        )
        answer = await self._client.call(TXN, request)
        if answer.succeeded:
            return answer.header.revision
        present = _first(answer)
        if present is not None and (present.value, present.lease) == (value, lease_id):
            return present.mod_revision
        raise ChangedError(present)

    async def remove(self, key: bytes, revision: int) -> None:
        """Remove `key` if its revision is still `revision`, or it is gone already. Raises ChangedError."""
        request = pb.TxnRequest(
            compare=[_is_at(key, revision)],
            success=[_removal(key)],
            failure=[pb.RequestOp(request_range=pb.RangeRequest(key=key))],
        )
        answer = await self._client.call(TXN, request)
        present = None if answer.succeeded else _first(answer)
        if present is not None:
            raise ChangedError(present)

    async def grant(self, lease_id: int, seconds: int) -> int:
        """Make an etcd lease, or keep alive the one that an earlier attempt made; how many seconds it has."""
        if seconds < 1:
            raise StoreError(f"{seconds} s is no time for a lease")  # of 0 etcd 3.4 makes 2, and not what has no end
        try:
            return (await self._client.call(GRANT, pb.LeaseGrantRequest(ID=lease_id, TTL=seconds))).TTL
        except EtcdError as error:
            if "lease already exists" not in error.details:
                raise
            return await self.keep_alive(lease_id)

    async def keep_alive(self, lease_id: int) -> int:
        """Let an etcd lease begin anew; how many seconds it has, 0 if there is no such lease."""
        return max(0, (await self._client.call(KEEP_ALIVE, pb.LeaseKeepAliveRequest(ID=lease_id))).TTL)

    async def time_to_live(self, lease_id: int) -> int:
        """How many seconds an etcd lease has left, -1 if there is no such lease."""
        return (await self._client.call(TIME_TO_LIVE, pb.LeaseTimeToLiveRequest(ID=lease_id))).TTL

    async def revoke(self, lease_id: int) -> None:
        """End an etcd lease, with all keys that are attached to it."""
        await self._client.call(REVOKE, pb.LeaseRevokeRequest(ID=lease_id))

    async def revoke_if_idle(self, lease_id: int) -> None:
        """End an etcd lease unless a key is attached to it: somebody may have attached others than we."""
        answer = await self._client.call(TIME_TO_LIVE, pb.LeaseTimeToLiveRequest(ID=lease_id, keys=True))
        if answer.TTL > 0 and not answer.keys:
            await self.revoke(lease_id)


def _is_at(key: bytes, revision: int) -> pb.Compare:
    return pb.Compare(key=key, target=pb.Compare.MOD, result=pb.Compare.EQUAL, mod_revision=revision)


def _removal(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))


def _first(answer: pb.TxnResponse) -> pb.KeyValue | None:
    found = answer.responses[0].response_range.kvs
    return found[0] if found else None
