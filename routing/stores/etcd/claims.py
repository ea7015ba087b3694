"""One running node for each public address.

flannel knows a node by its public address: a second one with the same address takes the first one's lease for its own, and
both announce one subnet. Hence a running node holds a claim on its address: a key with its identity, attached to an etcd
lease of seconds which it keeps alive. Who finds a claim of somebody else watches the time that it has left: if that does
not fall as time passes, the other node lives, and we do not start; if it falls, the other is gone, and the claim ends by
itself. (A change of etcd's leader lengthens all leases and can make a node that is gone look alive: start again then.)

A claim is a guard against mistakes, not a lock: while etcd is away it ends and traffic goes on. Once etcd is back it is
made again, and if somebody else has made one meanwhile, the log and `report` say so. Where the role of our user does not
allow claims, the log says that too, and the node goes on without.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from routing.stores import StoreError
from routing.stores.etcd import etcd_pb2 as pb
from routing.stores.etcd.client import EtcdError
from routing.stores.etcd.keyspace import ChangedError, Keyspace, new_lease_id
from routing.stores.etcd.schema import Schema

log = logging.getLogger(__name__)

CLAIM_SECONDS = 30.0
"""How long a claim outlives its node."""

_LOOK_SECONDS = 1.0
_CLOSE_SECONDS = 2.0

HELD, LOST, FORBIDDEN, NONE = "held", "lost", "forbidden", "none"
"""The states of a claim."""


class _Claim:
    """The claim on `address`. `holder` is who has it if we lost it."""

    def __init__(self, address: str, key: bytes) -> None:
        self.address, self.key = address, key
        self.lease_id = 0
        self.state = NONE
        self.holder: str | None = None
        self.keeper: asyncio.Task[None] | None = None


class Claims:
    """The claims of the node `identity`, each kept alive by a task until `close`; they outlive it by `seconds` at most."""

    def __init__(
        self,
        keyspace: Keyspace,
        schema: Schema,
        identity: str,
        *,
        seconds: float = CLAIM_SECONDS,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._keyspace = keyspace
        self._schema = schema
        self._identity = identity.encode()
        self._seconds = seconds
        self._sleep = sleep
        self._claims: dict[str, _Claim] = {}

    async def take(self, address: str) -> None:
        """Claim `address`, waiting for the end of a claim whose node is gone.

        Raises StoreError if another running node has the address, StoreAwayError if etcd does not answer.
        """
        if address in self._claims:
            return
        claim = _Claim(address, self._schema.claim(address))
        try:
            await self._seize(claim)
        except BaseException as error:
            await self._drop(claim)
            if not (isinstance(error, EtcdError) and error.is_denied):
                raise
            self._note_forbidden(claim, error)
        self._claims[address] = claim
        if claim.state == HELD:
            claim.keeper = asyncio.create_task(self._keep(claim))

    async def keep_only(self, address: str) -> None:
        """Give back all claims but the one on `address`."""
        for other in [claim for claim in self._claims.values() if claim.address != address]:
            await self._drop(self._claims.pop(other.address))

    async def close(self) -> None:
        """Give all back."""
        claims = list(self._claims.values())
        self._claims.clear()
        await asyncio.gather(*(self._drop(claim) for claim in claims))

    def report(self) -> dict[str, Any] | None:
        """The claim as plain data."""
        claim = next(iter(self._claims.values()), None)
        if claim is None:
            return None
        return {"address": claim.address, "state": claim.state, "holder": claim.holder}

    async def _seize(self, claim: _Claim) -> None:
        clock = asyncio.get_running_loop().time
        first: tuple[int, float] | None = None
        while True:
            present = await self._keyspace.get(claim.key)
            if present is None or present.value == self._identity:
                if await self._write(claim, present):
                    return
                continue
            asked = clock()
            left = await self._time_left(claim, present)
            if first is None:
                first = left, clock()
                log.warning(
                    "%s is claimed by a node (%s); if that is gone, its claim ends within %d s",
                    claim.address, _name(present), left + 1,
                )  # fmt: skip
            elif left > 0 and left >= first[0] + 1 - (asked - first[1]):  # etcd tells whole seconds, with 0 even less
                raise StoreError(
                    f"another running node ({_name(present)}) has the public address {claim.address}: give this one "
                    "another with --public-ip or --iface, or stop the other"
                )
            await self._sleep(min(_LOOK_SECONDS, self._seconds / 10))

    async def _time_left(self, claim: _Claim, present: pb.KeyValue) -> int:
        if not present.lease:
            raise StoreError(
                f"{claim.key.decode()} claims {claim.address} for {_name(present)} for ever: remove that key from etcd"
            )
        return await self._keyspace.time_to_live(present.lease)

    async def _write(self, claim: _Claim, present: pb.KeyValue | None) -> bool:
        """Put the claim there, in place of `present`, which is ours; False if somebody was faster."""
        claim.lease_id = claim.lease_id or new_lease_id()
        await self._keyspace.grant(claim.lease_id, max(1, math.ceil(self._seconds)))
        revision = present.mod_revision if present is not None else 0
        try:
            await self._keyspace.swap(claim.key, revision, self._identity, claim.lease_id)
        except ChangedError:
            return False
        claim.state, claim.holder = HELD, None
        return True

    async def _keep(self, claim: _Claim) -> None:
        while True:
            await self._sleep(self._seconds / 3)
            try:
                await self._refresh(claim)
            except EtcdError as error:
                if error.is_denied:
                    self._note_forbidden(claim, error)
                    return
                log.debug("the claim on %s: %s", claim.address, str(error))
            except StoreError as error:
                log.debug("the claim on %s: %s", claim.address, str(error))  # whoever follows the leases tells of it

    async def _refresh(self, claim: _Claim) -> None:
        """Keep the claim alive, or make it again if it has ended."""
        if claim.lease_id and await self._keyspace.keep_alive(claim.lease_id):
            return
        claim.lease_id = 0
        present = await self._keyspace.get(claim.key)
        if present is not None and present.value != self._identity:
            if claim.state != LOST:
                log.error(
                    "another node (%s) has claimed this node's public address %s while etcd was away: stop one of them",
                    _name(present), claim.address,
                )  # fmt: skip
            claim.state, claim.holder = LOST, _name(present)
        elif await self._write(claim, present):
            log.info("the claim on %s is made again", claim.address)

    def _note_forbidden(self, claim: _Claim, error: StoreError) -> None:
        if claim.state != FORBIDDEN:
            log.warning(
                "going on without a claim on %s, and unwarned of a second node that has it: %s", claim.address, error
            )
        claim.state = FORBIDDEN

    async def _drop(self, claim: _Claim) -> None:
        if claim.keeper is not None:
            claim.keeper.cancel()
            await asyncio.gather(claim.keeper, return_exceptions=True)
        if claim.lease_id:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._keyspace.revoke(claim.lease_id)


def _name(present: pb.KeyValue) -> str:
    return "identity " + present.value.decode(errors="backslashreplace")
