"""Where leases and the network configuration are kept: one protocol, several implementations, one conformance suite.

Contract: a store does I/O and nothing else; which subnet a node gets is decided by ``routing.allocator``, what changed by
``routing.leaseset``. All methods may be called from one event loop; a store that blocks does so in a thread of its own.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from routing.allocator import NoFreeSubnetError, Subnets
from routing.config import NetworkConfig
from routing.lease import Lease, LeaseAttributes

__all__ = ["LEASE_SECONDS", "LeaseLostError", "NoFreeSubnetError", "StoreError", "SubnetStore"]


LEASE_SECONDS = 24 * 3600.0
"""How long a lease lasts, as in flannel."""


class StoreError(Exception):
    """The store cannot do what was asked; the text says what, where, and what to do."""


class LeaseLostError(StoreError):
    """The node's own lease is gone from the store or belongs to somebody else."""


class SubnetStore(Protocol):
    """A store of leases."""

    async def config(self) -> NetworkConfig:
        """The network configuration. Raises StoreError if there is none, ConfigError if it cannot be used."""

    async def acquire(self, config: NetworkConfig, attributes: LeaseAttributes, previous: Subnets) -> Lease:
        """Take a lease for the node `attributes`, which `previous` subnets are a hint for.

        The lease exists in the store, durably, when this returns. Raises StoreError, NoFreeSubnetError.
        """

    async def renew(self, lease: Lease) -> Lease:
        """`lease` with a later expiration; a reservation comes back unchanged. Raises LeaseLostError, StoreError."""

    async def release(self, lease: Lease) -> None:
        """Give `lease` back; a reservation, and a lease that is no longer ours, stay as they are. Raises StoreError."""

    def watch(self) -> AsyncIterator[Sequence[Lease]]:
        """All valid leases now, the caller's own included, and again whenever they changed; never ends by itself."""
