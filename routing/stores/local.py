"""The embedded store: a folder of lease files, shared by any number of processes of one machine.

Layout, with flannel's key names and values::

    DIR/config                      the network configuration, JSON
    DIR/subnets/10.5.34.0-24        one lease, JSON
    DIR/expiry/10.5.34.0-24         when that lease ends, seconds since the epoch, decimal
    DIR/lock                        held (flock) while leases are allocated or changed

A lease file without an expiry file is a reservation and never ends, as a key without an etcd lease is one for flannel:
whoever writes ``subnets/10.5.34.0-24`` by hand reserves that subnet, or announces a peer that is no pyflannel-dp.

Theory of operation: every file is written whole and renamed into place, the expiry before the lease, and removed in the
other order, so that a reader without the lock never takes a lease for a reservation. Readers do not lock. Changes are
noticed by reading the folder again every half second: file systems differ in what they notify of; files that
have not changed are not read again, and it happens in a thread.
"""

import asyncio
import contextlib
import fcntl
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from routing import allocator
from routing.allocator import Subnets
from routing.config import ConfigError, NetworkConfig, parse_config
from routing.durable import sync_folder, write_whole
from routing.lease import Lease, LeaseAttributes, LeaseError, parse_attributes, parse_key
from routing.stores import LEASE_SECONDS, LeaseLostError, StoreAwayError, StoreError
from routing.stores.checks import key_of, owner_of, require_address_of_one, reservation

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
_LOCK_RETRY_SECONDS = 0.02
_LOCK_ATTEMPTS = 250


@dataclass(frozen=True)
class _Cached:
    """A lease file as it was read last: `stamp` tells whether it is still the same file, `lease` is None for junk."""

    stamp: tuple[int, int, int]
    lease: Lease | None


class LocalStore:
    """The `SubnetStore` and `Registry` in a folder. `now` gives seconds since the epoch, `sleep` waits between looks."""

    def __init__(
        self,
        folder: Path,
        *,
        lease_seconds: float = LEASE_SECONDS,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._folder = folder
        self._subnets = folder / "subnets"
        self._expiry = folder / "expiry"
        self._lease_seconds = lease_seconds
        self._now = now
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._cache: dict[str, _Cached] = {}
        self._expirations: dict[str, tuple[tuple[int, int, int], float]] = {}
        self._bad_expiry: set[str] = set()
        self._away_since: float | None = None
        self._trouble: str | None = None

    async def config(self) -> NetworkConfig:
        """The configuration in ``DIR/config``."""
        text = await self.config_text()
        try:
            return parse_config(text)
        except ConfigError as error:
            raise ConfigError(f"{self._folder / 'config'}: {error}") from None

    async def config_text(self) -> str:
        """``DIR/config`` as it is."""
        path = self._folder / "config"
        try:
            return await asyncio.to_thread(path.read_text, encoding="utf-8")
        except FileNotFoundError:
            raise StoreError(
                f"{path} does not exist: write the network configuration there, or start with --network or "
                "--net-config-path, which does it"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{path} cannot be read: {error}") from None

    async def create_config(self, text: str) -> None:
        """Write ``DIR/config`` unless there is one. `text` must pass `parse_config`. Raises ConfigError, StoreError."""
        parse_config(text)

        def create() -> None:
            with self._locked():
                if not (self._folder / "config").exists():
                    write_whole(self._folder / "config", text)

        await asyncio.to_thread(create)

    async def write_config(self, text: str) -> None:
        """Write ``DIR/config``, whether there is one or not."""
        parse_config(text)

        def write() -> None:
            with self._locked():
                write_whole(self._folder / "config", text)

        await asyncio.to_thread(write)

    async def acquire(self, config: NetworkConfig, attributes: LeaseAttributes, previous: Subnets) -> Lease:
        """Decide and write under the lock, so that two processes never get one subnet."""

        def acquire() -> Lease:
            with self._locked():
                valid, ended = self._scan()
                decision = allocator.decide(config, valid, attributes, previous, self._rng)
                for lease in (*ended, *decision.obsolete):
                    self._remove(lease.key)
                if decision.reuse is not None:
                    log.info("the lease %s of this node's public address is taken up again", decision.reuse.key)
                lease = decision.lease(attributes, self._now() + self._lease_seconds)
                self._write(lease)
                return lease

        return await asyncio.to_thread(acquire)

    async def renew(self, lease: Lease) -> Lease:
        """Move the expiration, after a look whether the lease is still there and still ours."""

        def renew() -> Lease:
            with self._locked():
                current = self._require_ours(lease)
                if current.expiration is None:
                    return current
                renewed = replace(current, expiration=self._now() + self._lease_seconds)
                self._write_expiry(renewed)
                return renewed

        return await asyncio.to_thread(renew)

    async def update(self, lease: Lease, attributes: LeaseAttributes) -> Lease:
        """Write the lease with other `attributes`, and move its end as `renew` does."""

        def update() -> Lease:
            with self._locked():
                current = self._require_ours(lease)
                require_address_of_one(self._scan()[0], lease.key, attributes)
                end = None if current.expiration is None else self._now() + self._lease_seconds
                updated = replace(current, attributes=attributes, expiration=end)
                self._write(updated)
                return updated

        return await asyncio.to_thread(update)

    async def release(self, lease: Lease) -> None:
        """Remove the lease if it is ours and no reservation."""

        def release() -> None:
            with self._locked(), contextlib.suppress(LeaseLostError):
                if self._require_ours(lease).expiration is not None:
                    self._remove(lease.key)

        await asyncio.to_thread(release)

    async def list_leases(self) -> Sequence[Lease]:
        """Those that have not ended."""
        return (await asyncio.to_thread(self._scan))[0]

    async def reserve(self, subnets: Subnets, attributes: LeaseAttributes | None) -> Lease:
        """Write the lease file if there is none, and take the expiry file away."""
        config = await self.config()

        def reserve() -> Lease:
            with self._locked():
                lease = reservation(config, self._scan()[0], subnets, attributes)
                (self._expiry / lease.key).unlink(missing_ok=True)
                sync_folder(self._expiry)
                self._write(lease)
                return lease

        return await asyncio.to_thread(reserve)

    async def remove(self, subnets: Subnets) -> Lease:
        """Remove both files."""
        key = key_of(subnets)

        def remove() -> Lease:
            with self._locked():
                lease = next((one for one in self._scan()[0] if one.key == key), None)
                if lease is None:
                    raise StoreError(f"there is no lease {self._subnets / key}")
                self._remove(key)
                return lease

        return await asyncio.to_thread(remove)

    def report(self) -> dict[str, Any]:
        """The folder, since when it cannot be read and why, and how many of its files are no leases."""
        return {
            "kind": "local",
            "folder": str(self._folder),
            "away_since": self._away_since,
            "trouble": self._trouble,
            "skipped": sum(cached.lease is None for cached in self._cache.values()) + len(self._bad_expiry),
        }

    async def close(self) -> None:
        """Nothing is kept open."""

    async def watch(self) -> AsyncIterator[Sequence[Lease]]:
        """A snapshot now and after each change; a look every half second.

        If the folder cannot be read later on, what is known stays, and the log says so once.
        """
        last: list[Lease] | None = None
        while True:
            try:
                leases, _ = await asyncio.to_thread(self._scan)
            except StoreError as error:
                if last is None:
                    raise
                self._note_away(error)
            else:
                self._note_back()
                if leases != last:
                    last = leases
                    yield leases
            await self._sleep(POLL_SECONDS)

    def _note_away(self, error: StoreError) -> None:
        if self._away_since is None:
            log.error("%s; going on with what is known", error)
            self._away_since = self._now()
        self._trouble = str(error)

    def _note_back(self) -> None:
        if self._away_since is not None:
            log.info("the store in %s can be read again", self._folder)
        self._away_since = self._trouble = None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """The folder, made if missing, with its lock held; the kernel frees the lock of a killed process.

        Waits in a thread, and not for ever: whoever holds the lock longer than anybody needs it is stuck.
        """
        try:
            for folder in (self._subnets, self._expiry):
                folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / "lock", "a", encoding="utf-8") as lock:
                self._wait_for(lock)
                yield
        except OSError as error:
            raise StoreError(f"the store in {self._folder} cannot be written: {error}") from error

    def _wait_for(self, lock: TextIO) -> None:
        for attempt in range(_LOCK_ATTEMPTS):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if attempt == _LOCK_ATTEMPTS // 5:
                    log.info("waiting for %s, which another process holds", lock.name)
                time.sleep(_LOCK_RETRY_SECONDS)
        raise StoreAwayError(
            f"another process has held {lock.name} for {_LOCK_ATTEMPTS * _LOCK_RETRY_SECONDS:.0f} s "
            f"(see: fuser {lock.name})"
        )

    def _scan(self) -> tuple[list[Lease], list[Lease]]:
        """The leases that are valid now and those that have ended; a file that has not changed is not parsed again."""
        try:
            paths = sorted(self._subnets.iterdir())
        except FileNotFoundError:
            return [], []
        except OSError as error:
            raise StoreError(f"the store in {self._folder} cannot be read: {error}") from error
        self._cache = {path.name: cached for path in paths if (cached := self._look(path)) is not None}
        self._bad_expiry &= self._cache.keys()
        leases = [self._with_expiry(cached.lease) for cached in self._cache.values() if cached.lease is not None]
        now = self._now()
        valid: list[Lease] = []
        ended: list[Lease] = []
        for lease in leases:
            (valid if lease.expiration is None or lease.expiration > now else ended).append(lease)
        return valid, ended

    def _look(self, path: Path) -> _Cached | None:
        """The file at `path`, from the cache if it is the one read before; None if it is gone or being written."""
        if path.name.startswith("."):
            return None
        try:
            stamp = _stamp(path)
        except FileNotFoundError:
            return None
        cached = self._cache.get(path.name)
        if cached is not None and cached.stamp == stamp:
            return cached
        try:
            lease = Lease(*parse_key(path.name), parse_attributes(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, LeaseError) as error:
            log.warning("skipped %s: %s", path, error)
            return _Cached(stamp, None)
        return _Cached(stamp, lease)

    def _with_expiry(self, lease: Lease) -> Lease:
        """`lease` with its expiration. An expiry file that makes no sense means an end in the past: never make a
        reservation of a lease because of a torn file."""
        path = self._expiry / lease.key
        try:
            stamp = _stamp(path)
            known = self._expirations.get(lease.key)
            if known is None or known[0] != stamp:
                known = (stamp, float(path.read_text(encoding="ascii")))
                self._expirations[lease.key] = known
            self._bad_expiry.discard(lease.key)
            return replace(lease, expiration=known[1])
        except FileNotFoundError:
            self._bad_expiry.discard(lease.key)
            return lease
        except (OSError, ValueError) as error:
            if lease.key not in self._bad_expiry:
                log.warning("skipped %s: the time in %s cannot be read: %s", lease.key, path, error)
                self._bad_expiry.add(lease.key)
            return replace(lease, expiration=0.0)

    def _require_ours(self, lease: Lease) -> Lease:
        """`lease` as the store has it now. Raises LeaseLostError unless it is still held by the node that it names."""
        current = {found.key: found for found in self._scan()[0]}.get(lease.key)
        if current is None:
            raise LeaseLostError(f"the lease {self._subnets / lease.key} is gone")
        if not current.held_by(lease.attributes):
            raise LeaseLostError(f"the lease {self._subnets / lease.key} belongs to {owner_of(current)} now")
        return current

    def _write(self, lease: Lease) -> None:
        if lease.expiration is not None:
            self._write_expiry(lease)
        write_whole(self._subnets / lease.key, lease.attributes.to_json())

    def _write_expiry(self, lease: Lease) -> None:
        write_whole(self._expiry / lease.key, repr(lease.expiration))

    def _remove(self, key: str) -> None:
        for folder in (self._subnets, self._expiry):
            (folder / key).unlink(missing_ok=True)
            sync_folder(folder)


def _stamp(path: Path) -> tuple[int, int, int]:
    """What changes when the file at `path` does. Raises FileNotFoundError."""
    status = path.lstat()
    return status.st_mtime_ns, status.st_size, status.st_ino
