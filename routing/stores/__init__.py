"""Where leases and the network configuration are kept: one protocol, several implementations, one conformance suite.

Contract: a store does I/O and nothing else; which subnet a node gets is decided by ``routing.allocator``, what changed by
``routing.leaseset``. All methods may be called from one event loop; a store that blocks does so in a thread of its own.

`SubnetStore` is what a node needs, `Registry` what the operator's commands need besides; ``local`` and ``etcd`` are both.
"""

import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from routing.allocator import NoFreeSubnetError, Subnets
from routing.config import NetworkConfig
from routing.lease import Lease, LeaseAttributes

__all__ = [
    "LEASE_SECONDS",
    "UNKNOWN_EXPIRATION",
    "LeaseLostError",
    "NoFreeSubnetError",
    "Registry",
    "StoreAwayError",
    "StoreError",
    "SubnetStore",
]


LEASE_SECONDS = 24 * 3600.0
"""How long a lease lasts, as in flannel."""

UNKNOWN_EXPIRATION = math.inf
"""The expiration of a lease that ends at a time that nobody asked the store for; None would make a reservation of it."""


class StoreError(Exception):
    """The store cannot do what was asked; the text says what, where, and what to do."""


class StoreAwayError(StoreError):
    """The store does not answer, or not now: trying again later makes sense."""


class LeaseLostError(StoreError):
    """The node's own lease is gone from the store or belongs to somebody else."""


class SubnetStore(Protocol):
    """A store of leases, as one node sees it."""

    async def config(self) -> NetworkConfig:
        """The network configuration. Raises StoreError if there is none, ConfigError if it cannot be used."""

    async def acquire(self, config: NetworkConfig, attributes: LeaseAttributes, previous: Subnets) -> Lease:
        """Take a lease for the node `attributes`, which `previous` subnets are a hint for.

        The lease exists in the store, durably, when this returns. Raises StoreError, NoFreeSubnetError.
        """

    async def renew(self, lease: Lease) -> Lease:
        """`lease` with a later expiration; a reservation comes back unchanged. Raises LeaseLostError, StoreError."""

    async def update(self, lease: Lease, attributes: LeaseAttributes) -> Lease:
        """`lease`, which is ours, with other `attributes` (a new PublicIP, say) and the same subnets; its end stays where
        it is or moves to later.

        Raises LeaseLostError, StoreError; StoreError as well if another lease has the new public address.
        """

    async def release(self, lease: Lease) -> None:
        """Give `lease` back; a reservation, and a lease that is no longer ours, stay as they are. Raises StoreError."""

    def watch(self) -> AsyncIterator[Sequence[Lease]]:
        """All valid leases now, the caller's own included, and again whenever they changed; never ends by itself.

        The first look raises StoreError if it fails; later trouble does not end the watch: what is known stays, `report`
        tells since when, and once the store is back a snapshot follows if anything changed. Of expirations a watch tells
        only whether there is one: it may be `UNKNOWN_EXPIRATION`.
        """

    def report(self) -> dict[str, Any]:
        """What there is to say in `status`, as plain data for JSON, at least: `kind`; `away_since`, seconds since the
        epoch, None while the store answers; `skipped`, how many keys or values now in the store are no leases.
        """

    async def close(self) -> None:
        """Give connections back; leases stay. May be called twice."""


class Registry(Protocol):
    """A store of leases, as its operator sees it."""

    async def list_leases(self) -> Sequence[Lease]:
        """All valid leases by key, with their true expirations. Raises StoreError."""

    async def reserve(self, subnets: Subnets, attributes: LeaseAttributes | None) -> Lease:
        """Make the lease of `subnets` a reservation, which never ends: the one that is there, with the attributes that it
        has, or a new one of the node `attributes`.

        Raises StoreError if there is none and no `attributes` are given, if there is one of another node than `attributes`,
        or if `subnets` do not fit the configuration or overlap another lease.
        """

    async def remove(self, subnets: Subnets) -> Lease:
        """Remove the lease or reservation of `subnets`, whoever holds it; returns what it was. Raises StoreError."""

    async def config_text(self) -> str:
        """The network configuration as it is stored. Raises StoreError if there is none."""

    async def write_config(self, text: str) -> None:
        """Store `text` as the network configuration, in place of what is there. Raises ConfigError, StoreError."""
